"""All that the server has sent is accepted back, in all three APIs, with the templates of five models.

The answers are random: with reasoning or without, up to three calls, cut anywhere, as a whole or as a stream.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from transformers import PreTrainedTokenizerFast

from nanovllm.entrypoints.server.call_formats import GEMMA, HARMONY, HERMES, LLAMA, QWEN_TAGS, CallFormat
from nanovllm.entrypoints.server.chat_answers import ChatAnswer, ChatForm
from nanovllm.entrypoints.server.conversation import Conversation, render_messages
from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.messages import MessagesAnswer, MessagesRequest
from nanovllm.entrypoints.server.protocol import ChatRequest
from nanovllm.entrypoints.server.responses import ResponsesAnswer, ResponsesRequest
from nanovllm.errors import RequestError
from nanovllm.request_stream import RequestUpdate
from nanovllm.sampling_params import HarmonyTags, ReasoningTags
from nanovllm.text.frontend import check_conversations, render_chat
from nanovllm.text.tokenizer import load_tokenizer

TEMPLATES = Path(__file__).parents[2] / "support" / "templates"
FORMATS: dict[str, CallFormat] = {
    "qwen3": HERMES,
    "qwen3.5": QWEN_TAGS,
    "llama3.1": LLAMA,
    "gpt-oss": HARMONY,
    "gemma4": GEMMA,
}
TAGS = {HERMES: ("<think>", "</think>"), QWEN_TAGS: ("<think>", "</think>"), GEMMA: ("<|channel>thought", "<channel|>")}
SERVICE: Any = SimpleNamespace(
    model_names=["tiny"], llm=SimpleNamespace(text=SimpleNamespace(decode=lambda token_ids: ""))
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NAMES = ("weather", "news")
QUESTION = "Will it rain?"
RESULT = "It rains in Bern."


@pytest.fixture(scope="module")
def tokenizer(retrieval_model: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(retrieval_model)


def renderer(tokenizer: Any, model: str, with_tools: bool = True) -> tuple[str, Callable[[Conversation], str]]:
    """Return the source of the model's template, and what renders a conversation with it."""
    template = (TEMPLATES / f"{model}.jinja").read_text()
    tool = {"type": "function", "function": {"name": "weather", "description": "", "parameters": CITY}}
    options = {"tools": [tool]} if with_tools else {}

    def render(conversation: Conversation) -> str:
        tokenizer.chat_template = template
        check_conversations(conversation)
        return render_chat(tokenizer, conversation, options)

    return template, render


# -- answers, as a model writes them -----------------------------------------------------------------------------------


class Written(NamedTuple):
    reasoning: str | None
    content: str
    calls: list[tuple[str, dict[str, Any]]]
    num_chars: int  # after which the answer is cut; more than it has for one that ends by itself
    has_begun_reasoning: bool
    piece_chars: int

    def text(self, call_format: CallFormat) -> str:
        if call_format is HARMONY:
            return self._messages()
        begin, end = TAGS.get(call_format, ("", ""))
        begin = "" if self.has_begun_reasoning else begin
        text = "" if self.reasoning is None else f"{begin}\n{self.reasoning}{end}\n\n"
        if call_format is LLAMA:
            text = self.content if not self.calls else ""
            return text + "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in self.calls)
        text += self.content
        for name, given_arguments in self.calls:
            if call_format is GEMMA:
                text += f"<|tool_call>call:{name}{quoted(given_arguments)}<tool_call|>"
                continue
            if call_format is HERMES:
                text += f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': given_arguments})}\n</tool_call>"
                continue
            values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given_arguments.items())
            text += f"\n<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
        return text

    def _messages(self) -> str:
        texts = [] if self.reasoning is None else [f"<|channel|>analysis<|message|>{self.reasoning}"]
        if self.content or not self.calls:
            texts.append(f"<|channel|>{'commentary' if self.calls else 'final'}<|message|>{self.content}")
        for name, arguments in self.calls:
            head = f" to=functions.{name}<|channel|>commentary json"
            if self.has_begun_reasoning:
                head = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
            texts.append(f"{head}<|message|>{json.dumps(arguments)}")
        return "<|end|><|start|>assistant".join(texts) + ("<|call|>" if self.calls else "<|return|>")


def quoted(value: Any) -> str:
    """Write a value as Gemma 4 does."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{quoted(each)}' for key, each in sorted(value.items()))}}}"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


TEXTS = st.text(st.sampled_from('ab {}[]"\\<>/\n:,é'), max_size=12) | st.sampled_from(
    ["", "null", "[1]", "</think>", "{", "<|channel|>final<|message|>"]
)
WRITTEN = st.builds(
    Written,
    reasoning=st.none() | TEXTS,
    content=TEXTS,
    calls=st.lists(
        st.tuples(
            st.sampled_from(NAMES), st.fixed_dictionaries({}, optional={"city": TEXTS, "days": st.integers(0, 9)})
        ),
        max_size=3,
    ),
    num_chars=st.integers(0, 120) | st.just(10_000),
    has_begun_reasoning=st.booleans(),
    piece_chars=st.integers(1, 30),
)


def answer_of(answer: Any, written: Written, call_format: CallFormat, is_streamed: bool) -> Any:
    """Return the body of a whole answer, or the events of a streamed one."""
    whole = written.text(call_format)
    text = whole[: written.num_chars]
    reason = "stop" if text == whole else "length"
    output: Any = {"text": text, "token_ids": [1], "num_cached_tokens": 0, "finish_reason": reason}
    if not is_streamed:
        return answer.whole([output])
    pieces = [text[i : i + written.piece_chars] for i in range(0, len(text), written.piece_chars)]
    events = answer.first_events()
    for piece in pieces:
        events += answer.update_events(RequestUpdate(0, text=piece))
    events += answer.update_events(RequestUpdate(0, output=output)) + answer.last_events()
    return [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: {")]


def form_of(written: Written, call_format: CallFormat) -> ChatForm:
    if call_format is HARMONY:
        return ChatForm(call_format, HarmonyTags())
    tags = TAGS.get(call_format)
    return ChatForm(call_format, None if tags is None else ReasoningTags(*tags, written.has_begun_reasoning))


# -- what clients make of them, and send back --------------------------------------------------------------------------


def sent_back_to_chat(written: Written, call_format: CallFormat, is_streamed: bool) -> ChatRequest:
    tools = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in NAMES]
    question = {"role": "user", "content": QUESTION}
    fields: dict[str, Any] = {"tools": tools, "stream": is_streamed}
    asked = ChatRequest.model_validate({"messages": [question], **fields})
    answer = answer_of(ChatAnswer(SERVICE, asked, form_of(written, call_format)), written, call_format, is_streamed)
    message = accumulated(answer) if is_streamed else answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in message.get("tool_calls") or ()
    ]
    following = [] if results else [question]
    return ChatRequest.model_validate({"messages": [question, message, *results, *following], **fields})


def accumulated(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the deltas of a stream as OpenAI's clients do, with the index of each call."""
    message: dict[str, Any] = {}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for name, value in delta.items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            calls = message.setdefault("tool_calls", [])
            for call in value:
                if call["index"] == len(calls):
                    calls.append({"index": call["index"], "id": call["id"], "type": call["type"], "function": {}})
                function = calls[call["index"]]["function"]
                for key, piece in call["function"].items():
                    function[key] = function.get(key, "") + piece
    return message


def sent_back_to_messages(written: Written, call_format: CallFormat, is_streamed: bool) -> ChatRequest:
    tools = [{"name": name, "input_schema": CITY} for name in NAMES]
    question = {"role": "user", "content": QUESTION}
    fields: dict[str, Any] = {"tools": tools, "stream": is_streamed, "max_tokens": 5}
    asked = MessagesRequest.model_validate({"messages": [question], **fields}).as_chat()
    answer = answer_of(MessagesAnswer(SERVICE, asked, form_of(written, call_format)), written, call_format, is_streamed)
    blocks = blocks_of(answer) if is_streamed else answer["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    turns = [question, {"role": "assistant", "content": blocks}, {"role": "user", "content": results or QUESTION}]
    return MessagesRequest.model_validate({"messages": turns, **fields}).as_chat()


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the blocks of a stream as Anthropic's clients do. Input that is cut off is left empty."""
    blocks: list[dict[str, Any]] = []
    partial: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = {name: value for name, value in event["delta"].items() if name != "type"}
            for name, piece in delta.items():
                if name == "partial_json":
                    partial[event["index"]] = partial.get(event["index"], "") + piece
                else:
                    blocks[event["index"]][name] += piece
    for index, text in partial.items():
        try:
            blocks[index]["input"] = json.loads(text or "{}")
        except ValueError:
            blocks[index]["input"] = {}
    return blocks


def sent_back_to_responses(written: Written, call_format: CallFormat, is_streamed: bool) -> ChatRequest:
    """One of the tools is in a namespace, and the other one is custom."""
    tools: list[dict[str, Any]] = [
        {"type": "namespace", "name": "sky", "tools": [{"type": "function", "name": "weather", "parameters": CITY}]},
        {"type": "custom", "name": "news"},
    ]
    question = {"role": "user", "content": QUESTION}
    fields: dict[str, Any] = {"tools": tools, "stream": is_streamed}
    asked = ResponsesRequest.model_validate({"input": [question], **fields})
    written = written._replace(
        calls=[({"weather": "sky__weather"}.get(name, name), each) for name, each in written.calls]
    )
    answer = ResponsesAnswer(SERVICE, asked.as_chat(), form_of(written, call_format), asked)
    given_back = answer_of(answer, written, call_format, is_streamed)
    items = given_back["output"] if not is_streamed else given_back[-1]["response"]["output"]
    if is_streamed:
        assert items == [event["item"] for event in given_back if event["type"] == "response.output_item.done"]
    for item in items:
        assert item.get("name") in (None, *NAMES) and item.get("namespace") in (None, "sky")
    results = [
        {"type": f"{item['type'].removesuffix('_call')}_call_output", "call_id": item["call_id"], "output": RESULT}
        for item in items
        if "call_id" in item
    ]
    body = {"input": [question, *items, *(results or [question])], **fields}
    return ResponsesRequest.model_validate(body).as_chat()


SENT_BACK = (sent_back_to_chat, sent_back_to_messages, sent_back_to_responses)


@settings(max_examples=examples(240))
@given(written=WRITTEN, model=st.sampled_from(sorted(FORMATS)), is_streamed=st.booleans())
def test_any_answer_is_accepted_back(tokenizer: Any, written: Written, model: str, is_streamed: bool) -> None:
    """Regression: a call that max_tokens had cut was refused for ever by Qwen3.5's template, as its arguments were not
    an object, and two calls by Llama 3.1's.
    """
    template, render = renderer(tokenizer, model)
    for send_back in SENT_BACK:
        body = send_back(written, FORMATS[model], is_streamed)
        prompt = render_messages(body.messages, template, render)
        calls = [call for message in body.messages for call in message.tool_calls or ()]
        assert prompt.count(RESULT) == len(calls)
        for call in calls:
            assert call.function.name in prompt


def test_call_that_is_sent_back_is_rendered_as_the_model_wrote_it(tokenizer: Any) -> None:
    """The prompt of the next request begins with the prompt and the answer of the last one, in the model's own form.

    gpt-oss's template has no place for a text to the user before a call, and gets it as reasoning.
    """
    thought = "<|channel|>analysis<|message|>Hm."
    for model, content, expected in (
        (
            "gpt-oss",
            "",
            f"{thought}<|end|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
            '{"city": "Bern", "days": 3}<|call|><|start|>functions.weather to=assistant<|channel|>commentary',
        ),
        ("gpt-oss", "I look.", f"{thought}\n\nI look.<|end|><|start|>assistant to=functions.weather"),
        (
            "gemma4",
            "I look.",
            '<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:3}<tool_call|>'
            "<|tool_response>response:weather{value:",
        ),
    ):
        written = Written("Hm.", content, [("weather", {"city": "Bern", "days": 3})], 10_000, False, 7)
        template, render = renderer(tokenizer, model)
        before = render([{"role": "user", "content": QUESTION}])
        for send_back in (sent_back_to_chat, sent_back_to_messages):
            for is_streamed in (False, True):
                body = send_back(written, FORMATS[model], is_streamed)
                prompt = render_messages(body.messages, template, render)
                assert prompt.startswith(before + expected), prompt


def test_calls_of_one_message_are_all_rendered_where_a_template_prints_the_first(tokenizer: Any) -> None:
    """gpt-oss's template leaves out all calls of a message but the first, without an error."""
    results = [say("tool", f"result {name}") | {"tool_call_id": name} for name in ("b", "a")]
    messages = [say("user", QUESTION), call_of("a", "b"), *results, say("assistant", "Yes."), say("user", "Go.")]
    prompt = prompt_of(tokenizer, "gpt-oss", messages)
    order = ["to=functions.a", "result a", "to=functions.b", "result b", "Yes.", "Go."]
    places = [prompt.index(each) for each in order]
    assert places == sorted(places)


def test_result_whose_call_is_missing_is_refused_where_the_format_names_its_function(tokenizer: Any) -> None:
    """Regression: Gemma 4's template left the result out, and gpt-oss's named another function or refused it without
    the id. In other formats a history that an agent has cut is accepted.
    """
    user, other = say("user", QUESTION), [say("assistant", "Yes."), say("user", "Go.")]
    for begun in ([], [call_of("b"), result_of("b")]):
        messages = [user, *begun, result_of("a"), *other]
        for model in FORMATS:
            if model in ("gemma4", "gpt-oss"):
                with pytest.raises(ApiError, match=r"result with tool_call_id='a' .* no earlier message .* call"):
                    prompt_of(tokenizer, model, messages)
            else:
                assert "result a" in prompt_of(tokenizer, model, messages)
            calls = [user, *begun, call_of("a"), result_of("a"), *other]
            assert "result a" in prompt_of(tokenizer, model, calls)


def test_answer_that_explains_the_format_is_accepted_back(tokenizer: Any) -> None:
    """gpt-oss's template refuses the header of a message in a message of the assistant."""
    explained = say("assistant", "An answer begins with <|channel|>final<|message|>.") | {"reasoning": "Hm."}
    prompt = prompt_of(tokenizer, "gpt-oss", [say("user", QUESTION), explained, say("user", "Go on.")])
    assert "An answer begins with <| channel |>final<|message|>." in prompt


# -- what else a template has no place for -----------------------------------------------------------------------------

CALL = {"id": "a", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}


def prompt_of(tokenizer: Any, model: str, messages: list[dict[str, Any]]) -> str:
    template, render = renderer(tokenizer, model)
    return render_messages(ChatRequest.model_validate({"messages": messages}).messages, template, render)


def test_system_messages_are_changed_only_where_the_template_refuses_them(tokenizer: Any) -> None:
    """Regression: Codex's instructions and developer items, and Claude Code's system messages after the user's turn,
    were 400 with Qwen3.5's template.
    """
    messages = [
        {"role": "system", "content": "First."},
        {"role": "developer", "content": "Second."},
        {"role": "user", "content": QUESTION},
        {"role": "system", "content": "Third."},
    ]
    changed = prompt_of(tokenizer, "qwen3.5", messages)
    assert "First.\n\nSecond.<|im_end|>" in changed and changed.count("<|im_start|>system") == 1
    assert f"<|im_start|>user\n{QUESTION}\n\nThird.<|im_end|>" in changed
    in_place = prompt_of(tokenizer, "qwen3", messages)
    assert "First.\n\n# Tools" in in_place and "<|im_start|>system\nSecond.<|im_end|>" in in_place
    assert f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>system\nThird.<|im_end|>" in in_place


def test_system_messages_are_changed_in_every_api(tokenizer: Any) -> None:
    template, render = renderer(tokenizer, "qwen3.5")
    question = {"role": "user", "content": QUESTION}
    late = {"role": "system", "content": "Third."}
    bodies = (
        ResponsesRequest.model_validate(
            {"instructions": "First.", "input": [{"role": "developer", "content": "Second."}, question, late]}
        ),
        MessagesRequest.model_validate({"system": "First.\n\nSecond.", "messages": [question, late], "max_tokens": 1}),
    )
    for body in bodies:
        prompt = render_messages(body.as_chat().messages, template, render)
        assert "First.\n\nSecond.<|im_end|>" in prompt and f"{QUESTION}\n\nThird.<|im_end|>" in prompt


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def call_of(name: str, *more: str) -> dict[str, Any]:
    calls = [CALL | {"id": each, "function": {"name": each, "arguments": "{}"}} for each in (name, *more)]
    return say("assistant", "") | {"tool_calls": calls}


def result_of(name: str) -> dict[str, Any]:
    return say("tool", f"result {name}") | {"tool_call_id": name}


def test_late_system_messages_are_the_users_text_in_their_places(tokenizer: Any) -> None:
    begin, user, late, other = say("system", "Begin."), say("user", "Ask."), say("system", "Late."), say("user", "Go.")
    answer, call = say("assistant", "Yes."), call_of("a")
    ends, joined_before = "<|im_end|>\n<|im_start|>user\nLate.<|im_end|>", "Ask.\n\nLate.<|im_end|>"
    for messages, expected in (
        ([begin, user, late, answer, other], joined_before),
        ([begin, user, late, other], f"{joined_before}\n<|im_start|>user\nGo.<|im_end|>"),
        ([begin, user, answer, late, other], "Late.\n\nGo.<|im_end|>"),
        ([begin, user, answer, late, answer, other], f"Yes.{ends}"),
        ([begin, user, call, late, result_of("a"), answer], f"</tool_response>{ends}"),
        ([begin, user, call_of("a", "b"), result_of("a"), late, result_of("b")], f"</tool_response>{ends}"),
        ([begin, user, call, late, late, result_of("a"), other], "</tool_response><|im_end|>\n<|im_start|>user\nLate."),
        ([begin, user, call, late, late, result_of("a"), other], "user\nLate.\n\nLate.\n\nGo.<|im_end|>"),
        ([begin, user, answer, say("system", ""), other], "Yes.<|im_end|>\n<|im_start|>user\nGo."),
        ([user, late], joined_before),
        ([{"role": "system"}, user, {"role": "system"}], "Ask.<|im_end|>"),
    ):
        assert expected in prompt_of(tokenizer, "qwen3.5", messages), messages


# Each begins with the model's answer
TURNS = st.lists(
    st.sampled_from(
        [
            [call_of("a"), result_of("a")],
            [call_of("a"), say("system", "Late."), result_of("a")],
            [call_of("a", "b"), result_of("b"), result_of("a"), say("developer", "Late."), say("system", "Later.")],
            [say("assistant", "Yes."), say("user", "Go.")],
            [say("assistant", "Yes."), say("user", "Go."), say("user", "Go on.")],
            [say("assistant", "Yes."), say("user", "Go."), say("system", "Late.")],
            [say("assistant", "Yes."), say("system", "Late."), say("user", "Go.")],
            [say("assistant", "Yes."), say("system", "Late.")],
            [call_of("a"), result_of("a"), say("user", "Stop."), say("system", "Late.")],
            [
                say("assistant", "") | {"tool_calls": [CALL | {"function": {"name": "a", "arguments": "{"}}]},
                result_of("a"),
            ],
        ]
    ),
    max_size=8,
)
PREFIX_MODELS = ["qwen3", "qwen3.5", "llama3.1", "first system", "last system"]


@settings(max_examples=examples(120))
@given(num_leading=st.integers(1, 2), turns=TURNS, model=st.sampled_from(PREFIX_MODELS))
def test_prompt_of_a_turn_begins_that_of_the_next_turn(
    tokenizer: Any, num_leading: int, turns: list[list[dict[str, Any]]], model: str
) -> None:
    """Regression: a late system message moved to the front, so that nothing of the conversation was in the prefix
    cache. Claude Code sends such messages."""
    templates = {"first system": FIRST_SYSTEM, "last system": LAST_SYSTEM}
    messages = [say("system", f"Begin {i}.") for i in range(num_leading)] + [say("user", "Hello.")]
    before: list[int] = []
    for turn in ([], *turns):
        messages = [*messages, *turn]
        sent = ChatRequest.model_validate({"messages": messages}).messages
        if model in templates:
            prompt = render_messages(sent, templates[model], render_with(tokenizer, templates[model]))
        else:
            prompt = prompt_of(tokenizer, model, messages)
        token_ids = tokenizer.encode(prompt)
        assert token_ids[: len(before)] == before
        assert prompt.count("Late.") == sum(each["content"] == "Late." for each in messages)
        before = token_ids


# As the templates of Qwen3-VL and of others, it looks only at the first message for the role "system"
FIRST_SYSTEM = (
    "{%- if messages[0].role == 'system' %}[S]{{ messages[0].content | trim | replace('Begin', 'Start') }}{% endif -%}"
    "{%- for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls or '' }}{% endfor -%}"
)
# As the templates of the first DeepSeek-R1 and its distillations, it keeps the last one
LAST_SYSTEM = (
    "{%- set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
    "{%- set ns.system = m.content %}{% endfor %}[S]{{ ns.system }}"
    "{%- for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor -%}"
)


def render_with(tokenizer: Any, template: str) -> Callable[[Conversation], str]:
    def render(conversation: Conversation) -> str:
        tokenizer.chat_template = template
        return render_chat(tokenizer, conversation)

    return render


def test_system_messages_that_a_template_leaves_out_reach_the_model(tokenizer: Any) -> None:
    """Regression: templates that look for the role "system" in one place only lost the other messages, silently."""
    begin, more, late = say("system", " Begin."), say("developer", "More."), say("system", "Late.")
    user, answer = say("user", "Ask."), say("assistant", "Yes.")
    for template in (FIRST_SYSTEM, LAST_SYSTEM):
        first = "[S]Start." if template is FIRST_SYSTEM else "[S] Begin."
        for messages, expected in (
            ([begin, user], f"{first}[user]Ask."),
            ([begin, user, answer, late, user], f"{first}[user]Ask.[assistant]Yes.[user]Late.\n\nAsk."),
            ([begin, user, late, answer, late, user], f"{first}[user]Ask.\n\nLate.[assistant]Yes.[user]Late.\n\nAsk."),
            ([begin, more, user, late], f"[S]{first[3:]}\n\nMore.[user]Ask.\n\nLate."),
        ):
            sent = ChatRequest.model_validate({"messages": messages}).messages
            assert render_messages(sent, template, render_with(tokenizer, template)).strip() == expected, messages
    nothing = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    sent = ChatRequest.model_validate({"messages": [begin, user, answer]}).messages
    assert render_messages(sent, nothing, render_with(tokenizer, nothing)) == "Yes."


def test_developer_stays_where_the_template_knows_it() -> None:
    """A template that knows the role gets it; others get "system"."""
    messages = ChatRequest.model_validate({"messages": [{"role": "developer", "content": "x"}]}).messages
    for template, role in (("message.role == 'developer'", "developer"), ("message.role", "system")):
        assert render_messages(messages, template, lambda conversation: f"{conversation}").startswith(
            f"[{{'role': '{role}'"
        )


def test_arguments_that_are_no_object_are_shown_as_they_were_written(tokenizer: Any) -> None:
    for arguments, shown in (("{", "{"), ("[1, 2]", "[1, 2]"), ('"x"', '"x"'), ('{"city": "Be', '{"city": "Be')):
        call = {"id": "a", "function": {"name": "weather", "arguments": arguments}}
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "tool_calls": [call]}]
        prompt = prompt_of(tokenizer, "qwen3.5", messages)
        assert f"<function=weather>\n<parameter=arguments>\n{shown}\n</parameter>" in prompt
        assert f'"arguments": {shown}}}' in prompt_of(tokenizer, "qwen3", messages)
    for arguments in ("", "null", " ", None, {}):
        call = {"id": "a", "function": {"name": "weather", "arguments": arguments}}
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "tool_calls": [call]}]
        assert "<function=weather>\n</function>" in prompt_of(tokenizer, "qwen3.5", messages)


def test_several_calls_are_followed_each_by_its_result(tokenizer: Any) -> None:
    calls = [CALL | {"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("a", "b", "c")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in ("c", "a", "b", "?")]
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "tool_calls": calls}, *results]
    prompt = prompt_of(tokenizer, "llama3.1", messages)
    order = ['"name": "a"', "result a", '"name": "b"', "result b", '"name": "c"', "result c", "result ?"]
    places = [prompt.index(each) for each in order]
    assert places == sorted(places)


def test_template_without_system_messages_gets_their_text_in_the_question(tokenizer: Any) -> None:
    user = {"role": "user", "content": QUESTION}
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "No."}
    prompt = prompt_of(tokenizer, "mistral", [system, user, answer, user, system, user])
    assert prompt.count("[INST]") == 2 and f"[INST] Be brief.\n\n{QUESTION} [/INST]" in prompt
    assert f"[INST] {QUESTION}\n\nBe brief.\n\n{QUESTION} [/INST]" in prompt
    assert prompt_of(tokenizer, "mistral", [user, answer, user]).count(QUESTION) == 2


def test_refusal_of_the_template_is_about_what_was_sent(tokenizer: Any) -> None:
    """If no change helps, the error is the one about the messages as they were sent."""
    with pytest.raises(RequestError, match="No user query found"):
        prompt_of(
            tokenizer, "qwen3.5", [{"role": "system", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]}]
        )


def test_answers_that_clients_have_changed_a_little_are_accepted(tokenizer: Any) -> None:
    """Regression: LiteLLM's provider_specific_fields on a message were a 400, and so was an answer without content."""
    extras = {"provider_specific_fields": {"reasoning": "x"}, "annotations": [], "audio": None, "status": "completed"}
    for message in (
        {"content": None, "reasoning_content": "Hm."},
        {"content": ""},
        {"content": []},
        {"content": None, "refusal": "I will not."},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": [{"type": "output_text", "text": "I will not.", "annotations": []}]},
        {"tool_calls": []},
        {"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    ):
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant"} | message | extras]
        prompt = prompt_of(tokenizer, "qwen3.5", [*turns, {"role": "user", "content": "Go on."}])
        assert ("I will not." in prompt) == ("I will not." in str(message))
