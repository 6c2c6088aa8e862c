"""HarmonyParser: the reasoning, the contents and the tool calls of an answer in the harmony format (text/harmony.py).

Everything is returned as it arrives, also the arguments of a call, so without a grammar they may be invalid JSON.
Messages of one kind are separated by an empty line.
"""

from nanovllm.entrypoints.server.call_parser import Delta, ReasoningDelta, Schemas, ToolCallDelta, new_call_id
from nanovllm.text.harmony import FUNCTIONS, BodyJoiner, HarmonyScanner, MessagePart, is_reasoning


class HarmonyParser:
    """Parses one answer. Call `feed` with each piece of the text, then `finish`; both return what has become certain.

    A message to a function is a call if the request has tools, whether the function exists or not. The prefix
    "functions." may be missing before the name of a known tool.
    """

    def __init__(self, begun: str, schemas: Schemas) -> None:
        """begun: the part of the first message that the prompt ends with. schemas: of the request's tools."""
        self._scanner, self._schemas = HarmonyScanner(begun), schemas
        self._joiner = BodyJoiner()
        self._num_calls = 0
        self._is_in_call = False

    def feed(self, text: str) -> list[Delta]:
        """Add `text`, and return what has become certain. Hot."""
        return self._deltas(self._scanner.feed(text))

    def finish(self, is_cut: bool = False) -> list[Delta]:
        """Return the rest. Call it after the last text. is_cut: the answer was truncated."""
        deltas = self._deltas(self._scanner.feed("", is_last=True))
        return deltas if is_cut else deltas + self._end_of_call()

    def _deltas(self, parts: list[MessagePart]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in parts:
            if part.kind == "body":
                deltas.append(self._body(part))
                continue
            deltas += self._end_of_call()
            self._joiner.begin()
            if part.kind == "header" and (name := self._called(part.recipient)):
                deltas.append(ToolCallDelta(self._num_calls, new_call_id(), name, ""))
                self._is_in_call = True
        return deltas

    def _called(self, recipient: str) -> str:
        """Return the name of the function that a message to `recipient` calls, or "" without a call."""
        is_function = recipient.startswith(FUNCTIONS) and bool(self._schemas)
        return recipient.removeprefix(FUNCTIONS) if is_function or recipient in self._schemas else ""

    def _body(self, part: MessagePart) -> Delta:
        if self._is_in_call:
            self._joiner.is_first = False
            return ToolCallDelta(self._num_calls, "", "", part.text)
        text = self._joiner.join(part)
        return ReasoningDelta(text) if is_reasoning(part) else text

    def _end_of_call(self) -> list[Delta]:
        """End the call if the message is one. A call without arguments has an empty object of them."""
        if not self._is_in_call:
            return []
        ended: list[Delta] = [ToolCallDelta(self._num_calls, "", "", "{}")] if self._joiner.is_first else []
        self._num_calls += 1
        self._is_in_call = False
        return ended
