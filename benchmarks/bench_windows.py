"""Times attention with windows and sinks, in layers of gpt-oss and Gemma 4, against the bytes and products it needs.

    python -m benchmarks.bench_windows                        # every backend that can run here
    python -m benchmarks.bench_windows --target 8.9 --backend triton    # the kernels for an RTX 40, on this GPU
    python -m benchmarks.bench_windows --smoke                # tiny lengths on CPU: does it run?

Each layer also runs without its window and its sinks. FLOPs count only visible keys; bytes are the visible K and V,
read once. A decode step is captured over several layers, each with separate K and V. The last line is JSON.
"""

import argparse
import time
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.common import Ceilings, measure_ceilings, median_seconds
from benchmarks.reporting import report, versions
from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch
from nanovllm.attention.selection import BACKENDS, choose_backend
from nanovllm.device.kernel_target import KNOWN_TARGETS
from nanovllm.utils.arithmetic import ceil_div

NUM_LAYERS = 4  # without a window, their K and V exceed the L2 cache
BLOCK_SIZE = 256


class Layer(NamedTuple):
    name: str
    heads: tuple[int, int]  # query heads, kv heads
    head_dim: int
    window: int | None
    has_sinks: bool

    def without(self) -> "Layer":
        return self._replace(name=f"{self.name}, plain", window=None, has_sinks=False)


class Work(NamedTuple):
    name: str
    num_sequences: int
    query_len: int
    context_len: int

    def least_seconds(self, layer: Layer, ceilings: Ceilings) -> tuple[float, float]:
        """Bounds of a layer: reading the keys that any query sees, and the products with the visible keys."""
        window, first = layer.window or self.context_len, self.context_len - self.query_len
        num_read = self.context_len - max(0, first + 1 - window)
        num_visible = sum(min(window, position + 1) for position in range(first, self.context_len))
        read_bytes = self.num_sequences * num_read * layer.heads[1] * layer.head_dim * 2 * 2
        flop = 4 * self.num_sequences * num_visible * layer.heads[0] * layer.head_dim
        return read_bytes / ceilings.memory_byte_per_s, flop / ceilings.matmul_flop_per_s


LAYERS = [
    Layer("gpt-oss, window", (64, 8), 64, 128, True),
    Layer("gpt-oss, full", (64, 8), 64, None, True),
    Layer("Gemma 4, local", (32, 16), 256, 1024, False),
    Layer("Gemma 4, global", (32, 4), 512, None, False),
]
WORKS = [
    Work("prefill 8192", 1, 8192, 8192),
    Work("chunk 8192 at 40960", 1, 8192, 40960),
    Work("chunk 250 at 40960", 1, 250, 40960),
    Work("4 queries at 40960", 1, 4, 40960),
    Work("decode 1 x 8192", 1, 1, 8192),
    Work("decode 1 x 40960", 1, 1, 40960),
    Work("decode 64 x 8192", 64, 1, 8192),
]
SMOKE_WORKS = [Work(f"{n} queries at 300", 2, n, 300) for n in (1, 4, 40)]


class Inputs:
    """Random queries, and K and V of several layers."""

    def __init__(self, work: Work, layer: Layer, num_layers: int, device: torch.device) -> None:
        randn = partial(torch.randn, dtype=torch.bfloat16, device=device)
        blocks_each = ceil_div(work.context_len, BLOCK_SIZE)
        tables = torch.randperm(blocks_each * work.num_sequences).view(work.num_sequences, blocks_each).int()
        query_lens, context_lens = ([n] * work.num_sequences for n in (work.query_len, work.context_len))
        self.q = randn(work.num_sequences * work.query_len, layer.heads[0], layer.head_dim)
        self.caches = randn(num_layers, 2, tables.numel(), BLOCK_SIZE, layer.heads[1], layer.head_dim)
        self.sinks = randn(layer.heads[0]) if layer.has_sinks else None
        self.scale = layer.head_dim**-0.5
        self.batch = PagedBatch(
            cu_seqlens_q=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            max_query_len=work.query_len,
            max_context_len=work.context_len,
            causal=True,
            host=HostTables(query_lens, context_lens, tables.tolist()),
            window=layer.window,
        )

    def attend(self, backend: AttentionBackend) -> None:
        for k_cache, v_cache in self.caches:
            backend.attend(self.q, k_cache, v_cache, self.batch, self.scale, self.sinks)


def seconds_of_layer(backend: AttentionBackend, work: Work, inputs: Inputs, device: torch.device) -> float:
    """Median seconds of a layer. Short queries are captured, so that launching them takes no time."""
    run = partial(inputs.attend, backend)
    if device.type != "cuda":
        start_s = time.perf_counter()
        run()
        return (time.perf_counter() - start_s) / len(inputs.caches)
    if work.query_len > 16:
        return median_seconds(run) / len(inputs.caches)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_seconds(graph.replay) / len(inputs.caches)


def bench(
    layer: Layer, works: list[Work], names: list[str], ceilings: Ceilings | None, device: torch.device
) -> list[dict[str, Any]]:
    possible = [n for n in names if BACKENDS[n].why_unavailable(device, torch.bfloat16, layer.head_dim) is None]
    backends = [choose_backend(n, device, torch.bfloat16, layer.head_dim, enforce_eager=True) for n in possible]
    rows = []
    for work in works:
        inputs = Inputs(work, layer, NUM_LAYERS if work.query_len <= 16 and ceilings is not None else 1, device)
        for backend in backends:
            seconds = seconds_of_layer(backend, work, inputs, device)
            row = {"layer": layer.name, "work": work.name, "backend": backend.name, "us": 1e6 * seconds}
            shown = ""
            if ceilings is not None:
                read_s, product_s = work.least_seconds(layer, ceilings)
                row |= {"bound_us": 1e6 * max(read_s, product_s), "share_of_bound": max(read_s, product_s) / seconds}
                shown = (
                    f"; bounds bytes {1e6 * read_s:.1f}, products {1e6 * product_s:.1f} us: {row['share_of_bound']:.2f}"
                )
            print(f"{layer.name:24} {work.name:20} {backend.name:7} {row['us']:10.1f} us{shown}", flush=True)
            rows.append(row)
        del inputs
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=sorted(BACKENDS), help="repeat for more")
    parser.add_argument("--target", choices=sorted(KNOWN_TARGETS), help="run the kernels for this compute capability")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --smoke runs tiny lengths on the CPU")
    if args.target:
        from benchmarks.forced_target import force_target

        force_target(args.target)
    device = torch.device("cpu" if args.smoke else "cuda")
    ceilings = None if args.smoke else measure_ceilings()
    print(ceilings)
    names = args.backend or (["torch"] if args.smoke else ["triton", "flash", "cudnn"])
    rows = []
    for layer in LAYERS:
        changes = layer.window is not None or layer.has_sinks
        for each in (layer, layer.without()) if changes else (layer,):
            rows += bench(each, SMOKE_WORKS if args.smoke else WORKS, names, ceilings, device)
    name = "cpu" if args.smoke else torch.cuda.get_device_name()
    report(versions() | {"gpu": name, "target": args.target, "windows": rows}, args.json)


if __name__ == "__main__":
    main()
