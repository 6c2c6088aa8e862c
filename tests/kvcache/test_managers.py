"""The KV cache managers and the slot ring, call by call. Random workloads: test_properties.py."""

from collections.abc import Callable
from typing import Any

import pytest
from content_model import Simulation, tokens
from integrity import check_kv, check_ring
from random_workloads import GRAIN, odd_drafter

from nanovllm.errors import RequestError
from nanovllm.kvcache.block_manager import BlockManager, KVCacheManager
from nanovllm.kvcache.hybrid_manager import History, HybridKVCacheManager
from nanovllm.kvcache.step_slots import HybridBlock, SlotRing
from nanovllm.plan.kv_spec import num_blocks_for, num_sequences_in
from nanovllm.plan.sequence import Sequence, SequenceStatus
from nanovllm.plan.step_plan import SlotOffload
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.planned_step import StepDrafts
from nanovllm.schedule.seams import Proposer

# -- both managers ---------------------------------------------------------------------------------------------------


def manager(kind: str, block_size: int = 256) -> KVCacheManager:
    if kind == "all GPU":
        return BlockManager(num_blocks=16, block_size=block_size)
    return HybridKVCacheManager(num_cpu_blocks=16, num_gpu_blocks=4, block_size=block_size, group_blocks=2)


@pytest.mark.parametrize("kind", ["all GPU", "hybrid"])
def test_pool_sized_for_some_sequences_runs_exactly_these_together(kind: str) -> None:
    """Regression: a pool for two sequences of max_model_len ran one, because its size left out what admission keeps
    free.
    """
    for num_sequences in (1, 2, 3, 7):
        for blocks_each in (1, 5, 16, 17, 33, 160):
            least = num_blocks_for(num_sequences, blocks_each)
            for num_blocks in (least - 1, least, least + 1, least + blocks_each):
                kv: KVCacheManager
                if kind == "all GPU":
                    kv = BlockManager(num_blocks, 4)
                else:
                    kv = HybridKVCacheManager(num_blocks, max(2, num_blocks), 4, group_blocks=2, grain=4)
                num_running = 0
                kv.begin_step([])
                while num_running < 12:
                    seq = Sequence(num_running, tokens(4 * blocks_each, 1000 * num_running), SamplingParams(), 0, 0)
                    if not kv.can_admit(seq):
                        break
                    kv.admit(seq)
                    num_running += 1
                assert num_running == min(12, num_sequences_in(num_blocks, blocks_each))
                assert (num_running >= num_sequences) == (num_blocks >= least)


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


@pytest.mark.parametrize("kind", ["all GPU", "hybrid"])
def test_grain_that_the_last_accepted_guess_completes_is_found_by_the_next_turn(kind: str) -> None:
    """No later step registers it: the last step of an answer accepts guesses and ends the sequence."""
    drafter = odd_drafter("right", seed=0)
    simulation = Simulation(manager(kind), max_num_batched_tokens=2000, make_drafter=drafter, max_guesses=7)
    first = simulation.add(tokens(508), max_tokens=5)
    simulation.run()
    assert [step.num_guesses for plan in simulation.plans for step in plan.sequences] == [0, 3]
    second = simulation.add([*first.token_ids, 3, 2, 1])  # only the last token of the answer was never computed
    simulation.run()
    assert second.num_hit_tokens == 512


@pytest.mark.parametrize(
    ("kv", "max_tokens", "message"),
    [
        (
            BlockManager(3, 256),
            270,
            r"prompt of 500 tokens \+ max_tokens=270 needs 4 KV blocks .* but the cache has 3; ",
        ),
        (HybridKVCacheManager(3, 2, 256, 1), 270, r"prompt of 500 tokens .*needs 4 CPU blocks .* but the pool has 3; "),
    ],
)
def test_request_that_can_never_fit_is_refused_with_the_reason(
    kv: KVCacheManager, max_tokens: int, message: str
) -> None:
    simulation = Simulation(kv, max_num_batched_tokens=2000)
    with pytest.raises(RequestError, match=message):
        simulation.add(tokens(500), max_tokens)
    simulation.add(tokens(500), max_tokens - 1)  # 769 - 1 tokens need K/V: the last one is never an input
    simulation.run()


# -- HybridKVCacheManager, blocks of 4 tokens and grains of 2 --------------------------------------------------------


def hybrid(
    num_cpu_blocks: int, num_gpu_blocks: int, block_size: int = 2 * GRAIN, **options: Any
) -> HybridKVCacheManager:
    return HybridKVCacheManager(num_cpu_blocks, num_gpu_blocks, block_size, group_blocks=2, grain=GRAIN, **options)


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


def test_chunks_take_neighbouring_blocks_and_slots() -> None:
    """So that a chunk is copied out as one run, or as two where the ring ends."""
    simulation = Simulation(hybrid(20, 5), max_num_batched_tokens=12)
    seq = simulation.add(tokens(6 * 4))
    slots = []
    for _ in range(2):
        plan = simulation.step()
        assert plan is not None
        slots.append(plan.sequences[0].block_table[-3:])
    assert seq.block_table == [0, 1, 2, 3, 4, 5]
    assert slots == [(0, 1, 2), (3, 4, 0)]
    simulation.run()


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
    assert kv.get_all_cpu_blocks(seq) == seq.block_table and len(seq.block_table) == 3
    assert kv.get_prefilled_cpu_blocks(seq) == seq.block_table[:1]
    simulation.step()
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


def test_open_ended_answers_share_a_pool_that_cannot_hold_them_all() -> None:
    """Regression: all blocks that a request could ever need were reserved when it was admitted, so that 2 of 12 chats
    without max_tokens ran at once in a pool of two contexts.
    """
    context = 40
    kv = hybrid(2 * context // 4, num_gpu_blocks=20, block_size=4, progress_tokens=8)
    simulation = Simulation(kv, max_num_seqs=16, max_num_batched_tokens=200)
    chats = [simulation.add(tokens(3, start=20 * n), max_tokens=context - 3) for n in range(12)]
    simulation.step()
    assert simulation.scheduler.running == chats
    first_preempted = None
    while simulation.scheduler.has_unfinished:
        simulation.step()
        if first_preempted is None and simulation.scheduler.num_preemptions:
            first_preempted = simulation.scheduler.waiting[-1]
    assert first_preempted is chats[-1]  # the newest gives way
    assert [seq.seq_id for seq in sorted(chats, key=lambda seq: seq.last_token_s or 0)][:2] == [0, 1]
    simulation.run()  # checks every token


def test_a_sequence_that_gave_way_starts_again_only_with_room_for_progress() -> None:
    """Each admission lasts for `progress_tokens` tokens or to the end of the answer."""
    kv = hybrid(14, num_gpu_blocks=20, block_size=4, progress_tokens=12)
    simulation = Simulation(kv, max_num_seqs=16, max_num_batched_tokens=200)
    chats = [simulation.add(tokens(3, start=20 * n), max_tokens=40) for n in range(6)]
    admitted_at: dict[int, int] = {}
    admit, preempt = kv.admit, kv.preempt

    def noted_admit(seq: Sequence) -> None:
        if seq.is_preempted:
            admitted_at[seq.seq_id] = seq.num_tokens
        admit(seq)

    def checked_preempt(seq: Sequence) -> None:
        assert seq is simulation.scheduler.sequences[max(s.seq_id for s in chats if s.status is SequenceStatus.RUNNING)]
        assert seq.num_tokens - admitted_at.get(seq.seq_id, -12) >= 12, f"sequence {seq.seq_id} gave way too soon"
        preempt(seq)

    kv.admit, kv.preempt = noted_admit, checked_preempt  # type: ignore[method-assign]
    simulation.run()
    assert len(admitted_at) >= 3 and simulation.scheduler.num_preemptions <= 20
    num_computed = sum(plan.num_tokens for plan in simulation.plans)
    assert num_computed < 1.5 * sum(seq.max_kv_tokens for seq in chats)


def test_a_preempted_sequence_continues_from_the_prefix_cache() -> None:
    """Only the tokens after its last whole grain are computed again, for as long as nobody takes its blocks."""
    kv = hybrid(20, 3)
    simulation = Simulation(kv, max_num_batched_tokens=10)
    first, second = simulation.add(tokens(4), max_tokens=9), simulation.add(tokens(3, start=50), max_tokens=9)
    simulation.step()
    simulation.preempt_next()
    plan = simulation.step()
    assert plan is not None and [step.seq_id for step in plan.sequences] == [first.seq_id]
    assert (second.num_computed_tokens, second.block_table) == (0, [])
    plan = simulation.step()
    assert plan is not None
    assert [(step.seq_id, step.position, step.num_tokens) for step in plan.sequences] == [(0, 5, 1), (1, GRAIN, 2)]
    assert second.num_hit_tokens == 0  # what users see is the first admission's
    simulation.run()


def put_into(kv: HybridKVCacheManager, slot: int, block: HybridBlock) -> None:
    kv.ring.blocks[slot] = block


# Each is given the manager, the newest block of a running sequence, and a block without a slot
FAULTS: dict[str, Callable[[HybridKVCacheManager, HybridBlock, HybridBlock], object]] = {
    "running": lambda kv, *_: kv._running.clear(),
    "slot": lambda kv, block, elsewhere: put_into(kv, block.ring_slot, elsewhere),
    "block": lambda kv, block, elsewhere: setattr(elsewhere, "ring_slot", block.ring_slot),
    "counts": lambda kv, block, _: setattr(block, "num_offloaded_tokens", block.num_tokens + 1),
    "dirty": lambda kv, _, elsewhere: setattr(elsewhere, "num_tokens", elsewhere.num_tokens + 1),
    "writing": lambda kv, _, elsewhere: setattr(elsewhere, "being_written", True),
    "state": lambda kv, block, _: kv.ring.read_slots.update({block.ring_slot: None}),
    "owners": lambda kv, block, _: setattr(block, "num_running", block.num_running + 1),
    "history": lambda kv, *_: kv.histories._known.update({0: History(kv.slots.residency, 1, (), ())}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_hybrid_check_integrity_notices(fault: str) -> None:
    kv = hybrid(20, 3)
    simulation = Simulation(kv, max_num_batched_tokens=20)
    seq = simulation.add(tokens(18), max_tokens=5)
    simulation.step()
    simulation.step()
    simulation.check_integrity()
    FAULTS[fault](kv, kv.blocks[seq.block_table[-1]], next(block for block in kv.blocks if block.ring_slot < 0))
    with pytest.raises(AssertionError):
        check_kv(kv, simulation.sequences)


# -- SlotRing --------------------------------------------------------------------------------------------------------


def test_ring_takes_free_slots_and_then_the_least_recently_used_ones_and_homes_among_these() -> None:
    """Regression: a block took the slot of its number from an idle block while other slots were free, or held blocks
    that had been idle for longer.
    """
    ring, blocks = SlotRing(6), [HybridBlock(i) for i in range(30)]
    assert ring.find_unread_slots(blocks[8:10]) == [2, 3]  # their homes
    for slot in (3, 1, 2):
        ring.assign_slot(slot, blocks[slot])
    assert ring.find_unread_slots([blocks[8]]) == [0]
    assert ring.find_unread_slots(blocks[8:11]) == [0, 5, 4]  # block 10 has its home
    assert ring.find_unread_slots(blocks[12:17]) == [0, 1, 5, 3, 4]  # without slot 2, which was used last
    assert ring.find_unread_slots(blocks[12:19]) == [0, 1, 2, 3, 4, 5]
    assert ring.find_unread_slots([blocks[0], blocks[6], blocks[12]]) == [0, 4, 5]  # one home for three
    assert ring.find_unread_slots([]) == []
    blocks[3].num_running = 1
    ring.update_state(blocks[3])
    assert ring.find_unread_slots(blocks[12:17]) == [0, 1, 2, 5, 4]
    check_ring(ring)


def test_ring_gives_up_what_is_free_then_idle_then_read_and_never_what_is_kept() -> None:
    ring, blocks = SlotRing(4), [HybridBlock(i) for i in range(5)]
    for slot, block in enumerate(blocks[:3]):
        ring.assign_slot(slot, block)
    blocks[0].num_running = blocks[1].num_running = 1
    blocks[1].being_written = True
    for block in blocks[:3]:
        ring.update_state(block)
    check_ring(ring)
    given = []
    while (slot := next(iter(ring.find_unread_slots(blocks[4:])), ring.find_read_slot(blocks[4]))) is not None:
        given.append(slot)
        held = ring.blocks[slot]
        if held is not None:
            ring.free_slot_of(held)
        taken = HybridBlock(slot, pinned_in_step=True)
        ring.assign_slot(slot, taken)
        check_ring(ring)
    assert given == [3, 2, 0] and ring.num_available == 0
    assert ring.find_unread_slots(blocks[4:]) == []
    ring.free_slot_of(blocks[4])  # holds no slot: nothing to do
    with pytest.raises(AssertionError, match="slot 0 is in use"):
        ring.assign_slot(0, blocks[4])


def test_block_in_a_slot_must_not_be_forgotten() -> None:
    ring, block = SlotRing(2), HybridBlock(0, num_tokens=3, num_offloaded_tokens=1)
    ring.assign_slot(1, block)
    with pytest.raises(AssertionError, match="forgotten while it is in slot 1"):
        block.forget()
    ring.free_slot_of(block)
    block.forget()
    assert (block.num_tokens, block.num_offloaded_tokens) == (0, 0)


# -- guesses -----------------------------------------------------------------------------------------------------------


def test_a_block_that_right_guesses_fill_is_copied_out_in_the_next_step() -> None:
    """Before that only the tokens that were certain are copied, when the block is evicted."""
    kv = HybridKVCacheManager(num_cpu_blocks=16, num_gpu_blocks=4, block_size=256, group_blocks=2)
    simulation = Simulation(kv, max_num_batched_tokens=2000, max_guesses=9, make_drafter=odd_drafter("right", seed=0))
    seq = simulation.add(tokens(250), max_tokens=30)
    simulation.step()
    plan = simulation.step()
    assert plan is not None and plan.sequences[0].num_guesses == 9
    assert not plan.moves.offloads, "the block was counted as full before its last tokens were verified"
    first = kv.blocks[seq.block_table[0]]
    assert (first.num_tokens, first.being_written) == (256, False) and len(seq.token_ids) == 250 + 1 + 10
    plan = simulation.step()
    assert plan is not None
    assert plan.moves.flushes == (SlotOffload(first.ring_slot, first.block_id, 0, 256),)
    assert first.num_offloaded_tokens == 256
    simulation.run()


def test_a_slot_that_got_only_wrong_guesses_is_free_again() -> None:
    kv = HybridKVCacheManager(num_cpu_blocks=16, num_gpu_blocks=4, block_size=256, group_blocks=2)
    simulation = Simulation(kv, max_num_batched_tokens=2000, max_guesses=9, make_drafter=odd_drafter("wrong", seed=0))
    seq = simulation.add(tokens(253), max_tokens=30)
    simulation.step()
    simulation.step()
    assert len(seq.block_table) == 2 and kv.blocks[seq.block_table[1]].num_tokens == 0
    assert len(kv.ring.free_slots) == 2
    simulation.scheduler._drafts = StepDrafts(Proposer(), max_tokens=2000, max_rows=10)
    simulation.step()
    assert len(kv.ring.free_slots) == 3
    simulation.run()


@pytest.mark.parametrize("keeps_first_blocks", [False, True])
def test_the_first_block_stays_on_the_gpu_with_the_newest(keeps_first_blocks: bool) -> None:
    kv = HybridKVCacheManager(
        num_cpu_blocks=16,
        num_gpu_blocks=4,
        block_size=16,
        group_blocks=2,
        keeps_first_blocks=keeps_first_blocks,
        grain=16,
    )
    simulation = Simulation(kv, max_num_batched_tokens=19)
    seq = simulation.add(tokens(9 * 16 + 5), max_tokens=50)
    simulation.step()
    while seq.num_computed_tokens < 11 * 16 + 5:
        simulation.step()
        resident = [i for i, block_id in enumerate(seq.block_table) if kv.blocks[block_id].ring_slot >= 0]
        assert not keeps_first_blocks or resident[0] == 0, f"blocks {resident} after {seq.num_computed_tokens} tokens"
    assert resident == ([0, 9, 10, 11] if keeps_first_blocks else [8, 9, 10, 11])
    simulation.run()


def test_a_first_block_that_was_lost_comes_back_when_the_sequence_decodes() -> None:
    """A chunk takes all slots."""
    kv = HybridKVCacheManager(
        num_cpu_blocks=16, num_gpu_blocks=3, block_size=256, group_blocks=2, keeps_first_blocks=True
    )
    simulation = Simulation(kv, max_num_batched_tokens=2000)
    seq = simulation.add(tokens(6 * 256 + 100), max_tokens=10)
    while seq.num_uncomputed_tokens > 1 or not seq.num_output_tokens:
        simulation.step()
    first = kv.blocks[seq.block_table[0]]
    assert first.ring_slot < 0
    plan = simulation.step()
    assert plan is not None and [load.cpu_block_id for load in plan.moves.loads] == [first.block_id]
    plan = simulation.step()
    assert plan is not None and not plan.moves.loads and first.ring_slot >= 0
    simulation.run()
