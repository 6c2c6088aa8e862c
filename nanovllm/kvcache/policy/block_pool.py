"""BlockPool: the blocks of one memory (GPU or CPU), who owns them, and which of them is handed out next.

A block with references is never handed out. One without keeps its content and its hashes, and goes on being found by
the prefix index, until it is handed out or discarded. Free blocks are handed out least recently used first, except
that blocks with which nothing is lost go before all others: those without a whole grain, and those whose grains
another block holds too. For a long chunk it matters more that its blocks are neighbours.
"""

import itertools
from collections import OrderedDict

from nanovllm.core.sequence import Sequence
from nanovllm.kvcache.policy.prefix_index import Block, PrefixIndex, PrefixMatch

LONG_CHUNK_BLOCKS = 16  # from here on a chunk gets neighbouring blocks rather than those used least recently
KEPT_SHARE = 4  # one in so many blocks with content, the most recently used ones, is not given up for that
SEARCHED_PER_BLOCK = 16  # free blocks looked at for each that is taken


def stretches(ids: list[int]) -> list[range]:
    """Stretches of consecutive numbers among ascending `ids`, of which there are some, the longest first."""
    edges = [0, *(i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1), len(ids)]
    found = [range(ids[start], ids[end - 1] + 1) for start, end in itertools.pairwise(edges)]
    return sorted(found, key=len, reverse=True)


class BlockPool:
    def __init__(self, blocks: list[Block], block_size: int, grain: int, enable_prefix_caching: bool) -> None:
        self.blocks = blocks
        self.index = PrefixIndex(block_size, grain)
        self.enable_prefix_caching = enable_prefix_caching
        # Free blocks with which nothing is lost, and the others; in each the next to be handed out comes first. A dict
        # would not do: finding its first key again and again takes longer with every key that was deleted there.
        self.spare_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(len(blocks)))
        self.cached_ids: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self.spare_ids) + len(self.cached_ids)

    @property
    def next_free(self) -> Block:
        """The block that `take` would hand out."""
        assert self.num_free, "no free block; the caller did not ask first"
        return self.blocks[next(iter(self.spare_ids or self.cached_ids))]

    def choose(self, count: int) -> list[Block]:
        """The free blocks to take for `count` more blocks of a sequence, in ascending order."""
        assert count <= self.num_free, f"{count} blocks of {self.num_free} free ones; the caller did not ask first"
        if count < LONG_CHUNK_BLOCKS:
            ids = list(itertools.islice(itertools.chain(self.spare_ids, self.cached_ids), count))
        else:
            ids = self._choose_neighbours(count)
        return [self.blocks[block_id] for block_id in sorted(ids)]

    def _choose_neighbours(self, count: int) -> list[int]:
        """From the longest stretches of neighbours: what is copied together is copied faster (copy_runs.py)."""
        num_older = len(self.cached_ids) - len(self.cached_ids) // KEPT_SHARE
        older = itertools.islice(self.cached_ids, max(num_older, count - len(self.spare_ids)))
        # Where whole stretches have never been used is at the far end of the spare ones
        searched = itertools.islice(itertools.chain(reversed(self.spare_ids), older), SEARCHED_PER_BLOCK * count)
        return list(itertools.islice(itertools.chain.from_iterable(stretches(sorted(searched))), count))

    def match(self, seq: Sequence) -> PrefixMatch:
        return self.index.match(seq) if self.enable_prefix_caching else PrefixMatch()

    def register(self, seq: Sequence, end: int) -> None:
        if self.enable_prefix_caching:
            self.index.register(seq, self.blocks, end)

    def take(self, block: Block | None = None) -> Block:
        """A free block for new content, the next one or a chosen one. Its old content is forgotten."""
        block = block or self.next_free
        self.index.drop(block)
        self.retain(block)
        return block

    def retain(self, block: Block) -> None:
        if block.ref_count == 0:
            owner = self.spare_ids if block.block_id in self.spare_ids else self.cached_ids
            del owner[block.block_id]
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Give up a reference. A block that is free now is the most recently used one, unless nothing is lost with it.

        If a free block holds the same, that one becomes the most recently used instead.
        """
        assert block.ref_count > 0, f"block {block.block_id} released more often than retained"
        block.ref_count -= 1
        if block.ref_count:
            return
        if not self.is_redundant(block):
            self.cached_ids[block.block_id] = None
            return
        self._hand_out_next(block)
        duplicate = self.index.find_duplicate(block)
        if duplicate is not None and duplicate.ref_count == 0:
            self.spare_ids.pop(duplicate.block_id, None)
            self.cached_ids[duplicate.block_id] = None
            self.cached_ids.move_to_end(duplicate.block_id)

    def _hand_out_next(self, block: Block) -> None:
        self.cached_ids.pop(block.block_id, None)
        self.spare_ids[block.block_id] = None
        self.spare_ids.move_to_end(block.block_id, last=False)

    def is_redundant(self, block: Block) -> bool:
        """Whether dropping the block's content would lose nothing that a prompt can match."""
        return not block.grain_hashes or self.index.find_duplicate(block) is not None

    def discard(self, block: Block) -> None:
        """Forget the content of a free block now, and hand it out next."""
        assert block.ref_count == 0, f"block {block.block_id} is discarded with {block.ref_count} references"
        self.index.drop(block)
        self._hand_out_next(block)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Every block is free or owned, as often as counted. `sequences` are all that hold blocks."""
        counts = [0] * len(self.blocks)
        for seq in sequences:
            assert len(set(seq.block_table)) == len(seq.block_table), f"sequence {seq.seq_id} owns a block twice"
            for block_id in seq.block_table:
                counts[block_id] += 1
        for block in self.blocks:
            assert block.ref_count == counts[block.block_id], (
                f"block {block.block_id} counts {block.ref_count} references, {counts[block.block_id]} sequences own it"
            )
            num_lists = (block.block_id in self.spare_ids) + (block.block_id in self.cached_ids)
            assert num_lists == (block.ref_count == 0), f"block {block.block_id} lost or shared"
        self.index.check_integrity(self.blocks)
