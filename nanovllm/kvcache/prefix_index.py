"""Blocks, their owners, and which of them hold the start of a new prompt.

BlockPool owns the blocks of one memory (GPU or CPU): free list, reference counts and the prefix index. A block with
references is never handed out; one without keeps its content and its hashes until it is, least recently used first.

The index counts in grains: a grain is `grain` tokens of a block, hashed in a chain over everything before it
(xxh64 of the parent's hash and the token ids), so one 64-bit number stands for a whole prefix. All-GPU a grain is a
block; with offload it is 256 tokens, so that a prompt can match the first part of a large block.
"""

from array import array
from dataclasses import dataclass, field

import xxhash

from nanovllm.engine.sequence import Sequence, TokenIds


@dataclass(slots=True)
class Block:
    """A physical block. `token_ids` are those the index knows (whole grains); `hash` is that of the last of them."""

    block_id: int
    ref_count: int = 0
    hash: int = -1
    token_ids: TokenIds = field(default_factory=lambda: array("q"))
    indexed_hashes: list[int] = field(default_factory=list)

    def forget(self) -> None:
        self.hash = -1
        del self.token_ids[:]
        self.indexed_hashes.clear()


@dataclass(frozen=True)
class PrefixMatch:
    """What the index found: whole blocks to share, then perhaps a block whose first tokens match."""

    full_blocks: tuple[int, ...] = ()
    partial_block: int | None = None
    num_partial_tokens: int = 0


class PrefixIndex:
    """Chain hash of each grain -> the block that holds it and where it ends there."""

    def __init__(self, block_size: int, grain: int) -> None:
        assert block_size % grain == 0, f"block size {block_size} is no multiple of the grain {grain}"
        self.block_size, self.grain = block_size, grain
        self._table: dict[int, tuple[Block, int]] = {}

    def __len__(self) -> int:
        return len(self._table)

    def _hash(self, seq: Sequence, grain_idx: int) -> int:
        hashes = seq.grain_hashes  # extended as far as asked for; token ids never change once known
        for i in range(len(hashes), grain_idx + 1):
            parent = hashes[i - 1] if i else seq.hash_salt
            token_ids = seq.token_ids[i * self.grain : (i + 1) * self.grain]
            hashes.append(xxhash.xxh64_intdigest(parent.to_bytes(8, "little") + token_ids.tobytes()))
        return hashes[grain_idx]

    def match(self, seq: Sequence) -> PrefixMatch:
        """The longest known prefix that leaves at least one token to compute. The first miss ends the search."""
        block: Block | None = None
        full_blocks: list[int] = []
        end = 0
        for grain_idx in range((len(seq.token_ids) - 1) // self.grain):
            found = self._table.get(self._hash(seq, grain_idx))
            start = grain_idx * self.grain
            if found is None or found[1] != start % self.block_size + self.grain:
                break
            if found[0].token_ids[found[1] - self.grain : found[1]] != seq.token_ids[start : start + self.grain]:
                break
            block, end = found
            if end == self.block_size:
                full_blocks.append(block.block_id)
                block, end = None, 0
        return PrefixMatch(tuple(full_blocks), block.block_id if block else None, end)

    def register(self, seq: Sequence, blocks: list[Block], end: int) -> None:
        """The K/V of tokens up to `end` are (or will be, in this step) in the sequence's blocks."""
        first, last = seq.num_registered_tokens // self.grain, min(end, len(seq.token_ids)) // self.grain
        for grain_idx in range(first, last):
            start = grain_idx * self.grain
            block = blocks[seq.block_table[start // self.block_size]]
            offset = start % self.block_size
            if len(block.token_ids) > offset:
                continue  # shared with the sequence that computed it
            block.hash = self._hash(seq, grain_idx)
            block.token_ids.extend(seq.token_ids[start : start + self.grain])
            if block.hash not in self._table:
                self._table[block.hash] = (block, offset + self.grain)
                block.indexed_hashes.append(block.hash)
        seq.num_registered_tokens = max(seq.num_registered_tokens, last * self.grain)

    def drop(self, block: Block) -> None:
        for grain_hash in block.indexed_hashes:
            del self._table[grain_hash]
        block.forget()

    def check_integrity(self, blocks: list[Block]) -> None:
        assert len(self._table) == sum(len(b.indexed_hashes) for b in blocks), "index and blocks disagree"
        for grain_hash, (block, end) in self._table.items():
            assert grain_hash in block.indexed_hashes, f"block {block.block_id} does not own hash {grain_hash:x}"
            assert len(block.token_ids) >= end, f"block {block.block_id} holds fewer than {end} indexed tokens"


class BlockPool:
    """The blocks of one memory. `free_ids` is ordered: the next to be handed out first."""

    def __init__(self, blocks: list[Block], block_size: int, grain: int, enable_prefix_caching: bool) -> None:
        self.blocks = blocks
        self.index = PrefixIndex(block_size, grain)
        self.enable_prefix_caching = enable_prefix_caching
        self.free_ids: dict[int, None] = dict.fromkeys(range(len(blocks)))

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    def match(self, seq: Sequence) -> PrefixMatch:
        return self.index.match(seq) if self.enable_prefix_caching else PrefixMatch()

    def register(self, seq: Sequence, end: int) -> None:
        if self.enable_prefix_caching:
            self.index.register(seq, self.blocks, end)

    def take(self) -> Block:
        """A block for new content, the least recently used free one. Its old content is forgotten."""
        assert self.free_ids, "no free block; the caller did not ask first"
        block = self.blocks[next(iter(self.free_ids))]
        self.index.drop(block)
        self.retain(block)
        return block

    def retain(self, block: Block) -> None:
        if block.ref_count == 0:
            del self.free_ids[block.block_id]
        block.ref_count += 1

    def release(self, block: Block) -> None:
        assert block.ref_count > 0, f"block {block.block_id} released more often than retained"
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_ids[block.block_id] = None

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
            assert (block.ref_count == 0) == (block.block_id in self.free_ids), f"block {block.block_id} lost or shared"
        self.index.check_integrity(self.blocks)
