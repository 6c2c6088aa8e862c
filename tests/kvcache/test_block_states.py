"""The states that `block_map` shows, in every situation that a block can be in."""

from collections import Counter

import pytest
from content_model import Simulation
from cpu_splits import ALL, FixedSplit, splitter

from nanovllm.kvcache.block_manager import BlockManager
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.plan.kv_spec import BlockState

FREE, CACHED, WAITING, RESIDENT, CPU_ATTENDED, STREAMED, WRITTEN = BlockState
BLOCK = 256


def hybrid(num_gpu_blocks: int = 3, num_cpu_tokens: int = 0) -> HybridKVCacheManager:
    split = FixedSplit(num_tokens=num_cpu_tokens) if num_cpu_tokens else None
    return HybridKVCacheManager(12, num_gpu_blocks, BLOCK, group_blocks=2, cpu_split=splitter(split))


def counts(kv: BlockManager | HybridKVCacheManager) -> dict[BlockState, int]:
    return {BlockState(state): count for state, count in Counter(kv.block_map()).items()}


# -- without offload -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_cache", [True, False])
def test_gpu_blocks_go_from_free_to_written_resident_and_cached(has_cache: bool) -> None:
    kv = BlockManager(num_blocks=8, block_size=BLOCK, enable_prefix_caching=has_cache)
    assert counts(kv) == {FREE: 8}
    simulation = Simulation(kv, max_num_batched_tokens=2000)
    simulation.add([5] * 600)
    simulation.step()
    assert counts(kv) == ({RESIDENT: 2, WRITTEN: 1, FREE: 5} if has_cache else {RESIDENT: 3, FREE: 5})
    simulation.run()
    assert counts(kv) == ({CACHED: 2, FREE: 6} if has_cache else {FREE: 8})


# -- with offload ----------------------------------------------------------------------------------------------------


def test_offloaded_blocks_that_the_step_fills_are_written() -> None:
    kv = hybrid()
    simulation = Simulation(kv, max_num_batched_tokens=2 * BLOCK)
    simulation.add([5] * 600)
    simulation.step()
    assert counts(kv) == {WRITTEN: 2, FREE: 10}
    simulation.step()
    assert counts(kv) == {RESIDENT: 2, WRITTEN: 1, FREE: 9}


@pytest.mark.parametrize(
    ("num_cpu_tokens", "read"),
    [
        (0, {STREAMED: 3}),
        (ALL, {CPU_ATTENDED: 3}),
        (BLOCK, {STREAMED: 2, CPU_ATTENDED: 1}),
        (BLOCK + 1, {STREAMED: 2, CPU_ATTENDED: 1}),  # a block cut in two counts as streamed
    ],
)
def test_missing_blocks_are_streamed_or_attended_by_the_cpu(num_cpu_tokens: int, read: dict[BlockState, int]) -> None:
    kv = hybrid(num_cpu_tokens=num_cpu_tokens)
    simulation = Simulation(kv, max_num_batched_tokens=2 * BLOCK)
    simulation.add([5] * (5 * BLOCK + 7), max_tokens=9)
    for _ in range(6):  # four chunks at the most, then a step that decodes
        simulation.step()
    assert counts(kv) == {RESIDENT: 2, WRITTEN: 1, FREE: 6} | read
    simulation.run()
    assert counts(kv) == {CACHED: 3, RESIDENT: 2, FREE: 7}  # the last block held no whole grain


def test_blocks_of_a_sequence_that_is_not_in_the_step_wait() -> None:
    kv = hybrid()
    simulation = Simulation(kv, max_num_batched_tokens=2 * BLOCK)
    simulation.add([5] * (3 * BLOCK + 7), max_tokens=40)
    second = simulation.add([6] * 700, max_tokens=40)
    while not second.block_table:
        simulation.step()
    while second.num_uncomputed_tokens > 1:
        simulation.step()
    simulation.scheduler.max_num_batched_tokens = 1  # the step has room for the first one only
    simulation.step()
    without_slot = [block_id for block_id in second.block_table if kv.blocks[block_id].ring_slot < 0]
    assert without_slot and {kv.block_map()[i] for i in without_slot} == {WAITING}
    simulation.scheduler.max_num_batched_tokens = 2
    simulation.preempt_next()
    simulation.step()
    assert second.block_table == [] and {kv.block_map()[i] for i in without_slot} == {CACHED}


def test_states_agree_with_the_counters_after_every_step() -> None:
    kv = hybrid()
    simulation = Simulation(kv, max_num_batched_tokens=300)
    for length in (700, 5 * BLOCK, 10, 900):
        simulation.add([length % 251] * length, max_tokens=20)
    while simulation.scheduler.has_unfinished:
        simulation.step()
        states = kv.block_map()
        free_ids = {*kv.pool.spare_ids, *kv.pool.cached_ids}
        assert len(states) == 12
        unwritten_ids = {block.block_id for block in kv.blocks if not block.num_tokens}
        assert {i for i, state in enumerate(states) if state == CACHED} <= free_ids
        assert {i for i, state in enumerate(states) if state == FREE} <= free_ids | unwritten_ids
        slotless = [state for state, block in zip(states, kv.blocks, strict=True) if block.ring_slot < 0]
        assert not {RESIDENT} & set(slotless)
