"""How long chunks may be: what is learned from the times of steps, and what follows from it."""

from itertools import pairwise

import numpy as np
import pytest

from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import KVMoves, SamplingRow, SequenceStep, SlotLoad, StepPlan
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.prompts import PromptSharing
from nanovllm.schedule.step_bound import (
    LONG_STEP_INTERVAL,
    MIN_CHUNK_TOKENS,
    PACE,
    ChunkTimes,
    StepBound,
    chunk_tokens,
    chunk_work,
)

TOKEN_KEYS = 4000
DECODE_S, FIXED_S, WORK_S = 2.5e-3, 1e-3, 4e-10
ROW = SamplingRow(1.0)


class Steps:
    """Steps of known times, for ChunkTimes to measure."""

    def __init__(self, fixed_s: float = FIXED_S, graph_tokens: int = 0) -> None:
        self.fixed_s = fixed_s
        self.times = ChunkTimes(TOKEN_KEYS, graph_tokens)

    def run(
        self,
        num_tokens: int = 0,
        position: int = 0,
        *,
        seconds: float | None = None,
        streams: bool = False,
        follows_pause: bool = False,
    ) -> None:
        """An answer, and a chunk if `num_tokens` is not 0."""
        sequences = [SequenceStep(0, np.zeros(1, int), 10, 5, (0,), 11, ROW)]
        if num_tokens:
            sequences.append(SequenceStep(1, np.zeros(num_tokens, int), position, 10**6, (0,), num_tokens, None))
        added_s = self.fixed_s + WORK_S * chunk_work(num_tokens, position, TOKEN_KEYS) if num_tokens else 0.0
        plan = StepPlan(tuple(sequences), KVMoves(loads=(SlotLoad(0, 0, 1),) if streams else ()))
        self.times.step_ended(plan, None if follows_pause else DECODE_S + added_s if seconds is None else seconds)


def measured(fixed_s: float = FIXED_S) -> ChunkTimes:
    steps = Steps(fixed_s)
    for num_tokens in (0, 0, 0, 100, 5000, 0):
        steps.run(num_tokens)
    return steps.times


@pytest.mark.parametrize("position", [0, 1, 131_072])
@pytest.mark.parametrize("num_tokens", [0, 1, 100, 16_384])
def test_chunk_tokens_is_the_inverse_of_chunk_work(num_tokens: int, position: int) -> None:
    work = chunk_work(num_tokens, position, TOKEN_KEYS)
    assert chunk_tokens(work + 1, position, TOKEN_KEYS) == num_tokens
    assert num_tokens == 0 or chunk_tokens(work - 1, position, TOKEN_KEYS) == num_tokens - 1


def test_times_learn_the_line_from_chunks_of_different_work() -> None:
    times = measured()
    line = times.line()
    assert times.decode_s == pytest.approx(DECODE_S)
    assert line is not None and line.knows_fixed
    assert (line.fixed_s, line.work_s) == pytest.approx((FIXED_S, WORK_S))


def test_times_of_one_magnitude_tell_no_fixed_time() -> None:
    steps = Steps()
    for num_tokens in (0, 0, 5000, 5000):
        steps.run(num_tokens)
    line = steps.times.line()
    assert line is not None and not line.knows_fixed and line.fixed_s == 0


def test_times_are_hardly_disturbed_by_slow_steps() -> None:
    steps = Steps()
    for num_tokens in (0, 0, 0, 50, 50, 50, 1000, 1000, 1000, 16_384, 16_384, 16_384):
        steps.run(num_tokens)
    for num_tokens in (0, 50, 16_384):
        steps.run(num_tokens, seconds=3.0)
    line = steps.times.line()
    assert line is not None and (line.fixed_s, line.work_s) == pytest.approx((FIXED_S, WORK_S), rel=0.01)
    assert steps.times.decode_s == pytest.approx(DECODE_S)


def test_long_chunks_are_never_taken_to_cost_nothing() -> None:
    """Regression: chunks of the same time at all positions, with a short one, made a line without a slope."""
    steps = Steps()
    steps.run()
    for num_tokens, position, seconds in ((0, 0, 0), (100, 0, 0.01), (16_384, 0, 0.1), (16_384, 114_688, 0.1)):
        steps.run(num_tokens, position, seconds=DECODE_S + seconds)
    line = steps.times.line()
    assert line is not None and line.fixed_s <= 0.01
    assert line.fixed_s + line.work_s * chunk_work(16_384, 114_688, TOKEN_KEYS) >= 0.1 - 1e-9


@pytest.mark.parametrize("num_slow", [1, 2])
@pytest.mark.parametrize("with_short", [False, True])
def test_a_slow_first_chunk_is_soon_forgotten(num_slow: int, with_short: bool) -> None:
    """Its kernels were prepared. Were it believed, no other chunk would be as long, and so none would correct it."""
    steps = Steps(fixed_s=8e-3)
    for num_tokens in (0, 0, 0, *[200] * with_short):
        steps.run(num_tokens)
    for i in range(num_slow):
        steps.run(16_384, 16_384 * i, seconds=0.7)
    bound = StepBound(steps.times, max_step_s=0.2)
    seconds = []
    for i in range(8):
        position = 16_384 * num_slow + 4096 * i
        bound.begin_step(0, 1, 0)
        num_tokens = bound.max_tokens(position, is_long=True, is_oldest=True)
        bound.chunk_placed(num_tokens, position, is_long=True)
        steps.run(num_tokens, position)
        seconds.append(8e-3 + WORK_S * chunk_work(num_tokens, position, TOKEN_KEYS))
    assert max(seconds) < 0.25
    assert min(seconds[4:]) > 0.15


def test_chunks_measured_where_the_load_had_dropped_do_not_make_others_free() -> None:
    """Regression: steps without chunks were still known to take long, so the chunk seemed to cost nothing."""
    steps = Steps()
    for _ in range(15):
        steps.run(seconds=0.02)
    steps.run(1000, seconds=0.015)
    steps.run(300, seconds=0.0201)
    for _ in range(15):
        steps.run(seconds=0.005)
    for _ in range(3):
        steps.run(2048, seconds=0.105)
        steps.run(8192, seconds=0.45)
    line = steps.times.line()
    assert line is not None
    assert line.fixed_s + line.work_s * chunk_work(8192, 0, TOKEN_KEYS) == pytest.approx(0.445, rel=0.1)


def test_times_that_say_nothing_do_not_count() -> None:
    """The first step after a pause, a chunk beside answers of unknown time, and chunks whose keys are loaded."""
    steps = Steps()
    steps.run(100)
    steps.run(follows_pause=True)
    assert steps.times.decode_s is None and steps.times.line() is None
    steps.run()
    steps.run(100, streams=True)
    assert steps.times.decode_s is not None and steps.times.line() is None


def long_steps(bound: StepBound, num_steps: int, *, num_others: int = 32, num_missing_tokens: int = 0) -> list[int]:
    """Numbers of the steps with a chunk of a long prompt, which begins at token 100,000."""
    found = []
    for i in range(num_steps):
        bound.begin_step(num_others, 1, num_missing_tokens)
        if bound.runs_long_prompts:
            found.append(i)
            bound.chunk_placed(bound.max_tokens(100_000, is_long=True, is_oldest=True), 100_000, is_long=True)
    return found


def test_bound_is_paced_in_every_step_where_chunks_cost_little_beside_their_work() -> None:
    bound = StepBound(measured(), max_step_s=0.2)
    assert long_steps(bound, 20) == list(range(20))
    num_tokens = bound.max_tokens(100_000, is_long=True, is_oldest=True)
    seconds = DECODE_S + FIXED_S + WORK_S * chunk_work(2 * num_tokens, 100_000, TOKEN_KEYS)
    assert seconds == pytest.approx(PACE * DECODE_S, rel=0.05)  # half of the time is the oldest's in any case


@pytest.mark.parametrize("times", [ChunkTimes(TOKEN_KEYS), measured(fixed_s=8e-3)])
def test_bound_runs_long_steps_although_each_step_has_a_short_prompt(times: ChunkTimes) -> None:
    """Such a step takes 10.8 ms here, and the rest 0.8 s at most. If no times are known, the steps are counted."""
    bound = StepBound(times, max_step_s=0.2)
    found = []
    for i in range(1000):
        bound.begin_step(10**6, 1, 0)
        bound.chunk_placed(200, 0, is_long=False)
        if bound.runs_long_prompts:
            found.append(i)
            bound.chunk_placed(bound.max_tokens(0, is_long=True, is_oldest=True), 0, is_long=True)
    intervals = {later - earlier for earlier, later in pairwise(found)}
    assert intervals <= ({LONG_STEP_INTERVAL} if times.decode_s is None else set(range(70, 80)))


@pytest.mark.parametrize(("fixed_s", "num_missing_tokens"), [(8e-3, 0), (0.0, 100_000)])
def test_bound_runs_rare_long_steps_where_short_chunks_cost_as_much(fixed_s: float, num_missing_tokens: int) -> None:
    bound = StepBound(measured(fixed_s), max_step_s=0.2, missing_token_s=2e-6)
    found = long_steps(bound, 1000, num_missing_tokens=num_missing_tokens)
    assert {later - earlier for earlier, later in pairwise(found)} == {LONG_STEP_INTERVAL}


def test_bound_gives_a_long_prompt_its_time_beside_short_prompts_alone() -> None:
    """Regression: without any step that only decodes, long prompts waited for a number of steps, however long."""
    times = ChunkTimes(TOKEN_KEYS)
    for num_tokens in (100, 5000) * 3:
        chunk = SequenceStep(1, np.zeros(num_tokens, int), 0, 10**6, (0,), num_tokens, None)
        seconds = FIXED_S + WORK_S * chunk_work(num_tokens, 0, TOKEN_KEYS)
        times.step_ended(StepPlan((chunk,), KVMoves()), seconds)
    assert times.decode_s is None and times.line() is not None
    bound = StepBound(times, max_step_s=0.2)
    steps_between = []
    for _ in range(500):
        bound.begin_step(num_others=4, num_long=1, num_missing_tokens=0)
        if bound.runs_long_prompts:
            bound.chunk_placed(bound.max_tokens(0, is_long=True, is_oldest=True), 0, is_long=True)
            steps_between.append(0)
        elif steps_between:
            steps_between[-1] += 1
        for _ in range(4):
            bound.chunk_placed(2000, 0, is_long=False)
    assert max(steps_between[1:-1]) < 40


def test_bound_gives_a_long_prompt_a_fifth_of_the_time_where_other_steps_take_long() -> None:
    steps = Steps(fixed_s=0.1)
    for num_tokens in (0, 0, 0, 100, 5000):
        steps.run(num_tokens, seconds=0.02 if not num_tokens else None)
    found = long_steps(StepBound(steps.times, max_step_s=0.2), 1000, num_others=10**6)
    intervals = {later - earlier for earlier, later in pairwise(found)}
    assert intervals <= {40, 41, 42}  # 4 * 0.2 s of rest, in steps of 0.02 s


def test_bound_of_a_lone_prompt_is_the_longest_step_and_at_least_the_time_of_streaming() -> None:
    bound = StepBound(measured(), max_step_s=0.1, missing_token_s=2e-6)
    seconds = []
    for num_missing_tokens in (0, 100_000):
        bound.begin_step(0, 1, num_missing_tokens)
        num_tokens = bound.max_tokens(100_000, is_long=True, is_oldest=True)
        seconds.append(FIXED_S + WORK_S * chunk_work(num_tokens, 100_000, TOKEN_KEYS))
        bound.chunk_placed(num_tokens, 100_000, is_long=True)
    assert seconds == pytest.approx([0.1, 0.2], rel=0.01)


def test_bound_lets_the_first_chunk_of_a_step_progress_whatever_it_costs() -> None:
    bound = StepBound(measured(fixed_s=1.0), max_step_s=0.1)
    for is_long in (True, False):
        bound.begin_step(0, int(is_long), 0)
        assert bound.max_tokens(100_000, is_long=is_long, is_oldest=True) == MIN_CHUNK_TOKENS


def test_bound_lets_short_prompts_run_in_any_step_until_it_is_full() -> None:
    bound = StepBound(measured(), max_step_s=0.05)
    num_steps_with_short = 0
    for _ in range(10):
        bound.begin_step(33, 1, 0)
        num_tokens = bound.max_tokens(0, is_long=False, is_oldest=False)
        bound.chunk_placed(num_tokens, 0, is_long=False)
        num_steps_with_short += num_tokens > 1000
        assert bound.max_tokens(0, is_long=False, is_oldest=False) < 100
    assert num_steps_with_short == 10


GRAPH_TOKENS = 1024
LAUNCHES_S = 30e-3  # of a chunk that has no graph


def measured_graphs(fixed_s: float = FIXED_S) -> ChunkTimes:
    """Where short chunks run as graphs, and longer ones are launched kernel by kernel."""
    steps = Steps(fixed_s, GRAPH_TOKENS)
    for num_tokens in (0, 0, 0, 64, 1000, 0):
        steps.run(num_tokens)
    steps.fixed_s = LAUNCHES_S
    for num_tokens in (2000, 16_384):
        steps.run(num_tokens)
    return steps.times


def test_times_of_graphs_and_of_launched_chunks_are_kept_apart() -> None:
    times = measured_graphs()
    graphs, launched = times.line(in_graph=True), times.line()
    assert graphs is not None and (graphs.fixed_s, graphs.work_s) == pytest.approx((FIXED_S, WORK_S))
    work = chunk_work(16_384, 0, TOKEN_KEYS)
    assert launched is not None and launched.work_s * work == pytest.approx(LAUNCHES_S + WORK_S * work)


def test_launched_chunks_are_taken_to_be_as_fast_as_graphs_until_one_was_measured() -> None:
    steps = Steps(graph_tokens=GRAPH_TOKENS)
    for num_tokens in (0, 64, 1000):
        steps.run(num_tokens)
    assert steps.times.line() == steps.times.line(in_graph=True) is not None


def test_long_prompts_run_in_long_steps_where_there_are_graphs() -> None:
    """At the usual interval. A step that a graph can run is not a long one."""
    bound = StepBound(measured_graphs(), max_step_s=0.2)
    found = long_steps(bound, 1000)
    assert {later - earlier for earlier, later in pairwise(found)} == {LONG_STEP_INTERVAL}
    bound.begin_step(0, 1, 0)
    for is_long in (False, True):
        bound.chunk_placed(600, 0, is_long=True)
        assert bound.is_long_step == is_long
    bound.begin_step(1, 0, 0)
    assert not bound.is_long_step


def test_each_slow_step_with_short_prompts_puts_the_next_long_step_off() -> None:
    """The step after that comes at the usual interval: the slow steps are counted from one long step to the next."""
    launches, graphs = measured(fixed_s=8e-3), measured_graphs()
    for times, num_short, num_steps, num_slow in ((graphs, 1, 1, 0), (graphs, 16, 1, 1), (launches, 3, 2, 2)):
        bound = StepBound(times, max_step_s=2.0)
        assert long_steps(bound, 1) == [0]
        for _ in range(num_steps):
            bound.begin_step(32 + num_short, 1, 0)
            for _ in range(num_short):
                bound.chunk_placed(200, 0, is_long=False)
        found = long_steps(bound, 1000)
        assert found[0] == (1 + num_slow) * LONG_STEP_INTERVAL - 1 - num_steps
        assert {later - earlier for earlier, later in pairwise(found)} == {LONG_STEP_INTERVAL}, "the count is not reset"


def test_long_steps_soon_take_what_they_may_whatever_is_launched_beside() -> None:
    """Regression: after mid-sized prompts and slow first chunks, all later ones were half as long as allowed."""
    steps = Steps(LAUNCHES_S, GRAPH_TOKENS)
    for num_tokens, seconds in ((0, DECODE_S), (1100, None), (1100, None), (16_384, 0.8)):
        steps.run(num_tokens, seconds=seconds)
    bound = StepBound(steps.times, max_step_s=0.2)
    for position in range(0, 60_000, 5000):
        bound.begin_step(0, 1, 0)
        num_tokens = bound.max_tokens(position, is_long=True, is_oldest=True)
        steps.run(num_tokens, position)
        if position % 20_000 == 0:
            steps.run(1100)
    seconds = LAUNCHES_S + WORK_S * chunk_work(num_tokens, position, TOKEN_KEYS)
    assert 0.17 < seconds < 0.23


def test_a_slow_chunk_does_not_make_all_time_look_fixed() -> None:
    """Regression: after a slow first chunk the fixed time was more than a step may take, and all later chunks of long
    prompts were as short as allowed.
    """
    steps = Steps()
    for num_tokens, seconds in ((0, DECODE_S), (5503, 0.25), (16_384, 0.26)):
        steps.run(num_tokens, seconds=seconds)
    bound = StepBound(steps.times, max_step_s=0.2)
    bound.begin_step(0, 1, 0)
    assert bound.max_tokens(0, is_long=True, is_oldest=True) > 3000


def sequence(seq_id: int, num_tokens: int) -> Sequence:
    return Sequence(seq_id, [1] * num_tokens, SamplingParams(), seed=0)


def test_order_is_by_magnitude_and_then_by_arrival() -> None:
    prompts = [sequence(i, n) for i, n in enumerate([9000, 200, 2048, 5, 2049, 4000, 16_384])]
    sharing = PromptSharing(16_384, None)
    assert [sharing.size_class(seq) for seq in prompts] == [3, 0, 0, 0, 1, 1, 3]
    assert [seq.seq_id for seq in sharing.in_order(prompts[::-1], {})] == [1, 2, 3, 4, 5, 0, 6]


@pytest.mark.parametrize("step_tokens", [1, 2, 7])
def test_order_with_a_tiny_budget_has_sizes_too(step_tokens: int) -> None:
    sharing = PromptSharing(step_tokens, None)
    assert sharing.size_class(sequence(0, 1)) == 0
    assert sharing.size_class(sequence(0, 100)) > sharing.size_class(sequence(0, 10))
