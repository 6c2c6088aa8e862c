"""The KV cache managers, their pool, index and ring, call by call. Random workloads: test_properties.py."""

from unittest import mock

import numpy as np
import pytest
import xxhash
from content_model import Simulation
from random_workloads import GRAIN, small_grain

from nanovllm.engine.batch import SlotOffload
from nanovllm.engine.sequence import Sequence
from nanovllm.kvcache.base import KVCacheManager
from nanovllm.kvcache.block_manager import BlockManager
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.kvcache.prefix_index import Block, BlockPool, PrefixIndex, PrefixMatch
from nanovllm.kvcache.slot_ring import HybridBlock, SlotRing
from nanovllm.sampling_params import SamplingParams


def make_sequence(token_ids: list[int], max_tokens: int = 4, seq_id: int = 0, hash_salt: int = 0) -> Sequence:
    return Sequence(seq_id, token_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0, hash_salt)


def tokens(count: int, start: int = 0) -> list[int]:
    """`count` token ids that repeat in no block of the sizes used here."""
    return [start + i * i % 1009 for i in range(count)]


# -- BlockPool and PrefixIndex ---------------------------------------------------------------------------------------


def filled_pool(seq: Sequence, num_blocks: int = 8, block_size: int = 4, grain: int = 2) -> BlockPool:
    """A pool in which `seq` holds blocks for all its tokens."""
    pool = BlockPool([Block(i) for i in range(num_blocks)], block_size, grain, enable_prefix_caching=True)
    hold_all(pool, seq, block_size)
    return pool


def hold_all(pool: BlockPool, seq: Sequence, block_size: int = 4) -> None:
    seq.block_table += [pool.take().block_id for _ in range(-(-len(seq.token_ids) // block_size))]
    pool.register(seq, len(seq.token_ids))


def release_all(pool: BlockPool, seq: Sequence) -> None:
    for block_id in reversed(seq.block_table):
        pool.release(pool.blocks[block_id])


def test_hash_is_xxh64_of_the_parents_hash_and_the_token_ids() -> None:
    seq = make_sequence([7, 8, 9, 10, 11])
    pool = filled_pool(seq)
    first = xxhash.xxh64_intdigest((0).to_bytes(8, "little") + np.array([7, 8], dtype=np.int64).tobytes())
    second = xxhash.xxh64_intdigest(first.to_bytes(8, "little") + np.array([9, 10], dtype=np.int64).tobytes())
    block = pool.blocks[seq.block_table[0]]
    assert (block.indexed_hashes, block.hash) == ([first, second], second)
    assert block.token_ids.tolist() == [7, 8, 9, 10]
    assert pool.blocks[seq.block_table[1]].indexed_hashes == []  # one token is no grain


def test_match_finds_whole_blocks_then_a_part_of_one() -> None:
    seq = make_sequence(tokens(15))
    pool = filled_pool(seq)
    a, b, c, _ = seq.block_table
    assert pool.match(make_sequence(tokens(15))) == PrefixMatch((a, b, c), seq.block_table[3], 2)
    assert pool.match(make_sequence([*tokens(11), 5000])) == PrefixMatch((a, b), c, 2)
    assert pool.match(make_sequence([*tokens(9), 5000, 5000])) == PrefixMatch((a, b))
    assert pool.match(make_sequence([5000, *tokens(14)])) == PrefixMatch()


@pytest.mark.parametrize(("num_tokens", "num_matched"), [(2, 0), (3, 2), (4, 2), (5, 4), (8, 6), (9, 8)])
def test_match_leaves_a_token_to_compute(num_tokens: int, num_matched: int) -> None:
    pool = filled_pool(make_sequence(tokens(12)))
    match = pool.match(make_sequence(tokens(num_tokens)))
    assert 4 * len(match.full_blocks) + match.num_partial_tokens == num_matched


def test_match_same_tokens_after_another_beginning_are_a_miss() -> None:
    pool = filled_pool(make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert pool.match(make_sequence([0, 0, 0, 0, 5, 6, 7, 8, 9])) == PrefixMatch()


def test_match_equal_hashes_of_different_tokens_are_a_miss() -> None:
    with mock.patch("nanovllm.kvcache.prefix_index.xxhash.xxh64_intdigest", lambda _: 42):
        pool = filled_pool(make_sequence([1, 2, 3]))
        assert pool.match(make_sequence([1, 2, 3])) != PrefixMatch()
        assert pool.match(make_sequence([1, 7, 3])) == PrefixMatch()


def test_match_another_salt_is_a_miss() -> None:
    pool = filled_pool(make_sequence(tokens(9), hash_salt=9))
    assert pool.match(make_sequence(tokens(9))) == PrefixMatch()
    assert pool.match(make_sequence(tokens(9), hash_salt=9)) != PrefixMatch()


def test_match_ends_at_a_block_that_was_handed_out_again() -> None:
    seq = make_sequence(tokens(13))
    pool = filled_pool(seq, num_blocks=4)
    release_all(pool, seq)
    middle = seq.block_table[1]
    pool.free_ids = {middle: None} | pool.free_ids
    assert pool.take().block_id == middle
    assert pool.match(make_sequence(tokens(13))) == PrefixMatch(tuple(seq.block_table[:1]))


def test_take_hands_out_the_least_recently_used_block_and_the_tail_of_a_prompt_before_its_head() -> None:
    first, second = make_sequence(tokens(8)), make_sequence(tokens(12, start=2000), seq_id=1)
    pool = filled_pool(first, num_blocks=6)
    hold_all(pool, second)
    release_all(pool, second)
    release_all(pool, first)
    unused = [5]
    expected = unused + second.block_table[::-1] + first.block_table[::-1]
    assert [pool.take().block_id for _ in range(6)] == expected


def test_released_block_is_found_until_it_is_handed_out_again() -> None:
    seq = make_sequence(tokens(5))
    pool = filled_pool(seq, num_blocks=2)
    release_all(pool, seq)
    assert pool.match(seq).full_blocks == (0,)
    assert pool.take().block_id == 1
    assert pool.match(seq).full_blocks == (0,)
    assert pool.take().block_id == 0
    assert pool.match(seq) == PrefixMatch()
    assert len(pool.index) == 0


def test_retain_counts_and_only_the_last_release_frees() -> None:
    pool = BlockPool([Block(0)], 4, 4, enable_prefix_caching=True)
    block = pool.take()
    pool.retain(block)
    pool.release(block)
    assert (block.ref_count, pool.num_free) == (1, 0)
    pool.release(block)
    assert (block.ref_count, pool.num_free) == (0, 1)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_take_without_a_free_block_is_refused() -> None:
    pool = BlockPool([Block(0)], 4, 4, enable_prefix_caching=True)
    pool.take()
    with pytest.raises(AssertionError, match="no free block"):
        pool.take()


def test_index_block_size_no_multiple_of_the_grain_is_refused() -> None:
    with pytest.raises(AssertionError, match="no multiple"):
        PrefixIndex(block_size=6, grain=4)


def test_prefix_caching_off_registers_and_matches_nothing() -> None:
    pool = BlockPool([Block(i) for i in range(4)], 4, 2, enable_prefix_caching=False)
    hold_all(pool, make_sequence(tokens(9)))
    assert len(pool.index) == 0
    assert pool.match(make_sequence(tokens(9))) == PrefixMatch()


@pytest.mark.parametrize("fault", ["lost", "shared", "twice", "count", "index"])
def test_pool_check_integrity_notices(fault: str) -> None:
    seq = make_sequence(tokens(9))
    pool = filled_pool(seq)
    pool.check_integrity([seq])
    if fault == "lost":
        seq.block_table.pop()
    elif fault == "shared":
        pool.free_ids[seq.block_table[0]] = None
    elif fault == "twice":
        seq.block_table[1] = seq.block_table[0]
    elif fault == "count":
        pool.blocks[seq.block_table[0]].ref_count += 1
    else:
        pool.blocks[seq.block_table[0]].indexed_hashes.pop()
    with pytest.raises(AssertionError):
        pool.check_integrity([seq])


# -- both managers ---------------------------------------------------------------------------------------------------


def manager(kind: str, block_size: int = 256) -> KVCacheManager:
    if kind == "all GPU":
        return BlockManager(num_blocks=16, block_size=block_size)
    return HybridKVCacheManager(num_cpu_blocks=16, num_gpu_blocks=4, block_size=block_size, group_blocks=2)


@pytest.mark.parametrize("chunked_prefill", [True, False])
@pytest.mark.parametrize(("kind", "block_size"), [("all GPU", 256), ("hybrid", 256), ("hybrid", 4096)])
def test_two_equal_308_token_prompts_added_together_share_256_tokens(
    kind: str, block_size: int, chunked_prefill: bool
) -> None:
    simulation = Simulation(manager(kind, block_size), max_num_batched_tokens=16384, chunked_prefill=chunked_prefill)
    first, second = simulation.add(tokens(308)), simulation.add(tokens(308))
    plan = simulation.step()
    assert plan is not None
    assert (first.num_hit_tokens, second.num_hit_tokens) == (0, 256)
    assert [step.num_tokens for step in plan.sequences] == [308, 52]
    simulation.run()


@pytest.mark.parametrize("kind", ["all GPU", "hybrid"])
def test_shared_blocks_are_counted_and_outlive_the_first_owner(kind: str) -> None:
    kv = manager(kind)
    simulation = Simulation(kv, max_num_batched_tokens=2000)
    first, second = simulation.add(tokens(600)), simulation.add(tokens(600), max_tokens=9)
    simulation.step()
    assert first.block_table[:2] == second.block_table[:2] and first.block_table[2] != second.block_table[2]
    blocks = kv.pool.blocks  # type: ignore[attr-defined]
    assert [blocks[i].ref_count for i in second.block_table] == [2, 2, 1]
    shared = list(second.block_table)
    simulation.abort(first)
    assert [blocks[i].ref_count for i in shared] == [1, 1, 1]
    simulation.run()


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(256, 0), (257, 256), (512, 256), (513, 512)])
@pytest.mark.parametrize("kind", ["all GPU", "hybrid"])
def test_whole_prompt_cached_computes_at_least_its_last_token(kind: str, num_tokens: int, num_hit: int) -> None:
    simulation = Simulation(manager(kind), max_num_batched_tokens=2000)
    simulation.add(tokens(num_tokens))
    simulation.run()
    again = simulation.add(tokens(num_tokens))
    simulation.run()
    assert again.num_hit_tokens == num_hit


@pytest.mark.parametrize("kind", ["all GPU", "hybrid"])
def test_generated_tokens_are_found_by_the_next_turn(kind: str) -> None:
    simulation = Simulation(manager(kind), max_num_batched_tokens=2000)
    first = simulation.add(tokens(500), max_tokens=20)
    simulation.run()
    second = simulation.add([*first.token_ids, 3, 2, 1])
    simulation.run()
    assert second.num_hit_tokens == 512


@pytest.mark.parametrize(
    ("kv", "max_tokens", "message"),
    [
        (BlockManager(3, 256), 270, r"prompt of 500 tokens \+ max_tokens=270 needs 4 KV blocks .* the cache has 3; "),
        (HybridKVCacheManager(3, 2, 256, 1), 270, r"prompt of 500 tokens .*needs 4 CPU blocks .* the pool has 3; "),
    ],
)
def test_request_that_can_never_fit_is_refused_with_the_reason(
    kv: KVCacheManager, max_tokens: int, message: str
) -> None:
    simulation = Simulation(kv, max_num_batched_tokens=2000)
    with pytest.raises(ValueError, match=message):
        simulation.add(tokens(500), max_tokens)
    simulation.add(tokens(500), max_tokens - 1)  # 769 - 1 tokens need K/V: the last one is never an input
    simulation.run()


# -- HybridKVCacheManager, blocks of 4 tokens and grains of 2 --------------------------------------------------------


def hybrid(
    num_cpu_blocks: int, num_gpu_blocks: int, block_size: int = 2 * GRAIN, **options: bool
) -> HybridKVCacheManager:
    with small_grain():
        return HybridKVCacheManager(num_cpu_blocks, num_gpu_blocks, block_size, group_blocks=2, **options)


def num_streamed(simulation: Simulation) -> int:
    return sum(len(group.cpu_block_ids) for group in simulation.plans[-1].moves.streamed)


@pytest.mark.parametrize("num_slots", [2, 3, 5, 8, 9])
def test_steady_decode_of_one_sequence_streams_full_blocks_less_the_other_slots(num_slots: int) -> None:
    simulation = Simulation(hybrid(20, num_slots, block_size=16), max_num_batched_tokens=200)
    simulation.add(tokens(7 * 16 + 3), max_tokens=12)  # 7 full blocks, decoding in the eighth
    missed = []
    while simulation.scheduler.has_unfinished:
        plan = simulation.step()
        assert plan is not None
        if plan.is_decode:
            missed.append(num_streamed(simulation))
    fewest = max(0, 7 - (num_slots - 1))
    assert missed[1:] == [fewest] * 10  # the first one may load what stays
    assert simulation.kv.stats()["num_gpu_blocks"] == num_slots
    simulation.check_done()


@pytest.mark.parametrize("num_slots", [3, 4, 6, 10, 13])
def test_steady_decode_of_several_streams_all_full_blocks_less_the_other_slots(num_slots: int) -> None:
    simulation = Simulation(hybrid(40, num_slots, block_size=16), max_num_batched_tokens=64)
    for i, num_full in enumerate((2, 3, 5)):
        simulation.add(tokens(num_full * 16 + 2, start=3000 * i), max_tokens=14)
    missed = []
    while simulation.scheduler.has_unfinished:
        plan = simulation.step()
        if plan is not None and plan.is_decode and len(plan.sequences) == 3:
            missed.append(num_streamed(simulation))
    assert len(missed) > 4
    assert set(missed[1:]) == {max(0, 2 + 3 + 5 - (num_slots - 3))}
    simulation.check_done()


def test_hits_and_misses_are_counted() -> None:
    simulation = Simulation(hybrid(20, 3, block_size=16), max_num_batched_tokens=200)
    simulation.add(tokens(4 * 16 + 3), max_tokens=5)
    simulation.run()
    stats = simulation.kv.stats()
    decodes = 4
    assert stats["num_missed_blocks"] >= 2 * decodes and stats["num_hit_blocks"] >= decodes
    steady = [plan for plan in simulation.plans if plan.is_decode][1:]
    assert all(len(plan.sequences[0].block_table) == 3 for plan in steady)  # two full blocks where they are


def test_prefill_writes_cycle_through_the_ring() -> None:
    simulation = Simulation(hybrid(20, 5), max_num_batched_tokens=8)
    simulation.add(tokens(6 * 4))
    slots = []
    for _ in range(3):
        plan = simulation.step()
        assert plan is not None
        slots += plan.sequences[0].block_table[-2:]
    assert slots == [0, 1, 2, 3, 4, 0]


def test_full_block_is_copied_out_in_the_step_that_fills_it_and_a_partial_one_is_not() -> None:
    kv = hybrid(20, 4)
    simulation = Simulation(kv, max_num_batched_tokens=200)
    seq = simulation.add(tokens(6), max_tokens=4)
    plan = simulation.step()
    assert plan is not None
    first, second = (kv.blocks[i] for i in seq.block_table)
    assert plan.moves.offloads == (SlotOffload(first.ring_slot, first.block_id, 0, 4),)
    assert (second.num_tokens, second.num_offloaded_tokens) == (2, 0)
    assert second.is_dirty and second.being_written and not first.is_dirty and not first.being_written
    simulation.step()
    assert simulation.plans[-1].moves.offloads == ()
    simulation.step()
    assert simulation.plans[-1].moves.offloads == (SlotOffload(second.ring_slot, second.block_id, 0, 4),)


def test_cpu_blocks_of_a_sequence_all_and_prefilled() -> None:
    kv = hybrid(20, 4)
    simulation = Simulation(kv, max_num_batched_tokens=6)
    seq = simulation.add(tokens(11))
    simulation.step()
    assert kv.get_all_cpu_blocks(seq) == seq.block_table and len(seq.block_table) == 2
    assert kv.get_prefilled_cpu_blocks(seq) == seq.block_table[:1]
    simulation.step()
    assert len(kv.get_all_cpu_blocks(seq)) == 3
    assert kv.get_prefilled_cpu_blocks(seq) == seq.block_table[:2]


def test_partial_hit_on_the_gpu_is_copied_to_the_own_write_slot() -> None:
    kv = hybrid(20, 4, block_size=8)
    simulation = Simulation(kv, max_num_batched_tokens=200)
    first = simulation.add(tokens(15), max_tokens=5)
    simulation.step()
    second = simulation.add([*tokens(13), 500])
    simulation.step()
    ((source, target, num_tokens),) = simulation.plans[-1].moves.copies
    assert second.num_hit_tokens == 12 and num_tokens == 4
    assert source == kv.blocks[first.block_table[1]].ring_slot
    assert target == kv.blocks[second.block_table[1]].ring_slot
    assert second.block_table[0] == first.block_table[0]
    simulation.run()


def test_partial_hit_not_on_the_gpu_is_loaded_to_the_own_write_slot() -> None:
    kv = hybrid(20, 2, block_size=8)
    simulation = Simulation(kv, max_num_batched_tokens=200)
    first = simulation.add(tokens(15))
    simulation.step()
    source = first.block_table[1]
    simulation.run()
    simulation.add(tokens(30, start=4000))  # takes both slots
    simulation.run()
    second = simulation.add([*tokens(13), 500])
    plan = simulation.step()
    assert plan is not None
    assert second.num_hit_tokens == 12
    assert (source, kv.blocks[second.block_table[1]].ring_slot, 4) in plan.moves.loads
    simulation.run()


def test_partial_hit_on_the_only_spare_block_is_not_used() -> None:
    """The sequence needs the very block that holds the match."""
    simulation = Simulation(hybrid(2, 2, block_size=8), max_num_batched_tokens=200)
    simulation.add(tokens(15), max_tokens=1)
    simulation.run()
    second = simulation.add([*tokens(13), 500], max_tokens=2)
    simulation.run()
    assert second.num_hit_tokens == 8


def test_cpu_blocks_are_reserved_to_the_last_token_at_admission() -> None:
    """The second one waits, although there are free blocks: the first one will need them."""
    kv = hybrid(5, 4)
    simulation = Simulation(kv, max_num_batched_tokens=200)
    first, second = simulation.add(tokens(4), max_tokens=13), simulation.add(tokens(4, start=100), max_tokens=5)
    simulation.step()
    assert simulation.scheduler.running == [first] and simulation.scheduler.waiting[0] is second
    assert (kv.num_reserved_blocks, kv.pool.num_free) == (3, 4)
    simulation.run()
    assert simulation.scheduler.num_preemptions == 0


def test_preempted_partial_block_is_copied_out_once_its_slot_is_needed_and_loaded_when_it_resumes() -> None:
    kv = hybrid(20, 2)
    simulation = Simulation(kv, max_num_batched_tokens=10)
    first, second = simulation.add(tokens(4), max_tokens=9), simulation.add(tokens(2, start=50), max_tokens=9)
    simulation.step()
    simulation.preempt_next()
    plan = simulation.step()  # the first one's second block takes the slot
    assert plan is not None and [step.seq_id for step in plan.sequences] == [first.seq_id]
    (block_id,) = second.block_table
    assert [flush[1:] for flush in plan.moves.flushes] == [(block_id, 0, 2)]
    assert (second.num_cached_tokens, second.block_table) == (2, [block_id])
    plan = simulation.step()
    assert plan is not None and [load[::2] for load in plan.moves.loads] == [(block_id, 2)]
    assert [step.num_tokens for step in plan.sequences] == [1, 1]  # nothing is computed again
    simulation.run()


def test_preempted_with_its_slot_untouched_resumes_without_a_move() -> None:
    simulation = Simulation(hybrid(20, 4), max_num_batched_tokens=10)
    simulation.add(tokens(2), max_tokens=9)
    simulation.add(tokens(2, start=50), max_tokens=9)
    simulation.step()
    simulation.preempt_next()
    simulation.step()
    plan = simulation.step()
    assert plan is not None and len(plan.sequences) == 2
    assert not (plan.moves.flushes or plan.moves.loads or plan.moves.taken_slots)
    simulation.run()


@pytest.mark.parametrize("fault", ["reservation", "slot", "block", "counts", "dirty", "writing"])
def test_hybrid_check_integrity_notices(fault: str) -> None:
    kv = hybrid(20, 3)
    simulation = Simulation(kv, max_num_batched_tokens=20)
    seq = simulation.add(tokens(18), max_tokens=5)
    simulation.step()
    simulation.step()
    simulation.check_integrity()
    block = kv.blocks[seq.block_table[-1]]
    elsewhere = next(b for b in kv.blocks if b.ring_slot < 0)
    if fault == "reservation":
        kv.num_reserved_blocks += 1
    elif fault == "slot":
        kv.ring.blocks[block.ring_slot] = elsewhere
    elif fault == "block":
        elsewhere.ring_slot = block.ring_slot
    elif fault == "counts":
        block.num_offloaded_tokens = block.num_tokens + 1
    elif fault == "dirty":
        elsewhere.num_tokens += 1
    else:
        elsewhere.being_written = True
    with pytest.raises(AssertionError):
        kv.check_integrity(simulation.sequences)


# -- SlotRing --------------------------------------------------------------------------------------------------------


def test_ring_gives_slots_in_turn_and_knows_what_they_hold() -> None:
    ring, blocks = SlotRing(3), [HybridBlock(i) for i in range(4)]
    for block in blocks[:3]:
        slot = ring.find(lambda held: held is None)
        assert slot == block.block_id
        ring.put(slot, block)
    assert ring.find(lambda held: held is None) is None
    ring.clear(blocks[1])
    assert (blocks[1].ring_slot, ring.blocks[1]) == (-1, None)
    ring.put(1, blocks[3])
    assert ring.find(lambda held: held is not blocks[2]) == 0  # the search goes on behind the newest
    ring.clear(blocks[1])  # holds no slot: nothing to do
    assert [held and held.block_id for held in ring.blocks] == [0, 3, 2]
    with pytest.raises(AssertionError, match="slot 0 is taken"):
        ring.put(0, blocks[1])


def test_block_in_a_slot_must_not_be_forgotten() -> None:
    ring, block = SlotRing(2), HybridBlock(0, num_tokens=3, num_offloaded_tokens=1)
    ring.put(1, block)
    with pytest.raises(AssertionError, match="forgotten while slot 1 holds it"):
        block.forget()
    ring.clear(block)
    block.forget()
    assert (block.num_tokens, block.num_offloaded_tokens) == (0, 0)
