"""Limits on what one request can ask for, so that no client keeps the server busy with a single body."""

from collections.abc import Mapping, Sized
from typing import Any

from nanovllm.server.options import ServerOptions
from nanovllm.server.refusals import Refusal

CHARS_PER_TOKEN = 16  # few texts have as many; without a limit, a text that cannot fit is tokenized for seconds
_LISTS = (
    *("prompt", "messages", "tools", "stop", "stop_token_ids", "bad_words", "logit_bias"),
    *("guided_choice", "allowed_token_ids"),
)


class RequestLimits:
    def __init__(self, options: ServerOptions, max_model_len: int) -> None:
        self._options = options
        self.max_prompt_chars = options.max_prompt_chars or CHARS_PER_TOKEN * max_model_len

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise Refusal for a body that asks for too much. `fields`: the body's entries that were given.

        A list of token ids has no limit here, since the engine checks the length of each prompt.
        """
        for name in _LISTS:
            value = fields.get(name)
            if isinstance(value, Sized) and not isinstance(value, str) and not _is_token_ids(name, value):
                self._check(f"the length of {name}", name, len(value), "max_list_items")
        if isinstance(fields.get("n"), int):
            self._check("n", "n", fields["n"], "max_n")
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            value = fields.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                self._check(name, name, value, "max_logprobs")
        self._check_texts(fields)

    def _check_texts(self, fields: Mapping[str, Any]) -> None:
        """Prompts are tokenized one by one, but messages all together."""
        prompt = fields.get("prompt")
        lengths = [len(text) for text in (prompt if isinstance(prompt, list) else [prompt]) if isinstance(text, str)]
        longest = max(lengths, default=0)
        self.check_chars(longest, "prompt")
        self.check_chars(sum(map(_num_chars, fields.get("messages") or ())), "messages")

    def check_chars(self, num_chars: int, param: str) -> None:
        if num_chars > self.max_prompt_chars:
            message = f"{param} has {num_chars} characters, at most {self.max_prompt_chars} are allowed; shorten it"
            raise Refusal(400, "prompt_chars", message, param=param)

    def _check(self, what: str, param: str, value: int, option: str) -> None:
        limit = getattr(self._options, option)
        if value > limit:
            raise Refusal(400, option.removeprefix("max_"), f"{what} is {value}, at most {limit}", param=param)


def _is_token_ids(name: str, value: Any) -> bool:
    return name == "prompt" and isinstance(value, list) and bool(value) and isinstance(value[0], int)


def _num_chars(message: Any) -> int:
    """The length of a message's texts. `message` is a dict or an object with the same fields."""
    content = _field(message, "content")
    parts = content if isinstance(content, list) else [content]
    texts = [part if isinstance(part, str) else _field(part, "text") for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
