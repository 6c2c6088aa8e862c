"""Speculator: which drafter is asked, at what pace, what it may return, and which guesses were right."""

import itertools
import logging
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
from test_pace import load, step_plan

from nanovllm.capabilities.speculation.drafters import PromptLookupDrafter
from nanovllm.capabilities.speculation.speculator import Speculator, StepTimes
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import KVMoves, SamplingRow, SequenceStep, StepPlan
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.seams import DRAFTED, NO_GUESSES, Guesses


class ListedDrafter:
    """Guesses what `answer` returns for the number asked for."""

    costs_drafts: ClassVar[bool] = False

    def __init__(self, name: str, answer: Callable[[int], Guesses]) -> None:
        self.name, self._answer = name, answer  # type: ignore[misc]
        self.forgotten: list[int] = []
        self.asked: list[int] = []

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq.seq_id)

    def can_guess(self, seq: Sequence) -> bool:
        return bool(self._answer(1).token_ids)

    def kind(self, seq: Sequence) -> str:
        return self.name

    def guess(self, seq: Sequence, max_guesses: int) -> Guesses:
        self.asked.append(max_guesses)
        return self._answer(max_guesses)


def fives(name: str = "fives") -> ListedDrafter:
    return ListedDrafter(name, lambda n: Guesses((5,) * n))


def silent() -> ListedDrafter:
    return ListedDrafter("silent", lambda n: NO_GUESSES)


def make(*drafters: ListedDrafter, times: StepTimes | None = None) -> tuple[Speculator, Sequence]:
    speculator = Speculator(drafters, vocab_size=10, max_guesses=4, times=times)
    seq = Sequence(3, [1, 2, 3], SamplingParams(max_tokens=100), seed=0)
    speculator.add(seq)
    return speculator, seq


def test_the_first_drafter_with_a_guess_is_chosen() -> None:
    first, second, third = silent(), fives(), fives("other")
    speculator, seq = make(first, second, third)
    assert speculator.wants_to_guess(seq, load(1))
    assert speculator.guess(seq, 3, load(1)) == Guesses((5, 5, 5))
    speculator.verified(seq, 3, [9])
    assert list(speculator.stats()["drafters"]) == ["fives"]
    assert speculator.guess(seq, 9, load(1)) == Guesses((5,) * 4)
    assert speculator.guess(seq, 0, load(1)) == speculator.guess(seq, -2, load(1)) == NO_GUESSES
    speculator.forget(seq)
    assert first.forgotten == second.forgotten == [seq.seq_id]


def test_nothing_to_guess() -> None:
    speculator, seq = make(silent())
    assert not speculator.wants_to_guess(seq, load(1)) and speculator.guess(seq, 3, load(1)) == NO_GUESSES


@pytest.mark.parametrize(
    ("guesses", "kept"),
    [
        (Guesses((5, 10, 3)), (5,)),
        (Guesses((5, 3, -7)), (5, 3)),
        (Guesses((DRAFTED, 3)), ()),
        (Guesses((DRAFTED, 3), 1), (DRAFTED, 3)),
        (Guesses((DRAFTED, DRAFTED), 1), (DRAFTED,)),
    ],
)
def test_what_is_not_a_token_is_refused_and_logged_once(
    guesses: Guesses, kept: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    speculator, seq = make(ListedDrafter("odd", lambda n: guesses))
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        for _ in range(3):
            assert speculator.guess(seq, 4, load(1)).token_ids == kept
    assert len(caplog.records) == (len(kept) < len(guesses.token_ids))


def test_no_guesses_before_the_time_of_a_step_is_known() -> None:
    times = StepTimes()
    speculator, seq = make(fives(), times=times)
    assert not speculator.wants_to_guess(seq, load(1)) and speculator.guess(seq, 4, load(1)) == NO_GUESSES
    for _ in range(2):
        times.step_ended(step_plan(), 1.0)
    assert speculator.wants_to_guess(seq, load(1)) and not speculator.wants_to_guess(seq, load(2))
    assert speculator.guess(seq, 4, load(1)) == Guesses((5,) * 4)


@pytest.mark.parametrize("num_seqs", [1, 32, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 60))])
def test_guesses_that_gain_nothing_cost_little_and_are_tried_again(num_seqs: int) -> None:
    """No guess is right, and a pass takes half as long again. Sequences end, and others take their place."""
    times = StepTimes()
    speculator = Speculator([fives()], vocab_size=10, max_guesses=4, times=times)
    new_ids = itertools.count()

    def arrive() -> Sequence:
        seq = Sequence(next(new_ids), [1, 2, 3], SamplingParams(max_tokens=1000), seed=0)
        speculator.add(seq)
        return seq

    running = [arrive() for _ in range(num_seqs)]
    num_steps, total_s = 4000, 0.0
    for step in range(num_steps):
        wants = any(speculator.wants_to_guess(seq, load(num_seqs)) for seq in running)
        guesses = [speculator.guess(seq, 4, load(num_seqs)) if wants else NO_GUESSES for seq in running]
        most = max(len(some.token_ids) for some in guesses)
        step_s = 1.5 if most else 1.0
        total_s += step_s
        times.step_ended(step_plan(most, num_seqs=num_seqs), step_s)
        for seq, some in zip(running, guesses, strict=True):
            if some.token_ids:
                speculator.verified(seq, len(some.token_ids), [7])
            seq.token_ids.append(7)
        if step % 10 == 9 and num_seqs > 1:
            speculator.forget(running.pop(0))
            running.append(arrive())
    assert speculator.num_passes >= 3
    assert total_s <= num_steps / 0.97


def test_a_quote_is_guessed_although_short_matches_were_wrong() -> None:
    times = StepTimes()
    speculator = Speculator([PromptLookupDrafter()], vocab_size=1000, max_guesses=4, times=times)
    seq = Sequence(0, [*range(100, 140), 1, 2, 3, 1, 2], SamplingParams(max_tokens=1000), seed=0)
    speculator.add(seq)
    num_guesses = 0
    for _ in range(30):  # short matches, all wrong
        guesses = speculator.guess(seq, 4, load(1))
        num_guesses += bool(guesses.token_ids)
        times.step_ended(step_plan(len(guesses.token_ids)), 1.5 if guesses.token_ids else 1.0)
        if guesses.token_ids:
            speculator.verified(seq, len(guesses.token_ids), [999])
    assert 0 < num_guesses < 10 and not speculator.wants_to_guess(seq, load(1))
    seq.token_ids.extend(range(100, 120))
    assert speculator.wants_to_guess(seq, load(1)) and speculator.guess(seq, 4, load(1)) == Guesses(
        (120, 121, 122, 123)
    )


def test_stats_count_guesses_and_passes() -> None:
    speculator, seq = make(fives())
    assert speculator.stats()["guess_acceptance"] is None and speculator.stats()["tokens_per_pass"] is None
    for num_accepted in (4, 1):
        speculator.guess(seq, 4, load(1))
        speculator.verified(seq, 4, [5] * (num_accepted + 1))
    assert speculator.stats() == {
        "num_guesses": 8,
        "num_accepted_guesses": 5,
        "guess_acceptance": 5 / 8,
        "tokens_per_pass": 3.5,
        "drafters": {
            "fives": {"num_guesses": 8, "num_accepted_guesses": 5, "accepted_by_position": [1.0, 0.5, 0.5, 0.5]}
        },
    }


# -- verification ----------------------------------------------------------------------------------------------------


def sampled_row(guesses: list[int], num_drafts: int = 0, num_known: int = 1, samples: bool = True) -> SequenceStep:
    ids = np.array([50] * num_known + guesses)
    sampling = SamplingRow() if samples else None
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
    return StepPlan(tuple(rows), KVMoves()).verified_tokens(token_ids)


def test_tokens_are_kept_up_to_the_first_wrong_guess() -> None:
    guesses = [1, 2, 3]
    assert verified([sampled_row(guesses)], [1, 2, 3, 4]) == [[1, 2, 3, 4]]
    assert verified([sampled_row(guesses)], [1, 2, 7, 4]) == [[1, 2, 7]]
    assert verified([sampled_row(guesses)], [7, 2, 3, 4]) == [[7]]
    assert verified([sampled_row(guesses)], [1, -1, 3, 4]) == [[1, -1]]  # invalid logits


def test_rows_with_and_without_guesses_and_chunks_of_prompts() -> None:
    rows = [
        sampled_row([1]),
        sampled_row([]),
        sampled_row([], num_known=6, samples=False),
        sampled_row([], num_known=6),
        sampled_row([4, 5]),
    ]
    assert verified(rows, [1, 2, 10, 20, 4, 6, 7]) == [[1, 2], [10], [], [20], [4, 6]]


def test_drafts_take_the_places_of_guesses_that_are_not_known() -> None:
    """They come draft by draft, each for the rows that take part."""
    rows = [sampled_row([-1, -1], 2), sampled_row([7]), sampled_row([-1, 9, -1], 3)]
    drafted = [1, 3, 2, 99, 5]  # rows 0 and 2, rows 0 and 2 (whose guess is known), row 2
    sampled = [1, 2, 30, 7, 31, 3, 9, 5, 32]
    assert verified(rows, sampled + drafted) == [[1, 2, 30], [7, 31], [3, 9, 5, 32]]
    drafted[2] = 8
    assert verified(rows, sampled + drafted) == [[1, 2], [7, 31], [3, 9, 5, 32]]
