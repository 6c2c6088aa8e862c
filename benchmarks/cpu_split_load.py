"""Decode with the CPU's attention while another process reads memory: python -m benchmarks.cpu_split_load

Long sequences decode in one engine from beginning to end. For each number of threads that read memory beside it, decode
is timed with several splits between the link and the CPU: the one that follows what steps take, that of the start, and
fixed ones for a CPU with other shares of the rate that the start measured.
"""

import argparse
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import add_model_arguments, greedy, model_of_length, random_prompt
from benchmarks.reporting import report, run_options, versions
from nanovllm import LLM
from nanovllm.core.cpu_split import CpuSplit, FollowingSplit, LayerTimes
from nanovllm.core.step_plan import StepPlan
from nanovllm.kvcache.policy.hybrid_manager import HybridKVCacheManager
from nanovllm.utils.arithmetic import ceil_div

SETTLE_STEPS = 3  # after a change of the split
FOLLOW_STEPS, SHOWN_STEPS = 128, 8  # after a new load begins, and those between two shares that are printed
READER_BYTES = 2**29  # of each thread, more than the caches hold
READER_S = 600.0  # after which readers end by themselves


def read_memory(num_threads: int, num_bytes: int, max_s: float = READER_S) -> None:
    """Read memory until stdin is closed; then print the bytes per second of all threads."""
    ending = threading.Event()
    num_read = [0] * num_threads

    def read(thread: int) -> None:
        array = np.ones(num_bytes // 8, dtype=np.int64)
        ready.wait()
        while not ending.is_set():
            array.max()  # without the GIL
            num_read[thread] += array.nbytes

    ready = threading.Barrier(num_threads + 1)
    for thread in range(num_threads):
        threading.Thread(target=read, args=(thread,), daemon=True).start()
    ready.wait()
    print("ready", flush=True)
    start_s = time.perf_counter()
    threading.Thread(target=lambda: (sys.stdin.read(), ending.set()), daemon=True).start()
    ending.wait(max_s)
    print(sum(num_read) / (time.perf_counter() - start_s), flush=True)


@contextmanager
def memory_readers(num_threads: int, num_bytes: int = READER_BYTES) -> Iterator[list[float]]:
    """A process that reads memory with so many threads. Yields a list that gets its bytes per second at the end."""
    rates = [] if num_threads else [0.0]
    if not num_threads:
        yield rates
        return
    command = [sys.executable, "-m", "benchmarks.cpu_split_load", "--reader", str(num_threads), str(num_bytes)]
    root = Path(__file__).parents[1]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n", "the readers did not start"
        yield rates
        answer, _ = process.communicate(timeout=20)
        rates.append(float(answer))
    finally:
        process.kill()
        process.wait()


def scaled(split: CpuSplit, factor: float) -> CpuSplit:
    """The split for a CPU whose rate is so much of that of the start."""
    rates = tuple(rate._replace(byte_per_s=rate.byte_per_s * factor) for rate in split.cpu_rates)
    return replace(split, cpu_rates=rates)


class FixedSplit(FollowingSplit):
    """A split that stays as it is."""

    def step_ended(self, plan: StepPlan, times: LayerTimes | None) -> None:
        return


class Session:
    """Sequences that decode together, whose split can be changed at any time."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self.llm, self.batch = llm, args.batch
        kv = llm.engine.scheduler.kv
        assert isinstance(kv, HybridKVCacheManager) and kv.cpu_split is not None, "the CPU takes no part here"
        self.kv, self.following = kv, kv.cpu_split
        rng = random.Random(1)
        num_tokens = args.max_model_len - args.max_tokens
        for _ in range(args.batch):
            prompt = random_prompt(rng, num_tokens, llm.model_config.vocab_size)
            llm.add_request(prompt, greedy(args.max_tokens))
        while llm.step().num_decode_tokens < args.batch:
            pass

    def use(self, split: FollowingSplit) -> None:
        self.kv.cpu_split = self.kv.histories._split = split

    def tok_per_s(self, num_steps: int) -> float:
        """The rate of steps that only decode."""
        start_s = time.perf_counter()
        for _ in range(num_steps):
            assert self.llm.step().num_decode_tokens == self.batch, "the sequences have ended; raise --max-tokens"
        return num_steps * self.batch / (time.perf_counter() - start_s)

    def cpu_share(self) -> float:
        """The CPU's share of the last step's missing tokens."""
        moves = self.kv._last_moves
        cpu = sum(span.end - span.start for spans in moves.cpu_spans for span in spans)
        return cpu / max(1, cpu + sum(group.num_tokens(self.kv.block_size) for group in moves.streamed))


def measure_load(session: Session, args: argparse.Namespace, num_threads: int) -> list[dict[str, Any]]:
    """A row for each split: rates of `--rounds` windows of steps, with the splits in turn."""
    following = session.following
    splits: dict[str, FollowingSplit] = {f"{f:.2f}": FixedSplit(scaled(following.start, f)) for f in args.factors}
    splits["follows"] = following
    rates: dict[str, list[float]] = {name: [] for name in splits}
    shares = {}
    with memory_readers(num_threads, args.reader_bytes) as reading:
        session.use(following)
        path = [(session.tok_per_s(SHOWN_STEPS), session.cpu_share()) for _ in range(FOLLOW_STEPS // SHOWN_STEPS)]
        print(f"{num_threads} readers: the CPU's share, and tok/s, of each {SHOWN_STEPS} steps that follow:")
        print(*(f"{share:.3f} ({rate:.1f})" for rate, share in path), flush=True)
        for name in list(splits) * args.rounds:
            session.use(splits[name])
            session.tok_per_s(SETTLE_STEPS)
            rates[name].append(session.tok_per_s(args.steps))
            shares[name] = session.cpu_share()
    print("slowness of link and CPU: {:.3f}, {:.3f}".format(*following._slowness), flush=True)
    best = max(median(values) for name, values in rates.items() if name != "follows")
    return [
        {
            "num_threads": num_threads,
            "read_byte_per_s": reading[0],
            "split": name,
            "cpu_share": shares[name],
            "tok_per_s": median(values),
            "tok_per_s_min": min(values),
            "tok_per_s_max": max(values),
            "ratio_to_best_fixed": median(values) / best,
        }
        for name, values in rates.items()
    ]


def measure(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, printed as they come."""
    session = Session(llm, args)
    session.tok_per_s(2 * SETTLE_STEPS)
    rows = []
    print("readers  GB/s read |   split  CPU's share | tok/s (min to max) | of the best fixed", flush=True)
    for num_threads in args.threads:
        for row in measure_load(session, args, num_threads):
            print(
                f"{row['num_threads']:7}  {row['read_byte_per_s'] / 1e9:9.1f} | {row['split']:>7}  "
                f"{row['cpu_share']:11.3f} | {row['tok_per_s']:5.1f} ({row['tok_per_s_min']:.1f} to "
                f"{row['tok_per_s_max']:.1f}) | {row['ratio_to_best_fixed']:.3f}",
                flush=True,
            )
            rows.append(row)
    return rows


def make_llm(args: argparse.Namespace, **options: Any) -> LLM:
    return LLM(
        model_of_length(args.model, args.max_model_len),
        load_format=args.load_format,
        quantization=args.quantization,
        max_model_len=args.max_model_len,
        max_num_seqs=max(8, args.batch),
        tensor_parallel_size=args.tp,
        attn_backend=args.backend,
        enable_cpu_offload=True,
        cpu_attention="on",
        num_gpu_blocks=args.num_gpu_blocks,
        kvcache_block_size=args.block_size,
        num_cpu_blocks=(args.batch + 1) * ceil_div(args.max_model_len, args.block_size),
        **options,
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(made)
    made.set_defaults(max_model_len=32768)
    made.add_argument("--num-gpu-blocks", type=int, default=12, help="slots on the GPU")
    made.add_argument("--block-size", type=int, default=4096, help="tokens per block")
    made.add_argument("--batch", type=int, default=4, help="sequences that decode together")
    made.add_argument("--threads", type=int, nargs="+", default=[0, 4, 0, 8, 0], help="readers of memory, in turn")
    factors = [0.1, 0.2, 0.35, 0.5, 1.0]
    made.add_argument("--factors", type=float, nargs="+", default=factors, help="of the CPU's rate at the start")
    made.add_argument("--rounds", type=int, default=3, help="windows for each split")
    made.add_argument("--steps", type=int, default=12, help="steps of a window")
    made.add_argument("--max-tokens", type=int, default=3000, help="most steps in all")
    made.add_argument("--reader-bytes", type=int, default=READER_BYTES, help="that each reader goes through")
    return made


def main() -> None:
    args = parser().parse_args()
    llm = make_llm(args)
    split = llm.engine.scheduler.kv.cpu_split
    print(f"{split and split.start}\n{llm.stats()['cpu_attention']}")
    rows = measure(llm, args)
    llm.close()
    report(run_options(args) | versions() | {"rows": rows}, args.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--reader"]:
        read_memory(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
