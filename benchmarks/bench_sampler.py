"""Times sampling, without and with filters.

    python benchmarks/bench_sampler.py                              # 1, 64 and 512 rows, vocabulary of 151,936
    python benchmarks/bench_sampler.py --tile 2,4,1 --tile 4,8,2    # compare tiles of the kernel that filters
    TRITON_INTERPRET=1 python benchmarks/bench_sampler.py --smoke   # tiny, on CPU: does it run?

A time is that of one call in a CUDA graph of 20 calls, which have different positions and so draw and cut different
tokens. The bound is the time to read the logits once. The first line is the measured rate of memory, the last is JSON.
"""

import argparse
from typing import Any

import torch

from benchmarks.common import median_seconds, time_in_graph_us
from benchmarks.reporting import report, run_options, versions
from nanovllm.kernels.redraw import DEFAULT_TILE, RedrawTile
from nanovllm.kernels.sampler import sample_tokens
from nanovllm.kernels.sampling_tensors import SamplingTensors

NUM_CALLS, NUM_RUNS = 20, 7
SPREADS = {"flat": 0.7, "peaked": 5.0}  # standard deviation of the logits with random weights and with a trained model
RECOMMENDED = {"top_k": 20, "top_p": 0.95}
CASES: dict[str, dict[str, float]] = {
    "unfiltered": {},
    "greedy": {"temperature": 0.0},
    "one row filters": RECOMMENDED,
    "top_k 20, top_p 0.95": RECOMMENDED,
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.5": {"top_p": 0.5},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 1000": {"top_k": 1000},
}


def tensors_of(case: str, num_rows: int, device: str) -> SamplingTensors:
    """The parameters of a case for all rows, or for only the middle one, at position 0."""
    filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    dtypes = dict.fromkeys(filters, torch.float32) | {"top_k": torch.int64}
    columns = [torch.full((num_rows,), filters[name], dtype=dtypes[name]) for name in filters]
    rows = slice(num_rows // 2, num_rows // 2 + 1) if case == "one row filters" else slice(None)
    for column, name in zip(columns, filters, strict=True):
        column[rows] = CASES[case].get(name, filters[name])
    columns += [torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64)]
    return SamplingTensors(*(column.to(device) for column in columns))


def bench(args: argparse.Namespace, bound_byte_per_us: float, device: str) -> list[dict[str, Any]]:
    results = []
    for num_rows in args.rows:
        for logits_name, spread in SPREADS.items():
            generator = torch.Generator(device).manual_seed(num_rows)
            logits = spread * torch.randn(num_rows, args.vocab_size, generator=generator, device=device)
            logits = logits.half() if device == "cpu" else logits.bfloat16()
            bound_us = 2 * logits.numel() / bound_byte_per_us
            print(f"\n{num_rows} rows, {logits_name} logits; reading them once: {bound_us:.1f} us")
            plain_us: dict[RedrawTile, float] = {}
            for case in args.case or CASES:
                params = tensors_of(case, num_rows, device)
                steps = [params._replace(position=params.position + i) for i in range(NUM_CALLS)]
                for tile in args.tile or [DEFAULT_TILE]:
                    us = time_in_graph_us(
                        lambda i, t=tile, s=steps, x=logits: sample_tokens(x, s[i], tile=t), NUM_CALLS, NUM_RUNS, device
                    )
                    plain_us.setdefault(tile, us.median)
                    print(
                        f"  {case:22} tile {','.join(map(str, tile)):7} {us} us; {us.median - plain_us[tile]:+6.1f} us "
                        f"against the first, {us.median / bound_us:.1f} times the bound",
                        flush=True,
                    )
                    where = {"rows": num_rows, "logits": logits_name, "case": case, "tile": tile, "bound_us": bound_us}
                    results.append(where | us.as_json("us"))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 64, 512])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--case", action="append", choices=list(CASES), help="repeat for more; default: all")
    parser.add_argument(
        "--tile",
        action="append",
        type=lambda text: RedrawTile(*map(int, text.split(","))),
        help="groups, warps, stages; repeat for more; default: the chosen one",
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; TRITON_INTERPRET=1 and --smoke run tiny shapes on the CPU")
    name, device, byte_per_us = "cpu", "cpu", 1.0
    if args.smoke:
        args.rows, args.vocab_size = [2], 5000
    else:
        name, device = torch.cuda.get_device_name(), "cuda"
        source, target = (torch.empty(2**32, device="cuda", dtype=torch.uint8) for _ in range(2))
        byte_per_us = 2 * 2**32 / median_seconds(lambda: target.copy_(source)) / 1e6
        del source, target
    print(f"{name}: {byte_per_us / 1e6:.2f} TB/s (copy)")
    results = bench(args, byte_per_us, device)
    result = {"device": name, **versions(), "options": run_options(args), "copy_tb_per_s": byte_per_us / 1e6}
    report(result | {"results": results}, args.json)


if __name__ == "__main__":
    main()
