"""TextEncoder: its tokens equal the tokenizer's, for every tokenizer, text and cut, and are used again."""

import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import RUNS_ALL, examples, tiered
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nanovllm.models.retrieval_model import save_tokenizer
from nanovllm.text.tokenizer import PATTERNS, TextEncoder, find_cuts, load_tokenizer

SPECIAL = "<|im_start|>"
# Where words begin and end, above all where that depends on what follows
PARTS = [
    " ", "  ", "\n", "\n\n", " \n", "\n ", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "a", "Bc", "the",
    "'ll", "'ve", "'S", "'", "1", "234567", "²", "e\u0301", "\u0301", "\u0308", "o", "Å", "\u212b", "\u1100", "\u1161",
    "😀", "👩\u200d💻", "漢字", "が", "か\u3099", "ー", "。", "，", "、", "下", "!", "!\n", "?/", "/", "-", "ǅ", "ʰ",
    SPECIAL, "<|im_", "|>", "aaaaaaaaaa", "def f(x):\n    return x\n",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)
DOCUMENT = "\n\n".join(f"§{i}. It's the {i * 7919}th line, isn't it? 漢字。かな，ok\n  - x!\n" for i in range(300))


def make_tokenizer(pattern: str | None, *, nfc: bool = False, bos: bool = False, eos: bool = False) -> Any:
    """A small tokenizer with one of the patterns; None means GPT-2's, which ByteLevel has itself."""
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    backend.pre_tokenizer = byte_level
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if nfc:
        backend.normalizer = normalizers.NFC()
    rng = random.Random(1)
    texts = ["".join(rng.choices(PARTS, k=30)) for _ in range(300)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([SPECIAL, "<bos>", "<eos>"])
    template = f"{'<bos> ' if bos else ''}$A{' <eos>' if eos else ''}"
    ids = [(token, backend.token_to_id(token)) for token in ("<bos>", "<eos>")]
    added = processors.TemplateProcessing(single=template, special_tokens=ids)
    backend.post_processor = processors.Sequence([processors.ByteLevel(), added])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<eos>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "GPT-2": partial(make_tokenizer, None),
    "GPT-2 with NFC and BOS": partial(make_tokenizer, None, nfc=True, bos=True),
    **{name: partial(make_tokenizer, pattern) for name, pattern in PATTERNS.items()},
    **{
        f"{name} with NFC, BOS and EOS": partial(make_tokenizer, pattern, nfc=True, bos=True, eos=True)
        for name, pattern in PATTERNS.items()
    },
}
each_tokenizer = pytest.mark.parametrize(
    "name", tiered(TOKENIZERS, [name for name in TOKENIZERS if name == "GPT-2" or " with " in name])
)


@cache
def tokenizer_of(name: str) -> Any:
    return TOKENIZERS[name]()


class Spy(TextEncoder):
    """Counts the characters that the tokenizer gets to encode."""

    def __init__(self, tokenizer: Any, **limits: int) -> None:
        super().__init__(tokenizer, **limits)
        self.num_chars = 0

    def _encode_batch(self, texts: list[str]) -> list[Any]:
        self.num_chars += sum(map(len, texts))
        return super()._encode_batch(texts)

    def chars_of(self, text: str, **options: Any) -> int:
        """Check the tokens of a text. Returns how many of its characters were encoded."""
        before = self.num_chars
        assert_same_tokens(self, text, **options)
        return self.num_chars - before


def assert_same_tokens(
    encoder: TextEncoder, text: str, add_special_tokens: bool = True, cache_salt: str | None = None
) -> None:
    expected = encoder.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    found = encoder.encode(text, add_special_tokens=add_special_tokens, cache_salt=cache_salt)
    assert found.typecode == "q" and found.tolist() == expected


@each_tokenizer
@settings(max_examples=examples(200))
@given(old=TEXTS, new=TEXTS, num_common=st.integers(0, 200), special=st.booleans())
@example(old="a \n\n b", new="!\n\n/x 'll", num_common=3, special=True)
def test_encode_any_text_cut_everywhere_equals_the_tokenizer(
    name: str, old: str, new: str, num_common: int, special: bool
) -> None:
    encoder = TextEncoder(tokenizer_of(name), min_chars=0, piece_chars=1)  # a piece ends at every cut
    for text in (old, old[:num_common] + new, old + new, old[:num_common], old):
        assert_same_tokens(encoder, text, special)


RESTS = ("", " ", "\n", "\n\n/", "\u0301", "ll", "7", "。", SPECIAL, " What is it?")


@each_tokenizer
def test_encode_common_beginning_of_any_length(name: str) -> None:
    encoder = TextEncoder(tokenizer_of(name), min_chars=0, piece_chars=50)
    hard = "x. \n\n  They'll've  12345 67\r\n\r\n /e\u0301 \u0301漢字。漢！ 😀" + SPECIAL + " \n" + SPECIAL + "a" * 90
    assert_same_tokens(encoder, hard * 3)
    for end in range(len(hard), 2 * len(hard) + 1):
        for rest in RESTS if RUNS_ALL else RESTS[end % 3 :: 3]:
            assert_same_tokens(encoder, (hard * 3)[:end] + rest)


@each_tokenizer
def test_encode_later_questions_encode_only_the_end(name: str) -> None:
    encoder = Spy(tokenizer_of(name), min_chars=1000, piece_chars=200)
    assert encoder.chars_of(DOCUMENT + "What is it?") == len(DOCUMENT) + 11
    assert encoder.chars_of(DOCUMENT + "Who is it? And why?") < 500
    assert encoder.chars_of(DOCUMENT, add_special_tokens=False) < 500
    assert encoder.chars_of(DOCUMENT[: len(DOCUMENT) // 2]) < 500
    assert encoder.chars_of(DOCUMENT + DOCUMENT) < len(DOCUMENT) + 500


def test_encode_other_salt_reuses_nothing() -> None:
    encoder = Spy(tokenizer_of("Qwen2"), min_chars=1000, piece_chars=200)
    for salt in (None, "a", "b"):
        assert encoder.chars_of(DOCUMENT, cache_salt=salt) == len(DOCUMENT)
        assert encoder.chars_of(DOCUMENT, cache_salt=salt) < 500


@each_tokenizer
@pytest.mark.parametrize("text", ["a" * 2500, "漢字" * 1250, "\n" * 2500, " " * 2500, "1" * 2500, "\u0301" * 2500])
def test_encode_text_without_cuts(name: str, text: str) -> None:
    encoder = Spy(tokenizer_of(name), min_chars=1000, piece_chars=200)
    for _ in range(2):
        assert_same_tokens(encoder, text + " end")
    assert encoder.num_chars >= len(text)


def test_encode_chinese_without_spaces_is_reused() -> None:
    encoder = Spy(tokenizer_of("Qwen2 with NFC, BOS and EOS"), min_chars=1000, piece_chars=200)
    rng = random.Random(3)
    document = "".join("".join(rng.choices("一二三四五六かな", k=rng.randrange(1, 50))) + "，" for _ in range(500))
    assert encoder.chars_of(document + "何？") == len(document) + 2
    assert encoder.chars_of(document + "誰？") < 500


def test_encode_keeps_no_more_than_max_bytes() -> None:
    encoder = Spy(tokenizer_of("Qwen2"), min_chars=100, piece_chars=200, max_bytes=300_000)
    rng = random.Random(4)
    documents = [" ".join(rng.choices(PARTS, k=1000)) for _ in range(30)]
    for document in documents:
        assert encoder.chars_of(document) == len(document) > 2500
        assert encoder.num_bytes <= 300_000
    assert encoder.num_bytes > 290_000
    assert encoder.chars_of(documents[-1]) < 500
    assert encoder.chars_of(documents[0]) == len(documents[0])  # its pieces have gone
    salted = Spy(tokenizer_of("Qwen2"), min_chars=100, piece_chars=200, max_bytes=300_000)
    salted.chars_of(documents[0], cache_salt="s" * 10**7)
    assert all(len(salt) == 16 for salt, _ in salted._pieces)  # a long salt is not kept
    none_fit = Spy(tokenizer_of("Qwen2"), min_chars=100, piece_chars=200, max_bytes=0)
    assert none_fit.chars_of(DOCUMENT) == none_fit.chars_of(DOCUMENT) == len(DOCUMENT) and not none_fit.num_bytes


def test_encode_short_text_goes_to_the_tokenizer() -> None:
    encoder = Spy(tokenizer_of("Qwen2"))
    assert encoder.chars_of("Hello, world") == encoder.num_bytes == 0


@pytest.mark.parametrize(
    "options", [{"truncation": True, "max_length": 5}, {"padding": "max_length", "max_length": 99}]
)
def test_encode_after_a_call_of_the_tokenizer_with_other_options(options: dict[str, Any]) -> None:
    encoder = Spy(make_tokenizer(None), min_chars=0, piece_chars=1)
    whole = encoder.tokenizer.encode("one two three four five six seven")
    encoder.tokenizer("one two", **options)
    assert encoder.encode("one two three four five six seven").tolist() == whole


def changed(change: Callable[[Any], Any]) -> Any:
    tokenizer = make_tokenizer(PATTERNS["Qwen2"])
    return change(tokenizer.backend_tokenizer) or tokenizer


def set_part(name: str, value: Any) -> Callable[[Any], None]:
    return lambda backend: setattr(backend, name, value)


def tokenizers_without_cuts() -> Iterator[tuple[str, Any]]:
    unknown = pre_tokenizers.Split(Regex(r"\b"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    yield "no tokenizer", object()
    yield "NFKC", changed(set_part("normalizer", normalizers.NFKC()))
    yield "prepend", changed(set_part("normalizer", normalizers.Prepend("_")))
    for name, part in {
        "metaspace": pre_tokenizers.Metaspace(),
        "prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "no words": byte_level,
        "unknown pattern": pre_tokenizers.Sequence([unknown, byte_level]),
        "only a split": unknown,
    }.items():
        yield name, changed(set_part("pre_tokenizer", part))
    yield "no pre-tokenizer", changed(set_part("pre_tokenizer", None))
    yield "dropout", changed(lambda backend: setattr(backend.model, "dropout", 0.1))
    roberta = processors.RobertaProcessing(("<eos>", 901), ("<bos>", 902))
    yield "other post-processor", changed(set_part("post_processor", roberta))
    for options in ({"lstrip": True}, {"rstrip": True}, {"single_word": True}):
        token = AddedToken("<tool>", **options)
        yield str(options), changed(lambda backend, token=token: backend.add_tokens([token]) and None)
    for name, content in {"white space": "two words", "a cut after a letter": "\u6587\u3002"}.items():
        add = changed(lambda backend, content=content: backend.add_tokens([content]) and None)
        yield f"{name} in a token", add

    class Overriding(PreTrainedTokenizerFast):
        def encode(self, *args: Any, **options: Any) -> Any:
            return super().encode(*args, **options)

    backend = make_tokenizer(None).backend_tokenizer
    yield "another encode", Overriding(tokenizer_object=backend)


def test_find_cuts_other_tokenizers_have_none() -> None:
    for name, tokenizer in tokenizers_without_cuts():
        assert find_cuts(tokenizer) is None, name


def test_encode_tokenizer_without_cuts_encodes_whole_texts() -> None:
    tokenizer = changed(set_part("pre_tokenizer", pre_tokenizers.Metaspace()))
    encoder = Spy(tokenizer, min_chars=0, piece_chars=1)
    assert encoder.chars_of("one two three") == 0 and not encoder.num_bytes


def test_find_cuts_tokenizers_of_the_project_have_some(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert find_cuts(load_tokenizer(tmp_path)) is not None
    assert find_cuts(Qwen2Tokenizer()) is not None
