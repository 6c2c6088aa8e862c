"""SamplingParams: how the tokens of one request are chosen, and when the answer ends."""

from dataclasses import dataclass

from nanovllm.errors import RequestError
from nanovllm.utils.options import option

# On the device, temperatures and the logits divided by them are fp32. Within these limits sampling already ranges from
# greedy to uniform; far outside them, 1 / temperature would overflow or underflow.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-10, 1e10
MAX_INT32 = 2**31 - 1  # positions, lengths and block tables are int32 on the device
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1  # seeds are int64 on the device

INVALID_TOKEN = -1  # the sampler returns this instead of a token id if the logits hold NaN or infinity

_GROUP = "sampling"


def _require(condition: bool, name: str, value: object, limit: str) -> None:
    if not condition:
        raise RequestError(f"SamplingParams.{name}={value!r} must be {limit}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. The `help` of each field says what it means.

    An invalid value raises RequestError, whose message names the field, the value and the limit.

    temperature is 0, or from 1e-10 to 1e10. seed is a signed 64-bit integer.

    The filters are applied in the same order as in transformers: temperature, top_k, top_p, min_p. top_p looks at the
    tokens that top_k kept, with their probabilities rescaled to add up to 1. Tokens exactly as likely as the k-th one
    are kept too. If top_p cuts between equally likely tokens, it keeps those with lower ids. The most likely token is
    never filtered out. Greedy requests ignore the filters.

    skip_special_tokens, include_stop_str_in_output and detokenize mean the same as in vLLM. They affect only the text,
    never token_ids. A stop string can match a special token only with skip_special_tokens=False.
    """

    temperature: float = option(1.0, help="sampling temperature; 0 always takes the most likely token", group=_GROUP)
    max_tokens: int | None = option(
        64,
        help="maximum number of new tokens; from Python, None: as many as the context and the KV cache have room for",
        group=_GROUP,
    )
    top_k: int = option(0, help="sample from this many of the most likely tokens; 0 or -1: from all", group=_GROUP)
    top_p: float = option(
        1.0,
        help="sample from the smallest set of most likely tokens whose probabilities add up to at least this",
        group=_GROUP,
    )
    min_p: float = option(
        0.0,
        help="sample from the tokens whose probability is at least this fraction of the most likely token's",
        group=_GROUP,
    )
    stop: str | tuple[str, ...] | list[str] | None = option(
        (), help="end the answer where one of these strings appears, and leave it out of the text", group=_GROUP
    )
    stop_token_ids: tuple[int, ...] | list[int] | None = option(
        (), help="end the answer at any of these tokens, in addition to the model's end tokens", group=_GROUP
    )
    ignore_eos: bool = option(False, help="continue past the model's end tokens", group=_GROUP)
    seed: int | None = option(
        None,
        help="seed of this request; the same seed gives the same tokens, whatever else is in the batch; "
        "by default, derived from the engine's seed",
        group=_GROUP,
    )
    skip_special_tokens: bool = option(True, help="leave special tokens out of the text", group=_GROUP)
    include_stop_str_in_output: bool = option(
        False, help="keep the stop string or end token that ended the answer in its text", group=_GROUP
    )
    detokenize: bool = option(
        True, help="produce text; if off, the output's text is None and stop strings are refused", group=_GROUP
    )

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        are_strings = isinstance(stop, list | tuple) and all(isinstance(s, str) and s for s in stop)
        _require(are_strings, "stop", self.stop, "a non-empty string or a list of them")
        token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        are_ids = isinstance(token_ids, list | tuple) and all(_is_integer(t) and t >= 0 for t in token_ids)
        _require(are_ids, "stop_token_ids", self.stop_token_ids, "token ids, each 0 or more")
        if stop and not self.detokenize:
            raise RequestError(
                f"SamplingParams.stop={self.stop!r} needs text; leave detokenize on, or use stop_token_ids"
            )
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(token_ids))

    def _check_numbers(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            _require(isinstance(value, int | float) and not isinstance(value, bool), name, value, "a number")
        in_range = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE
        limits = f"0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        _require(in_range, "temperature", self.temperature, limits)
        if self.max_tokens is not None:
            _require(_is_integer(self.max_tokens), "max_tokens", self.max_tokens, "an integer or None")
            in_range = 1 <= self.max_tokens <= MAX_INT32
            _require(in_range, "max_tokens", self.max_tokens, f"1 or more, at most {MAX_INT32}")
        _require(_is_integer(self.top_k), "top_k", self.top_k, "an integer")
        limits = f"1 or more, or 0 or -1 to keep every token, and at most {MAX_INT32}"
        _require(-1 <= self.top_k <= MAX_INT32, "top_k", self.top_k, limits)
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(self.seed is None or _is_integer(self.seed), "seed", self.seed, "an integer or None")
        limits = f"from {MIN_SEED} to {MAX_SEED} (64 bits), or None to derive one from the engine's seed"
        _require(MIN_SEED <= (self.seed or 0) <= MAX_SEED, "seed", self.seed, limits)
