"""Measures an engine that may use only part of the GPU's memory, with the options that `nanovllm serve` would choose.

    python -m benchmarks.small_gpu --memory-gb 22.9 --model gemma-4-31b --quantization int4 --max-model-len 131072
    python -m benchmarks.small_gpu --memory-gb 14.9 --model gpt-oss-120b

Prints the rate of prefill of nearly --max-model-len tokens, how long a second question about this prompt takes
relative to the first, the rate of decode after the prompt, and how much GPU and CPU memory the process holds. A
smaller GPU would also be slower; rates, and the options that are chosen for their rate, are based on this GPU. Random
weights cannot show how often draft tokens are right, so there is no speculation by default.
"""

import argparse
import logging
import resource
import time
from typing import Any

import torch

from benchmarks.common import (
    PromptTimes,
    add_model_arguments,
    lengths_after_short_warm_up,
    model_of_length,
    time_prompts,
    weight_options,
)
from benchmarks.reporting import report, run_options, versions
from nanovllm import LLM

GIB = 2**30
DECODE_TOKENS = 64
FIGURES = ("num_gpu_blocks", "num_cpu_blocks", "num_cpu_expert_layers", "cpu_attention", "load_byte_per_s")
CHOSEN = ("enable_cpu_offload", "max_num_seqs", "max_num_batched_tokens")


def measure(llm: LLM, num_runs: int) -> PromptTimes:
    """Time prompts, second questions and decode, after a warm-up that is just long enough to be streamed."""
    config, stats = llm.config, llm.stats()
    num_tokens = llm.max_model_len - DECODE_TOKENS
    num_resident = stats["num_gpu_blocks"] if config.enable_cpu_offload else 0
    lengths = lengths_after_short_warm_up(num_tokens, num_runs, num_resident, config.block_size)
    return time_prompts(llm, lengths, DECODE_TOKENS, seed=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--memory-gb", type=float, required=True, help="GiB of GPU memory for the whole process")
    parser.add_argument("--speculation", default="off", help="as for nanovllm serve")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()

    gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    options: dict[str, Any] = weight_options(args) | {
        "load_format": args.load_format,
        "gpu_memory_utilization": args.memory_gb * GIB / gpu_bytes,
        "max_model_len": args.max_model_len,
        "speculation": args.speculation,
        "tensor_parallel_size": args.tp,
        "attn_backend": args.backend,
        "fit": None,
        "enable_expert_offload": args.enable_expert_offload or None,
    }
    start_s = time.perf_counter()
    llm = LLM(model_of_length(args.model, args.max_model_len), **options)
    result = run_options(args) | versions() | {"gpu": torch.cuda.get_device_name()}
    result["start_s"] = time.perf_counter() - start_s
    result |= {f"chosen_{name}": getattr(llm.config, name) for name in CHOSEN}
    times = measure(llm, args.runs)
    free_bytes, _ = torch.cuda.mem_get_info()
    result["held_gpu_bytes"] = gpu_bytes - free_bytes
    result["host_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result |= {name: llm.stats().get(name) for name in FIGURES}
    llm.close()
    result |= times.prefill.as_json("prefill_tok_per_s") | times.decode.as_json("decode_tok_per_s")
    result |= times.second_question.as_json("second_question_ttft_ratio")
    held, host = result["held_gpu_bytes"] / GIB, result["host_peak_bytes"] / GIB
    print(f"start {result['start_s']:.1f} s; {held:.2f} GiB of GPU memory, {host:.2f} GiB of CPU memory")
    print(f"prefill {times.prefill} tok/s, decode {times.decode} tok/s")
    print(f"second question: {times.second_question.median:.4f} of the first's time to first token")
    report(result, args.json)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanovllm").setLevel(logging.INFO)  # the engine logs what it chose
    main()
