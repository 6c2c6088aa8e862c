"""The steps that start-up measures memory with: no step that the options allow may be larger."""

from typing import Any

import pytest

from nanovllm.plan.step_plan import StepPlan
from nanovllm.runner.inputs import build_inputs
from nanovllm.runner.measure import HISTORY_TOKENS, NUM_GROUPS, largest_steps, short_steps

BLOCK = 256


def steps(**changes: Any) -> list[StepPlan]:
    options: dict[str, Any] = {"num_tokens": 16384, "max_num_seqs": 512, "max_model_len": 40960, "block_size": BLOCK}
    return largest_steps(**(options | {"group_blocks": 0} | changes))


def num_rows(plan: StepPlan) -> int:
    return sum(seq.sampling is not None for seq in plan.sequences)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8, 512])
@pytest.mark.parametrize("num_tokens", [1, 100, 4096, 16384])
@pytest.mark.parametrize("max_model_len", [2048, 40960, 131072])
def test_budget_and_rows_are_used_up(num_tokens: int, max_num_seqs: int, max_model_len: int) -> None:
    """Regression: with max_num_seqs=1 start-up ran 512 of 16,384 tokens, and by default 32 of 512 sampled rows."""
    plans = steps(num_tokens=num_tokens, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    assert max(plan.num_tokens for plan in plans) == min(num_tokens, max_num_seqs * max_model_len)
    assert max(map(num_rows, plans)) == min(max_num_seqs, num_tokens)
    longest = max(seq.num_tokens for plan in plans for seq in plan.sequences)
    assert longest == min(num_tokens, max_model_len)
    for plan in plans:
        assert plan.num_tokens <= num_tokens and len(plan.sequences) <= max_num_seqs
        for seq in plan.sequences:
            assert seq.position + seq.num_tokens == seq.num_paged_keys <= max_model_len


def test_every_row_is_edited_and_some_prompt_tokens_are_scored() -> None:
    """What requests may ask for takes memory and kernels too."""
    plans = steps()
    for plan in plans:
        assert all(seq.edits is not None and seq.num_logprobs == 20 for seq in plan.sequences)
    assert [plan.has_scores for plan in plans] == [False, False, True]


def test_chunk_has_history_and_every_row_filters() -> None:
    """Regression: 16,384 tokens of history and two groups are at most three parts, which need no running result."""
    for plan in steps(max_model_len=131072):
        chunk = plan.sequences[-1]
        assert chunk.position == HISTORY_TOKENS
        assert all(seq.sampling is not None and seq.sampling.top_k and seq.sampling.top_p < 1 for seq in plan.sequences)


@pytest.mark.parametrize("group_blocks", [0, 2])
def test_one_block_is_enough(group_blocks: int) -> None:
    for plan in steps(num_tokens=3000, max_num_seqs=7, group_blocks=group_blocks):
        inputs = build_inputs(plan, BLOCK, group_blocks)
        assert not inputs.block_tables.any() and inputs.slot_mapping.max() < BLOCK
        assert len(inputs.groups) == (NUM_GROUPS if group_blocks else 0)
        for (lens, _), group in zip(inputs.groups, plan.moves.streamed, strict=True):
            assert lens.tolist() == [group_blocks * BLOCK] * len(plan.sequences)
            assert set(group.cpu_block_ids) == {0}


@pytest.mark.parametrize("max_num_seqs", [1, 2, 512])
@pytest.mark.parametrize("max_model_len", [12, 40960])
@pytest.mark.parametrize("group_blocks", [0, 3])
def test_short_steps_stay_within_the_limits(max_num_seqs: int, max_model_len: int, group_blocks: int) -> None:
    mixed, *few = short_steps(
        max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=BLOCK, group_blocks=group_blocks
    )
    assert len(mixed.sequences) <= max_num_seqs
    assert [seq.num_tokens for seq in mixed.sequences] == [1, min(300, max_model_len)][-max_num_seqs:]
    lens = [n for n in (1, 2, 4, 8, 16) if n <= max_model_len]
    assert [plan.num_tokens for plan in few] == [*lens, *lens]
    with_history, without = few[: len(lens)], few[len(lens) :]
    assert all(bool(plan.moves.streamed) == (group_blocks > 0) for plan in with_history)
    assert not any(plan.moves.streamed or plan.sequences[0].position for plan in without)
    for plan in (mixed, *few):
        assert all(seq.num_paged_keys <= max_model_len for seq in plan.sequences)
        assert not build_inputs(plan, BLOCK, group_blocks).block_tables.any()
