"""One request on a terminal: a bar while the prompt is read, the text as it comes, its figures on one line."""

import os
import select
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from nanovllm.cli.flags import flag_name
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # --help must not load torch
    from nanovllm.core.outputs import RequestOutput, StepOutput
    from nanovllm.llm import LLM
    from nanovllm.text.request_check import Prompt


class BadInputError(Exception):
    """What a gate refused, to be shown to the user without a traceback."""


@contextmanager
def gate() -> Iterator[None]:
    """A ValueError raised inside is the user's input refused; outside it would be a bug, and shows its traceback."""
    try:
        yield
    except ValueError as error:
        raise BadInputError(str(error)) from error


def choose_sampling(llm: "LLM", given: Mapping[str, Any], *, in_chat: bool) -> SamplingParams:
    """The flags that were given, then the model's generation_config.json, then SamplingParams' defaults.

    What the file decides is said on stderr. A chat has no default for max_tokens: its answers end by themselves.
    """
    from_file = {name: value for name, value in llm.sampling_defaults.items() if name not in given}
    if from_file:
        listed = " ".join(f"{flag_name(SamplingParams, name)} {value}" for name, value in from_file.items())
        print(f"from the model's generation_config.json: {listed}", file=sys.stderr)
    unlimited = {"max_tokens": None} if in_chat else {}
    return SamplingParams(**(unlimited | from_file | dict(given)))


def stream_answer(
    llm: "LLM", prompt: "Prompt", params: SamplingParams, *, leave_bar: bool = True, stoppable: bool = False
) -> "RequestOutput":
    """Run one request: progress on stderr until its first token, then its text on stdout.

    stoppable: Ctrl-C ends the request, whose output then has finish_reason "abort", instead of raising
    KeyboardInterrupt. It is still raised where a second Ctrl-C broke a step and the engine with it.
    """
    with gate():
        token_ids = llm.check_request(prompt, params)
        request_id = llm.add_request(token_ids.tolist(), params)
    num_shown = 0
    output: RequestOutput | None = None
    try:
        for step in _steps(llm, request_id, len(token_ids), leave_bar):
            text, output = step.texts.get(request_id, ""), step.finished.get(request_id)
            print(text, end="", flush=True)
            num_shown += len(text)
    except KeyboardInterrupt:
        output = _stop(llm, request_id) if stoppable else None
        if output is None:
            raise
        print((output["text"] or "")[num_shown:], end="")
    print(flush=True)
    assert output is not None, "the last step brings the output"
    return output


def _steps(llm: "LLM", request_id: int, num_prompt_tokens: int, leave_bar: bool) -> Iterator["StepOutput"]:
    """The steps from the one that brings the first token to the last. Until the first a bar shows the progress."""
    with tqdm(
        total=num_prompt_tokens, desc="Prefill", unit="tok", dynamic_ncols=True, file=sys.stderr, leave=leave_bar
    ) as bar:
        while request_id not in (step := llm.step()).texts:
            bar.update(step.num_prefill_tokens)
        bar.update(step.num_prefill_tokens)
    yield step
    while request_id not in step.finished:
        step = llm.step()
        yield step


def _stop(llm: "LLM", request_id: int) -> "RequestOutput | None":
    """End a request and return its output; None if the engine cannot go on."""
    with suppress(EngineError):
        llm.abort(request_id)
        return llm.step().finished.get(request_id)
    return None


def prefill_tok_per_s(output: "RequestOutput") -> float | None:
    """Prompt tokens computed (not those found in the prefix cache) in the time to the first token, if there was one."""
    if not output["ttft_s"]:
        return None
    return (output["num_prompt_tokens"] - output["num_cached_tokens"]) / output["ttft_s"]


def decode_tok_per_s(output: "RequestOutput") -> float | None:
    """None for an answer of one token."""
    return 1 / output["tpot_s"] if output["tpot_s"] else None


def summary(output: "RequestOutput") -> str:
    prefill, decode = prefill_tok_per_s(output), decode_tok_per_s(output)
    return (
        f"{output['num_prompt_tokens']:,} prompt tokens ({output['num_cached_tokens']:,} cached), "
        f"{len(output['token_ids']):,} new; prefill {f'{prefill:,.0f}' if prefill else '-'} tok/s, "
        f"decode {f'{decode:,.1f}' if decode else '-'} tok/s; finish reason: {output['finish_reason']}"
    )


def escape_unencodable_output() -> None:
    """Characters that stdout's encoding does not have come out as escapes, such as \\u20ac, instead of an error."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_closed_stdout() -> bool:
    """Whether nobody reads stdout any more. Then what is still buffered is dropped; Python would report it at exit."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    is_closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed
