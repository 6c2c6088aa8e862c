"""Detokenizer: a growing list of token ids as text, piece by piece, ending before a stop string."""

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"  # what a decoder writes for a character whose bytes are not all there yet


class Detokenizer:
    """Text of one answer.

    Decodes only the newest tokens, together with a few before them, since a token's text can depend on its
    neighbours. `text` grows only by what is final: incomplete characters wait for their rest, and an ending that
    might become a stop string waits until it does or does not.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._context_start = 0  # tokens from here on are decoded together
        self._decoded_end = 0  # tokens before this are in _decoded
        self._decoded = ""
        self._num_shown = 0
        self.stopped = False

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def update(self, token_ids: Sequence[int], finished: bool) -> str:
        """The answer is now `token_ids`. Returns the text that became final; sets `stopped` at a stop string."""
        if self.stopped:
            return ""
        known = self._decode(token_ids[self._context_start : self._decoded_end])
        text = self._decode(token_ids[self._context_start :])
        if finished or not text.endswith(_REPLACEMENT):
            search_from = max(0, len(self._decoded) - max(map(len, self._stop), default=0))
            self._decoded += text[len(known) :]
            self._context_start, self._decoded_end = self._decoded_end, len(token_ids)
            self._find_stop(search_from)
        return self._show(finished)

    def _find_stop(self, search_from: int) -> None:
        found = [at for stop in self._stop if (at := self._decoded.find(stop, search_from)) >= 0]
        if found:
            self._decoded = self._decoded[: min(found)]
            self.stopped = True

    def _show(self, finished: bool) -> str:
        end = len(self._decoded)
        if not (finished or self.stopped):
            end -= max((_overlap(self._decoded, stop) for stop in self._stop), default=0)
        shown = self._decoded[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return shown

    @property
    def text(self) -> str:
        """All text returned so far."""
        return self._decoded[: self._num_shown]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
