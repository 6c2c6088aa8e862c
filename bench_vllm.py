"""Runs the workloads of bench.py in vLLM, if it is installed: the same prompts, lengths and models.

Prefill and decode are timed apart without vLLM's own metrics. A prompt is answered with one token, then a new prompt of
the same length with many; the difference in time is decode. Prefix caching is off and every prompt is new.
"""

import argparse
import random
import time
from typing import Any

from bench import NUM_DECODED, NUM_REQUESTS, requests
from benchmarks.common import add_model_arguments, model_of_length, random_prompt
from benchmarks.reporting import Samples, report, run_options, versions
from nanovllm.checkpoint.read_config import load_config


class VLLM:
    """vLLM's engine, called with token ids."""

    def __init__(self, args: argparse.Namespace) -> None:
        try:
            import vllm
        except ImportError as error:
            raise SystemExit(f"bench_vllm.py needs vLLM, which cannot be imported here: {error}") from None
        self._vllm = vllm
        self.engine = vllm.LLM(
            model=model_of_length(args.model, args.max_model_len),
            load_format=args.load_format,
            skip_tokenizer_init=True,
            max_model_len=args.max_model_len if args.long else min(args.max_model_len, 4096),
            max_num_seqs=8 if args.long else NUM_REQUESTS,
            tensor_parallel_size=args.tp,
            enable_prefix_caching=False,
        )

    def seconds(self, prompts: list[list[int]], max_tokens: list[int], temperature: float = 0.0) -> float:
        """Return the time to answer all prompts, each with exactly the given number of tokens."""
        common: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, "detokenize": False}
        params = [self._vllm.SamplingParams(max_tokens=n, **common) for n in max_tokens]
        start_s = time.perf_counter()
        outputs = self.engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        assert [len(output.outputs[0].token_ids) for output in outputs] == max_tokens
        return seconds


def bench_requests(llm: VLLM, vocab_size: int, num_runs: int) -> dict[str, Any]:
    rates = []
    for run in range(num_runs):
        prompts, params = requests(vocab_size, seed=run)
        max_tokens = [p.max_tokens for p in params]
        rates.append(sum(max_tokens) / llm.seconds(prompts, max_tokens, params[0].temperature))
    samples = Samples(tuple(rates))
    print(f"{NUM_REQUESTS} requests: {samples} output tok/s")
    return samples.as_json("output_tok_per_s")


def bench_long(llm: VLLM, vocab_size: int, max_model_len: int, num_runs: int) -> dict[str, Any]:
    rng = random.Random(1)
    prefill, decode = [], []
    for _ in range(num_runs + 1):
        prompt = random_prompt(rng, max_model_len - 1, vocab_size)
        prefill.append(len(prompt) / llm.seconds([prompt], [1]))
        num_tokens = max_model_len - NUM_DECODED
        first_s = llm.seconds([random_prompt(rng, num_tokens, vocab_size)], [1])
        all_s = llm.seconds([random_prompt(rng, num_tokens, vocab_size)], [NUM_DECODED])
        decode.append((NUM_DECODED - 1) / (all_s - first_s))
    result = Samples(tuple(prefill[1:])), Samples(tuple(decode[1:]))  # the first run warms up
    print(f"prefill {max_model_len - 1} tokens: {result[0]} tok/s")
    print(f"decode at {max_model_len}: {result[1]} tok/s")
    return result[0].as_json("prefill_tok_per_s") | result[1].as_json("decode_tok_per_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--long", action="store_true", help="one sequence: prefill and decode at --max-model-len")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()

    start_s = time.perf_counter()
    llm = VLLM(args)
    llm.seconds([[1, 2, 3]], [1])
    result = (
        run_options(args) | versions() | {"engine": "vllm", "start_to_first_token_s": time.perf_counter() - start_s}
    )
    del result["backend"]  # the field names one of our backends
    print(f"start to first token: {result['start_to_first_token_s']:.1f} s")
    vocab_size = load_config(args.model)[0].vocab_size
    if args.long:
        result |= bench_long(llm, vocab_size, args.max_model_len, args.runs)
    else:
        result |= bench_requests(llm, vocab_size, args.runs)
    report(result, args.json)


if __name__ == "__main__":
    main()
