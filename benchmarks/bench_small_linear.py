"""Compares our kernel for linear layers with few rows with cuBLAS and a separate SiLU, for shapes of several models.

    python benchmarks/bench_small_linear.py                     # 1 row: every tile; more rows: the best and the chosen
    python benchmarks/bench_small_linear.py --model qwen3-0.6b  # one model; repeat the option for more
    python benchmarks/bench_small_linear.py --all-tiles         # every tile at every number of rows (slow: it compiles)
    TRITON_INTERPRET=1 python benchmarks/bench_small_linear.py --smoke   # tiny, on CPU: does it run?

The first line is the measured bound, the last line is JSON. A time is that of one call in a CUDA graph of at least 20
calls, which use different copies of the weight that together exceed the L2 cache. The rate counts the weight's bytes.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import measure_ceilings, time_in_graph_us
from nanovllm.kernels.small_linear import DEFAULT_TILE, Tile, small_gate_up, small_linear
from nanovllm.layers.linear import MAX_GEMV_ROWS, silu_and_mul
from nanovllm.utils.arithmetic import ceil_div

MODELS = {  # hidden, qkv features, attention features, intermediate
    "qwen3-0.6b": (1024, 4096, 2048, 3072),
    "qwen3-4b": (2560, 6144, 4096, 9728),
    "qwen3-8b": (4096, 6144, 4096, 12288),
    "qwen2.5-7b": (3584, 4608, 3584, 18944),
}
ROWS = (1, 2, 4, 8, 16)
TILES = [Tile(1, 4, 1), Tile(1, 8, 1), Tile(1, 8, 3), Tile(2, 4, 1), Tile(2, 8, 1), Tile(2, 4, 3), Tile(2, 8, 3)]
TILES += [Tile(4, 2, 1), Tile(4, 4, 1), Tile(4, 8, 1), Tile(4, 4, 3), Tile(8, 4, 1)]
ROTATING_BYTES = 2**27  # all copies of a weight together: twice the L2 cache
NUM_CALLS, NUM_RUNS = 20, 7


@dataclass(frozen=True)
class Layer:
    model: str
    name: str
    num_features: int  # of the product, so twice those of the output if gated
    size: int

    @property
    def is_gated(self) -> bool:
        return self.name == "gate_up"

    @property
    def chosen_tile(self) -> Tile:
        return DEFAULT_TILE

    def plain(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = F.linear(x, weight)
        return silu_and_mul(product) if self.is_gated else product

    def ours(self, x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
        return (small_gate_up if self.is_gated else small_linear)(x, weight, None, tile)


def layers_of(model: str) -> list[Layer]:
    hidden, qkv, attention, intermediate = MODELS[model]
    sizes = {"qkv": (qkv, hidden), "o": (hidden, attention)}
    sizes |= {"gate_up": (2 * intermediate, hidden), "down": (hidden, intermediate)}
    return [Layer(model, name, *size) for name, size in sizes.items()]


def time_call_us(call: Callable[[torch.Tensor], object], weights: torch.Tensor) -> dict[str, float]:
    """Microseconds of one call. The calls use the weights in turn."""
    num_calls = max(NUM_CALLS, len(weights))
    us = time_in_graph_us(lambda i: call(weights[i % len(weights)]), num_calls, NUM_RUNS, weights.device.type)
    return {"median_us": us.median, "min_us": min(us.values), "max_us": max(us.values)}


class Report:
    def __init__(self, bound_tb_per_s: float) -> None:
        self.bound_tb_per_s = bound_tb_per_s
        self.rows: list[dict[str, Any]] = []

    def add(self, layer: Layer, num_rows: int, kernel: str, tile: Tile | None, us: dict[str, float]) -> float:
        """Print and keep one measurement. Returns its median in us."""
        rate = 2.0 * layer.num_features * layer.size / us["median_us"] / 1e6
        print(
            f"{layer.model:10} {layer.name:7} {num_rows:2} rows  {kernel:6} {str(tuple(tile)) if tile else '':9} "
            f"{us['median_us']:8.2f} us [{us['min_us']:.2f}, {us['max_us']:.2f}]  {rate:5.2f} TB/s "
            f"{rate / self.bound_tb_per_s:4.0%} of bound{'  (chosen)' if tile == layer.chosen_tile else ''}",
            flush=True,
        )
        where = {"model": layer.model, "layer": layer.name, "num_rows": num_rows, "kernel": kernel, "tile": tile}
        self.rows.append(where | us | {"tb_per_s": rate})
        return us["median_us"]


def bench_layer(layer: Layer, row_counts: tuple[int, ...], all_tiles: bool, device: str, report: Report) -> None:
    """Time all tiles at the first row count, and then only the best and the chosen one, unless `all_tiles`."""
    num_copies = max(2, ceil_div(ROTATING_BYTES, 2 * layer.num_features * layer.size)) if device == "cuda" else 1
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    weights = torch.randn(num_copies, layer.num_features, layer.size, device=device, dtype=dtype)
    tiles = TILES
    for num_rows in row_counts:
        x = torch.randn(num_rows, layer.size, device=device, dtype=dtype)
        report.add(layer, num_rows, "cublas", None, time_call_us(lambda w, x=x: layer.plain(x, w), weights))
        us = {
            tile: report.add(
                layer, num_rows, "ours", tile, time_call_us(lambda w, x=x, t=tile: layer.ours(x, w, t), weights)
            )
            for tile in tiles
        }
        if not all_tiles:
            tiles = list({min(us, key=lambda t, us=us: us[t]), layer.chosen_tile})


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Print and return the time of a decoder layer of each model, in us: with cuBLAS, the chosen and the best tiles."""
    totals: dict[str, float] = {}
    for row in rows:
        layer = next(layer for layer in layers_of(row["model"]) if layer.name == row["layer"])
        same = [
            r for r in rows if (r["model"], r["layer"], r["num_rows"]) == (layer.model, layer.name, row["num_rows"])
        ]
        values = {
            "cublas": row["median_us"] if row["kernel"] == "cublas" else None,
            "chosen": row["median_us"] if row["tile"] == layer.chosen_tile else None,
            "best": min(r["median_us"] for r in same if r["kernel"] == "ours") if row["kernel"] == "cublas" else None,
        }
        for kind, value in values.items():
            key = f"{layer.model}_{row['num_rows']}_rows_{kind}_us"
            totals[key] = totals.get(key, 0.0) + (value or 0.0)
    for key, total in totals.items():
        print(f"{key:40} {total:8.2f}   four products of a decoder layer")
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="repeat for more; default: all")
    parser.add_argument("--all-tiles", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; TRITON_INTERPRET=1 and --smoke run tiny shapes on the CPU")
    bound = 1.0 if args.smoke else measure_ceilings().memory_byte_per_s / 1e12
    print(f"bound: {bound:.2f} TB/s (copy); our kernel takes up to {MAX_GEMV_ROWS} rows")
    report = Report(bound)
    row_counts, device = (ROWS[:2], "cpu") if args.smoke else (ROWS, "cuda")
    if args.smoke:
        MODELS.clear()
        MODELS["tiny"] = (64, 128, 64, 96)
    for model in args.model or MODELS:
        for layer in layers_of(model):
            bench_layer(layer, row_counts, args.all_tiles, device, report)
    totals = summarise(report.rows)
    name = "cpu" if args.smoke else torch.cuda.get_device_name()
    print(json.dumps({"device": name, "bound_tb_per_s": bound, "totals": totals, "rows": report.rows}))


if __name__ == "__main__":
    main()
