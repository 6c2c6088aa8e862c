"""The messages of a chat as its template takes them.

Templates differ in what they refuse: a second system message, several calls in one message, arguments that are not a
JSON object. So the messages are rendered as they were sent. Only if the template refuses them are they changed, by the
fewest of the `CHANGES` that make the template accept them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, TypeAlias, TypeVar

from nanovllm.errors import RequestError
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import Message, ToolCall, joined_text

Conversation: TypeAlias = list[dict[str, Any]]
Result = TypeVar("Result")
RAW_ARGUMENTS = "arguments"  # the name of the only argument of a call whose arguments are not an object
SYSTEM_ROLES = ("system", "developer")


def render_messages(messages: Sequence[Message], template: str, render: Callable[[Conversation], Result]) -> Result:
    """Return what `render` returns for the messages, or for the least changed ones that the template accepts.

    template: its source. render: raises RequestError for messages that the template refuses. Raises the RequestError
    about the messages as they were sent if the template accepts them in no form.
    """
    knows_developer = "developer" in template
    first_error: RequestError | None = None
    for conversation in _forms([_for_template(each, i, knows_developer) for i, each in enumerate(messages)]):
        try:
            return render(conversation)
        except RequestError as error:
            first_error = first_error or error
    assert first_error is not None, "there is always the form that was sent"
    raise first_error


def _forms(sent: Conversation) -> Iterator[Conversation]:
    """Yield the conversation as it was sent, then with each of the changes, then with two of them, then with more."""
    yield sent
    tried = [sent]
    for num_changes in range(1, len(CHANGES) + 1):
        for changes in combinations(CHANGES, num_changes):
            changed = sent
            for change in changes:
                changed = change(changed)
            if changed not in tried:
                tried.append(changed)
                yield changed


def _with_one_system_message(messages: Conversation) -> Conversation:
    """Join all system and developer messages, and put them first."""
    system = [each for each in messages if each["role"] in SYSTEM_ROLES]
    if not system:
        return messages
    text = _joined(*(each["content"] for each in system))
    rest = [each for each in messages if each["role"] not in SYSTEM_ROLES]
    return [system[0] | {"role": "system", "content": text}, *rest]


def _with_object_arguments(messages: Conversation) -> Conversation:
    """Make the arguments of each call an object: others become the value of its only entry."""

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

    The first of these messages keeps the text and the reasoning. Results that belong to none of the calls come last.
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
    """Put the text of all system and developer messages before the text of the user's first message."""
    first, *rest = _with_one_system_message(messages)
    if first["role"] not in SYSTEM_ROLES:
        return messages
    place = next((i for i, each in enumerate(rest) if each["role"] == "user"), None)
    if place is None:
        return messages
    question = rest[place] | {"content": _joined(first["content"], rest[place]["content"])}
    return [*rest[:place], question, *rest[place + 1 :]]


def _with_alternating_roles(messages: Conversation) -> Conversation:
    """Join messages of the user that follow each other, and messages of the assistant that do and call nothing."""
    changed: Conversation = []
    for message in messages:
        last = changed[-1] if changed else {"role": ""}
        is_same = message["role"] == last["role"] and message["role"] in ("user", "assistant")
        if is_same and not ("tool_calls" in message or "tool_calls" in last):
            changed[-1] = last | {"content": _joined(last["content"], message["content"])}
        else:
            changed.append(message)
    return changed


def _joined(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


CHANGES = (
    _with_one_system_message,
    _with_object_arguments,
    _with_single_calls,
    _with_alternating_roles,
    _with_system_text_in_the_question,
)


def _for_template(message: Message, index: int, knows_developer: bool) -> dict[str, Any]:
    """A message as templates expect it: text as one string, and the arguments of tool calls as objects."""
    converted = message.model_dump(include={"name", "reasoning_content", "tool_call_id"}, exclude_none=True)
    if message.reasoning is not None:
        converted.setdefault("reasoning_content", message.reasoning)
    is_known = message.role != "developer" or knows_developer
    converted["role"] = message.role if is_known else "system"
    content = None if message.content is None else joined_text(message.content)
    content = content or message.refusal or content
    if message.tool_calls and message.role != "assistant":
        raise ApiError(f"messages[{index}] has tool_calls, which only the role 'assistant' can have", param="messages")
    if message.tool_calls:
        converted["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    if message.role in ("assistant", "tool"):  # an answer may be empty, and so may a result
        content = content or ""
    converted["content"] = content
    return converted


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    """Arguments that are not a JSON object stay a string: the model has written them, and should see what it wrote."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments.strip() or "{}")
            arguments = {} if parsed is None else parsed if isinstance(parsed, dict) else arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
