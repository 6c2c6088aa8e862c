"""Tool calls in an answer's text, in both formats, however the text is split."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from nanovllm.entrypoints.server.call_formats import HERMES, LLAMA, QWEN_TAGS, CallFormat, call_format_of
from nanovllm.entrypoints.server.call_parser import WINDOW_CHARS, CallParser, Schemas, ToolCallDelta

FORMATS = pytest.mark.parametrize("call_format", [HERMES, LLAMA], ids=["hermes", "llama"])
CALL = '{"name": "weather", "arguments": {"city": "Zürich {\\"}"}}'
LLAMA_CALL = '{"name": "add", "parameters": {"a": [1, {"b": null}], "c": "; "}}'
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<tool_", "call>", "<|python_tag|>", "<|python", ";", " ", "\n", "<", "{", "}"),
    *('"', "\\", "text", "0", "[", "]", ":", CALL, LLAMA_CALL, '{"name": "f"}', '{"a": 1}', '{"name": "f", "'),
    *(f"<tool_call>\n{CALL}\n</tool_call>", f"<|python_tag|>{LLAMA_CALL}", '{"name": "f", "parameters": 3}'),
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8).map("".join)


def parse(
    call_format: CallFormat, pieces: list[str], schemas: Schemas | None = None, parser: CallParser | None = None
) -> list[Any]:
    """Return what a parser finds: contents, adjacent ones joined, and the calls' names and arguments."""
    parser = parser or CallParser(call_format, schemas or {})
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    joined: list[Any] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta) and delta.call_id:
            joined.append((delta.name, delta.arguments))
        elif isinstance(delta, ToolCallDelta):
            joined[-1] = (joined[-1][0], joined[-1][1] + delta.arguments)
        elif joined and isinstance(joined[-1], str):
            joined[-1] += delta
        else:
            joined.append(delta)
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta) and delta.call_id]
    assert [call.call_index for call in calls] == list(range(len(calls)))
    assert len({call.call_id for call in calls}) == len(calls)
    return joined


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def calls_by_json(call_format: CallFormat, text: str) -> list[tuple[str, str]]:
    """The oracle: try json's own decoder after each opening of the whole text."""
    calls = []
    position, may_begin = 0, call_format.is_bare
    while True:
        if not may_begin:
            found = text.find(call_format.opening, position)
            if found < 0:
                return calls
            position = found + len(call_format.opening)
        may_begin = False
        start = len(text) - len(text[position:].lstrip(" \t\r\n"))
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        after = text[end:].lstrip(" \t\r\n")
        if not (after.startswith(call_format.closing) or call_format.closing.startswith(after)):
            after = text[end:]  # models leave the closing out
        keys = [key for key in call_format.argument_keys if isinstance(value, dict) and key in value]
        arguments = value[keys[0]] if keys else {}
        has_keys = bool(keys) or not call_format.needs_arguments
        is_call = isinstance(value, dict) and bool(value.get("name")) and has_keys and isinstance(arguments, dict)
        if not is_call or value.keys() - {"name", *keys}:
            continue
        calls.append((value["name"], json.dumps(arguments, ensure_ascii=False)))
        is_closed = after.startswith(call_format.closing) or call_format.closing.startswith(after)
        position = min(len(text) - len(after) + len(call_format.closing) * is_closed, len(text))
        rest = text[position:].lstrip(" \t\r\n")
        if call_format.separator and rest.startswith(call_format.separator):
            position, may_begin = len(text) - len(rest) + 1, True


@FORMATS
@settings(max_examples=examples(300))
@given(text=TEXTS)
def test_parser_finds_the_calls_that_json_finds_and_keeps_the_rest(call_format: CallFormat, text: str) -> None:
    parsed = parse(call_format, [text])
    calls = [part for part in parsed if isinstance(part, tuple)]
    assert calls == calls_by_json(call_format, text)
    position = 0
    for content in (part for part in parsed if isinstance(part, str)):
        position = text.index(content, position) + len(content)
    if not calls:
        assert "".join(content for content in parsed if isinstance(content, str)) == text


WEATHER_CALL, ADD_CALL = ("weather", '{"city": "Zürich {\\"}"}'), ("add", '{"a": [1, {"b": null}], "c": "; "}')
TAGS_IN_TEXT = json.dumps({"text": "a </tool_call> b <tool_call> c"})
BROKEN = '<tool_call>\n{"name": "f, "arguments": {}}\n</tool_call>'
PARSED: list[tuple[CallFormat, str, list[Any]]] = [
    # Regression: a call at the end that is not closed was content if the answer was not streamed
    *((HERMES, f"Hm. <tool_call>{CALL}{end}", ["Hm.", WEATHER_CALL]) for end in ("", "\n", "\n</tool_")),
    # Regression: a call that is not closed, and the next one, were content
    (HERMES, f"<tool_call>\n{CALL}\n<tool_call>\n{CALL}\nDone.", [WEATHER_CALL, WEATHER_CALL, "\nDone."]),
    (
        *(HERMES, f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\nDone."),
        ["Let me see.", WEATHER_CALL, WEATHER_CALL, "\nDone."],
    ),
    (HERMES, f'<tool_call>{{"name": "write", "arguments": {TAGS_IN_TEXT}}}</tool_call>', [("write", TAGS_IN_TEXT)]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>\n', [("now", "{}")]),
    (HERMES, f"{BROKEN}\n<tool_call>{CALL}</tool_call>", [BROKEN, WEATHER_CALL]),
    *((HERMES, text, [text]) for text in ['<tool_call>{"name": "f", "arguments": {"x": "a']),  # it is cut off
    (LLAMA, f"\n{LLAMA_CALL}; {LLAMA_CALL}\n", [ADD_CALL, ADD_CALL]),
    (LLAMA, f"<|python_tag|>{LLAMA_CALL};{LLAMA_CALL}", [ADD_CALL, ADD_CALL]),
    (LLAMA, f"I add. <|python_tag|>{LLAMA_CALL}", ["I add.", ADD_CALL]),
    (LLAMA, f"I add. {LLAMA_CALL}", [f"I add. {LLAMA_CALL}"]),
    (LLAMA, f"{LLAMA_CALL}; that is all", [ADD_CALL, "; that is all"]),
]


def test_parser_finds_calls_and_the_text_around_them_whole_or_streamed() -> None:
    for call_format, text, expected in PARSED:
        assert parse(call_format, [text]) == parse(call_format, list(text)) == expected, text


def test_answer_that_is_calls_or_text_has_no_calls_after_text() -> None:
    """A text of a given form can contain what looks like a call."""
    hermes, llama = f"<tool_call>{CALL}</tool_call>", '{"name": "add", "parameters": {}}'
    tagged = "<tool_call><function=weather></function></tool_call>"
    for call_format, call in ((HERMES, hermes), (LLAMA, llama), (QWEN_TAGS, tagged)):
        schemas: dict[str, Any] = {"weather": {}, "add": {}}
        for text, num_calls in ((call, 1), (f"\n{call}", 1), (f'["{call}"]', 0), (f"text {call}", 0)):
            for pieces in ([text], list(text)):
                found = parse(call_format, pieces, parser=CallParser(call_format, schemas, is_alternative=True))
                assert sum(isinstance(part, tuple) for part in found) == num_calls, (text, found)
                assert num_calls or found == [text]
    assert parse(LLAMA, [llama], parser=CallParser(LLAMA, {"other": {}}, is_alternative=True)) == [llama]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {}',  # not complete
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": {}, "more": 1}',
        '{"name": "", "arguments": {}}',
        '{"name": ["f"], "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {"x": "a\nb"}}',
        '{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": ' + '{"x": ' * 100_000 + "1" + "}" * 100_001,
    ],
)
def test_parser_what_is_not_a_valid_call_is_content(text: str) -> None:
    tagged = f"<tool_call>{text}</tool_call>"
    assert parse(HERMES, [tagged]) == [tagged]
    assert parse(LLAMA, [text]) == [text]


def test_parser_content_streams_at_once() -> None:
    parser = CallParser(HERMES, {})
    assert [parser.feed(text) for text in ("Hel", "lo <tool", " x")] == [["Hel"], ["lo"], [" <tool x"]]


def test_call_in_json_is_returned_when_it_has_ended_and_content_when_it_is_broken() -> None:
    parser = CallParser(HERMES, {})
    for text in ('<tool_call>\n{"name": "f", "arguments": ', '{"city": "Bern', '"}', "}", "\n"):
        assert parser.feed(text) == []
    (call,) = parser.feed("</tool_call>")
    assert isinstance(call, ToolCallDelta) and call.call_id.startswith("call_")
    assert (call.name, call.arguments) == ("f", '{"city": "Bern"}')
    assert parser.feed('<tool_call>{"name": hm') == ['<tool_call>{"name": hm']


def test_call_format_comes_from_the_template_or_the_architecture() -> None:
    formats = {
        "{%- for t in tools %}<tools>{{ t }}</tools>{% endfor %}<tool_call>": HERMES,
        '{{ \'Respond in the format {"name": function name, "parameters": dictionary of\' }}': LLAMA,
        "Qwen3ForCausalLM": HERMES,
        "LlamaForCausalLM": LLAMA,
        "{{ messages }}": None,
        "<tool_call>\n<function=example_function_name>": QWEN_TAGS,
    }
    assert {source: call_format_of(source) for source in formats} == formats


# -- calls between tags ----------------------------------------------------------------------------------------------

TAGGED = """<tool_call>
<function=weather>
<parameter=city>
Bern
"quoted"
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
WEATHER = {"weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
TAGGED_FRAGMENTS = [TAGGED, "<tool_", "<function=f>", "<par", "</function>", " ", "\n", "text", "<"]
TAGGED_FRAGMENTS += TAGGED.splitlines(keepends=True)
TAGGED_TEXTS = st.lists(st.sampled_from(TAGGED_FRAGMENTS), max_size=12).map("".join)


def test_tagged_calls_have_values_of_their_schema() -> None:
    call = ("weather", '{"city": "Bern\\n\\"quoted\\"", "days": 3}')
    assert parse(QWEN_TAGS, list(f"Let me see.\n{TAGGED}\n{TAGGED}\nDone."), WEATHER) == [
        "Let me see.",
        call,
        call,
        "\nDone.",
    ]
    assert parse(QWEN_TAGS, [TAGGED])[0][1].endswith('"days": "3"}')  # a schema that says nothing
    assert parse(QWEN_TAGS, ["<tool_call><function=now></function></tool_call>"]) == [("now", "{}")]
    assert parse(QWEN_TAGS, ["<tool_call> is a tag"]) == ["<tool_call> is a tag"]


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ("<parameter=city>\nBern\n</function>\n</tool_call>", {"city": "Bern"}),
        ("<parameter=city>\nBern\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", None),
        ("<parameter=city>\nBern\n<parameter=days>\n3\n</function>\n</tool_call>", None),
        ("<parameter=city>Bern</parameter><parameter=days>3</parameter></function></tool_call>", None),
        ("<parameter=city>Bern<parameter=days>3</function></tool_call>", None),
        (" <parameter=city>\n Bern\n </parameter>\n\n </function>\n</tool_call>", {"city": " Bern"}),
        ("<parameter=city>\nBern</parameter>\n<parameter=days> 3 </parameter>\n</tool_call>", None),
        ("<parameter=city>\nBern\n</parameter>\n</parameter>\n</function>\n</tool_call>", {"city": "Bern"}),
        ("<parameter=city>\nBern\n</parameter>\n</function>", {"city": "Bern"}),
        ("<parameter=city>\nBern\n</tool_call>", {"city": "Bern"}),
        ("<parameter=city>\nBern\n</parameter>\n</tool", {"city": "Bern"}),
        (
            "<parameter=city>\na </parameter> b </function> c\n</parameter>\n</function>\n</tool_call>",
            {"city": "a </parameter> b </function> c"},
        ),
        ("<parameter=city>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>", {"city": "<parameter=x>\n1"}),
        ("<parameter=city>\n\n</parameter>\n</function>\n</tool_call>", {"city": ""}),
        ("<parameter=city>\n</parameter>\n</function>\n</tool_call>", {"city": ""}),
        (
            '<parameter=list>\n["</parameter></function>", "a\\""]\n</parameter>\n</function>\n</tool_call>',
            {"list": ["</parameter></function>", 'a"']},
        ),
        ('<parameter=list>\n["a, b\n</parameter>\n</function>\n</tool_call>', {"list": '["a, b'}),
        ("<parameter=flag>\nTrue\n</parameter>\n</function>\n</tool_call>", {"flag": True}),
        ("</function>\n</tool_call>", {}),
        ("</tool_call>", {}),
    ],
)
def test_tagged_call_with_tags_left_out_is_whole_and_does_not_swallow_the_next(inner: str, arguments: Any) -> None:
    """Regression: without its closing tag a value was lost, and the next call with it."""
    schemas = {
        "weather": {
            "properties": WEATHER["weather"]["properties"] | {"list": {"type": "array"}, "flag": {"type": "boolean"}}
        }
    }
    expected = ("weather", {"city": "Bern", "days": 3} if arguments is None else arguments)
    call = f"<tool_call>\n<function=weather>\n{inner}"
    texts = [call, f"Hm.\n{call}"] + [f"{call}\n{TAGGED}"] * inner.endswith("</tool_call>")
    for text in texts:
        for pieces in ([text], list(text), split(text, [7, 20, 33, 48])):
            found = parse(QWEN_TAGS, pieces, schemas)
            calls = [(part[0], json.loads(part[1])) for part in found if isinstance(part, tuple)]
            assert calls == [expected] + [("weather", {"city": 'Bern\n"quoted"', "days": 3})] * (TAGGED in text[1:]), (
                text
            )
            assert [part for part in found if isinstance(part, str)] == ["Hm."] * text.startswith("Hm.")


def test_tagged_call_needs_no_opening_if_the_tool_is_known() -> None:
    """Qwen3-Coder leaves <tool_call> out."""
    call = TAGGED.removeprefix("<tool_call>\n")
    for text in (f"Hm.\n{call}", f"Hm.\n{call}\n{call}", f"Hm.\n{call.removesuffix('</tool_call>')}"):
        for pieces in ([text], list(text)):
            found = parse(QWEN_TAGS, pieces, WEATHER)
            assert found == [
                "Hm.",
                *[("weather", '{"city": "Bern\\n\\"quoted\\"", "days": 3}')] * text.count("<function="),
            ]
    text = "The tag <function=other> is not a call."
    assert parse(QWEN_TAGS, list(text), WEATHER) == [text]


def test_tagged_call_of_an_unknown_tool_is_returned() -> None:
    """The client tells the model which tools there are."""
    text = TAGGED.replace("weather", "wether")
    assert parse(QWEN_TAGS, [text], WEATHER) == [("wether", '{"city": "Bern\\n\\"quoted\\"", "days": "3"}')]
    assert parse(HERMES, ['<tool_call>{"name": "wether", "arguments": {}}</tool_call>']) == [("wether", "{}")]


def test_tagged_call_that_is_cut_off_stays_as_it_is() -> None:
    """A client might execute a call with a part of a value."""
    for text, arguments in (
        (TAGGED[:60], "{"),
        (TAGGED[: TAGGED.index("\n</parameter>") + 12], "{"),
        (TAGGED[: TAGGED.index("<parameter=days>") + 5], '{"city": "Bern\\n\\"quoted\\""'),
    ):
        parser = CallParser(QWEN_TAGS, WEATHER)
        deltas = parser.feed(text) + parser.finish(is_cut=True)
        assert "".join(delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta)) == arguments, text


@pytest.mark.parametrize("call_format", [HERMES, LLAMA, QWEN_TAGS], ids=["hermes", "llama", "qwen"])
@settings(max_examples=examples(300))
@given(data=st.data(), cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_parser_any_split_gives_the_same_result(call_format: CallFormat, data: st.DataObject, cuts: list[int]) -> None:
    text = data.draw(TEXTS if call_format.is_json else TAGGED_TEXTS)
    whole = parse(call_format, [text], WEATHER)
    assert parse(call_format, split(text, cuts), WEATHER) == whole
    assert parse(call_format, list(text), WEATHER) == whole


class CountingParser(CallParser):
    """Counts the characters that its states copy, search or decode."""

    num_chars = 0

    def _go_on(self, position: int, advance: Any) -> None:
        self.num_chars += len(self._text)
        super()._go_on(position, advance)

    def _reach_end(self, begin: int) -> bool:
        start = max(begin, self._object_end)
        is_reached = super()._reach_end(begin)
        self.num_chars += self._object_end - start
        return is_reached

    def _read_call(self, begin: int) -> Any:
        self.num_chars += self._object_end - begin
        return super()._read_call(begin)


@pytest.mark.slow
@pytest.mark.parametrize("call_format", [HERMES, LLAMA, QWEN_TAGS], ids=["hermes", "llama", "qwen"])
def test_parser_reads_each_character_a_limited_number_of_times(call_format: CallFormat) -> None:
    """The server parses on the thread that serves all connections. A hostile text makes calls end late or nowhere."""
    schemas = {"f": {"properties": {"list": {"type": "array"}}}}
    opening = call_format.opening
    units = ("<", "\n", '"', '\\"', '"\n', "</tool_call>", "{", "[", f"{opening}", f'{opening}{{"', f"{opening}{{")
    units += (f'{opening}{{"a', f'{opening}"', "<parameter=a>1</parameter>", "<parameter=a>", "<function=f>", "; {")
    for unit in units:
        for begin in ("", f'{opening}{{"', f"{opening}<function=f>", f"{opening}<function=f><parameter=list>"):
            text = begin + unit * 10_000
            for pieces in ([text], [text[start : start + 100] for start in range(0, len(text), 100)]):
                parser = CountingParser(call_format, schemas)
                parse(call_format, pieces, parser=parser)
                assert parser.num_chars <= 2 * WINDOW_CHARS * len(text) / len(unit), (unit, begin)


def test_tagged_calls_take_a_schema_that_is_none() -> None:
    """Regression: the schemas of these tools are not checked as a whole, and a number was an internal error."""
    schema = {"properties": {"city": {"anyOf": 5}, "days": 5}, "required": 5}
    ((_, values, _),) = QWEN_TAGS.constraint([("weather", schema)], is_required=True, is_single=False).tags
    assert [(value[1], value[3]) for value in values] == [(None, False)] * 2
    assert parse(QWEN_TAGS, [TAGGED], {"weather": schema})[0][1].endswith('"days": "3"}')


def test_tagged_calls_are_constrained_by_their_tags() -> None:
    schema = {"properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/d"}}, "required": ["city"]}
    schema["$defs"] = {"d": {"type": "integer"}}
    ((begin, values, end),) = QWEN_TAGS.constraint([("f", schema)], is_required=True, is_single=False).tags
    assert (begin, end) == ("<tool_call>\n<function=f>\n", "</function>\n</tool_call>")
    assert [value[1:4] for value in values] == [
        (None, "\n</parameter>\n", True),
        ({"$defs": schema["$defs"], "$ref": "#/$defs/d"}, "\n</parameter>\n", False),
    ]


def test_enum_of_numbers_and_constants_are_enforced_between_tags() -> None:
    """Regression: without a type, an enum of numbers was written as any text and read as a string, and a text with a
    `const` could be another one.
    """
    schemas = {"a": {"enum": [1, 2]}, "b": {"enum": ["x", 3]}, "c": {"type": "string", "const": "y"}}
    constraint = QWEN_TAGS.constraint([("f", {"properties": schemas})], is_required=True, is_single=True)
    values = [(value.schema, value.choices) for value in constraint.tags[0][1]]
    assert values == [(schemas["a"], ()), (schemas["b"], ()), (None, ("y",))]
    text = "<tool_call>\n<function=f>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
    assert parse(QWEN_TAGS, [text], {"f": {"properties": schemas}}) == [("f", '{"a": 2}')]


def test_enum_of_texts_is_enforced_between_tags() -> None:
    schemas = {
        "a": {"enum": ["x", "y"]},
        "b": {"type": "string"},
        "c": {"type": ["string", "null"], "enum": ["x", None]},
    }
    constraint = QWEN_TAGS.constraint([("f", {"properties": schemas})], is_required=True, is_single=True)
    assert [value.choices for value in constraint.tags[0][1]] == [("x", "y"), (), ()]
