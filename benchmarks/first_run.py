"""Times the first process on a machine, with all options at their defaults: python -m benchmarks.first_run

Measures the seconds from the start of Python to the first token, and compares the first long prompt with the second,
and the first run of 256 requests with later runs. Prints the time of each phase of the start. `make bench-gpu` provides
an empty kernel cache. The files of Python and CUDA are cold, too, only if nothing has run on the machine yet.
"""

import argparse
import logging
import os
import random
import statistics
import time
from pathlib import Path

LONG_PROMPT_TOKENS = 40_900
NUM_REQUEST_RUNS = 5
NUM_STEADY_RUNS = 3  # the last of NUM_REQUEST_RUNS count as steady


def seconds_since_process_start() -> float:
    """Read field 22 of /proc/self/stat: clock ticks from boot to the start of the process; see proc(5)."""
    fields_from_third = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields_from_third[22 - 3]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="preset, directory or hub name")
    parser.add_argument("--load-format", default="dummy", help="dummy: random weights; auto: the model's own")
    parser.add_argument("--quantization", help="quantize linear layers while they are loaded, such as int4")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanovllm").setLevel(logging.INFO)  # the engine logs how long each phase of its start took

    # Import here, so that the import time is measured, and before the benchmark's own imports.
    from nanovllm import LLM, SamplingParams

    imported_s = seconds_since_process_start()
    llm = LLM(args.model, load_format=args.load_format, quantization=args.quantization)
    ready_s = seconds_since_process_start()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    first_token_s = seconds_since_process_start()
    print(f"imported {imported_s:.1f} s, engine ready {ready_s:.1f} s, first token {first_token_s:.1f} s")

    import torch

    from bench import requests
    from benchmarks import common, reporting

    rng, vocab_size = random.Random(0), llm.model_config.vocab_size
    prompt_s = []
    for _ in range(2):
        prompt = common.random_prompt(rng, LONG_PROMPT_TOKENS, vocab_size)
        (output,), _ = common.serve(llm, [prompt], common.greedy(1))
        prompt_s.append(common.first_token_s(output))
    print(f"{LONG_PROMPT_TOKENS} tokens: first {prompt_s[0]:.2f} s, second {prompt_s[1]:.2f} s")

    rates = []
    for seed in range(NUM_REQUEST_RUNS):
        prompts, params = requests(vocab_size, seed)
        start_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rates.append(sum(p.max_tokens for p in params) / (time.perf_counter() - start_s))
    steady = statistics.median(rates[-NUM_STEADY_RUNS:])
    print("256 requests, tok/s: " + ", ".join(f"{rate:,.0f}" for rate in rates))
    phases = dict(llm.runner.phases.seconds)
    llm.close()
    reporting.report(
        reporting.run_options(args)
        | reporting.versions()
        | {
            "gpu": torch.cuda.get_device_name(),
            "imported_s": imported_s,
            "ready_s": ready_s,
            "first_token_s": first_token_s,
            "start_phases_s": phases,
            "first_prompt_over_second": prompt_s[0] / prompt_s[1],
            "requests_tok_per_s": rates,
            "first_requests_share": rates[0] / steady,
            "second_requests_share": rates[1] / steady,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
