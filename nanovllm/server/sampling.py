"""From the body of a request to SamplingParams.

Each parameter comes from the first of these that has it: the body, the model's generation_config.json, the defaults of
OpenAI's API, which are those of SamplingParams.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams, StructuredOutputs
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import ChatRequest, CompletionRequest, SamplingFields, StructuredOutputsField

COMPLETION_MAX_TOKENS = 16  # as OpenAI
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "bad_words",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


def completion_params(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """For max_tokens=0, which asks only about the prompt, one token is generated for nobody."""
    params = _common_params(body, defaults)
    params["max_tokens"] = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1
    params["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        params["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return SamplingParams(**params)


def chat_params(body: ChatRequest, defaults: Mapping[str, Any], num_free_tokens: int) -> SamplingParams:
    """`num_free_tokens`: how many tokens fit after the prompt. They limit the model's own default of max_tokens."""
    params = _common_params(body, defaults)
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    default = defaults.get("max_tokens")
    if default is not None:
        default = max(1, min(default, num_free_tokens))
    params["max_tokens"] = default if given is None else given
    params["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return SamplingParams(**params)


def _common_params(body: SamplingFields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    return {
        **defaults,
        **given,
        "logit_bias": _logit_bias(body.logit_bias),
        "structured_outputs": _structured_outputs(body),
    }


def _logit_bias(biases: Mapping[str, Any] | None) -> dict[int, Any] | None:
    """The keys are strings in JSON. SamplingParams checks the values."""
    if not biases:
        return None
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ApiError(f"logit_bias has the key {key[:20]!r}, expected a token id", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def _structured_outputs(body: SamplingFields) -> StructuredOutputs | None:
    """What the answer must match, which a body can say in one of five fields."""
    given: dict[str, dict[str, Any] | None] = {
        "response_format": _response_format(body),
        "structured_outputs": _given_fields(body.structured_outputs),
        "guided_json": None if body.guided_json is None else {"json": body.guided_json},
        "guided_regex": None if body.guided_regex is None else {"regex": body.guided_regex},
        "guided_choice": None if body.guided_choice is None else {"choice": body.guided_choice},
    }
    names = [name for name, fields in given.items() if fields is not None]
    if len(names) > 1:
        raise ApiError(f"{' and '.join(names)} both say what the answer must match; give one of them", param=names[1])
    if not names:
        return None
    try:
        return StructuredOutputs(**(given[names[0]] or {}))
    except RequestError as error:
        raise ApiError(str(error).replace("StructuredOutputs", names[0]), param=names[0]) from error


def _response_format(body: SamplingFields) -> dict[str, Any] | None:
    """The fields of StructuredOutputs that `response_format` asks for; None for plain text."""
    wanted = body.response_format
    if wanted is None:
        return None
    if (wanted.json_schema is not None) != (wanted.type == "json_schema"):
        raise ApiError(
            f"response_format has type {wanted.type!r}; give json_schema with the type 'json_schema', and only with it",
            param="response_format",
        )
    if wanted.json_schema is not None:
        schema = wanted.json_schema.json_schema
        return {"json_object": True} if schema is None else {"json": schema}
    return {"json_object": True} if wanted.type == "json_object" else None


def _given_fields(field: StructuredOutputsField | None) -> dict[str, Any] | None:
    return None if field is None else field.model_dump(exclude_none=True, by_alias=True)
