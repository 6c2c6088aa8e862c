"""Prompts for blocks of 256 tokens, and a workload that meets everything that offload has to deal with."""

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
    finished = {}
    for num_step in range(1000):
        if llm.is_finished():
            break
        if num_step in (4, 9, 14):
            llm.preempt_next()
        if num_step == 11:
            llm.abort(ids[2])
        finished |= llm.step().finished
    answered = [request_id for request_id in ids if finished[request_id]["finish_reason"] == "length"]
    for request_id, prompt in zip(ids, (*MIXED[:3], *QUESTIONS), strict=True):
        if request_id in answered:
            llm.check(request_id, prompt, finished[request_id])
    assert len(answered) >= 4
    llm.answer_and_check([DOCUMENT[: 4 * BLOCK + 17], MIXED[0]])
    llm.assert_nothing_left()
