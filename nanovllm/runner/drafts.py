"""The drafts of a step as steps of their own: one token of each sequence that drafts, over the keys on the GPU."""

import time
from collections.abc import Callable

import numpy as np

from nanovllm.core.step_plan import KVMoves, SamplingRow, SequenceStep, StepPlan
from nanovllm.runner.step_result import StepResult
from nanovllm.utils.arithmetic import ceil_div

NUM_TIMED_STEPS = 4


def draft_steps(plan: StepPlan) -> list[StepPlan]:
    """In order. Each step's pending tokens are those that the one before it samples. None of them moves anything."""
    steps = []
    previous_rows: dict[int, int] = {}  # row of the plan -> row of the draft before
    for i, rows in enumerate(plan.draft_rows()):
        sequences = (_draft(plan.sequences[row], i, previous_rows.get(row, -1)) for row in rows)
        steps.append(StepPlan(tuple(sequences), KVMoves()))
        previous_rows = {row: previous for previous, row in enumerate(rows)}
    return steps


def _draft(step: SequenceStep, i: int, previous_row: int) -> SequenceStep:
    """Draft number i: the step's known token, or a draft after it, with the noise of the token that it guesses."""
    assert step.sampling is not None and step.num_tokens == 1 + step.num_guesses, "only a decoding sequence drafts"
    return step._replace(
        token_ids=step.token_ids[:1] if i == 0 else np.array([-1]),
        position=step.position + i,
        num_paged_keys=step.num_paged_keys - step.num_guesses + i,
        sampling=step.sampling._replace(position=step.sampling.position + i),
        previous_row=previous_row,
        num_guesses=0,
        num_drafts=0,
        edits=None,  # a draft may be any token
        num_logprobs=None,
    )


def measure_draft_s(
    num_blocks: int, block_size: int, max_model_len: int, launch: Callable[[StepPlan], StepResult]
) -> float:
    """Seconds of a decode step of one sequence whose keys fill the GPU's blocks, or as many as it can have."""
    num_keys = min(num_blocks * block_size, max_model_len)
    step = SequenceStep(
        seq_id=0,
        token_ids=np.zeros(1, dtype=np.int64),
        position=num_keys - 1,
        num_prompt_tokens=num_keys,
        block_table=tuple(range(ceil_div(num_keys, block_size))),
        num_paged_keys=num_keys,
        sampling=SamplingRow(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=num_keys),
    )
    plan = StepPlan((step,), KVMoves())
    for _ in range(2):
        launch(plan).token_ids()
    start_s = time.perf_counter()
    results = [launch(plan) for _ in range(NUM_TIMED_STEPS)]
    results[-1].token_ids()
    return (time.perf_counter() - start_s) / NUM_TIMED_STEPS
