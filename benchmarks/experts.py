"""Experts in CPU memory: `python bench_offload.py --experts --model qwen3-30b-a3b --quantization int4`.

Measures prompts of 8K and of the longest length, and decode: of one sequence with 8K keys, and of eight with 256 each.
Routers of random weights choose all experts equally often, so eight tokens read nearly eight times as many as one.
"""

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import time_decode, time_prompts
from nanovllm import LLM

PROMPT_TOKENS = 8192
BATCH, BATCH_KEYS = 8, 256
FIGURES = ("num_cpu_expert_layers", "cpu_expert_bytes", "max_cpu_expert_rows")


def bench_experts(args: argparse.Namespace, make_llm: Callable[..., LLM]) -> dict[str, Any]:
    """Measure an engine with experts in CPU memory and, if they fit, the KV on the GPU."""
    start_s = time.perf_counter()
    llm = make_llm(args, args.max_model_len)
    result: dict[str, Any] = {"start_s": time.perf_counter() - start_s}
    for length in dict.fromkeys((min(PROMPT_TOKENS, args.max_model_len - 1), args.max_model_len - 1)):
        prefill = time_prompts(llm, [length] * (args.runs + 1), 1, seed=length).prefill
        result |= prefill.as_json(f"prefill_{length}_tok_per_s")
        print(f"prefill of {length}: {prefill} tok/s")
    for batch, keys in ((1, min(PROMPT_TOKENS, args.max_model_len - args.decode_tokens)), (BATCH, BATCH_KEYS)):
        decode = time_decode(llm, keys, args.decode_tokens, seed=2, batch=batch, num_runs=args.runs)
        result |= decode.as_json(f"decode_of_{batch}_tok_per_s")
        print(f"decode of {batch} with {keys} keys each: {decode} tok/s together")
    free, total = torch.cuda.mem_get_info()
    held, host = total - free, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    stats = llm.stats()
    llm.close()
    result |= {"held_gpu_bytes": held, "host_peak_bytes": host} | {name: stats.get(name, 0) for name in FIGURES}
    print(
        f"start {result['start_s']:.1f} s, {held / 2**30:.2f} GiB of GPU memory, {host / 2**30:.2f} GiB of CPU memory"
    )
    print(", ".join(f"{name} {result[name]:,}" for name in FIGURES))
    return result
