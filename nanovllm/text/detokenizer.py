"""Detokenizer: turns a growing answer into text, piece by piece, and truncates the text before a stop string.

A token's text can depend on its neighbours, so an update decodes the new tokens together with a few preceding tokens.
The cost of an update depends neither on the length of the answer nor on the length of the text that is held back.
(`tokenizers.decoders.DecodeStream` is not used, because its cost grows without bound while the text ends in U+FFFD, and
it never returns the text that it holds back at the end.)

A TextReceiver is the Receiver of a request with text: it decodes tokens, and ends the request at a stop string.

`read_token_bytes` returns the bytes that each token adds to a text, for grammars and bad words. The bytes are not
derived from the kind of the tokenizer: each token is decoded after another token, and as a check all tokens are decoded
in random order.
"""

import io
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, TypeAlias

from nanovllm.plan.outputs import Ending, Outbox, PositionLogprobs, Receiver, TextOf, TextSource
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import AnswerTags, HarmonyTags
from nanovllm.text.answer_scan import ReasoningSplitter
from nanovllm.text.harmony import HarmonyScanner
from nanovllm.utils.arithmetic import ceil_div
from nanovllm.utils.automaton import Automaton

READER_TIMEOUT_S = 1.0
REPLACEMENT = "\ufffd"  # decoders write this for bytes that are not a complete character
MAX_WAITING_TOKENS = 8  # after this many, replacement characters count as text; a character has at most 4 bytes
MAX_INCOMPLETE_CHARS = 3  # an incomplete character has at most 3 bytes; some decoders write one U+FFFD for each
WINDOW_TOKENS = 16  # enough for the incomplete characters if each byte is a token, even if the window splits another
TEXT_TO_CLEAN_UP = "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're"  # cleaning up removes some spaces of this text


class TokenDecoder:
    """Decodes token ids to text. Leaves out special tokens unless `skip_special_tokens` is False.

    All requests of an engine with the same setting share one decoder.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self.decode, self.decode_batch = _find_decode(tokenizer, skip_special_tokens)
        self._tokenizer = tokenizer
        self._text_lens: dict[int, int | None] = {}
        self._broken: set[int] = set()  # tokens in `_text_lens` whose text has U+FFFD
        self._texts: dict[int, str] = {}
        self._anchor: tuple[list[int], str] | None = None

    @property
    def anchor(self) -> tuple[list[int], str]:
        """Return a list with a token to decode before other tokens, and the token's text. Cached.

        Decoders may strip the space of a text's first word; after this token, other tokens are not at the start of a
        text. The list is empty for a tokenizer without a suitable token.
        """
        if self._anchor is None:
            self._anchor = self._find_anchor()
        return self._anchor

    def _find_anchor(self) -> tuple[list[int], str]:
        one_char: tuple[list[int], str] = [], ""
        for token_id in range(len(self._tokenizer)):
            text = self.decode([token_id])
            # A word rather than a letter, which may be the token of a byte
            if text.isalnum() and self.decode([token_id, token_id]).startswith(text):
                if len(text) > 1:
                    return [token_id], text
                one_char = one_char if one_char[0] else ([token_id], text)
        return one_char

    def visible(self, token_ids: Iterable[int]) -> list[int]:
        """Return the tokens that have text. Skipped special tokens and tokens unknown to the tokenizer have none."""
        return [token_id for token_id in token_ids if self._text_len(token_id) is not None]

    def token_text(self, token_id: int) -> str:
        """Return the text of a token inside a text, with U+FFFD for an incomplete character. Cached."""
        if token_id not in self._texts:
            before, before_text = self.anchor
            self._texts[token_id] = self.decode([*before, token_id]).removeprefix(before_text)
        return self._texts[token_id]

    def measure(self, token_ids: list[int]) -> tuple[int, bool]:
        """Return the number of characters in the text of visible tokens, and True if it has U+FFFD."""
        if len(token_ids) == 1:
            return self._text_len(token_ids[0]) or 0, token_ids[0] in self._broken
        text = self.decode(token_ids)
        return len(text), REPLACEMENT in text

    def _text_len(self, token_id: int) -> int | None:
        """Return the number of characters in a token's text, or None if the token never has text. Cached."""
        if token_id not in self._text_lens:
            text = self.decode([token_id])
            text_len = len(text)
            if REPLACEMENT in text:
                self._broken.add(token_id)
            # A decoder may strip a leading space. If the token is a space, decoding two keeps the second space
            never_shows = text_len == 0 and not self.decode([token_id, token_id])
            self._text_lens[token_id] = None if never_shows else text_len
        return self._text_lens[token_id]


_Decode: TypeAlias = Callable[[list[int]], str]
_DecodeBatch: TypeAlias = Callable[[list[list[int]]], list[str]]


def _find_decode(tokenizer: Any, skip_special_tokens: bool) -> tuple[_Decode, _DecodeBatch]:
    """Return the functions that decode one text and several texts: the functions of the Rust tokenizer, which are much
    faster, if they give the same text as the tokenizer's functions, and else the tokenizer's functions.

    The texts differ if the class overrides `decode`, or if `clean_up_tokenization_spaces` has an effect. The effect
    depends on the kind of tokenizer and on the release of transformers, so a sample is decoded.
    """
    from transformers import PreTrainedTokenizerFast

    decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)

    def decode_batch(batch: list[list[int]]) -> list[str]:
        return [decode(token_ids) for token_ids in batch]

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    if not issubclass(kind, plain) or (kind.decode, kind._decode) != (plain.decode, plain._decode):
        return decode, decode_batch
    backend = tokenizer.backend_tokenizer
    rust_decode = partial(backend.decode, skip_special_tokens=skip_special_tokens)
    token_ids = tokenizer.encode(TEXT_TO_CLEAN_UP, add_special_tokens=False)
    if rust_decode(token_ids) != decode(token_ids):
        return decode, decode_batch
    return rust_decode, partial(backend.decode_batch, skip_special_tokens=skip_special_tokens)


class StopStrings:
    """The strings that end an answer. All answers with the same strings share one object.

    A state stands for the longest suffix of a text with which a stop string could begin; state 0 for no such suffix.
    """

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._automaton = Automaton(strings)
        self._whole = {path[-1] for path in self._automaton.paths}  # states
        self._links = self._automaton.links(self._whole)

    def __bool__(self) -> bool:
        return bool(self._whole)

    def follow(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        return self._automaton.step(state, char)

    def num_begun(self, state: int) -> int:
        """Return the number of characters at the end of the text that could begin a stop string."""
        return self._automaton.depths[state]

    def num_found(self, state: int) -> int:
        """Return the length of the longest stop string at the end of the text, or 0 without a stop string."""
        return self._automaton.depths[state if state in self._whole else self._links[state]]


class Detokenizer:
    """The text that one answer adds to the text of the prompt. Stop strings count only after the answer's reasoning.

    A piece contains only final text. An incomplete character is held back until the rest of the character arrives. A
    suffix that could begin a stop string is held back until the next characters decide. The last token releases all
    text: if `max_tokens` splits a character, the answer ends in U+FFFD, as if all token ids were decoded at once.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        stop: StopStrings,
        include_stop: bool = False,
        *,
        prompt: Seq[int] = (),
        min_tokens: int = 0,
        reasoning: AnswerTags | None = None,
    ) -> None:
        """include_stop: keep the stop string or end token that ends the answer in the answer's text.

        prompt: the prompt's token ids, the last of which are decoded together with the answer's first tokens. A decoder
        may strip the space of the first word of a text. A character that the prompt begins and the answer completes
        belongs to the answer.

        min_tokens: a stop string may begin only after the text of the first `min_tokens` tokens.
        """
        self._decoder = decoder
        self._stop = stop
        self._include_stop = include_stop
        self._splitter: HarmonyScanner | ReasoningSplitter
        if isinstance(reasoning, HarmonyTags):
            self._splitter = HarmonyScanner(reasoning.begun)
        else:
            self._splitter = ReasoningSplitter(reasoning)
        self._num_unstoppable_tokens = min_tokens  # from here on
        self._window, self._num_context_tokens = self._end_of_prompt(prompt)
        # The newest visible tokens, which are decoded together. The first tokens are the context of the following ones
        self._num_read_chars = decoder.measure(self._window[: self._num_context_tokens])[0]  # of the window's text
        self._num_prompt_chars = self._num_read_chars
        has_part = self._num_context_tokens < len(self._window)
        self._open_prompt_text = decoder.decode(self._window) if has_part else None  # its last character may change
        self._withheld = ""  # read, but held back because it may begin a stop string
        self._stop_state = 0  # at its end
        self._shown = io.StringIO()
        self.stop_string: str | None = None  # that ended the answer

    @property
    def has_stop_strings(self) -> bool:
        return bool(self._stop)

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    @property
    def text(self) -> str:
        """The text of all pieces, joined."""
        return self._shown.getvalue()

    def update(self, new_token_ids: list[int], finished: bool, at_end_token: bool = False) -> str:
        """Add tokens to the answer, and return the text that became final. Hot.

        finished: the new tokens are the last tokens of the answer. at_end_token: the last token is an end token. If a
        stop string appears, set `stop_string`; later updates then return no text.
        """
        if self.stopped:
            return ""
        if at_end_token and not self._include_stop:
            new_token_ids = new_token_ids[:-1]
        piece = self._read(self._decoder.visible(new_token_ids), finished)
        if self._stop:
            piece = self._until_stop(piece, finished)
        self._num_unstoppable_tokens -= len(new_token_ids)
        self._shown.write(piece)
        return piece

    def _end_of_prompt(self, prompt: Seq[int]) -> tuple[list[int], int]:
        """Return the prompt's newest visible tokens, and the number of them before an incomplete character at the end.

        The two are chosen to minimize the number of replacement characters.
        """
        visible: list[int] = []
        for token_id in reversed(prompt):
            if len(visible) == WINDOW_TOKENS + MAX_INCOMPLETE_CHARS:
                break
            visible += self._decoder.visible([token_id])
        visible.reverse()
        end, latest = len(visible), max(0, len(visible) - WINDOW_TOKENS)
        found: list[tuple[int, int, int]] = []  # replacement characters, tokens left out at the end, more at the start
        for num_more in range(1 + min(MAX_INCOMPLETE_CHARS, latest)):
            for num_incomplete in range(1 + min(MAX_INCOMPLETE_CHARS, end - latest)):
                whole = visible[latest - num_more : end - num_incomplete]
                found.append((self._decoder.decode(whole).count(REPLACEMENT), num_incomplete, num_more))
                if found[-1][0] == 0:
                    return visible[latest - num_more :], len(whole)
        _, num_incomplete, num_more = min(found)
        return visible[latest - num_more :], end - num_incomplete - (latest - num_more)

    def _read(self, token_ids: list[int], finished: bool) -> str:
        """Add tokens to the window, and return the part of the window's text that is final and was not read before.

        A decoder may replace a whole run of bytes because of a single byte. So tokens that make replacement characters
        are added one by one; then only the newest token can be incomplete.
        """
        text = self._decoder.decode(self._window + token_ids)
        if len(token_ids) > 1 and REPLACEMENT in text:
            *first, last = token_ids
            return "".join(self._read([token_id], False) for token_id in first) + self._read([last], finished)
        self._window += token_ids
        if self._open_prompt_text is not None:
            pairs = zip(text, self._open_prompt_text, strict=False)
            num_same = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), len(self._open_prompt_text))
            self._num_read_chars = max(self._num_prompt_chars, num_same)
        if finished or not text.endswith(REPLACEMENT):
            self._open_prompt_text = None
            piece = text[self._num_read_chars :]
            self._window, self._num_read_chars = self._context()
            self._num_context_tokens = len(self._window)
            return piece
        num_waiting_chars = len(text) - len(text.rstrip(REPLACEMENT))
        start = self._num_read_chars
        if len(self._window) - self._num_context_tokens <= MAX_WAITING_TOKENS:
            self._num_read_chars = max(start, len(text) - num_waiting_chars)
            if self._num_read_chars > start:
                self._open_prompt_text = None
            return text[start : self._num_read_chars]
        self._open_prompt_text = None
        # Too many tokens for one character, so the replacement characters are text, except perhaps the last one
        end = max(start, len(text) - min(num_waiting_chars, MAX_INCOMPLETE_CHARS))
        self._window, self._num_context_tokens = self._window[-WINDOW_TOKENS:], 0
        self._num_read_chars = max(0, self._decoder.measure(self._window)[0] - (len(text) - end))
        return text[start:end]

    def _context(self) -> tuple[list[int], int]:
        """Return the tokens to be decoded with the next ones, and the number of characters in their text.

        The newest tokens are enough, unless they begin inside a character. Then the preceding tokens are kept, too.
        """
        new = self._window[self._num_context_tokens :] or self._window
        newest = new[-WINDOW_TOKENS:]
        num_chars, is_broken = self._decoder.measure(newest)
        if is_broken:
            for num_older in range(1, 1 + MAX_INCOMPLETE_CHARS):
                tokens = self._window[-len(newest) - num_older :]
                num_all_chars, is_still_broken = self._decoder.measure(tokens)
                if not is_still_broken:
                    return tokens, num_all_chars
            newest, num_chars = new, self._decoder.measure(new)[0]
        return newest, num_chars

    def _until_stop(self, piece: str, finished: bool) -> str:
        """Return the part of the piece that may be shown. A stop string counts only within one part of the answer."""
        shown = []
        for part, is_answer in self._splitter.parts(piece, finished):
            if is_answer:
                shown.append(self._cut_at_stop(part, finished) if self._num_unstoppable_tokens <= 0 else part)
            elif part:
                shown += [self._withheld, part]
                self._withheld, self._stop_state = "", 0
            if self.stopped:
                break
        return "".join(shown)

    def _cut_at_stop(self, piece: str, finished: bool) -> str:
        """Return the part that may be shown of the withheld text and the piece.

        The part ends before the first stop string, or before a suffix that could begin a stop string.
        """
        found: list[tuple[int, int]] = []  # where stop strings begin and end
        for end, char in enumerate(piece, start=len(self._withheld) + 1):
            self._stop_state = self._stop.follow(self._stop_state, char)
            if length := self._stop.num_found(self._stop_state):
                found.append((end - length, end))
        text = self._withheld + piece
        if found:
            self.stop_string = text[slice(*min(found))]
        end = min(found)[self._include_stop] if found else len(text)
        if not (found or finished):
            end -= self._stop.num_begun(self._stop_state)
        self._withheld = text[end:]
        return text[:end]


class TextReceiver(Receiver, TextSource):
    """Decodes when the text is read, in the reader's thread, and at the end.

    So the engine's steps do not wait for the text, and the text of a caller who wants only the whole answer is decoded
    once. Only a request with stop strings, which may end at any token, decodes each token on arrival.
    """

    def __init__(
        self,
        outbox: Outbox,
        detokenizer: Detokenizer,
        with_tokens: bool = False,
        text_of: TextOf = lambda token_id: None,
    ) -> None:
        super().__init__(outbox, with_tokens, text_of)
        self.detokenizer = detokenizer
        self._decodes_each = detokenizer.has_stop_strings
        self._new_token_ids: deque[int] = deque()  # not decoded yet; the engine's thread may append without the lock
        self._lock = (
            threading.Lock()
        )  # guards the detokenizer and the fields below, which the reader's thread uses, too
        self._piece = ""  # decoded, but not read yet
        self._failure: Ending | None = None
        self._is_whole = False  # nothing is held back for later tokens
        self._is_delivered = True

    def read(self, seq: Sequence, logprobs: PositionLogprobs | None = None) -> Ending | None:
        """Take the new token. The request ends at a stop string, or if its text cannot be decoded."""
        self._is_delivered = False
        if logprobs is not None:
            super().read(seq, logprobs)
        finished = seq.finish_reason is not None
        if not finished and not self._decodes_each:
            self._new_token_ids.append(seq.token_ids[-1])
        else:
            with self._lock:  # a reader must not take an end token for text
                if seq.error is None:
                    self._new_token_ids.append(seq.token_ids[-1])
                self._decode(finished, at_end_token=finished and seq.error is None and seq.has_end_token)
            if self.detokenizer.stopped:
                seq.stop_reason = self.detokenizer.stop_string if self._failure is None else None
                return self._failure or Ending("stop")
        return self._failure

    def deliver(self, seq: Sequence) -> None:
        if not self._is_delivered or (seq.finish_reason is not None and not self._is_whole):
            self._is_delivered = True
            self.outbox.content.text_sources[seq.seq_id] = self
        super().deliver(seq)

    def read_text(self) -> str:
        with self._lock:
            self._decode()
            piece, self._piece = self._piece, ""
        return piece

    def whole_text(self) -> str:
        # The caller holds the engine's lock. A reader that holds `_lock` may wait for the engine's lock, because a
        # garbage collection in the reader's thread may close an abandoned stream
        if self._lock.acquire(timeout=READER_TIMEOUT_S):
            try:
                self._decode(finished=True)  # after an abort, the text that was held back ends the answer
            finally:
                self._lock.release()
        return self.detokenizer.text

    def _decode(self, finished: bool = False, at_end_token: bool = False) -> None:
        """Decode the new tokens. If decoding fails, the request ends with an error when its next token arrives."""
        token_ids = [self._new_token_ids.popleft() for _ in range(len(self._new_token_ids))]
        if (token_ids or finished) and not self._is_whole and self._failure is None:
            self._is_whole = finished
            try:
                self._piece += self.detokenizer.update(token_ids, finished, at_end_token)
            except Exception as raised:
                self._failure = Ending("error", f"its text could not be decoded: {type(raised).__name__}: {raised}")


# -- the bytes of tokens -----------------------------------------------------------------------------------------------


_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"
_RUN_TOKENS = 64
_MIN_CHECKED = 1000  # tokens that are checked; the tokens of a small vocabulary repeat


def read_token_bytes(tokenizer: Any, num_ids: int) -> list[bytes]:
    """Return the bytes of the tokens 0 to num_ids - 1, including special tokens. A token without text has no bytes.

    Takes 0.3 s for 151,936 tokens. Raises ValueError, which names the token, if the bytes cannot be found.
    """
    decoder = TokenDecoder(tokenizer, skip_special_tokens=False)
    before, before_text = decoder.anchor
    num_known = min(num_ids, 1 + max(tokenizer.get_vocab().values(), default=-1))
    found: list[bytes] = []
    for token_id, text in enumerate(decoder.decode_batch([[*before, token_id] for token_id in range(num_known)])):
        if not text.startswith(before_text):
            raise ValueError(f"token {token_id} ({_name(tokenizer, token_id)!r}) changes the text before it")
        added = text[len(before_text) :]
        found.append(added.encode() if REPLACEMENT not in added else _broken_bytes(tokenizer, token_id, added))
    _check_in_any_order(decoder, found)
    return found + [b""] * (num_ids - num_known)


def _name(tokenizer: Any, token_id: int) -> str:
    name: str = tokenizer.convert_ids_to_tokens(token_id)
    return name


def _broken_bytes(tokenizer: Any, token_id: int, text: str) -> bytes:
    """Return the bytes of a token with parts of characters or with U+FFFD itself. text: the token's decoded text."""
    name = _name(tokenizer, token_id)
    candidates = [name.encode(), name.replace(_SENTENCEPIECE_SPACE, " ").encode()]
    if match := _BYTE_TOKEN.fullmatch(name):
        candidates.append(bytes.fromhex(match[1]))
    if all(char in BYTES_OF_LETTERS for char in name):
        candidates.append(bytes(BYTES_OF_LETTERS[char] for char in name))
    for candidate in candidates:
        if candidate.decode(errors="replace") == text:
            return candidate
    raise ValueError(f"token {token_id} ({name!r}) is decoded to {text!r}, which does not tell its bytes")


def _check_in_any_order(decoder: TokenDecoder, token_bytes: list[bytes]) -> None:
    """Raise ValueError if tokens in random order are not decoded to their joined bytes.

    Tokens that are parts of characters are left out, because decoders replace incomplete characters differently.
    """
    before, before_text = decoder.anchor
    whole = [token_id for token_id, each in enumerate(token_bytes) if REPLACEMENT not in each.decode(errors="replace")]
    whole *= ceil_div(_MIN_CHECKED, max(1, len(whole)))
    random.Random(0).shuffle(whole)
    runs = [whole[start : start + _RUN_TOKENS] for start in range(0, len(whole), _RUN_TOKENS)]
    for run, text in zip(runs, decoder.decode_batch([[*before, *run] for run in runs]), strict=True):
        expected = before_text + b"".join(token_bytes[token_id] for token_id in run).decode()
        if text != expected:
            place = next((i for i, pair in enumerate(zip(text, expected, strict=False)) if pair[0] != pair[1]), 0)
            raise ValueError(
                f"the text of a token depends on the tokens around it: {text[place : place + 20]!r} was decoded where "
                f"the tokens alone give {expected[place : place + 20]!r}"
            )


def _letters() -> dict[str, int]:
    """Return the byte of each letter with which byte-level tokenizers, such as GPT-2's, write bytes.

    Printable characters of Latin-1 stand for themselves; the characters from U+0100 on stand for the other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES_OF_LETTERS = _letters()
