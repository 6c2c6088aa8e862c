"""What always holds for the scheduler and the KV cache managers between two steps, asserted from outside."""

import itertools
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from nanovllm.capabilities.recurrent.places import RecurrentStates
from nanovllm.kvcache.block_manager import KVCacheManager
from nanovllm.kvcache.block_pool import Block, BlockPool, PrefixIndex
from nanovllm.kvcache.hybrid_manager import Histories, HybridKVCacheManager
from nanovllm.kvcache.snapshots import Snapshots
from nanovllm.kvcache.step_slots import SlotRing
from nanovllm.plan.sequence import Sequence, SequenceStatus
from nanovllm.schedule.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Check the scheduler's queues and its KV cache manager."""
    num_known = scheduler.num_waiting + len(scheduler.running)
    assert len(scheduler.sequences) == num_known, "a sequence is neither waiting nor running"
    for seq in scheduler.running:
        assert seq.status is SequenceStatus.RUNNING, f"sequence {seq.seq_id} runs with status {seq.status}"
    for seq in scheduler.waiting:
        assert seq.status is SequenceStatus.WAITING, f"sequence {seq.seq_id} waits with status {seq.status}"
    check_kv(scheduler.kv, [*scheduler.sequences.values(), *scheduler.store.holders])


def check_kv(kv: KVCacheManager, sequences: Seq[Sequence]) -> None:
    """Check that every block has the right owners. `sequences` are all unfinished ones, and holders."""
    running = [seq for seq in sequences if seq.status is SequenceStatus.RUNNING]
    check_pool(kv.pool, sequences)
    for companion in kv.companions:
        if isinstance(companion, RecurrentStates):
            check_states(companion, running, kv.pool.index._newest)
    if not isinstance(kv, HybridKVCacheManager):
        return
    check_ring(kv.ring)
    owners = Counter(block_id for seq in running for block_id in seq.block_table)
    assert kv._running.keys() == {seq.seq_id for seq in running}, "other sequences run than the manager counts"
    check_histories(kv.histories, running)
    for block in kv.blocks:
        num_running = owners[block.block_id]
        assert block.num_running == num_running, (
            f"block {block.block_id} has {num_running} running owners, but counts {block.num_running}"
        )
        slot = block.ring_slot
        assert slot < 0 or kv.ring.blocks[slot] is block, f"slot {slot} does not hold block {block.block_id}"
        assert block.num_offloaded_tokens <= block.num_tokens, (
            f"block {block.block_id} has more tokens offloaded than it holds"
        )
        assert slot >= 0 or not block.is_dirty, f"block {block.block_id} lost tokens with its slot"
        assert not block.being_written or slot >= 0, f"block {block.block_id} is being written without a slot"


def check_histories(histories: Histories, running: Iterable[Sequence]) -> None:
    """Check that each cached history that is not out of date has the places of the sequence's full blocks."""
    for seq in running:
        history = histories._known.get(seq.seq_id)
        if history is None or history.residency != histories._slots.residency:
            continue  # out of date; find() would replace it
        blocks = [histories._blocks[block_id] for block_id in seq.block_table[: history.num_blocks]]
        ring_slots = tuple(sorted(block.ring_slot for block in blocks if block.ring_slot >= 0))
        missing = tuple(block for block in blocks if block.ring_slot < 0)
        expected = history.ring_slots, history.missing
        assert (ring_slots, missing) == expected, f"the history of sequence {seq.seq_id} is out of date"


def check_ring(ring: SlotRing) -> None:
    """Check that each slot and its block name each other, and that the slot is in the list of its state."""
    for ring_slot, held in enumerate(ring.blocks):
        assert held is None or held.ring_slot == ring_slot, (
            f"the block in slot {ring_slot} says it is in slot {held.ring_slot}"
        )
        expected = ring.free_slots if held is None else ring._state(held)
        for state in (ring.free_slots, ring.idle_slots, ring.read_slots, ring.kept_slots):
            assert (ring_slot in state) == (state is expected), f"slot {ring_slot} is in the wrong state"


def check_pool(pool: BlockPool, sequences: Iterable[Sequence]) -> None:
    """Check that each block is either free or owned, with the right count. `sequences` are all that own blocks."""
    counts = [0] * len(pool.blocks)
    for seq in sequences:
        assert len(set(seq.block_table)) == len(seq.block_table), f"sequence {seq.seq_id} owns a block twice"
        for block_id in seq.block_table:
            counts[block_id] += 1
    for block in pool.blocks:
        assert block.ref_count == counts[block.block_id], (
            f"block {block.block_id} has ref_count {block.ref_count}, but {counts[block.block_id]} sequences own it"
        )
        num_lists = (block.block_id in pool.spare_ids) + (block.block_id in pool.cached_ids)
        assert num_lists == (block.ref_count == 0), f"block {block.block_id} is in {num_lists} free lists"
    check_index(pool.index, pool.blocks)


def check_index(index: PrefixIndex, blocks: list[Block]) -> None:
    """Check that the index lists every grain of every block with all its holders, and nothing else.

    Also check that an id stands for one parent and one grain, and no other id for the same.
    """
    held: dict[int, set[int]] = {}
    ids: dict[int, set[int]] = {}
    meanings: dict[int, tuple[int, bytes]] = {}
    for block in blocks:
        num_tokens, num_hashes = len(block.token_ids), len(block.grain_hashes)
        assert num_tokens == num_hashes * index.grain, f"block {block.block_id}: {num_hashes} hashes, {num_tokens=}"
        for i, (grain_hash, (parent_id, prefix_id)) in enumerate(
            zip(block.grain_hashes, itertools.pairwise(block.prefix_ids), strict=True)
        ):
            token_ids = block.token_ids[i * index.grain : (i + 1) * index.grain].tobytes()
            assert meanings.setdefault(prefix_id, (parent_id, token_ids)) == (parent_id, token_ids), (
                f"prefix id {prefix_id} stands for two prefixes"
            )
            ids.setdefault(grain_hash, set()).add(prefix_id)
            held.setdefault(prefix_id, set()).add(block.block_id)
    assert len(set(meanings.values())) == len(meanings), "a prefix has two ids"
    assert {grain_hash: set(known) for grain_hash, known in index._prefix_ids.items()} == ids, (
        "the ids do not match the blocks"
    )
    known = {prefix_id: {block.block_id} for prefix_id, block in index._newest.items()}
    for prefix_id, older in index._older.items():
        assert older, f"prefix {prefix_id} has an empty list of older holders"
        holders = known.setdefault(prefix_id, set())
        assert holders.isdisjoint(older), f"a holder of prefix {prefix_id} is listed twice"
        holders.update(older)
    assert known == held, "the index does not match the blocks"
    last = index._last_search
    is_valid = last is not None and last.version == index._version and last.next_hash not in index._prefix_ids
    if last is not None and is_valid and last.num_tokens == len(last.seq.token_ids):
        assert index._search(last.seq) == last, f"sequence {last.seq.seq_id} would no longer match what is cached"


def check_states(states: RecurrentStates, running: Seq[Sequence], known_prefixes: Iterable[int]) -> None:
    """Check that exactly the running sequences hold slots of states, and that snapshots belong to known prefixes."""
    assert states._held.keys() == {seq.seq_id for seq in running}, "slots belong to others than those who run"
    slots = [*states._free, *states._borrowed, *(held.slot for held in states._held.values())]
    assert sorted(slots) == list(range(states.first_slot, states.num_slots)), "a state slot is lost or used twice"
    for seq in running:
        held = states._held[seq.seq_id]
        assert held.num_tokens <= seq.num_computed_tokens, f"sequence {seq.seq_id} has a state ahead of its tokens"
    check_snapshots(states.snapshots, known_prefixes)


def check_snapshots(snapshots: Snapshots, known_prefixes: Iterable[int]) -> None:
    """Check that no snapshot is lost, used twice, or of a prefix that the index has dropped."""
    used = [*snapshots._by_prefix.values(), *snapshots._held]
    assert sorted(used + snapshots._unused) == list(range(snapshots.count)), "a snapshot is lost or used twice"
    of_prefixes = {prefix_id for prefix_id in snapshots._by_prefix if prefix_id >= 0}
    assert of_prefixes <= set(known_prefixes), "a snapshot has outlived its prefix"
