"""The bytes that each token adds to a text, read from what the tokenizer decodes.

Grammars and bad words work on these bytes. The bytes are not derived from the kind of the tokenizer: each token is
decoded after another token, and as a check all tokens are decoded in random order.
"""

import random
import re
from typing import Any

from nanovllm.text.detokenizer import REPLACEMENT, TokenDecoder
from nanovllm.utils.arithmetic import ceil_div

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
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
    candidates = [name.encode()]
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
