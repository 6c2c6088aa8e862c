"""From the messages of a chat to token ids, through the model's chat template."""

import inspect
import json
from collections.abc import Sequence
from typing import Any

from nanovllm.core.sequence import TokenIds
from nanovllm.llm import LLM
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import Message, Tool, ToolCall
from nanovllm.server.service import Service

_RENDERED_NAMES = ("messages", "conversations")  # what the tokenizer itself passes on to the template


def encode_messages(
    service: Service,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    template_kwargs: dict[str, Any] | None,
    *,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    cache_salt: str | None = None,
) -> TokenIds:
    """Raises ApiError or RequestError for what the template cannot take."""
    llm = service.llm
    llm.check_chat_template()
    _check_template_kwargs(llm, template_kwargs or {})
    options = (template_kwargs or {}) | {"add_generation_prompt": add_generation_prompt}
    if tools:
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    conversation = [_for_template(message, f"messages[{i}]") for i, message in enumerate(messages)]
    (token_ids,) = llm.text.encode_chat(
        conversation,
        options,
        add_special_tokens=add_special_tokens,
        cache_salt=cache_salt,
        check_text=lambda text: service.check_chars(len(text), "messages"),  # tools and tool calls are part of it
    )
    return token_ids


def template_text(llm: LLM) -> str:
    """The model's chat template; all of them if it has several, "" if it has none."""
    template = getattr(llm.tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def _check_template_kwargs(llm: LLM, options: dict[str, Any]) -> None:
    """Refuse what belongs to the tokenizer and not to the template, above all a template of the client's own."""
    reserved = {*inspect.signature(llm.tokenizer.apply_chat_template).parameters, *_RENDERED_NAMES}
    if taken := sorted(reserved.intersection(options)):
        raise ApiError(f"chat_template_kwargs cannot set {', '.join(taken)}", param="chat_template_kwargs")


def _for_template(message: Message, name: str) -> dict[str, Any]:
    """A message as templates expect it: text as one string, and the arguments of tool calls as objects."""
    converted = message.model_dump(include={"name", "reasoning_content", "tool_call_id"}, exclude_none=True)
    converted["role"] = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if message.tool_calls:
        if message.role != "assistant":
            raise ApiError(f"{name} has tool_calls, which only the role 'assistant' can have", param="messages")
        converted["tool_calls"] = [_call_for_template(call, f"{name}.tool_calls") for call in message.tool_calls]
        content = content or ""  # templates put it before the calls
    converted["content"] = content
    return converted


def _call_for_template(call: ToolCall, name: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{name} has arguments that are not valid JSON: {error}", param="messages") from error
    if not isinstance(arguments, dict):
        raise ApiError(f"{name} has arguments that are not a JSON object", param="messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
