"""Times quotes with and without draft tokens: `python -m benchmarks.bench_quote`.

The built-in model answers a question about a line that is hidden in source code, as in `nanovllm demo`, but the answer
has 200 characters, each of which is a token. Missing keys come over the link alone, unless --cpu-attention says
otherwise.
"""

import argparse
import random
import string
from typing import Any

import torch

from benchmarks.reporting import Samples, report, run_options, versions
from nanovllm import LLM, SamplingParams
from nanovllm.entrypoints.haystack import build_haystack
from nanovllm.models.retrieval_model import build_retrieval_model
from nanovllm.utils.arithmetic import ceil_div

QUOTE_TOKENS = 200


def measure(args: argparse.Namespace, prompt: str, speculation: str) -> tuple[Samples, list[int], float | None]:
    """Decode rates of the runs, the answer, and tokens per verification step."""
    with LLM(
        build_retrieval_model(dtype=args.dtype),
        device=args.device,
        max_model_len=args.context,
        enable_cpu_offload=True,
        num_gpu_blocks=args.num_gpu_blocks,
        num_cpu_blocks=ceil_div(args.context, args.block_size) + 1,
        kvcache_block_size=args.block_size,
        cpu_attention=args.cpu_attention,
        speculation=speculation,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=QUOTE_TOKENS + 20, stop="\n")
        rates = []
        for _ in range(args.runs + 1):  # the first run also reads the prompt and compiles
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output["tpot_s"] is not None
            rates.append(1 / output["tpot_s"])
        return Samples(tuple(rates[1:])), output["token_ids"], llm.stats().get("tokens_per_pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=131072, help="tokens of prompt and answer")
    parser.add_argument("--num-gpu-blocks", type=int, default=8, help="slots on the GPU")
    parser.add_argument("--block-size", type=int, default=4096, help="tokens per block")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpu-attention", default="off", choices=("auto", "on", "off"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="also write the last line to FILE")
    args = parser.parse_args()
    passage = "".join(random.Random(3).choices(string.ascii_lowercase + string.digits, k=QUOTE_TOKENS))
    prompt = build_haystack(args.context - QUOTE_TOKENS - 20, 0.35, passage)
    result: dict[str, Any] = {**run_options(args), **versions()}
    answers = {}
    for speculation in ("off", "prompt_lookup", "auto"):
        rates, answers[speculation], tokens_per_pass = measure(args, prompt, speculation)
        result |= rates.as_json(f"{speculation}_decode_tok_per_s")
        result[f"{speculation}_ratio"] = rates.median / result["off_decode_tok_per_s"]
        result[f"{speculation}_same_tokens"] = answers[speculation] == answers["off"]
        shown = "" if tokens_per_pass is None else f", {tokens_per_pass:.1f} tokens a pass"
        same = "the same tokens" if result[f"{speculation}_same_tokens"] else "OTHER TOKENS"
        print(f"{speculation:13} {rates} tok/s, {result[f'{speculation}_ratio']:.2f} times, {same}{shown}", flush=True)
    report(result, args.json)


if __name__ == "__main__":
    main()
