"""Draft tokens of a trained model on realistic tasks: their acceptance and their gain.

    python -m benchmarks.trained_model train /tmp/small-lm                    # 5 minutes and compiling
    python -m benchmarks.trained_model measure /tmp/small-lm --context 16384 --num-gpu-blocks 4
    python -m benchmarks.trained_model measure /tmp/small-lm --context 131072 --num-gpu-blocks 16 --tasks rewrite

Random weights say nothing about how often draft tokens are accepted. So `train` trains a Qwen3 of 57 million
parameters, whose tokens are bytes, on the Python sources of installed packages: first on short pieces, then on long
sequences with much repetition. It writes an ordinary checkpoint without a tokenizer.

`measure` answers prompts from the standard library, which is not in the training data, once with each drafter:

    continue   a file that is cut off
    rewrite    a file once more with a few words renamed, after its beginning
    quote      a passage from the second half of the prompt, after its first 128 bytes
    far        the same, from the second eighth of the prompt

Answers must be equal to the answers without draft tokens. In bf16 a product with several rows is rounded differently,
so different answers are counted; in fp32 (--dtype float32) a different answer is an error. The last line is JSON.
"""

import argparse
import importlib.util
import keyword
import math
import random
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from benchmarks.common import greedy, serve
from benchmarks.reporting import Samples, report, run_options, versions
from nanovllm import LLM, SamplingParams
from nanovllm.utils.arithmetic import ceil_div

END_TOKEN_ID = 256  # after each file; the other token ids are bytes
VOCAB_SIZE = 320
PACKAGES = ("torch", "transformers", "sympy", "numpy", "pandas", "scipy")  # the installed ones are used
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}
SHORT_CONTEXT, LONG_CONTEXT, BATCH_TOKENS = 2048, 16384, 65536
SHORT_SHARE = 0.65  # share of the training time
ROPE_THETA = 1e6
CUE_TOKENS = 128
WARM_UP_TOKENS = 64
TASKS = ("continue", "rewrite", "quote", "far")
DRAFTERS = ("off", "prompt_lookup", "resident", "shadow-4", "shadow-3", "auto")

Tokens = list[int]


# -- text ----------------------------------------------------------------------------------------------------------


def contents(paths: Iterable[Path]) -> list[bytes]:
    """Return each content once, in the order of the paths."""
    found = dict.fromkeys(path.read_bytes() for path in sorted(paths) if path.is_file())
    return [content for content in found if content.strip()]


def library_files() -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    return contents(path for path in root.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(root).parts))


def package_files() -> list[bytes]:
    """Return the files of installed packages without copies of the standard library's."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    roots = [Path(root) for spec in specs if spec for root in spec.submodule_search_locations or ()]
    held_out = set(library_files())
    return [content for root in roots for content in contents(root.rglob("*.py")) if content not in held_out]


def tokens_of(files: Iterable[bytes]) -> Tokens:
    return [token_id for content in files for token_id in (*content, END_TOKEN_ID)]


def line_start(content: bytes, position: int) -> int:
    return content.rfind(b"\n", 0, position) + 1


def renamed(rng: random.Random, content: bytes, num_words: int = 4) -> bytes:
    """Return a copy in which up to `num_words` words that occur often have new names, made of two words of the text."""
    word = re.compile(rb"[A-Za-z_]\w{3,}")
    fixed = {name.encode() for name in (*keyword.kwlist, "self")}
    candidates = sorted(w for w, count in Counter(word.findall(content)).items() if count >= 3 and w not in fixed)
    chosen = rng.sample(candidates, min(num_words, len(candidates)))
    names = {old: rng.choice(candidates) + b"_" + old for old in chosen}
    return word.sub(lambda match: names.get(match[0], match[0]), content)


# -- training ------------------------------------------------------------------------------------------------------


def long_sequence(rng: random.Random, files: list[bytes], num_tokens: int) -> Tokens:
    """Join neighbouring files, copies of them with renamed words, and quotes from them."""
    file_idx, pieces, tokens = rng.randrange(len(files)), [], Tokens()
    while len(tokens) < num_tokens:
        kind = rng.random() if pieces else 1.0
        if kind < 0.25:
            piece = renamed(rng, rng.choice(pieces))
        elif kind < 0.5:
            source = rng.choice(pieces)
            start = line_start(source, rng.randrange(len(source)))
            piece = source[start : start + rng.randint(200, 2000)]
        else:
            content = files[file_idx % len(files)]
            start = line_start(content, rng.randrange(max(len(content) - num_tokens // 4, 0) + 1))
            piece = content[start : start + num_tokens // 4]
            pieces.append(piece)
            file_idx += 1
        tokens += tokens_of([piece])
    return tokens[:num_tokens]


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train with AdamW for --minutes, and save in bf16. Returns the losses in bits per byte."""
    rng, files = random.Random(args.seed), package_files()
    torch.manual_seed(args.seed)
    end = torch.tensor([END_TOKEN_ID], dtype=torch.int16)
    pieces = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in rng.sample(files, len(files))]
    shuffled = torch.cat([part for piece in pieces for part in (piece.short(), end)])
    model = transformers.Qwen3ForCausalLM(model_config(args.num_layers, args.hidden_size)).to(args.device)
    if args.device != "cpu":
        for layer in model.model.layers:
            layer.compile(dynamic=False)

    def short_batch() -> torch.Tensor:
        starts = [rng.randrange(len(shuffled) - SHORT_CONTEXT) for _ in range(args.batch_tokens // SHORT_CONTEXT)]
        return torch.stack([shuffled[start : start + SHORT_CONTEXT + 1] for start in starts])

    def long_batch() -> torch.Tensor:
        num_seqs = max(1, args.batch_tokens // LONG_CONTEXT)
        return torch.tensor([long_sequence(rng, files, LONG_CONTEXT + 1) for _ in range(num_seqs)])

    parameters = [[p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    groups = [{"params": each, "weight_decay": decay} for each, decay in zip(parameters, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=args.device != "cpu")
    result = run_options(args) | versions() | {"num_train_bytes": len(shuffled)}
    for name, next_batch, minutes, rates in (
        ("short", short_batch, args.minutes * SHORT_SHARE, (1.5e-3, 5e-4)),
        ("long", long_batch, args.minutes * (1 - SHORT_SHARE), (5e-4, 0.0)),
    ):
        losses = run_phase(model, optimizer, next_batch, minutes, rates)
        result |= {f"{name}_steps": len(losses), f"{name}_bits_per_byte": sum(losses[-20:]) / len(losses[-20:])}
        print(f"{name}: {len(losses)} steps, {result[f'{name}_bits_per_byte']:.3f} bits per byte", flush=True)
    model.to(torch.bfloat16).save_pretrained(args.model)
    return result


def model_config(num_layers: int, hidden_size: int) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        eos_token_id=END_TOKEN_ID,
        attn_implementation="sdpa",
    )


def run_phase(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    next_batch: Callable[[], torch.Tensor],
    minutes: float,
    rates: tuple[float, float],
) -> list[float]:
    """Train with learning rates on a cosine from the first rate to the last. Returns the losses in bits per byte."""
    device = next(model.parameters()).device
    losses: list[float] = []
    start_s = time.perf_counter()
    while (progress := (time.perf_counter() - start_s) / (60 * minutes)) < 1:
        rate = rates[1] + (rates[0] - rates[1]) * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (len(losses) + 1) / 100)
        token_ids = next_batch().to(device).long()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            logits = model(token_ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), token_ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / math.log(2))
        if len(losses) == 1:
            start_s = time.perf_counter()  # the first step has compiled
    return losses


# -- tasks ---------------------------------------------------------------------------------------------------------


def make_prompt(task: str, rng: random.Random, files: list[bytes], num_tokens: int, num_answer_tokens: int) -> Tokens:
    """Return a prompt of `num_tokens` tokens, of which the answer goes on for at least `num_answer_tokens`."""
    if task in ("quote", "far"):
        first, last = (num_tokens // 2, num_tokens * 7 // 8) if task == "quote" else (num_tokens // 8, num_tokens // 4)
        while True:
            text = filler(rng, files, num_tokens - CUE_TOKENS)
            start = text.index(ord("\n"), rng.randrange(first, last)) + 1
            passage = text[start : start + CUE_TOKENS + num_answer_tokens]
            if END_TOKEN_ID not in passage:
                return text + passage[:CUE_TOKENS]
    while True:
        content = rng.choice(files)
        end = line_start(content, rng.randrange(len(content)))
        shown = content[:end]
        if task == "rewrite":
            copy = renamed(rng, content)
            end = line_start(copy, rng.randrange(len(copy) // 4 + 1, len(copy) // 2 + 2))
            shown, content = content, copy
        if len(content) - end < num_answer_tokens or not num_tokens // 8 <= len(shown) < num_tokens // 2:
            continue
        shown_tokens = tokens_of([shown])[:-1] if task == "continue" else tokens_of([shown]) + list(content[:end])
        return filler(rng, files, num_tokens - len(shown_tokens)) + shown_tokens


def filler(rng: random.Random, files: list[bytes], num_tokens: int) -> Tokens:
    """Return files in random order, the last of them cut off at its beginning."""
    tokens = Tokens()
    for content in rng.sample(files, len(files)):
        tokens = tokens_of([content]) + tokens
        if len(tokens) >= num_tokens:
            return tokens[len(tokens) - num_tokens :]
    raise ValueError(f"the standard library has fewer than {num_tokens} bytes here; give a shorter --context")


# -- measuring -----------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run one engine after another over the same prompts. `off` comes first; the others are compared with it."""
    files, prompts = library_files(), {}
    for task in args.tasks:
        rngs = [random.Random(f"{task} {i} {args.seed}") for i in range(args.prompts)]
        num_tokens = args.context - args.tokens
        prompts[task] = [make_prompt(task, rng, files, num_tokens, args.tokens) for rng in rngs]
    result = run_options(args) | versions() | {"rows": []}
    off: dict[tuple[str, float], dict[str, Any]] = {}
    for drafter in ("off", *(name for name in args.drafters if name != "off")):
        print(f"\n{drafter}", flush=True)
        for row in measure_drafter(args, drafter, prompts):
            plain = off.setdefault((row["task"], row["temperature"]), row)
            row["ratio_to_off"] = row["tok_per_s"] / plain["tok_per_s"]
            row["num_differing"] = sum(a != b for a, b in zip(row["answers"], plain["answers"], strict=True))
            share = (
                f"{row['share_right']:4.0%} right, {row['tokens_per_pass']:4.1f} a pass" if row["num_guesses"] else ""
            )
            print(
                f"{row['task']:9} T={row['temperature']:<4} {row['tok_per_s']:8.1f} tok/s {row['ratio_to_off']:6.2f} "
                f"times; {share}; {row['num_differing']} of {args.prompts} answers differ",
                flush=True,
            )
            result["rows"].append({name: value for name, value in row.items() if name != "answers"})
    return result


def measure_drafter(
    args: argparse.Namespace, drafter: str, prompts: dict[str, list[Tokens]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each task and temperature. The prefix cache keeps a prompt for the other temperatures."""
    name, _, bits = drafter.partition("-")
    options: dict[str, Any] = {"speculation": name, "max_model_len": args.context, "max_num_seqs": 1}
    if bits:
        options |= {"shadow_bits": int(bits)}
    if args.num_gpu_blocks:
        options |= {"enable_cpu_offload": True, "num_gpu_blocks": args.num_gpu_blocks, "kvcache_block_size": 1024}
        options |= {"num_cpu_blocks": ceil_div(args.context, 1024) + 1}
    if args.context > LONG_CONTEXT:
        factor = float(ceil_div(args.context, LONG_CONTEXT))
        rope = {"rope_type": "yarn", "rope_theta": ROPE_THETA, "factor": factor}
        options["hf_overrides"] = {"rope_parameters": rope | {"original_max_position_embeddings": LONG_CONTEXT}}
    with LLM(args.model, device=args.device, dtype=args.dtype, **options) as llm:
        serve(llm, [next(iter(prompts.values()))[0]], greedy(min(WARM_UP_TOKENS, args.tokens)))
        for task, its_prompts in prompts.items():
            rows: dict[float, list[dict[str, Any]]] = {temperature: [] for temperature in args.temperatures}
            for i, prompt in enumerate(its_prompts):
                for temperature, row in rows.items():
                    params = SamplingParams(temperature=temperature, seed=i, max_tokens=args.tokens, ignore_eos=True)
                    row.append(measure_answer(llm, prompt, params))
            for temperature, row in rows.items():
                yield {"drafter": drafter, "task": task, "temperature": temperature} | summary(row)


def measure_answer(llm: LLM, prompt: Tokens, params: SamplingParams) -> dict[str, Any]:
    """Return an answer, its rate after the first token, and the counts of draft tokens."""
    counted = ("num_passes", "num_guesses", "num_accepted")
    speculator: Any = llm.scheduler.speculator
    before = [getattr(speculator, name, 0) for name in counted]
    (output,), _ = serve(llm, [prompt], params)
    assert output["tpot_s"] is not None
    counts = {name: getattr(speculator, name, 0) - count for name, count in zip(counted, before, strict=True)}
    return {"answer": output["token_ids"], "tok_per_s": 1 / output["tpot_s"]} | counts


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    totals = {name: sum(row[name] for row in answers) for name in ("num_passes", "num_guesses", "num_accepted")}
    row = Samples(tuple(row["tok_per_s"] for row in answers)).as_json("tok_per_s") | totals
    row["share_right"] = totals["num_accepted"] / totals["num_guesses"] if totals["num_guesses"] else None
    row["tokens_per_pass"] = 1 + totals["num_accepted"] / totals["num_passes"] if totals["num_passes"] else None
    return row | {"answers": [row["answer"] for row in answers]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "measure"))
    parser.add_argument("model", metavar="DIR", help="the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    training = parser.add_argument_group("train")
    training.add_argument("--minutes", type=float, default=5)
    training.add_argument("--num-layers", type=int, default=16)
    training.add_argument("--hidden-size", type=int, default=512)
    training.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="tokens of a step")
    measuring = parser.add_argument_group("measure")
    measuring.add_argument("--context", type=int, default=16384, help="tokens of prompt and answer")
    measuring.add_argument("--num-gpu-blocks", type=int, default=4, help="slots of 1,024 tokens; 0: all on the GPU")
    measuring.add_argument("--dtype", default="auto")
    measuring.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=DRAFTERS)
    measuring.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    measuring.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    measuring.add_argument("--prompts", type=int, default=6, help="of each task")
    measuring.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    result = (train if args.action == "train" else measure)(args)
    report(result, args.json)
    return int(args.dtype == "float32" and any(row["num_differing"] for row in result.get("rows", ())))


if __name__ == "__main__":
    raise SystemExit(main())
