"""Checks of the prompts and messages that users pass in. Bad ones raise RequestError; nothing changes the engine."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from nanovllm.errors import RequestError
from nanovllm.plan.sequence import TokenIds

# A string, token ids, or as in vLLM a dict that holds one of them: {"prompt": str} or {"prompt_token_ids": token ids}.
# A dict may also have a "cache_salt"
Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Mapping[str, Any]
_PROMPT_KEYS = ("prompt", "prompt_token_ids")


def prompt_list(prompts: Any) -> list[Any]:
    """Make a list from one prompt or an iterable of prompts. The prompts themselves are checked later."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts has type {type(prompts).__name__}, expected a prompt (a string, a list of token ids or a dict) "
            "or several"
        )
    is_one_array = isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype.kind in "iu"
    listed = list(prompts)
    return [prompts if is_one_array else listed] if listed and isinstance(listed[0], int | np.integer) else listed


def text_or_token_ids(prompt: Any) -> Any:
    """Return the text or token ids of a prompt, which may be a dict. If a dict has both, the ids count, as in vLLM."""
    if not isinstance(prompt, Mapping):
        return prompt
    cache_salt(prompt)
    unknown = [key for key in prompt if key not in (*_PROMPT_KEYS, "cache_salt")]
    found = [prompt[key] for key in reversed(_PROMPT_KEYS) if prompt.get(key) is not None]
    if unknown or not found:
        raise RequestError(
            f"a prompt is a dict with the keys {', '.join(map(repr, prompt)) or 'none'}; expected "
            '{"prompt": text} or {"prompt_token_ids": token ids}'
        )
    return found[0]


def cache_salt(prompt: Any) -> str | None:
    """Return the prompt's cache salt; only prompts with equal salts share KV. None, the default, is a salt, too."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(f"cache_salt={salt!r} must be a non-empty string")
    return salt


def check_token_ids(prompt: Any, vocab_size: int) -> TokenIds:
    """Convert a prompt of token ids to int64. Raises RequestError unless all are integers in the vocabulary.

    `prompt` is a list, a tuple, a range, or a one-dimensional array of integers.
    """
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            shape, dtype = prompt.shape, prompt.dtype
            raise RequestError(f"a prompt is an array of {dtype} of shape {shape}, expected integers in one dimension")
        prompt = prompt.tolist()
    elif isinstance(prompt, array | range):
        prompt = list(prompt)
    if not isinstance(prompt, list | tuple):
        raise RequestError(f"a prompt has type {type(prompt).__name__}, expected a string or a list of token ids")
    if set(map(type, prompt)) - {int}:
        prompt = [int(token_id) if isinstance(token_id, np.integer) else token_id for token_id in prompt]
    if set(map(type, prompt)) - {int}:
        position, token_id = next((i, t) for i, t in enumerate(prompt) if type(t) is not int)
        raise RequestError(f"token_ids[{position}]={token_id!r} is not an integer; give a string or token ids")
    with suppress(OverflowError):  # an id does not fit in 64 bits
        token_ids = array("q", prompt)
        if are_in_vocabulary(token_ids, vocab_size):
            return token_ids
    position, token_id = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < vocab_size)
    raise RequestError(
        f"token_ids[{position}]={token_id} is outside the vocabulary 0..{vocab_size - 1}; use the tokenizer that "
        "belongs to this model"
    )


def are_in_vocabulary(token_ids: TokenIds, vocab_size: int) -> bool:
    """Check both limits in one comparison: read as unsigned numbers, negative ids are huge."""
    return not token_ids or bool(np.frombuffer(token_ids, dtype=np.uint64).max() < vocab_size)


def check_conversations(messages: Any) -> list[list[Mapping[str, Any]]]:
    """Check `messages`, which is one conversation or a list of them, and return it as a list of conversations."""
    if not isinstance(messages, list | tuple):
        raise RequestError(f'messages has type {type(messages).__name__}, expected a list of {{"role", "content"}}')
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    conversations: list[Any] = list(messages) if isinstance(messages[0], list | tuple) else [messages]
    for conversation in conversations:
        if not isinstance(conversation, list | tuple):
            raise RequestError("messages mixes messages and lists of messages; give one conversation or a list of them")
        if not conversation:
            raise RequestError("a conversation in messages is empty; give each at least one message")
        for i, message in enumerate(conversation):
            _check_message(message, f"messages[{i}]")
    return conversations


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, Mapping):
        raise RequestError(f'{name} has type {type(message).__name__}, expected a dict of "role" and "content"')
    if not isinstance(message.get("role"), str):
        raise RequestError(f'{name} has role={message.get("role")!r}, expected a string such as "user"')
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError(f"{name} has content={content!r}, expected a string")


def render_chat(
    tokenizer: Any, conversation: list[Mapping[str, Any]], template_options: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Render the conversation with the model's chat template, by default up to where the answer begins.

    template_options: tools, add_generation_prompt, and other arguments of the template.
    """
    from jinja2 import TemplateSyntaxError

    options = {"add_generation_prompt": True, **template_options, "tokenize": False}
    try:
        prompt: str = tokenizer.apply_chat_template(conversation, **options)
    except TemplateSyntaxError as error:
        raise RequestError(
            f"the model's chat template is not a valid Jinja template (line {error.lineno}: {error}); correct it in "
            "chat_template.jinja or tokenizer_config.json"
        ) from error
    except Exception as error:  # a template is a program, and may raise anything, even on purpose
        raise RequestError(
            f"the model's chat template cannot render these messages: {error}; check their roles and their order"
        ) from error
    return prompt
