"""KV on disk in plain data: how a piece of a prompt is named, and what moves between disk and memory.

The unit is the extent: K and V of DISK_GRAIN_TOKENS consecutive tokens, in all layers of a rank. Its key is a
cryptographic hash of the cache salt and of all tokens up to its last one, so equal keys mean equal prefixes. The size
of blocks plays no part: engines with other blocks, with and without offload, share extents.
"""

from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import NamedTuple

from nanovllm.config import BLOCK_SIZE_STEP
from nanovllm.core.sequence import Sequence

DISK_GRAIN_TOKENS = BLOCK_SIZE_STEP  # every size of block is a multiple
KEY_BYTES = 20


LATER_S = 1e-6  # how much older than the extent before it an extent counts


def root_key(salt: int) -> bytes:
    """The key of the empty prefix."""
    return blake2b(b"nanovllm prefix %d" % salt, digest_size=KEY_BYTES).digest()


def extent_tokens(seq: Sequence, extent_idx: int) -> bytes:
    """The token ids of an extent, int64."""
    start = extent_idx * DISK_GRAIN_TOKENS
    return seq.token_ids[start : start + DISK_GRAIN_TOKENS].tobytes()


def extent_key(seq: Sequence, extent_idx: int) -> bytes:
    """The key of a whole extent of a sequence. Each is computed once and kept in the sequence."""
    keys = seq.disk_keys
    for i in range(len(keys), extent_idx + 1):
        parent = keys[i - 1] if i else root_key(seq.hash_salt)
        keys.append(blake2b(parent + extent_tokens(seq, i), digest_size=KEY_BYTES).digest())
    return keys[extent_idx]


def parent_key(seq: Sequence, extent_idx: int) -> bytes:
    """The key of the prefix before an extent."""
    return extent_key(seq, extent_idx - 1) if extent_idx else root_key(seq.hash_salt)


class Extent(NamedTuple):
    """An extent, and its place in memory: the tokens from `start` on of a block.

    `used_s` is the time of its last use, by time.time. That of a prompt's first extent is the latest, because the
    others are of no use without it. The block is one in CPU memory with offload, and one on the GPU without. `version`
    is the block's number of allocations. A block that has been allocated again holds, or will soon hold, other tokens.
    """

    key: bytes
    parent: bytes  # the key of the prefix before it
    token_ids: bytes
    used_s: float
    block_id: int
    start: int
    version: int


def make_extent(seq: Sequence, extent_idx: int, used_s: float, block_id: int, start: int, version: int) -> Extent:
    key, parent = extent_key(seq, extent_idx), parent_key(seq, extent_idx)
    used_s -= extent_idx * LATER_S
    return Extent(key, parent, extent_tokens(seq, extent_idx), used_s, block_id, start, version)


class DiskMoves(NamedTuple):
    """Extents to write, and perhaps one load: extents to read, one after the other, until one is missing.

    A load's number is one more than that of the load before it.
    """

    stores: Seq[Extent] = ()
    loads: Seq[Extent] = ()
    load_number: int = 0


class DiskSetup(NamedTuple):
    """What a rank needs to open the cache."""

    path: str
    model: str  # its name, for people
    limit_bytes: int  # of all that is below the path
    board: str  # the address of the DiskBoard
    num_blocks: int
