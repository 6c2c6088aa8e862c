"""Makes a transformers tokenizer of the vocabulary in a GGUF file.

A file has the tokens, their kinds, and merges (byte-level BPE, `tokenizer.ggml.model` "gpt2"), scores (SentencePiece,
"llama") or both (SentencePiece, "gemma4"). How a text is split before the merges is not in the file, only the name of a
rule (`tokenizer.ggml.pre`), so the rules are listed here, as the tokenizer.json of the models that use them has them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nanovllm.checkpoint.gguf import GGUFModel
from nanovllm.checkpoint.gguf_config import NORMAL_TOKEN
from nanovllm.errors import CheckpointError
from nanovllm.text.split_patterns import PATTERNS

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # kinds in tokenizer.ggml.token_type
_SPACE = "\u2581"  # how SentencePiece writes a space
_RULES = {  # tokenizer.ggml.pre -> the pattern of split_patterns.py
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "Llama 3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "Qwen2"),
    "qwen35": "Qwen3.5",
    "tekken": "Tekken",
    "gpt-4o": "o200k",
    **dict.fromkeys(("smollm", "gpt-2"), "GPT-2"),
}
_COMPOSED = ("Qwen2", "Qwen3.5")  # patterns of tokenizers that compose characters (NFC) first
_BEGIN_WITH_BOS = ("Llama 3", "Tekken")  # patterns of tokenizers that add bos if a file lacks add_bos_token
# Patterns of tokenizers that do not merge a word that is a token (ignore_merges)
_WHOLE_WORDS = ("Llama 3", "Tekken", "o200k")


def make_tokenizer(model: GGUFModel) -> Any:
    """Return a PreTrainedTokenizerFast. Raises CheckpointError, which names the entry, if the vocabulary is damaged or
    of a kind that is not supported.
    """
    from transformers import PreTrainedTokenizerFast

    vocabulary = _Vocabulary(model)
    kind = model.metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}
    if not isinstance(kind, str) or kind not in makers:
        raise vocabulary.refusal("model", f"supported are {', '.join(makers)}")
    try:
        backend = makers[kind](vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises plain Exceptions
        raise CheckpointError(f"the vocabulary in {model.path} cannot be used ({error}); download it again") from error
    backend.add_tokens(vocabulary.added(special=False))
    backend.add_special_tokens(vocabulary.added(special=True))
    backend.post_processor = vocabulary.post_processor()
    special = {f"{name}_token": text for name, text in vocabulary.named().items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    template = model.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise CheckpointError(f"{model.path} has tokenizer.chat_template={template!r}, not a text; download it again")
    tokenizer.chat_template = template
    return tokenizer


class _Vocabulary:
    """The entries of a file that describe its tokenizer."""

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        self.tokens: Sequence[str] = self._texts("tokens")
        has_kinds = self.get("token_type") is not None
        self.kinds: Sequence[float] = self._numbers("token_type") if has_kinds else [NORMAL_TOKEN] * len(self.tokens)

    def get(self, name: str, default: Any = None) -> Any:
        return self._model.metadata.get(f"tokenizer.ggml.{name}", default)

    def refusal(self, name: str, remedy: str, *, shows: bool = True) -> CheckpointError:
        given = f"={self.get(name)!r}" if shows else ""
        return CheckpointError(
            f"{self._model.path} has tokenizer.ggml.{name}{given}, which is not supported: {remedy}; use another file "
            "of this model, or skip_tokenizer_init=True to work on token ids alone"
        )

    def _texts(self, name: str) -> list[str]:
        texts = self.get(name)
        if not isinstance(texts, list) or not texts:
            raise self.refusal(name, "it must be a list of texts", shows=False)
        return texts

    def _numbers(self, name: str) -> list[float]:
        numbers = self.get(name)
        if not isinstance(numbers, np.ndarray) or len(numbers) != len(self.tokens):
            raise self.refusal(name, f"there must be one for each of {len(self.tokens)} tokens", shows=False)
        return list(numbers.tolist())

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "it must be true or false")
        return value

    def ids(self) -> dict[str, int]:
        """Return the id of each token, without the entries that only fill up the vocabulary."""
        ids, named = dict[str, int](), self.named().values()
        for token_id, (text, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind != _UNUSED or text in named:
                ids.setdefault(text, token_id)
        return ids

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges of byte-level BPE. A space separates the two parts, which have no spaces themselves."""
        pairs = [tuple(text.split(" ")) for text in self._texts("merges")]
        if any(len(pair) != 2 for pair in pairs):
            raise self.refusal("merges", "each must be two parts with a space between", shows=False)
        return pairs  # type: ignore[return-value]  # the lengths have been checked

    def scores(self) -> list[float]:
        return self._numbers("scores")

    def added(self, *, special: bool) -> list[Any]:
        """Return the tokens that are found in a text as they are. An answer's text can leave out the special tokens."""
        from tokenizers import AddedToken

        kinds = (_UNKNOWN, _CONTROL) if special else (_USER_DEFINED,)
        texts = (text for text, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds)
        return [AddedToken(text, special=special, normalized=False) for text in texts]

    def named(self) -> dict[str, str]:
        """Return the text of each token that the file names, such as bos, by its name in transformers."""
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: self.get(f"{entry}_token_id") for name, entry in names.items()}
        found = {}
        for name, token_id in ids.items():
            if token_id is None:
                continue
            if not (type(token_id) is int and 0 <= token_id < len(self.tokens)):
                raise self.refusal(f"{names[name]}_token_id", f"there are {len(self.tokens)} tokens")
            found[name] = self.tokens[token_id]
        return found

    def post_processor(self) -> Any:
        """Return what adds the tokens around a text."""
        from tokenizers.processors import TemplateProcessing

        named = self.named()
        adds_bos = self.get("model") in ("llama", "gemma4") or _RULES.get(str(self.get("pre"))) in _BEGIN_WITH_BOS
        around = {"bos": self.flag("add_bos_token", adds_bos), "eos": self.flag("add_eos_token", False)}
        adds = {name: text for name, text in named.items() if around.get(name)}
        before, after = ([adds[name]] if name in adds else [] for name in ("bos", "eos"))
        ids = self.ids()
        return TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(text, ids[text]) for text in {*before, *after}],
        )


def _byte_level(vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = vocabulary.get("pre")
    if rule not in _RULES:
        raise vocabulary.refusal("pre", f"supported are {', '.join(_RULES)}")
    name = _RULES[rule]
    backend = Tokenizer(models.BPE(vocabulary.ids(), vocabulary.merges(), ignore_merges=name in _WHOLE_WORDS))
    if name in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == "GPT-2")]
    if name in PATTERNS:
        steps.insert(0, pre_tokenizers.Split(Regex(PATTERNS[name]), "isolated"))
    elif rule == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Any:
    """Return SentencePiece's BPE: the pair whose token has the highest score is merged first. Files of Gemma 4 have the
    merges, too.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = vocabulary.ids()
    has_merges = vocabulary.get("model") == "gemma4"
    pairs = vocabulary.merges() if has_merges else _merges_by_score(ids, vocabulary.scores())
    model = models.BPE(ids, pairs, unk_token=vocabulary.named().get("unk"), fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    adds_space = vocabulary.flag("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if adds_space else []), normalizers.Replace(" ", _SPACE)]
    )
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if adds_space else [])])
    return backend


def _merges_by_score(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    merges = [
        (-scores[token_id], ids[text[:i]], ids[text[i:]], text[:i], text[i:])
        for text, token_id in ids.items()
        for i in range(1, len(text))
        if text[:i] in ids and text[i:] in ids
    ]
    return [(left, right) for *_, left, right in sorted(merges)]
