"""How many guesses are worth their time."""

import numpy as np
import pytest

from nanovllm.capabilities.speculation import speculator
from nanovllm.capabilities.speculation.speculator import Acceptance, DraftPace, StepTimes
from nanovllm.plan.step_limits import expected_tokens
from nanovllm.plan.step_plan import DraftTimes, KVMoves, SamplingRow, SequenceStep, StepPlan
from nanovllm.schedule.seams import Load, load_of

ROW = SamplingRow()


def step_plan(num_guesses: int = 0, num_drafts: int = 0, num_seqs: int = 1, num_tokens: int | None = None) -> StepPlan:
    ids = np.zeros(num_tokens or 1 + num_guesses, dtype=np.int64)
    step = SequenceStep(0, ids, 5, 5, (0,), 6 + num_guesses, ROW, num_guesses=num_guesses, num_drafts=num_drafts)
    return StepPlan((step,) * num_seqs, KVMoves())


def load(num_seqs: int) -> Load:
    """That of step_plan."""
    return load_of(num_seqs, 5 * num_seqs)


def measured(*steps: tuple[StepPlan, float | None], draft_s: float = 0.0) -> StepTimes:
    """The times after these steps, which took so many seconds."""
    times = StepTimes(DraftTimes(draft_s))
    for plan, seconds in steps:
        times.step_ended(plan, seconds)
    return times


def best_number(times: StepTimes, acceptance: float, max_guesses: int, *, costs_drafts: bool) -> int:
    """The number with the most tokens per second; 0 if guesses gain nothing."""
    choices = times.choices(load(1), acceptance, max_guesses, costs_drafts=costs_drafts)
    return max(choices, key=lambda choice: choice.tokens_per_s).num_guesses if choices else 0


def test_expected_tokens_by_hand() -> None:
    assert expected_tokens(0.5, 0) == 1
    assert expected_tokens(0.5, 3) == 1.875
    assert expected_tokens(1.0, 15) == 16
    assert expected_tokens(0.0, 15) == 1


def test_best_number_of_guesses_by_hand() -> None:
    """A pass of 10 s, drafts of 1 s. Acceptance 0.5: 1.5 tokens in 11 s, 1.75 in 12, 1.875 in 13, 1.9375 in 14."""
    times = measured(*[(step_plan(), 10.0)] * 3, *[(step_plan(4), 10.0)] * 3, draft_s=1.0)
    best = max(range(1, 16), key=lambda k: expected_tokens(0.5, k) / (10 + k))
    assert best_number(times, 0.5, 15, costs_drafts=True) == best == 2
    assert best_number(times, 1.0, 15, costs_drafts=True) == 15
    assert best_number(times, 1.0, 4, costs_drafts=True) == 4
    assert best_number(times, 0.05, 15, costs_drafts=True) == 0  # 1.05 tokens in 11 s
    assert best_number(times, 0.05, 15, costs_drafts=False) > 0  # 1.05 tokens in 10 s


def test_a_slow_pass_makes_guesses_not_worth_their_time() -> None:
    times = measured(*[(step_plan(), 1.0)] * 2, *[(step_plan(4), 3.0)] * speculator.NUM_KNOWN_PASSES)
    assert best_number(times, 0.5, 15, costs_drafts=False) == 0
    assert best_number(times, 0.9, 15, costs_drafts=False) == 15


def test_the_time_of_a_pass_depends_on_the_number_of_its_guesses() -> None:
    """More are tried step by step. From 16 guesses on a pass takes four times as long, so 15 are best."""
    steps = [(step_plan(), 1.0)] * 2
    tried = []
    for _ in range(7):
        times = measured(*steps)
        tried.append(best_number(times, 0.95, 63, costs_drafts=False))
        steps += [(step_plan(tried[-1]), 1.0 if tried[-1] < 16 else 4.0)] * speculator.NUM_KNOWN_PASSES
    assert tried == [4, 15, 31, 15, 15, 15, 15]
    assert [times.pass_s(load(1), n) for n in (1, 15, 16, 63)] == [1.0, 1.0, 4.0, 4.0]


def test_few_guesses_take_less_than_the_passes_that_were_measured() -> None:
    """Regression: where drafts took longer than at start-up, the time of passes with seven guesses stood for one guess
    too. So answers that began after those made no guesses at all.
    """
    times = measured(*[(step_plan(), 8.0)] * 2, *[(step_plan(7, 7), 8.0 + 7 * 3.5)] * 3, draft_s=2.8)
    assert times.pass_s(load(1), 7) == times.pass_s(load(1), 9) == pytest.approx(8.0 + 7 * 0.7)
    assert times.pass_s(load(1), 1) == pytest.approx(8.0 + 0.7)
    assert best_number(times, speculator.PRIOR_ACCEPTANCE, 15, costs_drafts=True) > 0


def test_drafts_take_longer_with_more_keys() -> None:
    times = StepTimes(DraftTimes(1.0, 0.5))
    assert times.draft_s(load_of(1, 6)) == 1.0 + 0.5 * 6 and times.draft_s(load_of(4, 1000)) == 1.0 + 0.5 * 1000


def test_the_time_of_a_pass_is_known_after_some_and_expires() -> None:
    """The first pass may be slow, and would end all guessing. Until the time is known there are only a few guesses."""
    steps = [(step_plan(), 1.0)] * 3 + [(step_plan(4), 50.0)] * speculator.NUM_KNOWN_PASSES
    for num_passes in range(speculator.NUM_KNOWN_PASSES):
        times = measured(*steps[: 3 + num_passes])
        assert times.pass_s(load(1), 4) is None and best_number(times, 0.9, 15, costs_drafts=False) == 4
    times = measured(*steps)
    assert times.pass_s(load(1), 4) == 50.0 and best_number(times, 0.9, 15, costs_drafts=False) == 0
    assert times.pass_s(load(2), 4) is None
    later = [*steps, *[(step_plan(), 1.0)] * (speculator.PASS_EXPIRY_STEPS + 1)]
    assert measured(*later).pass_s(load(1), 4) is None
    assert measured(*later, (step_plan(4), 2.0)).pass_s(load(1), 4) is None
    assert measured(*later, *[(step_plan(4), 2.0)] * speculator.NUM_KNOWN_PASSES).pass_s(load(1), 4) == 2.0


def test_times_are_those_of_steps_with_about_as_many_keys() -> None:
    times = measured(*[(step_plan(), 1.0)] * 2)
    assert times.is_measured(load_of(1, 4)) and times.is_measured(load_of(1, 7))
    assert not times.is_measured(load_of(1, 8)) and not times.is_measured(load_of(1, 3))


def test_times_are_medians_of_the_newest_steps() -> None:
    times = measured(*[(step_plan(), seconds) for seconds in (9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 50.0, 4.0)])
    assert times.plain_s(load(1)) == 3.0 and times.plain_s(load(2)) is None and times.pass_s(load(1), 4) is None


def test_times_are_of_steps_of_the_same_kind_in_a_row() -> None:
    """A step after a pass with guesses starts late, so it does not count. Nor does a prompt, or what follows it."""
    times = measured((step_plan(), 100.0))
    assert not times.is_measured(load(1))
    times = measured((step_plan(), 100.0), (step_plan(), 1.0))
    assert times.is_measured(load(1)) and not times.is_measured(load(2))
    for between in (step_plan(3), step_plan(num_tokens=50)):
        times = measured((step_plan(), 100.0), (between, 100.0), (step_plan(), 100.0))
        assert not times.is_measured(load(1))
    times = measured((step_plan(), 1.0), (step_plan(), None))
    assert not times.is_measured(load(1))


def test_time_of_a_pass_is_without_its_drafts() -> None:
    times = measured((step_plan(), 9.0), (step_plan(), 10.0), *[(step_plan(4, num_drafts=4), 14.0)] * 3, draft_s=1.0)
    assert times.pass_s(load(1), 4) == pytest.approx(10.0) and times.plain_s(load(1)) == pytest.approx(10.0)


def test_steps_without_guesses_are_measured_again_after_many_passes() -> None:
    steps = [(step_plan(), 1.0)] * 2 + [(step_plan(4), 1.0)] * speculator.REMEASURE_PASSES
    assert not measured(*steps).is_measured(load(1))
    assert measured(*steps[:-1]).is_measured(load(1))
    assert measured(*steps, (step_plan(), 1.0), (step_plan(), 1.0)).is_measured(load(1))


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
def test_acceptance_approaches_that_of_the_guesses(acceptance: float) -> None:
    """Right guesses, then a wrong one, in the proportion of the acceptance."""
    num_right = round(acceptance / (1 - acceptance)) if acceptance < 1 else 15
    for decay in (speculator.DECAY, speculator.COMMON_DECAY):
        some = Acceptance(0.7, decay)
        assert some.estimate == pytest.approx(0.7)
        for _ in range(400):
            some.verified(15, num_right)
        assert some.estimate == pytest.approx(acceptance, abs=0.03)


def test_sequences_that_rest_try_again_together() -> None:
    """Regression: a shadow's guesses began anew with 0.7, and where drafts are dear they never did."""
    sequences = [DraftPace(0.95, 0.95) for _ in range(3)]
    ends = []
    for step in range(4 * speculator.REST_STEPS):
        resting = [some.rests(step) for some in sequences]
        assert all(resting) or not any(resting)
        if not any(resting):
            ends.append(step)
            for some in sequences:
                assert some.acceptance.estimate == pytest.approx(0.95)
                some.acceptance.verified(4, 0)
                some.rest(step)
    assert ends == [i * speculator.REST_STEPS for i in range(4)]
    times = measured((step_plan(), 1.0), (step_plan(), 1.0), draft_s=0.6)
    assert best_number(times, 0.8, 15, costs_drafts=True) > 0 == best_number(times, 0.6, 15, costs_drafts=True)
