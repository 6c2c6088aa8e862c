"""Compares the attention backends with the limits of the GPU: prefill, chunks at 40K, decode with one query or a few.

    python benchmarks/bench_attention.py            # every backend that can run here
    python benchmarks/bench_attention.py --tune     # compare tiles of our prefill and splits of our decode kernel
    python benchmarks/bench_attention.py --smoke    # tiny lengths on CPU: does it run?
    python -m benchmarks.bench_attention --target 8.9 --backend triton --backend flash
                                                    # the kernels for an RTX 40 and flash-attn 2, on this GPU

The first line has the measured bounds, the last line is JSON. FLOPs count only visible keys; bytes are K and V read
once. If flash-attn 2 runs too, the rates of the other backends are also given relative to it.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.attention.backends.selection import BACKENDS, choose_backend
from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention
from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import KNOWN_TARGETS
from nanovllm.utils.arithmetic import ceil_div

NUM_RUNS = 7
HEAD_DIM = 128
MODELS = {"Qwen3-0.6B": (16, 8), "Qwen3-8B": (32, 8), "Qwen2.5-7B": (28, 4)}  # query heads, kv heads


@dataclass(frozen=True)
class Workload:
    name: str
    num_sequences: int
    query_len: int
    context_len: int

    def flops(self, num_heads: int) -> float:
        history = self.context_len - self.query_len
        visible = self.query_len * history + self.query_len * (self.query_len + 1) / 2
        return 4.0 * self.num_sequences * num_heads * HEAD_DIM * visible

    def kv_bytes(self, num_kv_heads: int) -> float:
        return 2.0 * 2 * self.num_sequences * self.context_len * num_kv_heads * HEAD_DIM


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


class Timer:
    """Times runs in milliseconds, the first one, which compiles or plans, apart from the others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, run: Callable[[], object], num_runs: int = NUM_RUNS) -> dict[str, float]:
        first_ms = self._wall_ms(run)
        run()
        times = [self._one_ms(run) for _ in range(num_runs)]
        return {
            "median_ms": statistics.median(times),
            "min_ms": min(times),
            "max_ms": max(times),
            "first_ms": first_ms,
        }

    def _wall_ms(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    def _one_ms(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            return self._wall_ms(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # keep the GPU busy until the launches below are queued
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


@dataclass(frozen=True)
class Inputs:
    q_THD: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: PagedBatch

    @property
    def scale(self) -> float:
        return HEAD_DIM**-0.5


def make_inputs(work: Workload, heads: tuple[int, int], args: argparse.Namespace, device: torch.device) -> Inputs:
    blocks_each = ceil_div(work.context_len, args.block_size)
    num_blocks = blocks_each * work.num_sequences
    ids = torch.randperm(num_blocks) if args.order == "random" else torch.arange(num_blocks)
    tables = ids.view(work.num_sequences, blocks_each).int()
    dtype = torch.bfloat16
    shape = (num_blocks, args.block_size, heads[1], HEAD_DIM)
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
    q = torch.randn(work.num_sequences * work.query_len, heads[0], HEAD_DIM, device=device, dtype=dtype)
    return Inputs(q, *(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)), batch)


def report(work: Workload, heads: tuple[int, int], ms: dict[str, float], bounds: dict[str, float]) -> dict[str, Any]:
    """The rate of a workload and its bound: arithmetic for many queries, bandwidth for one query per sequence."""
    seconds = ms["median_ms"] / 1e3
    if work.query_len > 1:
        rate, key, unit = work.flops(heads[0]) / seconds / 1e12, "tflop_per_s", "TFLOP/s"
    else:
        rate, key, unit = work.kv_bytes(heads[1]) / seconds / 1e12, "tb_per_s", "TB/s"
    share = rate / bounds[key]
    print(
        f"{rate:8.2f} {unit:8} {share:5.0%} of bound   {ms['median_ms']:8.3f} ms "
        f"[{ms['min_ms']:.3f}, {ms['max_ms']:.3f}]   first call {ms['first_ms']:.0f} ms",
        flush=True,
    )
    return {key: rate, "share_of_bound": share, **ms}


def measure_bounds(timer: Timer, device: torch.device, size: int) -> dict[str, float]:
    """Measure a square bf16 product, and a copy, which counts the bytes read and written."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = timer(lambda: a @ b)["median_ms"] / 1e3
    source = torch.empty(16 * size * size, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_s = timer(lambda: target.copy_(source))["median_ms"] / 1e3
    return {"tflop_per_s": 2 * size**3 / product_s / 1e12, "tb_per_s": 2 * source.nbytes / copy_s / 1e12}


def bench_backends(
    backends: list[AttentionBackend],
    works: list[Workload],
    args: argparse.Namespace,
    timer: Timer,
    bounds: dict[str, float],
) -> list[dict[str, Any]]:
    rows = []
    for model, heads in MODELS.items():
        for work in works:
            inputs = make_inputs(work, heads, args, timer.device)
            for backend in backends:
                print(f"{model:11} {work.name:21} {backend.name:7}", end=" ")
                tensors = (inputs.q_THD, inputs.k_cache, inputs.v_cache)
                ms = timer(lambda b=backend, t=tensors, i=inputs: b.attend(*t, i.batch, i.scale))
                rate = report(work, heads, ms, bounds)
                rows.append({"model": model, "workload": work.name, "backend": backend.name, **rate})
    return rows


def add_shares_of_flash(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Add each row's rate relative to flash-attn 2. Returns the smallest of each backend."""
    flash_ms = {(row["model"], row["workload"]): row["median_ms"] for row in rows if row["backend"] == "flash"}
    others = [row for row in rows if row["backend"] != "flash" and (row["model"], row["workload"]) in flash_ms]
    for row in others:
        row["share_of_flash"] = flash_ms[row["model"], row["workload"]] / row["median_ms"]
        print(f"{row['model']:11} {row['workload']:21} {row['backend']:7} {row['share_of_flash']:5.2f} of flash")
    names = dict.fromkeys(row["backend"] for row in others)
    return {
        f"{name}_share_of_flash": min(row["share_of_flash"] for row in others if row["backend"] == name)
        for name in names
    }


def bench_merge(backends: list[AttentionBackend], timer: Timer) -> list[dict[str, Any]]:
    """Time merging two parts, and merging two parts into the running fp32 result."""
    bf16, fp32 = torch.bfloat16, torch.float32
    rows = []
    for num_tokens, dtypes in itertools.product((1, 8192), ((bf16, bf16), (fp32, bf16, bf16))):
        parts = [
            PartialAttention(
                torch.randn(num_tokens, 16, HEAD_DIM, device=timer.device, dtype=dtype),
                torch.randn(16, num_tokens, device=timer.device),
            )
            for dtype in dtypes
        ]
        workload = f"merge {num_tokens}" + (" into running" if dtypes[0] == fp32 else "")
        for backend in backends:
            ms = timer(lambda b=backend, p=parts, d=dtypes[0]: b.merge(p, d))
            print(f"{workload}, 16 heads: {backend.name:7} {ms['median_ms'] * 1e3:.1f} us", flush=True)
            rows.append({"workload": workload, "backend": backend.name, **ms})
    return rows


def bench_few_queries(
    backends: list[AttentionBackend], context_lens: tuple[int, ...], args: argparse.Namespace, timer: Timer
) -> list[dict[str, Any]]:
    """Time 1 to 16 queries of one sequence, as when guessed tokens are verified, relative to one query."""
    rows = []
    for context_len, backend in itertools.product(context_lens, backends):
        one_query_ms = None
        for query_len in (1, 4, 8, 16):
            work = Workload(f"{query_len} queries, {context_len}", 1, query_len, context_len)
            inputs = make_inputs(work, MODELS["Qwen3-0.6B"], args, timer.device)
            tensors = (inputs.q_THD, inputs.k_cache, inputs.v_cache)
            ms = timer(lambda b=backend, t=tensors, i=inputs: b.attend(*t, i.batch, i.scale))
            one_query_ms = one_query_ms or ms["median_ms"]
            ratio = ms["median_ms"] / one_query_ms
            print(
                f"{work.name:21} {backend.name:7} {ms['median_ms']:8.3f} ms [{ms['min_ms']:.3f}, {ms['max_ms']:.3f}]   "
                f"{ratio:.2f} of one query",
                flush=True,
            )
            rows.append({"workload": work.name, "backend": backend.name, "times_one_query": ratio, **ms})
    return rows


def tune(args: argparse.Namespace, timer: Timer, bounds: dict[str, float]) -> list[dict[str, Any]]:
    """Time our prefill kernel with other tiles, and our decode kernel with other splits."""
    from nanovllm.kernels.attention import DecodeConfig, PrefillConfig, paged_decode, paged_prefill

    tma = kernel_target.target_of(timer.device).has_shared_operands
    tiles = [(128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3)]
    if not tma:
        tiles = [(128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 64, 4, 3)]
    rows = []
    heads = MODELS["Qwen3-0.6B"]
    for work in (w for w in WORKLOADS if w.query_len > 1):
        inputs = make_inputs(work, heads, args, timer.device)
        batch = inputs.batch
        lens = (batch.cu_seqlens_q, batch.context_lens, batch.block_tables, batch.max_query_len)
        for config in (PrefillConfig(*tile, tma=tma) for tile in tiles):
            print(f"{work.name:21} {config}", end=" ")
            call = (inputs.q_THD, inputs.k_cache, inputs.v_cache, *lens, inputs.scale, True, config)
            rows.append({"workload": work.name, "config": config})
            rows[-1] |= report(work, heads, timer(lambda c=call: paged_prefill(*c)), bounds)
    for work in (w for w in WORKLOADS if w.query_len == 1):
        inputs = make_inputs(work, heads, args, timer.device)
        for num_splits, block_n in itertools.product((1, 2, 4, 8, 16, 24, 32, 48, 64, 96), (32, 64)):
            print(f"{work.name:21} {num_splits:3} splits, tiles of {block_n} keys", end=" ")
            lens = (inputs.batch.context_lens, inputs.batch.block_tables)
            config = DecodeConfig(block_n, num_warps=4, num_stages=3)
            call = (inputs.q_THD, inputs.k_cache, inputs.v_cache, *lens, inputs.scale, num_splits, config)
            rows.append({"workload": work.name, "num_splits": num_splits, "config": config})
            rows[-1] |= report(work, heads, timer(lambda c=call: paged_decode(*c)), bounds)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", action="append", choices=sorted(BACKENDS), help="repeat for more; default: all but torch"
    )
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument(
        "--order", choices=["adjacent", "random"], default="adjacent", help="order of the blocks in a table"
    )
    parser.add_argument("--target", choices=sorted(KNOWN_TARGETS), help="run the kernels for this compute capability")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --smoke runs tiny lengths on the CPU")
    device = torch.device("cpu" if args.smoke else "cuda")
    if args.target:
        from benchmarks.forced_target import force_target

        force_target(args.target)
    timer = Timer(device)
    bounds = measure_bounds(timer, device, 64 if args.smoke else 8192)
    print(f"bounds: {bounds['tflop_per_s']:.1f} TFLOP/s (bf16 product), {bounds['tb_per_s']:.2f} TB/s (copy)")
    shares: dict[str, float] = {}
    if args.tune:
        rows = tune(args, timer, bounds)
    else:
        works = WORKLOADS
        if args.smoke:
            works = [Workload(w.name, 2, min(w.query_len, 5), 300) for w in works]
        names = args.backend or (["torch"] if args.smoke else ["triton", "flash", "cudnn"])
        possible = [n for n in names if BACKENDS[n].why_unavailable(device, torch.bfloat16, HEAD_DIM) is None]
        backends = [choose_backend(name, device, torch.bfloat16, HEAD_DIM, enforce_eager=True) for name in possible]
        rows = bench_backends(backends, works, args, timer, bounds)
        shares = add_shares_of_flash(rows)
        rows += bench_few_queries(backends, (300,) if args.smoke else (40960, 131072), args, timer)
        rows += bench_merge(backends, timer)
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    result = {"device": device_name, "target": args.target, "bounds": bounds, "block_size_tokens": args.block_size}
    print(json.dumps(result | shares | {"rows": rows}))


if __name__ == "__main__":
    main()
