"""The chat formats of gpt-oss and Gemma 4: what the parsers return, and servers whose tokenizer and template have them.

The servers' model copies what follows its newest tokens earlier in the prompt, so a user's message directs the answer.
"""

import json
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from chat_formats import ANALYSIS, CALL, FINAL, SAID, TEMPLATES, TOKENS, write_chat_model
from http_server import http_server, web_client
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from nanovllm import AsyncLLM
from nanovllm.entrypoints.server.call_formats import GEMMA, HARMONY, CallFormat, call_format_of
from nanovllm.entrypoints.server.call_parser import CallParser, ReasoningDelta, ToolCallDelta
from nanovllm.entrypoints.server.chat_answers import ChatForm, chat_form
from nanovllm.entrypoints.server.harmony_parser import HarmonyParser
from nanovllm.sampling_params import HarmonyTags, ReasoningTags
from nanovllm.text.harmony import HarmonyScanner

BEGIN, NEXT = "<|start|>assistant", "<|end|><|start|>assistant"
SCHEMAS: dict[str, Any] = {"weather": {}, "news": {}}


def joined(deltas: list[Any]) -> list[Any]:
    """Return contents, reasoning as ("", text) and calls as (name, arguments), adjacent pieces joined."""
    found: list[Any] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            if delta.call_id:
                found.append((delta.name, ""))
            found[-1] = (found[-1][0], found[-1][1] + delta.arguments)
        elif isinstance(delta, ReasoningDelta):
            is_more = found and isinstance(found[-1], tuple) and not found[-1][0]
            found[-1:] = [("", found[-1][1] + delta.text)] if is_more else [*found[-1:], ("", delta.text)]
        elif found and isinstance(found[-1], str):
            found[-1] += delta
        else:
            found.append(delta)
    return found


def splits(text: str) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    for cut in range(1, len(text)):
        yield [text[:cut], text[cut:]]


# -- the parsers -------------------------------------------------------------------------------------------------------


def harmony(pieces: list[str], schemas: dict[str, Any] = SCHEMAS, is_cut: bool = False) -> list[Any]:
    parser = HarmonyParser(BEGIN, schemas)
    return joined([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(is_cut))


HARMONY_CASES: list[tuple[str, list[Any]]] = [
    (f"{ANALYSIS}Hm.{NEXT}{FINAL}Zürich 😀<|return|>", [("", "Hm."), "Zürich 😀"]),
    (f"{ANALYSIS}{NEXT}{FINAL}x", ["x"]),
    (f'{ANALYSIS}Hm.{NEXT}{CALL}{{"city": "Zürich"}}<|call|>', [("", "Hm."), ("weather", '{"city": "Zürich"}')]),
    (f"{CALL}<|call|>", [("weather", "{}")]),
    (f"{CALL}{{}}{NEXT}{FINAL}Done.", [("weather", "{}"), "Done."]),
    (
        f"{CALL}{{}}{NEXT} to=functions.news<|channel|>commentary json<|message|>{{}}",
        [("weather", "{}"), ("news", "{}")],
    ),
    (f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}{{}}<|call|>", ["I look.", ("weather", "{}")]),
    (f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}{FINAL}x", [("", "One.\n\nTwo."), "x"]),
    (f"<|channel|>commentary<|message|>One.{NEXT}{FINAL}Two.", ["One.\n\nTwo."]),
    ("<|channel|>commentary to=news json<|message|>{}", [("news", "{}")]),
    ("<|channel|>analysis to=functions.news<|message|>{}", [("news", "{}")]),
    ("<|channel|>analysis to=python code<|message|>1 + 1", [("", "1 + 1")]),
    ("<|channel|>commentary to=functions.wether json<|message|>{", [("wether", "{")]),
    ("<|channel|>unknown<|message|>x", ["x"]),
    ("No header.", ["No header."]),
    ("", []),
]


def test_harmony_messages_are_reasoning_contents_and_calls() -> None:
    for text, expected in HARMONY_CASES:
        for pieces in splits(text):
            assert harmony(pieces) == expected, pieces
    assert harmony([f"{CALL}{{}}"], {}) == ["{}"]  # without tools there are no calls


def test_harmony_answer_that_is_cut_has_the_beginnings_of_its_parts() -> None:
    """A call that is cut stays incomplete, so that no client executes it."""
    text = f'{ANALYSIS}Hm.{NEXT}{CALL}{{"city": "Bern"}}'
    for cut in range(len(text)):
        if "<" in text[max(0, cut - 8) : cut] and ">" not in text[text.rindex("<", 0, cut) : cut]:
            continue  # inside a tag, which is one token
        found = dict(harmony([text[:cut]], is_cut=True))
        assert "Hm.".startswith(found.get("", ""))
        if "weather" in found:
            assert found["weather"] == text[:cut].partition("json<|message|>")[2]
    assert harmony([CALL], is_cut=True) == [("weather", "")]


def gemma(pieces: list[str], is_alternative: bool = False) -> list[Any]:
    parser = CallParser(GEMMA, SCHEMAS, is_alternative=is_alternative)
    return joined([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish())


GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Zürich, {"}<|"|>,near:[{km:1.5},null],sure:true}<tool_call|>'
GEMMA_ARGUMENTS = ("weather", '{"city": "Zürich, {\\"}", "near": [{"km": 1.5}, null], "sure": true}')
GEMMA_CASES: list[tuple[str, list[Any]]] = [
    (GEMMA_CALL, [GEMMA_ARGUMENTS]),
    (f"Let me see.\n{GEMMA_CALL}{GEMMA_CALL}\n", ["Let me see.", GEMMA_ARGUMENTS, GEMMA_ARGUMENTS]),
    (f"{GEMMA_CALL}\nDone.", [GEMMA_ARGUMENTS, "\nDone."]),
    ("<|tool_call>call:now{}<tool_call|>", [("now", "{}")]),
    ("<|tool_call>call:now{}", [("now", "{}")]),  # the closing tag may be missing
    ("<|tool_call>call:now{}<tool_ca", [("now", "{}")]),
    (f"<|tool_call>call:now{{}}{GEMMA_CALL}", [("now", "{}"), GEMMA_ARGUMENTS]),
    ('<|tool_call> call: a.b-c {\n "k" : "x" , <|"|>l<|"|>: [ 1, True, ], m: None, n: bare word }', [
        ("a.b-c", '{"k": "x", "l": [1, true], "m": null, "n": "bare word"}')
    ]),
    ('<|tool_call>call:now{a:<|"|><|tool_call>}<tool_call|><|"|>}', [("now", '{"a": "<|tool_call>}<tool_call|>"}')]),
    *(
        (text, [text])
        for text in (
            "<|tool_call>call:now{a:1",  # cut
            '<|tool_call>call:now{a:<|"|>x}',
            "<|tool_call>now{}",
            "<|tool_call>call:{}",
            "<|tool_call>call:now{a}<tool_call|>",
            "<|tool_call>call:now{a:}<tool_call|>",
            "<|tool_call>call:now{a:1e999}<tool_call|>",
            "<|tool_call>call:now{a:NaN}<tool_call|>",
            "<|tool_call>call:" + "x" * 600,
            "<|tool_call>call:now" + "{a:" * 3000 + "1" + "}" * 3000,
            "<tool_call|>",
        )
    ),
]  # fmt: skip


def test_gemma_calls_are_found_and_the_rest_is_content() -> None:
    for text, expected in GEMMA_CASES:
        for pieces in splits(text) if len(text) < 200 else ([text], list(text)):
            assert gemma(pieces) == expected, pieces
    broken = f"<|tool_call>call:now{{a:1{GEMMA_CALL}"  # the next call is not lost with it
    assert gemma([broken]) == ["<|tool_call>call:now{a:1", GEMMA_ARGUMENTS]
    for text in (f"Text {GEMMA_CALL}", "<|tool_call>call:unknown{}<tool_call|>"):
        assert gemma(list(text), is_alternative=True) == [text]


def test_formats_come_from_the_templates() -> None:
    for name, call_format in (("gpt-oss", HARMONY), ("gemma4", GEMMA)):
        assert call_format_of((TEMPLATES / f"{name}.jinja").read_text()) is call_format


FRAGMENTS = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>", "assistant"),
    *("analysis", "final", "commentary", " to=functions.news", " to=news", "json", "{}", "text é", "\n", "<", "<|"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "call:", "now", "{", "}", "[", "]", ":", ",", "1", '"', "null", "|>"),
    *(ANALYSIS, FINAL, CALL, NEXT, GEMMA_CALL, "<|tool_call>call:now{a:", "}<tool_call|>", " "),
)


@settings(max_examples=examples(200))
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_any_split_gives_the_same_result(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    for parse in (harmony, gemma):
        assert parse(pieces) == parse(list(text)) == parse([text])
    scanner = HarmonyScanner(BEGIN)
    parts = [part for piece in pieces for part in scanner.feed(piece)] + scanner.feed("", is_last=True)
    assert "".join(part.text for part in parts) == text


def test_form_of_an_answer_depends_on_the_template_and_the_end_of_the_prompt() -> None:
    """Gemma 4's prompts end in an empty thought if it shall not think, or in the tag of one after results of calls."""
    special = frozenset(TOKENS["gpt-oss"] + TOKENS["gemma4"])

    def form(template: str, prompt: str, call_format: CallFormat | None = None) -> ChatForm:
        text = SimpleNamespace(decode=lambda ids: prompt, chat_template=lambda: template, special_tokens=special)
        tokenizer = SimpleNamespace(encode=lambda tag, add_special_tokens: [ord(tag[2])] * (1 + tag.count("thought")))
        service: Any = SimpleNamespace(llm=SimpleNamespace(text=text, tokenizer=tokenizer))
        return chat_form(service, call_format, array("q"))

    gemma4, gpt_oss = ((TEMPLATES / f"{name}.jinja").read_text() for name in ("gemma4", "gpt-oss"))
    for prompt, has_begun in (
        ("<|turn>model\n", False),
        ("<|turn>model\n<|channel>thought\n<channel|>", False),
        ("<tool_response|><|channel>thought\n", True),
    ):
        found = form(gemma4, prompt, GEMMA)
        assert found.tags == ReasoningTags("<|channel>thought", "<channel|>", has_begun)
        assert found.shows_special_tokens and found.reasoning_ids is not None
    for prompt, begun in ((f"<|end|>{BEGIN}", BEGIN), ("<|start|>user<|message|>x<|end|>", "")):
        found = form(gpt_oss, prompt)
        assert found.tags == HarmonyTags(begun) and found.shows_special_tokens
    found = form("{{ tools }}<think></think>", "<think>\n")
    assert found.tags == ReasoningTags("<think>", "</think>", True) and not found.shows_special_tokens
    assert form("<start_of_turn>model", "<start_of_turn>model\n") == ChatForm()  # Gemma 3


@pytest.mark.slow
def test_gemma_parser_time_is_linear_in_the_length_of_the_text() -> None:
    for unit in ("<", '<|"|>', "{", "}", "<|tool_call>", "<|tool_call>call:f{", "<|tool_call>call:f{a:<", "call:", " "):
        parser = CallParser(GEMMA, SCHEMAS)
        for _ in range(200):
            parser.feed(unit * 100)
        parser.finish()


# -- servers -----------------------------------------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"enum": ["Uri", "Zug"]}}, "required": ["city"]}
TOOL = {"name": "rain", "parameters": CITY}


@pytest.fixture(scope="module", params=["gpt-oss", "gemma4"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def web(model: str, retrieval_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server whose model has the tokens and the template of another one."""
    directory = write_chat_model(retrieval_model, tmp_path_factory.mktemp("formats") / "model", model)
    engine = AsyncLLM(directory, device="cpu", max_model_len=2048, num_kvcache_blocks=64, max_num_batched_tokens=512)
    with http_server(engine) as url, web_client(url) as client:
        yield client
    engine.close()


def chat(web: httpx.Client, content: str, **fields: Any) -> dict[str, Any]:
    """Return the message, the finish reason and the number of reasoning tokens, the same whole or streamed."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 200}
    body |= fields
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    message = choice["message"]
    found = {
        "reasoning": message.get("reasoning_content", ""),
        "content": message["content"] or "",
        "calls": [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())],
        "reason": choice["finish_reason"],
    }
    streamed: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "reason": None}
    for line in web.post("/v1/chat/completions", json=body | {"stream": True}).text.splitlines():
        for each in json.loads(line.removeprefix("data: "))["choices"] if line.startswith("data: {") else ():
            delta = each["delta"]
            streamed["reasoning"] += delta.get("reasoning_content", "")
            streamed["content"] += delta.get("content") or ""
            streamed["reason"] = each["finish_reason"] or streamed["reason"]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    streamed["calls"].append((call["function"]["name"], ""))
                name, arguments = streamed["calls"][-1]
                streamed["calls"][-1] = (name, arguments + call["function"]["arguments"])
    assert streamed == found
    usage = answer.json()["usage"]
    return found | {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]}


TOOLS = [{"type": "function", "function": TOOL}]


def test_answer_has_reasoning_and_calls_whole_or_streamed(web: httpx.Client, model: str) -> None:
    found = chat(web, SAID[model]["call"], tools=TOOLS)
    assert (found["reasoning"], found["content"], found["reason"]) == ("I ask.", "", "tool_calls")
    assert found["calls"] == [("rain", '{"city": "Uri"}')]
    assert found["reasoning_tokens"] >= len("I ask.")


@pytest.mark.slow
def test_answer_has_its_parts_in_every_api(web: httpx.Client, model: str) -> None:
    text, call = SAID[model]["text"], SAID[model]["call"]
    found = chat(web, text)
    assert (found["reasoning"], found["content"], found["reason"]) == ("I think 1.", "It rains.", "stop")
    user = {"role": "user", "content": call}
    given = {"name": "rain", "input_schema": CITY}
    anthropic = {"messages": [user], "tools": [given], "max_tokens": 200, "temperature": 0}
    message = web.post("/v1/messages", json=anthropic).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"], message
    assert message["content"][1]["input"] == {"city": "Uri"} and message["stop_reason"] == "tool_use"
    asked = {"input": call, "tools": [{"type": "function", **TOOL}], "temperature": 0, "max_output_tokens": 200}
    response = web.post("/v1/responses", json=asked).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"], response
    assert response["output"][1]["arguments"] == '{"city": "Uri"}' and response["status"] == "completed"


@pytest.mark.slow
def test_answer_that_max_tokens_cuts_is_what_there_is_of_it(web: httpx.Client, model: str) -> None:
    for kind in ("text", "call"):
        for max_tokens in range(1, 30, 3):
            found = chat(web, SAID[model][kind], tools=TOOLS, max_tokens=max_tokens)
            assert any(each.startswith(found["reasoning"].strip()) for each in ("I think 1.", "I ask."))
            assert "It rains.".startswith(found["content"]) or (model, kind) == ("gemma4", "call")
            assert found["reason"] == "length", (kind, max_tokens)


@pytest.mark.slow
def test_stop_strings_count_after_the_reasoning(web: httpx.Client, model: str) -> None:
    for stop, content, reason in (
        ("I think", "It rains.", "stop"),
        ("rain", "It ", "stop"),
        ("<|end|>", "It rains.", "stop"),
    ):
        found = chat(web, SAID[model]["text"], stop=[stop])
        assert (found["reasoning"], found["content"], found["reason"]) == ("I think 1.", content, reason), stop


@pytest.mark.slow
def test_grammars_force_calls_and_forms_after_the_reasoning(web: httpx.Client, model: str) -> None:
    text, call = SAID[model]["text"], SAID[model]["call"]
    thoughts = ["I ask.", "I think 1."]
    if model == "gpt-oss":  # the grammar needs <|start|>assistant between messages, which would begin the copy again
        text, call = (f"assistant{each.partition('<|end|>')[2]}" for each in (text, call))
        thoughts = ["", ""]
    for choice in ("required", {"type": "function", "function": {"name": "rain"}}):
        found = chat(web, call, tools=TOOLS, tool_choice=choice)
        assert found["calls"] == [("rain", '{"city": "Uri"}')] and found["reasoning"] == thoughts[0]
    strict = [{"type": "function", "function": TOOL | {"strict": True}}]
    found = chat(web, call.replace("Uri", "Rome"), tools=strict)
    assert [json.loads(arguments)["city"] in ("Uri", "Zug") for _, arguments in found["calls"]] == [True]
    form = {"structured_outputs": {"choice": ["It rains.", "It snows."]}}
    for fields in (form, form | {"tools": TOOLS}):
        found = chat(web, text.replace("rains", "rained"), **fields)
        assert (found["reasoning"], found["content"]) == (thoughts[1], "It rains."), fields
    found = chat(web, call, tools=TOOLS, **form)
    assert found["calls"] == [("rain", '{"city": "Uri"}')]


@pytest.mark.slow
def test_effort_and_tools_reach_the_template(web: httpx.Client, model: str) -> None:
    """gpt-oss knows three efforts, and its template fails at a tool without a description."""
    user = {"role": "user", "content": "Hi."}

    def prompt(**fields: Any) -> str:
        counted = web.post("/tokenize", json={"messages": [user], "return_token_strs": True, **fields}).json()
        return "".join(counted["token_strs"]).replace("\u0120", " ").replace("\u010a", "\n")

    assert "rain" in prompt(tools=TOOLS)
    if model == "gpt-oss":
        assert "Reasoning: medium" in prompt()
        lengths = []
        for effort in (None, "minimal", "low", "medium", "high", "xhigh"):
            fields = {} if effort is None else {"reasoning_effort": effort}
            answer = web.post("/v1/chat/completions", json={"messages": [user], "max_tokens": 1, **fields})
            lengths.append(answer.json()["usage"]["prompt_tokens"])
        assert [length - lengths[0] for length in lengths] == [0, -3, -3, 0, -2, -2]
