"""Decode by the acceptance of draft tokens: `bench_offload.py --speculation` measures it.

Random weights say nothing about how often draft tokens are accepted, so an oracle proposes them. The oracle knows the
answer, because the same engine has given the answer before without draft tokens, and errs with a given probability.
With `resident`, `shadow` and `mtp` every draft token also costs the draft that it would have taken, and a draft head
follows all steps; with `prompt_lookup` draft tokens are free. The engine decides on their number as always. To make the
answer robust against rounding, the embedding is scaled up until the model repeats its last token, which changes no
shape and no work.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from benchmarks.common import Ceilings, greedy, random_prompt, serve
from nanovllm import LLM
from nanovllm.capacity.costs import num_missing_blocks
from nanovllm.engine.setup import Internals
from nanovllm.plan.sequence import Sequence
from nanovllm.schedule.seams import NO_GUESSES, Guesses, load_of
from nanovllm.utils.arithmetic import ceil_div

ACCEPTANCES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
EMBEDDING_SCALE = 100.0


class Oracle:
    """Proposes the known answer, each token right with probability `acceptance`, or nothing if that is None."""

    name: ClassVar[str] = "oracle"
    costs_drafts: ClassVar[bool] = False

    def __init__(self, kind: str = name) -> None:
        """`kind`: of the drafter that the oracle replaces."""
        self._kind = kind
        self.acceptance: float | None = None
        self.answer: list[int] = []
        self._rng = random.Random(0)

    def forget(self, seq: Sequence) -> None:
        """Do nothing: there is nothing to forget."""

    def can_guess(self, seq: Sequence) -> bool:
        return self.acceptance is not None

    def kind(self, seq: Sequence) -> str:
        return self._kind

    def guess(self, seq: Sequence, max_guesses: int) -> Guesses:
        if self.acceptance is None:
            return NO_GUESSES
        known = len(seq.token_ids) - seq.num_prompt_tokens
        right = self.answer[known : known + max_guesses]
        ids = tuple(token_id if self._rng.random() < self.acceptance else (token_id + 1) % 1000 for token_id in right)
        return Guesses(ids, len(ids) if self.costs_drafts else 0)


class DraftingOracle(Oracle):
    """Makes the ranks draft for each draft token of the oracle, and ignores the drafts."""

    costs_drafts: ClassVar[bool] = True


def run_speculation(
    args: argparse.Namespace, ceilings: Ceilings, header: dict[str, Any], make_llm: Callable[..., LLM]
) -> dict[str, Any]:
    """One sequence of --max-model-len tokens, with --num-gpu-blocks slots, or with 0 all on the GPU."""
    oracle = (Oracle if args.speculation == "prompt_lookup" else DraftingOracle)(args.speculation)
    num_slots, longest = args.num_gpu_blocks, 8 * args.decode_tokens
    options: dict[str, Any] = {"speculation": args.speculation, "num_speculative_tokens": args.num_speculative_tokens}
    if args.speculation == "shadow":
        options |= {"shadow_bits": args.shadow_bits}
    options |= {"internals": Internals(drafters=(oracle,))}
    if num_slots:
        options |= {"enable_cpu_offload": True, "num_gpu_blocks": num_slots, "kvcache_block_size": args.block_size}
        options |= {"num_cpu_blocks": ceil_div(args.max_model_len, args.block_size) + 1}
        options |= {"cpu_attention": args.cpu_attention}
    with make_llm(args, args.max_model_len, **options) as llm:
        make_repeating(llm)
        prompt = random_prompt(random.Random(1), args.max_model_len - longest, llm.model_config.vocab_size)
        decode(llm, prompt, 4)  # the prompt is in the prefix cache from now on
        plain, oracle.answer = decode(llm, prompt, 3 * args.decode_tokens)
        oracle.answer = oracle.answer[-1:] * longest
        points = [measure(llm, oracle, prompt, args.decode_tokens, plain, a) for a in ACCEPTANCES]
        oracle.acceptance = None
        plain_after, _ = decode(llm, prompt, 3 * args.decode_tokens)
        stats = llm.stats()
    result = header | {"plain_tok_per_s": plain, "plain_after_tok_per_s": plain_after, "points": points}
    for point in points:  # for the targets
        result |= {f"{key}_at_{point['acceptance']}": point[key] for key in ("decode_tok_per_s", "ratio_to_plain")}
    print(f"without guesses: {plain:.1f} tok/s, afterwards {plain_after:.1f}")
    missing = num_missing_blocks(args.max_model_len, args.block_size, num_slots) if num_slots else 0
    if missing:
        rate = ceilings.link_byte_per_s + (stats["cpu_attention_byte_per_s"] or 0.0)
        result["bound_tok_per_s"] = rate / (missing * stats["block_bytes"])
        print(f"bound without guesses: {result['bound_tok_per_s']:.1f} tok/s")
    return result


@torch.no_grad()
def make_repeating(llm: LLM) -> None:
    """Let the model repeat its last token: the embedding, which is also the head, outweighs what the layers add."""
    model = llm.runner.model
    embedding = model.model.embed_tokens.weight.mul_(EMBEDDING_SCALE)
    model.lm_head.weight[: len(embedding)] = embedding


def measure(
    llm: LLM, oracle: Oracle, prompt: list[int], num_tokens: int, plain: float, acceptance: float
) -> dict[str, Any]:
    """Decode with draft tokens of which this share is right, and more tokens if decode is faster."""
    before = llm.stats()
    oracle.acceptance = acceptance
    rate, answer = decode(llm, prompt, num_tokens * (8 if acceptance >= 0.7 else 3))
    assert answer == oracle.answer[: len(answer)], "guesses have changed the answer"
    stats = llm.stats()
    num_passes = stats["num_steps"] - before["num_steps"]
    num_guesses = stats["num_guesses"] - before["num_guesses"]
    times = llm.scheduler.speculator.times if llm.scheduler.speculator is not None else None
    point = {"acceptance": acceptance, "decode_tok_per_s": rate, "ratio_to_plain": rate / plain}
    point |= {"tokens_per_step": len(answer) / num_passes, "guesses_per_step": num_guesses / num_passes}
    if times is not None:
        load = load_of(1, len(prompt) + 1)
        num_guesses_per_pass = round(point["guesses_per_step"])
        pass_s = times.pass_s(load, num_guesses_per_pass)
        point |= {"draft_s": times.draft_s(load), "plain_s": times.plain_s(load), "pass_s": pass_s}
    shown = ", ".join(f"{name} {1e3 * (point[f'{name}_s'] or 0):.2f} ms" for name in ("draft", "plain", "pass"))
    print(
        f"oracle at acceptance {acceptance:.2f}: {rate:7.1f} tok/s, {rate / plain:.2f} times; "
        f"{point['tokens_per_step']:.1f} tokens and {point['guesses_per_step']:.1f} guesses a step; {shown}",
        flush=True,
    )
    return point


def decode(llm: LLM, prompt: list[int], num_tokens: int) -> tuple[float, list[int]]:
    """Return the tokens per second after the first token, and the answer."""
    torch.cuda.synchronize()
    (output,), _ = serve(llm, [prompt], greedy(num_tokens))
    assert output["tpot_s"] is not None
    return 1 / output["tpot_s"], output["token_ids"]
