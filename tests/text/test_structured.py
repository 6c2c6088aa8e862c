"""Structured output: the masks against plain references, and answers drawn at random from them."""

import functools
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_threads import in_threads
from tiny_models import write_tiny_model, write_tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.checkpoint.read_config import load_config
from nanovllm.errors import RequestError
from nanovllm.models.retrieval_model import END_TOKEN_ID, byte_symbols
from nanovllm.plan.logit_edits import TokenConstraint, TokenMask
from nanovllm.sampling_params import StructuredOutputs, TaggedJson, TaggedValue
from nanovllm.text.frontend import TextFrontend
from nanovllm.text.structured import GrammarCompiler, TokenMatcher

CHOICES = ("positive", "negative", "neutral", "pos", "é😀", 'a "quoted" \\ line\n', "<|endoftext|>")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ça"]}, "maxItems": 3},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["name", "age", "tags", "zip"],
    "additionalProperties": False,
}
REGEX = r"(GET|POST) /[a-zé]{1,8}(\?[a-z]=\d{1,3})?"


def byte_pair_tokenizer() -> Any:
    """A vocabulary of 700 tokens: bytes, words and pieces of JSON, some of them with a part of a character."""
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    text = [json.dumps({"name": f"é😀 {i}", "tags": ["a", "bb"], "age": i}, ensure_ascii=False) for i in range(200)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False, special_tokens=specials
    )
    rust.train_from_iterator([*text, *CHOICES * 5, REGEX], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|endoftext|>")


class Case:
    """A tokenizer, and a model's vocabulary that is 40 ids larger."""

    def __init__(self, tokenizer: Any, end_token_ids: tuple[int, ...], num_padding: int = 40) -> None:
        self.tokenizer, self.end_token_ids = tokenizer, end_token_ids
        self.vocab_size = len(tokenizer) + num_padding
        self.compiler = GrammarCompiler(tokenizer, self.vocab_size, end_token_ids)
        byte_of = {symbol: bytes([byte]) for byte, symbol in enumerate(byte_symbols())}
        special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.texts = {  # token -> its text as bytes, if it has one
            token_id: b"".join(byte_of[symbol] for symbol in token)
            for token, token_id in tokenizer.get_vocab().items()
            if token_id not in special
        }

    def matcher(self, ignore_eos: bool = False, **outputs: Any) -> TokenMatcher:
        return TokenMatcher(self.compiler.compile(StructuredOutputs(**outputs)), ignore_eos)

    def text(self, token_ids: list[int]) -> str:
        return b"".join(self.texts[token_id] for token_id in token_ids if token_id in self.texts).decode()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module", params=["demo", "tiny", "byte pairs"])
def case(request: pytest.FixtureRequest, demo_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "byte pairs":
        return Case(byte_pair_tokenizer(), (0, 1))
    if request.param == "tiny":
        directory = write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
        return Case(AutoTokenizer.from_pretrained(directory), (319,))
    return Case(demo_tokenizer, (END_TOKEN_ID,))


def allowed(mask: TokenMask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(case: Case, matcher: TokenMatcher, seed: int, num_free: int = 60) -> Iterator[int]:
    """Draw tokens from the masks until the answer is finished; after `num_free` of them, those that end it soon."""
    rng = random.Random(seed)
    closing = [
        *case.end_token_ids,
        *(token_id for c in b'"}]' for token_id, b in case.texts.items() if b == bytes([c])),
    ]
    for num_tokens in range(2000):
        if matcher.is_finished:
            return
        choices = allowed(matcher.mask())
        assert choices and matcher.error is None, f"seed {seed}: {matcher.error}"
        token_id = rng.choice(choices)
        if num_tokens >= num_free:
            visible = [choice for choice in choices if case.texts.get(choice, b"x").strip()]
            token_id = next((c for c in closing if c in choices), (visible or choices)[0])
        assert matcher.accept(token_id)
        yield token_id
    raise AssertionError(f"seed {seed}: the answer does not end")


def is_person(value: Any) -> bool:
    assert list(value) == list(PERSON["properties"])  # type: ignore[call-overload]
    name, age, tags, code = value.values()
    is_valid = isinstance(name, str) and len(name) <= 12 and isinstance(age, int) and 0 <= age <= 150
    return is_valid and set(tags) <= {"a", "bb", "ça"} and len(tags) <= 3 and bool(re.fullmatch("[0-9]{5}", code))


# -- what the masks allow ------------------------------------------------------------------------------------------


def test_mask_of_a_choice_every_token_tried(case: Case) -> None:
    """After each prefix of each choice, a token is allowed if some choice goes on with its bytes."""
    goals = [choice.encode() for choice in CHOICES]
    for goal in CHOICES:
        matcher, read = case.matcher(choice=CHOICES), b""
        for token_id in [*case.encode(goal), None]:
            expected = {t for t, b in case.texts.items() if b and any(each.startswith(read + b) for each in goals)}
            if read in goals:
                expected |= {*case.end_token_ids}
            assert {*allowed(matcher.mask())} == expected, read
            if token_id is not None and token_id in case.texts:
                assert matcher.accept(token_id)
                read += case.texts[token_id]


@pytest.mark.parametrize("outputs", [{"json": PERSON}, {"json_object": True}, {"regex": REGEX}], ids=str)
def test_mask_every_token_tried_in_random_states(case: Case, outputs: dict[str, Any]) -> None:
    answer: list[int] = []
    for token_id in walk(case, case.matcher(**outputs), seed=1, num_free=10):
        answer.append(token_id)
    for length in sorted(random.Random(2).sample(range(len(answer)), min(6, len(answer)))):
        mask = allowed(start_with(case, answer[:length], **outputs).mask())
        accepted = [t for t in range(case.vocab_size) if start_with(case, answer[:length], **outputs).accept(t)]
        assert mask == accepted


def start_with(case: Case, token_ids: list[int], **outputs: Any) -> TokenMatcher:
    matcher = case.matcher(**outputs)
    assert all(matcher.accept(token_id) for token_id in token_ids)
    return matcher


@pytest.mark.parametrize("seed", range(8))
def test_answers_drawn_from_masks_match(case: Case, seed: int) -> None:
    for outputs, check in (
        ({"json": PERSON}, lambda text: is_person(json.loads(text))),
        ({"json": json.dumps(PERSON)}, lambda text: is_person(json.loads(text))),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
        ({"regex": "^[é-ü]+😀?\n/$"}, lambda text: re.fullmatch("[é-ü]+😀?\n/", text)),
        ({"choice": CHOICES}, lambda text: text in CHOICES),
    ):
        answer = list(walk(case, case.matcher(**outputs), seed))
        assert check(case.text(answer)), (outputs, case.text(answer))
        assert not {*answer[:-1]} - {*case.texts}, "a special token or padding is inside the answer"
        without_end = case.matcher(ignore_eos=True, **outputs)
        answer = [token_id for _, token_id in zip(range(50), walk(case, without_end, seed), strict=False)]
        assert not {*answer} - {*case.texts}
        assert not without_end.is_finished or check(case.text(answer))


@pytest.mark.parametrize(
    "value",
    [
        {"name": "é😀\u4e2d", "age": 0, "tags": [], "zip": "01234"},
        {"name": 'q"\\\n', "age": 150, "tags": ["ça", "a"], "zip": "99999"},
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_valid_documents_are_accepted_token_by_token(case: Case, value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    for outputs in ({"json": PERSON}, {"json_object": True}, {"json": {}}):
        matcher = start_with(case, case.encode(text)[:-1], **outputs)
        assert not matcher.is_finished
        assert matcher.accept(case.encode(text)[-1]) and matcher.is_finished


def test_white_space_between_parts_of_json_is_limited_but_not_indentation(case: Case) -> None:
    """Regression: a model that repeats line ends could write 64 of them between two parts."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    by_text = {text: token_id for token_id, text in case.texts.items() if len(text) == 1}
    for outputs in ({"json_object": True}, {"json": schema}):
        for begun in ("{", '{"a"', '{"a":', '{"a": 1', '{"a": 1\n'):
            for space, most in ((b" ", 40), (b"\t", 40), (b"\n", 2)):
                matcher = start_with(case, [by_text[bytes([byte])] for byte in begun.encode()], **outputs)
                num_taken = 0
                while num_taken <= most and matcher.accept(by_text[space]):
                    num_taken += 1
                assert num_taken <= most, (begun, space)
                assert by_text[space] not in allowed(matcher.mask())
    nested: Any = [1]
    for _ in range(9):
        nested = {"a": nested, "b": "c"}
    for text in (json.dumps(nested, indent=4), json.dumps(nested, indent=2), json.dumps(nested, indent="\t")):
        for written in (text, text.replace("\n", "\r\n"), text.replace(",\n", ", \n\n")):
            assert start_with(case, case.encode(written), json_object=True).is_finished


def test_characters_of_several_bytes_are_completed(case: Case) -> None:
    """After the first byte of a character, only tokens that continue it are allowed."""
    matcher = case.matcher(json={"type": "string"})
    by_text = {text: token_id for token_id, text in case.texts.items() if len(text) == 1}
    assert matcher.accept(by_text[b'"'])
    for byte in "😀".encode():
        texts = [case.texts[token_id] for token_id in allowed(matcher.mask())]
        is_inside = byte & 0xC0 == 0x80
        assert all((text[0] & 0xC0 == 0x80) == is_inside for text in texts)
        assert matcher.accept(by_text[bytes([byte])])
    refused = [0xC0, 0xFF, 0x80, 0x1F, 0x7F]  # no character starts with these, or they must be escaped
    assert not any(matcher.accept(by_text[bytes([byte])]) for byte in refused)


def test_special_tokens_are_refused_but_not_their_text(case: Case) -> None:
    matcher = case.matcher(json={"type": "string"})
    assert matcher.accept(case.encode('"')[0])
    not_text = {*range(case.vocab_size)} - {*case.texts}
    assert not not_text & {*allowed(matcher.mask())}
    assert not any(matcher.accept(token_id) for token_id in [*not_text, case.vocab_size, 10**6, -1])
    for byte in b"<|endoftext|>":
        assert matcher.accept(next(t for t, text in case.texts.items() if text == bytes([byte])))


# -- ends ------------------------------------------------------------------------------------------------------------


def test_end_tokens_are_allowed_where_the_answer_may_end(case: Case) -> None:
    matcher = case.matcher(regex="ab+")
    a, b = case.encode("a")[0], case.encode("b")[0]
    ends = {*case.end_token_ids}
    assert not ends & {*allowed(matcher.mask())} and not matcher.accept(case.end_token_ids[0])
    assert matcher.accept(a) and not ends & {*allowed(matcher.mask())}
    assert matcher.accept(b) and ends < {*allowed(matcher.mask())} and not matcher.is_finished
    assert matcher.accept(case.end_token_ids[-1]) and matcher.is_finished
    assert not matcher.accept(b) and matcher.is_finished and matcher.error is None
    assert allowed(matcher.mask()) == list(range(case.vocab_size))


def test_is_finished_as_soon_as_only_an_end_token_could_follow(case: Case) -> None:
    for outputs in ({"choice": ["ab"]}, {"regex": "ab"}, {"regex": "a[b]{1,1}$"}):
        for ignore_eos in (False, True):
            matcher = case.matcher(ignore_eos, **outputs)
            assert not matcher.is_finished
            for token_id in case.encode("ab"):
                assert matcher.accept(token_id)
            assert matcher.is_finished
            expected = list(range(case.vocab_size)) if ignore_eos else sorted(case.end_token_ids)
            assert allowed(matcher.mask()) == expected


def test_model_without_end_tokens_ends_when_nothing_can_follow(demo_tokenizer: Any) -> None:
    case = Case(demo_tokenizer, ())
    matcher = case.matcher(regex="ab?")
    assert matcher.accept(ord("a")) and allowed(matcher.mask()) == [ord("b")] and not matcher.accept(END_TOKEN_ID)
    assert matcher.accept(ord("b")) and matcher.is_finished


# -- vocabularies ------------------------------------------------------------------------------------------------------


def test_padding_ids_are_never_allowed(demo_tokenizer: Any) -> None:
    for num_padding in (0, 1, 30, 62, 1000):
        matcher = Case(demo_tokenizer, (END_TOKEN_ID,), num_padding).matcher(regex=r"(.|\n)*")
        assert matcher.mask().shape == (-(-(258 + num_padding) // 32),) and matcher.mask().dtype == np.int32
        assert max(allowed(matcher.mask())) == END_TOKEN_ID
        assert not matcher.accept(257 + num_padding)


def test_model_with_fewer_ids_than_the_tokenizer(demo_tokenizer: Any) -> None:
    """Without the bytes above 199 there is no first byte of 😀, and without 256 no end token."""
    compiler = GrammarCompiler(demo_tokenizer, 200, ())
    matcher = TokenMatcher(compiler.compile(StructuredOutputs(regex="x(a|😀)")), False)
    assert matcher.mask().shape == (7,) and allowed(matcher.mask()) == [ord("x")]
    assert matcher.accept(ord("x")) and allowed(matcher.mask()) == [ord("a")] and not matcher.accept(240)
    stuck = TokenMatcher(compiler.compile(StructuredOutputs(choice=["x😀"])), False)
    assert stuck.accept(ord("x"))
    assert allowed(stuck.mask()) == list(range(200)) and not stuck.accept(ord("x")) and not stuck.is_finished
    assert stuck.error is not None and "no token of the model's vocabulary continues" in stuck.error


def test_tokenizer_whose_tokens_have_no_bytes_of_their_own_is_refused() -> None:
    """An apostrophe takes the spaces around it: it depends on the next token."""
    plain = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "'": 2, "m": 3}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.decoder = decoders.WordPiece(cleanup=False)
    words = PreTrainedTokenizerFast(tokenizer_object=plain, clean_up_tokenization_spaces=True)
    compiler = GrammarCompiler(words, 4, ())
    for _ in range(2):
        with pytest.raises(RequestError, match="cannot be used with this model's tokenizer"):
            compiler.compile(StructuredOutputs(json_object=True))


def test_vocabulary_that_cannot_go_on_is_not_called_complex() -> None:
    """Regression: "became too complex: no answer matches it" was said of an answer whose next letter has no token."""
    letters = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    letters.decoder = decoders.ByteLevel()
    compiler = GrammarCompiler(PreTrainedTokenizerFast(tokenizer_object=letters), 2, ())
    for regex in ("a b", "a[ ]+b", "ab c"):
        matcher = TokenMatcher(compiler.compile(StructuredOutputs(regex=regex)), False)
        for token_id in (0, 1):
            matcher.mask()
            matcher.accept(token_id)
        matcher.mask()
        assert matcher.error == "no token of the model's vocabulary continues the answer as structured_outputs demands"


# -- guesses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [{"json": PERSON}, {"json_object": True}, {"choice": CHOICES}], ids=["a", "b", "c"])
def test_masks_for_guesses_equal_those_of_accepted_tokens(case: Case, outputs: dict[str, Any]) -> None:
    answer = list(walk(case, case.matcher(**outputs), seed=3, num_free=20))
    matcher: TokenConstraint = case.matcher(**outputs)
    rng, position = random.Random(4), 0
    while position < len(answer):
        guesses = answer[position : position + rng.randrange(6)]
        rows = matcher.masks_for(guesses)
        assert len(rows) == len(guesses) + 1
        other = start_with(case, answer[:position], **outputs)
        for token_id, row in zip(guesses, rows, strict=False):
            assert np.array_equal(other.mask(), row) and other.accept(token_id)
        assert np.array_equal(other.mask(), rows[-1])
        for token_id in guesses[: rng.randrange(6)]:
            assert matcher.accept(token_id)
            position += 1
    assert matcher.is_finished


def test_masks_for_wrong_guesses_leave_the_state_alone(case: Case) -> None:
    matcher = case.matcher(regex="ab?c")
    a, b, c = (case.encode(letter)[0] for letter in "abc")
    before, end, everything = matcher.mask(), case.end_token_ids[0], list(range(case.vocab_size))
    for guesses, num_known in (([b], 1), ([a, a, a], 2), ([a, b, c, end, a], 4), ([a, c, a], 3), ([end], 1), ([-1], 1)):
        rows = matcher.masks_for(guesses)
        assert len(rows) == len(guesses) + 1
        assert [allowed(row) == everything for row in rows] == [i >= num_known for i in range(len(rows))]
        assert np.array_equal(rows[0], before) and matcher.error is None
    assert [case.text([t]) for t in allowed(matcher.masks_for([a])[1]) if len(case.texts[t]) == 1] == ["b", "c"]
    assert all(map(matcher.accept, (a, b, c))) and matcher.is_finished


def test_matchers_of_one_grammar_run_in_several_threads(case: Case) -> None:
    answers: dict[int, list[int]] = {}

    def answer(seed: int) -> None:
        answers[seed] = list(walk(case, case.matcher(json=PERSON), seed))

    in_threads(*(functools.partial(answer, seed) for seed in (1, 2, 1, 2)))
    assert [answers[seed] for seed in (1, 2)] == [list(walk(case, case.matcher(json=PERSON), s)) for s in (1, 2)]


# -- the frontend ----------------------------------------------------------------------------------------------------


def test_frontend_refuses_a_bad_schema_and_makes_constraints(tmp_path: Path) -> None:
    write_tiny_tokenizer(write_tiny_model(tmp_path))
    config = load_config(str(tmp_path))[0]
    text = TextFrontend(config, tmp_path)
    with pytest.raises(RequestError, match=r"structured_outputs.json cannot be used: 'type' at # is 'frob'"):
        text.rules(SamplingParams(structured_outputs=StructuredOutputs(json={"type": "frob"})))
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"]))
    make_constraint = text.rules(params).make_constraint
    assert make_constraint is not None
    constraint, other = make_constraint(), make_constraint()
    assert constraint.accept(text.encode_prompt("y")[0])
    assert not np.array_equal(constraint.masks_for([])[0], other.masks_for([])[0])
    assert text.rules(SamplingParams()).make_constraint is None
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer"):
        TextFrontend(config, None).rules(params)


def test_compile_without_llguidance_names_the_extra(demo_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(demo_tokenizer, 258, (END_TOKEN_ID,))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        patch.delitem(sys.modules, "llguidance.hf", raising=False)
        with pytest.raises(RequestError, match=re.escape("pip install --constraint constraints.txt '.[structured]'")):
            compiler.compile(StructuredOutputs(json_object=True))
    assert compiler.compile(StructuredOutputs(json_object=True))


def test_compile_equal_grammars_once(case: Case) -> None:
    first = case.compiler.compile(StructuredOutputs(json=PERSON))
    assert case.compiler.compile(StructuredOutputs(json=json.dumps(PERSON))) is first
    assert case.compiler.compile(StructuredOutputs(json_object=True)) is not first


# -- JSON between tags -----------------------------------------------------------------------------------------------

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TAGS = (("<call>f(", NUMBER, ")</call>"), ("<call>g(", {"enum": [1, 2]}, ")"))


def test_tagged_json_is_what_stands_between_its_tags(case: Case) -> None:
    """Feeds the tokens of each answer to a matcher."""
    one, two, other = '<call>f({"n": 5})</call>', "<call>g(2)", '<call>f({"n": "x"})</call>'
    free = TaggedJson(tags=TAGS, trigger="<call>", separator="; ")
    bare = TaggedJson(tags=(("{", {"enum": [1]}, "}"),), separator="; ")
    for tagged, right, wrong in (
        (free, ("", "Some text", f"{one} and {two}.", f"a < b {two}{one}"), (other, "x <call>h(", "<call>f(5)")),
        (replace(free, is_single=True), ("Some text", f"text {one}"), (f"{one}{two}", f"{one} text", other)),
        (replace(free, is_required=True), (one, f"{one}; {two}; {two}"), ("text", f"x{one}", f"{one}{two}", other)),
        (replace(free, is_required=True, is_single=True), (one, two), (f"{one}; {two}", "")),
        (bare, ("", "text {5}", "{1}", "{1}; {1}"), ("{5}", " {5}", "{1} x", "{1};{1}")),
        (replace(bare, is_required=True), ("{1}", "{1}; {1}"), ("", "text", " {1}")),
    ):
        for text in (*right, *wrong):
            assert matches(case, tagged, text) == (text in right), (tagged, text)


def test_tagged_json_takes_tags_that_are_tokens() -> None:
    """No text of a grammar matches an added token, so models such as Qwen3 could not open a call."""
    tokenizer = byte_pair_tokenizer()
    tokenizer.add_tokens(["<call>", "</call>", "<think>"])
    case = Case(tokenizer, (0, 1))
    test_tagged_json_is_what_stands_between_its_tags(case)
    tagged = TaggedJson(tags=TAGS, trigger="<call>")
    for single in (False, True):
        assert matches(case, replace(tagged, is_single=single), "<think>Hm <think><call>g(2)")
        assert matches(case, replace(tagged, is_single=single), "<think> no call")
    spelled = [*case.encode("<"), *case.encode("call>g(")]
    for number, is_right in (("2", True), ("3", False)):
        matcher = case.matcher(tagged_json=tagged)
        assert all(matcher.accept(token_id) for token_id in spelled)
        assert matcher.accept(*case.encode(number)) == is_right


def matches(case: Case, tagged: TaggedJson, text: str) -> bool:
    matcher = case.matcher(tagged_json=tagged)
    for token_id in case.encode(text):
        if token_id not in allowed(matcher.mask()):
            return False
        matcher.accept(token_id)
    return bool(set(case.end_token_ids) & set(allowed(matcher.mask())))


def test_tagged_json_that_is_too_large_or_wrong_is_refused(case: Case) -> None:
    for tags, message in (
        ((("<" * 200_001, NUMBER, ""),), "tagged_json has .* characters, at most 200000"),
        ((("<", {"const": "y" * 100_000}, ""),) * 3, "tagged_json has .* characters, at most 200000"),
        ((("<", {"type": 5}, ""),), "structured_outputs.tagged_json cannot be used"),
        ((("<", {"x": "y" * 200_001}, ""),), "structured_outputs.json has .* characters"),
    ):
        with pytest.raises(RequestError, match=message):
            case.matcher(tagged_json=TaggedJson(tags=tags, trigger="<"))


def test_tagged_text_is_one_of_its_choices(case: Case) -> None:
    values = (TaggedValue("<a>\n", None, "\n</a>", True, ("red", "", 'a "b"')),)
    tagged = TaggedJson(tags=(("<call>", values, "</call>"),), trigger="<call>")
    for text in ("red", "", 'a "b"', "re", "redred", "blue"):
        is_right = text in ("red", "", 'a "b"')
        assert matches(case, tagged, f"<call><a>\n{text}\n</a></call>") == is_right, text


def test_tagged_values_have_their_own_tags(case: Case) -> None:
    values = (TaggedValue("<a>", None, "</a>", True), TaggedValue("<b>", {"enum": [1, 2]}, "</b>", False))
    tagged = TaggedJson(tags=(("<call>", values, "</call>"),), trigger="<call>")
    for is_required in (False, True):
        for text, is_right in (
            ("<call><a>x < \n y</a></call>", True),
            ("<call><a></a><b>2</b></call>", True),
            ("<call><b>2</b></call>", False),
            ("<call><a>x</a><b>3</b></call>", False),
        ):
            assert matches(case, replace(tagged, is_required=is_required), text) == is_right, text
