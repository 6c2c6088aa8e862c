"""Times products with packed weights against cuBLAS in bf16, and against the time to read the weight.

    python -m benchmarks.bench_linear                     # the layers of Qwen3-8B, bf16, fp8 and int4
    python -m benchmarks.bench_linear --tiles --rows 1 16 # every tile of the kernels, to choose the defaults
    python -m benchmarks.bench_linear --experts           # the experts of Qwen3-30B-A3B
    python -m benchmarks.bench_linear --experts gpt-oss-20b --formats MXFP4
    python -m benchmarks.bench_linear --formats Q4_K Q6_K # types of GGUF

Calls are timed in a graph of calls over copies of the weight, so that the GPU's cache holds none of the weight. The
last line is JSON.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from benchmarks.common import measure_ceilings, median_seconds
from benchmarks.reporting import report, versions
from nanovllm.checkpoint.quantization import BLOCK_TYPES, QUANTIZATIONS
from nanovllm.kernels import packed_linear as kernels
from nanovllm.kernels.packed_values import Packed
from nanovllm.layers.moe import MAX_SINGLE_PAIRS
from nanovllm.layers.packed_weight import PackedWeight, packed, store_blocks, unpacked_linear
from nanovllm.models.block_quantizing import quantize_to_blocks
from nanovllm.models.gguf_values import random_blocks
from nanovllm.models.quantized_weights import quantize

LAYERS = {"qkv": (1, 6144, 4096), "o": (1, 4096, 4096), "gate_up": (1, 24576, 4096), "down": (1, 4096, 12288)}
MIXTURES = {  # number of experts, rows and columns of gate_up and of down; experts of a token
    "qwen3-30b-a3b": ({"experts gate_up": (128, 1536, 2048), "experts down": (128, 2048, 768)}, 8),
    "gpt-oss-20b": ({"experts gate_up": (32, 5760, 2880), "experts down": (32, 2880, 2880)}, 4),
}
CACHE_BYTES = 256 * 2**20  # more than any GPU's cache
FEW_ROWS_TILES = [kernels.FewRowsTile(*sizes) for sizes in itertools.product((8, 16), (4, 8, 16), (1, 2, 3, 4, 8))]
TILES = [
    kernels.ManyRowsTile(*sizes)
    for sizes in itertools.product((16, 32, 64, 128), (64, 128, 256), (4, 8), (3, 4), (1, 4))
]


def make_weight(num_rows: int, size: int, name: str) -> torch.nn.Parameter | PackedWeight:
    if name in BLOCK_TYPES:
        with torch.device("cuda"):
            weight = PackedWeight([num_rows], size, BLOCK_TYPES[name])
        generator = torch.Generator("cuda").manual_seed(0)
        for start in range(0, num_rows, 1024):
            rows = weight.rows(start, min(start + 1024, num_rows))
            store_blocks(random_blocks(rows.end - start, size, name, generator), [rows])
        return weight
    values = torch.randn(num_rows, size, dtype=torch.bfloat16, device="cuda") / size**0.5
    if name == "bf16":
        return torch.nn.Parameter(values, requires_grad=False)
    format = QUANTIZATIONS[name].for_columns(size)
    assert format is not None, "the columns are whole blocks of some type"
    with torch.device("cuda"):
        weight = PackedWeight([num_rows], size, format)
    for start in range(0, num_rows, 1024):
        rows = weight.rows(start, min(start + 1024, num_rows))
        given = values[rows.start : rows.end]
        if format.block_type is None:
            rows.store(quantize(given, format), name)
        else:
            store_blocks(quantize_to_blocks(given, format.block_type), [rows])
    return weight


def num_bytes(weight: Packed) -> int:
    return sum(each.numel() * each.element_size() for each in weight if isinstance(each, torch.Tensor))


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of a call in a graph of calls, or NaN if a tile does not fit."""
    try:
        for call in calls:
            call()
    except OutOfResources:
        return float("nan")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_seconds(graph.replay) / len(calls) * 1e6


def ways(
    x: torch.Tensor, num_experts: int, num_chosen: int, is_dense: bool, all_tiles: bool
) -> Iterator[tuple[str, Callable[[Packed], object]]]:
    """The ways to multiply `x` by a weight, or by the weights of the experts chosen for each row."""
    experts = torch.rand(len(x), num_experts, device="cuda").argsort(1)[:, :num_chosen].contiguous()
    chosen = {"experts": experts, "num_experts": num_experts} if num_experts > 1 else {}
    if is_dense and num_experts == 1:
        yield "cublas", lambda weight: F.linear(x, weight.codes)
        return
    if not all_tiles:
        is_routed = chosen and experts.numel() > MAX_SINGLE_PAIRS
        given = {"routing": kernels.route(experts, num_experts)} if is_routed else chosen
        yield "default", partial(kernels.products, x, **given)
    mean = len(x) * num_chosen / num_experts if chosen and len(x) > 4 else 1 if chosen else len(x)  # rows of a weight
    for tile in (*FEW_ROWS_TILES, *TILES) if all_tiles else ():
        rows = tile.block_m
        if (rows < mean / 2 and rows < 128) or (rows > 8 and rows > 4 * mean):
            continue
        routed = {"routing": kernels.route(experts, num_experts, rows)} if chosen and len(x) > 4 else chosen
        yield " ".join(map(str, tile)), partial(kernels.products, x, tile=tile, **routed)
    if chosen and experts.numel() <= MAX_SINGLE_PAIRS:
        factors, pairs = torch.rand(experts.shape, device="cuda"), x.repeat_interleave(num_chosen, 0)
        yield "sum", lambda weight: kernels.sum_of_experts(pairs, weight, experts, num_experts, factors)
    if num_experts == 1:
        yield "unpacked", lambda weight: unpacked_linear(x, weight, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 4096])
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8", "int4"], help="also types of GGUF")
    parser.add_argument("--tiles", action="store_true", help="every tile, not only the default ones")
    mixtures = {"nargs": "?", "const": "qwen3-30b-a3b", "choices": list(MIXTURES)}
    parser.add_argument("--experts", **mixtures, help="the experts of a mixture instead of the layers of Qwen3-8B")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    ceilings = measure_ceilings()
    print(ceilings)
    result: list[dict[str, Any]] = []
    layers, num_chosen = MIXTURES[args.experts] if args.experts else (LAYERS, 1)
    for layer, (num_experts, num_rows, size) in layers.items():
        for name in args.formats:
            weight = packed(make_weight(num_experts * num_rows, size, name))
            num_copies = CACHE_BYTES // num_bytes(weight) + 2
            copies = [
                Packed(*(x.clone() if isinstance(x, torch.Tensor) else x for x in weight)) for _ in range(num_copies)
            ]
            for num_inputs in args.rows:
                x = torch.randn(num_inputs, size, dtype=torch.bfloat16, device="cuda")
                times = {
                    way: graph_us([partial(call, each) for each in copies])
                    for way, call in ways(x, num_experts, num_chosen, name == "bf16", args.tiles)
                }
                share = 1 - (1 - num_chosen / num_experts) ** num_inputs if num_experts > 1 else 1.0  # chosen experts
                work = 2 * num_inputs * num_rows * size * num_chosen
                bound_us = 1e6 * max(
                    share * num_bytes(weight) / ceilings.memory_byte_per_s, work / ceilings.matmul_flop_per_s
                )
                best = sorted((us, way) for way, us in times.items() if us == us)
                shown = ", ".join(f"{way} {us:.1f} us ({bound_us / us:.2f})" for us, way in best[:4])
                print(f"{layer:16} {name:5} {num_inputs:5} rows, bound {bound_us:7.1f} us: {shown}", flush=True)
                entry = {"layer": layer, "format": name, "rows": num_inputs, "bound_us": bound_us, "us": dict(times)}
                result.append(entry)
    report(versions() | {"gpu": torch.cuda.get_device_name(), "products": result}, args.json)


if __name__ == "__main__":
    main()
