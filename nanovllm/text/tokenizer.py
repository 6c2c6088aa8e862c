"""The tokenizer of a model: its files, and TextEncoder, which encodes long texts in pieces."""

import hashlib
import json
import re
import reprlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.files import TOKENIZER_FILES, VOCABULARY_FILES, has_tokenizer, read_json
from nanovllm.checkpoint.gguf import is_gguf, read_model
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.errors import CheckpointError
from nanovllm.plan.sequence import TokenIds
from nanovllm.text.detokenizer import BYTES_OF_LETTERS
from nanovllm.text.gguf_tokenizer import make_tokenizer
from nanovllm.text.split_patterns import PATTERNS

# Where a text may be cut. Tokenizers in the style of GPT-2 split a text into words with a regular expression, and
# tokenize each word separately. A cut is allowed at a position between two words, if it is between two words in every
# surrounding text, and if no word before the cut would end differently if the text ended at the cut:
# - before a space, unless white space precedes it. In all patterns below, a space either starts a word or belongs to a
#   word that consists of white space.
# - before a full stop or comma of Chinese or Japanese that follows a Chinese or Japanese letter.
# - in GPT-2's pattern, before a line feed that follows no white space; in the other patterns, where a line feed may
#   belong to the punctuation before it, after the last line feed. In o200k, slashes may follow the line feed.
# Texts are cut only for known patterns, because each pattern needs this proof: a pattern with `\b` or a look-behind
# would depend on the text before the cut. NFC changes nothing across these cuts: space and line feed combine with
# nothing, and the punctuation combines with nothing before it.
_ANY_CUT = r"(?<=\S)(?= )|(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])(?=[\u3001\u3002\uff0c])"
# Python's white space includes the white space of the tokenizers' regular expressions, so \S is safe in both patterns
_GPT2_CUT = re.compile(_ANY_CUT + r"|(?<=\S)(?=\n)")
_CUT = re.compile(_ANY_CUT + r"|(?<=\n)(?=[^\s/])")


def find_cuts(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern with empty matches at the positions of allowed cuts, or None for an unknown tokenizer."""
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
    """Return tokenizer.json's description of a part of a tokenizer, or {} if the tokenizer lacks the part."""
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


MIN_CHARS = 20_000  # shorter texts are not cut, because tokenizing them takes less than 10 ms
PIECE_CHARS = 2_000
MAX_BYTES = 64 * 2**20  # limit of the cached pieces, about 20 million characters
_ENTRY_BYTES = 300  # the objects around a piece


class TextEncoder:
    """Encodes texts as `tokenizer.encode` does. One thread at a time may use it.

    The second question about a document finds the document's KV in the prefix cache, but tokenizing 131,072 tokens
    again would take 0.4 s. So a long text is encoded in pieces, and the tokens of the pieces are cached. The text is
    cut at positions where the pieces encode to the same tokens as the whole text (`find_cuts`). A piece ends at the
    first cut after PIECE_CHARS characters, so two texts have the same pieces up to shortly before their first
    difference.

    As with KV, only texts with equal cache salts share pieces. Otherwise the time of a request would reveal the texts
    of other clients.
    """

    def __init__(self, tokenizer: Any, *, min_chars: int = MIN_CHARS, piece_chars: int = PIECE_CHARS,
                 max_bytes: int = MAX_BYTES) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self._min_chars, self._piece_chars, self._max_bytes = min_chars, piece_chars, max_bytes
        self._cuts = find_cuts(tokenizer)
        self._around = _special_tokens_around(tokenizer) if self._cuts is not None else None
        self._pieces: OrderedDict[tuple[bytes, str], TokenIds] = OrderedDict()  # most recently used last
        self.num_bytes = 0  # the approximate size of `_pieces`

    def encode(self, text: str, *, add_special_tokens: bool = True, cache_salt: str | None = None) -> TokenIds:
        """Return the tokens of a text. Raises the tokenizer's error for lone surrogates."""
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
        """Cache a piece as the most recently used one, and drop the least recently used pieces if there is no room."""
        if (salt, piece) not in self._pieces:
            self._pieces[salt, piece] = token_ids
            self.num_bytes += _num_bytes(piece, token_ids)
        self._pieces.move_to_end((salt, piece))
        while self.num_bytes > self._max_bytes:
            (_, oldest), its_token_ids = self._pieces.popitem(last=False)
            self.num_bytes -= _num_bytes(oldest, its_token_ids)


def _digest(cache_salt: str | None) -> bytes:
    """Return a digest of a salt, to be stored with every piece, or no bytes without a salt."""
    if cache_salt is None:
        return b""
    return hashlib.blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=16).digest()


def _num_bytes(piece: str, token_ids: TokenIds) -> int:
    return _ENTRY_BYTES + sys.getsizeof(piece) + len(token_ids) * token_ids.itemsize


def _special_tokens_around(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """Return the tokens that the tokenizer adds around a text, or None if it also changes the text's tokens."""
    sample = "a"
    plain = tokenizer.encode(sample, add_special_tokens=False)
    whole = tokenizer.encode(sample, add_special_tokens=True)
    for i in range(len(whole) - len(plain) + 1):
        if whole[i : i + len(plain)] == plain:
            return whole[:i], whole[i + len(plain) :]
    return None


def load_tokenizer(directory: Path | None) -> Any:
    """Load the tokenizer of a directory or a GGUF file, or return None for a preset and if there is no tokenizer.

    If there is a tokenizer.json, texts are encoded and decoded as described in this file. Raises CheckpointError, which
    names the file, if the tokenizer cannot be read. Never runs code from the checkpoint.
    """
    if directory is None or not has_tokenizer(directory):
        return None
    if is_gguf(directory):
        return make_tokenizer(read_model(directory))
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not any(file.name in VOCABULARY_FILES for file in files):
        raise CheckpointError(
            f"the tokenizer in {directory} has no vocabulary, only {', '.join(file.name for file in files)}; add "
            f"{' or '.join(VOCABULARY_FILES)} of the same model"
        )
    try:
        config = _plain_config(directory)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, config=config)
        except Exception:  # for example, the class needs a vocabulary in another form than the file's
            if not (directory / "tokenizer.json").is_file():
                raise
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
        tokenizer = _as_the_file_says(tokenizer, directory)
        _drop_ignored_clean_up(tokenizer)
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises the errors of its parsers, which do not name the file
        for file in files:
            if file.suffix == ".json":
                read_json(file)
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be read ({type(error).__name__}: {error}); check tokenizer_class in "
            f"its configs, or download its files again: {', '.join(file.name for file in files)}"
        ) from error
    _check_token_ids(tokenizer, directory)
    return tokenizer


def _check_token_ids(tokenizer: Any, directory: Path) -> None:
    """Raise CheckpointError if a token's id differs from the id in a file, or if the vocabulary is empty.

    transformers gives added tokens new ids if their ids do not continue the vocabulary, and a class that does not
    belong to vocab.json may make a tokenizer with an empty vocabulary.
    """
    known = tokenizer.get_vocab()
    for name, tokens in _named_tokens(directory):
        for token, token_id in tokens.items():
            if known.get(token) != token_id:
                found = f"gives it {known[token]}" if token in known else "does not have this token"
                raise CheckpointError(
                    f"{directory / name} gives token {token!r} the id {reprlib.repr(token_id)}, but the tokenizer that "
                    f"transformers makes of the files there {found}; correct the file, or tokenizer_class in "
                    "tokenizer_config.json"
                )
    if not known.keys() - tokenizer.get_added_vocab().keys():
        raise CheckpointError(
            f"the tokenizer in {directory} has no tokens except its {len(known)} added tokens; download its files "
            "again, or correct tokenizer_class in tokenizer_config.json"
        )


def _named_tokens(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the ids of tokens that the files other than tokenizer.json give, with each file's name."""
    for name in ("vocab.json", "added_tokens.json"):
        if (directory / name).is_file() and not (name == "vocab.json" and (directory / "tokenizer.json").is_file()):
            yield name, read_json(directory / name)
    name = "tokenizer_config.json"
    settings = read_json(directory / name) if (directory / name).is_file() else {}
    added = settings.get("added_tokens_decoder") or {}
    yield name, {entry["content"]: int(token_id) for token_id, entry in added.items()}


def _plain_config(directory: Path) -> Any:
    """Return a config of the model's type with transformers' default sizes, or None for a type unknown to transformers.

    AutoTokenizer chooses the tokenizer's class by the config. transformers would check the sizes of the file's config
    by other rules than this engine, and its errors would look like errors of the tokenizer's files.
    """
    from transformers import CONFIG_MAPPING

    path = directory / "config.json"
    content = read_json(path) if path.is_file() else {}
    if content.get("model_type") not in CONFIG_MAPPING:
        return None
    config = CONFIG_MAPPING[content["model_type"]]()
    config._name_or_path = str(directory)
    for name in ("tokenizer_class", "model_name"):
        if content.get(name) is not None:
            setattr(config, name, content[name])
    return config


def _drop_ignored_clean_up(tokenizer: Any) -> None:
    """Drop a setting that transformers ignores for BPE, but warns of at the first decoding."""
    is_kept = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if type(model).__name__ == "BPE" and not is_kept:
        tokenizer.clean_up_tokenization_spaces = False


def _as_the_file_says(tokenizer: Any, directory: Path) -> Any:
    """Return a tokenizer that works as described in tokenizer.json, or `tokenizer` without this file.

    transformers rebuilds many tokenizers from `tokenizer_class` and `model_type`, and takes only the vocabulary from
    the file. If these names are wrong, such as LlamaTokenizerFast for a byte-level tokenizer, texts lose their spaces
    or are split at other positions. transformers corrects some wrong names by the name of the model's repository, which
    a directory does not have. The special tokens, the chat template, and the tokens around a text always come from
    transformers. Raises CheckpointError if transformers also changes the tokenizer that it reads from the file.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if not (directory / "tokenizer.json").is_file():
        return tokenizer
    file = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or _differences(tokenizer.backend_tokenizer, file):
        by_class = tokenizer
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
        known = file.get_vocab()
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            if getattr(tokenizer, name) is None and getattr(by_class, name) in known:
                setattr(tokenizer, name, getattr(by_class, name))
        if different := _differences(tokenizer.backend_tokenizer, file):
            raise CheckpointError(
                f"transformers reads another {different[0]} from the files in {directory} than tokenizer.json has; "
                "correct tokenizer_config.json"
            )
    _decode_by_token(tokenizer.backend_tokenizer)
    return tokenizer


_MODEL_OPTIONS = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges", "max_input_chars_per_word",
)  # fmt: skip


def _differences(backend: Any, file: Any) -> list[str]:
    """Return the parts, except the post-processor, in which a tokenizer differs from the tokenizer in the file."""
    different = [
        name
        for name in ("normalizer", "pre_tokenizer", "decoder")
        if _state(getattr(backend, name)) != _state(getattr(file, name))
    ]
    options = [
        (type(each.model), *(getattr(each.model, name, None) or None for name in _MODEL_OPTIONS))
        for each in (backend, file)
    ]
    if options[0] != options[1]:
        different.append("model")
    if not file.get_vocab().items() <= backend.get_vocab().items():
        different.append("vocabulary")
    return different


def _decode_by_token(backend: Any) -> None:
    """Let a byte-level tokenizer decode each token separately.

    Tokenizers that transformers exports from GGUF files join the tokens first. Then a single token with a character
    that stands for no byte, such as an added token with a full-width bar, would leave the whole text undecoded.
    """
    from tokenizers import decoders

    kinds = [part["type"] for part in _state(backend.decoder).get("decoders", ())]
    if kinds[-1:] == ["ByteLevel"] and "Fuse" in kinds and {*kinds[:-1]} <= {"ByteFallback", "Fuse", "Replace"}:
        plain = backend.get_vocab(with_added_tokens=False)
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        if all(char in BYTES_OF_LETTERS for token in plain if token not in added for char in token):
            backend.decoder = decoders.ByteLevel()


# Added tokens that end an answer in a tokenizer that has all of one line
END_TOKENS = (
    ("<|return|>", "<|call|>"),  # gpt-oss: after the answer, after a call
    ("<turn|>", "<|tool_response>"),  # Gemma 4: after the answer, after calls
)


def end_token_ids(model_config: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: the end tokens in the model's configs, the tokenizer's eos token, and the
    end tokens of a known chat format.

    The configs of some chat models name only the base model's end token, and a GGUF file names one. vLLM uses the
    tokenizer's eos token, too.
    """
    added = {} if tokenizer is None else tokenizer.get_added_vocab()
    of_format = [added[end] for ends in END_TOKENS if added.keys() >= {*ends} for end in ends]
    of_tokenizer = getattr(tokenizer, "eos_token_id", None)
    found = [each for each in (of_tokenizer, *of_format) if each is not None and each < model_config.vocab_size]
    return tuple(dict.fromkeys((*model_config.eos_token_ids, *found)))
