"""KVCacheManager: the scheduler's interface to the KV cache. BlockManager: a cache without offload, all on the GPU.

A manager decides which sequence owns which block. It works on integers only.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

from nanovllm.capabilities.cpu_attention.cpu_split import FollowingSplit
from nanovllm.capabilities.recurrent.places import RecurrentStates
from nanovllm.capabilities.shadow.pages import Fills, ShadowPages
from nanovllm.errors import RequestError
from nanovllm.kvcache.block_pool import Block, BlockPool, PrefixMatch
from nanovllm.plan.kv_spec import WATERMARK, BlockState, num_watermark_blocks
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import DraftKeys, HeadStep, KVMoves, StateFlush, StateStep
from nanovllm.utils.arithmetic import ceil_div

# Drafts attend to at least so many of the newest keys as they are, if these are on the GPU: most attention goes there.
EXACT_TOKENS = 128


class PagedKeys(NamedTuple):
    """The keys of one sequence that are in GPU blocks during a step. With offload, its other keys are streamed.

    `block_table` holds gpu_block_ids; SequenceStep says in which order.
    """

    block_table: tuple[int, ...]
    num_paged_keys: int


class Resumption(NamedTuple):
    """The rest of a preempted sequence with a state: blocks, of which the last may not be full, and their tokens."""

    block_ids: list[int]
    num_tokens: int


class KVCacheManager(ABC):
    """For each step the scheduler calls begin_step first and finish_step last.

    In between it calls can_admit and admit for each waiting sequence that may start, then num_placeable and place for
    each sequence that runs in the step. It may call preempt and free at any point between the two.
    """

    cpu_split: FollowingSplit | None = None  # divides missing keys; None if the CPU attends to none
    shadow: ShadowPages | None = None  # None: there is no shadow
    states: RecurrentStates | None = None  # None: no layer is recurrent
    has_draft_head = False  # True if the checkpoint's draft head drafts
    pool: BlockPool
    block_size: int
    num_watermark_blocks: int

    @abstractmethod
    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestError if the request could not run even alone."""

    def begin_step(self, running: Seq[Sequence]) -> None:
        """Start planning a step for the `running` sequences, and drop all that a failed step may have left behind."""
        if self.states is not None:
            self.states.begin_step()

    def num_known_tokens(self, seq: Sequence) -> int:
        """Count the tokens of a waiting sequence that would count as computed if it were admitted now."""
        match = self.pool.match(seq)
        if (resumption := self._resumption(seq, match)) is not None:
            return resumption.num_tokens
        return len(match.full_blocks) * self.block_size + match.num_partial_tokens

    @abstractmethod
    def can_admit(self, seq: Sequence) -> bool:
        """Return True if there is room for a waiting sequence to start now."""

    @abstractmethod
    def admit(self, seq: Sequence) -> None:
        """Give a waiting sequence its blocks.

        Prefix hits count as computed: they set num_computed_tokens and, on the first admission, num_hit_tokens.
        """

    @abstractmethod
    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        """Count how many of the sequence's next `num_tokens` tokens fit into this step, possibly 0."""

    @abstractmethod
    def place(self, seq: Sequence, num_tokens: int, num_guesses: int = 0) -> None:
        """Give the sequence's next `num_tokens` tokens a place in this step. Does not change num_computed_tokens.

        The last `num_guesses` of them get room only. They count for nothing until `accept`.
        """

    @abstractmethod
    def accept(self, seq: Sequence) -> None:
        """Count the next guess of a running sequence's last step as computed, because it has proved right.

        Called before the next step is planned.
        """

    def num_missing_tokens(self, seq: Sequence) -> int:
        """Count the keys of a sequence that are not on the GPU; 0 if it does not run."""
        return 0

    def misses_keys(self, seq: Sequence) -> bool:
        """Return True if some keys of a running sequence are not on the GPU."""
        return self.num_missing_tokens(seq) > 0

    def has_shadow(self, seq: Sequence) -> bool:
        """Return True if the shadow has keys of a running sequence."""
        return self.shadow is not None and self.shadow.has_pages(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take away a running sequence's blocks. It is computed again later, but for what can still be found then."""
        self._pause(seq)
        self.free(seq)
        seq.num_computed_tokens = seq.num_registered_tokens = 0

    @abstractmethod
    def free(self, seq: Sequence) -> None:
        """End the sequence. Prompts can still match its full grains until their blocks are allocated again."""

    @abstractmethod
    def finish_step(self, placed: Seq[tuple[Sequence, int]]) -> tuple[list[PagedKeys], KVMoves]:
        """Finish planning the step: return each placed sequence's paged keys, and all moves of the step.

        With offload this also loads missing blocks into unread slots, counts hits and misses, and releases the blocks
        that the step copies from.
        """

    def _num_blocks(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self.block_size)

    def _share_blocks(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Give a waiting sequence the whole blocks that match, or those with which it goes on where it was preempted.
        Their tokens count as computed. Returns True in the second case.
        """
        resumption = self._resumption(seq, match)
        seq.block_table.extend(match.full_blocks if resumption is None else resumption.block_ids)
        for block_id in seq.block_table:
            self.pool.retain(self.pool.blocks[block_id])
        num_tokens = len(match.full_blocks) * self.block_size if resumption is None else resumption.num_tokens
        seq.num_computed_tokens, seq.num_registered_tokens = num_tokens, num_tokens // self.block_size * self.block_size
        return resumption is not None

    # -- states of recurrent layers ------------------------------------------------------------------------------

    def _admit_state(self, seq: Sequence, match: PrefixMatch, *, is_resumed: bool) -> None:
        """Count the hits of a sequence that has just got its blocks, and give it the state behind them."""
        if seq.num_hit_tokens is None:
            seq.num_hit_tokens = seq.num_computed_tokens
        if self.states is not None:
            prefix_id = None if is_resumed else match.prefix_id
            num_known = max(match.num_known_tokens, seq.num_disk_tokens)
            self.states.admit(seq, prefix_id, num_known, self.pool.index.grain, is_resumed=is_resumed)
            self._forget_pause(seq)

    def _pause(self, seq: Sequence) -> None:
        """Keep the state of a sequence that is about to be preempted, and what its last block holds."""
        if self.states is None or not self.states.snapshots.count or not seq.num_computed_tokens:
            return
        block_idx, num_tail_tokens = divmod(seq.num_computed_tokens, self.block_size)
        tail = seq.block_table[block_idx] if num_tail_tokens else -1
        if tail >= 0:
            self.pool.blocks[tail].tail_of = seq.seq_id
        self.states.pause(seq, tail)

    def _resumption(self, seq: Sequence, match: PrefixMatch) -> Resumption | None:
        """Find the blocks with which a preempted sequence goes on where it was. None for other sequences, if its state
        or a block is gone, and if the prefix cache has more of its tokens than it had computed itself.
        """
        paused = None if self.states is None else self.states.find_paused(seq)
        if paused is None or paused.num_tokens <= len(match.full_blocks) * self.block_size + match.num_partial_tokens:
            return None
        num_full, num_tail_tokens = divmod(paused.num_tokens, self.block_size)
        tail = [paused.tail_block] if num_tail_tokens else []
        if len(match.known_blocks) < num_full or any(self.pool.blocks[i].tail_of != seq.seq_id for i in tail):
            return None
        return Resumption([*match.known_blocks[:num_full], *tail], paused.num_tokens)

    def _forget_pause(self, seq: Sequence) -> None:
        """The sequence does not wait any more."""
        if self.states is not None and (paused := self.states.forget_paused(seq)) and paused.tail_block >= 0:
            block = self.pool.blocks[paused.tail_block]
            block.tail_of = -1 if block.tail_of == seq.seq_id else block.tail_of

    def _free_state(self, seq: Sequence) -> None:
        if self.states is not None:
            self.states.free(seq)

    def _num_with_saves(self, seq: Sequence, num_tokens: int) -> int:
        """Count how many of the sequence's next tokens there are slots for, for the states to be kept on the way."""
        return num_tokens if self.states is None else self.states.num_with_saves(seq, num_tokens)

    def keep_state(self, seq: Sequence, num_tokens: int, chunk_end: int) -> bool:
        """See RecurrentStates.keep_at. Returns False if no layer is recurrent."""
        return self.states is not None and self.states.keep_at(seq, num_tokens, chunk_end)

    def state_step(self, seq: Sequence, num_tokens: int, *, has_drafts: bool) -> StateStep | None:
        """Plan the step's use of the state of a sequence that has `num_tokens` new tokens in it, without guesses.
        Called once after finish_step.
        """
        if self.states is None:
            return None
        has_drafts = has_drafts and not self.has_draft_head  # which has no state
        return self.states.step(seq, num_tokens, partial(self.pool.prefix_id, seq), has_drafts=has_drafts)

    def _state_flushes(self) -> tuple[StateFlush, ...]:
        return () if self.states is None else self.states.take_flushes()

    def can_draft(self, seq: Sequence) -> bool:
        """Return True if the ranks can draft for a placed sequence: its keys are where drafts look for them, and there
        is a slot for the states of drafts.
        """
        if self.has_draft_head:
            return True
        is_filling = self.shadow is not None and self.shadow.is_filling(seq)  # a page that drafts would miss
        return not is_filling and (self.states is None or self.states.can_draft)

    def head_step(self, seq: Sequence, num_tokens: int, num_certain: int) -> HeadStep | None:
        """Plan the draft head's way through a sequence that has `num_tokens` new tokens in the step, of which the first
        `num_certain` are not guesses. Called after finish_step.
        """
        if not self.has_draft_head:
            return None
        start = seq.num_computed_tokens
        pages = tuple(seq.block_table[: self._num_blocks(start + num_tokens)])
        end = start + num_certain
        next_token = -1 if end == seq.num_tokens else seq.token_ids[end]
        return HeadStep(pages, next_token)

    # -- the shadow ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _gpu_block(self, block: Block) -> int | None:
        """The gpu_block_id that holds a full block before and during the step; -1 if it is not on the GPU, and None if
        the step brings it there to stay.
        """

    def _fill_shadow(self, placed: Seq[tuple[Sequence, int]]) -> Fills:
        """Give pages of the shadow to the full blocks of the step's sequences."""
        fills = Fills([], {})
        if self.shadow is None:
            return fills
        size, written = self.block_size, set[int]()  # the latter also as hits of other sequences
        for seq, num_tokens in placed:
            start = seq.num_computed_tokens
            written.update(seq.block_table[start // size : ceil_div(start + num_tokens, size)])

        def gpu_block(block: Block) -> int | None:
            return None if block.block_id in written else self._gpu_block(block)

        fills_all = self._fills_all_pages(placed)
        for seq, _ in placed:
            num_blocks = seq.num_computed_tokens // size if fills_all or self.shadow.has_pages(seq) else 0
            self.shadow.fill(seq, num_blocks, self.pool.blocks, gpu_block, fills)
        return fills

    def _fills_all_pages(self, placed: Seq[tuple[Sequence, int]]) -> bool:
        """Return False if only sequences that have pages of the shadow already get more."""
        return True

    def _stats_of_parts(self) -> dict[str, float | None]:
        """Counters of the shadow and of the states, where there are any."""
        stats = {} if self.states is None else self.states.stats()
        if self.shadow is not None:
            stats |= {"num_shadow_pages": len(self.shadow), "num_used_shadow_pages": self.shadow.num_used}
        return stats

    def draft_keys(self, seq: Sequence, num_tokens: int) -> DraftKeys | None:
        """The keys for drafts of a sequence that has `num_tokens` new tokens in the step. Called after finish_step."""
        if self.shadow is None:
            return None
        start = seq.num_computed_tokens
        first, end = start // self.block_size, start + num_tokens
        pages = self.shadow.filled(seq)
        if first and start % self.block_size < EXACT_TOKENS:
            before = self.pool.blocks[seq.block_table[first - 1]]
            if self._gpu_block(before) not in (-1, None):
                first -= 1
                pages = [page for page in pages if page != before.page]
        block_ids = seq.block_table[first : self._num_blocks(end)]
        exact = [self._gpu_block(self.pool.blocks[block_id]) for block_id in block_ids]
        assert None not in exact, f"sequence {seq.seq_id} drafts in a step that loads its newest block"
        return DraftKeys(tuple(pages), tuple(block_id or 0 for block_id in exact), end - first * self.block_size)

    # -- blocks that are loaded from disk ------------------------------------------------------------------------

    def hold(self, seq: Sequence, num_tokens: int) -> Sequence | None:
        """Give a waiting sequence's first `num_tokens` tokens blocks, those that are not in memory to be filled.

        They belong to the holder that is returned until `fill`. None, and nothing happens, if the sequence could not
        be admitted now for lack of blocks.
        """
        if not self.pool.has_room_for(seq, self.num_watermark_blocks):
            return None
        holder = copy.copy(seq)
        num_blocks = self._num_blocks(num_tokens)
        holder.block_table = list(self.pool.match(seq).whole_blocks[:num_blocks])
        holder.num_registered_tokens = len(holder.block_table) * self.block_size
        for block_id in holder.block_table:
            self.pool.retain(self.pool.blocks[block_id])
        for block in self.pool.choose_free_blocks(num_blocks - len(holder.block_table)):
            self._empty(block)
            holder.block_table.append(self.pool.allocate(block).block_id)
        return holder

    def fill(self, holder: Sequence, num_tokens: int) -> None:
        """The holder's blocks have its first `num_tokens` tokens now. Prompts can match them; the holder is gone."""
        self.pool.register(holder, num_tokens)
        for block_id in reversed(holder.block_table):
            self.pool.release(self.pool.blocks[block_id])

    def _empty(self, block: Block) -> None:  # noqa: B027  # only a manager with slots needs it
        """A free block is about to be filled from disk."""

    @abstractmethod
    def num_stored_tokens(self, block_id: int) -> int:
        """Count the tokens of a block that are, after all planned steps, in the memory that holds whole blocks."""

    @abstractmethod
    def block_states(self) -> bytes:
        """Return the BlockState of every block, one byte each.

        Any thread may call it at any time, without a lock. The result may show some blocks before and others after a
        change, so an implementation only reads, and relies on nothing that must be consistent between two blocks.
        """

    @abstractmethod
    def stats(self) -> dict[str, float | None]:
        """Counters for LLM.stats()."""


_NO_MOVES = KVMoves()


class BlockManager(KVCacheManager):
    """A sequence holds blocks for all its tokens. If none is free, the newest running sequence is preempted, loses its
    blocks, and is computed again later.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        watermark: float = WATERMARK,
        shadow: ShadowPages | None = None,
        states: RecurrentStates | None = None,
        has_draft_head: bool = False,
    ) -> None:
        self.block_size, self.shadow, self.states = block_size, shadow, states
        self.has_draft_head = has_draft_head
        blocks, snapshots = [Block(i) for i in range(num_blocks)], None if states is None else states.snapshots
        self.pool = BlockPool(blocks, block_size, block_size, enable_prefix_caching, snapshots=snapshots)
        self.num_watermark_blocks = num_watermark_blocks(num_blocks, watermark)

    def check_fits(self, seq: Sequence) -> None:
        needed, have = self._num_blocks(seq.max_kv_tokens), len(self.pool.blocks)
        if needed > have:
            raise RequestError(
                f"prompt of {seq.num_prompt_tokens} tokens + max_tokens={seq.params.max_tokens} needs {needed} KV "
                f"blocks of {self.block_size} tokens, but the cache has {have}; shorten the prompt, lower max_tokens, "
                "raise gpu_memory_utilization or num_kvcache_blocks, or use enable_cpu_offload=True"
            )

    def can_admit(self, seq: Sequence) -> bool:
        return self.pool.has_room_for(seq, self.num_watermark_blocks)

    def admit(self, seq: Sequence) -> None:
        assert not seq.block_table, f"sequence {seq.seq_id} already holds blocks"
        match = self.pool.match(seq)
        is_resumed = self._share_blocks(seq, match)
        self._admit_state(seq, match, is_resumed=is_resumed)
        self._grow(seq, seq.num_tokens)

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        while len(seq.block_table) < self._num_blocks(num_tokens):
            seq.block_table.append(self.pool.allocate().block_id)

    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        room = (len(seq.block_table) + self.pool.num_free) * self.block_size - seq.num_computed_tokens
        return min(self._num_with_saves(seq, num_tokens), room)

    def place(self, seq: Sequence, num_tokens: int, num_guesses: int = 0) -> None:
        self._grow(seq, seq.num_computed_tokens + num_tokens)
        self.pool.register(seq, seq.num_computed_tokens + num_tokens - num_guesses)

    def accept(self, seq: Sequence) -> None:
        seq.num_computed_tokens += 1

    def free(self, seq: Sequence) -> None:
        self.pool.index.forget_search(seq)
        if not seq.block_table:
            self._forget_pause(seq)
            return
        if self.shadow is not None:
            self.shadow.forget(seq)
        self._free_state(seq)
        self.pool.register(seq, seq.num_computed_tokens)
        for block_id in reversed(seq.block_table):  # so that the tail of a prefix is evicted before its head
            self.pool.release(self.pool.blocks[block_id])
        seq.block_table.clear()

    def finish_step(self, placed: Seq[tuple[Sequence, int]]) -> tuple[list[PagedKeys], KVMoves]:
        keys = []
        for seq, num_tokens in placed:
            num_keys = seq.num_computed_tokens + num_tokens
            keys.append(PagedKeys(tuple(seq.block_table[: self._num_blocks(num_keys)]), num_keys))
        fills, flushes = self._fill_shadow(placed).resident, self._state_flushes()
        return keys, KVMoves(page_fills=tuple(fills), state_flushes=flushes) if fills or flushes else _NO_MOVES

    def _gpu_block(self, block: Block) -> int | None:
        return block.block_id

    def num_stored_tokens(self, block_id: int) -> int:
        return self.block_size

    def block_states(self) -> bytes:
        # With prefix caching, a block without a hash is not full yet
        has_index = self.pool.enable_prefix_caching
        owned = bytes([BlockState.WRITTEN if has_index else BlockState.RESIDENT, BlockState.RESIDENT])
        unowned = bytes([BlockState.FREE, BlockState.CACHED])
        return bytes([(owned if block.ref_count else unowned)[bool(block.grain_hashes)] for block in self.pool.blocks])

    def stats(self) -> dict[str, float | None]:
        stats = {"num_gpu_blocks": len(self.pool.blocks), "num_free_gpu_blocks": self.pool.num_free}
        return stats | self._stats_of_parts()
