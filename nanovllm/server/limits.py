"""Limits on what one request can ask for, so that no client keeps the server busy with a single body."""

from collections.abc import Mapping, Sized
from typing import Any

from nanovllm.sampling_params import MAX_LOGPROBS
from nanovllm.server.errors import Refusal
from nanovllm.server.options import ServerOptions
from nanovllm.server.sampling import COMPLETION_MAX_TOKENS

CHARS_PER_TOKEN = 16  # few texts have as many; without a limit, a text that cannot fit is tokenized for seconds
MAX_N = 128  # answers to one prompt
MAX_STOP = 64  # strings, each of which is looked for in every step
MAX_LIST_ITEMS = 4096  # of the other lists
MIN_TOTAL_LOGPROBS = 1 << 22  # of one request, about 100 bytes each; a longer context may have more
_LISTS = (*("prompt", "messages", "tools", "stop_token_ids", "bad_words", "logit_bias", "guided_choice"),)


class RequestLimits:
    def __init__(self, options: ServerOptions, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._max_total_logprobs = max(MIN_TOTAL_LOGPROBS, 2 * (1 + MAX_LOGPROBS) * max_model_len)
        self.max_prompt_chars = options.max_prompt_chars or CHARS_PER_TOKEN * max_model_len

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise Refusal for a body that asks for too much. `fields`: the body's entries that were given."""
        for name in _LISTS:
            value = fields.get(name)
            if isinstance(value, Sized) and not isinstance(value, str) and not _is_token_ids(name, value):
                self._check("list_items", name, len(value), MAX_LIST_ITEMS)
        if isinstance(stop := fields.get("stop"), list):
            self._check("stop", "stop", len(stop), MAX_STOP)
        if isinstance(fields.get("n"), int):
            self._check("n", "n", fields["n"], MAX_N)
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            value = fields.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                self._check("logprobs", name, value, MAX_LOGPROBS)
        self._check_texts(fields)
        self._check_token_ids(fields.get("tokens"), "tokens")
        self._check_total_logprobs(fields)

    def _check_texts(self, fields: Mapping[str, Any]) -> None:
        """Prompts are tokenized one by one, but messages all together."""
        for prompt in _prompts(fields.get("prompt")):
            if isinstance(prompt, str):
                self.check_chars(len(prompt), "prompt")
            self._check_token_ids(prompt, "prompt")
        self.check_chars(sum(map(_num_chars, fields.get("messages") or ())), "messages")

    def _check_token_ids(self, token_ids: Any, param: str) -> None:
        """The engine would refuse them, too, but only after all of them were read, and perhaps decoded."""
        if isinstance(token_ids, list) and len(token_ids) > self._max_model_len:
            message = f"{param} has {len(token_ids)} token ids, at most max_model_len={self._max_model_len}; shorten it"
            raise Refusal(400, "prompt_tokens", message, param=param)

    def _check_total_logprobs(self, fields: Mapping[str, Any]) -> None:
        """All log-probabilities of a request are in memory at once, until its last answer has been sent."""
        prompts, longest = _prompts(fields.get("prompt")), self._max_model_len
        num_top = fields.get("logprobs")
        num_prompt_top = fields.get("prompt_logprobs")
        if num_top is not None and fields.get("echo"):
            num_prompt_top = max(num_top, num_prompt_top or 0)
        if isinstance(num_top, bool):  # of a chat
            num_top = (fields.get("top_logprobs") or 0) if num_top else None
        total = 0
        if num_top is not None:
            max_tokens = fields.get("max_completion_tokens") or fields.get("max_tokens")
            default = COMPLETION_MAX_TOKENS if "prompt" in fields else longest
            num_tokens = min(longest, default if max_tokens is None else max_tokens)
            total += (1 + num_top) * num_tokens * len(prompts) * (fields.get("n") or 1)
        if num_prompt_top is not None:
            lengths = [longest if each is None else min(longest, len(each)) for each in prompts]
            total += (1 + num_prompt_top) * sum(lengths)
        if total > self._max_total_logprobs:
            message = (
                f"the request asks for up to {total} log-probabilities, at most {self._max_total_logprobs}; lower "
                "logprobs, prompt_logprobs, max_tokens or n, or send fewer prompts"
            )
            raise Refusal(400, "logprobs", message, param="logprobs" if num_top else "prompt_logprobs")

    def check_chars(self, num_chars: int, param: str) -> None:
        if num_chars > self.max_prompt_chars:
            message = f"{param} has {num_chars} characters, at most {self.max_prompt_chars} are allowed; shorten it"
            raise Refusal(400, "prompt_chars", message, param=param)

    def _check(self, reason: str, param: str, value: int, limit: int) -> None:
        if value > limit:
            what = f"the length of {param}" if reason in ("list_items", "stop") else param
            raise Refusal(400, reason, f"{what} is {value}, at most {limit}", param=param)


def _prompts(prompt: Any) -> list[Any]:
    """Texts and lists of token ids. [None]: one prompt of unknown length, such as a chat."""
    is_list = isinstance(prompt, list) and not _is_token_ids("prompt", prompt)
    if is_list:
        return [each if isinstance(each, str | list) else [] for each in prompt]
    return [prompt if isinstance(prompt, str | list) else None]


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
