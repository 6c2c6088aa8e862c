"""Compares an engine's GPU memory with its plan: python -m benchmarks.device_memory [CASE ...]

Each case runs in a separate process. The memory of the process is the decrease of free memory on the device since
before the process began, including CUDA's own memory, so nothing else may use the GPU meanwhile. The memory is read
when CUDA has started, when the engine is ready, and after the engine has served requests: a prompt of nearly 40,960
tokens, or the longest that fits, then two such prompts together, then one whose tokens are scored, then many short
prompts, all sampled with filters. The plan is made before the engine starts, in the same way as by `nanovllm plan`.

nanovllm/capacity/device_memory.py holds the constants of the estimates. To fit them: `cuda_bytes` is the context before
anything is loaded. `unreserved_bytes` minus the context is graphs and kernels loaded later; the case `no-graphs` runs
without graphs. `reserved_bytes` minus `allocated_peak_bytes` is the allocator's waste.
"""

import argparse
import json
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import random_prompt
from benchmarks.reporting import report, versions
from nanovllm import LLM, SamplingParams
from nanovllm.capacity.make_plan import make_plan
from nanovllm.capacity.plan import CapacityPlan
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import Config
from nanovllm.engine.setup import find_machine
from nanovllm.sampling_params import MAX_LOGPROBS

GIB = 2**30
README = {"model": "qwen3-0.6b", "max_model_len": 40960, "enable_cpu_offload": True, "num_gpu_blocks": 8}
CASES: dict[str, dict[str, Any]] = {  # simulated_gib: memory of a smaller GPU, of which the engine gets 90%
    "readme": README,
    "no-graphs": README | {"enforce_eager": True},
    "2slots": README | {"num_gpu_blocks": 2, "max_num_batched_tokens": 4096},
    "all-gpu": {"model": "qwen3-0.6b", "max_model_len": 40960, "num_kvcache_blocks": 200},
    "8b-24gib": {"model": "qwen3-8b", "enable_cpu_offload": True, "simulated_gib": 24},
    "8b-24gib-all-gpu": {"model": "qwen3-8b", "max_model_len": 8192, "simulated_gib": 24},
    "gpt-oss-20b": {"model": "gpt-oss-20b", "max_model_len": 40960, "num_kvcache_blocks": 400, "max_num_seqs": 64},
    "gemma-31b": {
        "model": "gemma-4-31b",
        "quantization": "int4",
        "max_model_len": 40960,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 2048,
        "enable_cpu_offload": True,
        "simulated_gib": 25.6,
    },
    "draft-head": README | {"model": "qwen3.5-9b", "speculation": "mtp", "max_num_seqs": 64},
}
NUM_SHORT_PROMPTS = 600
LONG_PROMPT_TOKENS = 40_960


def measure(case: str) -> dict[str, Any]:
    """Run a case in a separate process. Returns its figures, with `plan_error` = plan / measured - 1."""
    free_bytes, _ = torch.cuda.mem_get_info()  # creates this process's context, which must not count for the engine
    command = [sys.executable, "-m", "benchmarks.device_memory", "--serve", case, "--free-bytes", str(free_bytes)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"plan_error": result["plan_bytes"] / result["served_bytes"] - 1}


def serve_case(case: str, free_bytes: int, num_short_prompts: int = NUM_SHORT_PROMPTS) -> dict[str, Any]:
    """GPU memory of this process when CUDA has started, when the engine is ready, and after it has served."""

    def held_bytes() -> int:
        torch.cuda.synchronize()
        return free_bytes - torch.cuda.mem_get_info()[0]

    cuda_bytes = held_bytes()  # the call creates the context
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    # Plan and engine count the memory of other processes as used.
    options = engine_options(CASES[case], total_bytes, others_bytes=total_bytes - free_bytes)
    plan = planned(options)
    with LLM(**options) as llm:
        start_bytes = held_bytes()
        serve(llm, num_short_prompts)
        served_bytes, stats = held_bytes(), torch.cuda.memory_stats()
        num_gpu_blocks = llm.stats()["num_gpu_blocks"]
    reserved_bytes = stats["reserved_bytes.all.current"]
    return {
        "cuda_bytes": cuda_bytes,
        "start_bytes": start_bytes,
        "served_bytes": served_bytes,
        "reserved_bytes": reserved_bytes,
        "unreserved_bytes": served_bytes - reserved_bytes,
        "allocated_peak_bytes": stats["allocated_bytes.all.peak"],
        "kv_bytes": num_gpu_blocks * plan.spec.block_bytes,
        "plan_bytes": plan.memory.total_bytes,
        "plan_kv_bytes": plan.memory.kv_bytes,
        "plan_parts": asdict(plan.memory),
    }


def engine_options(case: dict[str, Any], gpu_bytes: int, others_bytes: int = 0) -> dict[str, Any]:
    """The arguments of LLM on a GPU with `gpu_bytes` of memory, of which other processes use `others_bytes`."""
    options = {"device": "cuda", "load_format": "dummy"} | case
    simulated_gib = options.pop("simulated_gib", None)
    if simulated_gib is not None:
        options["gpu_memory_utilization"] = (0.9 * simulated_gib * GIB + others_bytes) / gpu_bytes
    return options


def planned(options: dict[str, Any]) -> CapacityPlan:
    config = Config(**options)
    return make_plan(config, config_without_weights(config.model), find_machine(config))


def serve(llm: LLM, num_short_prompts: int) -> None:
    """Run the largest steps: chunks of a long prompt, streamed groups, and as many filtered rows as possible."""
    rng, vocab_size = random.Random(0), llm.model_config.vocab_size
    num_tokens = min(llm.max_model_len, LONG_PROMPT_TOKENS) - 16
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.95, max_tokens=16, ignore_eos=True)
    for num_prompts in (1, 2):  # two together, because a short prompt alone does not fill the token budget
        prompts = [random_prompt(rng, num_tokens, vocab_size) for _ in range(num_prompts)]
        llm.generate(prompts, params, use_tqdm=False)
    scored = replace(params, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    llm.generate([random_prompt(rng, num_tokens, vocab_size)], scored, use_tqdm=False)
    prompts = [random_prompt(rng, rng.randint(1, 30), vocab_size) for _ in range(num_short_prompts)]
    llm.generate(prompts, params, use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to run: {', '.join(CASES)}; default: all")
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # used in the process of a case
    parser.add_argument("--free-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    if args.serve:
        print(json.dumps(serve_case(args.serve, args.free_bytes)))
        return
    if unknown := sorted(set(args.cases) - set(CASES)):
        parser.error(f"no case {', '.join(unknown)}; choose from {', '.join(CASES)}")
    result: dict[str, Any] = versions() | {"gpu": torch.cuda.get_device_name()}
    for case in args.cases or CASES:
        figures = measure(case)
        result[case] = figures
        print(f"{case}: plan {figures['plan_error']:+.1%}")
        for name, value in (figures | figures["plan_parts"]).items():
            if name.endswith("_bytes"):
                print(f"  {name:22} {value / GIB:8.3f} GiB")
    report(result, args.json)


if __name__ == "__main__":
    main()
