"""Structured outputs end to end: every answer matches, and its tokens do not depend on how the engine runs."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from checked_engine import WORKS_AHEAD, cache_options
from odd_drafters import OddDrafter

from nanovllm import LLM, RequestError, SamplingParams
from nanovllm.core.outputs import RequestOutput
from nanovllm.core.sequence import Sequence
from nanovllm.demo.retrieval_model import build_retrieval_model
from nanovllm.engine.internals import Internals
from nanovllm.sampling_params import StructuredOutputs

PROMPT = "the passkey is 4711.\nthe answer is:"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["left", "right"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
STRUCTURES = {
    "json": StructuredOutputs(json=SCHEMA),
    "json_object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"[a-f]{3,9}-\d+"),
    "choice": StructuredOutputs(choice=["left", "right", "straight on"]),
}


def params_of(kind: str, **more: Any) -> SamplingParams:
    settings = {"max_tokens": 40, "temperature": 1.0, "seed": 7, "structured_outputs": STRUCTURES[kind]}
    return SamplingParams(**(settings | more))


def assert_matches(kind: str, output: RequestOutput) -> None:
    text, reason = output["text"], output["finish_reason"]
    assert text is not None
    if reason == "length":  # without an end, the answer is the beginning of one that matches
        assert kind in ("json", "json_object", "regex") and len(output["token_ids"]) == 40
        return
    assert reason == "stop", output.get("error")
    if kind == "choice":
        assert text in ("left", "right", "straight on")
    elif kind == "regex":
        assert re.fullmatch(r"[a-f]{3,9}-[0-9]+", text)
    elif kind == "json":
        value = json.loads(text)
        assert value["name"] in ("left", "right") and 0 <= value["count"] <= 99 and len(value) == 2
    else:
        assert isinstance(json.loads(text), dict)


def answers(params: list[SamplingParams], internals: Internals = Internals(), **options: Any) -> list[RequestOutput]:
    options = {"device": "cpu", "max_num_batched_tokens": 64} | (options or cache_options(None))
    with LLM(str(build_retrieval_model()), internals=internals, **options) as llm:
        return llm.generate([PROMPT] * len(params), params, use_tqdm=False)


@pytest.fixture(scope="module")
def expected() -> tuple[list[SamplingParams], list[RequestOutput]]:
    """Three seeds of each kind, each beside plain requests."""
    params = [params_of(kind, seed=seed) for kind in STRUCTURES for seed in range(3)]
    params += [
        SamplingParams(max_tokens=12, seed=1),
        params_of("regex", temperature=0, logit_bias={ord("f"): 1.0, ord("7"): 1.0}),  # the model alone has ties here
        params_of("json", min_tokens=9),
    ]
    params.append(params_of("choice", ignore_eos=True, repetition_penalty=1.4, logprobs=1))
    return params, answers(params)


def test_answers_match_what_is_asked_for(expected: tuple[list[SamplingParams], list[RequestOutput]]) -> None:
    kinds = {id(structure): kind for kind, structure in STRUCTURES.items()}
    for params, output in zip(*expected, strict=True):
        if params.structured_outputs is not None:
            assert_matches(kinds[id(params.structured_outputs)], output)
    assert len({output["text"] for output in expected[1]}) > 8


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("slots", "guesses"), [(None, None), (2, None), (None, "right"), (8, "random")])
def test_tokens_are_the_same_however_the_engine_runs(
    expected: tuple[list[SamplingParams], list[RequestOutput]], slots: int | None, guesses: str | None, device: str
) -> None:
    params, outputs = expected
    internals, options = WORKS_AHEAD, cache_options(slots) | {"device": device, "dtype": "float32"}
    if guesses is not None:

        def next_tokens(seq: Sequence, count: int) -> list[int]:
            known = seq.output_token_ids
            texts = [output["token_ids"] for output, p in zip(outputs, params, strict=True) if p.seed == seq.seed]
            return next((text[len(known) : len(known) + count] for text in texts if text[: len(known)] == known), [])

        drafter = OddDrafter(guesses, next_tokens, vocab_size=256)
        internals = replace(internals, drafters=(drafter,), always_guesses=True)
        options |= {"speculation": "prompt_lookup", "max_num_seqs": 3}
    found = answers(params, internals, **options)
    assert [output["token_ids"] for output in found] == [output["token_ids"] for output in outputs]
    assert [output["text"] for output in found] == [output["text"] for output in outputs]


def test_several_answers_have_constraints_of_their_own() -> None:
    output = answers([params_of("choice", n=4)])[0]
    for answer in output["outputs"]:
        assert_matches("choice", answer)


def test_bad_grammar_is_refused_before_anything_is_queued() -> None:
    with LLM(str(build_retrieval_model()), device="cpu", **cache_options(None)) as llm:
        for structure in (StructuredOutputs(regex="("), StructuredOutputs(json={"type": "no such type"})):
            with pytest.raises(RequestError, match=r"structured_outputs|regex|json"):
                llm.generate([PROMPT, PROMPT], SamplingParams(structured_outputs=structure), use_tqdm=False)
        assert llm.is_finished()


def test_request_without_an_allowed_token_ends_alone() -> None:
    """The bad words forbid the only token that the grammar allows."""
    impossible = SamplingParams(
        structured_outputs=StructuredOutputs(choice=["q", "qq"]), bad_words=["q"], temperature=0
    )
    broken, fine = answers([impossible, params_of("choice")])
    assert (broken["finish_reason"], broken["error_cause"]) == ("error", "request")
    assert "forbid every token" in broken["error"]
    assert_matches("choice", fine)
