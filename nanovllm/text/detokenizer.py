"""Detokenizer: a growing answer as text, piece by piece, ending before a stop string.

An update costs the same however long the answer is and however much of it waits: it decodes the new tokens together
with a few before them, because a token's text can depend on its neighbours. (`tokenizers.decoders.DecodeStream` is not
used: its cost grows without bound while the text ends in U+FFFD, and it never returns an ending it holds back.)
"""

import io
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not a character, or not yet
MAX_WAITING_TOKENS = 8  # after these, replacement characters are taken for text; a character has at most 4 bytes
MAX_INCOMPLETE_CHARS = 3  # an incomplete character has at most 3 bytes; some decoders write one U+FFFD for each
WINDOW_TOKENS = 16  # enough for those characters when each byte is a token, and for decoding to start inside another
TEXT_TO_CLEAN_UP = "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're"  # loses spaces if they are cleaned up


class TokenDecoder:
    """Token ids -> text, without special tokens unless `skip_special_tokens` is False.

    Shared by all requests of an engine that agree on that.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self.decode = _find_decode(tokenizer, skip_special_tokens)
        self._text_lens: dict[int, int | None] = {}

    def visible(self, token_ids: Iterable[int]) -> list[int]:
        """The tokens that have text. Those that the tokenizer does not know never do, nor do skipped special ones."""
        return [token_id for token_id in token_ids if self._text_len(token_id) is not None]

    def text_len(self, token_ids: list[int]) -> int:
        """Characters of the text of visible tokens."""
        if len(token_ids) == 1:
            return self._text_len(token_ids[0]) or 0
        return len(self.decode(token_ids))

    def _text_len(self, token_id: int) -> int | None:
        """Characters of a token's text, None if it never shows. Remembered."""
        if token_id not in self._text_lens:
            text_len = len(self.decode([token_id]))
            # A decoder may strip a space from the start of a text: then the second one is left
            never_shows = text_len == 0 and not self.decode([token_id, token_id])
            self._text_lens[token_id] = None if never_shows else text_len
        return self._text_lens[token_id]


def _find_decode(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """`tokenizer.decode`, or the Rust tokenizer below it where that gives the same text in a fraction of the time.

    It does not where a class has a `decode` of its own, nor where `clean_up_tokenization_spaces` takes effect, which
    depends on the tokenizer's kind and on the release of transformers; so that one is tried.
    """
    from transformers import PreTrainedTokenizerFast

    decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    if not issubclass(kind, plain) or (kind.decode, kind._decode) != (plain.decode, plain._decode):
        return decode
    rust_decode = partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    token_ids = tokenizer.encode(TEXT_TO_CLEAN_UP, add_special_tokens=False)
    return rust_decode if rust_decode(token_ids) == decode(token_ids) else decode


class Detokenizer:
    """Text of one answer.

    A piece holds only what is final: an incomplete character waits for its rest, and an ending that might become a stop
    string waits until it does or does not. With the last token everything comes out, so an answer that ends inside a
    character, cut by `max_tokens`, ends in U+FFFD. Decoding its token ids gives the same.
    """

    def __init__(self, decoder: TokenDecoder, stop: tuple[str, ...], include_stop: bool = False) -> None:
        """`include_stop`: the text includes the stop string, or the end token, that ends it."""
        self._decoder = decoder
        self._stop = stop
        self._include_stop = include_stop
        self._window: list[int] = []  # the newest visible tokens, which are decoded together
        self._num_context_tokens = 0  # the first of them, which are there for those behind them
        self._num_read_chars = 0  # of the window's text, what was read by an earlier update
        self._withheld = ""  # read, but perhaps the start of a stop string
        self._shown = io.StringIO()
        self.stopped = False

    @property
    def text(self) -> str:
        """All pieces, joined."""
        return self._shown.getvalue()

    def update(self, new_token_ids: Sequence[int], finished: bool, at_end_token: bool = False) -> str:
        """The answer goes on with these tokens. `finished`: they are the last; `at_end_token`: because the last of them
        is an end token.

        Returns the text that became final; sets `stopped` at a stop string. Hot: once per sequence and step.
        """
        if self.stopped:
            return ""
        if at_end_token and not self._include_stop:
            new_token_ids = new_token_ids[:-1]
        piece = self._read(self._decoder.visible(new_token_ids), finished)
        if self._stop:
            piece = self._cut_at_stop(self._withheld + piece, finished)
        self._shown.write(piece)
        return piece

    def _read(self, token_ids: list[int], finished: bool) -> str:
        """The text of the window with these tokens, as far as it is final and was not read before."""
        self._window += token_ids
        text = self._decoder.decode(self._window)
        if finished or not text.endswith(REPLACEMENT):
            piece = text[self._num_read_chars :]
            self._window = self._window[self._num_context_tokens :] or self._window
            self._num_context_tokens = len(self._window)
            self._num_read_chars = self._decoder.text_len(self._window)
            return piece
        num_waiting_chars = len(text) - len(text.rstrip(REPLACEMENT))
        start = self._num_read_chars
        if len(self._window) - self._num_context_tokens <= MAX_WAITING_TOKENS:
            self._num_read_chars = max(start, len(text) - num_waiting_chars)
            return text[start : self._num_read_chars]
        # These characters belong to the text, except perhaps the last ones.
        end = max(start, len(text) - min(num_waiting_chars, MAX_INCOMPLETE_CHARS))
        self._window, self._num_context_tokens = self._window[-WINDOW_TOKENS:], 0
        self._num_read_chars = max(0, self._decoder.text_len(self._window) - (len(text) - end))
        return text[start:end]

    def _cut_at_stop(self, text: str, finished: bool) -> str:
        """What of `text` may be shown. It begins with all that was withheld, so no stop string begins before it."""
        found = [(at, at + len(stop)) for stop in self._stop if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        end = min(found)[self._include_stop] if found else len(text)
        if not (found or finished):
            end -= max(_overlap(text, stop) for stop in self._stop)
        self._withheld = text[end:]
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
