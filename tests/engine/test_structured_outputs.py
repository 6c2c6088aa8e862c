"""Structured outputs end to end: every answer matches, and its tokens do not depend on how the engine runs."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from checked_engine import WORKS_AHEAD, cache_options
from odd_drafters import OddDrafter

from nanovllm import LLM, RequestError, SamplingParams
from nanovllm.engine.setup import Internals
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers import sampler
from nanovllm.models.retrieval_model import build_retrieval_model
from nanovllm.plan.outputs import RequestOutput
from nanovllm.plan.sequence import Sequence
from nanovllm.runner import step_runner
from nanovllm.sampling_params import StructuredOutputs

ON_CPU: dict[str, Any] = {"device": "cpu", "max_num_batched_tokens": 64}
NUM_TOKENS = 28
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
# The model alone has exact ties among the letters and digits that the regex allows.
NO_TIES = {ord(char): 0.25 * i for chars in ("abcdef", "0123456789") for i, char in enumerate(chars)}
SEEDS = (28, 36, 52, 37, 49, 77, 50, 42, 62, 3, 7, 11, 101, 110, 117, 123)  # one for each request
LEAST_MARGIN = 0.05  # devices differ by some 1e-5 in fp32


def params_of(kind: str, **more: Any) -> SamplingParams:
    settings = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 7, "structured_outputs": STRUCTURES[kind]}
    return SamplingParams(**(settings | more))


def assert_matches(kind: str, output: RequestOutput) -> None:
    text, reason = output["text"], output["finish_reason"]
    assert text is not None
    if reason == "length":  # without an end, the answer is the beginning of one that matches
        assert kind in ("json", "json_object", "regex") and len(output["token_ids"]) == NUM_TOKENS
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
    options = ON_CPU | (options or cache_options(None))
    with LLM(str(build_retrieval_model()), internals=internals, **options) as llm:
        return llm.generate([PROMPT] * len(params), params, use_tqdm=False)


@pytest.fixture(scope="module")
def expected() -> tuple[list[SamplingParams], list[RequestOutput]]:
    """Three seeds of each kind, each beside plain requests. No token is so close to a tie that devices could differ."""
    seeds = iter(SEEDS)
    params = [params_of(kind, seed=next(seeds)) for kind in STRUCTURES for _ in range(3)]
    params += [
        SamplingParams(max_tokens=12, seed=next(seeds)),
        params_of("regex", temperature=0, logit_bias=NO_TIES, seed=next(seeds)),
        params_of("json", min_tokens=9, seed=next(seeds)),
        params_of("choice", ignore_eos=True, repetition_penalty=1.4, logprobs=1, seed=next(seeds)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        margins = note_margins(patch)
        outputs = answers(params)
    least = {seed: min(margin for (of, _), margin in margins.items() if of == seed) for seed, _ in margins}
    assert len(least) == len(params)
    assert min(least.values()) > LEAST_MARGIN, f"another device may pick other tokens: {least}; choose other seeds"
    return params, outputs


def note_margins(patch: pytest.MonkeyPatch) -> dict[tuple[int, int], float]:
    """By how much each token wins, by its request's seed and its position: the difference between the best and the
    second of the edited logits, which for sampled requests are divided by the temperature and have noise. Without
    filters.
    """
    margins: dict[tuple[int, int], float] = {}
    sample = sampler.sample

    def noting_sample(logits: torch.Tensor, tensors: SamplingTensors, out: torch.Tensor | None = None) -> torch.Tensor:
        noise = sampler.exponential_noise(tensors.seed, tensors.position, torch.arange(logits.shape[1])[None])
        draws = tensors.temperature[:, None] > 0
        scores = torch.where(draws, logits / tensors.temperature[:, None] - noise.log(), logits)
        first, second = scores.topk(2, dim=-1).values.unbind(-1)
        # Rows with edits are sampled twice, and the second sample counts.
        rows = zip(tensors.seed.tolist(), tensors.position.tolist(), strict=True)
        margins.update(zip(rows, (first - second).tolist(), strict=True))
        return sample(logits, tensors, out)

    for module in (step_runner, sampler):
        patch.setattr(module, "sample", noting_sample)
    return margins


def test_answers_match_what_is_asked_for(expected: tuple[list[SamplingParams], list[RequestOutput]]) -> None:
    kinds = {id(structure): kind for kind, structure in STRUCTURES.items()}
    for params, output in zip(*expected, strict=True):
        if params.structured_outputs is not None:
            assert_matches(kinds[id(params.structured_outputs)], output)
    assert len({output["text"] for output in expected[1]}) > 8


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("slots", "guesses"), [(None, None), (4, None), (None, "right"), (8, "random")])
def test_tokens_are_the_same_however_the_engine_runs(
    expected: tuple[list[SamplingParams], list[RequestOutput]], slots: int | None, guesses: str | None, device: str
) -> None:
    params, outputs = expected
    internals, options = WORKS_AHEAD, cache_options(slots) | {"device": device, "dtype": "float32"}
    if guesses is not None:

        def next_tokens(seq: Sequence, count: int) -> list[int]:
            known = seq.output_token_ids
            seed = seq.sampling.seed
            texts = [output["token_ids"] for output, p in zip(outputs, params, strict=True) if p.seed == seed]
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


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_slow_masks_of_other_threads_give_the_same_tokens(
    expected: tuple[list[SamplingParams], list[RequestOutput]], ahead: bool
) -> None:
    """Regression: masks of one request with 128 answers took 0.1 s of each step, for everybody."""
    params, outputs = expected
    internals = WORKS_AHEAD if ahead else Internals()
    with LLM(str(build_retrieval_model()), internals=internals, **ON_CPU, **cache_options(None)) as llm:
        grammars = [llm.text._grammars.compile(each) for each in STRUCTURES.values()]
        for grammar in grammars:
            grammar._num_slow_masks = 100_000
        found = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        assert all(grammar._num_slow_masks < 100_000 for grammar in grammars)
        assert grammars[0].vocabulary.mask_threads._threads  # type: ignore[attr-defined]
    for output, right in zip(found, outputs, strict=True):
        assert (output["token_ids"], output["finish_reason"]) == (right["token_ids"], right["finish_reason"])
