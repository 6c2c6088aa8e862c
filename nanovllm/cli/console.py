"""One request at a terminal: a progress bar during prefill, the text as it is generated, then a line of figures."""

import os
import select
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
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


def choose_sampling(llm: "LLM", given: Mapping[str, Any], *, in_chat: bool) -> SamplingParams:
    """The sampling parameters of a command. Each comes from the first of these sources that has it: the flags that were
    given, the model's generation_config.json, the defaults of SamplingParams.

    Values from the file are listed on stderr. In a chat, max_tokens is None by default, because answers end by
    themselves.
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
    """Run one request. Its progress goes to stderr until the first token; then its text goes to stdout.

    leave_bar: whether the progress bar stays on the screen. stoppable: Ctrl-C aborts the request, whose output then has
    finish_reason "abort"; a second Ctrl-C may interrupt a step and break the engine, and then raises KeyboardInterrupt.
    Raises RequestError for a request that can never run.
    """
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
    assert output is not None, "the last step returns the output"
    return output


def _steps(llm: "LLM", request_id: int, num_prompt_tokens: int, leave_bar: bool) -> Iterator["StepOutput"]:
    """Run the request's steps, and yield those from its first token on. A progress bar shows the ones before."""
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
    """Abort a request and return its output, or None if the engine cannot go on."""
    with suppress(EngineError):
        llm.abort(request_id)
        return llm.step().finished.get(request_id)
    return None


def prefill_tok_per_s(output: "RequestOutput") -> float | None:
    """Computed prompt tokens (all but the cached ones) per second until the first token. None if there was no token."""
    if not output["ttft_s"]:
        return None
    return (output["num_prompt_tokens"] - output["num_cached_tokens"]) / output["ttft_s"]


def decode_tok_per_s(output: "RequestOutput") -> float | None:
    """New tokens per second after the first one. None if there was only one."""
    return 1 / output["tpot_s"] if output["tpot_s"] else None


def summary(output: "RequestOutput") -> str:
    prefill, decode = prefill_tok_per_s(output), decode_tok_per_s(output)
    return (
        f"{output['num_prompt_tokens']:,} prompt tokens ({output['num_cached_tokens']:,} cached), "
        f"{len(output['token_ids']):,} new; prefill {f'{prefill:,.0f}' if prefill else '-'} tok/s, "
        f"decode {f'{decode:,.1f}' if decode else '-'} tok/s; finish reason: {output['finish_reason']}"
    )


def escape_unencodable_output() -> None:
    """Print characters that stdout's encoding lacks as escapes, such as \\u20ac, instead of raising an error."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_closed_stdout() -> bool:
    """Whether stdout's reader is gone. If so, drop what is still buffered, which Python would try to write at exit."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    is_closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed
