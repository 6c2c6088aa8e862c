"""The long workload with the KV cache in CPU memory, compared with all-GPU and with transformers' offloaded cache.

The link is measured first. Decode with offload is bound by the link's rate divided by the fewest bytes that must cross
the link per token; the fewest blocks are full blocks - (slots - write slots). If the CPU attends to some blocks, decode
is bound by both rates together, as measured in the last steps. --cpu-attention both measures with and without the CPU.
Prefill is bound by its arithmetic, and compared with the all-GPU engine in the same run.
These figures are measured without speculation. --compare default adds an engine with the default options, which include
speculation; the acceptance of its draft tokens depends on the random weights.
--speculation measures decode by the acceptance of draft tokens, with an oracle (benchmarks/speculation.py).
"""

import argparse
import gc
import random
import time
from typing import Any

import torch

from benchmarks.common import (
    Ceilings,
    PromptTimes,
    Work,
    add_model_arguments,
    greedy,
    lengths_after_short_warm_up,
    measure_ceilings,
    model_of_length,
    random_prompt,
    serve,
    time_decode,
    time_prompts,
    weight_options,
)
from benchmarks.experts import bench_experts
from benchmarks.reporting import Samples, report, run_options, versions
from benchmarks.speculation import run_speculation
from nanovllm import LLM, SamplingParams
from nanovllm.capacity.costs import num_full_blocks, num_missing_blocks
from nanovllm.plan.shadow_spec import SHADOW_BITS
from nanovllm.utils.arithmetic import ceil_div

SECOND_ANSWER_TOKENS = 256
ENGINE_FIGURES = (  # names in LLM.stats
    "link_byte_per_s",
    "load_byte_per_s",
    "link_share",
    "cpu_attention",
    "cpu_attention_byte_per_s",
    "cpu_load_byte_per_s",
)


def make_llm(args: argparse.Namespace, max_model_len: int, **options: Any) -> LLM:
    torch.cuda.reset_peak_memory_stats()
    return LLM(
        model_of_length(args.model, max_model_len),
        load_format=args.load_format,
        **weight_options(args),
        max_model_len=max_model_len,
        max_num_seqs=max(8, args.batch),
        tensor_parallel_size=args.tp,
        attn_backend=args.backend,
        **options,
    )


def num_prefill_tokens(args: argparse.Namespace, max_model_len: int) -> int:
    """Length of the prompt. With --one-prompt it leaves room for the tokens that are decoded."""
    return max_model_len - (args.decode_tokens if args.one_prompt else 1)


def measure(llm: LLM, args: argparse.Namespace, max_model_len: int) -> PromptTimes:
    """Time prefill, a second question, and decode up to `max_model_len`, with other prompts unless --one-prompt."""
    num_tokens = num_prefill_tokens(args, max_model_len)
    if args.one_prompt:
        lengths = lengths_after_short_warm_up(num_tokens, args.runs, args.num_gpu_blocks, args.block_size)
        return time_prompts(llm, lengths, args.decode_tokens, seed=1)
    times = time_prompts(llm, [num_tokens] * (args.runs + 1), 1, seed=1)
    context_len = max_model_len - args.decode_tokens
    decode = time_decode(llm, context_len, args.decode_tokens, seed=2, batch=args.batch, num_runs=args.runs)
    return times._replace(decode=decode)


def report_engine(times: PromptTimes, prefix: str) -> dict[str, Any]:
    """Print and return the rates of one engine and its peak GPU memory."""
    peak = torch.cuda.max_memory_allocated()
    print(f"{prefix:8} prefill {times.prefill} tok/s, decode {times.decode} tok/s, peak {peak / 2**30:.2f} GiB")
    return (
        times.prefill.as_json(f"{prefix}_prefill_tok_per_s")
        | times.decode.as_json(f"{prefix}_decode_tok_per_s")
        | {f"{prefix}_peak_bytes": peak}
    )


def bench_offload(
    args: argparse.Namespace, ceilings: Ceilings, max_model_len: int, num_slots: int, cpu_attention: str
) -> dict[str, Any]:
    """Measure the engine with `num_slots` slots: its rates, the bytes copied per token, and the bounds."""
    pool: dict[str, Any] = {"num_cpu_blocks": (args.batch + 1) * ceil_div(max_model_len, args.block_size)}
    if args.cpu_memory_gb is not None:
        pool = {"cpu_memory_gb": args.cpu_memory_gb}
    start_s = time.perf_counter()
    llm = make_llm(
        args,
        max_model_len,
        enable_cpu_offload=True,
        num_gpu_blocks=num_slots,
        kvcache_block_size=args.block_size,
        cpu_attention=cpu_attention,
        speculation="off",
        **pool,
    )
    start_s = time.perf_counter() - start_s
    print(f"start with offload, cpu_attention={cpu_attention}: {start_s:.1f} s")
    times = measure(llm, args, max_model_len)
    result = report_engine(times, "offload") | times.second_question.as_json("second_question_ttft_ratio")
    num_tokens = num_prefill_tokens(args, max_model_len)
    bound = Work(llm).prefill_bound(ceilings, num_tokens)
    share = times.prefill.median / bound
    result |= {"prefill_tokens": num_tokens, "prefill_bound_tok_per_s": bound, "prefill_bound_share": share}
    print(f"         prefill of {num_tokens} tokens: arithmetic bound {bound:,.0f} tok/s, reached {share:.0%}")
    print(f"         second question: {times.second_question.median:.3f} of the first's time to first token")
    stats = llm.stats()
    block_bytes = stats["block_bytes"]
    full_blocks = args.batch * num_full_blocks(max_model_len, args.block_size)
    missing = num_missing_blocks(max_model_len, args.block_size, num_slots, args.batch)
    llm.close()
    result |= {"start_s": start_s, "num_missing_blocks": missing, "block_bytes": block_bytes}
    result |= {f"engine_{name}": stats[name] for name in ENGINE_FIGURES}
    if missing:
        # each rank streams its heads over its own link, and attends to its heads on the CPU
        bound = args.batch * ceilings.link_byte_per_s / (missing * block_bytes)
        share = result["offload_decode_tok_per_s"] / bound
        result |= {"link_bound_decode_tok_per_s": bound, "link_share": share}
        print(f"         {missing} of {full_blocks} full blocks missing: link {bound:.1f} tok/s, reached {share:.0%}")
        if stats["cpu_attention_byte_per_s"]:
            both = stats["cpu_attention_byte_per_s"] + stats["link_byte_per_s"]
            bound = args.batch * both / (missing * block_bytes)
            share = result["offload_decode_tok_per_s"] / bound
            result |= {"bound_decode_tok_per_s": bound, "bound_share": share}
            print(f"         link and CPU together: {bound:.1f} tok/s, reached {share:.0%}; {stats['cpu_attention']}")
    return result


def bench_with_and_without_cpu(args: argparse.Namespace, ceilings: Ceilings) -> dict[str, Any]:
    """Measure the engine with --cpu-attention. For `both`, the keys of the run without it begin with link_only_."""
    sizes = args.max_model_len, args.num_gpu_blocks
    if args.cpu_attention != "both":
        return bench_offload(args, ceilings, *sizes, args.cpu_attention)
    result = {f"link_only_{name}": value for name, value in bench_offload(args, ceilings, *sizes, "off").items()}
    free_gpu()
    result |= bench_offload(args, ceilings, *sizes, "auto")
    for kind in ("prefill", "decode"):
        key = f"offload_{kind}_tok_per_s"
        result[f"{kind}_ratio_to_link_only"] = result[key] / result[f"link_only_{key}"]
    ratios = result["prefill_ratio_to_link_only"], result["decode_ratio_to_link_only"]
    print("with / without the CPU: prefill {:.3f}, decode {:.3f}".format(*ratios))
    return result


def bench_default(args: argparse.Namespace) -> dict[str, Any]:
    """Measure an engine with offload whose options are the defaults, apart from the sizes: prefill, and second answers
    to a prompt, greedy and sampled as by default.
    """
    llm = make_llm(
        args,
        args.max_model_len,
        enable_cpu_offload=True,
        num_gpu_blocks=args.num_gpu_blocks,
        kvcache_block_size=args.block_size,
    )
    prefill = time_prompts(llm, [args.max_model_len - 1] * (args.runs + 1), 1, seed=1).prefill
    print(f"default  prefill {prefill} tok/s, peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    result = prefill.as_json("default_prefill_tok_per_s")
    result["default_peak_bytes"] = torch.cuda.max_memory_allocated()
    prompt = random_prompt(random.Random(3), args.max_model_len - SECOND_ANSWER_TOKENS, llm.model_config.vocab_size)
    serve(llm, [prompt], greedy(1))
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_tokens=SECOND_ANSWER_TOKENS, ignore_eos=True)
        (output,), _ = serve(llm, [prompt], sampling)
        assert output["tpot_s"] is not None
        key = f"default_second_answer_at_temperature_{temperature:g}_tok_per_s"
        result[key] = 1 / output["tpot_s"]
        print(f"         second answer, temperature {temperature:g}: {result[key]:.1f} tok/s")
    stats = llm.stats()
    llm.close()
    figures = ("num_guesses", "guess_acceptance", "tokens_per_pass", "num_shadow_pages")
    return result | {f"default_{name}": stats.get(name) for name in figures}


def bench_gpu(args: argparse.Namespace, max_model_len: int) -> dict[str, Any]:
    llm = make_llm(args, max_model_len)
    result = report_engine(measure(llm, args, max_model_len), "gpu")
    llm.close()
    return result


def bench_transformers(args: argparse.Namespace, max_model_len: int) -> dict[str, Any]:
    """Measure transformers with the same shapes, random weights, and its offloaded KV cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_of_length(args.model, max_model_len), trust_remote_code=False)
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False
        ).eval()
    rng = random.Random(4)
    prefill, decode = [], []
    num_decoded = 8
    for _ in range(min(args.runs, 3) + 1):
        prompt = random_prompt(rng, max_model_len - num_decoded - 1, config.vocab_size)
        ids = torch.tensor([prompt], device="cuda")
        seconds = []
        for num_tokens in (1, num_decoded + 1):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
                cache_implementation="offloaded",
            )
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start_s)
        prefill.append(len(prompt) / seconds[0])
        decode.append(num_decoded / (seconds[1] - seconds[0]))
    result = Samples(tuple(prefill[1:])).as_json("hf_prefill_tok_per_s")
    result |= Samples(tuple(decode[1:])).as_json("hf_decode_tok_per_s")
    result["hf_peak_bytes"] = torch.cuda.max_memory_allocated()
    print(
        f"hf       prefill {result['hf_prefill_tok_per_s']:,.1f} tok/s, "
        f"decode {result['hf_decode_tok_per_s']:.1f} tok/s, "
        f"peak {result['hf_peak_bytes'] / 2**30:.2f} GiB"
    )
    return result


def free_gpu() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--num-gpu-blocks", type=int, default=8, help="slots on the GPU")
    parser.add_argument("--block-size", type=int, default=4096, help="tokens per block")
    parser.add_argument("--batch", type=int, default=1, help="sequences that decode together")
    parser.add_argument(
        "--compare", default="default,gpu,hf", help="what else to measure: default, gpu, hf; '' for nothing"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=64, help="tokens of each decode run")
    parser.add_argument(
        "--one-prompt", action="store_true", help="time prefill and decode with the same prompts, which is faster"
    )
    parser.add_argument(
        "--cpu-attention", default="auto", choices=("auto", "on", "off", "both"), help="both: off, then auto"
    )
    parser.add_argument("--cpu-memory-gb", type=float, help="size of the CPU pool in GiB; default: what the runs need")
    parser.add_argument(
        "--speculation",
        choices=("resident", "shadow", "mtp", "prompt_lookup"),
        help="measure decode with guesses instead, by an oracle whose guesses cost as much as this drafter's; "
        "--num-gpu-blocks 0: all on the GPU",
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, help="maximum draft tokens in a step; default: the engine's"
    )
    parser.add_argument(
        "--experts",
        action="store_true",
        help="instead measure a mixture with experts in CPU memory",
    )
    parser.add_argument("--shadow-bits", type=int, choices=SHADOW_BITS, help="with --speculation shadow")
    args = parser.parse_args()
    compare = {name for name in args.compare.split(",") if name}
    if unknown := compare - {"default", "gpu", "hf"}:
        parser.error(f"--compare {', '.join(sorted(unknown))}: choose from default, gpu, hf")
    if args.speculation and args.cpu_attention == "both":
        parser.error("--speculation measures one engine; choose --cpu-attention on, off or auto")
    if args.one_prompt and args.batch > 1:
        parser.error(f"--one-prompt measures one sequence; leave out --batch {args.batch}")

    ceilings = measure_ceilings()
    free_gpu()
    print(ceilings)
    result = run_options(args) | versions() | {"gpu": ceilings.name, "link_byte_per_s": ceilings.link_byte_per_s}
    if args.speculation:
        report(run_speculation(args, ceilings, result, make_llm), args.json)
        return
    if args.experts:
        args.enable_expert_offload = True
        report(result | bench_experts(args, make_llm), args.json)
        return
    result |= bench_with_and_without_cpu(args, ceilings)
    if "default" in compare:
        free_gpu()
        result |= bench_default(args)
    if "gpu" in compare:
        free_gpu()
        result |= bench_gpu(args, args.max_model_len)
        for kind in ("prefill", "decode"):
            key = f"{kind}_tok_per_s"
            result[f"{kind}_ratio_to_gpu"] = result[f"offload_{key}"] / result[f"gpu_{key}"]
        print(
            f"offload / gpu: prefill {result['prefill_ratio_to_gpu']:.2f}, decode {result['decode_ratio_to_gpu']:.3f}"
        )
    if "hf" in compare:
        free_gpu()
        result |= bench_transformers(args, args.max_model_len)
    report(result, args.json)


if __name__ == "__main__":
    main()
