"""`nanovllm chat`: a conversation in which every turn sees the ones before it.

At a terminal a prompt is shown, messages can have several lines, and Ctrl-C ends an answer and not the program. From a
pipe each line is a message, no prompt is shown, and the first message that is refused ends the run. The answers go to
stdout, all else to stderr.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.cli.console import BadInputError, gate, stream_answer, summary
from nanovllm.cli.flags import name_flags
from nanovllm.config import Config
from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # --help must not load torch
    from nanovllm.core.outputs import RequestOutput
    from nanovllm.llm import LLM

QUOTES = '"""'
HELP = f"""\
/reset   begin a new conversation (a system prompt stays)
/help    show this
/exit    end the program, as Ctrl-D does
{QUOTES}      begins and ends a message of several lines
Ctrl-C   ends an answer; pressed twice at the prompt it ends the program"""


class MessageReader:
    """Messages from stdin: a line each, or the lines between two of QUOTES."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._num_lines = 0
        if self.is_terminal:
            with suppress(ImportError):  # absent from some builds of Python; `input` then edits no lines
                import readline  # noqa: F401

    def read(self) -> str | None:
        """The next message, None at the end of the input. Raises BadInputError for bytes that are not UTF-8 text and
        for a block without an end.
        """
        line = self._read_line(">>> ")
        if line is None or not line.lstrip().startswith(QUOTES):
            return line
        text = line.lstrip().removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            line = self._read_line("... ")
            if line is None:
                raise BadInputError(f"the message that begins with {QUOTES} has no end; close it with {QUOTES}")
            text += "\n" + line
        return text.rstrip().removesuffix(QUOTES).strip("\n")

    def _read_line(self, prompt: str) -> str | None:
        with gate():
            if not self.is_terminal:
                return self._read_piped_line()
            if sys.stdout.isatty():
                try:
                    return input(prompt)
                except EOFError:
                    print()
                    return None
            print(prompt, end="", file=sys.stderr, flush=True)  # stdout is for the answers
            line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None

    def _read_piped_line(self) -> str | None:
        self._num_lines += 1
        line = sys.stdin.buffer.readline()
        try:
            return line.decode("utf-8").removesuffix("\n").removesuffix("\r") if line else None
        except UnicodeDecodeError as error:
            raise ValueError(f"line {self._num_lines} of stdin is not UTF-8 text ({error.reason})") from error


class Conversation:
    """The messages so far. A message that is refused, or stopped before its answer begins, leaves them as they were."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None, *, stoppable: bool) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._stoppable = stoppable
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def answer(self, text: str) -> None:
        """Answer the user's message on stdout. Raises BadInputError where it does not fit or cannot be written."""
        try:
            self._answer(text)
        except KeyboardInterrupt:  # just before or after the answer itself, or a second one that broke the engine
            if not self._stoppable:
                raise
            with suppress(EngineError):
                self._llm.stats()
                return
            raise

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        with gate():
            token_ids = self._llm.chat_token_ids(messages)[0]
        room = self._llm.max_request_tokens - len(token_ids)
        if room < 1:
            raise BadInputError(self._full(len(token_ids)))
        params = replace(self._params, max_tokens=min(self._params.max_tokens or room, room))
        output = stream_answer(self._llm, token_ids, params, leave_bar=False, stoppable=self._stoppable)
        if "error" not in output and (output["text"] or output["finish_reason"] != "abort"):
            self.messages = [*messages, {"role": "assistant", "content": output["text"] or ""}]
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
            f"with this message the conversation has {num_tokens:,} tokens, and an answer needs at least one more; "
            f"{self._llm.max_request_tokens:,} fit. It was left out: send a shorter message, or {self._remedy()}"
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
        return f"/reset begins a new conversation; a later run can have room for more with {larger}"


def run_chat(llm: "LLM", params: SamplingParams, system: str | None) -> int:
    """Answer messages until the input ends. Returns the exit status."""
    reader = MessageReader()
    conversation = Conversation(llm, params, system, stoppable=reader.is_terminal)
    if reader.is_terminal:
        print("/help lists the commands; Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            text = _next_message(reader)
            if text is None or text.strip() == "/exit":
                return 0
            _react(conversation, text)
        except BadInputError as error:
            if not reader.is_terminal:
                raise
            print(f"nanovllm: {name_flags(str(error), (Config, SamplingParams))}", file=sys.stderr)


def _next_message(reader: MessageReader) -> str | None:
    """At a terminal one Ctrl-C only discards what was typed; the conversation would be lost with the program."""
    try:
        return reader.read()
    except KeyboardInterrupt:
        if not reader.is_terminal:
            raise
        print("\nCtrl-C again, Ctrl-D or /exit ends.", file=sys.stderr)
        return reader.read()


def _react(conversation: Conversation, text: str) -> None:
    """Obey a command, or answer a message."""
    command = text.strip()
    if command == "/help":
        print(HELP, file=sys.stderr)
    elif command == "/reset":
        conversation.reset()
        print("A new conversation.", file=sys.stderr)
    elif command.startswith("/") and command[1:].isalpha():
        raise BadInputError(f"{command} is not a command; /help lists them")
    elif command:
        conversation.answer(text)
