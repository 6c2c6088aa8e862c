"""SamplingParams: how one request's tokens are chosen and when it ends."""

from dataclasses import dataclass

# Temperatures are fp32 on the device, and so are the logits divided by them. Below the range a token is drawn as if
# greedily, above it as if all were equally likely; further out 1 / temperature overflows or vanishes.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-10, 1e10
MAX_INT32 = 2**31 - 1  # positions, lengths and block tables are int32 on the device
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1  # seeds are int64 on the device

INVALID_TOKEN = -1  # what the sampler returns instead of a token id where the logits hold NaN or infinity


def _require(condition: bool, name: str, value: object, limit: str) -> None:
    if not condition:
        raise ValueError(f"SamplingParams.{name}={value!r} must be {limit}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Checked where it is made: a bad value raises ValueError with its name, the value and the limit.

    temperature: 0 is greedy, all else from 1e-10 to 1e10. max_tokens: most new tokens; None: as many as the context
    and the KV cache have room for. ignore_eos: go on past the model's end tokens. stop: the text ends before the first
    of these strings. stop_token_ids: end tokens besides the model's. seed: 64 bits, signed; the same seed gives the
    same tokens whatever the request is batched with; None draws one from the engine's seed.

    skip_special_tokens: leave special tokens out of the text; a stop string can match one only where this is False.
    include_stop_str_in_output: the text includes the stop string or end token that ended it, which is left out
    otherwise. detokenize: False makes no text at all: output["text"] is None, and stop strings are refused. These three
    have the names and the meaning that they have in vLLM. None of them changes token_ids.

    The filters keep what transformers keeps, and apply in its order: temperature, top_k, top_p, min_p. Greedy requests
    ignore them, and the most likely token is always kept.
    top_k: keep the k most likely tokens and those exactly as likely as the k-th, 0 or -1 for all. top_p: of what top_k
    kept, taken as the whole distribution, keep the smallest set of most likely tokens whose probability reaches top_p;
    among equally likely tokens the lower id comes first. min_p: keep tokens at least min_p times as likely as the most
    likely one.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: str | tuple[str, ...] | list[str] | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    seed: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        are_strings = isinstance(stop, list | tuple) and all(isinstance(s, str) and s for s in stop)
        _require(are_strings, "stop", self.stop, "a non-empty string or several")
        token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        are_ids = isinstance(token_ids, list | tuple) and all(_is_integer(t) and t >= 0 for t in token_ids)
        _require(are_ids, "stop_token_ids", self.stop_token_ids, "token ids")
        if stop and not self.detokenize:
            raise ValueError(
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
        limits = f"from {MIN_SEED} to {MAX_SEED} (64 bits), or None for one of the engine's"
        _require(MIN_SEED <= (self.seed or 0) <= MAX_SEED, "seed", self.seed, limits)
