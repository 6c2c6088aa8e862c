"""WakePace on a fake clock: the share of the time that is spent, and what may be spent after a pause."""

import pytest

from nanovllm.wake_pace import MAX_REST_S, MAX_SAVED_S, MAX_SHARE, WakePace


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def spend(pace: WakePace, clock: Clock, seconds: float) -> float:
    clock.now_s += seconds
    return pace.rest_s(seconds)


@pytest.mark.parametrize("work_s", [0.0001, 0.001, 0.01])
def test_work_without_end_takes_its_share_of_the_time(work_s: float) -> None:
    clock = Clock()
    pace = WakePace(clock)
    spent_s = 0.0
    for _ in range(1000):
        clock.now_s += spend(pace, clock, work_s)
        spent_s += work_s
    assert spent_s / clock.now_s == pytest.approx(MAX_SHARE, rel=0.01)


def test_rare_work_needs_no_rest() -> None:
    clock = Clock()
    pace = WakePace(clock)
    for _ in range(100):
        clock.now_s += 0.01
        assert spend(pace, clock, 0.0024) == 0.0


def test_after_a_long_step_all_readers_are_woken_without_a_rest() -> None:
    """200 ms pass. Then eight groups take 2 ms each, as those of 128 readers may."""
    clock = Clock()
    pace = WakePace(clock)
    for _ in range(100):
        clock.now_s += spend(pace, clock, 0.002)
    clock.now_s += 0.2
    assert [spend(pace, clock, 0.002) for _ in range(8)] == [0.0] * 8


def test_a_long_pause_saves_no_more_than_the_limit_and_a_long_work_has_a_bounded_rest() -> None:
    clock = Clock()
    pace = WakePace(clock)
    clock.now_s += 3600.0
    rest_s = spend(pace, clock, 2 * MAX_SAVED_S)
    assert rest_s == pytest.approx(MAX_SAVED_S / MAX_SHARE)
    assert spend(pace, clock, 10.0) == MAX_REST_S


def test_readers_that_took_too_long_are_not_made_up_for() -> None:
    """Regression: each of these added to a debt, and later work rested as long as it could for a minute."""
    clock = Clock()
    pace = WakePace(clock)
    for _ in range(1000):
        clock.now_s += spend(pace, clock, 0.05)
    rests_s = []
    for _ in range(100):
        rests_s.append(spend(pace, clock, 0.0005))
        clock.now_s += rests_s[-1]
    assert sum(rests_s) < 0.5
