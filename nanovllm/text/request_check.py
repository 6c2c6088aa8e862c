"""Checks of users' prompts and messages. Bad ones raise RequestError; no check changes the engine."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from nanovllm.errors import RequestError
from nanovllm.plan.sequence import TokenIds

# A string, token ids, or as in vLLM a dict: {"prompt": str} or {"prompt_token_ids": token ids}. A dict may also have a
# "cache_salt"
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
    listed = prompts if isinstance(prompts, list | tuple | range | array | np.ndarray) else list(prompts)
    is_one = len(listed) > 0 and isinstance(listed[0], int | np.integer)
    return [listed] if is_one else list(listed)


def content_and_salt(prompt: Any) -> tuple[Any, str | None]:
    """Return the text or the token ids of a prompt, and its cache salt. As in vLLM, token ids precede text.

    Only prompts with equal salts share KV, and prompts without a salt share KV with each other.
    """
    if not isinstance(prompt, Mapping):
        return prompt, None
    salt = prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(f"cache_salt={salt!r} must be a non-empty string")
    unknown = [key for key in prompt if key not in (*_PROMPT_KEYS, "cache_salt")]
    found = [prompt[key] for key in reversed(_PROMPT_KEYS) if prompt.get(key) is not None]
    if unknown or not found:
        raise RequestError(
            f"a prompt is a dict with the keys {', '.join(map(repr, prompt)) or 'none'}; expected "
            '{"prompt": text} or {"prompt_token_ids": token ids}'
        )
    return found[0], salt


def check_token_ids(prompt: Any, vocab_size: int) -> TokenIds:
    """Copy a prompt of token ids into a new array. Raises RequestError unless all are integers in the vocabulary.

    prompt: a list, a tuple, a range, or a one-dimensional array of integers. A prompt can have a million ids, so this
    function runs no Python code for each id.
    """
    if isinstance(prompt, array | np.ndarray):
        numbers = np.asarray(prompt)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            shape, dtype = numbers.shape, numbers.dtype
            raise RequestError(f"a prompt is an array of {dtype} of shape {shape}, expected integers in one dimension")
        token_ids = array("q")
        token_ids.frombytes(np.ascontiguousarray(numbers, np.int64).view(np.uint8).data)
    elif isinstance(prompt, list | tuple | range):
        try:
            token_ids = array("q", prompt)
        except (TypeError, OverflowError) as error:
            raise _bad_token_id(prompt, vocab_size) from error
        places = np.flatnonzero(np.frombuffer(token_ids, np.uint64) < 2)  # only there an array takes a bool
        if bool in {type(prompt[place]) for place in places}:
            raise _bad_token_id(prompt, vocab_size)
    else:
        raise RequestError(f"a prompt has type {type(prompt).__name__}, expected a string or a list of token ids")
    if not are_in_vocabulary(token_ids, vocab_size):
        raise _bad_token_id(prompt, vocab_size)
    return token_ids


def are_in_vocabulary(token_ids: TokenIds, vocab_size: int) -> bool:
    """Return True if all ids are from 0 to vocab_size - 1. As unsigned numbers, negative ids are huge."""
    return not token_ids or bool(np.frombuffer(token_ids, dtype=np.uint64).max() < vocab_size)


def _bad_token_id(prompt: Sequence[Any], vocab_size: int) -> RequestError:
    """Return the error about the first id that is not an integer or is outside the vocabulary."""
    for position, token_id in enumerate(prompt):
        try:
            number = index(token_id)
        except TypeError:
            number = None
        if number is None or isinstance(token_id, bool):
            return RequestError(f"token_ids[{position}]={token_id!r} is not an integer; give a string or token ids")
        if not 0 <= number < vocab_size:
            return RequestError(
                f"token_ids[{position}]={number} is outside the vocabulary 0..{vocab_size - 1}; use the tokenizer "
                "that belongs to this model"
            )
    raise AssertionError("an id of the prompt was refused, but all are valid")


def check_conversations(messages: Any) -> list[list[Mapping[str, Any]]]:
    """Check `messages`, one conversation or a list of conversations, and return a list of conversations."""
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
    """Render the conversation with the model's chat template, by default up to the beginning of the answer.

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
