"""The number of missing tokens that the CPU takes: both sides end together, or the CPU takes none if that is faster."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from nanovllm.capabilities.cpu_attention.cpu_split import MIN_GAIN, UNIT_TOKENS, CpuRate, CpuSplit, FollowingSplit
from nanovllm.kvcache.missing_keys import divide_missing
from nanovllm.plan.step_plan import KVMoves, LayerTimes, SequenceStep, StepPlan

BLOCK = 4096
SPLIT = CpuSplit(
    token_bytes=4096,
    max_queries=512,
    max_sequence_queries=16,
    is_forced=False,
    link_byte_per_s=50e9,
    cpu_rates=(CpuRate(1, 60e9), CpuRate(4, 40e9), CpuRate(16, 20e9)),
    idle_s=1e-4,
)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 24, 100])
def test_link_and_cpu_end_together(num_blocks: int) -> None:
    cost_s = SPLIT.cpu_token_s(1)
    num_cpu_tokens = SPLIT.num_cpu_tokens([cost_s] * num_blocks, BLOCK)
    assert num_cpu_tokens % UNIT_TOKENS == 0
    link_s = SPLIT.link_s(num_blocks * BLOCK - num_cpu_tokens)
    cpu_s = SPLIT.idle_s + num_cpu_tokens * cost_s
    assert cpu_s <= link_s <= cpu_s + UNIT_TOKENS * (cost_s + SPLIT.link_s(1))
    assert link_s < 0.8 * SPLIT.link_s(num_blocks * BLOCK)


def test_cpu_that_gains_nothing_takes_nothing_unless_it_is_forced() -> None:
    costs_s = [SPLIT.cpu_token_s(1)]
    idle = replace(SPLIT, idle_s=SPLIT.link_s(BLOCK))  # the link has everything before the CPU can start
    slow = replace(SPLIT, cpu_rates=(CpuRate(1, SPLIT.link_byte_per_s * MIN_GAIN / 2),))  # type: ignore[operator]
    assert idle.num_cpu_tokens(costs_s, BLOCK) == 0
    assert slow.num_cpu_tokens([slow.cpu_token_s(1)], BLOCK) == 0
    assert replace(idle, is_forced=True).num_cpu_tokens(costs_s, BLOCK) == UNIT_TOKENS
    assert replace(idle, is_forced=True).num_cpu_tokens(costs_s, 32) == 32  # a block smaller than the unit


def test_step_that_misses_nothing_leaves_nothing_to_the_cpu() -> None:
    """Regression: a forced split began a job without keys in every layer, once another sequence's end had made room."""
    split = replace(SPLIT, is_forced=True)
    missing = divide_missing([[], []], [1, 1], block_size=BLOCK, group_blocks=2, split=split)
    assert missing == ((), ())


def test_without_a_link_the_cpu_takes_everything() -> None:
    split = CpuSplit(token_bytes=64, max_queries=512, max_sequence_queries=512, is_forced=False)
    assert split.num_cpu_tokens([split.cpu_token_s(300)] * 3, BLOCK) == 3 * BLOCK


def test_cost_of_queries_is_that_of_the_next_measured_number() -> None:
    costs = {n: SPLIT.token_bytes / SPLIT.cpu_token_s(n) for n in (1, 2, 4, 5, 16)}
    assert costs == pytest.approx({1: 60e9, 2: 40e9, 4: 40e9, 5: 20e9, 16: 20e9})


def test_steps_of_many_queries_are_left_to_the_link() -> None:
    assert SPLIT.takes_part([16] * 32) and SPLIT.takes_part([1] * 512)
    assert not SPLIT.takes_part([16] * 33) and not SPLIT.takes_part([1, 17])


def test_blocks_that_several_sequences_read_are_streamed_first() -> None:
    """The link carries such a block once, but the CPU would attend to it once for each sequence."""
    missing = divide_missing([[5, 9], [5, 7]], [1, 1], block_size=BLOCK, group_blocks=2, split=SPLIT)
    assert missing.streamed[0].cpu_block_ids[0] == 5
    assert {span.cpu_block_id for spans in missing.cpu_spans for span in spans} <= {7, 9}
    tokens = sum(group.num_tokens(BLOCK) for group in missing.streamed)
    tokens += sum(span.end - span.start for spans in missing.cpu_spans for span in spans)
    assert tokens == 3 * BLOCK


# -- a split that follows the times of steps -------------------------------------------------------------------------


class Machine:
    """Four sequences that miss five blocks each, and a split that follows what their decode steps take."""

    def __init__(self, start: CpuSplit = SPLIT) -> None:
        self.start, self.split = start, FollowingSplit(start)
        self.rows = [list(range(5 * i, 5 * i + 5)) for i in range(4)]
        self._random = random.Random(0)

    def run(self, num_steps: int, *, link: float = 1.0, cpu: float = 1.0, noise: float = 0.0) -> list[float]:
        """The CPU's share in each step, if the two sides take `link` and `cpu` times as long as at the start."""
        return [
            self._step(link * self._random.gauss(1, noise), cpu * self._random.gauss(1, noise))
            for _ in range(num_steps)
        ]

    def _step(self, link: float, cpu: float) -> float:
        missing = divide_missing(self.rows, [1] * 4, block_size=BLOCK, group_blocks=2, split=self.split.now)
        steps = [SequenceStep(i, np.zeros(1, dtype=np.int64), 9, 9, (0,), 1, None) for i in range(4)]
        moves = KVMoves(streamed=missing.streamed, cpu_spans=missing.cpu_spans)
        num_tokens = sum(span.end - span.start for spans in missing.cpu_spans for span in spans)
        link_s, cpu_s = self.start.link_s(2 * BLOCK) * link, self.start.cpu_token_s(1) * num_tokens * cpu
        times = LayerTimes((2 * BLOCK, link_s), self.start.signal_s + cpu_s if num_tokens else None)
        self.split.step_ended(StepPlan(tuple(steps), moves), times)
        return num_tokens / 20 / BLOCK

    def balanced_share(self, link: float, cpu: float) -> float:
        costs_s = [self.start.cpu_token_s(1) * cpu] * 20
        return self.start.slowed(link, cpu).num_cpu_tokens(costs_s, BLOCK) / 20 / BLOCK


def test_split_follows_a_load_and_its_end_without_jumps() -> None:
    for link, cpu in [(1.0, 2.0), (1.0, 5.0), (1.5, 1.0), (1.3, 4.0), (1.0, 0.7)]:
        machine = Machine(replace(SPLIT, signal_s=5e-5))
        quiet = machine.run(20)
        under_load, afterwards = machine.run(60, link=link, cpu=cpu), machine.run(80)
        assert set(quiet) == {quiet[0]}
        for shares, balanced in ((under_load, machine.balanced_share(link, cpu)), (afterwards, quiet[0])):
            assert shares[-1] == pytest.approx(balanced, rel=0.04), (link, cpu)
            changes = [b - a for a, b in pairwise(shares) if a != b]
            assert len({change > 0 for change in changes}) == 1, "the split goes back and forth"
            assert max(map(abs, changes)) < 0.05


def test_noise_hardly_moves_the_split() -> None:
    shares = Machine().run(2000, noise=0.1)
    assert all(share == pytest.approx(shares[0], rel=0.06) for share in shares)
    assert np.mean(shares) == pytest.approx(shares[0], rel=0.02)
    assert len(set(Machine().run(1000, noise=0.03))) == 1


def test_cpu_that_was_given_up_is_tried_again() -> None:
    machine = Machine()
    machine.run(200, cpu=1000.0)
    assert machine.run(1, cpu=1000.0)[0] < 0.05  # too little work to be timed
    assert machine.run(2000)[-1] > 0.5


def test_slowest_rank_counts_although_rank_0_is_timed() -> None:
    """Rank 0 is a quarter faster than the slowest rank, and the split has the slowest rank's rates."""
    machine = Machine(replace(SPLIT, rank_0_lead=(1.25, 1.25)))
    assert len(set(machine.run(100, link=1 / 1.25, cpu=1 / 1.25))) == 1
