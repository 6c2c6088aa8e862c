"""`nanovllm demo`: find a passkey in a long prompt with most of the KV in CPU memory, then with all KV on the GPU.

Torch is imported only when the demo runs, because `--help` reads DemoOptions.
"""

import json
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import BLOCK_SIZE_STEP, DEFAULT_BLOCK_SIZE, Config
from nanovllm.entrypoints.cli.console import decode_tok_per_s, prefill_tok_per_s, stream_answer
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.arithmetic import ceil_div, format_bytes
from nanovllm.utils.options import help_of, option

if TYPE_CHECKING:
    from nanovllm.plan.outputs import RequestOutput

PASSKEY_LEN = 12
CHUNK_TOKENS = 4096  # small enough for several steps, so that the bar moves and most steps have history to stream
NUM_BLOCKS = 40  # the prompt has about this many blocks
SLOT_SHARE = 5  # one slot per 5 blocks, so that four fifths of the KV stay outside the slots

_TEXT, _ENGINE = "the text", "the engine"  # groups of flags


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The flags of `nanovllm demo`. The `help` of each field says what it means."""

    num_tokens: int = option(40960, help="length of the prompt", group=_TEXT)
    depth: float = option(0.35, help="where the passkey is hidden, from 0 (start) to 1 (end)", group=_TEXT)
    passkey: str | None = option(None, help="the passkey; by default, drawn from the seed", group=_TEXT)
    seed: int = option(0, help="seed from which the passkey is drawn", group=_TEXT)
    num_gpu_blocks: int | None = option(
        None, help="slots, 2 or more; by default, a fifth of the prompt's blocks", group=_ENGINE
    )
    device: str = option("auto", help=help_of(Config, "device"), group=_ENGINE)
    dtype: str = option("float32", help="float32 or bfloat16", group=_ENGINE)


def run_demo(options: DemoOptions) -> int:
    """Run the demo and print its figures, the last line as JSON.

    Return the exit status, which is 0 if the passkey was found and both runs gave the same tokens.
    """
    from nanovllm.entrypoints.haystack import build_haystack
    from nanovllm.models.retrieval_model import build_retrieval_model

    passkey = _draw_passkey(options.seed) if options.passkey is None else options.passkey
    prompt = build_haystack(options.num_tokens, options.depth, passkey)
    model = build_retrieval_model(dtype=options.dtype)
    max_tokens = len(passkey) + 2  # the passkey, ".", the stop
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop="\n")
    max_model_len = options.num_tokens + max_tokens
    block_size = max(1, options.num_tokens // NUM_BLOCKS // BLOCK_SIZE_STEP) * BLOCK_SIZE_STEP
    num_blocks = ceil_div(max_model_len, block_size)
    num_slots = max(2, num_blocks // SLOT_SHARE) if options.num_gpu_blocks is None else options.num_gpu_blocks
    print(f"Model: {model} (two layers, set by hand, {options.dtype})")
    print(
        f"Prompt: {options.num_tokens:,} tokens of Python's standard library; {options.depth:.0%} of the way in is the "
        f"line 'The passkey is {passkey}.'"
    )
    print(
        f"\nKV in CPU memory: {num_blocks} blocks of {block_size:,} tokens and {num_slots} slots, so "
        f"{max(0, num_blocks - num_slots) / num_blocks:.0%} of the KV is outside the slots",
        flush=True,
    )
    common = {"max_model_len": max_model_len, "max_num_batched_tokens": CHUNK_TOKENS, "device": options.device}
    pool: dict[str, Any] = {"kvcache_block_size": block_size, "num_gpu_blocks": num_slots, "num_cpu_blocks": num_blocks}
    pool |= {"enable_cpu_offload": True, "speculation": "auto"}
    offloaded, figures = _run(model, prompt, params, common | pool)
    _print_rates(figures)
    _print_offload(figures)
    print("\nThe same prompt with all of its KV resident", flush=True)
    num_resident = ceil_div(max_model_len, DEFAULT_BLOCK_SIZE)
    resident, of_resident = _run(model, prompt, params, common | {"num_kvcache_blocks": num_resident})
    _print_rates(of_resident)
    checks = {
        "retrieved": offloaded["text"] == f"{passkey}.",
        "same_tokens": offloaded["token_ids"] == resident["token_ids"],
    }
    found, same = ("yes" if check else "NO" for check in checks.values())
    print(f"\nPasskey found: {found}. Same tokens: {same}.")
    inputs = {"passkey": passkey, "answer": offloaded["text"], "depth": options.depth, "dtype": options.dtype}
    sizes = {"block_size_tokens": block_size, "num_blocks": num_blocks, "num_slots": num_slots}
    rates = {f"resident_{name}": of_resident[name] for name in ("prefill_tok_per_s", "decode_tok_per_s")}
    print(json.dumps(checks | inputs | sizes | figures | rates))
    return 0 if all(checks.values()) else 1


def _draw_passkey(seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_lowercase + string.digits, k=PASSKEY_LEN))


def _run(
    model: Path, prompt: str, params: SamplingParams, engine_options: dict[str, Any]
) -> tuple["RequestOutput", dict[str, Any]]:
    """Answer the prompt in a new engine. Return the output and its figures, with the counters of blocks if offloaded.

    Slots, staging and CPU pool are allocated once, so their sizes are also their peak sizes.
    """
    from nanovllm.llm import LLM

    with LLM(str(model), **engine_options) as llm:
        output = stream_answer(llm, prompt, params)
        stats, staging_bytes = llm.stats(), llm.runner.spec.staging_bytes
    figures: dict[str, Any] = {
        "num_prompt_tokens": output["num_prompt_tokens"],
        "prefill_tok_per_s": prefill_tok_per_s(output),
        "decode_tok_per_s": decode_tok_per_s(output),
    }
    if "num_cpu_blocks" in stats:
        counters = "hit_blocks missed_blocks cpu_tokens loaded_bytes offloaded_bytes guesses accepted_guesses".split()
        figures |= {f"num_{name}": stats[f"num_{name}"] for name in counters}
        figures |= {
            "slot_bytes": stats["num_gpu_blocks"] * stats["block_bytes"],
            "staging_bytes": staging_bytes,
            "cpu_pool_bytes": stats["num_cpu_blocks"] * stats["block_bytes"],
        }
    return output, figures


def _print_rates(figures: dict[str, Any]) -> None:
    prefill, decode = figures["prefill_tok_per_s"], figures["decode_tok_per_s"] or 0
    print(f"  speed    prefill {prefill:,.0f} tok/s, decode {decode:,.1f} tok/s", flush=True)


def _print_offload(figures: dict[str, Any]) -> None:
    print(
        f"  blocks   {figures['num_hit_blocks']:,} hit, {figures['num_missed_blocks']:,} missed; "
        f"{figures['num_cpu_tokens']:,} tokens attended to by the CPU, "
        f"{format_bytes(figures['num_loaded_bytes'])} loaded, {format_bytes(figures['num_offloaded_bytes'])} offloaded"
    )
    print(f"  drafts   {figures['num_guesses']:,} tokens, {figures['num_accepted_guesses']:,} accepted")
    print(
        f"  memory   slots {format_bytes(figures['slot_bytes'])}, staging {format_bytes(figures['staging_bytes'])}, "
        f"CPU pool {format_bytes(figures['cpu_pool_bytes'])}"
    )
