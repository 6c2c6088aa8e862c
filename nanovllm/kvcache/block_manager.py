"""KVCacheManager: the scheduler's interface to the KV cache. BlockManager: a cache without offload, all on the GPU.

A manager decides which sequence owns which block. It works on integers only.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import NamedTuple

from nanovllm.errors import RequestError
from nanovllm.kvcache.block_pool import Block, BlockPool, PrefixMatch
from nanovllm.kvcache.seams import Companion, Companions, KeySplitter
from nanovllm.plan.kv_spec import WATERMARK, BlockState, num_watermark_blocks
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import KVMoves
from nanovllm.utils.arithmetic import ceil_div


class PagedKeys(NamedTuple):
    """The keys of one sequence that are in GPU blocks during a step. With offload, the sequence's other keys are
    streamed.

    `block_table` holds gpu_block_ids, in the order that SequenceStep defines.
    """

    block_table: tuple[int, ...]
    num_paged_keys: int


class KVCacheManager(ABC):
    """The scheduler's interface. For each step the scheduler calls begin_step first and finish_step last.

    In between, the scheduler calls can_admit and admit for each waiting sequence that may start, then num_placeable and
    place for each sequence that runs in the step. It may call preempt and free at any point between begin_step and
    finish_step.
    """

    key_splitters: Seq[KeySplitter] = ()  # divide missing keys between the link and the CPU, and learn from steps
    model_drafts = True  # False if drafts are not made by the model itself and do not read the cache
    companions: Companions
    pool: BlockPool
    block_size: int
    num_watermark_blocks: int

    @abstractmethod
    def check_fits(self, seq: Sequence) -> None:
        """Raise RequestError if the request could not run even alone."""

    def begin_step(self, running: Seq[Sequence]) -> None:
        """Start planning a step for the `running` sequences, and drop leftovers of a failed step."""
        self.companions.begin_step()

    def num_known_tokens(self, seq: Sequence) -> int:
        """Count the tokens of a waiting sequence that would count as computed if it were admitted now."""
        match = self.pool.match(seq)
        if (resumption := self.companions.resumption(seq, match)) is not None:
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

        The last `num_guesses` tokens are draft tokens: they get room, but do not count until `accept`.
        """

    @abstractmethod
    def accept(self, seq: Sequence) -> None:
        """Count the next draft token of a running sequence's last step as computed, because it was accepted.

        Called before the next step is planned.
        """

    def num_missing_tokens(self, seq: Sequence) -> int:
        """Count the keys of a sequence that are not on the GPU; 0 if the sequence does not run."""
        return 0

    def misses_keys(self, seq: Sequence) -> bool:
        """Return True if some keys of a running sequence are not on the GPU."""
        return self.num_missing_tokens(seq) > 0

    def preempt(self, seq: Sequence) -> None:
        """Take away a running sequence's blocks. The sequence is recomputed later, except for blocks that can still be
        found.
        """
        self.companions.preempt(seq)
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
        """Give a waiting sequence the whole blocks that match, or the blocks with which it resumes after preemption.
        Their tokens count as computed. Returns True if the sequence resumes.
        """
        resumption = self.companions.resumption(seq, match)
        seq.block_table.extend(match.full_blocks if resumption is None else resumption.block_ids)
        for block_id in seq.block_table:
            self.pool.retain(self.pool.blocks[block_id])
        num_tokens = len(match.full_blocks) * self.block_size if resumption is None else resumption.num_tokens
        seq.num_computed_tokens, seq.num_registered_tokens = num_tokens, num_tokens // self.block_size * self.block_size
        return resumption is not None

    def _admitted(self, seq: Sequence, match: PrefixMatch, *, is_resumed: bool) -> None:
        """Count the hits of a sequence that has just been given its blocks."""
        if seq.num_hit_tokens is None:
            seq.num_hit_tokens = seq.num_computed_tokens
        self.companions.admit(seq, match, is_resumed=is_resumed)

    def can_draft(self, seq: Sequence, moves: KVMoves) -> bool:
        """Return True if the ranks can draft for a placed sequence: before the step's moves, its keys are where drafts
        read them, and every companion has what drafts need.
        """
        if self.model_drafts and (moves.loads or moves.copies):
            return False
        return self.companions.can_draft(seq)

    @abstractmethod
    def gpu_block(self, block: Block) -> int | None:
        """See GpuBlockOf."""

    # -- blocks that are filled from elsewhere ------------------------------------------------------------------------

    def hold(self, seq: Sequence, num_tokens: int) -> Sequence | None:
        """Give a waiting sequence blocks for its first `num_tokens` tokens. Blocks that are not in memory are to be
        filled.

        The returned owner holds the blocks until `fill`. Returns None and does nothing if the sequence could not be
        admitted now for lack of blocks.
        """
        if not self.pool.has_room_for(seq, self.num_watermark_blocks):
            return None
        owner = copy.copy(seq)
        num_blocks = self._num_blocks(num_tokens)
        owner.block_table = list(self.pool.match(seq).whole_blocks[:num_blocks])
        owner.num_registered_tokens = len(owner.block_table) * self.block_size
        for block_id in owner.block_table:
            self.pool.retain(self.pool.blocks[block_id])
        for block in self.pool.choose_free_blocks(num_blocks - len(owner.block_table)):
            self._empty(block)
            owner.block_table.append(self.pool.allocate(block).block_id)
        return owner

    def fill(self, owner: Sequence, num_tokens: int) -> None:
        """Called when the blocks of the owner from `hold` are filled. Prompts can match its `num_tokens` tokens from
        now on.
        """
        self.pool.register(owner, num_tokens)
        for block_id in reversed(owner.block_table):
            self.pool.release(self.pool.blocks[block_id])

    def _empty(self, block: Block) -> None:  # noqa: B027  # only a manager with slots needs it
        """Called before a free block is filled from elsewhere."""

    @abstractmethod
    def num_stored_tokens(self, block_id: int) -> int:
        """Count the tokens of a block that will be, after all planned steps, in the memory that holds whole blocks."""

    @abstractmethod
    def block_map(self) -> bytes:
        """Return the BlockState of every block, one byte each.

        Any thread may call it at any time, without a lock. The result may show some blocks before and others after a
        change, so an implementation only reads, and does not rely on consistency between two blocks.
        """

    @abstractmethod
    def stats(self) -> dict[str, float | None]:
        """Counters for LLM.stats()."""


_NO_MOVES = KVMoves()


class BlockManager(KVCacheManager):
    """The cache without offload: a sequence holds blocks for all its tokens. If none is free, the newest running
    sequence is preempted: it loses its blocks and is recomputed later.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        watermark: float = WATERMARK,
        companions: Seq[Companion] = (),
        model_drafts: bool = True,
    ) -> None:
        """`model_drafts`: see KVCacheManager."""
        self.block_size, self.model_drafts = block_size, model_drafts
        blocks = [Block(i) for i in range(num_blocks)]
        self.companions = Companions(companions)
        snapshots = self.companions.snapshots
        self.pool = BlockPool(blocks, block_size, block_size, enable_prefix_caching, snapshots=snapshots)
        self.companions.join(self.pool)
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
        self._admitted(seq, match, is_resumed=is_resumed)
        self._grow(seq, seq.num_tokens)

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        while len(seq.block_table) < self._num_blocks(num_tokens):
            seq.block_table.append(self.pool.allocate().block_id)

    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        room = (len(seq.block_table) + self.pool.num_free) * self.block_size - seq.num_computed_tokens
        return min(self.companions.num_placeable(seq, num_tokens), room)

    def place(self, seq: Sequence, num_tokens: int, num_guesses: int = 0) -> None:
        self._grow(seq, seq.num_computed_tokens + num_tokens)
        self.pool.register(seq, seq.num_computed_tokens + num_tokens - num_guesses)

    def accept(self, seq: Sequence) -> None:
        seq.num_computed_tokens += 1

    def free(self, seq: Sequence) -> None:
        self.pool.index.forget_search(seq)
        self.companions.forget(seq)
        if not seq.block_table:
            return
        self.pool.register(seq, seq.num_computed_tokens)
        for block_id in reversed(seq.block_table):  # so that the tail of a prefix is evicted before its head
            self.pool.release(self.pool.blocks[block_id])
        seq.block_table.clear()

    def finish_step(self, placed: Seq[tuple[Sequence, int]]) -> tuple[list[PagedKeys], KVMoves]:
        keys = []
        for seq, num_tokens in placed:
            num_keys = seq.num_computed_tokens + num_tokens
            keys.append(PagedKeys(tuple(seq.block_table[: self._num_blocks(num_keys)]), num_keys))
        payloads = self.companions.plan_step(placed, self.gpu_block)
        return keys, KVMoves(payloads=payloads) if payloads else _NO_MOVES

    def gpu_block(self, block: Block) -> int | None:
        return block.block_id

    def num_stored_tokens(self, block_id: int) -> int:
        return self.block_size

    def block_map(self) -> bytes:
        # With prefix caching, a block without a hash is not full yet
        has_index = self.pool.enable_prefix_caching
        owned = bytes([BlockState.WRITTEN if has_index else BlockState.RESIDENT, BlockState.RESIDENT])
        unowned = bytes([BlockState.FREE, BlockState.CACHED])
        return bytes([(owned if block.ref_count else unowned)[bool(block.grain_hashes)] for block in self.pool.blocks])

    def stats(self) -> dict[str, float | None]:
        stats = {"num_gpu_blocks": len(self.pool.blocks), "num_free_gpu_blocks": self.pool.num_free}
        return stats | self.companions.stats()
