"""The demo's tokenizer: one token per byte of UTF-8, whose id is the byte's value, and two special tokens."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_BYTES = 256
END_TOKEN = "<|endoftext|>"
SPECIAL_TOKENS = (END_TOKEN, "<|pad|>")  # ids 256, 257
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
END_TOKEN_ID = NUM_BYTES

# A model that only copies needs its own template. If the last characters of a message occurred in an earlier line, the
# answer follows the message directly: it is the rest of that line. Any other message is followed by REPLY_MARK, which
# the model continues with HELP, because every prompt begins with the two. Every line ends with the end token, so an
# answer ends with its line.
MATCH_TOKENS = 6  # tokens that the model looks up
REPLY_MARK = "\nModel: "
HELP = "I complete lines; type the first words of one from above."
_CONSTANTS = {"mark": REPLY_MARK, "help": HELP, "end": END_TOKEN, "num_matched": MATCH_TOKENS}
CHAT_TEMPLATE = (
    "".join(f"{{%- set {name} = {value!r} -%}}\n" for name, value in _CONSTANTS.items())
    + """\
{%- set ns = namespace(text=mark ~ help ~ end) -%}
{%- for message in messages -%}
{%- set content = message['content'] | replace('\\n', end ~ '\\n') -%}
{%- if message['role'] == 'user' -%}
{%- set before = ns.text ~ '\\n' ~ content[:-1] -%}
{%- set ending = content[-num_matched:] -%}
{%- set is_known = ending | length == num_matched and ending in before and ending ~ end not in before -%}
{%- set ns.text = ns.text ~ '\\n' ~ content ~ ('' if is_known else end ~ mark) -%}
{%- elif message['role'] == 'system' -%}
{%- set ns.text = ns.text ~ '\\n' ~ content ~ end -%}
{%- else -%}
{%- set ns.text = ns.text ~ content ~ end -%}
{%- endif -%}
{%- endfor -%}
{{- ns.text -}}
"""
)


def byte_symbols() -> list[str]:
    """The character that represents each byte in a byte-level vocabulary, in the order of the bytes.

    A printable Latin-1 character represents itself, and the n-th of the other bytes is character 256 + n. This is
    GPT-2's table, which the ByteLevel parts of `tokenizers` use.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return [chr(byte) if byte in printable else chr(NUM_BYTES + others.index(byte)) for byte in range(NUM_BYTES)]


def save_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json in the form that `transformers.AutoTokenizer` reads."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))  # no merges, so every byte is a token
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
