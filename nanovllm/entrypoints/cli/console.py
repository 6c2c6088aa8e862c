"""Requests at a terminal: the progress and the text of one answer, and conversations.

In a conversation (`nanovllm chat`), the prompt of a turn contains all earlier turns. At a terminal the program shows a
prompt, and Ctrl-C stops an answer without ending the program. If stdin is a pipe, there is no prompt, and the first
refused message ends the program. A message is a single line, several lines that are pasted at once, or a block of lines
between two QUOTES. The answers go to stdout and everything else to stderr, also the reasoning before an answer.
"""

import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import Config
from nanovllm.entrypoints.cli.flags import flag_name, name_flags
from nanovllm.entrypoints.documents import Document, before_question, read_document
from nanovllm.errors import EngineError, RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.answer_parts import AnswerParts, split_answer, with_reasoning_tags
from nanovllm.utils import progress_bar

if TYPE_CHECKING:  # --help must not load torch
    from nanovllm.llm import LLM
    from nanovllm.plan.outputs import RequestOutput, StepOutput
    from nanovllm.text.frontend import Message, Prompt

QUOTES = '"""'
DIM, PLAIN = "\x1b[2m", "\x1b[0m"  # of terminals
HELP = f"""\
/file F  read a document: text, PDF, DOCX or HTML; the next message is about it
/reset   start a new conversation (keeps the system prompt and the documents of --document)
/help    show this
/exit    end the program, as Ctrl-D does
{QUOTES}      starts and ends a message of several lines
Ctrl-C   stops an answer; pressed twice at the prompt, it ends the program"""


# -- one answer ------------------------------------------------------------------------------------------------------


def choose_sampling(llm: "LLM", given: Mapping[str, Any], *, in_chat: bool) -> SamplingParams:
    """Return the sampling parameters of a command. Each parameter comes from the first source that has it: the given
    flags, the model's generation_config.json, the defaults of SamplingParams.

    Values from the file are listed on stderr. In a chat, max_tokens is None by default, because the model ends answers.
    """
    from_file = {name: value for name, value in llm.sampling_defaults.items() if name not in given}
    if from_file:
        listed = " ".join(f"{flag_name(SamplingParams, name)} {value}" for name, value in from_file.items())
        print(f"from the model's generation_config.json: {listed}", file=sys.stderr)
    unlimited = {"max_tokens": None} if in_chat else {}
    return SamplingParams(**(unlimited | from_file | dict(given)))


def chat_request(llm: "LLM", messages: "list[Message]", params: SamplingParams) -> tuple[list[int], SamplingParams]:
    """Return the prompt of a conversation, and the parameters with the tags of the answer's reasoning."""
    (token_ids,) = llm.chat_token_ids(messages)
    return token_ids, with_reasoning_tags(llm.text, params, token_ids)


def stream_answer(
    llm: "LLM", prompt: str | Sequence[int], params: SamplingParams, *, leave_bar: bool = True, stoppable: bool = False
) -> "RequestOutput":
    """Run one request. The progress goes to stderr until the first token; then the text goes to stdout, and the
    reasoning, if `params` tell its tags, to stderr.

    leave_bar: keep the progress bar on the screen. stoppable: Ctrl-C aborts the request, and the output has
    finish_reason "abort"; a second Ctrl-C may interrupt a step and break the engine, and then raises KeyboardInterrupt.
    Raises RequestError for a request that can never run.
    """
    token_ids = llm.text.encode_prompt(prompt)
    request_id = llm.add_request(token_ids, params)
    printer = AnswerPrinter(params)
    output: RequestOutput | None = None
    try:
        for step in _steps(llm, request_id, len(token_ids), leave_bar):
            output = step.finished.get(request_id)
            printer.add(step.texts.get(request_id, ""), is_last=output is not None)
    except KeyboardInterrupt:
        output = _stop(llm, request_id) if stoppable else None
        if output is None:
            raise
        printer.add((output["text"] or "")[printer.num_chars :], is_last=True)
    assert output is not None, "the last step returns the output"
    return output


def print_answers(llm: "LLM", prompt: "Prompt", params: SamplingParams) -> "list[RequestOutput]":
    """Run a request with several answers, which are generated together, and print each answer under its number."""
    (first,) = llm.generate([prompt], params)
    for number, output in enumerate(first["outputs"], start=1):
        print(f"[{number}]", flush=True)
        AnswerPrinter(params).add(output["text"] or "", is_last=True)
    return first["outputs"]


class AnswerPrinter:
    """Prints an answer while it grows: the content to stdout, and the reasoning to stderr, dimmed at a terminal."""

    def __init__(self, params: SamplingParams) -> None:
        self._parts = AnswerParts(params.reasoning_tags)
        self._is_dimmed = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        self._in_reasoning = False
        self.num_chars = 0  # of the answer's text, with its tags

    def add(self, text: str, *, is_last: bool) -> None:
        """Print what a piece of the text adds, and after the last piece the end of the line."""
        parts = self._parts.feed(text, is_last)
        self.num_chars += len(text)
        for part in parts:
            if part.is_reasoning != self._in_reasoning:
                self._in_reasoning = part.is_reasoning
                self._print_reasoning("Reasoning:\n" if part.is_reasoning else "\n\n")
            if part.is_reasoning:
                self._print_reasoning(part.text)
            else:
                print(part.text, end="", flush=True)
        if is_last:
            if self._in_reasoning:  # the answer was cut
                self._print_reasoning("\n")
            print(flush=True)

    def _print_reasoning(self, text: str) -> None:
        print(f"{DIM}{text}{PLAIN}" if self._is_dimmed else text, end="", file=sys.stderr, flush=True)


def _steps(llm: "LLM", request_id: int, num_prompt_tokens: int, leave_bar: bool) -> Iterator["StepOutput"]:
    """Run the request's steps, and yield the steps from its first token on. A progress bar shows the earlier steps."""
    with progress_bar(total=num_prompt_tokens, desc="Prefill", unit="tok", leave=leave_bar) as bar:
        while request_id not in (step := llm.step()).texts:
            bar.update(step.num_prefill_tokens)
        bar.update(step.num_prefill_tokens)
    yield step
    while request_id not in step.finished:
        step = llm.step()
        yield step


def _stop(llm: "LLM", request_id: int) -> "RequestOutput | None":
    """Abort a request and return its output, or None if the engine has failed."""
    with suppress(EngineError):
        llm.abort(request_id)
        return llm.step().finished.get(request_id)
    return None


def prefill_tok_per_s(output: "RequestOutput") -> float | None:
    """Return the computed (not cached) prompt tokens per second until the first token, or None without one."""
    if not output["ttft_s"]:
        return None
    return (output["num_prompt_tokens"] - output["num_cached_tokens"]) / output["ttft_s"]


def decode_tok_per_s(output: "RequestOutput") -> float | None:
    """Return the new tokens per second after the first one, or None if there was only one."""
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
    """Return True if stdout's reader is gone. If so, drop the buffered output, which Python would write at exit."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    is_closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed


# -- a conversation --------------------------------------------------------------------------------------------------


class MessageReader:
    """Reads messages from stdin: single lines, or blocks of lines between two QUOTES."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._num_lines = 0
        if self.is_terminal:
            with suppress(ImportError):  # some builds of Python lack readline; `input` then has no line editing
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message

    def read(self) -> str | None:
        """Return the next message, or None at the end of the input.

        Raises RequestError for bytes that are not valid text, and for a block without closing QUOTES.
        """
        line = self._read_line(">>> ")
        if line is None or not line.lstrip().startswith(QUOTES):
            return line
        text = line.lstrip().removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            line = self._read_line("... ")
            if line is None:
                raise RequestError(f"the message that begins with {QUOTES} is not closed; end it with {QUOTES}")
            text += "\n" + line
        return text.rstrip().removesuffix(QUOTES).strip("\n")

    def _read_line(self, prompt: str) -> str | None:
        self._num_lines += 1
        try:
            if self.is_terminal:
                with nullcontext() if sys.stdout.isatty() else redirect_stdout(sys.stderr):  # stdout is for the answers
                    return input(prompt)
            line = sys.stdin.buffer.readline()
            return line.decode("utf-8-sig").removesuffix("\n").removesuffix("\r") if line else None
        except EOFError:
            print(file=sys.stderr)
            return None
        except UnicodeDecodeError as error:
            encoding = error.encoding.upper()
            raise RequestError(f"line {self._num_lines} of stdin is not {encoding} text ({error.reason})") from error


class Conversation:
    """The messages so far, without the reasoning before answers, which templates do not expect in a message.

    A message is not added if it is refused, or stopped before its answer begins.
    """

    def __init__(
        self,
        llm: "LLM",
        params: SamplingParams,
        system: str | None,
        documents: Sequence[Document] = (),
        *,
        stoppable: bool,
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._documents = documents
        self._stoppable = stoppable
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.unread = [*self._documents]  # they come before the next message

    def answer(self, text: str) -> None:
        """Answer the user's message on stdout.

        Raises RequestError if the conversation with this message does not fit in the context, or if the chat template
        cannot render the message.
        """
        try:
            self._answer(text)
        except KeyboardInterrupt:  # Ctrl-C just before or after the answer, or a second Ctrl-C that broke the engine
            if not self._stoppable:
                raise
            with suppress(EngineError):
                self._llm.stats()
                return
            raise

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": before_question(self.unread, text)}]
        token_ids, params = chat_request(self._llm, messages, self._params)
        room = self._llm.max_request_tokens - len(token_ids)
        if room < 1:
            raise RequestError(self._full(len(token_ids)))
        params = params.within(room)
        params = replace(params, max_tokens=min(params.max_tokens or room, room))
        output = stream_answer(self._llm, token_ids, params, leave_bar=False, stoppable=self._stoppable)
        _, content = split_answer(output["text"] or "", params.reasoning_tags)
        if "error" not in output and (content or output["finish_reason"] != "abort"):
            self.messages = [*messages, {"role": "assistant", "content": content}]
            self.unread = []
        self._print_figures(output, is_full=len(output["token_ids"]) == room)

    def _print_figures(self, output: "RequestOutput", is_full: bool) -> None:
        num_tokens = output["num_prompt_tokens"] + len(output["token_ids"])
        used = f"context {num_tokens:,} of {self._llm.max_request_tokens:,}"
        print(f"{summary(output)}; {used}", file=sys.stderr)
        if "error" in output:
            print(f"the request failed: {output['error']}", file=sys.stderr)
        elif is_full and output["finish_reason"] == "length":
            remedy = name_flags(self._remedy(), (Config,))
            print(f"the context is full, so the answer ends here; {remedy}", file=sys.stderr)

    def _full(self, num_tokens: int) -> str:
        return (
            f"with this message the conversation has {num_tokens:,} tokens and needs one more for an answer, but "
            f"only {self._llm.max_request_tokens:,} fit. The message was not added: "
            f"send a shorter one, {self._remedy()}"
        )

    def _remedy(self) -> str:
        llm = self._llm
        if llm.max_request_tokens < llm.max_model_len:
            larger = "more num_cpu_blocks" if llm.config.enable_cpu_offload else "more num_kvcache_blocks"
        elif llm.max_model_len < llm.model_config.max_model_len_limit:
            larger = (
                f"max_model_len above {llm.max_model_len} (the model's limit: {llm.model_config.max_model_len_limit})"
            )
        else:
            larger = "a longer rope (hf_overrides)"
        return f"start a new conversation with /reset, or restart with {larger}"


def run_chat(llm: "LLM", params: SamplingParams, system: str | None, documents: Sequence[Document] = ()) -> int:
    """Answer messages until the input ends, and return the exit status."""
    reader = MessageReader()
    conversation = Conversation(llm, params, system, documents, stoppable=reader.is_terminal)
    if reader.is_terminal:
        print("/help lists the commands; Ctrl-D ends the program.", file=sys.stderr)
    for document in documents:
        print(_described(document), file=sys.stderr)
    while True:
        try:
            text = _next_message(reader)
            if text is None or text.strip() == "/exit":
                return 0
            _react(conversation, text)
        except RequestError as error:
            if not reader.is_terminal:
                raise
            print(f"nanovllm: {name_flags(str(error), (Config, SamplingParams))}", file=sys.stderr)


def add_document(conversation: Conversation, path: str) -> None:
    """Read a document, which comes before the next message. Raises RequestError if it cannot be read."""
    if not path:
        raise RequestError("/file needs the path of a document, as in /file book.txt")
    document = read_document(Path(path.strip("'\"")))
    conversation.unread.append(document)
    print(_described(document), file=sys.stderr)


def _described(document: Document) -> str:
    return f"{document.name}: {len(document.text):,} characters. Ask about it."


def _next_message(reader: MessageReader) -> str | None:
    """Read a message. At a terminal the first Ctrl-C only discards the typed text, to keep the conversation."""
    try:
        return reader.read()
    except KeyboardInterrupt:
        if not reader.is_terminal:
            raise
        print("\nTo end the program, press Ctrl-C again, press Ctrl-D or type /exit.", file=sys.stderr)
        return reader.read()


def _react(conversation: Conversation, text: str) -> None:
    """Run a command, or answer a message."""
    command = text.strip()
    if command == "/help":
        print(HELP, file=sys.stderr)
    elif command == "/reset":
        conversation.reset()
        print("Started a new conversation.", file=sys.stderr)
    elif command == "/file" or command.startswith("/file "):
        add_document(conversation, command.removeprefix("/file").strip())
    elif command.startswith("/") and command[1:].isalpha():
        raise RequestError(f"{command} is not a command; /help lists the commands")
    elif command:
        conversation.answer(text)
