"""The offload sweep: prefill and decode over contexts and numbers of slots, as JSON and as a plot.

`bench_offload.py --sweep` measures it. If the machine has no matplotlib, `python -m benchmarks.sweep FILE.json` draws
the plot later, on another machine.
"""

import argparse
import gc
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Ceilings, Work, lengths_after_short_warm_up, time_prompts
from nanovllm import LLM
from nanovllm.capacity.costs import num_missing_blocks
from nanovllm.utils.arithmetic import ceil_div

NUM_RUNS = 2
NUM_DECODED = 64
DEFAULT_FILE = "benchmarks/results/offload_sweep.json"

Point = dict[str, Any]


def run_sweep(
    args: argparse.Namespace, ceilings: Ceilings, header: dict[str, Any], make_llm: Callable[..., LLM]
) -> dict[str, Any]:
    """Measure every point, and the all-GPU engine once per context. The file is written after each point.

    With --cpu-attention both, every number of slots is measured with the link alone, and then with the CPU beside it.
    """
    path = Path(args.json or DEFAULT_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    points: list[Point] = []
    modes = ("off", "auto") if args.cpu_attention == "both" else (args.cpu_attention,)
    engines = [(None, ""), *((num_slots, mode) for num_slots in args.sweep_slots for mode in modes)]
    for context in args.sweep_contexts:
        for num_slots, cpu_attention in engines:
            point = _measure_point(args, ceilings, make_llm, context, num_slots, cpu_attention)
            if num_slots is None:
                gpu = point
            else:
                for kind in ("prefill", "decode"):
                    point[f"{kind}_ratio_to_gpu"] = point[f"{kind}_tok_per_s"] / gpu[f"{kind}_tok_per_s"]
            _print_point(point)
            points.append(point)
            path.write_text(json.dumps(header | {"points": points}) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no matplotlib here; draw the plot elsewhere: python -m benchmarks.sweep {path}")
    else:
        print(f"plot: {plot(path)}")
    return header | {"points": points}


def _measure_point(
    args: argparse.Namespace,
    ceilings: Ceilings,
    make_llm: Callable[..., LLM],
    context: int,
    num_slots: int | None,
    cpu_attention: str,
    num_decoded: int = NUM_DECODED,
) -> Point:
    """Measure one engine with `num_slots` slots, or with everything on the GPU for None."""
    gc.collect()
    torch.cuda.empty_cache()
    options: dict[str, Any] = {}
    if num_slots is not None:
        num_cpu_blocks = ceil_div(context, args.block_size) + 1
        options = {"enable_cpu_offload": True, "num_gpu_blocks": num_slots, "num_cpu_blocks": num_cpu_blocks}
        options |= {"kvcache_block_size": args.block_size, "cpu_attention": cpu_attention}
    num_tokens = context - num_decoded
    lengths = lengths_after_short_warm_up(num_tokens, NUM_RUNS, num_slots or 0, args.block_size)
    with make_llm(args, context, **options) as llm:
        times = time_prompts(llm, lengths, num_decoded, seed=context)
        prefill_bound = Work(llm).prefill_bound(ceilings, num_tokens)
        stats = llm.stats()
        peak = torch.cuda.max_memory_allocated()
    point: Point = {"context": context, "num_gpu_blocks": num_slots, "peak_bytes": peak}
    point |= times.prefill.as_json("prefill_tok_per_s") | times.decode.as_json("decode_tok_per_s")
    point |= times.second_question.as_json("second_question_ttft_ratio")
    point |= {"prefill_bound_tok_per_s": prefill_bound, "prefill_bound_share": times.prefill.median / prefill_bound}
    if num_slots is not None:
        missing = num_missing_blocks(context, args.block_size, num_slots)
        point |= {"num_missing_blocks": missing, "cpu_attention": cpu_attention}
        point |= {name: stats[name] for name in ("load_byte_per_s", "cpu_load_byte_per_s")}
        if missing:  # each rank brings in its own heads over its own link
            bound = ceilings.link_byte_per_s / (missing * stats["block_bytes"])
            point |= {"link_bound_decode_tok_per_s": bound, "link_share": point["decode_tok_per_s"] / bound}
            cpu_byte_per_s = stats["cpu_attention_byte_per_s"] or 0.0  # beside the link
            point["bound_decode_tok_per_s"] = bound * (1 + cpu_byte_per_s / ceilings.link_byte_per_s)
    return point


def _print_point(point: Point) -> None:
    slots = "all-GPU" if point["num_gpu_blocks"] is None else f"{point['num_gpu_blocks']:2} slots"
    slots += ", CPU" if _uses_cpu(point) else ""
    line = f"{point['context']:>7} {slots:13} prefill {point['prefill_tok_per_s']:>9,.0f} tok/s"
    line += f" ({point['prefill_bound_share']:.0%} of the arithmetic)"
    line += f"  decode {point['decode_tok_per_s']:>6.1f} tok/s  peak {point['peak_bytes'] / 2**30:.2f} GiB"
    if point["num_gpu_blocks"] is not None:
        line += f"  ratio {point['prefill_ratio_to_gpu']:.3f} and {point['decode_ratio_to_gpu']:.3f}"
    if "bound_decode_tok_per_s" in point:
        bound = point["bound_decode_tok_per_s"]
        line += f"  bound {bound:.1f}, reached {point['decode_tok_per_s'] / bound:.0%}"
    print(line, flush=True)


def _uses_cpu(point: Point) -> bool:
    """Older results have no such entry."""
    return point.get("cpu_attention", "off") in ("auto", "on")


# -- the plot ----------------------------------------------------------------------------------------------------


def plot(path: Path) -> Path:
    """Draw the sweep in `path` to a PNG next to it, and return its path. Needs matplotlib (the extra `bench`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = json.loads(path.read_text())
    points: list[Point] = result["points"]
    figure, (decode, prefill) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    _line(decode, [p for p in points if p["num_gpu_blocks"] is None], "decode_tok_per_s", "all on the GPU", "black")
    for i, num_slots in enumerate(sorted({p["num_gpu_blocks"] for p in points} - {None})):
        for with_cpu, bound, style, colour in (
            (False, "link_bound_decode_tok_per_s", ":", f"C{2 * i}"),
            (True, "bound_decode_tok_per_s", "--", f"C{2 * i + 1}"),
        ):
            some = [p for p in points if p["num_gpu_blocks"] == num_slots and _uses_cpu(p) == with_cpu]
            if not some:
                continue
            name = f"{num_slots} slots" + (" and the CPU" if with_cpu else "")
            _line(decode, some, "decode_tok_per_s", name, colour)
            decode.plot(*_xy([p for p in some if bound in p], bound), style, color=colour, linewidth=1)
            _line(prefill, some, "prefill_ratio_to_gpu", name, colour)
    decode.plot([], [], ":", color="grey", linewidth=1, label="bound: link / missing bytes")
    if any(_uses_cpu(p) for p in points):
        decode.plot([], [], "--", color="grey", linewidth=1, label="bound: link and CPU / missing bytes")
    prefill.axhline(1, linestyle="--", color="grey", linewidth=1, label="bound: all on the GPU")
    decode.set(title="Decode", ylabel="tok/s", yscale="log")
    prefill.set(title="Prefill, relative to all-GPU", ylabel="ratio")
    prefill.set_ylim(0, max(1.1, prefill.get_ylim()[1]))
    contexts = sorted({p["context"] for p in points})
    for axes in (decode, prefill):
        axes.set(xscale="log", xlabel="context, tokens")
        axes.set_xticks(contexts, [f"{math.floor(c / 1024)}K" for c in contexts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    link = f"link {result['link_byte_per_s'] / 1e9:.1f} GB/s, blocks of {result['block_size']} tokens"
    figure.suptitle(f"{result['model']} on {result['gpu']}, {link}", fontsize=11)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


def _xy(points: list[Point], key: str) -> tuple[list[int], list[float]]:
    return [p["context"] for p in points], [p[key] for p in points]


def _line(axes: Any, points: list[Point], key: str, name: str, colour: str) -> None:
    axes.plot(*_xy(points, key), "o-", color=colour, label=name, markersize=4)


if __name__ == "__main__":
    print(plot(Path(sys.argv[1])))
