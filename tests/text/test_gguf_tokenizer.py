"""Tokenizers of GGUF files: the token ids are those of the tokenizer from which the file was made."""

import argparse
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smollm2 import GGUF_NAME, gguf_directory
from tiers import examples
from tokenizer_kinds import SAMPLE, byte_level, sentencepiece
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

from nanovllm.checkpoint.gguf import GGUFModel, read_model
from nanovllm.errors import CheckpointError
from nanovllm.text.detokenizer import read_token_bytes
from nanovllm.text.gguf_tokenizer import make_tokenizer
from nanovllm.text.split_patterns import PATTERNS
from nanovllm.text.tokenizer import find_cuts

TEXTS = st.text(
    st.sampled_from("The reds kyABeÄß'sl3d 12,.!:\n\t/é你好😀\u0301<>_s") | st.characters(codec="utf-8"), max_size=60
)


def metadata(tokenizer: Tokenizer, **entries: Any) -> GGUFModel:
    """What a converter writes of a tokenizer, with `entries` of tokenizer.ggml."""
    content = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab()
    names, kinds = sorted(ids, key=ids.__getitem__), []
    added = {token["content"]: token for token in content["added_tokens"]}
    for name in names:
        token = added.get(name)
        is_byte = name.startswith("<0x") and name.endswith(">")
        kinds.append((6 if is_byte else 1) if token is None else 2 if name == "<unk>" else 3 if token["special"] else 4)
    values = {"tokens": names, "token_type": np.array(kinds), "bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"]}
    values |= {"unknown_token_id": ids["<unk>"], "add_bos_token": True, **entries}
    return GGUFModel(Path("x.gguf"), {f"tokenizer.ggml.{name}": value for name, value in values.items()}, {})


def of_rule(rule: str) -> tuple[Tokenizer, GGUFModel]:
    """A byte-level tokenizer that works by a rule, and the file made of it."""
    pattern = {
        "llama-bpe": "Llama 3",
        "qwen2": "Qwen2",
        "qwen35": "Qwen3.5",
        "tekken": "Tekken",
        "gpt-4o": "o200k",
    }.get(rule)
    tokenizer = byte_level(PATTERNS[pattern] if pattern else None)
    if rule == "smollm":
        last = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), last])
    if rule.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return tokenizer, metadata(tokenizer, model="gpt2", pre=rule, merges=merges)


RULES = ("llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "gpt-2", "smollm")


@pytest.mark.parametrize("rule", RULES)
def test_byte_level_tokenizer_has_the_ids_and_texts_of_the_original(rule: str) -> None:
    original, file = of_rule(rule)
    tokenizer = make_tokenizer(file)

    @given(TEXTS)
    @settings(max_examples=examples(2400))
    def check(text: str) -> None:
        expected = original.encode(text)
        assert tokenizer.encode(text) == expected.ids
        assert tokenizer.decode(expected.ids, skip_special_tokens=True) == original.decode(expected.ids)

    check()
    ids = original.encode(SAMPLE + "<think>").ids
    assert tokenizer.encode(SAMPLE + "<think>") == ids and tokenizer.decode(ids[1:]) == SAMPLE + "<think>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    read_token_bytes(tokenizer, len(file.metadata["tokenizer.ggml.tokens"]))  # every token's bytes can be told


@pytest.mark.parametrize("rule", RULES)
def test_bos_is_added_as_in_llama_cpp_if_the_file_does_not_say(rule: str) -> None:
    """Bug: files of Llama 3 and Mistral lacked bos unless they had add_bos_token, which converters of 2024 left out."""
    original, file = of_rule(rule)
    entries = {name: value for name, value in file.metadata.items() if name != "tokenizer.ggml.add_bos_token"}
    bos = [original.token_to_id("<s>")] if rule in ("llama-bpe", "tekken") else []
    assert make_tokenizer(file._replace(metadata=entries)).encode("") == bos
    says_no = file._replace(metadata=entries | {"tokenizer.ggml.add_bos_token": False})
    assert make_tokenizer(says_no).encode("") == []


@pytest.mark.parametrize("rule", RULES)
def test_long_texts_are_tokenized_in_parts(rule: str) -> None:
    """Texts are cut only for known patterns, so the patterns must be those of tokenizer.json."""
    assert (find_cuts(make_tokenizer(of_rule(rule)[1])) is not None) == (rule != "smollm")


def _pieces(text: str, ids: dict[str, int], scores: np.ndarray) -> list[int]:
    """SentencePiece's BPE, in a few lines: merge the adjacent pair of the best score, the first one of equals."""
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [
        token
        for part in parts
        for token in ([ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()])
    ]


def test_sentencepiece_tokenizer_merges_by_score() -> None:
    original = sentencepiece()
    ids, merges = original.get_vocab(), json.loads(original.to_str())["model"]["merges"]
    scores = np.zeros(len(ids), np.float32)
    for rank, pair in enumerate(merges):
        scores[ids["".join(pair)]] = -rank
    tokenizer = make_tokenizer(metadata(original, model="llama", scores=scores))

    @given(TEXTS.filter(lambda text: "<" not in text and "\u2581" not in text))
    @settings(max_examples=examples(3600))
    def check(text: str) -> None:
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found == _pieces(text, ids, scores)
        assert tokenizer.decode(found) == text

    check()
    assert tokenizer.encode("The red")[0] == ids["<s>"]


def test_tokenizer_of_gemma_4_has_merges_and_no_space_before_a_text() -> None:
    original = sentencepiece()
    merges = [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    tokenizer = make_tokenizer(metadata(original, model="gemma4", merges=merges, add_space_prefix=False))
    original.normalizer = normalizers.Replace(" ", "\u2581")
    original.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    for text in (SAMPLE, "The red  sky", "", " x"):
        ids = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == [tokenizer.bos_token_id, *ids]
        assert tokenizer.decode(ids) == original.decode(ids)


def test_unused_tokens_are_no_text() -> None:
    """Files fill up the vocabulary with tokens such as [PAD151936], which no text may have."""
    original, file = of_rule("qwen2")
    tokens, kinds = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.token_type"]
    more = {"tokenizer.ggml.tokens": [*tokens, "[PAD1]"], "tokenizer.ggml.token_type": np.append(kinds, 5)}
    tokenizer = make_tokenizer(file._replace(metadata={**file.metadata, **more}))
    assert tokenizer.encode("[PAD1]") == original.encode("[PAD1]").ids
    assert read_token_bytes(tokenizer, len(tokens) + 1)[-1] == b""


def test_tokenizers_that_cannot_be_made_are_refused() -> None:
    file = of_rule("qwen2")[1]
    cases: list[tuple[str, Any, str]] = [
        ("pre", "no-such-rule", r"x.gguf has tokenizer.ggml.pre='no-such-rule', .* supported are .*qwen2"),
        ("model", "bert", r"tokenizer.ggml.model='bert'.* supported are gpt2, llama"),
        ("merges", ["a b c"], "merges, .* two parts"),
        ("merges", ["no such"], "the vocabulary in x.gguf cannot be used"),
        ("tokens", [], "tokens, .* a list of texts"),
        ("token_type", np.array([1]), "token_type, .* one for each"),
        ("eos_token_id", 10**6, "eos_token_id=1000000, .* there are"),
    ]
    for name, value, message in cases:
        with pytest.raises(CheckpointError, match=message):
            make_tokenizer(file._replace(metadata={**file.metadata, f"tokenizer.ggml.{name}": value}))


WRONG: tuple[Any, ...] = ("x", 3, True, np.array([1, 2]), ["a"])


def test_entries_of_wrong_types_are_refused_by_name() -> None:
    """Bug: such entries raised TypeError and ValueError, which name neither the entry nor the file."""
    file = of_rule("qwen2")[1]
    for name in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "add_bos_token", "chat_template"):
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        for value in WRONG:
            if type(value) is not type(file.metadata.get(key, "")):
                with pytest.raises(CheckpointError, match=r"x.gguf"):
                    make_tokenizer(file._replace(metadata={**file.metadata, key: value}))


def test_real_tokenizer_has_the_ids_that_transformers_gives(smollm2_tokenizer: Path) -> None:
    """transformers leaves out the rule by which digits are split, which only matters beside other digits."""
    from transformers import AutoTokenizer

    file = gguf_directory() / GGUF_NAME
    tokenizer, reference = make_tokenizer(read_model(file)), AutoTokenizer.from_pretrained(smollm2_tokenizer)
    for text in (
        SAMPLE.replace("1234", "3").replace("56", "7"),
        Path(__file__).read_text().replace("0", "")[:3000],
        " \n\n x",
        "",
    ):
        alone = "".join(char for i, char in enumerate(text) if not (char.isdigit() and text[i - 1].isdigit()))
        assert tokenizer.encode(alone) == reference.encode(alone)
        assert tokenizer.decode(tokenizer.encode(alone)) == alone
    chat = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == reference.apply_chat_template(chat, tokenize=False)


@pytest.mark.slow
def test_real_tokenizer_of_gemma_has_published_ids(gemma3: Path) -> None:
    """Runs of spaces and of ends of lines are tokens, in a file as they are in texts."""
    tokenizer = make_tokenizer(read_model(gemma3))
    for text, ids in (
        ("Hello world", [9259, 1902]),
        ("  a    b\n\n\n c\t<b>", [138, 236746, 140, 236763, 109, 505, 255968, 200]),
        ("<start_of_turn>user\nHi<end_of_turn>\n", [105, 2364, 107, 10979, 106, 107]),
    ):
        assert tokenizer.encode(text) == [2, *ids] and tokenizer.decode(ids) == text
    text = inspect.getsource(argparse)[:20000]
    ids = tokenizer.encode(text)[1:]
    assert tokenizer.decode(ids) == text
    token_bytes = read_token_bytes(tokenizer, len(tokenizer))
    assert b"".join(token_bytes[token_id] for token_id in ids) == text.encode()
