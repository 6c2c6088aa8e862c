"""BlockPool: the blocks of one memory (GPU or CPU), their reference counts, and the order in which they are allocated.

Only free blocks, those without references, are allocated. Until then, or until it is discarded, a free block keeps its
content and its hashes, and the prefix index still finds it. Free blocks are allocated least recently used first, with
two exceptions:
- A spare block is allocated before all others, because evicting it loses nothing: it holds no whole grain, or another
  block holds the same grains.
- A long chunk gets contiguous blocks where possible, because they are copied faster (copy_runs.py).
"""

import itertools
from collections import OrderedDict

from nanovllm.core.sequence import Sequence
from nanovllm.kvcache.policy.prefix_index import Block, PrefixIndex, PrefixMatch
from nanovllm.utils.arithmetic import ceil_div

LONG_CHUNK_BLOCKS = 16  # a chunk of at least this many blocks gets contiguous ones rather than the least recently used
PROTECTED_SHARE = 4  # the most recently used 1/PROTECTED_SHARE of the cached blocks is not evicted for contiguity
SEARCHED_PER_BLOCK = 16  # free blocks to examine for each block that a long chunk needs


def contiguous_ranges(ids: list[int]) -> list[range]:
    """Split ascending `ids` (at least one) into ranges of consecutive numbers, longest first."""
    edges = [0, *(i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1), len(ids)]
    found = [range(ids[start], ids[end - 1] + 1) for start, end in itertools.pairwise(edges)]
    return sorted(found, key=len, reverse=True)


class BlockPool:
    def __init__(
        self,
        blocks: list[Block],
        block_size: int,
        grain: int,
        enable_prefix_caching: bool,
        long_chunk_blocks: int = LONG_CHUNK_BLOCKS,
    ) -> None:
        self.blocks = blocks
        self.long_chunk_blocks = long_chunk_blocks
        self.index = PrefixIndex(block_size, grain)
        self.enable_prefix_caching = enable_prefix_caching
        # The free blocks: spare ones, and those whose content a prompt could still match. In both, the block to
        # allocate next comes first. A plain dict would be slow: finding its first key has to skip every key that was
        # deleted before it.
        self.spare_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(len(blocks)))
        self.cached_ids: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self.spare_ids) + len(self.cached_ids)

    @property
    def next_free_block(self) -> Block:
        """The block that `allocate` would return."""
        assert self.num_free, "no free block; the caller must check num_free first"
        return self.blocks[next(iter(self.spare_ids or self.cached_ids))]

    def has_room_for(self, seq: Sequence, num_spare_blocks: int) -> bool:
        """Return True if a waiting sequence can have a block for each of its tokens, with `num_spare_blocks` left over.

        Nothing has to be left over while no block is in use.
        """
        num_shared = sum(self.blocks[block_id].ref_count > 0 for block_id in self.match(seq).full_blocks)
        num_needed = ceil_div(seq.num_tokens, self.index.block_size) - num_shared
        is_alone = self.num_free == len(self.blocks)
        return num_needed <= self.num_free - (0 if is_alone else num_spare_blocks)

    def choose_free_blocks(self, count: int) -> list[Block]:
        """Which free blocks to allocate for a sequence that needs `count` more, in ascending order."""
        assert count <= self.num_free, f"{count} blocks needed, {self.num_free} free; the caller must check first"
        if count < self.long_chunk_blocks:
            ids = list(itertools.islice(itertools.chain(self.spare_ids, self.cached_ids), count))
        else:
            ids = self._choose_contiguous(count)
        return [self.blocks[block_id] for block_id in sorted(ids)]

    def _choose_contiguous(self, count: int) -> list[int]:
        """Choose from the longest contiguous ranges, so that few copies move the chunk (copy_runs.py)."""
        num_older = len(self.cached_ids) - len(self.cached_ids) // PROTECTED_SHARE
        older = itertools.islice(self.cached_ids, max(num_older, count - len(self.spare_ids)))
        # Search the spare blocks from the end: blocks that were never used are there, in long contiguous ranges.
        searched = itertools.islice(itertools.chain(reversed(self.spare_ids), older), SEARCHED_PER_BLOCK * count)
        return list(itertools.islice(itertools.chain.from_iterable(contiguous_ranges(sorted(searched))), count))

    def match(self, seq: Sequence) -> PrefixMatch:
        return self.index.match(seq) if self.enable_prefix_caching and seq.can_use_prefix_cache else PrefixMatch()

    def register(self, seq: Sequence, end: int) -> None:
        if self.enable_prefix_caching:
            self.index.register(seq, self.blocks, end)

    def allocate(self, block: Block | None = None) -> Block:
        """Allocate a free block, by default the next one, and forget its old content."""
        block = block or self.next_free_block
        self.index.drop(block)
        self.retain(block)
        return block

    def retain(self, block: Block) -> None:
        if block.ref_count == 0:
            owner = self.spare_ids if block.block_id in self.spare_ids else self.cached_ids
            del owner[block.block_id]
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Drop a reference. If it was the last, the block is free now.

        It becomes the most recently used free block, unless it is redundant. A redundant block is allocated next; if
        its duplicate is free too, the duplicate becomes the most recently used one.
        """
        assert block.ref_count > 0, f"block {block.block_id} released more often than it was retained"
        block.ref_count -= 1
        if block.ref_count:
            return
        if not self.is_redundant(block):
            self.cached_ids[block.block_id] = None
            return
        self._move_to_front(block)
        duplicate = self.index.find_duplicate(block)
        if duplicate is not None and duplicate.ref_count == 0:
            self.spare_ids.pop(duplicate.block_id, None)
            self.cached_ids[duplicate.block_id] = None
            self.cached_ids.move_to_end(duplicate.block_id)

    def _move_to_front(self, block: Block) -> None:
        """Make a free block the next to be allocated."""
        self.cached_ids.pop(block.block_id, None)
        self.spare_ids[block.block_id] = None
        self.spare_ids.move_to_end(block.block_id, last=False)

    def is_redundant(self, block: Block) -> bool:
        """Whether every prompt that matches the block's content would still match if the content were dropped."""
        return not block.grain_hashes or self.index.find_duplicate(block) is not None

    def discard(self, block: Block) -> None:
        """Forget the content of a free block, and make it the next to be allocated."""
        assert block.ref_count == 0, f"block {block.block_id} is discarded while it has {block.ref_count} references"
        self.index.drop(block)
        self._move_to_front(block)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert that each block is either free or owned, with the right count. `sequences` are all that own blocks."""
        counts = [0] * len(self.blocks)
        for seq in sequences:
            assert len(set(seq.block_table)) == len(seq.block_table), f"sequence {seq.seq_id} owns a block twice"
            for block_id in seq.block_table:
                counts[block_id] += 1
        for block in self.blocks:
            assert block.ref_count == counts[block.block_id], (
                f"block {block.block_id} has ref_count {block.ref_count}, but {counts[block.block_id]} sequences own it"
            )
            num_lists = (block.block_id in self.spare_ids) + (block.block_id in self.cached_ids)
            assert num_lists == (block.ref_count == 0), f"block {block.block_id} is in {num_lists} free lists"
        self.index.check_integrity(self.blocks)
