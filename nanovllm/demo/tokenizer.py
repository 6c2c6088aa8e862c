"""The demo's tokenizer: one token per byte of UTF-8, so a token's id is the byte's value, and two special tokens."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_BYTES = 256
END_TOKEN = "<|endoftext|>"
SPECIAL_TOKENS = (END_TOKEN, "<|pad|>")  # ids 256, 257
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
END_TOKEN_ID = NUM_BYTES

# The messages' text and nothing else: the model continues the last message, so role marks would only hide its lead-in.
CHAT_TEMPLATE = "{{ messages | map(attribute='content') | join('\\n') }}"


def byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary, in the order of the bytes.

    A printable Latin-1 character stands for itself, the n-th of the others is character 256 + n: GPT-2's table, which
    the ByteLevel parts of `tokenizers` apply.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return [chr(byte) if byte in printable else chr(NUM_BYTES + others.index(byte)) for byte in range(NUM_BYTES)]


def save_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as `transformers.AutoTokenizer` reads them."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))  # no merges: bytes stay apart
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": SPECIAL_TOKENS[1],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
