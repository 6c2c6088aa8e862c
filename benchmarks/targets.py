"""The jobs that `make bench-gpu` runs, and the targets that the project promises for their results."""

import shlex
import sys
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

FLASH = ("flash_attn",)
SERVER_NEEDS = ("fastapi", "uvicorn", "aiohttp")  # the extras `server` and `bench`


# -- jobs, with the most important figures first -----------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]
    timeout_s: int = 600
    num_gpus: int = 1
    needs: tuple[str, ...] = ()  # programs and Python modules that some machines lack
    env: tuple[tuple[str, str], ...] = ()  # {scratch} is replaced by an empty folder that is removed afterwards
    is_check: bool = False  # the job passes or fails, and yields no figures

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.env), *self.command])


def bench(name: str, arguments: str, *more: str, **options: Any) -> Job:
    """Make a benchmark that this Python runs with `arguments`, divided at spaces, and `more`."""
    return Job(name, (sys.executable, *arguments.split(), *more), **options)


def by_backend(name: str, arguments: str) -> list[Job]:
    """Make benchmarks with the backends that the engine chooses, with only our kernels, and with only flash-attn 2."""
    return [
        bench(name, arguments),
        bench(f"{name}-triton", f"{arguments} --backend triton"),
        bench(f"{name}-flash", f"{arguments} --backend flash", needs=FLASH),
    ]


def guesses(name: str, arguments: str, **options: Any) -> Job:
    return bench(f"guesses-{name}", f"bench_offload.py --decode-tokens 24 {arguments} --compare", "", **options)


def offload(name: str, arguments: str, compare: str | None = "", **options: Any) -> Job:
    """compare: other engines in the same run, or None for the default of bench_offload.py."""
    more = () if compare is None else ("--compare", compare)
    return bench(f"offload-{name}", f"bench_offload.py {arguments}", *more, **options)


def small_gpu(model: str, memory_gb: float, arguments: str) -> Job:
    arguments = f"-m benchmarks.small_gpu --model {model} --memory-gb {memory_gb} {arguments}"
    return bench(f"small-gpu-{model}", arguments, timeout_s=900)


def serving(name: str, options: str, arguments: str) -> Job:
    """Make a workload of bench_serve.py on a server with these engine options and random weights."""
    command = f"nanovllm serve --model {{model}} --load-format dummy --port {{port}} {options}"
    arguments = f"bench_serve.py --preset qwen3-0.6b {arguments} --start"
    return bench(f"serve-{name}", arguments, command, needs=SERVER_NEEDS)


def tests(name: str, arguments: str, marks: str, *more: str, before: tuple[str, ...] = (), **options: Any) -> Job:
    command = (*before, sys.executable, "-m", "pytest", "-q", *arguments.split(), "-m", marks, *more)
    return Job(name, command, is_check=True, **options)


def sanitizer(tool: str) -> Job:
    """Run every Triton kernel once, at real sizes, under a tool of compute-sanitizer.

    Each tensor gets a separate allocation, because otherwise an access past its end would hit the allocator's memory
    unnoticed.
    """
    return tests(
        tool,
        "-k stays_inside -p no:xdist -o timeout=0 tests/kernels/test_triton_kernels.py",
        "gpu",
        before=("compute-sanitizer", "--tool", tool, "--error-exitcode", "1"),
        env=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
        needs=("compute-sanitizer",),
    )


REQUESTS = by_backend("requests", "bench.py")
LONG = by_backend("long", "bench.py --long")
BATCH = by_backend("batch256", "bench.py --batch 256")
QWEN3_8B = "--model qwen3-8b --max-model-len 32768"
QWEN_7B_256K = "--model qwen2.5-7b-1m --max-model-len 262144 --num-gpu-blocks 36"  # 7.9 GiB of slots
BOTH = "--cpu-attention both"
SHORT_DECODE = f"--decode-tokens 24 {BOTH}"
QWEN3_30B = "--model qwen3-30b-a3b"
SHADOW = "--speculation shadow"
SMALL_CARD = "--max-model-len 131072 --quantization int4 --decode-tokens 24 --runs 2 --cpu-attention both"
LONG_HYBRID = "--max-model-len 524288 --num-gpu-blocks 64"  # 16 GiB of slots
LONG_SERVER = "--max-model-len 135168 --max-num-seqs 64"  # 131,072 tokens, a question and its answer
INTERFERENCE = "--workload interference --document-tokens 131072"
EMPTY_KERNEL_CACHE = (("TRITON_CACHE_DIR", "{scratch}"),)
SOAK = (("NANOVLLM_SOAK_SECONDS", "300"),)
JOBS = [
    bench("first-run", "-m benchmarks.first_run", env=EMPTY_KERNEL_CACHE),
    *(REQUESTS[0], LONG[0], BATCH[0]),
    offload("8slots", BOTH, None),
    offload("4slots", f"--num-gpu-blocks 4 {BOTH}"),
    offload("fits", "--num-gpu-blocks 12", "gpu"),
    bench("requests-offload", "bench.py --offload"),
    offload("131k-small-blocks", f"--max-model-len 131072 --block-size 256 --num-gpu-blocks 128 {SHORT_DECODE}"),
    bench("filters", "-m benchmarks.bench_filters"),
    # warm, because the jobs above have filled Triton's cache
    bench("start-warm", "bench.py --runs 0"),
    bench("start-empty-cache", "bench.py --runs 0", env=EMPTY_KERNEL_CACHE),
    offload("60gb-pool", "--cpu-memory-gb 60 --one-prompt --runs 1"),
    *(*LONG[1:], *BATCH[1:], *REQUESTS[1:]),
    offload("4x32k", f"--max-model-len 32768 --num-gpu-blocks 12 --batch 4 {SHORT_DECODE}"),
    offload("8b-32k", f"{QWEN3_8B} --num-gpu-blocks 4 --one-prompt --runs 3 {SHORT_DECODE}"),
    offload("131k", f"--max-model-len 131072 {SHORT_DECODE}", "default,gpu"),
    offload("fits-batch8", "--num-gpu-blocks 80 --batch 8", "gpu"),
    offload("7b-256k", f"{QWEN_7B_256K} --one-prompt --runs 2 {SHORT_DECODE}"),
    guesses("131k", "--speculation resident --max-model-len 131072 --cpu-attention off"),
    guesses("131k-cpu", "--speculation resident --max-model-len 131072"),
    guesses("40k", "--speculation resident --num-gpu-blocks 4 --cpu-attention off"),
    guesses("all-gpu", "--speculation prompt_lookup --num-gpu-blocks 0 --decode-tokens 256"),
    bench("long-131k", "bench.py --long --max-model-len 131072 --runs 3"),
    guesses("shadow-131k", f"{SHADOW} --max-model-len 131072"),
    guesses("shadow-40k", SHADOW),
    guesses("shadow-131k-all-gpu", f"{SHADOW} --num-gpu-blocks 0 --max-model-len 131072"),
    guesses("shadow-7b-256k", f"{SHADOW} {QWEN_7B_256K}"),
    *(
        bench(f"{name}{'-' * bool(fmt)}{fmt}", f"bench.py {arguments}{' --quantization ' * bool(fmt)}{fmt}")
        for name, arguments, formats in (
            ("8b-8k", "--model qwen3-8b --long --max-model-len 8192 --runs 3", ("", "fp8", "fp8_dynamic", "int4")),
            ("8b-40k", "--model qwen3-8b --long --max-model-len 40960 --runs 3", ("", "fp8", "int4")),
            ("8b-throughput", "--model qwen3-8b --runs 3", ("", "fp8", "fp8_dynamic", "int4")),
            ("30b-a3b", f"{QWEN3_30B} --long --max-model-len 8192 --runs 3", ("", "int4")),
        )
        for fmt in formats
    ),
    offload("30b-a3b-131k", f"{QWEN3_30B} --num-gpu-blocks 7 {SMALL_CARD}"),
    offload("8b-int4-131k", f"--model qwen3-8b --block-size 1024 --num-gpu-blocks 10 {SMALL_CARD}"),
    bench("hybrid-9b", "bench.py --long --model qwen3.5-9b --max-model-len 40960 --runs 3"),
    bench("hybrid-9b-throughput", "bench.py --model qwen3.5-9b --runs 3"),
    offload(
        "hybrid-27b-512k",
        f"--model qwen3.5-27b {LONG_HYBRID} --one-prompt --runs 1 {SHORT_DECODE}",
        timeout_s=1200,
    ),
    guesses("mtp-27b-512k", f"--speculation mtp --model qwen3.5-27b {LONG_HYBRID}", timeout_s=1200),
    guesses("mtp-9b-131k", "--speculation mtp --model qwen3.5-9b --max-model-len 131072"),
    guesses("mtp-9b-131k-all-gpu", "--speculation mtp --model qwen3.5-9b --max-model-len 131072 --num-gpu-blocks 0"),
    bench("gpt-oss-20b", "bench.py --model gpt-oss-20b --long --max-model-len 41984 --runs 3"),
    bench("gpt-oss-20b-throughput", "bench.py --model gpt-oss-20b --runs 3"),
    small_gpu("gemma-4-31b", 22.9, "--quantization int4 --max-model-len 131072 --runs 2"),
    small_gpu("gpt-oss-120b", 14.9, "--runs 3"),
    bench("disk", "-m benchmarks.bench_disk --path kv-on-disk --restart --beside --model qwen3-0.6b"),
    bench("disk-hybrid", "-m benchmarks.bench_disk --path kv-on-disk --restart --model qwen3.5-9b"),
    serving("chats", "--max-model-len 4096 --max-num-seqs 256", "--concurrency 256 --against-generate"),
    serving(
        "document",
        f"{LONG_SERVER} --enable-cpu-offload --num-gpu-blocks 8",
        "--workload document --document-tokens 131072 --questions 6 --runs 3",
    ),
    serving("interference", LONG_SERVER, INTERFERENCE),
    serving("interference-offload", f"{LONG_SERVER} --enable-cpu-offload", INTERFERENCE),
    serving("idle", "--max-model-len 4096 --max-num-seqs 64", "--workload idle-connections"),
    bench(
        "serve-overhead",
        "bench_serve.py --workload overhead --num-requests 50 --start",
        "nanovllm serve --model demo --device cpu --port {port} --max-model-len 4096",
        num_gpus=0,
        needs=SERVER_NEEDS,
    ),
    bench("quote", "-m benchmarks.bench_quote"),
    *(bench(f"qwen3-8b-tp{n}", f"bench.py --long {QWEN3_8B} --runs 3 --tp {n}", num_gpus=n) for n in (1, 2, 4)),
    bench("attention", "benchmarks/bench_attention.py"),
    bench("device-memory", "-m benchmarks.device_memory", timeout_s=900),
    bench("cpu-attention", "benchmarks/bench_cpu_attention.py"),
    bench(
        "attention-rtx40", "-m benchmarks.bench_attention --target 8.9 --backend triton --backend flash", needs=FLASH
    ),
    bench("windows", "-m benchmarks.bench_windows"),
    *map(sanitizer, ("memcheck", "racecheck")),
    tests("tests-gpu", "tests", "gpu and not slow", timeout_s=1200),
    tests("tests-gpu-rtx40", "--kernel-target 8.9 tests", "gpu and not slow", timeout_s=1200),
    tests("tests-multi-gpu", "tests", "multi_gpu", num_gpus=2),
    tests("tests-gpu-slow", "tests", "gpu and slow", "-k", "not soak", timeout_s=1200),
    tests("soak", "-k soak tests/gpu/test_gpu_streams.py", "gpu and slow", env=SOAK, timeout_s=1200),
]


# -- targets -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A promise: the figure `key` of the result of `job` is at least `bound`, or with `at_most` at most `bound`.

    "a / b" as `job`, as `key` or as both is a ratio. "a:b" is the figure b within a. Signs are ignored.
    """

    what: str
    job: str
    key: str
    bound: float
    unit: str = ""
    at_most: bool = False

    @property
    def jobs(self) -> list[str]:
        return self.job.split(" / ")

    def value(self, *results: Json) -> float:
        """Return the figure in the results of `jobs`, in the order of `jobs`. Raises KeyError if it is missing."""
        keys = self.key.split(" / ")
        values = []
        for result, key in ((results[0], keys[0]), (results[-1], keys[-1])):
            found: Any = result
            for name in key.split(":"):
                found = found[name]
            values.append(abs(float(found)))
        return values[0] / values[1] if len(keys) > 1 or len(results) > 1 else values[0]

    def is_reached(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


def at_most(what: str, job: str, key: str, bound: float, unit: str = "") -> Target:
    return Target(what, job, key, bound, unit, at_most=True)


RATE = "output_tok_per_s"
SHADOW_RATE = "decode_tok_per_s_at_0.98 / decode_tok_per_s"
DECODE_SHARE, PREFILL_SHARE = (f"{kind}_tok_per_s / {kind}_bound_tok_per_s" for kind in ("decode", "prefill"))
TARGETS = [
    Target("256 requests", "requests", RATE, 28_000, "tok/s"),
    Target("256 requests, offload by default / all-GPU", "requests-offload / requests", RATE, 0.9),
    Target("prefill 40,959 tokens", "long", "prefill_tok_per_s", 105_000, "tok/s"),
    Target("decode at 40K", "long", "decode_tok_per_s", 470, "tok/s"),
    Target("decode, batch 256 at 1K / bound", "batch256", "batch_decode_tok_per_s / batch_decode_bound_tok_per_s", 0.8),
    Target("Triton / flash-attn 2, prefill 40K", "long-triton / long-flash", "prefill_tok_per_s", 1),
    Target("Triton / flash-attn 2, decode at 40K", "long-triton / long-flash", "decode_tok_per_s", 1),
    Target("Triton / flash-attn 2, batch 256", "batch256-triton / batch256-flash", "batch_decode_tok_per_s", 1),
    Target("an RTX 40's kernels: Triton / flash-attn 2", "attention-rtx40", "triton_share_of_flash", 0.8),
    Target("2 ranks / 1, Qwen3-8B, prefill 32K", "qwen3-8b-tp2 / qwen3-8b-tp1", "prefill_tok_per_s", 1.6),
    *(Target(f"filtered / unfiltered, {n} rows", "filters", f"filtered_share_{n}", 0.95) for n in (1, 64, 512)),
    Target("one filtered row of 512 / none", "filters", "one_filtered_share_512", 0.97),
    at_most("first process: first token", "first-run", "first_token_s", 15, "s"),
    at_most("first process: first 40K prompt / second", "first-run", "first_prompt_over_second", 1.3),
    Target("first process: first 256 requests / steady", "first-run", "first_requests_share", 0.9),
    Target("first process: second 256 requests / steady", "first-run", "second_requests_share", 0.97),
    at_most("start to first token", "start-warm", "start_to_first_token_s", 15, "s"),
    at_most("the same, Triton's cache empty", "start-empty-cache", "start_to_first_token_s", 15, "s"),
    Target("offload 40K, 8 slots: prefill / all-GPU", "offload-8slots", "prefill_ratio_to_gpu", 0.95),
    Target("offload 40K, 8 slots: decode", "offload-8slots", "offload_decode_tok_per_s", 45, "tok/s"),
    Target("offload 40K, 4 slots: decode / link bound", "offload-4slots", "link_only_link_share", 0.9),
    Target("offload 131K: prefill / all-GPU", "offload-131k", "prefill_ratio_to_gpu", 0.95),
    Target("offload 131K: decode / link bound", "offload-131k", "link_only_link_share", 0.93),
    Target("the same with blocks of 256", "offload-131k-small-blocks", "link_only_link_share", 0.97),
    Target(
        "offload 131K, default options: tok/s of a second answer",
        "offload-131k",
        "default_second_answer_at_temperature_1_tok_per_s",
        45,
    ),
    Target("offload, all fits: decode / all-GPU", "offload-fits", "decode_ratio_to_gpu", 0.95),
    Target("the same, batch 8", "offload-fits-batch8", "decode_ratio_to_gpu", 0.95),
    Target("offload 4 x 32K: decode / link bound", "offload-4x32k", "link_only_link_share", 0.9),
    Target("offload 7B, 256K: prefill / arithmetic bound", "offload-7b-256k", "prefill_bound_share", 0.6),
    Target("offload 7B, 256K: decode / link bound", "offload-7b-256k", "link_only_link_share", 0.93),
    *(
        Target(f"offload {name}: decode with the CPU / without", f"offload-{name}", "decode_ratio_to_link_only", least)
        for name, least in zip(
            ("8slots", "4slots", "131k", "4x32k", "8b-32k", "7b-256k"), (1.4, 1.7, 1.8, 1.6, 1.6, 1.5), strict=True
        )
    ),
    Target("131K, guesses right at 0.9 / none", "guesses-131k", "ratio_to_plain_at_0.9", 5),
    Target("131K, guesses right at 0 / none", "guesses-131k", "ratio_to_plain_at_0.0", 0.97),
    Target(
        "131K with the CPU, guesses right at 0.9 / link bound",
        "guesses-131k-cpu / guesses-131k",
        "decode_tok_per_s_at_0.9 / bound_tok_per_s",
        7,
    ),
    Target("40K, 4 slots, guesses right at 0.8 / none", "guesses-40k", "ratio_to_plain_at_0.8", 3),
    Target("40K on the GPU, guesses right at 0.9 / none", "guesses-all-gpu", "ratio_to_plain_at_0.9", 3),
    Target("131K, 8 slots, shadow right at 0.98", "guesses-shadow-131k", "decode_tok_per_s_at_0.98", 108, "tok/s"),
    *(
        Target(f"{name}, shadow right at 0.98 / all-GPU", f"guesses-shadow-{name} / {plain}", SHADOW_RATE, least)
        for name, plain, least in (("131k", "long-131k", 0.45), ("40k", "long", 0.6))
    ),
    Target(
        "131K on the GPU, shadow right at 0.98 / none", "guesses-shadow-131k-all-gpu", "ratio_to_plain_at_0.98", 1.6
    ),
    Target("7B, 256K, shadow right at 0.98", "guesses-shadow-7b-256k", "decode_tok_per_s_at_0.98", 70, "tok/s"),
    *(
        Target(f"{name}, shadow right at 0 / none", f"guesses-shadow-{name}", "ratio_to_plain_at_0.0", 0.97)
        for name in ("131k", "40k")
    ),
    *(
        Target(f"Qwen3-8B {what}: {fmt} / bf16", f"{job}-{fmt} / {job}", key, least)
        for what, job, key, int4, fp8 in (
            ("decode", "8b-8k", "decode_tok_per_s", 2.6, 1.7),
            ("prefill, 40K", "8b-40k", "prefill_tok_per_s", 0.95, 1.2),
            ("256 requests", "8b-throughput", RATE, 1.1, 1.25),
        )
        for fmt, least in (("int4", int4), ("fp8", fp8))
    ),
    # On an H200: vLLM 0.25.1 with quantization="fp8", which is the same format, has 56,000 and 11,200
    Target("Qwen3-8B prefill, 8K: fp8_dynamic", "8b-8k-fp8_dynamic", "prefill_tok_per_s", 53_200, "tok/s"),
    Target("Qwen3-8B 256 requests: fp8_dynamic", "8b-throughput-fp8_dynamic", RATE, 11_200, "tok/s"),
    Target("Qwen3-8B decode: fp8_dynamic / fp8", "8b-8k-fp8_dynamic / 8b-8k-fp8", "decode_tok_per_s", 0.99),
    Target("Qwen3-8B decode: int4 / bound", "8b-8k-int4", DECODE_SHARE, 0.75),
    Target("Qwen3-8B decode: fp8 / bound", "8b-8k-fp8", DECODE_SHARE, 0.8),
    Target("Qwen3-30B-A3B decode / bound", "30b-a3b", DECODE_SHARE, 0.65),
    Target("Qwen3-30B-A3B prefill / bound", "30b-a3b", PREFILL_SHARE, 0.5),
    *(
        Target(f"{what}, int4, 131K: decode with the CPU / without", f"offload-{job}", "decode_ratio_to_link_only", 1.5)
        for what, job in (("Qwen3-30B-A3B", "30b-a3b-131k"), ("Qwen3-8B", "8b-int4-131k"))
    ),
    at_most("Qwen3-30B-A3B, int4, 131K: GPU memory", "offload-30b-a3b-131k", "offload_peak_bytes", 23 * 2**30, "B"),
    at_most("Qwen3-8B, int4, 131K: GPU memory", "offload-8b-int4-131k", "offload_peak_bytes", 11 * 2**30, "B"),
    Target("Qwen3.5-9B shapes, prefill 40K / bound", "hybrid-9b", PREFILL_SHARE, 0.6),
    Target("Qwen3.5-9B shapes, decode at 40K / bound", "hybrid-9b", DECODE_SHARE, 0.65),
    Target(
        "Qwen3.5-27B shapes, 512K: decode with the CPU / without",
        "offload-hybrid-27b-512k",
        "decode_ratio_to_link_only",
        1.7,
    ),
    Target("the same, draft head right at 0.95 / none", "guesses-mtp-27b-512k", "ratio_to_plain_at_0.95", 4),
    Target("gpt-oss-20b, prefill 41K / bound", "gpt-oss-20b", PREFILL_SHARE, 0.5),
    Target("gpt-oss-20b, decode at 41K / bound", "gpt-oss-20b", DECODE_SHARE, 0.6),
    at_most("Gemma-4-31B, int4, 131K: GPU memory", "small-gpu-gemma-4-31b", "held_gpu_bytes", 23 * 2**30, "B"),
    at_most("the same, second question / first", "small-gpu-gemma-4-31b", "second_question_ttft_ratio", 0.05),
    at_most(
        "gpt-oss-120b, experts on the CPU: GPU memory", "small-gpu-gpt-oss-120b", "held_gpu_bytes", 15 * 2**30, "B"
    ),
    Target("the same, decode", "small-gpu-gpt-oss-120b", "decode_tok_per_s", 30, "tok/s"),
    *(
        at_most(f"{what}: second question after a restart / first", job, "restart_share", 0.2)
        for what, job in (("Qwen3-0.6B", "disk"), ("Qwen3.5-9B", "disk-hybrid"))
    ),
    Target("KV on disk: loading / plain reading", "disk", "load_share", 0.8),
    Target("KV on disk: prefill while writing / without", "disk", "prefill_share_while_writing", 0.98),
    Target("KV on disk: decode while writing / without", "disk", "decode_share_while_writing", 0.98),
    Target("131K, quote of 200 tokens: prompt_lookup / off", "quote", "prompt_lookup_ratio", 6),
    Target("offload 40K: prefill with the CPU / without", "offload-8slots", "prefill_ratio_to_link_only", 0.98),
    at_most("peak GPU memory, 131K / 40K", "offload-131k / offload-8slots", "offload_peak_bytes", 1.02),
    at_most("README's example: GPU memory", "device-memory", "readme:served_bytes", 6.5 * 2**30, "B"),
    at_most("2 slots, chunks of 4096: GPU memory", "device-memory", "2slots:served_bytes", 3.2 * 2**30, "B"),
    at_most("README's example: plan's error", "device-memory", "readme:plan_error", 0.05),
    at_most("Qwen3-8B on 24 GiB: plan's error", "device-memory", "8b-24gib:plan_error", 0.05),
    at_most("second question / first, 40K", "offload-8slots", "second_question_ttft_ratio", 0.1),
    Target("256 streams through HTTP / LLM.generate", "serve-chats", "share_of_generate", 0.93),
    at_most("HTTP, second question / first, 131K", "serve-document", "second_question_ttft_ratio", 0.1),
    at_most("131K prefill: short request, first token", "serve-interference", "short_ttft_latest_s", 0.4, "s"),
    at_most("131K prefill: streams' p99 / quiet p50", "serve-interference", "prefill_p99_over_quiet_p50", 3),
    at_most("offload: short request, first token", "serve-interference-offload", "short_ttft_latest_s", 0.4, "s"),
    at_most("offload: streams' p99 / quiet p50", "serve-interference-offload", "prefill_p99_over_quiet_p50", 3),
    Target("streams beside 1,000 idle connections / alone", "serve-idle", "with_over_without", 0.97),
    at_most("CPU: HTTP adds to a request", "serve-overhead", "overhead_ms", 3, "ms"),
    at_most("CPU: HTTP adds to a streamed request", "serve-overhead", "stream_overhead_ms", 3, "ms"),
    at_most("start with a 60 GB pool", "offload-60gb-pool", "start_s", 15, "s"),
    *(Target(f"{job.name}: passed", job.name, "passed", 1) for job in JOBS if job.is_check),
]
