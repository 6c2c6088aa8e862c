"""Times the gated delta net of a layer, everything between its projections, against the bytes and products it needs.

    python -m benchmarks.bench_delta_net                    # the shapes of Qwen3.5-9B
    python -m benchmarks.bench_delta_net --heads 16 48      # of 27B: key heads and value heads
    python -m benchmarks.bench_delta_net --tiles            # other configurations of the kernel that passes states on

Decode and verification steps are captured over all layers, each with separate states. The last line is JSON.
"""

import argparse
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from triton.runtime.errors import OutOfResources

from benchmarks.common import Ceilings, measure_ceilings, median_seconds
from benchmarks.reporting import report, versions
from nanovllm.kernels.delta_chunks import PassConfig
from nanovllm.kernels.delta_net import delta_net
from nanovllm.kernels.state_tensors import DeltaWeights, HostStateRows, LayerStates, StateRows

NUM_LAYERS, WIDTH, DIM = 24, 3, 128
MAX_GUESSES = 15
CONFIGS = [
    PassConfig(64, block_v, num_warps, num_stages)
    for block_v, num_warps in ((16, 4), (32, 4), (64, 4), (64, 8), (128, 8))
    for num_stages in (1, 2, 3)
]


def make_rows(num_rows: int, num_tokens: int, num_replayed: int, num_guesses: int, *, captured: bool) -> StateRows:
    slots = tuple(range(1, num_rows + 1))
    numbers = (num_tokens,) * num_rows, slots, slots, (num_replayed,) * num_rows, (num_guesses,) * num_rows
    tensors = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in numbers]
    cu_seqlens = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda") * num_tokens
    return StateRows(cu_seqlens, *tensors[1:], num_tokens, None if captured else HostStateRows(*numbers))


class Layers:
    """Inputs, weights and states of all layers for some rows."""

    def __init__(self, heads: tuple[int, int], num_rows: int, num_tokens: int, max_guesses: int) -> None:
        key_heads, self.num_heads = heads
        self.channels = (2 * key_heads + self.num_heads) * DIM

        def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*shape, dtype=dtype, device="cuda")

        slots = num_rows + 1, NUM_LAYERS
        self.conv = randn(*slots, WIDTH, self.channels)
        self.matrix = randn(*slots, self.num_heads, DIM, DIM, dtype=torch.float32)
        self.pending = randn(*slots, max_guesses, self.channels + 2 * self.num_heads)
        value_size = self.num_heads * DIM
        qkvz = randn(num_rows * num_tokens, self.channels + value_size)
        self.inputs = *qkvz.split((self.channels, value_size), 1), randn(num_rows * num_tokens, 2 * self.num_heads)
        gates = randn(2, self.num_heads, dtype=torch.float32)
        conv_weight = randn(WIDTH + 1, self.channels)
        self.weights = DeltaWeights(conv_weight, gates[0] - 2, gates[1] - 1, randn(DIM), 1e-6, key_heads, DIM)

    def run(self, rows: StateRows, config: PassConfig | None = None, num_layers: int = NUM_LAYERS) -> None:
        for layer in range(num_layers):
            states = LayerStates(self.conv[:, layer], self.matrix[:, layer], self.pending[:, layer], rows)
            delta_net(*self.inputs, states, self.weights, config)

    def least_seconds(self, ceilings: Ceilings, num_rows: int, num_tokens: int) -> tuple[float, float]:
        """Bounds of a layer: moving its states, inputs and outputs once, and the products of tiles of 64 tokens."""
        size = self.num_heads * DIM
        moved = num_rows * 2 * (4 * size * DIM + 2 * self.channels * WIDTH)
        moved += num_rows * num_tokens * 2 * (self.channels + 2 * size + 2 * self.num_heads)
        flop = num_rows * num_tokens * self.num_heads * 2 * (3 * DIM * DIM + 4 * 64 * DIM)
        return moved / ceilings.memory_byte_per_s, flop / ceilings.matmul_flop_per_s


def captured_seconds(layers: Layers, rows: StateRows) -> float:
    layers.run(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run(rows)
    return median_seconds(graph.replay) / NUM_LAYERS


def kernel_us(layers: Layers, rows: StateRows, config: PassConfig | None = None) -> dict[str, float]:
    """Measure the microseconds of each kernel of a layer."""
    layers.run(rows, config, num_layers=1)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        layers.run(rows, config, num_layers=4)
        torch.cuda.synchronize()
    return {
        each.key: each.self_device_time_total / 4 for each in profiled.key_averages() if each.self_device_time_total
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prefill", type=int, default=16384)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    ceilings, heads, result = measure_ceilings(), tuple(args.heads), []
    print(ceilings)

    def note(name: str, seconds: float, bounds: tuple[float, float], **more: Any) -> None:
        bound = max(bounds)
        shown = f"bytes {1e6 * bounds[0]:.1f}, products {1e6 * bounds[1]:.1f}"
        print(f"{name:36} {1e6 * seconds:8.1f} us a layer; bounds {shown} us: {bound / seconds:.2f}", flush=True)
        result.append({"work": name, "us": 1e6 * seconds, "bound_us": 1e6 * bound, **more})

    for num_rows in args.rows:
        layers = Layers(heads, num_rows, 1, 1)
        seconds = captured_seconds(layers, make_rows(num_rows, 1, 0, 0, captured=True))
        note(f"decode, {num_rows} rows", seconds, layers.least_seconds(ceilings, num_rows, 1))
        del layers
    for num_rows, guesses in ((1, 3), (1, MAX_GUESSES), (32, 3)):
        layers = Layers(heads, num_rows, guesses + 1, MAX_GUESSES)
        rows = make_rows(num_rows, guesses + 1, guesses // 2, guesses, captured=True)
        bounds = layers.least_seconds(ceilings, num_rows, guesses + 1)
        note(f"verify {guesses} guesses, {num_rows} rows", captured_seconds(layers, rows), bounds)
        del layers
    for num_rows in (16, 1):
        num_tokens = args.prefill // num_rows
        layers = Layers(heads, num_rows, num_tokens, 1)
        rows = make_rows(num_rows, num_tokens, 0, 0, captured=False)
        bounds = layers.least_seconds(ceilings, num_rows, num_tokens)
        seconds = median_seconds(partial(layers.run, rows)) / NUM_LAYERS
        each = kernel_us(layers, rows)
        note(f"prefill, {num_rows} times {num_tokens}", seconds, bounds, kernel_us=each)
        print("    " + ", ".join(f"{name} {us:.0f}" for name, us in sorted(each.items(), key=lambda item: -item[1])))
        for chosen in CONFIGS if args.tiles and num_rows == 1 else ():
            try:
                shown = f"{kernel_us(layers, rows, chosen)['_pass_kernel']:.0f} us"
            except OutOfResources as error:
                shown = str(error)
            print(f"    {chosen}: {shown}", flush=True)
        del layers
    report(versions() | {"gpu": torch.cuda.get_device_name(), "heads": heads, "delta_net": result}, args.json)


if __name__ == "__main__":
    main()
