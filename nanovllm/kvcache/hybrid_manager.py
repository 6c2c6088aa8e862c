"""HybridKVCacheManager: the KV cache with offload. All KV is in CPU blocks; some blocks have a copy in a GPU slot.

What always holds:
- A block's tokens are in CPU memory, or in its slot, or both (HybridBlock counts them). A full block is copied out in
  the step that fills it, so evicting it later costs nothing. A partial block is copied out only when it is evicted.
- Every running sequence keeps the slot of its newest, partial block. A step may evict any other block; blocks that a
  scheduled sequence then misses are streamed in the step, or the CPU attends to them.
- As few blocks as possible are missing: while a scheduled sequence misses a block, every slot that is not pinned holds
  a block that a scheduled sequence reads.
- The time to plan a step depends on what changes and on the number of placed sequences, but not on the number of slots
  or blocks.
- A running sequence owns CPU blocks for every token that it had when it was admitted, and takes more as its answer
  grows. When the pool is full, the newest sequence is preempted. Its blocks stay in the prefix cache until they are
  allocated again.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nanovllm.config import BLOCK_SIZE_STEP
from nanovllm.errors import RequestError
from nanovllm.kvcache.block_manager import KVCacheManager, PagedKeys
from nanovllm.kvcache.block_pool import LONG_CHUNK_BLOCKS, Block, BlockPool
from nanovllm.kvcache.missing_keys import MissingKeys, divide_missing
from nanovllm.kvcache.seams import STREAM_ALL, Companion, Companions, KeySplitter, StepSplit
from nanovllm.kvcache.step_slots import HybridBlock, SlotRing, StepSlots
from nanovllm.plan.kv_spec import BlockState, num_watermark_blocks
from nanovllm.plan.sequence import Sequence, SequenceStatus
from nanovllm.plan.step_limits import MAX_DECODE_QUERIES
from nanovllm.plan.step_plan import KVMoves
from nanovllm.utils.arithmetic import ceil_div


@dataclass(frozen=True, eq=False, slots=True)
class History:
    """Places of a sequence's full blocks. Never modified: when anything changes, a new History replaces it."""

    residency: int  # value of StepSlots.residency when this History was made
    num_blocks: int
    # Slots of the resident blocks, in ascending order, because prefill kernels read contiguous slots together
    ring_slots: tuple[int, ...]
    missing: tuple[HybridBlock, ...]  # the blocks without a slot


class Histories:
    """Places of the full blocks of each running sequence, and how a step attends to the missing blocks.

    Most steps neither fill a block nor move a full block, so places and plan are cached until something changes.
    """

    def __init__(
        self,
        blocks: list[HybridBlock],
        slots: StepSlots,
        block_size: int,
        group_blocks: int,
        split: KeySplitter,
    ) -> None:
        self._blocks, self._slots = blocks, slots
        self._block_size, self._group_blocks, self._split = block_size, group_blocks, split
        self._known: dict[int, History] = {}  # by seq_id
        # The last missing_keys call: arguments, split and result
        self._last_rows: tuple[list[History], list[int]] = [], []
        self._last_split: StepSplit = STREAM_ALL
        self._last_missing = MissingKeys()

    def find(self, seq: Sequence) -> History:
        """Find the blocks before the block with the sequence's first new token. All of these blocks are full."""
        known = self._known.get(seq.seq_id)
        num_blocks, residency = seq.num_computed_tokens // self._block_size, self._slots.residency
        if known is None or known.residency != residency:
            known = History(residency, 0, (), ())
        elif known.num_blocks == num_blocks:
            return known
        new = [self._blocks[block_id] for block_id in seq.block_table[known.num_blocks : num_blocks]]
        ring_slots = sorted([*known.ring_slots, *(block.ring_slot for block in new if block.ring_slot >= 0)])
        missing = tuple([block for block in new if block.ring_slot < 0])
        history = History(residency, num_blocks, tuple(ring_slots), known.missing + missing)
        self._known[seq.seq_id] = history
        return history

    def paged_keys(self, seq: Sequence, num_tokens: int, history: History) -> PagedKeys:
        """Return the keys of a placed sequence in slots: in `history`, and in the blocks of its new tokens."""
        first, end = history.num_blocks, seq.num_computed_tokens + num_tokens
        num_paged_keys = len(history.ring_slots) * self._block_size + end - first * self._block_size
        chunk = [self._blocks[i].ring_slot for i in seq.block_table[first : ceil_div(end, self._block_size)]]
        return PagedKeys((*history.ring_slots, *chunk), num_paged_keys)

    def forget(self, seq: Sequence) -> None:
        """Drop what is cached for a sequence that no longer runs."""
        self._known.pop(seq.seq_id, None)

    def missing_keys(self, rows: list[History], num_queries: list[int], *, streams_all: bool) -> MissingKeys:
        """Plan how a step attends to the missing blocks of these sequences. `num_queries`: new tokens of each.

        `streams_all`: the CPU does not attend in this step.
        """
        split = STREAM_ALL if streams_all else self._split.now
        if self._last_rows != (rows, num_queries) or self._last_split is not split:
            missing = [[block.block_id for block in history.missing] for history in rows]
            self._last_rows, self._last_split = (rows, num_queries), split
            self._last_missing = divide_missing(
                missing, num_queries, block_size=self._block_size, group_blocks=self._group_blocks, split=split
            )
        return self._last_missing


# A preempted sequence is admitted again once the pool has room for it and for every running sequence to grow by this
# many tokens. Otherwise the next block that one of them needs would preempt it right after it was recomputed.
PROGRESS_TOKENS = 1024


class HybridKVCacheManager(KVCacheManager):
    def __init__(
        self,
        num_cpu_blocks: int,
        num_gpu_blocks: int,
        block_size: int,
        group_blocks: int,
        enable_prefix_caching: bool = True,
        cpu_split: KeySplitter = STREAM_ALL,
        *,
        keeps_first_blocks: bool = False,
        companions: Seq[Companion] = (),
        model_drafts: bool = True,
        grain: int = BLOCK_SIZE_STEP,
        long_chunk_blocks: int = LONG_CHUNK_BLOCKS,
        progress_tokens: int = PROGRESS_TOKENS,
    ) -> None:
        """`cpu_split`: divides missing keys between the link and the CPU. `keeps_first_blocks`: evict the first block
        of a sequence last, and load it again for decoding, because drafts over the keys on the GPU need it: much
        attention goes to a text's first tokens. `model_drafts`: see KVCacheManager. `grain`: the unit, in tokens, of
        prefix hits; `block_size` is a multiple of `grain`. `progress_tokens`: see PROGRESS_TOKENS.
        """
        self.block_size, self.progress_tokens = block_size, progress_tokens
        self.model_drafts, self.cpu_split, self.key_splitters = model_drafts, cpu_split, (cpu_split,)
        self.num_watermark_blocks = num_watermark_blocks(num_cpu_blocks)
        self.keeps_first_blocks = keeps_first_blocks
        self.group_blocks = group_blocks  # streamed blocks that are attended to in one call
        blocks = [HybridBlock(i) for i in range(num_cpu_blocks)]
        self.companions = Companions(companions)
        snapshots = self.companions.snapshots
        self.pool = BlockPool(list(blocks), block_size, grain, enable_prefix_caching, long_chunk_blocks, snapshots)
        self.companions.join(self.pool)
        self.blocks = blocks
        self.ring = SlotRing(num_gpu_blocks)
        self.slots = StepSlots(self.ring, self.pool, block_size)
        self.histories = Histories(blocks, self.slots, block_size, group_blocks, self.cpu_split)
        self.num_hit_blocks = 0
        self.num_missed_blocks = 0
        self.num_cpu_tokens = 0  # tokens that the CPU attended to, counted once for each sequence
        self._running: dict[int, Sequence] = {}  # by seq_id
        self._slotless_ids: set[int] = set()  # running sequences that need a slot for their next token and hold none
        self._copy_sources: list[HybridBlock] = []
        self._last_moves = KVMoves()  # for display
        # seq_id -> (block that holds the matched start of the sequence's first new block, number of matched tokens)
        self._prefix_sources: dict[int, tuple[HybridBlock, int]] = {}

    # -- which block is where ------------------------------------------------------------------------------------

    def get_all_cpu_blocks(self, seq: Sequence) -> list[int]:
        """Return the CPU block ids of the sequence, in order of position. Not used by the engine; public, for tests and
        tools.
        """
        return list(seq.block_table)

    def get_prefilled_cpu_blocks(self, seq: Sequence) -> list[int]:
        """Return the CPU block ids of the sequence's fully computed blocks. Not used by the engine; public, for tests
        and tools.
        """
        return seq.block_table[: seq.num_computed_tokens // self.block_size]

    # -- admission -----------------------------------------------------------------------------------------------

    def check_fits(self, seq: Sequence) -> None:
        needed, have = self._num_blocks(seq.max_kv_tokens), len(self.blocks)
        if needed > have:
            raise RequestError(
                f"prompt of {seq.num_prompt_tokens} tokens + max_tokens={seq.params.max_tokens} needs {needed} CPU "
                f"blocks of {self.block_size} tokens, but the pool has {have}; shorten the prompt, lower max_tokens, "
                "or raise num_cpu_blocks or cpu_memory_gb"
            )

    def begin_step(self, running: Seq[Sequence]) -> None:
        super().begin_step(running)
        self.slots.begin_step()
        self._slotless_ids = {seq.seq_id for seq in running if seq.num_computed_tokens % self.block_size == 0}

    def can_admit(self, seq: Sequence) -> bool:
        if self._num_available_slots(seq) < 1:
            return False
        num_spare = self.num_watermark_blocks
        if seq.is_preempted:
            growth = [self._num_growth_blocks(other, len(other.block_table)) for other in self._running.values()]
            num_spare = sum(growth) + self._num_growth_blocks(seq, self._num_blocks(seq.num_tokens))
        return self.pool.has_room_for(seq, num_spare)

    def _num_growth_blocks(self, seq: Sequence, num_blocks: int) -> int:
        """Count the blocks that a sequence with `num_blocks` needs for its next `progress_tokens` tokens."""
        return max(0, self._num_blocks(min(seq.num_tokens + self.progress_tokens, seq.max_kv_tokens)) - num_blocks)

    def admit(self, seq: Sequence) -> None:
        match = self.pool.usable_match(seq)
        is_resumed = self._share_blocks(seq, match)
        for block_id in seq.block_table:
            self.slots.add_running_owner(self.blocks[block_id])
        if match.partial_block is not None and not is_resumed:
            source = self.blocks[match.partial_block]
            self.pool.retain(source)  # until finish_step
            self._copy_sources.append(source)
            self._prefix_sources[seq.seq_id] = source, match.num_partial_tokens
            seq.num_computed_tokens += match.num_partial_tokens
        self._admitted(seq, match, is_resumed=is_resumed)
        self._grow(seq, seq.num_tokens)
        self._running[seq.seq_id] = seq

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        count = self._num_blocks(num_tokens) - len(seq.block_table)
        if count <= 0:
            return
        for chosen in self.pool.choose_free_blocks(count):
            block = self.blocks[chosen.block_id]
            self.ring.free_slot_of(block)
            self.pool.allocate(block)
            block.is_kept = self.keeps_first_blocks and not seq.block_table
            self.slots.add_running_owner(block)
            seq.block_table.append(block.block_id)

    # -- slots ---------------------------------------------------------------------------------------------------

    def _num_available_slots(self, seq: Sequence) -> int:
        """Count the slots that `seq` may use: all available slots, minus one for each other running sequence that needs
        one.
        """
        return self.ring.num_available - len(self._slotless_ids) + (seq.seq_id in self._slotless_ids)

    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        """Count the next tokens whose blocks have or can get a slot, and that every companion has room for."""
        num_blocks = self._num_available_slots(seq)
        block_idx, num_owned = seq.num_computed_tokens // self.block_size, len(seq.block_table)
        if block_idx < num_owned:
            held = self.blocks[seq.block_table[block_idx]]
            # A pinned slot does not count as available, but this block can go on using its slot.
            num_blocks += held.ring_slot >= 0 and held.is_pinned
        end_block_idx = min(block_idx + num_blocks, num_owned + self.pool.num_free)
        room = max(0, end_block_idx * self.block_size - seq.num_computed_tokens)
        return min(self.companions.num_placeable(seq, num_tokens), room)

    def place(self, seq: Sequence, num_tokens: int, num_guesses: int = 0) -> None:
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        known_end = end - num_guesses
        self._grow(seq, end)
        self._slotless_ids.discard(seq.seq_id)
        first, last = start // self.block_size, self._num_blocks(end)
        chunk = [self.blocks[block_id] for block_id in seq.block_table[first:last]]
        for block in chunk:  # pin all blocks first, so that giving a slot to one does not evict another
            self.slots.pin(block)
        if new := [block for block in chunk if block.ring_slot < 0]:
            # A chunk of a prompt evicts the prompt's own blocks first. The step misses the same number of blocks in any
            # case. But if the next steps run without this sequence, they would have to load other sequences' blocks
            own_ids = seq.block_table[:first] if num_tokens > MAX_DECODE_QUERIES else []
            self.slots.allocate_slots(new, [self.blocks[block_id] for block_id in own_ids])
        source, num_matched = self._prefix_sources.pop(seq.seq_id, (None, 0))
        if source is not None:  # the prefix match ended inside the first new block
            keeps_source = self.ring.num_available > len(self._slotless_ids)
            self.slots.copy_prefix(source, chunk[0], num_matched, keeps_source=keeps_source)
            self.companions.copy_prefix(source, chunk[0], num_matched)
        for i, block in enumerate(chunk[: self._num_blocks(known_end) - first]):
            self.slots.write_tokens(block, known_end - (first + i) * self.block_size)
        self.pool.register(seq, known_end)

    def accept(self, seq: Sequence) -> None:
        block_idx, offset = divmod(seq.num_computed_tokens, self.block_size)
        self.slots.record_accepted(self.blocks[seq.block_table[block_idx]], offset + 1)
        seq.num_computed_tokens += 1

    def num_missing_tokens(self, seq: Sequence) -> int:
        if seq.status is not SequenceStatus.RUNNING:
            return 0
        return len(self.histories.find(seq).missing) * self.block_size

    def free(self, seq: Sequence) -> None:
        self.pool.index.forget_search(seq)
        self.companions.forget(seq)
        if not seq.block_table:
            return
        self.pool.register(seq, seq.num_computed_tokens)
        del self._running[seq.seq_id]
        self._slotless_ids.discard(seq.seq_id)
        self.histories.forget(seq)
        block_idx = seq.num_computed_tokens // self.block_size
        if block_idx < len(seq.block_table):
            self.slots.stop_writing(self.blocks[seq.block_table[block_idx]])
        for block_id in reversed(seq.block_table):  # so that the tail of a sequence is evicted before its head
            self.slots.remove_running_owner(self.blocks[block_id])
            self.pool.release(self.blocks[block_id])
        seq.block_table.clear()

    # -- blocks that are filled from elsewhere ------------------------------------------------------------------------

    def _empty(self, block: Block) -> None:
        self.ring.free_slot_of(self.blocks[block.block_id])

    def fill(self, owner: Sequence, num_tokens: int) -> None:
        first = owner.num_registered_tokens // self.block_size
        for i, block_id in enumerate(owner.block_table[first:], first):
            block = self.blocks[block_id]
            block.num_tokens = min(self.block_size, max(0, num_tokens - i * self.block_size))
            block.num_offloaded_tokens = block.num_tokens
            block.is_kept = self.keeps_first_blocks and i == 0
        super().fill(owner, num_tokens)

    def num_stored_tokens(self, block_id: int) -> int:
        return self.blocks[block_id].num_offloaded_tokens

    # -- finishing -----------------------------------------------------------------------------------------------

    def finish_step(self, placed: Seq[tuple[Sequence, int]]) -> tuple[list[PagedKeys], KVMoves]:
        if self.keeps_first_blocks:
            decoding = (seq for seq, num_tokens in placed if num_tokens <= MAX_DECODE_QUERIES)
            full = (seq.block_table[0] for seq in decoding if seq.num_computed_tokens >= self.block_size)
            self.slots.swap_in(self.blocks[block_id] for block_id in full)
        histories = [self.histories.find(seq) for seq, _ in placed]
        missing = {block.block_id: block for history in histories for block in history.missing}
        self.num_hit_blocks += sum(len(history.ring_slots) for history in histories)
        self.num_missed_blocks += len(missing)
        if missing:
            in_order = [missing[block_id] for block_id in sorted(missing)]  # so that contiguous blocks share a copy
            unread_slots: list[int] = []  # slots of running sequences that the step does not run
            if len(placed) < len(self._running):
                unread_slots = self.ring.slots_without({i for seq, _ in placed for i in seq.block_table})
            if self.slots.load_missing(in_order, unread_slots):
                histories = [self.histories.find(seq) for seq, _ in placed]
        keys = [
            self.histories.paged_keys(seq, num_tokens, history)
            for (seq, num_tokens), history in zip(placed, histories, strict=True)
        ]
        num_queries = [num_tokens for _, num_tokens in placed]
        payloads = self.companions.plan_step(placed, self.gpu_block)
        missing_keys = MissingKeys()
        if missing:
            streams_all = self.companions.streams_all
            missing_keys = self.histories.missing_keys(histories, num_queries, streams_all=streams_all)
        self.num_cpu_tokens += sum(span.end - span.start for row in missing_keys.cpu_spans for span in row)
        self.slots.copy_out_accepted()
        self._last_moves = moves = self.slots.moves(missing_keys, payloads)
        for source in self._copy_sources:
            self.pool.release(source)
        self._copy_sources.clear()
        return keys, moves

    def gpu_block(self, block: Block) -> int | None:
        return self.slots.slot_before_step(self.blocks[block.block_id])

    def block_map(self) -> bytes:
        found = bytearray([_state_between_steps(block) for block in self.blocks])

        def mark(block_id: int, state: BlockState) -> None:
            if self.blocks[block_id].ref_count:  # skip a block whose request has ended meanwhile
                found[block_id] = state

        moves = self._last_moves  # frozen; another thread may replace it meanwhile
        for spans in moves.cpu_spans:
            for span in spans:
                mark(span.cpu_block_id, BlockState.CPU_ATTENDED)
        for group in moves.streamed:
            for block_id in group.cpu_block_ids:
                mark(block_id, BlockState.STREAMED)
        for offload in moves.offloads:  # the blocks that the step filled
            mark(offload.cpu_block_id, BlockState.WRITTEN)
        return bytes(found)

    def stats(self) -> dict[str, float | None]:
        return {
            "num_cpu_blocks": len(self.blocks),
            "num_free_cpu_blocks": self.pool.num_free,
            "num_gpu_blocks": len(self.ring),
            "num_resident_blocks": sum(block is not None for block in self.ring.blocks),
            "num_hit_blocks": self.num_hit_blocks,
            "num_missed_blocks": self.num_missed_blocks,
            "num_cpu_tokens": self.num_cpu_tokens,
            "cpu_attention_byte_per_s": self.cpu_split.cpu_byte_per_s,
        } | self.companions.stats()


def _state_between_steps(block: HybridBlock) -> BlockState:
    if not (block.num_tokens if block.ref_count else block.grain_hashes):
        return BlockState.FREE
    if block.being_written:
        return BlockState.WRITTEN
    if block.ring_slot >= 0:
        return BlockState.RESIDENT
    return BlockState.WAITING if block.ref_count else BlockState.CACHED
