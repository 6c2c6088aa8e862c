"""Times the experts of a mixture in CPU memory, one layer at a time, for the shapes of real models.

    python -m benchmarks.bench_cpu_experts                          # the best kernel, both models, five types
    python -m benchmarks.bench_cpu_experts --kernel avx2 --type Q4_K --tokens 1,8 --threads 8,14
    python -m benchmarks.bench_cpu_experts --mib 64 --runs 5        # small: does it run?

Each job has other tokens, so the chosen experts differ, and the layers' weights together are larger than the caches.
A rate in GB/s counts the weights of each chosen expert once; the bound is plain reading by the same number of threads.
The tokens per second of all layers of the model count the experts alone, and are therefore projected. The last line is
JSON.
"""

import argparse
import itertools
import time
from typing import Any, NamedTuple

import torch

from benchmarks.common import NUM_RUNS
from benchmarks.reporting import Samples, report, run_options, versions
from nanovllm.capabilities.cpu_attention.job import CpuKernel
from nanovllm.capabilities.cpu_attention.kernels import KERNEL_NAMES, CompiledKernel, choose_kernel
from nanovllm.capabilities.cpu_attention.threads import attention_cpus
from nanovllm.capabilities.cpu_experts.job import ExpertJob
from nanovllm.capabilities.cpu_experts.store import ExpertMatrix, ExpertStore, store_bytes
from nanovllm.device.pinned_memory import HostBuffer
from nanovllm.plan.expert_formats import GROUP_SIZES, WEIGHT_TYPES, LayerFormat, MatrixFormat, layer_bytes

_JOBS_PER_RUN = 8


class Shape(NamedTuple):
    num_layers: int
    num_experts: int
    num_chosen: int
    hidden_size: int
    size: int


MODELS = {"Qwen3-30B-A3B": Shape(48, 128, 8, 2048, 768), "Qwen3.5-35B-A3B": Shape(40, 256, 8, 2048, 512)}


def fill(matrix: ExpertMatrix) -> None:
    """Random codes, and for floats small numbers. What the codes mean does not change the time."""
    noise = torch.randint(2**15, (2**20,), dtype=torch.int16).view(torch.uint8)
    if not matrix.format.type.is_quantized:
        noise = (torch.randn(2**20) / 64).to(torch.bfloat16).view(torch.uint8)
    for piece in matrix.codes.flatten().split(noise.numel()):
        piece.copy_(noise[: piece.numel()])
    if matrix.scales is not None:
        matrix.scales.fill_(0.001)


def make_store(shape: Shape, type_name: str, max_bytes: int) -> ExpertStore:
    """Make as many layers as fit `max_bytes`, at least one."""
    block_type = WEIGHT_TYPES[type_name]
    group_size = max(GROUP_SIZES.get(block_type, (0,)))
    up, down = (
        MatrixFormat(type=block_type, num_rows=rows, num_columns=columns, group_size=group_size)
        for rows, columns in ((shape.size, shape.hidden_size), (shape.hidden_size, shape.size))
    )
    formats = LayerFormat(up, up, down)
    num_layers = min(shape.num_layers, max(1, max_bytes // layer_bytes(formats, shape.num_experts)))
    places = torch.arange(shape.num_experts, dtype=torch.int32)
    layers = [formats] * num_layers, [places] * num_layers
    buffer = HostBuffer(store_bytes(*layers), None)  # has huge pages, where the machine gives them
    store = ExpertStore(*layers, buffer.tensor)
    for layer, part in itertools.product(store.layers, range(3)):
        fill(layer.matrices[part])
    return store


def measure(kernel: CpuKernel, store: ExpertStore, shape: Shape, num_tokens: int, num_runs: int) -> dict[str, Any]:
    """GB/s and tok/s of jobs in bf16, after a warm-up. Each run has the same jobs."""
    jobs, num_bytes, scratch = [], 0, None
    of_expert = store.memory.nbytes / len(store.layers) / shape.num_experts
    for _ in range(_JOBS_PER_RUN):
        x = torch.randn(num_tokens, shape.hidden_size).to(torch.bfloat16)
        experts = torch.rand(num_tokens, shape.num_experts).topk(shape.num_chosen).indices.int()
        weights = torch.full(experts.shape, 1 / shape.num_chosen)
        jobs.append(ExpertJob(store, x=x, experts=experts, weights=weights, out=torch.empty_like(x), scratch=scratch))
        scratch = jobs[-1].scratch
        num_bytes += int(len(experts.unique()) * of_expert)
    layers = itertools.cycle(range(len(store.layers)))
    rates, speeds = [], []
    for _ in range(num_runs + 1):
        start_s = time.perf_counter()
        for job in jobs:
            kernel.compute_experts(job, next(layers))
        seconds = time.perf_counter() - start_s
        rates.append(num_bytes / seconds / 1e9)
        speeds.append(num_tokens * len(jobs) / seconds / shape.num_layers)
    return Samples(tuple(rates[1:])).as_json("gb_per_s") | Samples(tuple(speeds[1:])).as_json("projected_tok_per_s")


def print_row(row: dict[str, Any]) -> None:
    what = f"{row['kernel']:11} {row['model']:15} {row['type']:6} tokens={row['tokens']:3} threads={row['threads']:3}"
    rates = [f"{row['gb_per_s']:6.1f} ({row['gb_per_s_min']:.1f} to {row['gb_per_s_max']:.1f}) GB/s"]
    if "reading_share" in row:
        rates.append(f"{row['reading_share']:4.0%} of reading")
    print(what, *rates, f"{row['projected_tok_per_s']:.1f} tok/s (projected)", flush=True)


def reading_rate(kernel: CpuKernel, store: ExpertStore, num_runs: int) -> float:
    """GB/s of plain reading of the weights."""
    assert isinstance(kernel, CompiledKernel), "only compiled kernels read"
    memory = store.memory
    rates = []
    for _ in range(num_runs + 1):
        start_s = time.perf_counter()
        kernel.read(memory)
        rates.append(memory.nbytes / (time.perf_counter() - start_s) / 1e9)
    return Samples(tuple(rates[1:])).median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=KERNEL_NAMES, help="default: the best that can run here")
    parser.add_argument("--model", action="append", choices=MODELS, help="repeat for more; default: all")
    parser.add_argument("--type", default="INT4,Q4_K,Q6_K,E4M3,BF16", help="types of weights, several with commas")
    parser.add_argument("--tokens", default="1,4,16,64", help="several with commas")
    parser.add_argument("--threads", help="several with commas; default: as many as an engine would use")
    parser.add_argument("--mib", type=int, default=2048, help="size of the weights of each model and type")
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    thread_counts = args.threads or str(len(attention_cpus(None, 0, 1).cpus))
    rows = []
    for name, type_name in itertools.product(args.model or MODELS, args.type.split(",")):
        store = make_store(MODELS[name], type_name, args.mib * 2**20)
        for num_threads in map(int, thread_counts.split(",")):
            cpus = attention_cpus(num_threads, 0, 1)
            kernel = choose_kernel(cpus.cpus, args.kernel, is_pinned=cpus.is_pinned)
            bound = reading_rate(kernel, store, args.runs) if isinstance(kernel, CompiledKernel) else None
            for num_tokens in map(int, args.tokens.split(",")):
                row = {"kernel": kernel.name, "model": name, "type": type_name, "threads": num_threads}
                row |= {"tokens": num_tokens} | measure(kernel, store, MODELS[name], num_tokens, args.runs)
                if bound is not None:
                    row |= {"reading_gb_per_s": bound, "reading_share": row["gb_per_s"] / bound}
                print_row(row)
                rows.append(row)
            kernel.close()
    report({"device": "cpu", **versions(), **run_options(args), "results": rows}, args.json)


if __name__ == "__main__":
    main()
