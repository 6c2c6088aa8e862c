"""Log-probabilities of answers and prompts: those that transformers' logits have, wherever the K and V come from."""

from array import array
from typing import Any

import pytest
import torch
from checked_engine import OFFLOAD, WORKS_AHEAD, Reference, cache_options
from odd_drafters import OddDrafter

from nanovllm import LLM, SamplingParams
from nanovllm.engine.setup import Internals
from nanovllm.models.retrieval_model import build_retrieval_model
from nanovllm.plan.outputs import Logprob, Outbox, Receiver, RequestOutput, TokenLogprobs
from nanovllm.plan.sequence import Request

PROMPTS = [[(7 * i * i + 3 * i) % 300 for i in range(n)] for n in (1, 2, 40, 530)]
TOLERANCE = 2e-4


def assert_right(found: TokenLogprobs, token_id: int, logits: torch.Tensor, num_top: int) -> None:
    """One position: the token's own entry first, then the most likely ones, each with the right rank."""
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(num_top).indices.tolist()
    assert list(found) == [token_id, *(t for t in top if t != token_id)]
    for t, entry in found.items():
        assert entry.logprob == pytest.approx(float(logprobs[t]), abs=TOLERANCE)
        above, not_below = (int((logprobs > logprobs[t] + error).sum()) for error in (TOLERANCE, -TOLERANCE))
        assert above < entry.rank <= not_below and entry.text is None


def check(reference: Reference, prompt: list[int], output: RequestOutput, num_top: int) -> None:
    answer = output["token_ids"]
    logits = reference.logits(prompt + answer, len(prompt) + len(answer))
    assert len(output["logprobs"]) == len(answer)
    for i, (found, token_id) in enumerate(zip(output["logprobs"], answer, strict=True)):
        assert_right(found, token_id, logits[len(prompt) - 1 + i], num_top)
    first, *others = output["prompt_logprobs"]
    assert first is None and len(others) == len(prompt) - 1
    for i, found in enumerate(others):
        assert found is not None
        assert_right(found, prompt[i + 1], logits[i], num_top)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("options", "internals", "num_top"),
    [
        (cache_options(None), Internals(), 0),
        (cache_options(None) | {"chunked_prefill": False}, WORKS_AHEAD, 3),
        (cache_options(2), WORKS_AHEAD, 3),
    ],
)
def test_logprobs_are_those_of_transformers(
    reference: Reference, options: dict[str, Any], internals: Internals, num_top: int, device: str
) -> None:
    """The second time, all prompts are in the prefix cache, and their tokens are scored all the same."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=3, logprobs=num_top, prompt_logprobs=num_top)
    options = {"device": device, "dtype": "float32", "max_num_batched_tokens": 96, "internals": internals} | options
    with LLM(str(reference.directory), **options) as llm:
        for _ in range(2):
            for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
                check(reference, prompt, output, num_top)
        plain = llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
        assert all("logprobs" not in output and "prompt_logprobs" not in output for output in plain)
        assert plain[-1]["num_cached_tokens"] > 0


def test_requests_with_other_numbers_of_logprobs_share_steps(reference: Reference) -> None:
    numbers = [(None, None), (0, 2), (5, None), (20, 20)]
    params = [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=a, prompt_logprobs=b) for a, b in numbers
    ]
    with LLM(str(reference.directory), device="cpu", internals=WORKS_AHEAD, **cache_options(None)) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for output, (num_top, num_prompt_top) in zip(outputs, numbers, strict=True):
        assert ("logprobs" in output, "prompt_logprobs" in output) == (num_top is not None, num_prompt_top is not None)
        if num_top is not None:
            assert all(num_top <= len(found) <= num_top + 1 for found in output["logprobs"])
        for found in output.get("prompt_logprobs", [])[1:]:
            assert found is not None and num_prompt_top <= len(found) <= num_prompt_top + 1


def test_logprobs_of_accepted_guesses_are_right(reference: Reference) -> None:
    """Rows of rejected guesses are left out."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    plain = {"device": "cpu"} | cache_options(None)
    with LLM(str(reference.directory), **plain) as llm:
        answers = [output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]

    def next_tokens(seq: Any, count: int) -> list[int]:
        known = seq.token_ids.tolist()
        return next((text[len(known) : len(known) + count] for text in texts if text[: len(known)] == known), [])

    internals = Internals(
        works_ahead=True, drafters=(OddDrafter("random", next_tokens, vocab_size=320),), always_guesses=True
    )
    with LLM(str(reference.directory), internals=internals, speculation="prompt_lookup", **plain) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm.stats()
    assert 0 < stats["num_accepted_guesses"] < stats["num_guesses"]
    assert [output["token_ids"] for output in outputs] == answers
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check(reference, prompt, output, 2)


def test_preempted_prompts_are_scored_once(reference: Reference) -> None:
    """A pool so small that sequences lose their blocks, also while their prompt is being computed."""
    prompts = [[(i * 7 + k) % 300 for i in range(400)] for k in range(2)]
    params = SamplingParams(temperature=0, max_tokens=130, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    options = {"num_kvcache_blocks": 4, "kvcache_block_size": 256, "max_num_batched_tokens": 96, "device": "cpu"}
    with LLM(str(reference.directory), internals=WORKS_AHEAD, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats()["num_preemptions"] > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check(reference, prompt, output, 1)


def test_aborted_request_has_the_logprobs_of_what_it_got(reference: Reference) -> None:
    with LLM(str(reference.directory), device="cpu", **OFFLOAD, num_gpu_blocks=2, max_num_batched_tokens=64) as llm:
        request_id = llm.add_request(PROMPTS[3], SamplingParams(logprobs=0, prompt_logprobs=0))
        for _ in range(3):
            llm.step()
        llm.abort(request_id)
        output = llm.step().finished[request_id]
    assert output["finish_reason"] == "abort" and output["logprobs"] == []
    assert 100 < len(output["prompt_logprobs"]) < 400


def test_logprobs_have_the_texts_of_their_tokens() -> None:
    with LLM(str(build_retrieval_model()), device="cpu", num_kvcache_blocks=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=0)
        output = llm.generate("one\ntwo\none\n", params, use_tqdm=False)[0]
        decode = llm.tokenizer.decode
    for token_id, found in zip(output["token_ids"], output["logprobs"], strict=True):
        assert next(iter(found)) == token_id and found[token_id] == Logprob(
            found[token_id].logprob, 1, decode(token_id)
        )
    for token_id, entries in zip(output["prompt_token_ids"][1:], output["prompt_logprobs"][1:], strict=True):
        assert entries is not None and entries[token_id].text == decode(token_id)


def test_several_answers_have_their_own_seeds(reference: Reference) -> None:
    params = SamplingParams(n=3, seed=2**63 - 2, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(str(reference.directory), device="cpu", **cache_options(None)) as llm:
        outputs = llm.generate(PROMPTS[2:], params, use_tqdm=False)
        for prompt, output in zip(PROMPTS[2:], outputs, strict=True):
            answers = output["outputs"]
            assert answers[0]["token_ids"] == output["token_ids"] and len({*map(str, answers)}) == 3
            assert ["prompt_logprobs" in answer for answer in answers] == [True, False, False]
            for seed, answer in zip((2**63 - 2, 2**63 - 1, -(2**63)), answers, strict=True):
                alone = SamplingParams(seed=seed, max_tokens=6, ignore_eos=True)
                assert llm.generate([prompt], alone, use_tqdm=False)[0]["token_ids"] == answer["token_ids"]
        with pytest.raises(ValueError, match="n=3 applies to generate"):
            llm.add_request([1], params)


def test_engine_makes_no_dicts_of_logprobs(reference: Reference) -> None:
    """Regression: its thread made all of a chunk's when it committed the step, 0.3 s for 16,384 tokens."""
    asked: list[int] = []

    def text_of(token_id: int) -> str:
        asked.append(token_id)
        return str(token_id)

    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=2)
    outbox, steps = Outbox(), []
    with LLM(str(reference.directory), device="cpu", **cache_options(None)) as llm:
        (seq,) = llm.engine.make_sequences(Request(array("q", PROMPTS[2]), params))
        request_id = llm.engine.add_sequence(seq, Receiver(outbox, True, text_of))
        while llm.engine.has_requests:
            steps.append(llm.engine.step(outbox))
    assert not asked
    new = [entry for each in steps for entry in each.new_tokens[request_id].logprobs]
    output = steps[-1].finished[request_id]
    assert new == list(output["logprobs"]) and len(new) == 3
    assert output["prompt_logprobs"][0] is None and len(output["prompt_logprobs"]) == len(PROMPTS[2]) and asked
