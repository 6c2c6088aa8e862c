"""Decode with guesses on tasks that people have (task_prompts.py), by a trained model: how fast, how often right.

    python -m benchmarks.train_small_lm --out /tmp/small-lm          # the model
    python -m benchmarks.bench_tasks --model /tmp/small-lm --contexts 16384 --slots 4 --json tasks.json
    python -m benchmarks.bench_tasks --model /tmp/small-lm --contexts 131072 --yarn-from 16384 --slots 16 --tasks far

Every prompt is answered once per temperature by every drafter, with room for so many blocks on the GPU (--slots; 0: all
keys on the GPU, where `resident` has nothing to do). There is a new engine for every context, number of slots and
drafter. It measures how long its own steps take, and that depends on the context. The answers must be those without
speculation. In fp32 (--dtype float32) an answer that differs is an error. In bf16 the products of several tokens round
differently from those of one, so such answers are counted.

"right" is the median number of tokens that go on as the task asks: it says whether the model does the task at all.
--attention-mass also compares ways to choose the keys that drafts attend to (attention_mass.py). The last line is JSON,
and --json always has what has been measured so far.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_mass import compare_choices
from benchmarks.common import greedy, serve
from benchmarks.held_out import yarn
from benchmarks.python_sources import library_files
from benchmarks.reporting import Samples, report, run_options, versions
from benchmarks.task_prompts import TASKS, TaskPrompt, make_prompts
from nanovllm import LLM, SamplingParams
from nanovllm.capacity.costs import num_missing_blocks
from nanovllm.config import SPECULATION
from nanovllm.engine.internals import Internals
from nanovllm.utils.arithmetic import ceil_div

WARM_UP_TOKENS = 32
Prompts = dict[str, list[TaskPrompt]]  # by task
Point = dict[str, Any]  # the figures of one task, temperature, drafter, number of slots and context


def run(args: argparse.Namespace, internals: Internals = Internals()) -> dict[str, Any]:
    """All engines one after another. `internals` is for tests."""
    files = library_files()
    result = run_options(args) | versions() | {"points": [], "choices": []}
    if torch.cuda.is_available():
        result["gpu"] = torch.cuda.get_device_name()
    for context in args.contexts:
        num_tokens = context - args.tokens
        prompts = {
            task: make_prompts(task, files, num_tokens, args.prompts, args.tokens, args.seed) for task in args.tasks
        }
        for num_slots in args.slots:
            for point in run_drafters(args, prompts, context, num_slots, internals):
                result["points"].append(point)
                print_point(point)
                if args.json:  # so that a run that is cut short leaves what it has measured
                    Path(args.json).write_text(json.dumps(result) + "\n")
        if args.attention_mass:
            result["choices"] += [{"context": context} | row for row in compare_choices(args, prompts)]
    result["num_differing"] = sum(point["num_differing"] for point in result["points"])
    return result


def run_drafters(
    args: argparse.Namespace, prompts: Prompts, context: int, num_slots: int, internals: Internals
) -> Iterator[Point]:
    """One engine after another over the same prompts. `off` comes first, because the others are compared with it."""
    plain: dict[tuple[str, float], tuple[list[list[int]], float]] = {}  # answers and rate, by task and temperature
    for drafter in ("off", *(name for name in args.drafters if name != "off")):
        if drafter == "resident" and not num_slots:
            continue
        with make_llm(args, context, num_slots, drafter, internals) as llm:
            where = {"context": context, "num_slots": num_slots, "drafter": drafter} | link_bound(llm, context)
            print(f"\n{where}", flush=True)
            warm_up = next(iter(prompts.values()))[0].token_ids
            serve(llm, [warm_up], greedy(min(WARM_UP_TOKENS, args.tokens)))
            for task, temperature, rows in measure_tasks(llm, prompts, args):
                point = where | {"task": task, "temperature": temperature} | summary(rows)
                answers = [row["answer"] for row in rows]
                expected, rate = plain.setdefault((task, temperature), (answers, point["tok_per_s"]))
                point["ratio_to_off"] = point["tok_per_s"] / rate
                point["num_differing"] = sum(a != b for a, b in zip(answers, expected, strict=True))
                yield point
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def make_llm(args: argparse.Namespace, context: int, num_slots: int, drafter: str, internals: Internals) -> LLM:
    options: dict[str, Any] = {"speculation": drafter, "max_model_len": context, "max_num_seqs": 1}
    if num_slots:
        options |= {"enable_cpu_offload": True, "num_gpu_blocks": num_slots, "kvcache_block_size": args.block_size}
        options |= {"num_cpu_blocks": ceil_div(context, args.block_size) + 1}
        options |= {"cpu_attention": args.cpu_attention}
    if args.yarn_from and context > args.yarn_from:
        options["hf_overrides"] = yarn(args.yarn_from, context)
    return LLM(args.model, device=args.device, dtype=args.dtype, internals=internals, **options)


def link_bound(llm: LLM, context: int) -> dict[str, Any]:
    """The bound on decode without guesses: a missing block crosses the link, or the CPU attends to it."""
    stats, config = llm.stats(), llm.config
    missing = num_missing_blocks(context, config.block_size, config.num_gpu_blocks) if config.num_gpu_blocks else 0
    result: dict[str, Any] = {"num_missing_blocks": missing}
    if missing and stats["link_byte_per_s"] is not None:
        rate = stats["link_byte_per_s"] + (stats["cpu_attention_byte_per_s"] or 0.0)
        result["bound_off_tok_per_s"] = rate / (missing * stats["block_bytes"])
    return result


def measure_tasks(
    llm: LLM, prompts: Prompts, args: argparse.Namespace
) -> Iterator[tuple[str, float, list[dict[str, Any]]]]:
    """Yields task, temperature and the figures of each prompt. All temperatures run right after a prompt's first."""
    for task, its_prompts in prompts.items():
        rows: dict[float, list[dict[str, Any]]] = {temperature: [] for temperature in args.temperatures}
        for i, prompt in enumerate(its_prompts):
            for temperature in args.temperatures:
                params = SamplingParams(
                    temperature=temperature, seed=args.seed + i, max_tokens=args.tokens, ignore_eos=True
                )
                rows[temperature].append(measure(llm, prompt, params))
        for temperature, its_rows in rows.items():
            yield task, temperature, its_rows


def measure(llm: LLM, prompt: TaskPrompt, params: SamplingParams) -> dict[str, Any]:
    """The answer to one prompt, its rate after the first token, and what became of the guesses."""
    before = guess_counts(llm)
    (output,), _ = serve(llm, [prompt.token_ids], params)
    assert output["tpot_s"] is not None, f"an answer of {len(output['token_ids'])} tokens has no rate"
    counts = {name: count - before[name] for name, count in guess_counts(llm).items()}
    num_right = prompt.num_right(output["token_ids"])
    return {"answer": output["token_ids"], "tok_per_s": 1 / output["tpot_s"], "num_right": num_right} | counts


def guess_counts(llm: LLM) -> dict[str, int]:
    """Passes are steps with guesses."""
    speculator = llm.scheduler.speculator
    names = ("num_passes", "num_guesses", "num_accepted")
    return {name: 0 if speculator is None else getattr(speculator, name) for name in names}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one task at one temperature, over all its prompts."""
    num_passes, num_guesses, num_accepted = (
        sum(row[name] for row in rows) for name in ("num_passes", "num_guesses", "num_accepted")
    )
    result: dict[str, Any] = Samples(tuple(row["tok_per_s"] for row in rows)).as_json("tok_per_s")
    result |= {"num_passes": num_passes, "num_guesses": num_guesses, "num_accepted_guesses": num_accepted}
    result["guess_acceptance"] = num_accepted / num_guesses if num_guesses else None
    result["tokens_per_pass"] = 1 + num_accepted / num_passes if num_passes else None
    result["num_right_tokens"] = statistics.median(row["num_right"] for row in rows)
    return result | {"num_prompts": len(rows)}


def print_point(point: dict[str, Any]) -> None:
    text = f"{point['task']:9} T={point['temperature']:<4} {point['tok_per_s']:8.1f} tok/s "
    text += f"({point['tok_per_s_min']:.1f} to {point['tok_per_s_max']:.1f}), {point['ratio_to_off']:5.2f} times"
    if point["num_guesses"]:
        text += f"; {point['guess_acceptance']:4.0%} of guesses right, {point['tokens_per_pass']:4.1f} tok/pass"
    print(f"{text}; right {point['num_right_tokens']:g}; {point['num_differing']} differ", flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="written by benchmarks.train_small_lm")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="float32: every answer must be that without speculation")
    parser.add_argument("--contexts", type=int, nargs="+", default=[16384], help="tokens of prompt and answer")
    parser.add_argument("--slots", type=int, nargs="+", default=[4], help="blocks on the GPU; 0: all")
    parser.add_argument("--block-size", type=int, default=1024, help="tokens per block")
    parser.add_argument("--cpu-attention", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--yarn-from", type=int, metavar="N", help="extend the rope beyond N tokens by YaRN")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--drafters", nargs="+", default=list(SPECULATION), choices=SPECULATION)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--prompts", type=int, default=3, help="prompts per task")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and of sampling")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    parser.add_argument("--attention-mass", action="store_true", help="also compare drafts by attention mass")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    result = run(args)
    is_wrong = args.dtype == "float32" and result["num_differing"] > 0
    if is_wrong:
        print(f"{result['num_differing']} answers differ from those without speculation, which must not be in fp32")
    report(result, args.json)
    return 1 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
