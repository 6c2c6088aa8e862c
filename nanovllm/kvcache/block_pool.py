"""PrefixIndex: which blocks hold the start of a new prompt. BlockPool: the blocks of one memory (GPU or CPU), their
reference counts, and the order in which they are allocated.

Only free blocks, which have no references, are allocated. Until a free block is allocated or discarded, it keeps its
content and its hashes, and the prefix index still finds it. Spare blocks are allocated first, because evicting a spare
block loses nothing: it holds no whole grain, or another block holds the same grains. Cached blocks follow, least
recently used first. Contiguous blocks are copied faster (Run in offload_engine.py), so a long chunk gets contiguous
spare blocks. Contiguity never decides which cached blocks are evicted.
"""

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import xxhash

from nanovllm.kvcache.snapshots import Snapshots
from nanovllm.plan.sequence import Sequence, TokenIds
from nanovllm.utils.arithmetic import ceil_div

HASH_BYTES = 8


@dataclass(slots=True)
class Block:
    """A physical block. `token_ids` are the tokens that the index knows, in whole grains, with one hash per grain.

    If there are any, `prefix_ids` are the id of the prefix before the block, followed by the id of the prefix up to
    each grain's end.
    """

    block_id: int
    ref_count: int = 0
    token_ids: TokenIds = field(default_factory=lambda: array("q"))
    grain_hashes: list[int] = field(default_factory=list)
    prefix_ids: list[int] = field(default_factory=list)
    page: int = -1  # the block's page of the shadow, or -1
    sink: int = -1  # the place in the shadow of the block's first tokens in 16 bits, or -1
    tail_of: int = -1  # seq_id of a preempted sequence that can resume after the block's tokens, or -1

    @property
    def hash(self) -> int:
        """The chain hash of all tokens up to the last token in the index, or -1 if there are none."""
        return self.grain_hashes[-1] if self.grain_hashes else -1

    def forget(self) -> None:
        del self.token_ids[:]
        self.grain_hashes.clear()
        self.prefix_ids.clear()
        self.page = self.sink = self.tail_of = -1


@dataclass(frozen=True)
class PrefixMatch:
    """The matching blocks: whole blocks to share, then perhaps a block whose first tokens match.

    If hits need snapshots, a match ends at a snapshot.
    """

    full_blocks: tuple[int, ...] = ()
    partial_block: int | None = None
    num_partial_tokens: int = 0
    prefix_id: int | None = None  # id of the whole match, which has a snapshot
    # If hits need snapshots, also what matches after the last snapshot
    known_blocks: tuple[int, ...] = ()  # whole blocks
    num_known_tokens: int = 0

    @property
    def whole_blocks(self) -> tuple[int, ...]:
        """All whole blocks that match."""
        return self.known_blocks or self.full_blocks


class _Search(NamedTuple):
    """A search and its result, which is valid until one of `block_ids` changes or `next_hash` is registered."""

    seq: Sequence
    num_tokens: int
    match: PrefixMatch
    block_ids: frozenset[int]  # the matching blocks
    next_hash: int | None  # hash of the first grain that no block holds
    version: int  # the snapshots' version


class PrefixIndex:
    """Prefix -> the blocks that hold its last grain. Registering, dropping and matching take O(1) per grain.

    The unit of the index is the grain: `grain` consecutive tokens of a block. Without offload a grain is a block; with
    offload it is 256 tokens, so that a prompt can match the first part of a large block.

    Each known prefix, a whole number of grains long, has an id: two grains get the same id only if their tokens are
    equal and the prefixes before them have the same id. Ids are never reused. A prefix is forgotten with the last block
    that holds its last grain. If the prefix is recomputed, it gets a new id, so blocks that continued the old prefix
    are no longer found. A hit therefore proves that all tokens before it are equal.

    A hash only leads to candidate ids. Grains are hashed in a chain (xxh64 of the parent's hash and the token ids),
    which does not depend on the content of the index, so each sequence computes its hashes once.

    Several blocks can hold the same grain: a partial hit copies grains, and two sequences may compute the same tokens.
    The index knows all blocks that hold a grain, so it finds the grain for as long as one of them keeps it. A block
    holds its grains from its start without gaps. Hence a block that holds a grain also holds the earlier grains of the
    block, and the blocks that hold the last matching grain are exactly the blocks with the longest match.

    `hash_bytes`: any function to unsigned 8-byte integers. If many hashes collide, searches take longer.
    `snapshots`: where matches end, or None if a match may end after any grain.
    """

    def __init__(
        self,
        block_size: int,
        grain: int,
        *,
        hash_bytes: Callable[[bytes], int] = xxhash.xxh64_intdigest,
        snapshots: Snapshots | None = None,
    ) -> None:
        assert block_size % grain == 0, f"block size {block_size} is not a multiple of the grain {grain}"
        self.block_size, self.grain, self.snapshots = block_size, grain, snapshots
        self._hash_bytes = hash_bytes
        self._unused_ids = itertools.count()
        self._prefix_ids: dict[int, tuple[int, ...]] = {}  # by hash; several ids only if hashes collide
        self._newest: dict[int, Block] = {}  # by prefix id: the block that registered the grain last
        # All other blocks with the grain, oldest first; no entry if none
        self._older: dict[int, OrderedDict[int, Block]] = {}
        self._last_search: _Search | None = None

    def __len__(self) -> int:
        return len(self._newest)

    def grain_hash(self, seq: Sequence, grain_idx: int) -> int:
        """Return the hash of all tokens up to the end of a grain."""
        hashes = seq.grain_hashes  # computed on demand; they stay valid because token ids never change
        for i in range(len(hashes), grain_idx + 1):
            parent = hashes[i - 1] if i else seq.hash_salt % 2 ** (8 * HASH_BYTES)
            token_ids = seq.token_ids[i * self.grain : (i + 1) * self.grain]
            hashes.append(self._hash_bytes(parent.to_bytes(HASH_BYTES, "little") + token_ids.tobytes()))
        return hashes[grain_idx]

    def match(self, seq: Sequence) -> PrefixMatch:
        """Return the longest known prefix that leaves at least one token to compute.

        The last result is cached, because a sequence that waits for room is matched again in every step.
        """
        last = self._last_search
        if (
            last is None
            or last.seq is not seq
            or last.num_tokens != len(seq.token_ids)
            or last.next_hash in self._prefix_ids
            or last.version != self._version
        ):
            last = self._last_search = self._search(seq)
        return last.match

    @property
    def _version(self) -> int:
        return 0 if self.snapshots is None else self.snapshots.version

    def _search(self, seq: Sequence) -> _Search:
        """Match whole blocks from the start on, then the longest part of the next block.

        Among several blocks with the same grain, take the newest: it is the most likely to be in use and on the GPU.
        """
        num_known = (len(seq.token_ids) - 1) // self.grain * self.grain
        blocks: list[Block] = []
        start, prefix_id = 0, _root_id(seq)
        while (end := start + self.block_size) <= num_known:
            block = self._find(self.grain_hash(seq, end // self.grain - 1), prefix_id, seq.token_ids[start:end])
            if block is None:
                break
            blocks.append(block)
            start, prefix_id = end, block.prefix_ids[-1]
        match = PrefixMatch(tuple([block.block_id for block in blocks]))
        longest = min(start + self.block_size - self.grain, num_known)
        for end in range(longest, start, -self.grain):
            block = self._find(self.grain_hash(seq, end // self.grain - 1), prefix_id, seq.token_ids[start:end])
            if block is not None:
                blocks.append(block)
                match = PrefixMatch(match.full_blocks, block.block_id, end - start)
                break
        num_matched = start + match.num_partial_tokens
        next_hash = self.grain_hash(seq, num_matched // self.grain) if num_matched < num_known else None
        block_ids = frozenset(block.block_id for block in blocks)
        if self.snapshots is not None:
            last = self._last_with_snapshot(blocks, num_matched)
            match = replace(last, known_blocks=match.full_blocks, num_known_tokens=num_matched)
        return _Search(seq, len(seq.token_ids), match, block_ids, next_hash, self._version)

    def shorter(self, match: PrefixMatch, full_blocks: list[Block]) -> PrefixMatch:
        """Return the longest match within `full_blocks`."""
        if self.snapshots is None:
            return PrefixMatch(match.full_blocks)
        shorter = self._last_with_snapshot(full_blocks, len(full_blocks) * self.block_size)
        return replace(shorter, known_blocks=match.known_blocks, num_known_tokens=match.num_known_tokens)

    def _last_with_snapshot(self, blocks: Seq[Block], num_tokens: int) -> PrefixMatch:
        """Return the longest part of the `num_tokens` tokens in `blocks` that ends at a snapshot."""
        assert self.snapshots is not None, "a match may end anywhere"
        for end in range(num_tokens, 0, -self.grain):
            number, before = divmod(end - 1, self.block_size)
            prefix_id = blocks[number].prefix_ids[before // self.grain + 1]
            if prefix_id in self.snapshots:
                full, num_partial = divmod(end, self.block_size)
                partial = blocks[full].block_id if num_partial else None
                full_ids = tuple([block.block_id for block in blocks[:full]])
                return PrefixMatch(full_ids, partial, num_partial, prefix_id)
        return PrefixMatch()

    def _find(self, grain_hash: int, parent_id: int, token_ids: TokenIds, start: int = 0) -> Block | None:
        """Return the newest block that holds `token_ids` from its `start` on, after the prefix `parent_id`."""
        if grain_hash not in self._prefix_ids:
            return None
        end = start + len(token_ids)
        first, last = start // self.grain, end // self.grain
        for prefix_id in self._prefix_ids[grain_hash]:
            block = self._newest[prefix_id]
            ids, held = block.prefix_ids, block.token_ids
            if len(ids) <= last or ids[last] != prefix_id or ids[first] != parent_id:
                continue
            if (held if len(held) == len(token_ids) else held[start:end]) == token_ids:  # a slice is a copy
                return block
        return None

    def prefix_id(self, seq: Sequence, blocks: list[Block], num_tokens: int) -> int | None:
        """Return the id of a running sequence's first `num_tokens` tokens, a whole number of grains, if
        they are known.
        """
        number, before = divmod(num_tokens - 1, self.block_size)
        ids = blocks[seq.block_table[number]].prefix_ids
        grains = before // self.grain + 1
        return ids[grains] if grains < len(ids) else None

    def forget_search(self, seq: Sequence) -> None:
        """Drop the cached search if it was for `seq`, which no longer waits."""
        if self._last_search is not None and self._last_search.seq is seq:
            self._last_search = None

    def _invalidate_search(self, block: Block) -> None:
        """Drop the cached search if it examined this block."""
        if self._last_search is not None and block.block_id in self._last_search.block_ids:
            self._last_search = None

    def register(self, seq: Sequence, blocks: list[Block], end: int) -> None:
        """Add the sequence's whole grains up to token `end`. The blocks have their K/V, or will have it after this
        step.
        """
        first, last = seq.num_registered_tokens // self.grain, min(end, len(seq.token_ids)) // self.grain
        for grain_idx in range(first, last):
            start = grain_idx * self.grain
            block_idx, offset = divmod(start, self.block_size)
            block = blocks[seq.block_table[block_idx]]
            if len(block.token_ids) > offset:
                continue  # a shared block; the sequence that computed it has registered it
            if offset == 0:
                before = blocks[seq.block_table[block_idx - 1]].prefix_ids[-1] if block_idx else _root_id(seq)
                block.prefix_ids.append(before)
            self._add_grain(block, self.grain_hash(seq, grain_idx), seq.token_ids[start : start + self.grain])
        seq.num_registered_tokens = max(seq.num_registered_tokens, last * self.grain)

    def _add_grain(self, block: Block, grain_hash: int, token_ids: TokenIds) -> None:
        previous = self._find(grain_hash, block.prefix_ids[-1], token_ids, len(block.token_ids))
        if previous is None:
            prefix_id = next(self._unused_ids)
            self._prefix_ids[grain_hash] = (*self._prefix_ids.get(grain_hash, ()), prefix_id)
        else:
            prefix_id = previous.prefix_ids[len(block.prefix_ids)]
            self._older.setdefault(prefix_id, OrderedDict())[previous.block_id] = previous
            self._invalidate_search(previous)
        self._newest[prefix_id] = block
        block.token_ids.extend(token_ids)
        block.grain_hashes.append(grain_hash)
        block.prefix_ids.append(prefix_id)

    def drop(self, block: Block) -> None:
        """Forget the block's content. The grains are still found in other blocks that hold them."""
        for prefix_id, grain_hash in zip(block.prefix_ids[1:], block.grain_hashes, strict=True):
            self._remove_holder(prefix_id, grain_hash, block)
        block.forget()
        self._invalidate_search(block)

    def _remove_holder(self, prefix_id: int, grain_hash: int, block: Block) -> None:
        is_newest = self._newest[prefix_id] is block
        older = self._older.get(prefix_id)
        if older is None:
            assert is_newest, f"block {block.block_id} holds prefix {prefix_id}, but is not listed"
            del self._newest[prefix_id]
            self._forget_id(prefix_id, grain_hash)
            return
        if is_newest:
            _, self._newest[prefix_id] = older.popitem()
        else:
            del older[block.block_id]
        if not older:
            del self._older[prefix_id]

    def _forget_id(self, prefix_id: int, grain_hash: int) -> None:
        if self.snapshots is not None:
            self.snapshots.forget(prefix_id)
        ids = self._prefix_ids.pop(grain_hash)
        if len(ids) > 1:
            self._prefix_ids[grain_hash] = tuple(other for other in ids if other != prefix_id)

    def find_duplicate(self, block: Block) -> Block | None:
        """Return another block that holds all grains of `block`, or None."""
        if not block.grain_hashes:
            return None
        prefix_id = block.prefix_ids[-1]
        newest = self._newest[prefix_id]
        if newest is not block:
            return newest
        older = self._older.get(prefix_id)
        return next(reversed(older.values())) if older else None


def _root_id(seq: Sequence) -> int:
    """Return the id of the empty prefix: negative, so that it differs from all counted ids."""
    return ~seq.hash_salt


LONG_CHUNK_BLOCKS = 16  # a chunk of at least this many blocks gets contiguous spare blocks
SEARCHED_PER_BLOCK = 16  # spare blocks to examine for each block that a long chunk needs


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
        snapshots: Snapshots | None = None,
    ) -> None:
        self.blocks = blocks
        self.long_chunk_blocks = long_chunk_blocks
        self.index = PrefixIndex(block_size, grain, snapshots=snapshots)
        self.enable_prefix_caching = enable_prefix_caching
        # The free blocks: spare blocks, and blocks whose content a prompt could still match. In both, the block to
        # allocate next comes first. A plain dict would be slow: finding its first key has to skip every key that was
        # deleted before.
        self.versions: np.ndarray | None = None  # the number of allocations of each block, or None if it is not needed
        self.spare_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(len(blocks)))
        self.cached_ids: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self.spare_ids) + len(self.cached_ids)

    @property
    def next_free_block(self) -> Block:
        """Return the block that `allocate` would return."""
        assert self.num_free, "no free block; the caller must check num_free first"
        return self.blocks[next(iter(self.spare_ids or self.cached_ids))]

    def has_room_for(self, seq: Sequence, num_spare_blocks: int) -> bool:
        """Return True if a waiting sequence can have a block for each of its tokens, with `num_spare_blocks` left over.

        While no block is in use, nothing has to be left over.
        """
        match = self.match(seq)
        num_shared = sum(self.blocks[block_id].ref_count > 0 for block_id in match.full_blocks)
        num_needed = ceil_div(seq.num_tokens, self.index.block_size) - num_shared
        is_alone = self.num_free == len(self.blocks)
        if self.index.snapshots is not None and match.partial_block is not None and not is_alone:
            num_needed += self.blocks[match.partial_block].ref_count == 0  # without it, full blocks would not match
        return num_needed <= self.num_free - (0 if is_alone else num_spare_blocks)

    def choose_free_blocks(self, count: int) -> list[Block]:
        """Choose free blocks for a sequence that needs `count` more, in ascending order."""
        assert count <= self.num_free, f"{count} blocks needed, {self.num_free} free; the caller must check first"
        if self.long_chunk_blocks <= count < len(self.spare_ids):
            ids = self._choose_contiguous(count)
        else:
            ids = list(itertools.islice(itertools.chain(self.spare_ids, self.cached_ids), count))
        return [self.blocks[block_id] for block_id in sorted(ids)]

    def _choose_contiguous(self, count: int) -> list[int]:
        """Choose spare blocks from the longest contiguous ranges, so that few copies transfer the chunk."""
        # Search from the end: blocks that were never used are there, in long contiguous ranges.
        searched = itertools.islice(reversed(self.spare_ids), SEARCHED_PER_BLOCK * count)
        return list(itertools.islice(itertools.chain.from_iterable(contiguous_ranges(sorted(searched))), count))

    def match(self, seq: Sequence) -> PrefixMatch:
        return self.index.match(seq) if self.enable_prefix_caching and seq.can_use_prefix_cache else PrefixMatch()

    def usable_match(self, seq: Sequence) -> PrefixMatch:
        """Return the longest match that a sequence can use. If the sequence needs every free block, also the block
        whose first tokens match, it recomputes these tokens.
        """
        match = self.match(seq)
        while match.partial_block is not None and not self.blocks[match.partial_block].ref_count:
            num_free = self.num_free - sum(not self.blocks[i].ref_count for i in match.full_blocks)
            if num_free > ceil_div(seq.num_tokens, self.index.block_size) - len(match.full_blocks):
                break
            match = self.index.shorter(match, [self.blocks[block_id] for block_id in match.full_blocks])
        return match

    def prefix_id(self, seq: Sequence, num_tokens: int) -> int | None:
        return self.index.prefix_id(seq, self.blocks, num_tokens)

    def register(self, seq: Sequence, end: int) -> None:
        if self.enable_prefix_caching:
            self.index.register(seq, self.blocks, end)

    def allocate(self, block: Block | None = None) -> Block:
        """Allocate a free block, by default the next, and forget its old content."""
        block = block or self.next_free_block
        if self.versions is not None:
            self.versions[block.block_id] += 1
        self.index.drop(block)
        self.retain(block)
        return block

    def retain(self, block: Block) -> None:
        if block.ref_count == 0:
            owner = self.spare_ids if block.block_id in self.spare_ids else self.cached_ids
            del owner[block.block_id]
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Drop a reference. If it was the last reference, the block becomes free.

        A freed block becomes the most recently used free block, unless it is redundant. A redundant block is allocated
        next; if its duplicate is also free, the duplicate becomes the most recently used block.
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
        """Return True if losing the block's content loses nothing: every prompt that matches it matches
        another block.
        """
        if block.tail_of >= 0:
            return False
        return not block.grain_hashes or self.index.find_duplicate(block) is not None

    def discard(self, block: Block) -> None:
        """Forget the content of a free block, and make it the next to be allocated."""
        assert block.ref_count == 0, f"block {block.block_id} is discarded while it has {block.ref_count} references"
        self.index.drop(block)
        self._move_to_front(block)
