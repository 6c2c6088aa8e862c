"""SamplingParams: the options that choose the tokens of one request and end its answer."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from nanovllm.compat import SAMPLING, STRUCTURED, takes
from nanovllm.errors import RequestError
from nanovllm.utils.options import MAX_INT32, check_options, documented, option, shown

# On the device, temperatures and the logits divided by them are fp32. Within these limits sampling already ranges from
# greedy to uniform; far outside them, 1 / temperature would overflow or underflow.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-10, 1e10
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1  # seeds are int64 on the device
MAX_LOGPROBS = 20  # most likely tokens whose log-probabilities are reported at each position
MAX_PENALTY = 2.0  # limit of presence and frequency penalties, as in OpenAI's API
MAX_LOGIT_BIAS = 100.0  # as in OpenAI's API
MAX_STOP_CHARS = 16_384  # limit of all stop strings together; 16,384 characters take 15 ms to prepare

INVALID_TOKEN = -1  # the sampler returns this instead of a token id if the logits hold NaN or infinity

_GROUP = "sampling"


def _require(condition: bool, name: str, value: object, limit: str, owner: str = "SamplingParams") -> None:
    if not condition:
        raise RequestError(f"{owner}.{name}={shown(value)} must be {limit}")


class ModelLimit(int):
    """A max_tokens that the model's generation_config.json recommends. Unlike the user's max_tokens, it is reduced to
    what fits into the context after a prompt.
    """


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT32


def _as_strings(value: str | tuple[str, ...] | list[str] | None, name: str) -> tuple[str, ...]:
    """Return the strings of an option that takes one string, several or none."""
    strings = (value,) if isinstance(value, str) else () if value is None else value
    are_strings = isinstance(strings, list | tuple) and all(isinstance(each, str) and each for each in strings)
    _require(are_strings, name, value, "a non-empty string or a list of them")
    return tuple(strings)


def _is_tag(value: object) -> bool:
    return isinstance(value, str) and value.startswith("<") and value.count("<") == 1


def _wrapped(seed: int) -> int:
    """Wrap `seed` around to a signed 64-bit integer."""
    return (seed - MIN_SEED) % 2**64 + MIN_SEED


@dataclass(frozen=True, kw_only=True)
class TaggedJson:
    """An answer with JSON between tags, such as tool calls. Each of `tags` is (begin, JSON schema, end). In place of
    one JSON value, there can be several values with separate tags (TaggedValue), in the given order.

    trigger: the answer is any text up to this string, with which every tag begins. If trigger is empty, the text
    outside the tags does not begin with "{". is_required: the answer is nothing but JSON between tags, at least once.
    is_single: JSON between tags occurs at most once, at the end of the answer. separator: stands between two tagged
    values. names: of the tags, for the log. text_pattern, value_pattern: regular expressions, in Rust's syntax, of the
    text outside tags and of each text between tags of a value; empty for any text. quote: the token on either side of a
    string, in a notation like JSON whose keys have no quotes (text/quoted_grammar.py); empty for JSON.
    """

    tags: tuple[tuple[str, Mapping[str, Any] | tuple["TaggedValue", ...], str], ...]
    trigger: str = ""
    separator: str = ""
    is_required: bool = False
    is_single: bool = False
    names: tuple[str, ...] = ()
    text_pattern: str = ""
    value_pattern: str = ""
    quote: str = ""


class RequestOutputKind(str, Enum):
    """vLLM's names for the values of SamplingParams.output_kind."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class TaggedValue(NamedTuple):
    """A value between separate tags.

    schema: the JSON schema of the value, or None for a text, which must be one of `choices` if there are any.
    """

    begin: str
    schema: Mapping[str, Any] | None
    end: str
    is_required: bool
    choices: tuple[str, ...] = ()


class ReasoningTags(NamedTuple):
    """The tags around the reasoning that an answer may begin with.

    has_begun: the prompt ends with `begin`, so the answer begins inside the reasoning.
    """

    begin: str
    end: str
    has_begun: bool = False


class HarmonyTags(NamedTuple):
    """Stands in for ReasoningTags if the answer has messages in channels, as gpt-oss writes them (text/harmony.py).

    begun: the part of the first message that the prompt ends with.
    """

    begun: str = "<|start|>assistant"


AnswerTags: TypeAlias = ReasoningTags | HarmonyTags


@takes(STRUCTURED, RequestError)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the answer after its reasoning: one of the first four fields, which mean the same as in vLLM, or
    tagged_json. If one of the four and tagged_json are given, the answer matches one or the other.

    json: a JSON schema, as a dict or as text. json_object: any JSON object. regex: a regular expression that the whole
    answer matches. choice: the strings of which the answer is one. tagged_json: JSON between tags.
    """

    json: Mapping[str, Any] | str | None = field(default=None, hash=False)
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    tagged_json: TaggedJson | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        given = [each.name for each in fields(self) if getattr(self, each.name) not in (None, False)]
        if len(given) != 1 and not (len(given) == 2 and "tagged_json" in given):
            names = ", ".join(given) or "none of them"
            raise RequestError(f"structured_outputs has {names}; give one of json, json_object, regex and choice")
        require = partial(_require, owner="StructuredOutputs")
        require(self.json is None or isinstance(self.json, Mapping | str), "json", self.json, "a dict or a string")
        require(isinstance(self.json_object, bool), "json_object", self.json_object, "True or False")
        require(self.regex is None or isinstance(self.regex, str), "regex", self.regex, "a string")
        is_tagged = self.tagged_json is None or isinstance(self.tagged_json, TaggedJson)
        require(is_tagged, "tagged_json", self.tagged_json, "a TaggedJson")
        if self.choice is not None:
            is_list = isinstance(self.choice, list | tuple) and bool(self.choice)
            are_strings = is_list and all(isinstance(each, str) and each for each in self.choice)
            require(are_strings, "choice", self.choice, "a list of strings, none of them empty")
            object.__setattr__(self, "choice", tuple(self.choice))


StructuredOutputsParams = GuidedDecodingParams = StructuredOutputs  # vLLM's names


@documented()
@takes(SAMPLING, RequestError)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request.

    An invalid value raises RequestError, whose message names the field, the value and the limit.

    temperature is 0, or from 1e-10 to 1e10. seed is a signed 64-bit integer.

    The filters are applied in the same order as in transformers: temperature, top_k, top_p, min_p. top_p looks at the
    tokens that top_k kept, with their probabilities rescaled to add up to 1. Tokens exactly as likely as the k-th one
    are kept, too. If top_p cuts between equally likely tokens, it keeps the tokens with lower ids. The most likely
    token is never filtered out. Greedy requests ignore the filters.

    skip_special_tokens, include_stop_str_in_output and detokenize mean the same as in vLLM. They affect only the text,
    never token_ids. A stop string can match a special token only with skip_special_tokens=False.

    Before the temperature and the filters, the logits are edited in vLLM's order: structured_outputs, logit_bias,
    bad_words and min_tokens forbid or favour tokens, then repetition_penalty divides positive logits and multiplies
    negative logits of the tokens in prompt and answer, then frequency_penalty times the number of occurrences in the
    answer, and presence_penalty for each token that occurs there, are subtracted. The logits of greedy requests are
    edited, too.

    logprobs and prompt_logprobs are the model's own, before edits, temperature and filters. A request with
    prompt_logprobs computes its whole prompt, even if the prefix cache has it.
    """

    n: int = option(
        1, help="number of answers; answer i, counted from 0, uses the seed `seed` + i", group=_GROUP, least=1
    )

    temperature: float = option(1.0, help="sampling temperature; 0 always takes the most likely token", group=_GROUP)
    max_tokens: int | None = option(
        64,
        help="maximum number of new tokens; if there is none, the answer may take all the room in the context and the "
        "KV cache",
        group=_GROUP,
        least=1,
    )
    top_k: int = option(
        0, help="sample from this many of the most likely tokens; 0 or -1: from all", group=_GROUP, least=-1
    )
    top_p: float = option(
        1.0,
        help="sample from the smallest set of most likely tokens whose probabilities add up to at least this",
        group=_GROUP,
        above=0,
        most=1,
    )
    min_p: float = option(
        0.0,
        help="sample from the tokens whose probability is at least this fraction of the most likely token's",
        group=_GROUP,
        least=0,
        most=1,
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
        help="seed of this request; the same seed gives the same tokens in every batch; "
        "by default, derived from the engine's seed",
        group=_GROUP,
        least=MIN_SEED,
        most=MAX_SEED,
    )
    skip_special_tokens: bool = option(True, help="leave special tokens out of the text", group=_GROUP)
    include_stop_str_in_output: bool = option(
        False, help="keep the stop string or end token that ended the answer in its text", group=_GROUP
    )
    detokenize: bool = option(
        True, help="produce text; if off, the output's text is None and stop strings are refused", group=_GROUP
    )

    logprobs: int | None = option(
        None,
        help=f"log-probabilities of each new token and of this many of the most likely ones, at most {MAX_LOGPROBS}",
        group=_GROUP,
        least=0,
        most=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = option(
        None, help="the same for each token of the prompt but the first", group=_GROUP, least=0, most=MAX_LOGPROBS
    )
    presence_penalty: float = option(
        0.0,
        help="subtracted from the logit of every token that the answer contains; -2 to 2",
        group=_GROUP,
        least=-MAX_PENALTY,
        most=MAX_PENALTY,
    )
    frequency_penalty: float = option(
        0.0,
        help="subtracted from a token's logit for each time that the answer contains it; -2 to 2",
        group=_GROUP,
        least=-MAX_PENALTY,
        most=MAX_PENALTY,
    )
    repetition_penalty: float = option(
        1.0,
        help="makes tokens of prompt and answer less likely if above 1, more likely if below",
        group=_GROUP,
        least=MIN_TEMPERATURE,
        most=MAX_TEMPERATURE,
    )
    logit_bias: dict[int, float] | None = option(
        None, help="token id -> number from -100 to 100 that is added to its logit", group=_GROUP, hash=False
    )
    min_tokens: int = option(
        0, help="number of new tokens before end tokens and stop_token_ids become possible", group=_GROUP, least=0
    )
    bad_words: tuple[str, ...] | list[str] | None = option(
        (), help="strings that the answer must not contain", group=_GROUP
    )
    structured_outputs: StructuredOutputs | None = option(
        None, help="what the answer must match: a JSON schema, a regular expression or a choice", group=_GROUP
    )
    reasoning_tags: AnswerTags | None = option(
        None,
        help="tags of the reasoning at the start of an answer, to which neither stop strings nor structured_outputs "
        "apply; HarmonyTags() for gpt-oss, with skip_special_tokens=False",
        group=_GROUP,
    )

    output_kind: str = option(
        "cumulative",
        help="what `outputs` of an update of AsyncLLM.generate has: cumulative, the answer so far; delta, what is new; "
        "final_only, the answer, in the only update",
        group=_GROUP,
        choices=("cumulative", "delta", "final_only"),
    )

    def __post_init__(self) -> None:
        check_options(self, RequestError, "SamplingParams.")
        in_range = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE
        limits = f"0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        _require(in_range, "temperature", self.temperature, limits)
        limit_tokens = self.required_tokens or MAX_INT32
        _require(self.min_tokens <= limit_tokens, "min_tokens", self.min_tokens, "at most max_tokens")
        stop = _as_strings(self.stop, "stop")
        if (num_chars := sum(map(len, stop))) > MAX_STOP_CHARS:
            raise RequestError(
                f"SamplingParams.stop has {num_chars} characters in all, at most {MAX_STOP_CHARS}; leave some out"
            )
        if stop and not self.detokenize:
            raise RequestError(
                f"SamplingParams.stop={shown(self.stop)} needs text; leave detokenize on, or use stop_token_ids"
            )
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "bad_words", _as_strings(self.bad_words, "bad_words"))
        token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        are_ids = isinstance(token_ids, list | tuple) and all(_is_token_id(each) for each in token_ids)
        _require(are_ids, "stop_token_ids", self.stop_token_ids, f"token ids, each from 0 to {MAX_INT32}")
        object.__setattr__(self, "stop_token_ids", tuple(token_ids))
        self._check_logit_bias()
        is_known = self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs)
        limit = "a nanovllm.StructuredOutputs, such as StructuredOutputs(regex='[0-9]+')"
        _require(is_known, "structured_outputs", self.structured_outputs, limit)
        is_known = self.reasoning_tags is None or (
            isinstance(self.reasoning_tags, HarmonyTags) and isinstance(self.reasoning_tags.begun, str)
        )
        if isinstance(self.reasoning_tags, ReasoningTags):
            is_known = all(map(_is_tag, self.reasoning_tags[:2]))
        limit = "a nanovllm.ReasoningTags of two tags, such as ReasoningTags('<think>', '</think>'), or HarmonyTags()"
        _require(is_known, "reasoning_tags", self.reasoning_tags, limit)

        is_readable = not (stop and isinstance(self.reasoning_tags, HarmonyTags) and self.skip_special_tokens)
        limit = "False, so that stop strings can be told from the tags of HarmonyTags"
        _require(is_readable, "skip_special_tokens", self.skip_special_tokens, limit)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "a dict of token ids and numbers")
        limit = f"a number from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g} for a token id"
        for token_id, bias in self.logit_bias.items():
            in_range = isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= MAX_LOGIT_BIAS
            _require(_is_token_id(token_id) and in_range, f"logit_bias[{shown(token_id)}]", bias, limit)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # a copy, so that nothing changes after this

    def clone(self) -> "SamplingParams":
        """Return these parameters, because nothing can change them. dataclasses.replace makes others."""
        return self

    def per_answer(self) -> "list[SamplingParams]":
        """Return the parameters of each of the n answers. If there is a seed, answer i has the seed plus i.

        Only the first answer reports prompt_logprobs, which are the same for all.
        """
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else _wrapped(self.seed + i) for i in range(self.n)]
        first, *others = (self._changed(n=1, seed=seed) for seed in seeds)
        return [first, *(other._changed(prompt_logprobs=None) for other in others)]

    @property
    def required_tokens(self) -> int | None:
        """The number of tokens that need room, or None if the answer takes the remaining room."""
        return None if isinstance(self.max_tokens, ModelLimit) else self.max_tokens

    def within(self, num_free_tokens: int) -> "SamplingParams":
        """Return the parameters with a max_tokens that fits, unless the user gave one.

        Raises RequestError if min_tokens is more than fits.
        """
        if self.required_tokens is not None:
            return self
        wanted = num_free_tokens if self.max_tokens is None else max(int(self.max_tokens), self.min_tokens)
        return self.with_max_tokens(max(1, min(wanted, num_free_tokens)))

    def with_max_tokens(self, max_tokens: int) -> "SamplingParams":
        """Return the parameters with this max_tokens. Raises RequestError if max_tokens is below min_tokens."""
        _require(self.min_tokens <= max_tokens, "min_tokens", self.min_tokens, "at most max_tokens")
        return self._changed(max_tokens=max_tokens)

    def _changed(self, **valid: Any) -> "SamplingParams":
        """Return a copy with other values. The other values are not checked again, because a logit_bias
        can be large.
        """
        changed = copy(self)
        for name, value in valid.items():
            object.__setattr__(changed, name, value)
        return changed


def token_id_keys(biases: Any) -> Any:
    """Return the logit_bias of a JSON object, whose keys are strings, with integers as keys.

    A value that is not a mapping of decimal numbers is returned unchanged, for SamplingParams to refuse.
    """
    if not isinstance(biases, Mapping):
        return biases
    return {
        int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key: bias
        for key, bias in biases.items()
    }
