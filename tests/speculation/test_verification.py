"""Which sampled tokens are a sequence's own."""

import numpy as np

from nanovllm.core.step_plan import KVMoves, SamplingRow, SequenceStep, StepPlan
from nanovllm.speculation.verification import verified_tokens


def row(guesses: list[int], num_drafts: int = 0, num_known: int = 1, samples: bool = True) -> SequenceStep:
    ids = np.array([50] * num_known + guesses)
    sampling = SamplingRow(0.0, 0, 1.0, 0.0, 0, 9) if samples else None
    return SequenceStep(
        seq_id=0,
        token_ids=ids,
        position=8,
        num_prompt_tokens=5,
        block_table=(0,),
        num_paged_keys=8 + len(ids),
        sampling=sampling,
        num_guesses=len(guesses),
        num_drafts=num_drafts,
    )


def verified(rows: list[SequenceStep], token_ids: list[int]) -> list[list[int]]:
    return verified_tokens(StepPlan(tuple(rows), KVMoves()), token_ids)


def test_tokens_are_kept_up_to_the_first_wrong_guess() -> None:
    guesses = [1, 2, 3]
    assert verified([row(guesses)], [1, 2, 3, 4]) == [[1, 2, 3, 4]]
    assert verified([row(guesses)], [1, 2, 7, 4]) == [[1, 2, 7]]
    assert verified([row(guesses)], [7, 2, 3, 4]) == [[7]]
    assert verified([row(guesses)], [1, -1, 3, 4]) == [[1, -1]]  # invalid logits


def test_rows_with_and_without_guesses_and_chunks_of_prompts() -> None:
    rows = [row([1]), row([]), row([], num_known=6, samples=False), row([], num_known=6), row([4, 5])]
    assert verified(rows, [1, 2, 10, 20, 4, 6, 7]) == [[1, 2], [10], [], [20], [4, 6]]


def test_drafts_take_the_places_of_guesses_that_are_not_known() -> None:
    """They come draft by draft, each for the rows that take part."""
    rows = [row([-1, -1], 2), row([7]), row([-1, 9, -1], 3)]
    drafted = [1, 3, 2, 99, 5]  # rows 0 and 2, rows 0 and 2 (whose guess is known), row 2
    sampled = [1, 2, 30, 7, 31, 3, 9, 5, 32]
    assert verified(rows, sampled + drafted) == [[1, 2, 30], [7, 31], [3, 9, 5, 32]]
    drafted[2] = 8
    assert verified(rows, sampled + drafted) == [[1, 2], [7, 31], [3, 9, 5, 32]]
