"""Renders the messages of a chat in a form that the model's template accepts.

Templates differ in what they refuse: a second system message, several calls in one message, arguments that are not a
JSON object. Some templates leave system messages out without an error. The messages are first rendered as they were
sent. Only if the template refuses the messages or leaves one out, the messages are changed, by the fewest `CHANGES`
that the template needs. What some templates print wrongly without an error is seen in their sources, and is changed at
once: calls after the first one of a message, and the place of the text of a message with calls.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from nanovllm.entrypoints.server.errors import ApiError
from nanovllm.entrypoints.server.protocol import Message, ToolCall, joined_text
from nanovllm.errors import RequestError
from nanovllm.text.harmony import HARMONY_MARK

Conversation: TypeAlias = list[dict[str, Any]]
Render: TypeAlias = Callable[[Conversation], str]  # raises RequestError for messages that the template refuses
REASONING_NAMES = ("reasoning_content", "thinking")  # gpt-oss has the second name
CALL_OF_GEMMA = "<|tool_call>"
RAW_ARGUMENTS = "arguments"  # the name of the only argument of a call whose arguments are not an object
SYSTEM_ROLES = ("system", "developer")
_ONE_TEXT = re.compile(r"\bcontent and message\.thinking\b")  # a template that refuses both in a message with calls
_FIRST_CALL, _ALL_CALLS = re.compile(r"tool_calls\s*\[\s*0\s*\]"), re.compile(r"\bin\s+\S*tool_calls")


def render_messages(messages: Sequence[Message], template: str, render: Render) -> str:
    """Return the text of the messages, changed as little as the template needs to accept and render all of them.

    template: the template's source. If the template leaves out a system message in every form that it accepts, return
    the text of the first accepted form. If the template accepts no form, raise the RequestError about the messages as
    they were sent.
    """
    first_error: RequestError | None = None
    first_text: str | None = None
    if CALL_OF_GEMMA in template or HARMONY_MARK in template:
        _check_results(messages)
    sent = [_for_template(each, i, template) for i, each in enumerate(messages)]
    if CALL_OF_GEMMA in template:
        sent = _with_text_before_calls(sent)
    if _ONE_TEXT.search(template):
        sent = _with_one_text_before_calls(sent)
    if _FIRST_CALL.search(template) and not _ALL_CALLS.search(template):
        sent = _with_single_calls(sent)
    for conversation in _forms(sent):
        try:
            text = render(conversation)
            if not _leaves_out_a_system_message(conversation, text, render):
                return text
        except RequestError as error:
            first_error = first_error or error
        else:
            first_text = text if first_text is None else first_text
    if first_text is not None:
        return first_text
    assert first_error is not None, "there is always the form that was sent"
    raise first_error


def _check_results(messages: Sequence[Message]) -> None:
    """Refuse a result whose call is missing, for formats that name the function of each result."""
    call_ids: set[str | None] = {None}  # a result may have no id
    for message in messages:
        call_ids.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in call_ids:
            raise ApiError(
                f"the result with tool_call_id={message.tool_call_id!r} needs its call, because the model's format "
                "names the function of each result, but no earlier message has a call with this id; send the message "
                "with the call, too, or leave the result out",
                param="messages",
            )


def _leaves_out_a_system_message(conversation: Conversation, text: str, render: Render) -> bool:
    """Return True if `text`, which the template has made of the conversation, lacks a system or developer message.

    Templates may change a message's content, such as the white space. So if a message is not found in the text, the
    whole conversation is rendered once more with a mark in each message.
    """
    end, is_found = 0, True
    for message in conversation:  # in the order of the text, so that the time is linear in its length
        if message["role"] in SYSTEM_ROLES and (content := message["content"].strip()):
            start = text.find(content, end)
            is_found, end = start >= 0, start + len(content)
            if not is_found:
                break
    if is_found:
        return False
    mark = secrets.token_hex(8)
    marked = [
        each | {"content": f"{each['content']} {mark}n{i}n"}
        if each["role"] in SYSTEM_ROLES and each["content"].strip()
        else each
        for i, each in enumerate(conversation)
    ]
    num_marks = sum(each is not sent for each, sent in zip(marked, conversation, strict=True))
    return len(set(re.findall(rf"{mark}n\d+n", render(marked)))) < num_marks


def _forms(sent: Conversation) -> Iterator[Conversation]:
    """Yield the conversation as it was sent, and then with each set of changes, sets without later `CHANGES` first.

    So a change is made only if the earlier `CHANGES` alone do not help. A message that is added to a conversation may
    add a change, but never replaces the changes that the earlier messages needed.
    """
    tried: list[Conversation] = []
    for num in range(2 ** len(CHANGES)):
        changed = sent
        for i, change in enumerate(CHANGES):
            if num >> i & 1:
                changed = change(changed)
        if changed not in tried:
            tried.append(changed)
            yield changed


def _with_text_before_calls(messages: Conversation) -> Conversation:
    """Put the text of a message with calls into a separate message, with the reasoning.

    Gemma 4's template prints the text of the message after the results of its calls.
    """
    changed: Conversation = []
    for message in messages:
        if "tool_calls" in message and message["content"]:
            changed.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        changed.append(message)
    return changed


def _with_one_text_before_calls(messages: Conversation) -> Conversation:
    """Put the text of a message with calls after the message's reasoning. The template of gpt-oss takes one of them."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        if "tool_calls" not in message or not message["content"]:
            return message
        texts = {name: _joined(message[name], message["content"]) for name in REASONING_NAMES if name in message}
        return message | texts | {"content": ""} if texts else message

    return [changed(message) for message in messages]


def _with_one_leading_system_message(messages: Conversation) -> Conversation:
    """Join the system and developer messages at the beginning."""
    leading, rest = _split_leading(messages)
    if len(leading) < 2:
        return messages
    text = _joined(*(each["content"] for each in leading))
    return [leading[0] | {"role": "system", "content": text}, *rest]


def _with_late_system_text_of_the_user(messages: Conversation) -> Conversation:
    """Turn later system and developer messages into the user's text, at the same position.

    A late message is joined to the user's message before or after it. If both neighbours have other roles, the late
    message becomes a message of the user. No text comes between a call and its results. The prompt before a late
    message does not change, so its KV stays cached.
    """
    changed, rest = _split_leading(messages)
    texts: list[str] = []  # of late messages that wait for the end of results, or for the user's next message
    for message in [*rest, {"role": ""}]:
        is_user = message["role"] == "user"
        if message["role"] in SYSTEM_ROLES:
            if changed and changed[-1]["role"] == "user":
                changed[-1] = changed[-1] | {"content": _joined(changed[-1]["content"], message["content"])}
            else:
                texts.append(message["content"])
            continue
        if message["role"] != "tool":
            text, texts = _joined(*texts), []
            if text and is_user:
                message = message | {"content": _joined(text, message["content"])}
            elif text:
                changed.append({"role": "user", "content": text})
        changed.append(message)
    return changed[:-1]


def _with_object_arguments(messages: Conversation) -> Conversation:
    """Make the arguments of each call an object. Arguments of another type become the value of the only entry."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, dict):
            return call
        return call | {"function": call["function"] | {"arguments": {RAW_ARGUMENTS: arguments}}}

    return [
        each | {"tool_calls": [changed(call) for call in each["tool_calls"]]} if "tool_calls" in each else each
        for each in messages
    ]


def _with_single_calls(messages: Conversation) -> Conversation:
    """Put each call into a separate message, followed by its result.

    The first of the separate messages keeps the text and the reasoning. Results without a call come last.
    """
    changed: Conversation = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            changed.append(message)
            continue
        num_results = next((i for i, each in enumerate(rest) if each["role"] != "tool"), len(rest))
        results, rest = rest[:num_results], rest[num_results:]
        for i, call in enumerate(calls):
            own = message if i == 0 else {"role": "assistant", "content": ""}
            changed.append(own | {"tool_calls": [call]})
            is_last = i == len(calls) - 1
            matching = [each for each in results if is_last or each.get("tool_call_id") == call["id"]]
            changed += matching
            results = [each for each in results if each not in matching]
    return changed


def _with_system_text_in_the_question(messages: Conversation) -> Conversation:
    """Put the text of the leading system and developer messages before the text of the user's first message."""
    leading, rest = _split_leading(messages)
    place = next((i for i, each in enumerate(rest) if each["role"] == "user"), None)
    if not leading or place is None:
        return messages
    question = rest[place] | {"content": _joined(*(each["content"] for each in leading), rest[place]["content"])}
    return [*rest[:place], question, *rest[place + 1 :]]


def _with_alternating_roles(messages: Conversation) -> Conversation:
    """Join adjacent messages of the user, and adjacent messages of the assistant that call no tools."""
    changed: Conversation = []
    for message in messages:
        last = changed[-1] if changed else {"role": ""}
        is_same = message["role"] == last["role"] and message["role"] in ("user", "assistant")
        if is_same and not ("tool_calls" in message or "tool_calls" in last):
            changed[-1] = last | {"content": _joined(last["content"], message["content"])}
        else:
            changed.append(message)
    return changed


def _with_broken_tags(messages: Conversation) -> Conversation:
    """Break up the tags of harmony's channels in what the assistant has said, such as an explanation of the format."""
    names = ("content", *REASONING_NAMES)
    return [
        each | {name: each[name].replace("<|channel|>", "<| channel |>") for name in names if each.get(name)}
        if each["role"] == "assistant"
        else each
        for each in messages
    ]


def _split_leading(messages: Conversation) -> tuple[Conversation, Conversation]:
    """Return the system and developer messages at the beginning, and the rest."""
    num_leading = next((i for i, each in enumerate(messages) if each["role"] not in SYSTEM_ROLES), len(messages))
    return messages[:num_leading], messages[num_leading:]


def _joined(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


CHANGES = (
    _with_one_leading_system_message,
    _with_late_system_text_of_the_user,
    _with_object_arguments,
    _with_single_calls,
    _with_alternating_roles,
    _with_system_text_in_the_question,
    _with_broken_tags,
)


def _for_template(message: Message, index: int, template: str) -> dict[str, Any]:
    """Return a message as templates expect it: text as one string, and the arguments of tool calls as objects."""
    converted = message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        converted |= {name: reasoning for name in REASONING_NAMES if name == "reasoning_content" or name in template}
    is_known = message.role != "developer" or "developer" in template
    converted["role"] = message.role if is_known else "system"
    content = None if message.content is None else joined_text(message.content)
    content = content or message.refusal or content
    if message.tool_calls and message.role != "assistant":
        raise ApiError(f"messages[{index}] has tool_calls, which only the role 'assistant' can have", param="messages")
    if message.tool_calls:
        converted["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    if message.role != "user":  # answers, results and system messages may be empty
        content = content or ""
    converted["content"] = content
    return converted


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    """Return a call with its arguments as an object. Arguments that are not a JSON object stay the string that the
    model wrote.
    """
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments.strip() or "{}")
            arguments = {} if parsed is None else parsed if isinstance(parsed, dict) else arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
