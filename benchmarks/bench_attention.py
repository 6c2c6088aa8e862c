"""Compares the attention backends with the limits of the GPU: prefill, chunks at 40K, decode with one query or a few.

    python benchmarks/bench_attention.py            # every backend that can run here
    python benchmarks/bench_attention.py --smoke    # tiny lengths on CPU: does it run?
    python -m benchmarks.bench_attention --target 8.9 --backend triton --backend flash
                                                    # the kernels for an RTX 40 and flash-attn 2, on this GPU

The first line has the measured bounds, the last line is JSON. FLOPs count only visible keys; bytes are K and V read
once. If flash-attn 2 runs too, the rates of the other backends are also given relative to it.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.common import measure_ceilings
from benchmarks.reporting import report, versions
from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch
from nanovllm.attention.selection import BACKENDS, choose_backend
from nanovllm.device.kernel_target import KNOWN_TARGETS
from nanovllm.utils.arithmetic import ceil_div

NUM_RUNS = 7
HEAD_DIM, SCALE = 128, 128**-0.5
MODELS = {"Qwen3-0.6B": (16, 8), "Qwen3-8B": (32, 8), "Qwen2.5-7B": (28, 4)}  # query heads, kv heads
MAX_VERIFIED = 16  # queries of a sequence up to which reading the keys takes longest
Row = dict[str, Any]


class Workload(NamedTuple):
    name: str
    num_sequences: int
    query_len: int
    context_len: int

    def rate(self, heads: tuple[int, int], seconds: float) -> tuple[str, float]:
        """The rate in the unit of its bound: TFLOP/s for many queries, TB/s of K and V for a few
        queries per sequence.
        """
        if self.query_len <= MAX_VERIFIED:
            return "tb_per_s", 2.0 * 2 * self.num_sequences * self.context_len * heads[1] * HEAD_DIM / seconds / 1e12
        visible = self.query_len * (self.context_len - self.query_len) + self.query_len * (self.query_len + 1) / 2
        return "tflop_per_s", 4.0 * self.num_sequences * heads[0] * HEAD_DIM * visible / seconds / 1e12


WORKLOADS = [
    Workload("prefill 4096", 1, 4096, 4096),
    Workload("chunk 8192 at 40960", 1, 8192, 40960),
    Workload("chunk 8191 at 40959", 1, 8191, 40959),  # lengths that cuDNN has no plan for
    Workload("chunk 16384 at 40960", 1, 16384, 40960),
    Workload("chunk 16351 at 32503", 1, 16351, 32503),  # lengths that fit no call of cuDNN
    Workload("chunk 250 at 65536", 1, 250, 65536),
    Workload("prefill 16 x 1000", 16, 1000, 1000),
    Workload("decode 1 x 40960", 1, 1, 40960),
    Workload("decode 8 x 40960", 8, 1, 40960),
    Workload("decode 256 x 1024", 256, 1, 1024),
]
VERIFICATIONS = [Workload(f"{n} queries at {length}", 1, n, length) for length in (40960, 131072) for n in (1, 4, 16)]


def time_ms(device: torch.device, run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a call; the first call, which compiles or plans, is separate."""
    start_s = time.perf_counter()
    run()
    if device.type != "cuda":
        first_ms = (time.perf_counter() - start_s) * 1e3
        return dict.fromkeys(("median_ms", "min_ms", "max_ms", "first_ms"), first_ms)
    torch.cuda.synchronize()
    first_ms = (time.perf_counter() - start_s) * 1e3
    run()
    times = []
    for _ in range(NUM_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # keep the GPU busy until the launches below are queued
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times), "first_ms": first_ms}


def make_inputs(
    work: Workload, heads: tuple[int, int], args: argparse.Namespace, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
    """Make random queries, both caches, and the batch."""
    blocks_each = ceil_div(work.context_len, args.block_size)
    num_blocks = blocks_each * work.num_sequences
    ids = torch.randperm(num_blocks) if args.order == "random" else torch.arange(num_blocks)
    tables = ids.view(work.num_sequences, blocks_each).int()
    query_lens, context_lens = ([n] * work.num_sequences for n in (work.query_len, work.context_len))
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        max_query_len=work.query_len,
        max_context_len=work.context_len,
        causal=True,
        host=HostTables(query_lens, context_lens, tables.tolist()),
    )
    cache_shape = (num_blocks, args.block_size, heads[1], HEAD_DIM)
    shapes = ((work.num_sequences * work.query_len, heads[0], HEAD_DIM), cache_shape, cache_shape)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    return q, k, v, batch


def bench_backends(
    backends: list[AttentionBackend], works: list[Workload], models: list[str], bounds: Row, args: argparse.Namespace
) -> list[Row]:
    rows = []
    for model, work in itertools.product(models, works):
        q, k, v, batch = make_inputs(work, MODELS[model], args, args.device)
        for backend in backends:
            ms = time_ms(args.device, partial(backend.attend, q, k, v, batch, SCALE))
            key, rate = work.rate(MODELS[model], ms["median_ms"] / 1e3)
            share = rate / bounds[key] if bounds else 0.0
            times = f"{ms['median_ms']:.3f} ms [{ms['min_ms']:.3f}, {ms['max_ms']:.3f}], first {ms['first_ms']:.0f}"
            print(f"{model:11} {work.name:22} {backend.name:7} {rate:8.2f} {key:11} {share:5.0%} of bound  {times}")
            row = {"model": model, "workload": work.name, "backend": backend.name}
            rows.append(row | {key: rate, "share_of_bound": share, **ms})
    return rows


def add_shares_of_flash(rows: list[Row]) -> dict[str, float]:
    """Add each row's rate relative to flash-attn 2. Returns the smallest relative rate of each backend."""
    flash_ms = {(row["model"], row["workload"]): row["median_ms"] for row in rows if row["backend"] == "flash"}
    others = [row for row in rows if row["backend"] != "flash" and (row["model"], row["workload"]) in flash_ms]
    smallest: dict[str, float] = {}
    for row in others:
        row["share_of_flash"] = flash_ms[row["model"], row["workload"]] / row["median_ms"]
        key = f"{row['backend']}_share_of_flash"
        smallest[key] = min(row["share_of_flash"], smallest.get(key, row["share_of_flash"]))
        print(f"{row['model']:11} {row['workload']:22} {row['backend']:7} {row['share_of_flash']:5.2f} of flash")
    return smallest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=sorted(BACKENDS), help="repeat for more")
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument(
        "--order", choices=["adjacent", "random"], default="adjacent", help="order of the blocks in a table"
    )
    parser.add_argument("--target", choices=sorted(KNOWN_TARGETS), help="run the kernels for this compute capability")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --smoke runs tiny lengths on the CPU")
    if args.target:
        from benchmarks.forced_target import force_target

        force_target(args.target)
    args.device = torch.device("cpu" if args.smoke else "cuda")
    bounds: Row = {}
    if not args.smoke:
        ceilings = measure_ceilings()
        bounds = {"tflop_per_s": ceilings.matmul_flop_per_s / 1e12, "tb_per_s": ceilings.memory_byte_per_s / 1e12}
    print(f"bounds: {bounds}")
    result: Row = versions() | {"target": args.target, "bounds": bounds, "block_size_tokens": args.block_size}
    result["device"] = "cpu" if args.smoke else torch.cuda.get_device_name()
    names = args.backend or (["torch"] if args.smoke else ["triton", "flash", "cudnn"])
    possible = [n for n in names if BACKENDS[n].why_unavailable(args.device, torch.bfloat16, HEAD_DIM) is None]
    backends = [choose_backend(name, args.device, torch.bfloat16, HEAD_DIM, enforce_eager=True) for name in possible]
    works, verifications = WORKLOADS, VERIFICATIONS
    if args.smoke:
        works = verifications = [Workload(f"{n} queries of 300", 2, n, 300) for n in (1, 5, 20)]
    rows = bench_backends(backends, works, list(MODELS), bounds, args)
    shares = add_shares_of_flash(rows)
    rows += bench_backends(backends, verifications, ["Qwen3-0.6B"], bounds, args)
    report(result | shares | {"rows": rows}, None)


if __name__ == "__main__":
    main()
