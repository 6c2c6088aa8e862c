"""`nanovllm chat`: a conversation in which every turn sees the ones before it.

At a terminal the program shows a prompt, and Ctrl-C stops an answer without ending the program. If stdin is a pipe,
there is no prompt, and the first message that is refused ends the program. In both cases a message is a single line, or
a block of lines between two QUOTES. The answers go to stdout and everything else to stderr.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.cli.console import stream_answer, summary
from nanovllm.cli.flags import name_flags
from nanovllm.config import Config
from nanovllm.errors import EngineError, RequestError
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # --help must not load torch
    from nanovllm.core.outputs import RequestOutput
    from nanovllm.llm import LLM

QUOTES = '"""'
HELP = f"""\
/reset   start a new conversation (keeps the system prompt)
/help    show this
/exit    end the program, as Ctrl-D does
{QUOTES}      starts and ends a message of several lines
Ctrl-C   stops an answer; pressed twice at the prompt, it ends the program"""


class MessageReader:
    """Reads messages from stdin: single lines, or blocks of lines between two QUOTES."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._num_lines = 0
        if self.is_terminal:
            with suppress(ImportError):  # some builds of Python lack it; `input` then works without line editing
                import readline  # noqa: F401

    def read(self) -> str | None:
        """The next message, or None at the end of the input.

        Raises RequestError for bytes that are not valid text, and for a block that is not closed.
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
            return self._read_typed_line(prompt) if self.is_terminal else self._read_piped_line()
        except UnicodeDecodeError as error:
            encoding = error.encoding.upper()
            raise RequestError(f"line {self._num_lines} of stdin is not {encoding} text ({error.reason})") from error

    @staticmethod
    def _read_typed_line(prompt: str) -> str | None:
        if sys.stdout.isatty():
            try:
                return input(prompt)
            except EOFError:
                print()
                return None
        print(prompt, end="", file=sys.stderr, flush=True)  # stdout is for the answers
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None

    @staticmethod
    def _read_piped_line() -> str | None:
        line = sys.stdin.buffer.readline()
        return line.decode("utf-8").removesuffix("\n").removesuffix("\r") if line else None


class Conversation:
    """The messages so far. A message that is refused, or stopped before its answer begins, is not added."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None, *, stoppable: bool) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._stoppable = stoppable
        self.reset()

    def reset(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def answer(self, text: str) -> None:
        """Answer the user's message on stdout.

        Raises RequestError if the conversation does not fit in the context with it, or if the chat template cannot
        render it.
        """
        try:
            self._answer(text)
        except KeyboardInterrupt:  # Ctrl-C just before or after the answer, or a second one that broke the engine
            if not self._stoppable:
                raise
            with suppress(EngineError):
                self._llm.stats()
                return
            raise

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        token_ids = self._llm.chat_token_ids(messages)[0]
        room = self._llm.max_request_tokens - len(token_ids)
        if room < 1:
            raise RequestError(self._full(len(token_ids)))
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


def run_chat(llm: "LLM", params: SamplingParams, system: str | None) -> int:
    """Answer messages until the input ends. Returns the exit status."""
    reader = MessageReader()
    conversation = Conversation(llm, params, system, stoppable=reader.is_terminal)
    if reader.is_terminal:
        print("/help lists the commands; Ctrl-D ends the program.", file=sys.stderr)
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


def _next_message(reader: MessageReader) -> str | None:
    """Read a message. At a terminal the first Ctrl-C only discards what was typed, to keep the conversation."""
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
    elif command.startswith("/") and command[1:].isalpha():
        raise RequestError(f"{command} is not a command; /help lists the commands")
    elif command:
        conversation.answer(text)
