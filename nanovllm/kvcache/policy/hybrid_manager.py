"""HybridKVCacheManager: all KV in CPU blocks, copies of some of them in GPU slots.

What always holds:
- A block's tokens are in CPU memory, or in its slot, or both (HybridBlock says how many are where). A full block is
  copied out in the step that fills it, so giving up its slot later is free; a partial one is copied out once, when
  its slot is needed for something else.
- Every running sequence keeps the slot of its newest, partial block. All other slots hold copies that any plan may
  give up; what a scheduled sequence then misses is streamed in that step.
- The missing set is the smallest there can be: a slot is never idle, nor kept for a block nobody reads, while a
  scheduled sequence misses a block.
- Planning a step takes time by what changes and by the number of placed sequences, not by that of slots or blocks.
- A running sequence's CPU blocks are reserved to its last token when it is admitted, so memory never runs out halfway
  and a preempted sequence keeps all it has computed.
"""

from collections import Counter
from collections.abc import Sequence as Seq

from nanovllm.config import BLOCK_SIZE_STEP
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.core.step_plan import KVMoves
from nanovllm.errors import RequestError
from nanovllm.kvcache.policy.base import KVCacheManager, PagedKeys
from nanovllm.kvcache.policy.block_pool import BlockPool
from nanovllm.kvcache.policy.histories import Histories, History
from nanovllm.kvcache.policy.prefix_index import PrefixMatch
from nanovllm.kvcache.policy.slot_ring import HybridBlock, SlotRing
from nanovllm.kvcache.policy.step_slots import StepSlots


class HybridKVCacheManager(KVCacheManager):
    def __init__(
        self,
        num_cpu_blocks: int,
        num_gpu_blocks: int,
        block_size: int,
        group_blocks: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.group_blocks = group_blocks  # streamed blocks attended in one call
        blocks = [HybridBlock(i) for i in range(num_cpu_blocks)]
        self.pool = BlockPool(list(blocks), block_size, BLOCK_SIZE_STEP, enable_prefix_caching)
        self.blocks = blocks
        self.ring = SlotRing(num_gpu_blocks)
        self.slots = StepSlots(self.ring, self.pool, block_size)
        self.histories = Histories(blocks, self.slots, block_size, group_blocks)
        self.num_reserved_blocks = 0
        self.num_hit_blocks = 0
        self.num_missed_blocks = 0
        self._num_running = 0
        self._owed_ids: set[int] = set()  # running sequences that hold no slot and will need one
        self._copy_sources: list[HybridBlock] = []
        self._partial: dict[int, tuple[HybridBlock, int]] = {}  # seq_id -> source of its first block's first tokens

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- which block is where ------------------------------------------------------------------------------------

    def get_all_cpu_blocks(self, seq: Sequence) -> list[int]:
        """CPU block ids of the sequence, in order of position."""
        return list(seq.block_table)

    def get_prefilled_cpu_blocks(self, seq: Sequence) -> list[int]:
        """CPU block ids of the sequence whose tokens are all computed."""
        return seq.block_table[: seq.num_cached_tokens // self.block_size]

    # -- admission -----------------------------------------------------------------------------------------------

    def check_fits(self, seq: Sequence) -> None:
        needed, have = self._num_blocks(seq.max_kv_tokens), len(self.blocks)
        if needed > have:
            raise RequestError(
                f"prompt of {seq.num_prompt_tokens} tokens + max_tokens={seq.params.max_tokens} needs {needed} CPU "
                f"blocks of {self.block_size} tokens, the pool has {have}; shorten it, or raise num_cpu_blocks or "
                "cpu_memory_gb"
            )

    def begin_step(self, running: Seq[Sequence]) -> None:
        self.slots.begin_step()
        self._owed_ids = {seq.seq_id for seq in running if seq.num_cached_tokens % self.block_size == 0}

    def _affordable_match(self, seq: Sequence) -> PrefixMatch | None:
        """The prefix to start from, or None when the pool has no room for the rest of the sequence."""
        match = self.pool.match(seq)
        idle_hits = sum(self.blocks[i].ref_count == 0 for i in match.full_blocks)
        needed = self._num_blocks(seq.max_kv_tokens) - len(match.full_blocks) + idle_hits
        spare = self.pool.num_free - self.num_reserved_blocks - needed
        if match.partial_block is not None and self.blocks[match.partial_block].ref_count == 0 and spare == 0:
            match = PrefixMatch(match.full_blocks)  # the source would be the very block the sequence needs
        return match if spare >= 0 else None

    def can_admit(self, seq: Sequence) -> bool:
        if self._num_spare_slots(seq) < 1:
            return False
        return bool(seq.block_table) or self._affordable_match(seq) is not None

    def admit(self, seq: Sequence) -> None:
        if not seq.block_table:  # else it was preempted, and kept its blocks
            self._admit_new(seq)
        self._num_running += 1
        for block_id in seq.block_table:
            self.slots.begin_running(self.blocks[block_id])

    def _admit_new(self, seq: Sequence) -> None:
        match = self._affordable_match(seq)
        assert match is not None, f"sequence {seq.seq_id} admitted without room"
        for block_id in match.full_blocks:
            self.pool.retain(self.blocks[block_id])
            seq.block_table.append(block_id)
        seq.num_registered_tokens = len(seq.block_table) * self.block_size
        seq.num_cached_tokens = seq.num_registered_tokens + match.num_partial_tokens
        seq.num_hit_tokens = seq.num_cached_tokens
        if match.partial_block is not None:
            source = self.blocks[match.partial_block]
            self.pool.retain(source)  # until the plan is made
            self._copy_sources.append(source)
            self._partial[seq.seq_id] = source, match.num_partial_tokens
        seq.num_reserved_blocks = self._num_blocks(seq.max_kv_tokens) - len(seq.block_table)
        self.num_reserved_blocks += seq.num_reserved_blocks

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        count = self._num_blocks(num_tokens) - len(seq.block_table)
        if count <= 0:
            return
        self.num_reserved_blocks -= count
        seq.num_reserved_blocks -= count
        for chosen in self.pool.choose(count):
            block = self.blocks[chosen.block_id]
            self.ring.clear(block)
            self.pool.take(block)
            self.slots.begin_running(block)
            seq.block_table.append(block.block_id)

    # -- slots ---------------------------------------------------------------------------------------------------

    def _num_spare_slots(self, seq: Sequence) -> int:
        """Slots `seq` may take: those to be had, less one for each other running sequence that needs one."""
        return self.ring.num_givable - len(self._owed_ids) + (seq.seq_id in self._owed_ids)

    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        """Tokens whose blocks have a slot or can get one."""
        room = self._num_spare_slots(seq)
        block_idx = seq.num_cached_tokens // self.block_size
        if block_idx < len(seq.block_table):
            held = self.blocks[seq.block_table[block_idx]]
            room += held.ring_slot >= 0 and held.keeps_slot
        return min(num_tokens, max(0, (block_idx + room) * self.block_size - seq.num_cached_tokens))

    def place(self, seq: Sequence, num_tokens: int) -> None:
        start, end = seq.num_cached_tokens, seq.num_cached_tokens + num_tokens
        self._grow(seq, end)
        self._owed_ids.discard(seq.seq_id)
        first, last = start // self.block_size, self._num_blocks(end)
        chunk = [self.blocks[block_id] for block_id in seq.block_table[first:last]]
        for block in chunk:  # those in place keep their slots before others look for one
            self.slots.keep(block)
        for block in chunk:
            if block.ring_slot < 0:
                self.slots.take(block)
        source, num_matched = self._partial.pop(seq.seq_id, (None, 0))
        if source is not None:  # the matched tokens of another sequence's block, into this one's first new block
            self.slots.copy(source, chunk[0], num_matched)
        for i, block in enumerate(chunk):
            self.slots.write(block, end - (first + i) * self.block_size)
        self.pool.register(seq, end)

    def preempt(self, seq: Sequence) -> None:
        self._owed_ids.discard(seq.seq_id)
        self._end_running(seq)

    def _end_running(self, seq: Sequence) -> None:
        self._stop_writing(seq)
        self._num_running -= 1
        self.histories.forget(seq)
        for block_id in reversed(seq.block_table):  # the slots of the tail are given up before those of the head
            self.slots.end_running(self.blocks[block_id])

    def _stop_writing(self, seq: Sequence) -> None:
        block_idx = seq.num_cached_tokens // self.block_size
        if block_idx < len(seq.block_table):
            self.slots.stop_writing(self.blocks[seq.block_table[block_idx]])

    def free(self, seq: Sequence) -> None:
        self.pool.register(seq, seq.num_cached_tokens)
        if seq.status is SequenceStatus.RUNNING:
            self._end_running(seq)
        for block_id in reversed(seq.block_table):
            self.pool.release(self.blocks[block_id])
        seq.block_table.clear()
        self.num_reserved_blocks -= seq.num_reserved_blocks
        seq.num_reserved_blocks = 0

    # -- the plan ------------------------------------------------------------------------------------------------

    def plan_step(self, placed: Seq[tuple[Sequence, int]]) -> tuple[list[PagedKeys], KVMoves]:
        histories = [self.histories.find(seq) for seq, _ in placed]
        missing = {block.block_id: block for history in histories for block in history.missing}
        self.num_hit_blocks += sum(len(history.ring_slots) for history in histories)
        self.num_missed_blocks += len(missing)
        if missing:
            in_order = [missing[block_id] for block_id in sorted(missing)]  # so that neighbours move together
            if self.slots.fill_unread(in_order, self._unread_slots(placed)):
                histories = [self.histories.find(seq) for seq, _ in placed]
        keys = [self._paged_keys(seq, history, n) for (seq, n), history in zip(placed, histories, strict=True)]
        moves = self.slots.moves(self.histories.groups(histories) if missing else ())
        for source in self._copy_sources:
            self.pool.release(source)
        self._copy_sources.clear()
        return keys, moves

    def _unread_slots(self, placed: Seq[tuple[Sequence, int]]) -> list[int]:
        """Slots with blocks of running sequences, none of which is scheduled."""
        if len(placed) == self._num_running:
            return []
        read = {block_id for seq, _ in placed for block_id in seq.block_table}
        held = ((ring_slot, self.ring.blocks[ring_slot]) for ring_slot in self.ring.read)
        return [ring_slot for ring_slot, block in held if block is not None and block.block_id not in read]

    def _paged_keys(self, seq: Sequence, history: History, num_tokens: int) -> PagedKeys:
        first, end = history.num_blocks, seq.num_cached_tokens + num_tokens
        context_len = len(history.ring_slots) * self.block_size + end - first * self.block_size
        chunk = [self.blocks[i].ring_slot for i in seq.block_table[first : self._num_blocks(end)]]
        return PagedKeys((*history.ring_slots, *chunk), context_len)

    def check_integrity(self, sequences: Seq[Sequence]) -> None:
        self.pool.check_integrity(list(sequences))
        assert self.num_reserved_blocks == sum(s.num_reserved_blocks for s in sequences), "reservations are miscounted"
        assert self.num_reserved_blocks <= self.pool.num_free, "more blocks reserved than free"
        self.ring.check_integrity()
        running = [seq for seq in sequences if seq.status is SequenceStatus.RUNNING]
        owners = Counter(block_id for seq in running for block_id in seq.block_table)
        assert self._num_running == len(running), f"{self._num_running} sequences counted, {len(running)} run"
        self.histories.check_integrity(running)
        for block in self.blocks:
            num_running = owners[block.block_id]
            assert block.num_running == num_running, f"block {block.block_id} is miscounted: {num_running} own it"
            slot = block.ring_slot
            assert slot < 0 or self.ring.blocks[slot] is block, f"block {block.block_id} believes in slot {slot}"
            assert block.num_offloaded_tokens <= block.num_tokens, f"block {block.block_id} counts are reversed"
            assert slot >= 0 or not block.is_dirty, f"block {block.block_id} lost tokens with its slot"
            assert not block.being_written or slot >= 0, f"block {block.block_id} is written without a slot"

    def stats(self) -> dict[str, int]:
        return {
            "num_cpu_blocks": len(self.blocks),
            "num_free_cpu_blocks": self.pool.num_free,
            "num_gpu_blocks": len(self.ring),
            "num_resident_blocks": sum(block is not None for block in self.ring.blocks),
            "num_hit_blocks": self.num_hit_blocks,
            "num_missed_blocks": self.num_missed_blocks,
        }
