"""`nanovllm verify`: check on this machine that every path of the engine gives the answers of the reference path, which
has all KV on the GPU.

A prompt is a long text followed by a quotation from the text, which the model continues. The quotations come from all
parts of the text, so the answers depend on different blocks, and most blocks have no slot. Answers are compared token
by token: if a path takes another token than the reference, the difference is counted, and the path continues from the
reference's tokens. So all log-probabilities are compared for equal prefixes.

For each answer, the root mean square of the differences in log-probability must stay within a bound. In fp32 the bound
is TIE, and all tokens must be equal, except for ties: if the reference's log-probabilities of two tokens differ by less
than TIE, both tokens are right. In lower precision, two orders of summation do not give the same bits, and near ties
are common. So in lower precision the bound is NOISE times the difference between two resident runs with different
chunks, but at least ULPS and at most MAX_ULPS units in the last place. This bound does not prove equal tokens, but a
lost or wrong block changes the quoted tokens by far more.
"""

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nanovllm.capacity.fit import prefill_tok_per_s as prefill_bound
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.config import BLOCK_SIZE_STEP
from nanovllm.entrypoints import planner
from nanovllm.entrypoints.cli.console import decode_tok_per_s, prefill_tok_per_s
from nanovllm.errors import ConfigError, EngineError
from nanovllm.models.demo_model import model_path
from nanovllm.sampling_params import MAX_LOGPROBS, SamplingParams
from nanovllm.utils.arithmetic import ceil_div
from nanovllm.utils.options import check_options, option

if TYPE_CHECKING:
    from nanovllm.llm import LLM, Internals
    from nanovllm.plan.outputs import RequestOutput

NUM_ANSWERS = 4  # quotations; the first quotation is from the beginning of the text
QUOTED_TOKENS, ANSWER_TOKENS = 48, 32
FILLER_TOKENS = 100  # the prompt of another request, which moves the ends of the first prompt's chunks
TIE = 0.002
NOISE, ULPS, MAX_ULPS = 3.0, 8.0, 64.0
EPSILON = {"bfloat16": 2**-7, "float16": 2**-10}
STEP_TOKENS = 2048  # small enough for several chunks per prompt, so that most chunks have keys to stream
NUM_TOKENS = 8192  # of the prompts, by default
CHARS_PER_TOKEN = 12  # more than source code ever has
MIN_TOKENS = (NUM_ANSWERS + 4) * BLOCK_SIZE_STEP  # a slot for each answer, and blocks without one
ENGINE_FLAGS = (  # fields of Config that the check does not choose itself
    *("device", "dtype", "quantization", "load_format", "hf_overrides", "attn_backend", "enforce_eager"),
    *("tensor_parallel_size", "quantize_head", "embedding_on_cpu"),
    *("enable_expert_offload", "num_gpu_expert_layers", "gpu_expert_memory_gb"),
    *("seed", "gpu_memory_utilization", "cpu_attention_threads"),
)
PATHS: Mapping[str, tuple[dict[str, Any], str]] = {  # options, and the counter of the work that only this path does
    "link alone": ({"cpu_attention": "off"}, "num_missed_blocks"),
    "link and CPU": ({"cpu_attention": "on"}, "num_cpu_tokens"),
    "with guesses": ({"cpu_attention": "on", "speculation": "auto"}, "num_guesses"),
    "with a shadow": ({"cpu_attention": "on", "speculation": "shadow"}, "num_guesses"),
}


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The flags of `nanovllm verify`. The `help` of each field says what it means."""

    num_tokens: int | None = option(
        None,
        help=f"length of the prompts; longer prompts test more blocks; by default {NUM_TOKENS}, or the model's limit "
        "if the limit is lower",
        group="the check",
        least=MIN_TOKENS,
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)


@dataclass
class Comparison:
    """The differences between some answers and the reference's answers."""

    num_different: int = 0  # different tokens, without ties
    num_ties: int = 0  # different tokens that are as likely as the reference's
    answer_rms: list[float] = field(default_factory=list)  # RMS differences in log-probability

    @property
    def rms(self) -> float:
        return max(self.answer_rms)


def run_verify(
    model: str, options: VerifyOptions, engine: Mapping[str, Any], internals: "Internals | None" = None
) -> int:
    """Check all paths and print a report, the last line as JSON. Return 0 if all paths agree, otherwise 1.

    engine: fields of Config. internals: the Internals of the paths with offload, for tests.
    """
    from nanovllm.llm import LLM, Internals
    from nanovllm.plan.kv_spec import dtype_name

    start_s = time.perf_counter()
    limit = config_without_weights(model_path(model), engine.get("hf_overrides")).max_model_len_limit
    num_tokens = _num_prompt_tokens(options.num_tokens, limit)
    num_blocks = ceil_div(num_tokens + ANSWER_TOKENS, BLOCK_SIZE_STEP)
    common = dict(engine) | {"max_model_len": num_tokens + ANSWER_TOKENS, "kvcache_block_size": BLOCK_SIZE_STEP}
    common |= {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 2 * NUM_ANSWERS, "fit": False}
    with LLM(model, **common, num_kvcache_blocks=2 * (num_blocks + 2 * NUM_ANSWERS)) as llm:
        dtype = dtype_name(llm.config, llm.model_config)
        prompts = make_prompts(llm, num_tokens)
        where = f"{dtype} on {llm.plan.machine.name}"
        print(f"{NUM_ANSWERS} answers of {ANSWER_TOKENS} tokens to prompts of {num_tokens:,}, in {where}", flush=True)
        ready_s = time.perf_counter()
        reference = ask(llm, prompts)
        first_s, load_s = time.perf_counter() - ready_s, ready_s - start_s
        took, left = map(planner.seconds_text, (first_s, first_s + len(PATHS) * (load_s + first_s)))
        print(f"  the first run took {took}; the others take about {left}", flush=True)
        paths = [_path("all resident", llm, reference[0], None)]
        again = compare(llm, prompts, reference, ask(llm, prompts, salt="again", filler=prompts[0][:FILLER_TOKENS]))
    needs_equal, bound = dtype == "float32", TIE
    if not needs_equal:
        bound = EPSILON[dtype] * min(max(NOISE * again.rms / EPSILON[dtype], ULPS), MAX_ULPS)
    paths.append(_judged({"path": "other chunks"}, again, bound, needs_equal))
    pool: dict[str, Any] = {"enable_cpu_offload": True, "num_cpu_blocks": num_blocks + 2 * NUM_ANSWERS}
    pool["num_gpu_blocks"] = max(NUM_ANSWERS + 1, num_blocks // 4)
    pool["internals"] = replace(
        internals or Internals(), always_guesses=True
    )  # draft even if draft tokens gain nothing
    for name, (path, work) in PATHS.items():
        with LLM(model, **common, **pool, **path) as llm:
            answers = ask(llm, prompts)
            found = compare(llm, prompts, reference, answers)
            paths.append(_judged(_path(name, llm, answers[0], work), found, bound, needs_equal))
    agrees = all(path["agrees"] for path in paths[1:])
    print(_verdict(agrees, bound, needs_equal))
    seconds = time.perf_counter() - start_s
    print(json.dumps({"agrees": agrees, "dtype": dtype, "bound_logprob": bound, "seconds": seconds, "paths": paths}))
    return 0 if agrees else 1


def _num_prompt_tokens(given: int | None, limit: int) -> int:
    """Return the length of the prompts. Raises ConfigError for prompts above `limit`, the model's maximum."""
    most = limit - ANSWER_TOKENS
    if most < MIN_TOKENS:
        raise ConfigError(
            f"the model takes {limit} tokens, and this check needs {MIN_TOKENS} and {ANSWER_TOKENS} new tokens; use "
            "another model, or extend its context with hf_overrides"
        )
    if given is not None and given > most:
        raise ConfigError(
            f"num_tokens={given} and {ANSWER_TOKENS} new tokens are more than the model's limit of {limit}; lower "
            f"num_tokens to {most}"
        )
    return min(NUM_TOKENS, most) if given is None else given


# -- the answers -----------------------------------------------------------------------------------------------------


def make_prompts(llm: "LLM", num_tokens: int) -> list[list[int]]:
    """Return prompts of a text, or of random tokens without a tokenizer. The prompts differ only at their ends."""
    from nanovllm.entrypoints.haystack import library_text  # loads torch

    num_text = num_tokens - QUOTED_TOKENS
    if llm.tokenizer is None:
        draw = random.Random(0).randrange
        text = [draw(llm.model_config.vocab_size) for _ in range(num_text)]
    else:
        text = llm.text.encode_prompt(library_text(CHARS_PER_TOKEN * num_text)).tolist()[:num_text]
    starts = [i * (len(text) - QUOTED_TOKENS - ANSWER_TOKENS) // NUM_ANSWERS for i in range(NUM_ANSWERS)]
    return [text + text[start : start + QUOTED_TOKENS] for start in starts]


def ask(
    llm: "LLM",
    prompts: Sequence[list[int]],
    *,
    salt: str = "first",
    filler: Sequence[int] = (),
    num_tokens: int = ANSWER_TOKENS,
) -> "list[RequestOutput]":
    """Answer the first prompt, concurrently with the prompt `filler` unless it is empty, and then the other prompts.

    Raises EngineError if a request fails.
    """
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=MAX_LOGPROBS, detokenize=False
    )
    head = [*([filler] if filler else []), prompts[0]]
    outputs: list[RequestOutput] = []
    for together in filter(None, (head, prompts[1:])):
        salted: list[Any] = [{"prompt_token_ids": token_ids, "cache_salt": salt} for token_ids in together]
        outputs += llm.generate(salted, params, use_tqdm=False)
    outputs = outputs[len(head) - 1 :]
    if failed := [output["error"] for output in outputs if "error" in output]:
        raise EngineError(f"a request failed: {failed[0]}")
    return outputs


def compare(
    llm: "LLM", prompts: Sequence[list[int]], reference: "list[RequestOutput]", answers: "list[RequestOutput]"
) -> Comparison:
    """Compare answers with the reference's token by token, for equal prefixes."""
    found = Comparison()
    for prompt, expected, answer in zip(prompts, reference, answers, strict=True):
        squares: list[float] = []
        while True:
            for token_id, entry in zip(answer["token_ids"], answer["logprobs"], strict=True):
                position = len(squares)
                expected_id = expected["token_ids"][position]
                known, least = expected["logprobs"][position], min(entry.values())
                logprob = known[expected_id].logprob
                squares.append(
                    (entry.get(expected_id, least).logprob - logprob) ** 2
                )  # an absent token is at most this likely
                if token_id != expected_id:
                    is_tie = token_id in known and logprob - known[token_id].logprob < TIE
                    found.num_ties += is_tie
                    found.num_different += not is_tie
                    break
            num_left = len(expected["token_ids"]) - len(squares)
            if not num_left:
                break
            (answer,) = ask(llm, [prompt + expected["token_ids"][: len(squares)]], num_tokens=num_left)
        found.answer_rms.append(math.sqrt(sum(squares) / len(squares)))
    return found


# -- the report ------------------------------------------------------------------------------------------------------


def _path(name: str, llm: "LLM", answer: "RequestOutput", work: str | None) -> dict[str, Any]:
    """Print and return the rates of a path and their bounds. work: the counter of the work that only this path does."""
    from nanovllm.llm import find_machine

    stats, known = llm.stats(), find_machine(llm.config)
    plan = replace(llm.plan, context=llm.max_model_len, num_sequences=1)
    figures = {
        "path": name,
        "prefill_tok_per_s": prefill_tok_per_s(answer),
        "prefill_bound_tok_per_s": prefill_bound(plan),
        "decode_tok_per_s": decode_tok_per_s(answer),
        # With guesses the plan has the rate that it expects, which an answer that is easy to guess exceeds
        "decode_bound_tok_per_s": None if work == "num_guesses" else plan.decode_tok_per_s,
        "num_work": None if work is None else stats[work],
    }
    rates = [f"{kind} {figures[f'{kind}_tok_per_s'] or 0:,.1f} tok/s" for kind in ("prefill", "decode")]
    for i, kind in enumerate(("prefill", "decode")):
        if bound := figures[f"{kind}_bound_tok_per_s"]:
            rates[i] += f" (bound {bound:,.1f})"
    if work is not None and plan.machine.gpu_bytes is not None:
        for kind, measured, expected in (
            ("link", plan.machine.link_byte_per_s, known.link_byte_per_s),
            ("link and CPU", plan.machine.cpu_byte_per_s, known.cpu_byte_per_s),
        ):
            if measured:
                figures |= {f"{kind.replace(' ', '_')}_byte_per_s": measured}
                of = f" (expected {expected / 1e9:.1f})" if expected else ""
                rates.append(f"{kind} {measured / 1e9:.1f} GB/s{of}")
    print(f"  {name:<13} {', '.join(rates)}", flush=True)
    return figures


def _judged(path: dict[str, Any], found: Comparison, bound: float, needs_equal: bool) -> dict[str, Any]:
    """Print how a path compares with the reference, and return its figures with the verdict.

    needs_equal: whether tokens must be equal, except for ties. A path without work fails, because it was not checked.
    """
    is_checked = path.get("num_work") != 0
    agrees = is_checked and found.rms <= bound and not (needs_equal and found.num_different)
    tokens = "the same tokens" if not found.num_different else f"{found.num_different} other tokens"
    tokens += f" except for {found.num_ties} ties" if found.num_ties else ""
    text = f"{tokens}; log-probabilities differ by {found.rms:.2g} of {bound:.2g} allowed"
    text = text if is_checked else "this path had nothing to do, so nothing was checked"
    print(f"  {path['path']:<13} {'agrees' if agrees else 'DIFFERS' if is_checked else 'FAILED'}: {text}", flush=True)
    return path | {
        "agrees": agrees,
        "num_different_tokens": found.num_different,
        "num_ties": found.num_ties,
        "logprob_rms": found.rms,
    }


def _verdict(agrees: bool, bound: float, needs_equal: bool) -> str:
    if not agrees:
        return "NOT verified: a path gives other answers than the path with all KV on the GPU. Please report this."
    if not needs_equal:
        return (
            f"Verified within {bound:.2g}: the paths differ by no more than rounding. Only --dtype float32 can "
            "show that tokens are equal."
        )
    return "Verified: every path takes the same tokens as the path with all KV on the GPU."
