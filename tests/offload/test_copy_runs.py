"""Moves of blocks as few runs of tokens."""

import random

import pytest

from nanovllm.offload.offload_engine import Run, join_runs, load_runs, offload_runs, staging_runs
from nanovllm.plan.step_plan import SlotLoad, SlotOffload, StreamedGroup


def test_blocks_that_are_neighbours_on_both_sides_are_one_run() -> None:
    assert load_runs([SlotLoad(5, 1, 4), SlotLoad(4, 0, 4), SlotLoad(6, 2, 4)], 4) == (Run(16, 0, 12),)
    assert offload_runs([SlotOffload(1, 5, 0, 4), SlotOffload(2, 6, 0, 4)], 4) == (Run(20, 4, 8),)


@pytest.mark.parametrize(
    ("loads", "num_runs"),
    [
        ([], 0),
        ([SlotLoad(4, 0, 4), SlotLoad(6, 1, 4)], 2),  # neighbours on the GPU only
        ([SlotLoad(4, 0, 4), SlotLoad(5, 2, 4)], 2),  # in CPU memory only
        ([SlotLoad(4, 1, 4), SlotLoad(5, 0, 4)], 2),  # in reverse order
        ([SlotLoad(4, 0, 3), SlotLoad(5, 1, 4)], 2),  # a gap behind a partial block
        ([SlotLoad(4, 0, 4), SlotLoad(5, 1, 2)], 1),  # a partial block behind a full one
        ([SlotLoad(4, 0, 2), SlotLoad(4, 1, 2)], 2),  # one block to two slots
    ],
)
def test_what_is_not_contiguous_on_both_sides_stays_apart(loads: list[SlotLoad], num_runs: int) -> None:
    assert len(load_runs(loads, 4)) == num_runs


def test_offload_run_begins_at_the_first_token_that_is_missing() -> None:
    """The first two of block 5's tokens were copied out before; with block 6 they make one run."""
    assert offload_runs([SlotOffload(1, 5, 2, 4), SlotOffload(2, 6, 0, 4)], 4) == (Run(22, 6, 6),)


def test_staging_run_is_of_blocks_that_follow_each_other_in_the_group() -> None:
    assert staging_runs(StreamedGroup((7, 8, 9, 2, 3), ()), 4) == (Run(8, 12, 8), Run(28, 0, 12))
    assert staging_runs(StreamedGroup((0, 0, 0), ()), 4) == (Run(0, 0, 4), Run(0, 4, 4), Run(0, 8, 4))
    assert staging_runs(StreamedGroup((7, 8, 9), (), num_cut_tokens=3), 4) == (Run(28, 0, 9),)  # the CPU has the rest


def test_random_moves_runs_hold_the_same_tokens_and_cannot_be_joined() -> None:
    rng = random.Random(0)
    for _ in range(300):
        num_blocks, block_size = rng.randint(1, 12), rng.randint(1, 4)
        cpu_blocks = rng.sample(range(16), num_blocks)
        slots = sorted(rng.sample(range(16), num_blocks)) if rng.random() < 0.5 else cpu_blocks
        moves = [
            Run(block * block_size, slot * block_size, rng.choice([block_size, rng.randint(1, block_size)]))
            for block, slot in zip(cpu_blocks, slots, strict=True)
        ]
        runs = join_runs(moves)
        cells = [{(run.cpu_start + i, run.gpu_start + i) for run in some for i in range(run.num_tokens)}
                 for some in (moves, runs)]  # fmt: skip
        assert cells[0] == cells[1] and len(cells[1]) == sum(run.num_tokens for run in runs)
        ends = {(run.cpu_start + run.num_tokens, run.gpu_start + run.num_tokens) for run in runs}
        assert ends.isdisjoint((run.cpu_start, run.gpu_start) for run in runs)
