"""Times attention on the CPU over keys in CPU memory, alone and, on a GPU machine, concurrent with copies to the GPU.

    python benchmarks/bench_cpu_attention.py                     # every kernel that can run here, 2 GiB of K and V
    python benchmarks/bench_cpu_attention.py --kernel amx --threads 8,14 --rows 1,4,9
    python benchmarks/bench_cpu_attention.py --mib 8 --runs 5    # small: does it run?

A rate counts K and V read once. The bound is plain reading of the same memory by the same number of threads. For the
figures concurrent with the link, another thread keeps copying pinned memory to the GPU, and the rate of its copies is
also given. The last line is JSON.
"""

import argparse
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.common import NUM_RUNS
from benchmarks.reporting import Samples, report, run_options, versions
from nanovllm.capabilities.cpu_attention.job import AttentionJob, CpuKernel, RowSpans, TokenSpan
from nanovllm.capabilities.cpu_attention.kernels import KERNEL_NAMES, CompiledKernel, choose_kernel
from nanovllm.capabilities.cpu_attention.threads import attention_cpus
from nanovllm.device.pinned_memory import HostBuffer
from nanovllm.errors import ConfigError

HEADS = "8x1,8x2,8x4,4x7,8x8,2x16"  # kv heads x query heads per kv head
BLOCK_SIZE = 64
_COPY_BYTES, _COPIES_PER_EVENT = 8 * 2**20, 8


class Link:
    """Keeps copying `memory` to the GPU while it is entered, and knows how fast."""

    def __init__(self, memory: torch.Tensor) -> None:
        copy_bytes = min(_COPY_BYTES, memory.numel())
        self._sources = memory[: memory.numel() // copy_bytes * copy_bytes].view(-1, copy_bytes)
        self._target = torch.empty(copy_bytes, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()

    def __enter__(self) -> "Link":
        self._is_stopping, self._num_copies, self._start_s = False, 0, time.perf_counter()
        self._thread = threading.Thread(target=self._copy)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_stopping = True
        self._thread.join()
        self.gb_per_s = self._num_copies * self._target.numel() / (time.perf_counter() - self._start_s) / 1e9

    def _copy(self) -> None:
        """Two groups of copies are always queued; a blocking event leaves the CPU to other threads."""
        sources = itertools.cycle(self._sources)
        events: list[torch.cuda.Event] = []
        with torch.cuda.stream(self._stream):
            while not self._is_stopping:
                for source in itertools.islice(sources, _COPIES_PER_EVENT):
                    self._target.copy_(source, non_blocking=True)
                events.append(torch.cuda.Event(blocking=True))
                events[-1].record()
                self._num_copies += _COPIES_PER_EVENT
                if len(events) > 2:
                    events.pop(0).synchronize()
            self._stream.synchronize()


def fill(memory: torch.Tensor, dtype: torch.dtype) -> None:
    """Random values that repeat every few MiB, since making all of them would take long."""
    values = torch.randn(min(2**21, memory.numel() // dtype.itemsize), dtype=torch.float32).to(dtype)
    pieces = memory.view(dtype).split(values.numel())
    for piece in pieces:
        piece.copy_(values[: piece.numel()])


def make_job(memory: torch.Tensor, heads: str, head_dim: int, num_rows: int, dtype: str, num_threads: int) -> Any:
    """Make a job over all of `memory`, half K and half V. Returns the job and the bytes that it reads."""
    num_kv_heads, group = map(int, heads.split("x"))
    cells = memory.view(getattr(torch, dtype)).view(2, -1)
    num_blocks = cells.shape[1] // (BLOCK_SIZE * num_kv_heads * head_dim)
    num_values = num_blocks * BLOCK_SIZE * num_kv_heads * head_dim
    k_cache, v_cache = (
        half[:num_values].view(1, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim).contiguous() for half in cells
    )
    q_THD = torch.randn(num_rows, num_kv_heads * group, head_dim).to(cells.dtype)
    job = AttentionJob(
        k_cache=k_cache,
        v_cache=v_cache,
        q_THD=q_THD,
        out_THD=torch.empty_like(q_THD),
        lse_HT=torch.empty(num_kv_heads * group, num_rows),
        rows=[RowSpans(num_rows, (TokenSpan(0, num_blocks * BLOCK_SIZE),))],
        scale=head_dim**-0.5,
        num_threads=num_threads,
    )
    return job, 2 * k_cache.nbytes


def measure(work: Callable[[], object], num_bytes: int, num_runs: int, link: Link | None) -> dict[str, Any]:
    """GB/s of `work` alone and concurrent with the link, each after a warm-up, and of the link."""
    figures: dict[str, Any] = {}
    for prefix in ("", "beside_link_") if link else ("",):
        rates = []
        with link if link and prefix else nullcontext():
            for _ in range(num_runs + 1):
                start_s = time.perf_counter()
                work()
                rates.append(num_bytes / (time.perf_counter() - start_s) / 1e9)
        figures |= Samples(tuple(rates[1:])).as_json(f"{prefix}gb_per_s")
        if link and prefix:
            figures["link_gb_per_s"] = link.gb_per_s
    return figures


def print_row(row: dict[str, Any]) -> None:
    what = f"{row['kernel']:11} {row['heads']:5} D={row['head_dim']:4} rows={row['rows']:3} threads={row['threads']:3}"
    rates = [f"{row['gb_per_s']:6.1f} ({row['gb_per_s_min']:.1f} to {row['gb_per_s_max']:.1f}) GB/s"]
    if "reading_share" in row:
        rates.append(f"{row['reading_share']:4.0%} of reading")
    if "link_gb_per_s" in row:
        rates.append(f"concurrent with the link {row['beside_link_gb_per_s']:.1f}, the link {row['link_gb_per_s']:.1f}")
    print(what, *rates, flush=True)


def bench_threads(
    names: list[str], memory: torch.Tensor, num_threads: int, args: argparse.Namespace, link: Link | None
) -> list[dict[str, Any]]:
    """All rows of the table for this number of threads, plain reading first."""
    cpus = attention_cpus(num_threads, 0, 1)
    kernels: list[CpuKernel] = [choose_kernel(cpus.cpus, name, is_pinned=cpus.is_pinned) for name in names]
    rows: list[dict[str, Any]] = []
    reader = next((kernel for kernel in kernels if isinstance(kernel, CompiledKernel)), None)
    if reader is not None:
        where = {"kernel": "reading", "heads": "", "head_dim": 0, "rows": 0, "threads": num_threads}
        rows.append(where | measure(lambda: reader.read(memory), memory.nbytes, args.runs, link))
        print_row(rows[0])
    dims, counts = (map(int, text.split(",")) for text in (args.head_dim, args.rows))
    for head_dim, num_rows, heads in itertools.product(dims, counts, args.heads.split(",")):
        job, num_bytes = make_job(memory, heads, head_dim, num_rows, args.dtype, num_threads)
        for kernel in kernels:
            row = {
                "kernel": kernel.name,
                "heads": heads,
                "head_dim": head_dim,
                "rows": num_rows,
                "threads": num_threads,
            }
            row |= measure(lambda kernel=kernel, job=job: kernel.attend(job, 0), num_bytes, args.runs, link)
            if reader is not None:
                row["reading_share"] = row["gb_per_s"] / rows[0]["gb_per_s"]
            print_row(row)
            rows.append(row)
    for kernel in kernels:
        kernel.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", choices=KERNEL_NAMES, help="repeat for more; default: all")
    parser.add_argument("--heads", default=HEADS, help="kv heads x query heads per kv head, several with commas")
    parser.add_argument("--rows", default="1", help="query rows, several with commas")
    parser.add_argument("--head-dim", default="128", help="several with commas")
    parser.add_argument("--threads", help="several with commas; default: as many as an engine would use")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--mib", type=int, default=2048, help="size of K and V together")
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    names = []
    for name in args.kernel or KERNEL_NAMES:
        try:
            choose_kernel([0], name).close()
            names.append(name)
        except ConfigError as error:  # the kernel cannot run here; the error says why
            print(error)
    if not names:
        parser.error("none of these kernels can run here")
    has_gpu = torch.cuda.is_available()
    buffer = HostBuffer(args.mib * 2**20, torch.device("cuda", 0) if has_gpu else None)
    fill(buffer.tensor, getattr(torch, args.dtype))
    link = Link(buffer.tensor) if has_gpu else None
    thread_counts = args.threads or str(len(attention_cpus(None, 0, 1).cpus))
    rows = []
    for num_threads in map(int, thread_counts.split(",")):
        rows += bench_threads(names, buffer.tensor, num_threads, args, link)
    buffer.close()
    device = torch.cuda.get_device_name() if has_gpu else "cpu"
    report({"device": device, **versions(), **run_options(args), "results": rows}, args.json)


if __name__ == "__main__":
    main()
