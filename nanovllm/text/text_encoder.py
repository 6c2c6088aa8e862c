"""TextEncoder: text to token ids. It encodes a long text in pieces, and keeps those for the next text that has them.

The second question about a document finds the document's KV in the prefix cache, but tokenizing 131,072 tokens again
would take 0.4 s. A long text is cut where its parts encode to the same tokens as the whole (`find_cuts`). A piece ends
at the first cut after PIECE_CHARS characters. So two texts have the same pieces up to shortly before they differ.
"""

import hashlib
import json
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from nanovllm.core.sequence import TokenIds

# Where a text may be cut. Tokenizers in the style of GPT-2 split a text into words with a regular expression, and each
# word has its own tokens. A cut is allowed where, whatever the text around it, one word ends and another begins, and
# where no word before it would end differently if the text ended there:
# - before a space, unless white space precedes it. In all patterns below, a space either starts a word or belongs to a
#   word that consists of white space.
# - before a full stop or comma of Chinese or Japanese that follows a letter of theirs.
# - in GPT-2's pattern, before a line feed that follows no white space; in the others, where a line feed may belong to
#   the punctuation before it, after the last line feed. o200k lets slashes follow there, too.
# The patterns are known ones because each needs this proof: one with `\b` or a look behind would depend on what is
# before the cut. NFC changes nothing across these cuts: space and line feed combine with nothing, and the punctuation
# with nothing before it.
_ANY_CUT = r"(?<=\S)(?= )|(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])(?=[\u3001\u3002\uff0c])"
# Python's white space includes that of the tokenizers' regular expressions, so \S is safe in both
_GPT2_CUT = re.compile(_ANY_CUT + r"|(?<=\S)(?=\n)")
_CUT = re.compile(_ANY_CUT + r"|(?<=\n)(?=[^\s/])")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_O200K_UPPER, _O200K_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "Qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END,
    "Qwen3.5": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _END,
    "Llama 3": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END,
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}*{_O200K_LOWER}+{_CONTRACTIONS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}+{_O200K_LOWER}*{_CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
    ),
}


def find_cuts(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern that matches, with no characters, where texts may be cut; None for an unknown tokenizer."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    if any(
        getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name)
        for name in ("encode", "_encode_plus")
    ):
        return None
    backend = tokenizer.backend_tokenizer
    is_known = (
        _has_only_plain_tokens(backend)
        and _state(backend.normalizer).get("type") in (None, "NFC")
        and type(backend.model).__name__ == "BPE"
        and not backend.model.dropout
        and _adds_only_special_tokens(_state(backend.post_processor))
    )
    return _cuts_of(_state(backend.pre_tokenizer)) if is_known else None


def _state(component: Any) -> dict[str, Any]:
    """Return a part of a tokenizer as tokenizer.json describes it; empty if there is none."""
    return json.loads(component.__getstate__()) if component is not None else {}


def _has_only_plain_tokens(backend: Any) -> bool:
    """Return True if no added token contains a cut or takes the white space around it.

    Added tokens are found in a text before it is split into words.
    """
    return not any(
        token.lstrip or token.rstrip or token.single_word or re.search(r"[\s\u3001\u3002\uff0c]", token.content)
        for token in backend.get_added_tokens_decoder().values()
    )


def _adds_only_special_tokens(processor: dict[str, Any]) -> bool:
    if processor.get("type") == "Sequence":
        return all(map(_adds_only_special_tokens, processor["processors"]))
    return processor.get("type") in (None, "ByteLevel", "TemplateProcessing")


def _cuts_of(pre_tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    *splits, last = steps
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if not splits:
        return _GPT2_CUT if last["use_regex"] else None
    split = splits[0]
    is_known = (
        len(splits) == 1
        and not last["use_regex"]
        and split["type"] == "Split"
        and (split["behavior"], split["invert"]) == ("Isolated", False)
        and split["pattern"].get("Regex") in PATTERNS.values()
    )
    return _CUT if is_known else None


MIN_CHARS = 20_000  # shorter texts are not cut; they take less than 10 ms to tokenize
PIECE_CHARS = 2_000
MAX_BYTES = 64 * 2**20  # of the pieces in the cache, about 20 million characters
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
        """Return the tokens of a text. Raises what the tokenizer raises for lone surrogates."""
        if len(text) < self._min_chars or self._around is None or not self._encodes_whole_texts():
            return array("q", self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        first, last = self._around if add_special_tokens else ([], [])
        token_ids = array("q", first)
        for piece_ids in self._encode_pieces(text, cache_salt):
            token_ids.extend(piece_ids)
        token_ids.extend(last)
        return token_ids

    def _encodes_whole_texts(self) -> bool:
        """Return True if the backend neither truncates nor pads. Calling the tokenizer with options can change that."""
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
        """Encode on all cores and without the GIL. "fast" leaves out only the offsets."""
        encodings: list[Any] = self.tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return encodings

    def _cut(self, text: str) -> Iterator[str]:
        """Yield the pieces of a text, and then the rest after the last cut."""
        assert self._cuts is not None, "checked by `encode`"
        start = 0
        while cut := self._cuts.search(text, start + self._piece_chars):
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def _keep(self, salt: bytes, piece: str, token_ids: TokenIds) -> None:
        """Keep a piece as the most recently used one, and drop the least recently used ones if there is no room."""
        if (salt, piece) not in self._pieces:
            self._pieces[salt, piece] = token_ids
            self.num_bytes += _num_bytes(piece, token_ids)
        self._pieces.move_to_end((salt, piece))
        while self.num_bytes > self._max_bytes:
            (_, oldest), its_token_ids = self._pieces.popitem(last=False)
            self.num_bytes -= _num_bytes(oldest, its_token_ids)


def _digest(cache_salt: str | None) -> bytes:
    """Shorten a salt, which is kept with every piece. No salt gives no bytes."""
    if cache_salt is None:
        return b""
    return hashlib.blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=16).digest()


def _num_bytes(piece: str, token_ids: TokenIds) -> int:
    return _ENTRY_BYTES + sys.getsizeof(piece) + len(token_ids) * token_ids.itemsize


def _special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """Return the tokens that the tokenizer adds around a text; None if it also changes those between them."""
    sample = "a"
    plain = tokenizer.encode(sample, add_special_tokens=False)
    whole = tokenizer.encode(sample, add_special_tokens=True)
    for i in range(len(whole) - len(plain) + 1):
        if whole[i : i + len(plain)] == plain:
            return whole[:i], whole[i + len(plain) :]
    return None
