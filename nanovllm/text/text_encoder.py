"""TextEncoder: text to token ids. It encodes a long text in pieces, and keeps those for the next text that has them.

The second question about a document finds the document's KV in the prefix cache, but tokenizing 131,072 tokens again
would take 0.4 s. A long text is cut where its parts encode to the same tokens as the whole (text_cuts.py). A piece ends
at the first cut after PIECE_CHARS characters. So two texts have the same pieces up to shortly before they differ.
"""

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from nanovllm.core.sequence import TokenIds
from nanovllm.text.text_cuts import find_cuts

MIN_CHARS = 20_000  # of a text that is cut; the tokens of a shorter one take less than 10 ms
PIECE_CHARS = 2_000
MAX_BYTES = 64 * 2**20  # of the pieces that are kept, about 20 million characters
_ENTRY_BYTES = 300  # the objects around a piece


class TextEncoder:
    """Encodes texts as `tokenizer.encode` does. One thread at a time may use it.

    Only texts with equal cache salts share pieces, as with KV. Otherwise the time that a request takes would tell what
    others have asked.
    """

    def __init__(self, tokenizer: Any, *, min_chars: int = MIN_CHARS, piece_chars: int = PIECE_CHARS,
                 max_bytes: int = MAX_BYTES) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self._min_chars, self._piece_chars, self._max_bytes = min_chars, piece_chars, max_bytes
        self._cuts = find_cuts(tokenizer)
        self._around = _special_tokens_around(tokenizer) if self._cuts is not None else None
        self._pieces: OrderedDict[tuple[bytes, str], TokenIds] = OrderedDict()  # the last used ones are last
        self.num_bytes = 0  # of `_pieces`, about

    def encode(self, text: str, *, add_special_tokens: bool = True, cache_salt: str | None = None) -> TokenIds:
        """The tokens of a text. Raises what the tokenizer raises for lone surrogates."""
        if len(text) < self._min_chars or self._around is None or not self._encodes_whole_texts():
            return array("q", self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        first, last = self._around if add_special_tokens else ([], [])
        token_ids = array("q", first)
        for piece_ids in self._encode_pieces(text, cache_salt):
            token_ids.extend(piece_ids)
        token_ids.extend(last)
        return token_ids

    def _encodes_whole_texts(self) -> bool:
        """Whether the backend neither cuts nor pads. A call of the tokenizer with other options may leave it so."""
        backend = self.tokenizer.backend_tokenizer
        splits_special_tokens: bool = self.tokenizer.split_special_tokens
        is_set = backend.truncation is not None or backend.padding is not None
        return not is_set and backend.encode_special_tokens == splits_special_tokens

    def _encode_pieces(self, text: str, cache_salt: str | None) -> list[TokenIds]:
        *pieces, rest = self._cut(text)
        salt = _digest(cache_salt)
        known = {piece: self._pieces[salt, piece] for piece in pieces if (salt, piece) in self._pieces}
        to_encode = [*dict.fromkeys(piece for piece in pieces if piece not in known), rest]
        encodings = self._encode_batch(to_encode)
        encoded = known | {piece: array("q", each.ids) for piece, each in zip(to_encode, encodings, strict=True)}
        for piece in pieces:
            self._keep(salt, piece, encoded[piece])
        return [encoded[piece] for piece in (*pieces, rest)]

    def _encode_batch(self, texts: list[str]) -> list[Any]:
        """The backend encodes a batch on all cores and without the GIL. "fast" leaves out only the offsets."""
        encodings: list[Any] = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return encodings

    def _cut(self, text: str) -> Iterator[str]:
        """The pieces of a text, and what is left after the last of them."""
        assert self._cuts is not None, "checked by `encode`"
        start = 0
        while cut := self._cuts.search(text, start + self._piece_chars):
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def _keep(self, salt: bytes, piece: str, token_ids: TokenIds) -> None:
        """Keep a piece, as the one used last, in place of those that have not been used for longest."""
        if (salt, piece) not in self._pieces:
            self._pieces[salt, piece] = token_ids
            self.num_bytes += _num_bytes(piece, token_ids)
        self._pieces.move_to_end((salt, piece))
        while self.num_bytes > self._max_bytes:
            (_, oldest), its_token_ids = self._pieces.popitem(last=False)
            self.num_bytes -= _num_bytes(oldest, its_token_ids)


def _digest(cache_salt: str | None) -> bytes:
    """A salt may be long, and is kept with every piece. No salt gives no bytes."""
    if cache_salt is None:
        return b""
    return hashlib.blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=16).digest()


def _num_bytes(piece: str, token_ids: TokenIds) -> int:
    return _ENTRY_BYTES + sys.getsizeof(piece) + len(token_ids) * token_ids.itemsize


def _special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """The tokens that the tokenizer adds before and after a text. None if it changes the tokens between them."""
    sample = "a"
    plain = tokenizer.encode(sample, add_special_tokens=False)
    whole = tokenizer.encode(sample, add_special_tokens=True)
    for i in range(len(whole) - len(plain) + 1):
        if whole[i : i + len(plain)] == plain:
            return whole[:i], whole[i + len(plain) :]
    return None
