"""LLMEngine: the loop of vLLM's llm_engine_example, with the outputs of LLM.generate."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import EngineArgs, LLMEngine, RequestError, RequestOutput, SamplingParams

PROMPTS = (
    ("a robot may not", SamplingParams(temperature=0, logprobs=1, prompt_logprobs=1, max_tokens=5)),
    ("to be or not", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, seed=1, max_tokens=7)),
    ("the meaning of", SamplingParams(n=2, temperature=0.8, top_p=0.95, seed=2, max_tokens=6)),
)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLMEngine]:
    args = EngineArgs(model=str(model), device="cpu", num_kvcache_blocks=8)
    engine = LLMEngine.from_engine_args(args)
    yield engine
    engine.llm.close()


def numbers(logprobs: Any) -> list[float]:
    """Return the tokens and log-probabilities of all positions. The last digits depend on the batch."""
    entries = [entry for entry in logprobs or [] if entry is not None]
    return [number for entry in entries for token_id, each in entry.items() for number in (token_id, each.logprob)]


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Return the outputs of each request, in the order in which they came."""
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def test_example_has_the_outputs_of_generate(engine: LLMEngine) -> None:
    waiting = list(enumerate(PROMPTS))
    ended: dict[str, RequestOutput] = {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, (prompt, params) = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
        for output in engine.step():
            if output.finished:
                assert output.request_id not in ended
                ended[output.request_id] = output
    for number, (prompt, params) in enumerate(PROMPTS):
        (expected,) = engine.llm.generate([prompt], params, use_tqdm=False)
        output = ended[str(number)]
        assert (output.prompt, output.prompt_token_ids) == (prompt, expected.prompt_token_ids)
        assert [each.index for each in output.outputs] == list(range(params.n))
        for answer, other in zip(output.outputs, expected.outputs, strict=True):
            assert (answer.text, answer.token_ids, answer.finish_reason) == (other.text, other.token_ids, "length")
            assert numbers(answer.logprobs) == pytest.approx(numbers(other.logprobs))
        assert numbers(output.prompt_logprobs) == pytest.approx(numbers(expected.prompt_logprobs))


def test_outputs_before_the_end_are_as_output_kind_says(engine: LLMEngine) -> None:
    for kind in ("cumulative", "delta", "final_only"):
        params = SamplingParams(n=2, temperature=5.0, seed=3, max_tokens=6, logprobs=0, output_kind=kind)
        engine.add_request(kind, "to be or not", params)
    found = run(engine)
    for outputs in found.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    (final,) = found["final_only"]
    assert len(found["cumulative"]) == len(found["delta"]) == 6
    for index, answer in enumerate(final.outputs):
        so_far = [output.outputs[index] for output in found["cumulative"]]
        assert [each.token_ids for each in so_far] == [answer.token_ids[:count] for count in range(1, 7)]
        assert all(answer.text.startswith(each.text) and len(each.logprobs) == len(each.token_ids) for each in so_far)
        new = [output.outputs[index] for output in found["delta"]]
        assert "".join(each.text for each in new) == so_far[-1].text == answer.text
        assert [each.token_ids for each in new] == [[token_id] for token_id in answer.token_ids]


def test_answers_of_different_lengths_end_together(engine: LLMEngine) -> None:
    """A request has ended when all its answers have, and not with the first."""
    params = SamplingParams(n=8, temperature=5.0, seed=0, max_tokens=30, stop=list("aeiou"))
    engine.add_request("x", "a b", params)
    outputs = run(engine)["x"]
    lengths = {len(answer.token_ids) for answer in outputs[-1].outputs}
    assert len(lengths) > 1, "the answers have the same length, so the test cannot tell"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_aborted_requests_get_no_output_and_their_names_are_free(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    for name in ("a", "b", "c"):
        engine.add_request(name, "to be or not", params)
    engine.step()
    assert engine.get_num_unfinished_requests() == 3
    with pytest.raises(RequestError, match="request_id='a' belongs to a request that has not ended; give another"):
        engine.add_request("a", "x", params)
    engine.abort_request(["a", "unknown"])
    engine.abort_request("b")
    engine.add_request("a", "to be or not", SamplingParams(temperature=0, max_tokens=2))
    found = run(engine)
    assert found.keys() == {"a", "c"} and len(found["a"][-1].token_ids) == 2
    assert engine.llm.is_finished()


def test_bad_requests_are_refused_and_other_arguments_of_vllm_named(engine: LLMEngine) -> None:
    with pytest.raises(RequestError, match="max_model_len"):
        engine.add_request("x", list(range(5)), SamplingParams(max_tokens=10**6))
    with pytest.raises(RequestError, match=r"lora_request=.*merge the adapter"):
        engine.add_request("x", "x", lora_request="adapter", arrival_time=0.0)
    assert not engine.has_unfinished_requests()
    engine.add_request("x", {"prompt_token_ids": [1, 2]}, None, priority=0)
    engine.abort_request("x")
    with pytest.raises(AttributeError, match="'LLMEngine' object has no attribute 'sleep'; use close"):
        engine.sleep()  # type: ignore[attr-defined]
