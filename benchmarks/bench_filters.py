"""Compares decode steps with and without sampling filters: python -m benchmarks.bench_filters

For 1, 64 and 512 sequences, one engine runs three cases in turn: no filters, top_k 20 with top_p 0.95 in every row, and
the same filters in one row only. With random weights the logits are flatter than with a trained model, so more
drawn tokens are rejected than in real use.
"""

import argparse
import random
import statistics
from typing import Any

import torch

from benchmarks.common import random_prompt, serve
from benchmarks.reporting import Samples, report, run_options, versions
from nanovllm import LLM, SamplingParams

CONTEXT, NUM_DECODED = 512, 64
BATCHES = (1, 64, 512)


def sampling(num_filtered: int, batch: int) -> list[SamplingParams]:
    """Parameters with temperature 0.7. The first `num_filtered` use the filters that Qwen3's authors recommend."""
    common: dict[str, Any] = {"temperature": 0.7, "max_tokens": NUM_DECODED, "ignore_eos": True}
    filtered = SamplingParams(**common, top_k=20, top_p=0.95)
    return [filtered] * num_filtered + [SamplingParams(**common)] * (batch - num_filtered)


def time_steps(llm: LLM, batch: int, num_filtered: int, rng: random.Random) -> float:
    """Seconds of one decode step of all sequences."""
    prompts = [random_prompt(rng, CONTEXT, llm.model_config.vocab_size) for _ in range(batch)]
    _, ends = serve(llm, prompts, sampling(num_filtered, batch))
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def compare(llm: LLM, batch: int, num_runs: int) -> dict[str, float]:
    """Milliseconds per step of each case, and the speed of the filtered cases relative to the unfiltered one."""
    rng = random.Random(batch)
    cases = {"unfiltered": 0, "filtered": batch, "one_filtered": 1}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for run in range(num_runs + 1):
        for name, num_filtered in cases.items():
            seconds = time_steps(llm, batch, num_filtered, rng)
            if run:  # the first run warms up
                times[name].append(1e3 * seconds)
    result = {f"{name}_ms_{batch}": statistics.median(values) for name, values in times.items()}
    for name in ("filtered", "one_filtered"):
        result[f"{name}_share_{batch}"] = result[f"unfiltered_ms_{batch}"] / result[f"{name}_ms_{batch}"]
    print(f"{batch} sequences: " + ", ".join(f"{name} {Samples(tuple(v))} ms" for name, v in times.items()))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="preset, directory or hub name")
    parser.add_argument("--load-format", default="dummy", help="dummy: random weights; auto: the model's own")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    result = run_options(args) | versions() | {"gpu": torch.cuda.get_device_name()}
    with LLM(args.model, load_format=args.load_format, quantization=args.quantization, max_model_len=4096) as llm:
        for batch in BATCHES:
            result |= compare(llm, batch, args.runs)
    report(result, args.json)


if __name__ == "__main__":
    main()
