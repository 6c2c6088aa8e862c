"""Every answer that a grammar of tool calls admits is parsed to the calls that it has, in all formats, however split.

The answers are drawn at random from the masks, and contain what could be mistaken for a part of a call. They are read
once more by `read`, which knows the grammar's parts and takes them one after the other.
"""

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import examples
from tokenizer_kinds import add_tokens
from transformers import AutoTokenizer

from nanovllm.entrypoints.server.tool_calls import HERMES, LLAMA, QWEN_TAGS, CallFormat, CallParser, ToolCallDelta
from nanovllm.models.retrieval_model import END_TOKEN_ID, save_tokenizer
from nanovllm.sampling_params import ReasoningTags, StructuredOutputs, TaggedJson
from nanovllm.text.reasoning import ReasoningSplitter
from nanovllm.text.structured import GrammarCompiler, TokenMatcher

FORMATS = {"hermes": HERMES, "llama": LLAMA, "qwen": QWEN_TAGS}
# As in Qwen3, these are tokens. They take the places of bytes that UTF-8 has no use for
TOKENS = {"<think>": 0xF8, "</think>": 0xF9, "<tool_call>": 0xFA, "</tool_call>": 0xFB, "<|python_tag|>": 0xFC}
SCHEMAS: dict[str, dict[str, Any]] = {
    "write": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "path-2": {"type": ["string", "null"]},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "lines": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "mode": {"enum": ["a", "b\nc", "</parameter>\n</function>", ""]},
            "any": {},
            "more": {"type": "object"},
            "flag": {"type": ["boolean", "null"]},
            "where": {"$ref": "#/$defs/place"},
        },
        "required": ["text", "lines"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["x", "</tool_call>", 3]}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = list(SCHEMAS.items())
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<function=write>", "<function=now>", "</function>", "<parameter=text>", "\n"),
    *("<parameter=count>", "<parameter=unknown>", "</parameter>", "\n</parameter>\n", "</parameter>\n</function>", " "),
    *("<|python_tag|>", "; ", '{"name": "write", "parameters": {', '"', '\\"', "\\\\", "\\u00e9", "{", "}", "[", "]"),
    *("é😀", "text", "</think>", "<think>", "<", "</", ",", ": ", "1", "-0.5e3", "true", "null", '"text": "', "\t\r"),
)
IN_VALUE = "\x7f"
ENDINGS = (
    '"',
    "]",
    "}",
    "\n</parameter>\n",
    "</function>",
    "\n</tool_call>",
    "0",
    "l",
    "e",
    ": ",
    "</think>",
    "<",
    ",",
)


class Drawer:
    """Draws answers from a compiler's masks. Each token is a byte or one of `tokens`."""

    def __init__(self, directory: Path, tokens: dict[str, int]) -> None:
        save_tokenizer(directory)
        add_tokens(directory, tokens)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.compiler = GrammarCompiler(self.tokenizer, 258, (END_TOKEN_ID,))
        self._texts = {token_id: token.encode() for token, token_id in tokens.items()}

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def matcher(self, outputs: StructuredOutputs, tags: ReasoningTags | None) -> TokenMatcher:
        return TokenMatcher(self.compiler.compile(outputs, tags), False)

    def draw(self, outputs: StructuredOutputs, tags: ReasoningTags | None, seed: int) -> str | None:
        """Return an answer, or None if it does not end soon."""
        rng, matcher = random.Random(seed), self.matcher(outputs, tags)
        answer: list[int] = []

        def take(text: str) -> bool:
            """Take as much of the text as is allowed. A tag is one token or spelled."""
            token_ids = self.encode(text) if rng.random() < 0.7 else list(text.encode())
            for i, token_id in enumerate(token_ids):
                if token_id not in allowed(matcher) or not matcher.accept(token_id):
                    return i > 0
                answer.append(token_id)
            return True

        num_free = rng.choice((30, 80, 150))
        for step in range(500):
            choices = allowed(matcher)
            if END_TOKEN_ID in choices and (step >= num_free or rng.random() < 0.05 or choices == [END_TOKEN_ID]):
                text = b"".join(self._texts.get(token_id, bytes([token_id])) for token_id in answer)
                return text.decode()
            if step < num_free and rng.random() < 0.8 and take(rng.choice(FRAGMENTS)):
                continue
            if step >= num_free and any(take(ending) for ending in rng.sample(ENDINGS, len(ENDINGS))):
                continue
            texts = [choice for choice in choices if choice != END_TOKEN_ID]
            printable = [choice for choice in texts if 32 < choice < 127]
            token_id = rng.choice(printable or texts)
            assert matcher.accept(token_id)
            answer.append(token_id)
        return None

    def admits(self, outputs: StructuredOutputs, text: str) -> bool:
        """`text`: with IN_VALUE in place of "<" in values, where tags are spelled."""
        matcher = self.matcher(outputs, None)
        token_ids = [ord("<") if token_id == ord(IN_VALUE) else token_id for token_id in self.encode(text)]
        return all(
            token_id in allowed(matcher) and matcher.accept(token_id) for token_id in token_ids
        ) and END_TOKEN_ID in allowed(matcher)


def allowed(matcher: TokenMatcher) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()
    assert matcher.error is None, matcher.error
    return found


@pytest.fixture(scope="module", params=["letters", "tokens"])
def drawer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drawer:
    """Tags are spelled in letters, or each is a token."""
    return Drawer(tmp_path_factory.mktemp("tokenizer"), TOKENS if request.param == "tokens" else {})


# -- reading an answer -------------------------------------------------------------------------------------------------

Part = str | tuple[str, Any]  # text, or a call's name and arguments


def read(tagged: TaggedJson, text: str, has_form: bool) -> list[Part]:
    """Read an answer by the parts of its grammar."""
    parts: list[Part] = []
    position = 0
    while position < len(text):
        rest = text[position:]
        if parts and isinstance(parts[-1], tuple) and tagged.is_required | has_form:
            assert rest.startswith(tagged.separator)
            rest = rest.removeprefix(tagged.separator)
        elif tagged.trigger and not (tagged.is_required | has_form):
            before, found, _ = rest.partition(tagged.trigger)
            parts += [before] if before.strip() else []
            if not found:
                return parts
            rest = rest.removeprefix(before)
        elif not parts and not any(rest.startswith(begin) for begin, _, _ in tagged.tags):
            return [text]
        elif parts:
            assert rest.startswith(tagged.separator)
            rest = rest.removeprefix(tagged.separator)
        call, rest = read_call(tagged, rest)
        parts.append(call)
        position = len(text) - len(rest)
    return parts


def read_call(tagged: TaggedJson, text: str) -> tuple[tuple[str, Any], str]:
    decoder = json.JSONDecoder()
    for (begin, schema, end), name in zip(tagged.tags, tagged.names, strict=True):
        if not text.startswith(begin):
            continue
        rest = text.removeprefix(begin)
        arguments: Any = {}
        if not isinstance(schema, tuple):
            arguments, length = decoder.raw_decode(rest)
            rest = rest[length:]
        for value in schema if isinstance(schema, tuple) else ():
            if not rest.startswith(value.begin):
                assert not value.is_required
                continue
            rest = rest.removeprefix(value.begin)
            key = value.begin.strip().removeprefix("<parameter=").removesuffix(">")
            if value.schema is None:
                arguments[key], found, rest = rest.partition(value.end)
                assert found
            else:
                arguments[key], length = decoder.raw_decode(rest)
                assert rest[length:].startswith(value.end)
                rest = rest[length:].removeprefix(value.end)
        assert rest.startswith(end), rest
        return (name, arguments), rest.removeprefix(end)
    raise AssertionError(f"no call begins {text[:50]!r}")


def parse(
    call_format: CallFormat, pieces: list[str], tags: ReasoningTags | None, *, has_form: bool
) -> tuple[str, list[Part]]:
    """Return the reasoning and the parts that the server's parsers find."""
    parser = CallParser(call_format, SCHEMAS, is_alternative=has_form)
    splitter = ReasoningSplitter(tags)
    reasoning, parts, calls = "", list[Part](), list[list[str]]()
    for i, piece in enumerate(pieces):
        _, more, _, piece = splitter.split(piece, is_last=i == len(pieces) - 1)
        reasoning += more
        deltas = parser.feed(piece)
        for delta in [*deltas, *(parser.finish() if i == len(pieces) - 1 else ())]:
            if isinstance(delta, ToolCallDelta):
                if delta.call_id:
                    calls.append([])
                    parts.append((delta.name, len(calls) - 1))
                calls[-1].append(delta.arguments)
            elif parts and isinstance(parts[-1], str):
                parts[-1] += delta
            else:
                parts.append(delta)
    return reasoning, [
        part if isinstance(part, str) else (part[0], json.loads("".join(calls[part[1]]))) for part in parts
    ]


def stripped(parts: list[Part]) -> list[Part]:
    """Without the white space on either side of calls, which is lost."""
    texts = [part.strip() if isinstance(part, str) else part for part in parts]
    return [part for part in texts if part]


def split(text: str, rng: random.Random) -> list[str]:
    edges = [0, *sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice((0, 1, 5, len(text))))), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


# -- the cases ---------------------------------------------------------------------------------------------------------

FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"json": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}},
    {"regex": "[a-z<>_/\n]{0,30}"},
    {"choice": ("yes", "<tool_call>", "<function=write>")},
)
TAGS = (None, ReasoningTags("<think>", "</think>"), ReasoningTags("<think>", "</think>", has_begun=True))


def cases(call_format: CallFormat) -> Iterator[tuple[StructuredOutputs, ReasoningTags | None]]:
    for is_required, is_single, form in (
        (True, False, 0),
        (True, True, 0),
        (False, False, 0),
        (False, True, 0),
        (False, False, 1),
        (False, True, 2),
        (False, False, 3),
    ):
        tagged = call_format.constraint(TOOLS, is_required=is_required, is_single=is_single)
        for tags in TAGS:
            yield StructuredOutputs(tagged_json=tagged, **FORMS[form]), tags


def has_form(outputs: StructuredOutputs) -> bool:
    return bool(outputs.json or outputs.regex or outputs.choice)


def answer_of(text: str, tags: ReasoningTags | None) -> str:
    """Return the answer after its reasoning."""
    if tags is None or not (tags.has_begun or text.lstrip().startswith(tags.begin)):
        return text if tags is None or has_begun_with_text(text) else text.lstrip()
    return text.partition(tags.end)[2].lstrip(" \t\r\n")


def has_begun_with_text(text: str) -> bool:
    return text == text.lstrip()


@pytest.mark.parametrize("name", FORMATS)
def test_every_admitted_text_is_parsed_to_its_calls(drawer: Drawer, name: str) -> None:
    """Regression: a value between tags was cut at a tag that it contained, and the rest of the answer was lost."""
    call_format = FORMATS[name]
    num_calls = num_drawn = 0
    all_cases = [*cases(call_format)]
    for seed in range(examples(360)):
        outputs, tags = all_cases[seed % len(all_cases)]
        tagged, rng = outputs.tagged_json, random.Random(seed)
        text = drawer.draw(outputs, tags, seed)
        if text is None:
            continue
        num_drawn += 1
        assert tagged is not None
        expected = stripped(read(tagged, answer_of(text, tags), has_form(outputs)))
        for pieces in ([text], split(text, rng), list(text) or [""]):
            found = parse(call_format, pieces, tags, has_form=has_form(outputs))
            assert stripped(found[1]) == expected, (seed, text, outputs.regex, tags)
        calls = [part for part in expected if isinstance(part, tuple)]
        assert len(calls) <= 1 or not tagged.is_single
        assert calls or not tagged.is_required
        num_calls += len(calls)
        for called, arguments in calls:
            check_arguments(called, arguments)
    assert num_drawn > examples(360) / 2 and num_calls > num_drawn / 8, (num_drawn, num_calls)


def check_arguments(name: str, arguments: Any) -> None:
    """The schemas have few keywords, and are checked one by one."""
    properties = SCHEMAS[name]["properties"]
    assert arguments.keys() <= properties.keys() and {*SCHEMAS[name].get("required", ())} <= arguments.keys()
    for key, value in arguments.items():
        kind = {
            "text": str,
            "path-2": str | None,
            "count": int,
            "ratio": int | float,
            "lines": list,
            "mode": str,
            "any": object,
            "more": dict,
            "flag": bool | None,
            "where": str | int,
        }[key]
        assert isinstance(value, kind), (key, value)
    assert all(isinstance(line, str) for line in arguments.get("lines", ()))
    assert "mode" not in arguments or arguments["mode"] in properties["mode"]["enum"]
    assert "where" not in arguments or arguments["where"] in SCHEMAS[name]["$defs"]["place"]["enum"]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(FRAGMENTS) for _ in range(rng.choice((0, 1, 2, 8)))).replace("<", IN_VALUE)


def render(call_format: CallFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Write calls as models do."""
    if call_format.is_json:
        key = call_format.argument_keys[0]
        texts = [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]
        if call_format is LLAMA:
            return "; ".join(texts)
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    texts = []
    for name, arguments in calls:
        values = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in arguments.items()
        }
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        texts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(texts)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_are_written_as_models_do_are_admitted_and_parsed(drawer: Drawer, name: str) -> None:
    call_format = FORMATS[name]
    outputs = StructuredOutputs(tagged_json=call_format.constraint(TOOLS, is_required=True, is_single=False))
    num_admitted = 0
    for seed in range(examples(240)):
        rng = random.Random(seed)
        calls: list[tuple[str, dict[str, Any]]] = []
        for _ in range(rng.randrange(1, 4)):
            arguments: dict[str, Any] = {"text": random_text(rng)}
            if rng.random() < 0.3:
                arguments["count"] = rng.randrange(-1000, 1000)
            arguments["lines"] = [random_text(rng) for _ in range(rng.randrange(4))]
            if rng.random() < 0.3:
                arguments["more"] = {random_text(rng): [random_text(rng), None, 0.5]}
            calls.append(("write", arguments))
        text = render(call_format, calls)
        is_admitted = drawer.admits(outputs, text)
        assert is_admitted or not call_format.is_json, text
        num_admitted += is_admitted
        text = text.replace(IN_VALUE, "<")
        if is_admitted:
            for pieces in ([text], split(text, rng)):
                _, parts = parse(call_format, pieces, None, has_form=False)
                expected = json.loads(json.dumps(calls).replace("\\u007f", "<").replace(IN_VALUE, "<"))
                assert stripped(parts) == list(map(tuple, expected)), text
    assert num_admitted > examples(240) / 8
