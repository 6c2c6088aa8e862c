"""One request on a terminal: a bar while the prompt is read, the text as it comes, its figures on one line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

if TYPE_CHECKING:  # --help must not load torch
    from nanovllm.engine.outputs import RequestOutput
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams


class BadInputError(Exception):
    """What a gate refused, to be shown to the user without a traceback."""


@contextmanager
def gate() -> Iterator[None]:
    """A ValueError raised inside is the user's input refused; outside it would be a bug, and shows its traceback."""
    try:
        yield
    except ValueError as error:
        raise BadInputError(str(error)) from error


def stream_answer(llm: "LLM", prompt: str, params: "SamplingParams") -> "RequestOutput":
    """Run one request: progress on stderr until its first token, then its text on stdout."""
    with gate():
        token_ids = llm.check_request(prompt, params)
        request_id = llm.add_request(token_ids.tolist(), params)
    with tqdm(total=len(token_ids), desc="Prefill", unit="tok", dynamic_ncols=True, file=sys.stderr) as bar:
        while request_id not in (step := llm.step()).texts:
            bar.update(step.num_prefill_tokens)
        bar.update(step.num_prefill_tokens)
    while request_id not in step.finished:
        print(step.texts.get(request_id, ""), end="", flush=True)
        step = llm.step()
    print(step.texts.get(request_id, ""), flush=True)
    return step.finished[request_id]


def prefill_tok_per_s(output: "RequestOutput") -> float:
    """Prompt tokens computed (not those found in the prefix cache) in the time to the first token."""
    assert output["ttft_s"] is not None, "a finished request has a first token"
    return (output["num_prompt_tokens"] - output["num_cached_tokens"]) / output["ttft_s"]


def decode_tok_per_s(output: "RequestOutput") -> float | None:
    """None for an answer of one token."""
    return 1 / output["tpot_s"] if output["tpot_s"] else None


def summary(output: "RequestOutput") -> str:
    decode = decode_tok_per_s(output)
    return (
        f"{output['num_prompt_tokens']:,} prompt tokens ({output['num_cached_tokens']:,} cached), "
        f"{len(output['token_ids']):,} new; prefill {prefill_tok_per_s(output):,.0f} tok/s, "
        f"decode {f'{decode:,.1f}' if decode else '-'} tok/s; finish reason: {output['finish_reason']}"
    )
