"""Prompts for blocks of 256 tokens, and a workload that meets everything that offload has to deal with."""

from typing import Any

from checked_engine import CheckedLLM, greedy
from dense_model import random_prompt

BLOCK = 256


def prompts_of(*lengths: int) -> list[list[int]]:
    return [random_prompt(length, seed=length) for length in lengths]


MIXED = prompts_of(3 * BLOCK - 37, 1, BLOCK + 1, 5 * BLOCK, 30)  # long and short
DOCUMENT = random_prompt(5 * BLOCK + 220, seed=77)
QUESTIONS = [DOCUMENT + random_prompt(30, seed=seed) for seed in (1, 2)]


def serve_everything(llm: CheckedLLM) -> None:
    """Long and short, hits of whole and of partial blocks, preemption, an abort; all checked."""
    ids = [llm.add_request(prompt, greedy(5)) for prompt in (*MIXED[:3], *QUESTIONS)]

    def interfere(num_step: int) -> None:
        if num_step in (4, 9, 14):
            llm.preempt_next()
        if num_step == 11:
            llm.abort(ids[2])

    finished = llm.finish_all(interfere)
    answered = [request_id for request_id in ids if finished[request_id]["finish_reason"] == "length"]
    for request_id, prompt in zip(ids, (*MIXED[:3], *QUESTIONS), strict=True):
        if request_id in answered:
            llm.check(request_id, prompt, finished[request_id])
    assert len(answered) >= 4
    llm.answer_and_check([DOCUMENT[: 4 * BLOCK + 17], MIXED[0]])
    llm.assert_nothing_left()


RESUMED: dict[str, Any] = {"kvcache_block_size": 2 * BLOCK, "num_gpu_blocks": 3, "max_num_batched_tokens": 1000}


def serve_resumed(llm: CheckedLLM) -> None:
    """With the options RESUMED, the first request's new block takes the slot of the last one, which is preempted. One
    step later that one is back from CPU memory, in the slot of the second one, which the step between did not use.
    """
    prompts = prompts_of(2 * BLOCK - 2, 40, BLOCK + 50)
    requests = {llm.add_request(p, greedy(n)): p for p, n in zip(prompts, (8, 3, 8), strict=True)}
    first = llm.scheduler.sequences[min(requests)]

    def preempt_when_full(num_step: int) -> None:
        if first.num_computed_tokens == 2 * BLOCK:
            llm.preempt_next()

    finished = llm.finish_all(preempt_when_full)
    for request_id, prompt in requests.items():
        llm.check(request_id, prompt, finished[request_id])
