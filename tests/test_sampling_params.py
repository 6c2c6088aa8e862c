"""The range of every sampling parameter, and that the sampler computes at its ends."""

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanovllm import StructuredOutputs
from nanovllm.errors import RequestError
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers.sampler import sample
from nanovllm.sampling_params import MAX_SEED, MAX_TEMPERATURE, MIN_SEED, MIN_TEMPERATURE, SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_value_out_of_range_is_refused_with_the_limit() -> None:
    """Regression: a temperature above fp32 gave wrong tokens, a top_k above 64 bits an OverflowError inside a step, and
    seeds lost their high bits, so that different ones gave the same tokens."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 1e39}, r"temperature=1e\+39 must be 0 \(greedy\), or from 1e-10 to 1e\+10"),
        ({"temperature": 10**400}, "temperature=1000.* must be 0"),
        ({"temperature": math.nextafter(MAX_TEMPERATURE, math.inf)}, "temperature=1000.* must be 0"),
        ({"temperature": math.nextafter(MIN_TEMPERATURE, 0)}, "temperature=9.99.* must be 0"),
        ({"temperature": 1e-45}, "temperature=1e-45 must be 0"),
        ({"temperature": 5e-324}, "temperature=5e-324 must be 0"),
        *(({name: math.nan}, f"{name}=nan must be") for name in ("temperature", "top_p", "min_p")),
        *(({name: math.inf}, f"{name}=inf must be") for name in ("temperature", "top_p", "min_p")),
        ({"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ({"top_k": -2}, "top_k=-2 must be -1 or more"),
        ({"top_p": 0}, "top_p=0 must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1 must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p=-0.1 must be between 0 and 1"),
        ({"max_tokens": 0}, "max_tokens=0 must be 1 or more"),
        ({"top_k": 2**31}, "top_k=2147483648 must be .* at most 2147483647"),
        ({"top_k": 2**70}, "top_k=1180591620717411303424 must be"),
        ({"max_tokens": 10**30}, "max_tokens=10{30} must be 1 or more, at most 2147483647"),
        (
            {"seed": MAX_SEED + 1},
            "seed=9223372036854775808 must be between -9223372036854775808 and 9223372036854775807",
        ),
        ({"seed": MIN_SEED - 1}, "seed=-9223372036854775809 must be between"),
    ]
    for params, message in cases:
        with pytest.raises(RequestError, match=f"SamplingParams.{message}"):
            SamplingParams(**params)


def test_value_at_the_end_of_its_range_is_kept() -> None:
    cases: list[dict[str, Any]] = [
        *({"temperature": temperature} for temperature in (0, -0.0, MIN_TEMPERATURE, 1, MAX_TEMPERATURE)),
        *({"seed": seed} for seed in (None, 0, -1, MIN_SEED, MAX_SEED)),
        *({"top_k": top_k} for top_k in (-1, 0, 1, 2**31 - 1)),
        {"max_tokens": 2**31 - 1},
    ]
    for params in cases:
        (name, value), *_ = params.items()
        assert getattr(SamplingParams(**params), name) == value


def test_none_is_the_same_as_no_limit_and_no_ends() -> None:
    """R7: all three were refused."""
    params = SamplingParams(stop=None, stop_token_ids=None, max_tokens=None)
    assert (params.stop, params.stop_token_ids, params.max_tokens) == ((), (), None)


def test_value_of_text_options_that_is_wrong_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stop": "a", "detokenize": False}, "stop='a' needs text; leave detokenize on, or use stop_token_ids"),
        ({"skip_special_tokens": 1}, "skip_special_tokens=1 must be True or False"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output=None must be True or False"),
        ({"detokenize": "no"}, "detokenize='no' must be True or False"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes' must be True or False"),
        *(({"max_tokens": value}, f"max_tokens={value} must be an integer or None") for value in (True, 2.0)),
        *(({"stop": stop}, "stop=.* must be a non-empty string") for stop in ("", ["a", 5], 5)),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"min_p": True}, "min_p=True must be a number"),
        ({"seed": 1.5}, "seed=1.5 must be an integer or None"),
    ]
    for params, message in cases:
        with pytest.raises(RequestError, match=f"SamplingParams.{message}"):
            SamplingParams(**params)


HUGE = 10**5000  # Python does not write integers of more than 4300 digits


def test_value_that_is_wrong_is_refused_in_a_short_message() -> None:
    """Regression: the message about an integer of thousands of digits was a ValueError of Python's."""
    cases: list[tuple[dict[str, Any], str]] = [
        *(
            ({name: value}, name)
            for name in ("n", "min_tokens")
            for value in (True, "1", 1.0, None, -1, math.nan, HUGE)
        ),
        *(
            ({name: v}, name)
            for name in ("logprobs", "prompt_logprobs")
            for v in (True, "1", 1.0, -1, 21, math.nan, HUGE)
        ),
        *(
            ({name: value}, name)
            for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
            for value in (True, "1", None, math.nan, math.inf, -math.inf, -2.1, HUGE)
        ),
        ({"repetition_penalty": 0}, r"repetition_penalty=0 must be between 1e-10 and 1e\+10"),
        ({"min_tokens": 65}, "min_tokens=65 must be at most max_tokens"),
        *(({"logit_bias": {5: bias}}, r"logit_bias\[5\]=") for bias in (True, "1", None, math.nan, 100.1, HUGE)),
        *(({"logit_bias": {token: 1}}, r"logit_bias\[") for token in (True, "5", None, 5.0, -1, 2**31, HUGE)),
        ({"logit_bias": [5]}, r"logit_bias=\[5\] must be a dict"),
        *(({"bad_words": words}, "bad_words=") for words in (5, [5], [""], "", {"a"}, [None])),
        *(({"stop_token_ids": ids}, "stop_token_ids=") for ids in (5, [True], ["5"], [5.0], [-1], [2**31], [HUGE])),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs=.* must be a nanovllm.StructuredOutputs, such as"),
        *(({name: HUGE}, name) for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")),
    ]
    for params, message in cases:
        with pytest.raises(RequestError, match=f"SamplingParams.{message}") as caught:
            SamplingParams(**params)
        assert len(str(caught.value)) < 400


def test_structured_outputs_that_are_wrong_are_refused() -> None:
    one_of = "give one of json, json_object, regex and choice"
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, f"structured_outputs has none of them; {one_of}"),
        ({"json_object": False}, f"structured_outputs has none of them; {one_of}"),
        ({"regex": "a", "choice": ["a"]}, f"structured_outputs has regex, choice; {one_of}"),
        *(({"json": schema}, r"StructuredOutputs\.json=.* must be a dict or a string") for schema in (5, [], b"{}")),
        *(({"json_object": value}, "json_object=.* must be True or False") for value in (1, "yes")),
        ({"tagged_json": {"tags": []}}, "tagged_json=.* must be a TaggedJson"),
        *(({"regex": regex}, "regex=.* must be a string") for regex in (5, b"a", ["a"])),
        *(
            ({"choice": choice}, "choice=.* must be a list of strings, none of them empty")
            for choice in ([], (), "ab", [""], ["a", ""], ["a", 5])
        ),
    ]
    for fields, message in cases:
        with pytest.raises(RequestError, match=message):
            StructuredOutputs(**fields)
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")


def test_long_value_is_cut_off_in_the_message() -> None:
    """Regression: a server sent megabytes of wrong values back."""
    for params in ({"stop": [1] * 10**5}, {"logit_bias": ["x"] * 10**5}, {"stop": ["a"] * 10**5, "detokenize": False}):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**params)
        assert len(str(caught.value)) < 400


def test_parameters_can_be_pickled_replaced_compared_and_hashed() -> None:
    """Regression: those with a logit_bias or a schema had no hash, and changed when the caller changed his dict."""
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias, structured_outputs=StructuredOutputs(json={"type": "object"}), stop=["a"])
    bias[7] = 1e9
    assert params.logit_bias == {5: 1.0}
    for same in (pickle.loads(pickle.dumps(params)), replace(params), replace(params, n=2).per_answer()[0]):
        assert same == params and hash(same) == hash(params)
    assert len({params, replace(params, logit_bias=None), replace(params, logit_bias={5: 2.0})}) == 3


def test_parameters_of_n_answers_are_checked_once() -> None:
    """Regression: 128 answers with a large logit_bias checked it 256 times."""
    params = SamplingParams(n=3, seed=MAX_SEED, prompt_logprobs=2, max_tokens=None, logit_bias={5: 1.0})
    answers = [each.with_max_tokens(7) for each in params.per_answer()]
    expected = SamplingParams(seed=MAX_SEED, prompt_logprobs=2, max_tokens=7, logit_bias={5: 1.0})
    others = [replace(expected, seed=MIN_SEED + i, prompt_logprobs=None) for i in range(2)]
    assert answers == [expected, *others] and params.n == 3
    assert all(each.logit_bias is params.logit_bias for each in answers), "it was copied, and so checked, again"
    with pytest.raises(RequestError, match=r"min_tokens=9 must be at most max_tokens"):
        SamplingParams(min_tokens=9, max_tokens=None).with_max_tokens(7)


def test_parameters_are_given_by_name() -> None:
    """vLLM's first parameter by position is `n`: a temperature there would mean something else."""
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[misc]
    with pytest.raises(RequestError, match=r"SamplingParams has no option temprature; did you mean temperature\?"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
@pytest.mark.parametrize("top_k", [0, 1])
def test_sampler_computes_at_both_ends_of_the_temperatures(temperature: float, top_k: int, device: str) -> None:
    """Cut tokens are never drawn, the lowest temperature takes the likeliest token, the highest draws evenly."""
    num_rows, vocab_size = 1024, 8
    logits = torch.full((num_rows, 5000), -torch.inf)
    logits[:, :vocab_size] = 1e4 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    params = SamplingTensors(
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k),
        torch.ones(num_rows),
        torch.zeros(num_rows),
        torch.arange(num_rows),
        torch.full((num_rows,), 5),
    )
    on_device = SamplingTensors(*(column.to(device) for column in params))
    tokens = sample(logits.to(device), on_device).cpu()
    if top_k == 1 or temperature == MIN_TEMPERATURE:
        assert torch.equal(tokens, logits.argmax(-1))
    else:
        counts = torch.bincount(tokens, minlength=vocab_size)
        assert len(counts) == vocab_size and (counts - num_rows / vocab_size).abs().max() < 5 * math.sqrt(num_rows / 8)
