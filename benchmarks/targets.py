"""The jobs that `make bench-gpu` runs, and the targets that the project promises for their results."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


SERVER_NEEDS = ("fastapi", "uvicorn")  # the extra `server`


# -- jobs, with the most important figures first -----------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]
    timeout_s: int = 300
    num_gpus: int = 1
    needs: tuple[str, ...] = ()  # programs and Python modules that not every machine has
    env: tuple[tuple[str, str], ...] = ()  # {scratch} is replaced by an empty folder that is removed afterwards
    is_check: bool = False  # it passes or fails, and yields no figures

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.env), *self.command])


def bench(name: str, *args: str, **options: Any) -> Job:
    return Job(name, (sys.executable, *args), **options)


def by_backend(name: str, *args: str) -> list[Job]:
    """A benchmark with the backends that the engine chooses, with only our kernels, and with only flash-attn 2."""
    return [
        bench(name, "bench.py", *args),
        bench(f"{name}-triton", "bench.py", *args, "--backend", "triton"),
        bench(f"{name}-flash", "bench.py", *args, "--backend", "flash", needs=("flash_attn",)),
    ]


def guesses(name: str, *args: str) -> Job:
    return bench(f"guesses-{name}", "bench_offload.py", "--compare", "", "--decode-tokens", "24", *args)


def offload(name: str, *args: str, **options: Any) -> Job:
    return bench(f"offload-{name}", "bench_offload.py", *args, **options)


def serving(name: str, options: str, *args: str, **options_of_job: Any) -> Job:
    """A workload of bench_serve.py on a server with these engine options and random weights."""
    command = f"nanovllm serve --model {{model}} --load-format dummy --port {{port}} {options}"
    more = ("--preset", "qwen3-0.6b", "--start", command)
    return bench(f"serve-{name}", "bench_serve.py", *more, *args, needs=SERVER_NEEDS, **options_of_job)


def tests(name: str, *args: str, before: tuple[str, ...] = (), **options: Any) -> Job:
    command = (*before, sys.executable, "-m", "pytest", "-q", *args)
    return Job(name, command, is_check=True, **options)


def sanitizer(tool: str) -> Job:
    """Run every Triton kernel once, at real sizes, under a tool of compute-sanitizer.

    Each tensor gets its own allocation, because otherwise an access past its end would hit the allocator's memory and
    not be noticed.
    """
    return tests(
        tool,
        *(
            "-m",
            "gpu",
            "-k",
            "stays_inside",
            "-p",
            "no:xdist",
            "-o",
            "timeout=0",
            "tests/kernels/test_triton_kernels.py",
        ),
        before=("compute-sanitizer", "--tool", tool, "--error-exitcode", "1"),
        env=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
        needs=("compute-sanitizer",),
        timeout_s=300,
    )


REQUESTS = by_backend("requests")
LONG = by_backend("long", "--long")
BATCH = by_backend("batch256", "--batch", "256")
QWEN3_8B = ("bench.py", "--long", "--model", "qwen3-8b", "--max-model-len", "32768", "--runs", "3")
BOTH = ("--cpu-attention", "both")
LONG_SERVER = "--max-model-len 135168 --max-num-seqs 64"  # 131,072 tokens, a question and its answer
INTERFERENCE = ("--workload", "interference", "--document-tokens", "131072")
EMPTY_KERNEL_CACHE = (("TRITON_CACHE_DIR", "{scratch}"),)
JOBS = [
    bench("first-run", "-m", "benchmarks.first_run", env=EMPTY_KERNEL_CACHE),
    *(REQUESTS[0], LONG[0], BATCH[0]),
    offload("8slots", *BOTH, timeout_s=600),
    offload("4slots", "--num-gpu-blocks", "4", "--compare", "", *BOTH),
    offload("fits", "--num-gpu-blocks", "12", "--compare", "gpu"),
    bench("requests-offload", "bench.py", "--offload"),
    offload(
        "131k-small-blocks",
        *("--max-model-len", "131072", "--block-size", "256", "--num-gpu-blocks", "128"),
        *("--decode-tokens", "24", "--compare", "", *BOTH),
        timeout_s=600,
    ),
    bench("filters", "-m", "benchmarks.bench_filters"),
    # warm, because the jobs above have filled Triton's cache
    bench("start-warm", "bench.py", "--runs", "0"),
    bench("start-empty-cache", "bench.py", "--runs", "0", env=EMPTY_KERNEL_CACHE),
    offload("60gb-pool", "--cpu-memory-gb", "60", "--compare", "", "--one-prompt", "--runs", "1"),
    *LONG[1:],
    *BATCH[1:],
    *REQUESTS[1:],
    offload(
        "4x32k",
        *("--max-model-len", "32768", "--num-gpu-blocks", "12", "--batch", "4"),
        *("--decode-tokens", "24", "--compare", "", *BOTH),
    ),
    offload(
        "8b-32k",
        *("--model", "qwen3-8b", "--max-model-len", "32768", "--num-gpu-blocks", "4"),
        *("--one-prompt", "--runs", "3", "--decode-tokens", "24", "--compare", "", *BOTH),
    ),
    offload("131k", "--max-model-len", "131072", "--decode-tokens", "24", "--compare", "gpu", *BOTH, timeout_s=600),
    offload("fits-batch8", "--num-gpu-blocks", "80", "--batch", "8", "--compare", "gpu", timeout_s=600),
    offload(
        "7b-256k",
        *("--model", "qwen2.5-7b-1m", "--max-model-len", "262144", "--num-gpu-blocks", "36"),  # 7.9 GiB of slots
        *("--one-prompt", "--runs", "2", "--decode-tokens", "24", "--compare", "", *BOTH),
        timeout_s=600,
    ),
    guesses("131k", "--speculation", "resident", "--max-model-len", "131072", "--cpu-attention", "off"),
    guesses("131k-cpu", "--speculation", "resident", "--max-model-len", "131072"),
    guesses("40k", "--speculation", "resident", "--num-gpu-blocks", "4", "--cpu-attention", "off"),
    guesses("all-gpu", "--speculation", "prompt_lookup", "--num-gpu-blocks", "0", "--decode-tokens", "256"),
    serving(
        "chats",
        "--max-model-len 4096 --max-num-seqs 256",
        *("--concurrency", "256", "--num-requests", "256", "--against-generate"),
        timeout_s=600,
    ),
    serving(
        "document",
        f"{LONG_SERVER} --enable-cpu-offload --num-gpu-blocks 8",
        *("--workload", "document", "--document-tokens", "131072", "--questions", "6", "--runs", "3"),
        timeout_s=600,
    ),
    serving("interference", LONG_SERVER, *INTERFERENCE, timeout_s=600),
    serving("interference-offload", f"{LONG_SERVER} --enable-cpu-offload", *INTERFERENCE, timeout_s=600),
    serving("idle", "--max-model-len 4096 --max-num-seqs 64", "--workload", "idle-connections", timeout_s=600),
    bench(
        "serve-overhead",
        *("bench_serve.py", "--workload", "overhead", "--num-requests", "50"),
        *("--start", "nanovllm serve --model demo --device cpu --port {port} --max-model-len 4096"),
        num_gpus=0,
        needs=SERVER_NEEDS,
    ),
    bench("quote", "-m", "benchmarks.bench_quote"),
    *(bench(f"qwen3-8b-tp{n}", *QWEN3_8B, "--tp", str(n), num_gpus=n) for n in (1, 2, 4)),
    bench("attention", "benchmarks/bench_attention.py", timeout_s=600),
    bench("device-memory", "-m", "benchmarks.device_memory", timeout_s=900),
    bench("sampler", "benchmarks/bench_sampler.py"),
    bench("cpu-attention", "benchmarks/bench_cpu_attention.py", timeout_s=600),
    bench(
        "attention-rtx40",
        *("-m", "benchmarks.bench_attention", "--target", "8.9", "--backend", "triton", "--backend", "flash"),
        needs=("flash_attn",),
        timeout_s=600,
    ),
    sanitizer("memcheck"),
    sanitizer("racecheck"),
    tests("tests-gpu", "-m", "gpu and not slow", "tests", timeout_s=1200),
    tests("tests-gpu-rtx40", "-m", "gpu and not slow", "--kernel-target", "8.9", "tests", timeout_s=1200),
    tests("tests-multi-gpu", "-m", "multi_gpu", "tests", num_gpus=2, timeout_s=600),
    tests("tests-gpu-slow", "-m", "gpu and slow", "-k", "not soak", "tests", timeout_s=1200),
    tests(
        "soak",
        *("-m", "gpu and slow", "-k", "soak", "tests/gpu/test_gpu_streams.py"),
        env=(("NANOVLLM_SOAK_SECONDS", "300"),),
        timeout_s=1200,
    ),
]


# -- targets -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A quantity computed from the results of one or several jobs, and the bound that the project promises for it."""

    what: str
    jobs: tuple[str, ...]
    value: Callable[..., float]  # takes the results of `jobs`, in order
    bound: float  # the value must be at least this
    unit: str = ""
    at_most: bool = False  # or at most this

    def is_reached(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


def of(key: str) -> Callable[[Json], float]:
    return lambda result: float(result[key])


def ratio(key: str, other_key: str = "") -> Callable[..., float]:
    """A key of the first result over the same key of the last, or over another key of the same result."""
    return lambda *results: float(results[0][key]) / float(results[-1][other_key or key])


def one(what: str, job: str, key: str, bound: float, unit: str = "", at_most: bool = False) -> Target:
    return Target(what, (job,), of(key), bound, unit, at_most)


def at_acceptance(acceptance: float, key: str) -> Callable[[Json], float]:
    """A figure of benchmarks/speculation.py at this share of right guesses."""
    return lambda result: next(float(point[key]) for point in result["points"] if point["acceptance"] == acceptance)


def guessing(what: str, job: str, acceptance: float, bound: float) -> Target:
    """Decode with guesses of which this share is right, relative to decode without."""
    return Target(what, (job,), at_acceptance(acceptance, "ratio_to_plain"), bound)


def memory(what: str, case: str, key: str, bound: float, unit: str = "") -> Target:
    """The absolute value of a figure from one case of benchmarks/device_memory.py."""
    return Target(what, ("device-memory",), lambda result: abs(float(result[case][key])), bound, unit, at_most=True)


TARGETS = [
    one("256 requests", "requests", "output_tok_per_s", 28_000, "tok/s"),
    Target(
        "256 requests, offload by default / all-GPU", ("requests-offload", "requests"), ratio("output_tok_per_s"), 0.9
    ),
    one("prefill 40,959 tokens", "long", "prefill_tok_per_s", 105_000, "tok/s"),
    one("decode at 40K", "long", "decode_tok_per_s", 470, "tok/s"),
    Target(
        "decode, batch 256 at 1K / bound",
        ("batch256",),
        ratio("batch_decode_tok_per_s", "batch_decode_bound_tok_per_s"),
        0.8,
    ),
    Target("Triton / flash-attn 2, prefill 40K", ("long-triton", "long-flash"), ratio("prefill_tok_per_s"), 1),
    Target("Triton / flash-attn 2, decode at 40K", ("long-triton", "long-flash"), ratio("decode_tok_per_s"), 1),
    Target(
        "Triton / flash-attn 2, decode, batch 256",
        ("batch256-triton", "batch256-flash"),
        ratio("batch_decode_tok_per_s"),
        1,
    ),
    one("an RTX 40's kernels: Triton / flash-attn 2", "attention-rtx40", "triton_share_of_flash", 0.8),
    Target("2 ranks / 1, Qwen3-8B, prefill 32K", ("qwen3-8b-tp2", "qwen3-8b-tp1"), ratio("prefill_tok_per_s"), 1.6),
    *(one(f"filtered / unfiltered, {n} rows", "filters", f"filtered_share_{n}", 0.95) for n in (1, 64, 512)),
    one("one filtered row of 512 / none", "filters", "one_filtered_share_512", 0.97),
    one("first process: first token", "first-run", "first_token_s", 15, "s", at_most=True),
    one("first process: first 40K prompt / second", "first-run", "first_prompt_over_second", 1.3, at_most=True),
    one("first process: first 256 requests / steady", "first-run", "first_requests_share", 0.9),
    one("first process: second 256 requests / steady", "first-run", "second_requests_share", 0.97),
    one("start to first token", "start-warm", "start_to_first_token_s", 15, "s", at_most=True),
    one("the same, Triton's cache empty", "start-empty-cache", "start_to_first_token_s", 15, "s", at_most=True),
    one("offload 40K, 8 slots: prefill / all-GPU", "offload-8slots", "prefill_ratio_to_gpu", 0.95),
    one("offload 40K, 8 slots: decode", "offload-8slots", "offload_decode_tok_per_s", 45, "tok/s"),
    one("offload 40K, 4 slots: decode / link bound", "offload-4slots", "link_only_link_share", 0.9),
    one("offload 131K: prefill / all-GPU", "offload-131k", "prefill_ratio_to_gpu", 0.95),
    one("offload 131K: decode / link bound", "offload-131k", "link_only_link_share", 0.93),
    Target(
        "offload 131K, blocks of 256: decode / link bound",
        ("offload-131k-small-blocks",),
        of("link_only_link_share"),
        0.97,
    ),
    one("offload, all fits: decode / all-GPU", "offload-fits", "decode_ratio_to_gpu", 0.95),
    one("the same, batch 8", "offload-fits-batch8", "decode_ratio_to_gpu", 0.95),
    one("offload 4 x 32K: decode / link bound", "offload-4x32k", "link_only_link_share", 0.9),
    one("offload 7B, 256K: prefill / arithmetic bound", "offload-7b-256k", "prefill_bound_share", 0.6),
    one("offload 7B, 256K: decode / link bound", "offload-7b-256k", "link_only_link_share", 0.93),
    *(
        one(f"{work}: decode with the CPU / without", f"offload-{name}", "decode_ratio_to_link_only", least)
        for work, name, least in (
            ("offload 40K, 8 slots", "8slots", 1.4),
            ("offload 40K, 4 slots", "4slots", 1.7),
            ("offload 131K", "131k", 1.8),
            ("offload 4 x 32K", "4x32k", 1.6),
            ("offload 8B, 32K", "8b-32k", 1.6),
            ("offload 7B, 256K", "7b-256k", 1.5),
        )
    ),
    guessing("131K, guesses right at 0.9 / none", "guesses-131k", 0.9, 5),
    guessing("131K, guesses right at 0 / none", "guesses-131k", 0.0, 0.97),
    Target(
        "131K with the CPU, guesses right at 0.9 / link bound",
        ("guesses-131k-cpu", "guesses-131k"),
        lambda cpu, link: at_acceptance(0.9, "decode_tok_per_s")(cpu) / float(link["bound_tok_per_s"]),
        7,
    ),
    guessing("40K, 4 slots, guesses right at 0.8 / none", "guesses-40k", 0.8, 3),
    guessing("40K on the GPU, guesses right at 0.9 / none", "guesses-all-gpu", 0.9, 3),
    one("131K, quote of 200 tokens: prompt_lookup / off", "quote", "prompt_lookup_ratio", 6),
    one("offload 40K: prefill with the CPU / without", "offload-8slots", "prefill_ratio_to_link_only", 0.98),
    Target(
        "peak GPU memory, 131K / 40K",
        ("offload-131k", "offload-8slots"),
        ratio("offload_peak_bytes"),
        1.02,
        at_most=True,
    ),
    memory("README's example: GPU memory", "readme", "served_bytes", 6.5 * 2**30, "B"),
    memory("2 slots, chunks of 4096: GPU memory", "2slots", "served_bytes", 3.2 * 2**30, "B"),
    memory("README's example: plan's error", "readme", "plan_error", 0.05),
    memory("Qwen3-8B on 24 GiB: plan's error", "8b-24gib", "plan_error", 0.05),
    one("second question / first, 40K", "offload-8slots", "second_question_ttft_ratio", 0.1, at_most=True),
    one("256 streams through HTTP / LLM.generate", "serve-chats", "share_of_generate", 0.93),
    one("HTTP, second question / first, 131K", "serve-document", "second_question_ttft_ratio", 0.1, at_most=True),
    *(
        one(f"{where}: {what}", job, key, bound, unit, at_most=True)
        for where, job in (("131K prefill", "serve-interference"), ("the same, offload", "serve-interference-offload"))
        for what, key, bound, unit in (
            ("short request, first token", "short_ttft_latest_s", 0.4, "s"),
            ("streams' p99 / quiet p50", "prefill_p99_over_quiet_p50", 3, ""),
        )
    ),
    one("streams beside 1,000 idle connections / alone", "serve-idle", "with_over_without", 0.97),
    one("CPU: HTTP adds to a request", "serve-overhead", "overhead_ms", 3, "ms", at_most=True),
    one("CPU: HTTP adds to a streamed request", "serve-overhead", "stream_overhead_ms", 3, "ms", at_most=True),
    one("start with a 60 GB pool", "offload-60gb-pool", "start_s", 15, "s", at_most=True),
    *(one(f"{job.name}: passed", job.name, "passed", 1) for job in JOBS if job.is_check),
]
