"""The detokenizer against decoding all at once."""

import json
import random
import re
import threading
import time
from itertools import cycle, product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import examples
from tokenizer_kinds import byte_level
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nanovllm.plan.outputs import Outbox
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import ReasoningTags, SamplingParams
from nanovllm.text.detokenizer import (
    WINDOW_TOKENS,
    Detokenizer,
    StopStrings,
    TextReceiver,
    TokenDecoder,
    read_token_bytes,
)


class ByteTokenizer:
    """Token = byte, as byte-level tokenizers are; 256 is special."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")


class ChunkTokenizer:
    """Tokens of any bytes, also parts of two characters, as byte-level tokenizers have for some scripts."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return b"".join(self._chunks[i] for i in token_ids).decode(errors="replace")


class WordTokenizer:
    """Works like sentencepiece: words begin with a space, and a text does not."""

    WORDS = (" Hello", " world", ",", " again", "st", " a")

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.WORDS[i] for i in token_ids).removeprefix(" ")


def run(token_ids: list[int], stop: tuple[str, ...] = (), tokenizer: object = None) -> tuple[list[str], Detokenizer]:
    """The pieces, a token at a time, until the end or a stop string."""
    detokenizer = Detokenizer(TokenDecoder(tokenizer or ByteTokenizer()), StopStrings(stop))
    pieces = []
    for end, token_id in enumerate(token_ids, 1):
        pieces.append(detokenizer.update([token_id], finished=end == len(token_ids)))
        if detokenizer.stopped:
            break
    assert "".join(pieces) == detokenizer.text
    return pieces, detokenizer


HARDLY_TEXT = st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0xED, 0xEF, 0xF0, 0x9F, 0xBD, 256]), max_size=80)


@settings(max_examples=examples(500))
@given(text=st.text(max_size=30), junk=st.one_of(st.lists(st.integers(0, 256), max_size=12), HARDLY_TEXT))
@example(text="\U0001f600", junk=[0xF0, 0x9F] * 20)
@example(text="\ufffd" * 20, junk=[256] * 40)
@example(text="\U0001f600", junk=[0xF0, *[256] * 40, 0x9F])
def test_pieces_are_the_whole_text_also_of_broken_characters(text: str, junk: list[int]) -> None:
    token_ids = [*text.encode(), *junk, *text.encode()]
    _, detokenizer = run(token_ids)
    assert detokenizer.text == ByteTokenizer().decode(token_ids)


@settings(max_examples=examples(300))
@given(
    text=st.one_of(st.text(max_size=60), st.text("\u1780\u17be\u17d2", min_size=30, max_size=60)),
    lens=st.lists(st.integers(1, 4), min_size=1, max_size=6),
)
@example(text="\u1780\u17be\u17d2" * 30, lens=[2, *[3] * 80])
def test_pieces_are_the_whole_text_where_tokens_end_inside_characters(text: str, lens: list[int]) -> None:
    """Pieces come although the text ends in an incomplete character after every token."""
    data, chunks, start = text.encode(), [], 0
    while start < len(data):
        end = start + lens[len(chunks) % len(lens)]
        chunks.append(data[start:end])
        start = end
    pieces, detokenizer = run([*range(len(chunks))], (), ChunkTokenizer(chunks))
    assert detokenizer.text == text
    if max(map(len, chunks), default=0) > 2:
        assert all(any(pieces[i : i + 4]) for i in range(len(pieces) - 4))


@settings(max_examples=examples(300))
@given(text=st.text("ab\u00e4", min_size=1, max_size=40), stop=st.text("ab\u00e4", min_size=1, max_size=4))
def test_text_ends_before_the_first_stop_string_and_never_shows_a_part_of_it(text: str, stop: str) -> None:
    pieces, detokenizer = run(list(text.encode()), (stop,))
    before, found, _ = text.partition(stop)
    assert detokenizer.stopped == bool(found)
    assert "".join(pieces) == detokenizer.text == before


EURO = "\u20ac".encode()
PIECES: list[tuple[Any, tuple[str, ...], list[str]]] = [  # bytes, or words of WordTokenizer
    (b"one two three", ("three", "tw", "zero"), [*"one ", "", ""]),  # it stops at once
    ([*b"1", *EURO, *b"2"], (), ["1", "", "", "\u20ac", "2"]),  # an incomplete character waits for its rest
    ([*b"1", *EURO[:2]], (), ["1", "", "\ufffd"]),  # and is shown if there is none
    (b"xENyEND!", ("END",), ["x", "", "", "ENy", "", "", ""]),  # what may become a stop string waits
    (b"xEN", ("END",), ["x", "", "EN"]),
    (b"a\r\nb\rc\n", (), [*"a\r\nb\rc\n"]),
    (WordTokenizer.WORDS[:4], ("world,",), ["Hello", " ", ""]),  # across a token with more behind it
    (WordTokenizer.WORDS, (), ["Hello", *WordTokenizer.WORDS[1:]]),  # a decoder drops the space at the start alone
]


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    for tokens, stop, expected in PIECES:
        words = tokens[0] in WordTokenizer.WORDS
        token_ids = [WordTokenizer.WORDS.index(word) for word in tokens] if words else [*tokens]
        tokenizer = WordTokenizer() if words else ByteTokenizer()
        pieces, detokenizer = run(token_ids, stop, tokenizer)
        assert pieces == expected, tokens
        assert detokenizer.stopped == any(each in tokenizer.decode(token_ids) for each in stop)


def test_text_before_an_incomplete_character_does_not_wait_for_it() -> None:
    detokenizer = Detokenizer(TokenDecoder(ByteTokenizer()), StopStrings())
    assert detokenizer.update(b"ab\xe2", False) == "ab"
    assert detokenizer.update(b"\x82\xacc", False) == "\u20acc"


def test_replacement_characters_of_the_text_itself_come_out() -> None:
    """Regression: while the text ended in U+FFFD nothing was shown and no stop string was found."""
    text = "a" + "\ufffd" * 30
    pieces, _ = run([*text.encode(), *b"b"])
    assert len("".join(pieces[:-1])) >= 24 and "".join(pieces) == text + "b"
    assert run([*text.encode(), *b"END" * 9], ("\ufffdEND",))[1].text == text[:-1]
    detokenizer = Detokenizer(TokenDecoder(ByteTokenizer()), StopStrings(("\ufffd" * 5,)))
    num_updates = 0
    while not detokenizer.stopped:
        num_updates += 1
        assert detokenizer.update("\ufffd".encode(), False) == ""
    assert num_updates < 20


@pytest.mark.parametrize("token_ids", [[*"\ufffd".encode()], [0x9F], [256], [0x41], [0xF0, 0x9F, 256]])
def test_update_decodes_few_tokens_whatever_waits(token_ids: list[int]) -> None:
    """Regression: with every token that waited one more was decoded again, 7.75 ms an update at 16,000 of them."""
    decoder = TokenDecoder(ByteTokenizer())
    num_decoded = []
    decode = decoder.decode
    decoder.decode = lambda token_ids: num_decoded.append(len(token_ids)) or decode(token_ids)  # type: ignore[func-returns-value]
    detokenizer = Detokenizer(decoder, StopStrings(("END",)))
    for token_id in token_ids * 500:
        detokenizer.update([token_id], False)
    assert max(num_decoded) <= 2 * WINDOW_TOKENS


def test_after_a_stop_nothing_more_comes() -> None:
    detokenizer = Detokenizer(TokenDecoder(ByteTokenizer()), StopStrings(("b",)))
    assert detokenizer.update(b"ab", False) == "a"
    assert detokenizer.update(b"cd", True) == ""
    assert detokenizer.text == "a"


@settings(max_examples=examples(200))
@given(text=st.text("ab\u00e4", min_size=1, max_size=40), stop=st.text("ab\u00e4", min_size=1, max_size=4))
def test_stop_string_that_is_included_ends_the_text_and_nothing_behind_it_shows(text: str, stop: str) -> None:
    detokenizer = Detokenizer(TokenDecoder(ByteTokenizer()), StopStrings((stop,)), include_stop=True)
    pieces = []
    for start in range(0, len(data := text.encode()), 3):
        pieces.append(detokenizer.update(data[start : start + 3], finished=start + 3 >= len(data)))
    before, found, _ = text.partition(stop)
    assert detokenizer.stopped == bool(found)
    assert "".join(pieces) == detokenizer.text == before + found


# -- real tokenizers: byte-level, byte fallback with a mark for spaces, words whose spaces are cleaned up -------------

SAMPLE = "def f(x): return x + 1  # caf\u00e9, na\u00efve \u4f60\u597d \U0001f600 it's don't, really?\n" * 3


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Works like Llama 2: spaces are letters, and characters without a token are bytes. U+FFFD has a token."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trained.train_from_iterator(
        ["it is a test, really a test \ufffd \ufffd \ufffd"], trainers.BpeTrainer(vocab_size=40, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *model["vocab"]]
    merges = [tuple(merge) for merge in model["merges"]]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = trained.normalizer
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "it", "is", "don", "'", "t", ",", ".", "really", "##ly", "##s", "n", "'s", "n't", "do"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)


def is_rust(decoder: TokenDecoder) -> bool:
    return isinstance(decoder.decode.func.__self__, Tokenizer)  # type: ignore[attr-defined]


BYTE_LEVEL = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>")
BYTE_FALLBACK, WORDS = byte_fallback_tokenizer(), word_tokenizer()
TEXTS = st.one_of(st.text(max_size=40), st.text("a \u00e9\u20ac\U0001f600\ufffd ", max_size=40), st.just(SAMPLE))


def check_real_tokenizer(tokenizer: Any, token_ids: list[int]) -> None:
    """One by one, and in chunks of random lengths: whoever reads seldom gets several at a time."""
    rng = random.Random(len(token_ids))
    for skip, longest in product((True, False), (1, 4, 12, 40)):
        detokenizer = Detokenizer(TokenDecoder(tokenizer, skip), StopStrings())
        pieces, end = [], 0
        while end < len(token_ids):
            start, end = end, min(end + rng.randint(1, longest), len(token_ids))
            pieces.append(detokenizer.update(token_ids[start:end], finished=end == len(token_ids)))
        assert "".join(pieces) == detokenizer.text == tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_bytes_of_a_token_with_a_space_and_a_replacement_character_are_found() -> None:
    """Bug: Gemma's vocabulary has such a token, and no grammar could be used."""
    token_id = BYTE_FALLBACK.get_vocab()["\u2581\ufffd"]
    assert read_token_bytes(BYTE_FALLBACK, len(BYTE_FALLBACK))[token_id] == " \ufffd".encode()


@settings(max_examples=examples(200))
@given(text=TEXTS, junk=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=20))
def test_byte_level_tokenizer_pieces_are_the_whole_text(text: str, junk: list[int]) -> None:
    """Any tokens, the special one among them and one that was added as text."""
    check_real_tokenizer(BYTE_LEVEL, [*BYTE_LEVEL.encode(text), *junk, *BYTE_LEVEL.encode(text)])


@settings(max_examples=examples(200))
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), num_special=st.integers(0, 5))
def test_byte_fallback_tokenizer_pieces_are_the_whole_text(texts: list[str], num_special: int) -> None:
    """Special tokens between texts must not cost the next word its space."""
    token_ids = []
    for text in texts:
        token_ids += BYTE_FALLBACK.encode(text) + [BYTE_FALLBACK.eos_token_id] * num_special
    check_real_tokenizer(BYTE_FALLBACK, token_ids)


def test_text_that_a_tokenizer_cleans_up_is_cleaned_up() -> None:
    token_ids = WORDS.encode("it is , do n't really .")
    assert WORDS.decode(token_ids) == "it is, don't really."
    _, detokenizer = run(token_ids, (), WORDS)
    assert detokenizer.text == "it is, don't really."


def test_rust_tokenizer_is_called_directly_where_the_text_is_the_same() -> None:
    class WithItsOwn(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    with_its_own = WithItsOwn(tokenizer_object=BYTE_LEVEL.backend_tokenizer)
    assert is_rust(TokenDecoder(BYTE_LEVEL)) and is_rust(TokenDecoder(BYTE_FALLBACK))
    assert not is_rust(TokenDecoder(WORDS)) and not is_rust(TokenDecoder(ByteTokenizer()))
    assert not is_rust(TokenDecoder(with_its_own))
    assert run(BYTE_LEVEL.encode("abc"), (), with_its_own)[1].text == "ABC"


def test_reader_beside_the_last_token_does_not_take_an_end_token_for_text() -> None:
    """Tokens arrive without the lock that a reader holds. The last one must not: it may have to be left out."""
    receiver = TextReceiver(Outbox(), Detokenizer(TokenDecoder(ByteTokenizer()), StopStrings()))
    seq = Sequence(0, [1], SamplingParams(), seed=0)
    seq.token_ids.append(ord("a"))
    receiver.read(seq)
    seq.token_ids.append(ord("b"))
    seq.finish_reason, seq.has_end_token = "stop", True
    last = threading.Thread(target=receiver.read, args=(seq,))
    with receiver._lock:  # as read_text does
        last.start()
        time.sleep(0.05)
        receiver._decode()
    last.join()
    assert receiver.read_text() == receiver.whole_text() == "a"


# -- stop strings and reasoning ----------------------------------------------------------------------------------------

TAGS = ReasoningTags("<think>", "</think>")


def answer_with_reasoning(text: str, lens: list[int], stop: str, tags: ReasoningTags, include_stop: bool) -> str:
    """Detokenize `text` in pieces of these lengths, over and over."""
    detokenizer = Detokenizer(TokenDecoder(ByteTokenizer()), StopStrings((stop,)), include_stop, reasoning=tags)
    data, pieces, start = text.encode(), [], 0
    for length in cycle(lens):
        pieces.append(detokenizer.update(list(data[start : start + length]), finished=start + length >= len(data)))
        start += length
        if detokenizer.stopped or start >= len(data):
            break
    assert "".join(pieces) == detokenizer.text
    return detokenizer.text


def test_stop_strings_count_only_after_the_reasoning() -> None:
    """Regression: a stop string in the reasoning ended the answer before its content."""
    begun = TAGS._replace(has_begun=True)
    for text, stop, tags, expected in (
        ("<think>Hm. So.</think>\n\nYes. No.", ".", TAGS, "<think>Hm. So.</think>\n\nYes"),
        ("\n<think>\nHm.\n</think>\n\nYes.\nNo.", "\n", TAGS, "\n<think>\nHm.\n</think>\n\nYes."),
        ("Hm. So.</think>Yes. No.", ".", begun, "Hm. So.</think>Yes"),
        ("Hm. So.", ".", begun, "Hm. So."),
        ("Yes. <think>No.</think>", ".", TAGS, "Yes"),
        ("Hm.</think>No.", ".", TAGS, "Hm"),
        ("<thin.", ".", TAGS, "<thin"),
        ("<think>a</think></think>b", "</think>", TAGS, "<think>a</think>"),
        ("\n\nYes", "\n\n", TAGS, ""),
        ("<think>a</thin", "</thin", TAGS, "<think>a</thin"),
    ):
        for lens in ([1], [2], [3, 1], [len(text)]):
            assert answer_with_reasoning(text, lens, stop, tags, False) == expected, (text, lens)
            included = answer_with_reasoning(text, lens, stop, tags, True)
            assert included == (expected + stop if expected != text else text), (text, lens)


@settings(max_examples=examples(300))
@given(
    fragments=st.lists(st.sampled_from(("<think>", "</think>", "<", "</th", " ", "\n", "a", "b")), max_size=10),
    stop=st.sampled_from(("a", "ab", "\n", "<", "think", "</think>")),
    lens=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    has_begun=st.booleans(),
)
def test_stop_strings_after_the_reasoning_do_not_depend_on_the_pieces(
    fragments: list[str], stop: str, lens: list[int], has_begun: bool
) -> None:
    text = "".join(fragments)
    found = re.match(r"\s*()" if has_begun else r"\s*(<think>)", text)
    start = 0
    if found:
        _, tag, answer = text[found.end() :].partition("</think>")
        start = len(text) - len(answer.lstrip()) if tag else len(text)
    before, _, _ = text[start:].partition(stop)
    tags = TAGS._replace(has_begun=has_begun)
    assert answer_with_reasoning(text, lens, stop, tags, False) == text[:start] + before


def test_reasoning_streams_though_there_are_stop_strings() -> None:
    detokenizer = Detokenizer(TokenDecoder(ByteTokenizer()), StopStrings((".",)), reasoning=TAGS)
    assert [detokenizer.update([*piece], False) for piece in (b"<think>", b"Hm.", b" <", b"b")] == [
        "<think>",
        "Hm.",
        "",
        " <b",
    ]
    for num_spaces in (2000, 20_000):  # each is looked at once
        detokenizer = Detokenizer(TokenDecoder(ByteTokenizer()), StopStrings((".",)), reasoning=TAGS)
        for _ in range(num_spaces):
            assert detokenizer.update([ord(" ")], False) == ""
        assert detokenizer.update([ord("a")], False) == " " * num_spaces + "a"
