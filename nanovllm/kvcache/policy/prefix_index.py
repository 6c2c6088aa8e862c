"""PrefixIndex: which blocks hold the start of a new prompt.

The unit of the index is the grain: `grain` consecutive tokens of a block. Grains are hashed in a chain (xxh64 of the
parent's hash and the token ids), so one 64-bit number identifies a whole prefix. Without offload a grain is a block;
with offload it is 256 tokens, so that a prompt can match the first part of a large block.

Several blocks can hold the same grain: a partial hit copies grains, and two sequences may compute the same tokens. The
index knows all holders, so it finds a grain for as long as any of them keeps it. A block holds its grains from its
start without gaps. Hence a block that holds a grain also holds the grains before it in the block, and the holders of
the last matching grain are exactly the blocks with the longest match.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from nanovllm.core.sequence import Sequence, TokenIds


@dataclass(slots=True)
class Block:
    """A physical block. `token_ids` are its tokens that the index knows, in whole grains, with one hash per grain."""

    block_id: int
    ref_count: int = 0
    token_ids: TokenIds = field(default_factory=lambda: array("q"))
    grain_hashes: list[int] = field(default_factory=list)

    @property
    def hash(self) -> int:
        """The chain hash of all tokens up to the last one in the index, -1 if there are none."""
        return self.grain_hashes[-1] if self.grain_hashes else -1

    def forget(self) -> None:
        del self.token_ids[:]
        self.grain_hashes.clear()


@dataclass(frozen=True)
class PrefixMatch:
    """The matching blocks: whole ones to share, then perhaps one whose first tokens match."""

    full_blocks: tuple[int, ...] = ()
    partial_block: int | None = None
    num_partial_tokens: int = 0


class _Search(NamedTuple):
    """A search and its result, which is valid until one of `block_ids` changes or `next_hash` is registered."""

    seq: Sequence
    num_tokens: int
    match: PrefixMatch
    block_ids: frozenset[int]  # the blocks that the search examined
    next_hash: int | None  # hash of the first grain that no block holds


class PrefixIndex:
    """Chain hash of a grain -> the blocks that hold it. Registering, dropping and matching take O(1) per grain."""

    def __init__(self, block_size: int, grain: int) -> None:
        assert block_size % grain == 0, f"block size {block_size} is not a multiple of the grain {grain}"
        self.block_size, self.grain = block_size, grain
        self._newest: dict[int, Block] = {}  # the holder that registered the grain last
        self._older: dict[int, OrderedDict[int, Block]] = {}  # all other holders, oldest first; no entry if none
        self._last_search: _Search | None = None

    def __len__(self) -> int:
        return len(self._newest)

    def _hash(self, seq: Sequence, grain_idx: int) -> int:
        hashes = seq.grain_hashes  # computed on demand; they stay valid because token ids never change
        for i in range(len(hashes), grain_idx + 1):
            parent = hashes[i - 1] if i else seq.hash_salt
            token_ids = seq.token_ids[i * self.grain : (i + 1) * self.grain]
            hashes.append(xxhash.xxh64_intdigest(parent.to_bytes(8, "little") + token_ids.tobytes()))
        return hashes[grain_idx]

    def match(self, seq: Sequence) -> PrefixMatch:
        """The longest known prefix that leaves at least one token to compute.

        The last result is cached, because a sequence that waits for room is matched again in every step.
        """
        last = self._last_search
        if (
            last is None
            or last.seq is not seq
            or last.num_tokens != len(seq.token_ids)
            or last.next_hash in self._newest
        ):
            last = self._last_search = self._search(seq)
        return last.match

    def _search(self, seq: Sequence) -> _Search:
        """Walk the chain to the first grain that nobody holds; for each block take the newest holder of its last grain.

        The newest holder is the one most likely to be in use and on the GPU.
        """
        num_grains = (len(seq.token_ids) - 1) // self.grain
        known_end, next_hash = num_grains * self.grain, None
        for grain_idx in range(num_grains):
            grain_hash = self._hash(seq, grain_idx)
            if grain_hash not in self._newest:
                known_end, next_hash = grain_idx * self.grain, grain_hash
                break
        block_ids: list[int] = []
        num_matched = 0
        for start in range(0, known_end, self.block_size):
            end = min(start + self.block_size, known_end)
            block = self._newest[self._hash(seq, end // self.grain - 1)]
            block_ids.append(block.block_id)
            if block.token_ids[: end - start] != seq.token_ids[start:end]:
                break  # a hash collision: the tokens differ
            num_matched = end
        num_full, num_partial_tokens = divmod(num_matched, self.block_size)
        partial_block = block_ids[num_full] if num_partial_tokens else None
        match = PrefixMatch(tuple(block_ids[:num_full]), partial_block, num_partial_tokens)
        return _Search(seq, len(seq.token_ids), match, frozenset(block_ids), next_hash)

    def _invalidate_search(self, block: Block) -> None:
        """Drop the cached search if it examined this block."""
        if self._last_search is not None and block.block_id in self._last_search.block_ids:
            self._last_search = None

    def register(self, seq: Sequence, blocks: list[Block], end: int) -> None:
        """Add the sequence's whole grains up to token `end`. Its blocks have their K/V, or will after this step."""
        first, last = seq.num_registered_tokens // self.grain, min(end, len(seq.token_ids)) // self.grain
        for grain_idx in range(first, last):
            start = grain_idx * self.grain
            block = blocks[seq.block_table[start // self.block_size]]
            if len(block.token_ids) > start % self.block_size:
                continue  # a shared block; the sequence that computed it has registered it
            block.token_ids.extend(seq.token_ids[start : start + self.grain])
            block.grain_hashes.append(self._hash(seq, grain_idx))
            self._add_holder(block.grain_hashes[-1], block)
        seq.num_registered_tokens = max(seq.num_registered_tokens, last * self.grain)

    def _add_holder(self, grain_hash: int, block: Block) -> None:
        previous = self._newest.get(grain_hash)
        if previous is not None:
            self._older.setdefault(grain_hash, OrderedDict())[previous.block_id] = previous
            self._invalidate_search(previous)
        self._newest[grain_hash] = block

    def drop(self, block: Block) -> None:
        """Forget the block's content. Its grains are still found in other blocks that hold them."""
        for grain_hash in block.grain_hashes:
            self._remove_holder(grain_hash, block)
        block.forget()
        self._invalidate_search(block)

    def _remove_holder(self, grain_hash: int, block: Block) -> None:
        is_newest = self._newest.get(grain_hash) is block
        older = self._older.get(grain_hash)
        if older is None:
            if is_newest:
                del self._newest[grain_hash]
            return
        if is_newest:
            _, self._newest[grain_hash] = older.popitem()
        else:
            older.pop(block.block_id, None)  # absent only if two grains of one block have the same hash
        if not older:
            del self._older[grain_hash]

    def find_duplicate(self, block: Block) -> Block | None:
        """Another block that holds all grains of `block`, if there is one."""
        if not block.grain_hashes:
            return None
        last_hash = block.grain_hashes[-1]
        newest = self._newest[last_hash]
        if newest is not block:
            return newest
        older = self._older.get(last_hash)
        return next(reversed(older.values())) if older else None

    def check_integrity(self, blocks: list[Block]) -> None:
        """Assert that the index lists every grain of every block with all its holders, and nothing else."""
        held: dict[int, set[int]] = {}
        for block in blocks:
            num_tokens, num_hashes = len(block.token_ids), len(block.grain_hashes)
            assert num_tokens == num_hashes * self.grain, f"block {block.block_id}: {num_hashes} hashes, {num_tokens=}"
            for grain_hash in block.grain_hashes:
                held.setdefault(grain_hash, set()).add(block.block_id)
        known = {grain_hash: {block.block_id} for grain_hash, block in self._newest.items()}
        for grain_hash, older in self._older.items():
            assert older, f"hash {grain_hash:x} has an empty list of older holders"
            holders = known.setdefault(grain_hash, set())
            assert holders.isdisjoint(older), f"a holder of hash {grain_hash:x} is listed twice"
            holders.update(older)
        assert known == held, "the index does not match the blocks"
        last = self._last_search
        if last is not None and last.num_tokens == len(last.seq.token_ids) and last.next_hash not in self._newest:
            assert self._search(last.seq) == last, f"sequence {last.seq.seq_id} would no longer match what is cached"
