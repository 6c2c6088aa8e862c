"""Grammars that are wrong, or made to take time and memory: each is refused with a reason, or ends quickly."""

import json
import random
import threading
from typing import Any

import numpy as np
import pytest

from nanovllm.errors import RequestError
from nanovllm.models.retrieval_model import END_TOKEN_ID
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.text.grammar_writer import MAX_REASON_CHARS, MAX_REFERENCE_DEPTH, _measure
from nanovllm.text.structured import LIMITS, GrammarCompiler, TokenMatcher


@pytest.fixture(scope="module")
def compiler(demo_tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer, 300, (END_TOKEN_ID,))


def answer(matcher: TokenMatcher, num_tokens: int, seed: int = 0) -> int:
    """Draw tokens from the masks. Returns how many there were until the end or an error."""
    rng = random.Random(seed)
    for i in range(num_tokens):
        if matcher.is_finished or matcher.error:
            return i
        choices = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        matcher.accept(int(choices[rng.randrange(len(choices))]))
    return num_tokens


def chain(num_references: int, link: str) -> dict[str, Any]:
    """Definitions, each of which refers to the next."""
    definitions = {f"d{i}": json.loads(link.replace("NEXT", f"#/$defs/d{i + 1}")) for i in range(num_references)}
    return {"$defs": definitions | {f"d{num_references}": {"type": "null"}}, "$ref": "#/$defs/d0"}


BAD_SCHEMAS = [
    ({"items": {"pattern": r"(a)\1"}}, "'pattern' at #/items cannot be used: backreferences are not supported"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
    ({"$ref": "#"}, "leads back to itself"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ("false", "schema is false"),
    ("[1]", "must be an object or boolean"),
    ("{} }] }, {", "is not a JSON schema: Extra data"),
    ('{"type":', "is not a JSON schema: Expecting value"),
    ("", "is not a JSON schema"),
    ({"type": {1, 2}}, "is not a JSON schema: Object of type set"),
    ({"minimum": 10**5000}, "is not a JSON schema"),
    ('{"minimum": 1' + "0" * 400 + "}", "number out of range"),
    ({"enum": ["\ud800"]}, "unexpected end of hex escape"),
    ({"const": float("nan")}, "cannot be used"),
]


BAD_REGEXES = (
    ("(a", "unclosed group"),
    (r"(a)\1", "backreferences are not supported"),
    ("(?=a)b", "look-around"),
    (r"a\b", "lookarounds not supported"),
    ("", "only the empty answer matches it"),
    (r"[^\x00-\U0010ffff]", "no answer matches it"),
    ("a\\", "incomplete escape"),
    ("\ud800", "is not valid Unicode text"),
    ("(" * 3000 + "a" + ")" * 3000, "cannot be used"),
)


def test_bad_grammar_is_refused_with_the_reason(compiler: GrammarCompiler) -> None:
    """tests/text/test_json_schema.py has the parts of schemas that a grammar cannot express."""
    cases: list[tuple[str, Any, str]] = [("json", schema, reason) for schema, reason in BAD_SCHEMAS]
    for kind, value, reason in [*cases, *(("regex", regex, reason) for regex, reason in BAD_REGEXES)]:
        with pytest.raises(RequestError, match=rf"^structured_outputs\.{kind} ") as refused:
            compiler.compile(StructuredOutputs(**{kind: value}))
        assert reason in str(refused.value) and len(str(refused.value)) < MAX_REASON_CHARS + 200


def test_regex_with_a_slash_or_a_line_break_stays_one_regex(compiler: GrammarCompiler) -> None:
    matcher = TokenMatcher(compiler.compile(StructuredOutputs(regex="a/ | b\nc: /d")), False)
    assert all(map(matcher.accept, b" b\nc: /d")) and matcher.is_finished


def test_too_large_is_refused_before_it_is_compiled(compiler: GrammarCompiler) -> None:
    for outputs, kind in (
        ({"regex": "a" * 200_001}, "regex"),
        ({"choice": ["ab" * 1000] * 101}, "choice"),
        ({"json": {"const": "a" * 200_000}}, "json"),
        ({"json": "[" * 200_001}, "json"),
        ({"json": "[" * 200_000}, "json"),
    ):
        with pytest.raises(
            RequestError, match=rf"^structured_outputs\.{kind} (has 20\d+ characters, at most|is not a)"
        ):
            compiler.compile(StructuredOutputs(**outputs))  # type: ignore[arg-type]
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"items": nested}
    with pytest.raises(RequestError, match="is not a JSON schema: maximum recursion"):
        compiler.compile(StructuredOutputs(json=nested))


LINKS = {
    "ref": '{"$ref": "NEXT"}',
    "object": '{"type": "object", "properties": {"a": {"$ref": "NEXT"}}, "required": ["a"]}',
    "allOf": '{"allOf": [{"type": "object", "properties": {"a": {"anyOf": [{"$ref": "NEXT"}, {"allOf": [{}, {}]}]}}}]}',
    "array": '{"oneOf": [{"type": "array", "prefixItems": [{"$ref": "NEXT"}], "items": false}, {"type": "null"}]}',
    "nested": '{"items": {"items": {"items": {"items": {"items": {"items": {"$ref": "NEXT"}}}}}}}',
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_references_nest_to_the_limit_and_no_deeper(compiler: GrammarCompiler, link: str) -> None:
    """llguidance follows them by recursion. A chain of 1600 objects overflowed the stack and killed the process."""
    with pytest.raises(RequestError, match=r"1501 references in \d+ levels.*at most 6000"):
        compiler.compile(StructuredOutputs(json=chain(1500, link)))
    height = _measure(chain(1, link))[0]
    deepest = StructuredOutputs(json=chain(MAX_REFERENCE_DEPTH // height - 2, link))
    outcome: list[Any] = []

    def compile_and_answer() -> None:
        try:
            outcome.append(answer(TokenMatcher(compiler.compile(deepest), False), 20))
        except RequestError as error:
            outcome.append(error)

    before = threading.stack_size(256 * 1024)  # the stack of the caller does not matter
    thread = threading.Thread(target=compile_and_answer)
    thread.start()
    thread.join()
    assert outcome and threading.stack_size(before) == 256 * 1024


REFUSED = {
    "optional properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}}},
    "many objects": {"json": {"anyOf": [{"type": "object", "properties": {f"a{i}": {}}} for i in range(2000)]}},
    "enum of arrays": {"json": {"enum": [[i] for i in range(15_000)]}},
    "products of unions": {"json": {"allOf": [{"anyOf": [{"minimum": i + j} for i in range(20)]} for j in range(20)]}},
    "multiples": {"json": {"type": "integer", "multipleOf": 1_000_000_007}},
}
ANSWERED = {
    "repeated repeats": {"regex": "((a{1000}){1000}){1000}"},
    "long repeat of one letter": {"regex": "x(a{100000})"},
    "exponential": {"regex": r"(.|\n)*a(.|\n){40}"},
    "exponential behind a prefix": {"regex": r"hello (.*a.{20}.*b.{30})+c"},
    "unicode classes": {"regex": r"(\p{L}|\p{N}){1,500}\w{1,500}[^a]{500}"},
    "stars of stars": {"regex": "(a*)*" * 2000},
    "prefix items": {"json": {"type": "array", "prefixItems": [{"type": "integer"}] * 6000}},
    "patterns in conjunction": {"json": {"allOf": [{"pattern": f"(a|b)*{c}(a|b){{20}}c"} for c in "abababab"]}},
    "a billion items": {"json": {"type": "array", "minItems": 10**9}},
    "doubled references": {"json": chain(100, '{"anyOf": [{"$ref": "NEXT"}, {"$ref": "NEXT"}]}')},
}
AMBIGUOUS: dict[str, Any] = {
    "$defs": {
        f"n{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/n{j}"}} for j in range(20)]}
        for i in range(20)
    },
    "$ref": "#/$defs/n0",
}


def test_hostile_grammar_is_refused_or_ends_its_request(compiler: GrammarCompiler) -> None:
    """Without LIMITS, each would take seconds or gigabytes."""
    for outputs in REFUSED.values():
        with pytest.raises(RequestError, match=r"cannot be used: .*(too big|too large|fuel exhausted)"):
            compiler.compile(StructuredOutputs(**outputs))  # type: ignore[arg-type]
    for name, answered in ANSWERED.items():
        matcher = TokenMatcher(compiler.compile(StructuredOutputs(**answered)), False)  # type: ignore[arg-type]
        answer(matcher, 100)
        assert matcher.error is None, name
    matcher = TokenMatcher(compiler.compile(StructuredOutputs(json=AMBIGUOUS)), False)
    assert answer(matcher, 100) > 0 and matcher.error is not None
    assert "became too complex: " in matcher.error and matcher.error.endswith("or send the request again")


def test_large_but_harmless_grammars_are_compiled(compiler: GrammarCompiler) -> None:
    names = [f"value {i}" for i in range(10_000)]
    for outputs in (
        {"choice": names},
        {"json": {"enum": names}},
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}}},
        {"json": {"type": "array", "items": {"type": "string", "maxLength": 20_000}}},
        {"json": chain(100, LINKS["object"])},
    ):
        matcher = TokenMatcher(compiler.compile(StructuredOutputs(**outputs)), False)  # type: ignore[arg-type]
        answer(matcher, 500)
        assert matcher.error is None


# -- a limit in the middle of an answer ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict(demo_tokenizer: Any) -> GrammarCompiler:
    """A compiler whose grammars have few states."""
    return GrammarCompiler(demo_tokenizer, 300, (END_TOKEN_ID,), LIMITS | {"max_lexer_states": 400})


SLOW = StructuredOutputs(regex=r"(ab)*(ok!|x[ab]*a[ab]{40})")  # has many states, unless the answer has no "x"


def test_answer_that_exceeds_a_limit_ends_and_the_next_compiles_anew(strict: GrammarCompiler) -> None:
    """The automaton that all answers share is useless afterwards, so the answers that use it end, too."""
    running, slow = (TokenMatcher(strict.compile(SLOW), False) for _ in range(2))
    assert running.accept(ord("o")) and slow.accept(ord("x"))
    rng = random.Random(0)
    for _ in range(5000):
        if slow.error is None:
            slow.accept(rng.choice(b"ab"))
            slow.mask()
    assert slow.error is not None and slow.error.startswith("structured_outputs became too complex: ")
    assert "too many states" in slow.error
    assert not slow.is_finished and not slow.accept(ord("a"))
    for row in slow.masks_for([97]):
        assert np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist() == [*range(300)]
    assert not running.accept(ord("k")) and running.error == slow.error
    after = TokenMatcher(strict.compile(SLOW), False)
    assert all(map(after.accept, b"abok!")) and after.error is None and after.is_finished


@pytest.mark.parametrize("limits", [{}, {"step_max_items": 1000}], ids=["to read the token", "for the mask after it"])
def test_draft_token_that_takes_too_many_items_ends_the_answer_only_if_it_is_chosen(
    demo_tokenizer: Any, limits: dict[str, int]
) -> None:
    """Regression: the answer ended with an error, but without draft tokens it would have taken another way."""
    schema = {"$defs": AMBIGUOUS["$defs"], "anyOf": [{"const": "ok"}, {"$ref": "#/$defs/n0"}]}
    compiler = GrammarCompiler(demo_tokenizer, 300, (END_TOKEN_ID,), LIMITS | limits)
    grammar = compiler.compile(StructuredOutputs(json=schema))
    alone, drafting = TokenMatcher(grammar, False), TokenMatcher(grammar, False)
    for token_id in b'"ok"':
        rows = drafting.masks_for([*b"[[["])
        assert len(rows) == 4 and np.array_equal(rows[0], alone.mask())
        assert drafting.is_slow, "it gets more draft tokens"
        assert alone.accept(token_id) and drafting.accept(token_id)
    assert drafting.is_finished and drafting.error is None
    alone, drafting = TokenMatcher(grammar, False), TokenMatcher(grammar, False)
    drafting.masks_for([*b"[[["])
    alone.mask()
    while alone.accept(ord("[")):
        assert drafting.accept(ord("["))
        alone.mask()
    assert not drafting.accept(ord("[")) and drafting.error == alone.error
    assert alone.error is not None and "became too complex" in alone.error


def test_draft_tokens_that_use_up_the_automaton_end_the_answer(strict: GrammarCompiler) -> None:
    matcher = TokenMatcher(strict.compile(SLOW), False)
    assert all(map(matcher.accept, b"abab"))
    rows = matcher.masks_for([*b"x", *random.Random(0).choices(b"ab", k=1000)])
    assert len(rows) == 1002 and not matcher.accept(ord("o"))
    assert matcher.error is not None and "became too complex" in matcher.error
