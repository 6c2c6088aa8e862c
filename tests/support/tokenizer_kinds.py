"""Small tokenizers of each kind that checkpoints have, as the files of a checkpoint.

    write_tokenizer("byte level", directory)

From `KINDS` transformers makes what tokenizer.json says. `MISLABELLED` have names in their configs from which it makes
something else.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from nanovllm.text.tokenizer import PATTERNS

SAMPLE = "The red wine, the blue sky: it's 1234 landmarks and 56 islands.\n\n  def café(x): return x + 1  # 你好 😀\n"
ADDED = ["<think>", "<\uff5ctool\u2581calls\uff5c>"]  # part of a text; DeepSeek's have such letters
SPECIAL = ["<unk>", "<s>", "</s>"]


def _trained(
    tokenizer: Tokenizer, vocab_size: int, alphabet: list[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([SAMPLE, SAMPLE.lower()], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def byte_level(pattern: str | None = None, *, gguf: bool = False) -> Tokenizer:
    """Works like GPT-2 or, with a pattern, Llama 3. `gguf`: with the decoder that transformers' export has."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated") if pattern else None
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last]) if split else last
    _trained(tokenizer, 350, pre_tokenizers.ByteLevel.alphabet())
    gguf_parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " "), decoders.ByteLevel()]
    tokenizer.decoder = decoders.Sequence(gguf_parts) if gguf else decoders.ByteLevel()
    return _with_added(tokenizer)


def _pieces(metaspace: bool) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges with 256 bytes, words and letters, as SentencePiece has them."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    if metaspace:
        trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    vocab, merges = _trained(trained, 120, [])
    kept = [name for name in vocab if name not in "你好😀é"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *kept]
    merges = [pair for pair in merges if "".join(pair) in kept and {*pair} <= {*kept}]
    return {name: token_id for token_id, name in enumerate(names)}, merges


def sentencepiece() -> Tokenizer:
    """Works like Llama 2 and Mistral: spaces are letters, and characters without a token are bytes."""
    vocab, merges = _pieces(metaspace=False)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return _with_added(tokenizer)


def metaspace() -> Tokenizer:
    """Works like the Llama 2 of transformers 5."""
    vocab, merges = _pieces(metaspace=False)
    tokenizer = Tokenizer(models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return _with_added(tokenizer)


def unigram() -> Tokenizer:
    vocab, _ = _pieces(metaspace=True)
    scores = [(name, -float(len(vocab) - len(name))) for name in vocab]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_added(tokenizer)


def llama_tokens(**more: Any) -> dict[str, Any]:
    return {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | more


_Kind = tuple[Callable[[], Tokenizer], str, dict[str, Any]]  # tokenizer.json, model_type, tokenizer_config.json
_FAST = llama_tokens(tokenizer_class="PreTrainedTokenizerFast")
KINDS: dict[str, _Kind] = {
    "byte level": (byte_level, "llama", _FAST),
    "byte level of Llama 3": (lambda: byte_level(PATTERNS["Llama 3"]), "llama", _FAST),
    "exported from GGUF": (lambda: byte_level(gguf=True), "llama", llama_tokens(tokenizer_class="TokenizersBackend")),
    "SentencePiece": (sentencepiece, "llama", _FAST),
    "Unigram": (unigram, "llama", _FAST),
    "Llama 2 of transformers 5": (metaspace, "llama", llama_tokens(tokenizer_class="LlamaTokenizer")),
}
MISLABELLED: dict[str, _Kind] = {
    "byte level called Llama": (byte_level, "llama", llama_tokens(tokenizer_class="LlamaTokenizerFast")),
    "Llama 3's pattern in a Qwen2": (
        lambda: byte_level(PATTERNS["Llama 3"]), "qwen2", llama_tokens(tokenizer_class="LlamaTokenizerFast"),
    ),
    "Llama 3's pattern called Qwen2": (
        lambda: byte_level(PATTERNS["Llama 3"]), "llama", llama_tokens(tokenizer_class="Qwen2Tokenizer"),
    ),
    "SentencePiece called Qwen2": (sentencepiece, "qwen2", llama_tokens(tokenizer_class="Qwen2Tokenizer")),
    "SentencePiece called Llama": (sentencepiece, "llama", llama_tokens(tokenizer_class="LlamaTokenizer")),
    "Unigram called Llama": (unigram, "llama", llama_tokens(tokenizer_class="LlamaTokenizerFast")),
    "no special tokens named": (byte_level, "llama", {"tokenizer_class": "LlamaTokenizerFast"}),
}  # fmt: skip


def add_tokens(directory: Path, tokens: dict[str, int], special: bool = False) -> None:
    """Make ids of the byte tokenizer in `directory` added tokens with other names. `tokens`: by name."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = {token_id: token for token, token_id in content["model"]["vocab"].items()}
    vocab |= {token_id: token for token, token_id in tokens.items()}
    content["model"]["vocab"] = {token: token_id for token_id, token in vocab.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": special}
    content["added_tokens"] += [{"id": token_id, "content": token, **flags} for token, token_id in tokens.items()]
    content["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(content))


def write_tokenizer(kind: str, directory: Path) -> Path:
    """Write its files, and a config.json if there is none."""
    make, model_type, config = (KINDS | MISLABELLED)[kind]
    directory.mkdir(parents=True, exist_ok=True)
    make().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory
