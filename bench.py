"""Throughput with everything on the GPU: 256 requests, or (--long) one long prompt, or (--batch) many decodes.

Every rate is printed with its bound, which follows from the least arithmetic or bytes of the work and from the ceilings
measured in this run.
"""

import argparse
import random
import time
from typing import Any

from benchmarks.common import (
    Ceilings,
    Work,
    add_model_arguments,
    measure_ceilings,
    model_of_length,
    random_prompt,
    time_decode,
    time_prompts,
    weight_options,
)
from benchmarks.reporting import Samples, report, run_options, versions
from nanovllm import LLM, SamplingParams

NUM_REQUESTS, MIN_TOKENS, MAX_TOKENS = 256, 100, 1024
NUM_DECODED = 128


def requests(vocab_size: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """256 requests, each with 100 to 1024 random prompt tokens and 100 to 1024 output tokens."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.randint(MIN_TOKENS, MAX_TOKENS), vocab_size) for _ in range(NUM_REQUESTS)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(MIN_TOKENS, MAX_TOKENS))
        for _ in range(NUM_REQUESTS)
    ]
    return prompts, params


def bench_requests(llm: LLM, work: Work, ceilings: Ceilings, num_runs: int) -> dict[str, Any]:
    rates = []
    for run in range(-1, num_runs):  # run -1 warms up
        prompts, params = requests(llm.model_config.vocab_size, seed=run)
        start_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rates.append(sum(p.max_tokens for p in params) / (time.perf_counter() - start_s))
    prompts, params = requests(llm.model_config.vocab_size, seed=0)
    bound_s = sum(work.prefill_flop(len(p)) for p in prompts) / ceilings.matmul_flop_per_s
    for step in range(1, MAX_TOKENS + 1):
        running = [len(p) + step for p, s in zip(prompts, params, strict=True) if s.max_tokens > step]
        bound_s += work.decode_bytes(running) / ceilings.memory_byte_per_s if running else 0.0
    bound = sum(p.max_tokens for p in params) / bound_s
    samples = Samples(tuple(rates[1:]))
    print(f"{NUM_REQUESTS} requests: {samples} output tok/s, bound {bound:,.0f} ({samples.median / bound:.0%})")
    return samples.as_json("output_tok_per_s") | {"output_bound_tok_per_s": bound}


def bench_long(llm: LLM, work: Work, ceilings: Ceilings, max_model_len: int, num_runs: int) -> dict[str, Any]:
    num_tokens = max_model_len - 1
    prefill = time_prompts(llm, [num_tokens] * (num_runs + 1), 1, seed=1).prefill
    prefill_bound = work.prefill_bound(ceilings, num_tokens)
    decode = time_decode(llm, max_model_len - NUM_DECODED, NUM_DECODED, seed=2, num_runs=num_runs)
    decode_bound = ceilings.memory_byte_per_s / work.decode_bytes([max_model_len - NUM_DECODED // 2])
    print(f"prefill {num_tokens} tokens: {prefill} tok/s, bound {prefill_bound:,.0f}")
    print(f"decode at {max_model_len}: {decode} tok/s, bound {decode_bound:,.0f}")
    return (
        prefill.as_json("prefill_tok_per_s")
        | decode.as_json("decode_tok_per_s")
        | {"prefill_bound_tok_per_s": prefill_bound, "decode_bound_tok_per_s": decode_bound}
    )


def bench_batch(
    llm: LLM, work: Work, ceilings: Ceilings, batch: int, context_len: int, num_runs: int
) -> dict[str, Any]:
    decode = time_decode(llm, context_len, NUM_DECODED, seed=3, batch=batch, num_runs=num_runs)
    bound = batch * ceilings.memory_byte_per_s / work.decode_bytes([context_len + NUM_DECODED // 2] * batch)
    print(f"decode, batch {batch} at {context_len}: {decode} tok/s, bound {bound:,.0f} ({decode.median / bound:.0%})")
    return decode.as_json("batch_decode_tok_per_s") | {"batch_decode_bound_tok_per_s": bound}


def size_options(args: argparse.Namespace) -> dict[str, Any]:
    if args.offload:
        return {"enable_cpu_offload": True}
    return {
        "max_model_len": args.max_model_len if args.long else min(args.max_model_len, 4096),
        "max_num_seqs": args.batch or (8 if args.long else 256),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--long", action="store_true", help="one sequence: prefill and decode at --max-model-len")
    parser.add_argument("--batch", type=int, help="decode this many sequences together at --context tokens")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt with --batch")
    parser.add_argument(
        "--offload", action="store_true", help="the 256 requests with CPU offload and other options at their defaults"
    )
    parser.add_argument("--runs", type=int, default=5, help="number of runs; 0 measures only the start")
    args = parser.parse_args()

    ceilings = measure_ceilings()
    print(ceilings)
    start_s = time.perf_counter()
    llm = LLM(
        model_of_length(args.model, args.max_model_len),
        load_format=args.load_format,
        **weight_options(args),
        tensor_parallel_size=args.tp,
        attn_backend=args.backend,
        **size_options(args),
    )
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    result = (
        run_options(args) | versions() | {"gpu": ceilings.name, "start_to_first_token_s": time.perf_counter() - start_s}
    )
    print(f"start to first token: {result['start_to_first_token_s']:.1f} s")
    stats = llm.stats()
    result |= {name: stats[name] for name in ("num_gpu_blocks", "num_cpu_blocks", "block_bytes") if name in stats}
    work = Work(llm)
    if args.runs and args.long:
        result |= bench_long(llm, work, ceilings, args.max_model_len, args.runs)
    elif args.runs and args.batch:
        result |= bench_batch(llm, work, ceilings, args.batch, args.context, args.runs)
    elif args.runs:
        result |= bench_requests(llm, work, ceilings, args.runs)
    llm.close()
    report(result, args.json)


if __name__ == "__main__":
    main()
