"""HarmonyScanner: divides an answer in the harmony format, which gpt-oss writes, into its messages.

An answer continues the prompt after `<|start|>assistant` with one message or several. A header names the message's
channel, and the function that it calls, after the role or after the channel:

    <|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary
     to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>

The channel analysis has the reasoning, final the answer, and commentary calls and what the model says before calls.
`<|return|>` and `<|call|>` end the answer. The package openai-harmony, which reads and writes this format, cannot be
used offline, as it downloads its vocabulary. So the format is read here, from the text that any tokenizer gives.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from nanovllm.text.answer_scan import num_begun

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN)
ANALYSIS = "analysis"
HARMONY_MARK = f"{CHANNEL}{ANALYSIS}"  # in the templates of models that answer in this format
FUNCTIONS = "functions."  # precedes the name of a function that the client executes
MAX_HEADER_CHARS = 300
WINDOW_CHARS = 1000  # characters that are read at once, so that the time is linear in the length of the text

_FOLLOWERS = (START, CHANNEL)  # one of these follows an end within an answer; models leave <|start|>assistant out
_END = re.compile("|".join(map(re.escape, ENDS)))
# A header and every beginning of one, without <|message|>: a role, words after a space, and words after a tag
_HEADER = re.compile(r"(?:<\|start\|>)?[\w.-]*(?: [^\s<]*|<\|(?:channel|constrain)\|>[^\s<]*)*")
_BEGUN_TAG = re.compile(r"<[|a-z]*\Z")
_CHANNEL_NAME = re.compile(r"<\|channel\|>([^\s<]*)")
_RECIPIENT = re.compile(r" to=([^\s<]+)")


class MessagePart(NamedTuple):
    """A part of the text. Joined, the texts of all parts are the text that was read.

    kind: "header" begins a message, "body" is text of the message, "end" is the tag after a message. recipient: the
    function that the message calls, or "".
    """

    kind: Literal["header", "body", "end"]
    text: str
    channel: str
    recipient: str


class HarmonyScanner:
    """Divides a growing text into parts. The parts do not depend on how the text arrives.

    Text that is not a header where a header should be is the body of a message without channel. A tag ends a message
    only if the answer ends there or a header follows, so that a message can mention the tag.
    """

    def __init__(self, begun: str) -> None:
        """begun: the part of the first message that the prompt ends with."""
        self._held = ""
        self._is_in_body = False
        self._channel = self._recipient = ""
        self._num_begun_chars = 0  # at the start of `_held`, which belong to the prompt
        self.feed(begun)
        self._num_begun_chars = len(self._held) if not self._is_in_body else 0

    def feed(self, piece: str, is_last: bool = False) -> list[MessagePart]:
        """Add a piece of the text, and return the parts that have become certain. Hot."""
        found: list[MessagePart] = []
        for start in range(0, max(1, len(piece)), WINDOW_CHARS):
            self._held += piece[start : start + WINDOW_CHARS]
            is_end = is_last and start + WINDOW_CHARS >= len(piece)
            while self._held and (self._read_body if self._is_in_body else self._read_header)(found, is_end):
                pass
        return found

    def parts(self, piece: str, is_last: bool = False) -> list[tuple[str, bool]]:
        """Return the parts of the text, each with True if it belongs to the answer, and not to tags or reasoning."""
        found = [(part.text, part.kind == "body" and not is_reasoning(part)) for part in self.feed(piece, is_last)]
        return [*found, ("", True)] if is_last else found

    def _take(self, kind: Literal["header", "body", "end"], num_chars: int, found: list[MessagePart]) -> None:
        text, self._held = self._held[self._num_begun_chars : num_chars], self._held[num_chars:]
        self._num_begun_chars = 0
        if text or kind == "header":
            found.append(MessagePart(kind, text, self._channel, self._recipient))

    def _read_header(self, found: list[MessagePart], is_last: bool) -> bool:
        """Read a header, or find that there is none. Return False if more text is needed."""
        header, tag, _ = self._held.partition(MESSAGE)
        matched = _HEADER.match(header, 0, MAX_HEADER_CHARS)
        assert matched is not None, "the pattern matches an empty text"
        rest = header[matched.end() :]
        if tag and not rest:
            channels, recipients = _CHANNEL_NAME.findall(header), _RECIPIENT.findall(header)
            self._channel, self._recipient = "".join(channels[-1:]), "".join(recipients[-1:])
            self._take("header", len(header) + len(tag), found)
            self._is_in_body = True
            return True
        is_begun = not tag and (not rest or (len(rest) < len(CONSTRAIN) and _BEGUN_TAG.match(rest) is not None))
        if is_begun and not is_last:
            return False
        new = self._held[self._num_begun_chars :]
        self._channel = self._recipient = ""
        if is_begun and (not new or "<" in new or new.startswith(" to=")):  # the answer was cut inside a header
            self._take("end", len(self._held), found)
            return False
        self._take("header", self._num_begun_chars, found)
        self._is_in_body = True
        return True

    def _read_body(self, found: list[MessagePart], is_last: bool) -> bool:
        """Read the text up to the end of the message. Return False if more text is needed."""
        for end in _END.finditer(self._held):
            rest = self._held[end.end() :]
            if rest.startswith(_FOLLOWERS) or (is_last and not rest):
                num_chars = len(end[0])
                self._take("body", end.start(), found)
                self._take("end", num_chars, found)
                self._is_in_body = False
                return True
            if not is_last and any(tag.startswith(rest) for tag in _FOLLOWERS):
                self._take("body", end.start(), found)
                return False
        num_held = 0 if is_last else max(num_begun(self._held, tag) for tag in ENDS)
        self._take("body", len(self._held) - num_held, found)
        return False


class BodyJoiner:
    """Joins the bodies of an answer's messages: all of the reasoning, and all others, with empty lines in between."""

    def __init__(self) -> None:
        self._has_begun = {True: False, False: False}  # the reasoning, and the rest
        self.is_first = True  # no text of the message has been joined

    def begin(self) -> None:
        """Begin another message."""
        self.is_first = True

    def join(self, part: MessagePart) -> str:
        """Return the text that a part of a body adds. Hot."""
        kind, is_first, self.is_first = is_reasoning(part), self.is_first, False
        has_begun, self._has_begun[kind] = self._has_begun[kind], True
        return f"\n\n{part.text}" if is_first and has_begun else part.text


def is_reasoning(part: MessagePart) -> bool:
    """Return True for a message of the reasoning. Built-in tools, such as python, are called in it."""
    return part.channel == ANALYSIS and not part.recipient.startswith(FUNCTIONS)


def begun_message(prompt: str) -> str:
    """Return the part of a message that the prompt ends with, or "" if the prompt ends between two messages."""
    _, tag, rest = prompt.rpartition(START)
    return f"{tag}{rest}" if tag and not _END.search(rest) else ""


def num_analysis_tokens(token_ids: Sequence[int], begin: Sequence[int], end: int) -> int:
    """Return the number of tokens in the messages of the reasoning, from `begin` to `end`."""
    total = position = 0
    with suppress(ValueError):  # there is no further message
        while True:
            start = token_ids.index(begin[0], position)
            position = start + 1
            if [*token_ids[start : start + len(begin)]] == [*begin]:
                position = token_ids.index(end, start) + 1 if end in token_ids[start:] else len(token_ids)
                total += position - start
    return total
