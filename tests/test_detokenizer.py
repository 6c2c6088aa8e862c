"""The detokenizer against decoding all at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.detokenizer import Detokenizer


class ByteTokenizer:
    """Token = byte, as byte-level tokenizers are; 256 is special."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")


class WordTokenizer:
    """As sentencepiece: words begin with a space, and a text does not."""

    WORDS = (" Hello", " world", ",", " again", "st", " a")

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.WORDS[i] for i in token_ids).removeprefix(" ")


def run(token_ids: list[int], stop: tuple[str, ...] = (), tokenizer: object = None) -> tuple[list[str], Detokenizer]:
    """The pieces, a token at a time, until the end or a stop string."""
    detokenizer = Detokenizer(tokenizer or ByteTokenizer(), stop)
    pieces = []
    for end in range(1, len(token_ids) + 1):
        pieces.append(detokenizer.update(token_ids[:end], finished=end == len(token_ids)))
        if detokenizer.stopped:
            break
    return pieces, detokenizer


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), junk=st.lists(st.integers(0, 256), max_size=12))
def test_pieces_are_the_whole_text_also_of_broken_characters(text: str, junk: list[int]) -> None:
    token_ids = [*text.encode(), *junk, *text.encode()]
    pieces, detokenizer = run(token_ids)
    assert "".join(pieces) == detokenizer.text == ByteTokenizer().decode(token_ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab\u00e4", min_size=1, max_size=40), stop=st.text("ab\u00e4", min_size=1, max_size=4))
def test_text_ends_before_the_first_stop_string_and_never_shows_a_part_of_it(text: str, stop: str) -> None:
    pieces, detokenizer = run(list(text.encode()), (stop,))
    before, found, _ = text.partition(stop)
    assert detokenizer.stopped == bool(found)
    assert "".join(pieces) == detokenizer.text == before


def test_one_of_several_stop_strings() -> None:
    pieces, detokenizer = run(list(b"one two three"), ("three", "tw", "zero"))
    assert (detokenizer.text, detokenizer.stopped) == ("one ", True)
    assert len(pieces) == 6  # at once


def test_incomplete_character_waits_for_its_rest_and_is_shown_when_there_is_none() -> None:
    euro = "\u20ac".encode()
    assert run([*b"1", *euro, *b"2"])[0] == ["1", "", "", "\u20ac", "2"]
    assert run([*b"1", *euro[:2]])[0] == ["1", "", "\ufffd"]


def test_text_that_may_become_a_stop_string_waits() -> None:
    assert run(list(b"xENyEND!"), ("END",))[0] == ["x", "", "", "ENy", "", "", ""]
    assert run(list(b"xEN"), ("END",))[0] == ["x", "", "EN"]


def test_stop_string_across_a_token_with_more_behind_it() -> None:
    pieces, detokenizer = run([0, 1, 2, 3], ("world,",), WordTokenizer())
    assert detokenizer.text == "Hello " and detokenizer.stopped
    assert pieces == ["Hello", " ", ""]


def test_words_keep_the_spaces_that_a_decoder_drops_at_the_start() -> None:
    pieces, _ = run([0, 1, 2, 3, 4, 5], (), WordTokenizer())
    assert pieces == ["Hello", " world", ",", " again", "st", " a"]


def test_special_tokens_are_not_shown() -> None:
    assert run([*b"ab", 256])[0] == ["a", "b", ""]


def test_after_a_stop_nothing_more_comes() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ("b",))
    assert detokenizer.update(list(b"ab"), False) == "a"
    assert detokenizer.update(list(b"abcd"), True) == ""
    assert detokenizer.text == "a"


@pytest.mark.parametrize("step", [2, 3, 7])
def test_several_tokens_at_once_give_the_same_text(step: int) -> None:
    token_ids = list("K\u00f6ln \u20ac 5, \U0001f600 and on END more".encode())
    detokenizer = Detokenizer(ByteTokenizer(), ("END",))
    pieces = [detokenizer.update(token_ids[:end], finished=end >= len(token_ids)) for end in range(step, 60, step)]
    assert "".join(pieces) == detokenizer.text == "K\u00f6ln \u20ac 5, \U0001f600 and on "
