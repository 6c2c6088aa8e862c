"""RequestOutput: what a request returns. An output is a dict whose entries are also attributes, with vLLM's names.

output["text"] == output.text == output.outputs[0].text
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_type_hints

ErrorCause: TypeAlias = Literal["request", "engine"]  # "request": the request's own parameters made it fail


class Logprob(NamedTuple):
    """The log-probability of a token at one position, by the model itself: before edits, temperature and filters."""

    logprob: float  # natural log
    rank: int  # 1 for the most likely token
    text: str | None  # the token's text, or None without a tokenizer

    @property
    def decoded_token(self) -> str | None:
        """The same as `text`."""
        return self.text


# One position: token id -> Logprob. First the token at the position, then the most likely tokens in order.
TokenLogprobs: TypeAlias = dict[int, Logprob]


class RequestMetrics(NamedTuple):
    """Times of a request in seconds since its arrival. A time is None if the request got no token."""

    num_generation_tokens: int
    first_token_latency: float | None
    first_token_ts: float | None
    last_token_ts: float | None
    queued_ts: float = 0.0


class _Entries(dict[str, Any]):
    """A dict whose entries are also attributes. The attribute of an entry that is absent is None."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in self or name in _entry_names(type(self)):
            return self.get(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_entry_names(type(self))})


class CompletionOutput(_Entries):
    """One answer. The entries, and with the same names the attributes:

    - index: the answer's index among the answers of its request; an attribute only.
    - text: the decoded token_ids, up to the stop string or end token. The text ends in U+FFFD if max_tokens or an abort
      cuts a character in two. None with detokenize=False or if the model has no tokenizer.
    - token_ids: the tokens of the answer.
    - finish_reason: "stop" (an end token or a stop string), "length" (max_tokens), "abort" or "error". With "abort" and
      "error", the output has the tokens generated until then. None for an answer that goes on (AsyncLLM).
    - stop_reason: the stop string or the token of stop_token_ids that ended the answer, otherwise None.
    - logprobs: the log-probabilities of each token of token_ids; present only if the request set logprobs.
    - cumulative_logprob: the sum of the log-probabilities of token_ids, or None without `logprobs`; an attribute only.
    """

    __slots__ = ()
    text: str | None
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: Sequence[TokenLogprobs] | None

    @property
    def index(self) -> int:
        number: int = self.get("index", 0)
        return number

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        return sum(entry[token_id].logprob for token_id, entry in zip(self.token_ids, self.logprobs, strict=True))


class RequestOutput(CompletionOutput):
    """The output of a request that has ended: its first answer's entries (see CompletionOutput), and these:

    - request_id: a string; as an entry, the number that `add_request` returned.
    - prompt: the prompt's text; for a conversation, the text that the chat template made. None for token ids.
    - prompt_token_ids, num_prompt_tokens: the prompt's tokens, and their number.
    - num_cached_tokens: prompt tokens found in the prefix cache.
    - ttft_s: seconds from arrival to the first token, or None without a token.
    - tpot_s: mean seconds between tokens, or None for fewer than two tokens.
    - error: what happened; present only with finish_reason "error".
    - error_cause: "request" if the request's own parameters made the request fail, otherwise "engine"; present with
      `error`.
    - prompt_logprobs: the log-probabilities of each prompt token, None for the first token; present only if the request
      set prompt_logprobs. If the request ends before its whole prompt is computed, the list ends early. An LLM returns
      `logprobs` and `prompt_logprobs` as lists; an AsyncLLM returns LogprobLists, which make their entries when read.
    - outputs: all answers. With n == 1 the dict has no such key, but output["outputs"] works, too.

    finished and metrics are attributes only.
    """

    __slots__ = ()
    prompt: str | None
    prompt_token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    error: str | None
    error_cause: ErrorCause | None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None

    @property
    def outputs(self) -> "list[RequestOutput]":
        answers: list[RequestOutput] = self["outputs"]
        return answers

    def __missing__(self, name: str) -> "list[RequestOutput]":
        if name == "outputs":  # not stored with n == 1, as a dict that contains itself cannot be written as JSON
            return [self]
        raise KeyError(name)

    @property
    def request_id(self) -> str:
        return str(self["request_id"])

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def metrics(self) -> RequestMetrics:
        num_tokens, first_s = len(self.token_ids), self.ttft_s
        last_s = None if first_s is None else first_s + (self.tpot_s or 0.0) * (num_tokens - 1)
        return RequestMetrics(num_tokens, first_s, first_s, last_s)


@cache
def _entry_names(kind: type) -> frozenset[str]:
    return frozenset(get_type_hints(kind))
