"""KV on disk in plain data: how a piece of a prompt is named, and what moves between disk and memory.

The unit is the extent: K and V of DISK_GRAIN_TOKENS consecutive tokens, in all layers of a rank. Its key is a
cryptographic hash of the cache salt and of all tokens up to its last one, so equal keys mean equal prefixes. The size
of blocks plays no part: engines with other blocks, with and without offload, share extents.

Recurrent layers have a state instead, which is one more kind of extent. It is named by the tokens that it has seen: its
key is that of the extent of K and V that ends there, but for the last byte, which tells the kind.
"""

from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import NamedTuple

from nanovllm.config import BLOCK_SIZE_STEP
from nanovllm.plan.kv_spec import SNAPSHOT_TOKENS
from nanovllm.utils.arithmetic import ceil_div

DISK_GRAIN_TOKENS = BLOCK_SIZE_STEP  # every size of block is a multiple
NUM_READERS = 4  # extents that a rank reads at once: while some wait for the disk, others are checked
DISK_HEADER_BYTES = 4096  # at the start of an extent's file, before K and V
KEY_BYTES = 21  # a hash, and the kind
_KV, _STATE = b"\0", b"\1"
LATER_S = 1e-6  # added to the age of an extent for each extent before it


def root_key(salt: int) -> bytes:
    """The key of the empty prefix."""
    return blake2b(b"nanovllm prefix %d" % salt, digest_size=KEY_BYTES - 1).digest() + _KV


def next_key(parent: bytes, token_ids: bytes) -> bytes:
    """The key of the prefix that ends with these tokens, int64, and that has `parent` before them."""
    return blake2b(parent + token_ids, digest_size=KEY_BYTES - 1).digest() + _KV


def state_key(key: bytes) -> bytes:
    """The key of the state after the prefix with this key."""
    return key[:-1] + _STATE


def prefix_key(key: bytes) -> bytes:
    """The key of the prefix after which there is the state with this key."""
    return key[:-1] + _KV


def is_state_key(key: bytes) -> bool:
    return key.endswith(_STATE)


class Extent(NamedTuple):
    """An extent, and its place in memory: the tokens from `start` on of a block.

    `used_s` is the time of its last use, by time.time. That of a prompt's first extent is the latest, because the
    others are of no use without it. The block is one in CPU memory with offload, and one on the GPU without. `version`
    is the block's number of allocations. A block that has been allocated again holds, or will soon hold, other tokens.

    A state has the parent and the tokens of the extent that ends where it is. Its place is a snapshot, whose number is
    counted on behind the blocks: `block_id` is the number of blocks plus that of the snapshot.
    """

    key: bytes
    parent: bytes  # the key of the prefix before it
    token_ids: bytes
    used_s: float
    block_id: int
    start: int
    version: int

    @property
    def is_state(self) -> bool:
        return is_state_key(self.key)


def num_document_states(num_tokens: int, grain: int = DISK_GRAIN_TOKENS) -> int:
    """Count the states that a document leaves: on its way, and at the last whole `grain` before its last token."""
    return ceil_div(max(0, num_tokens - 1) // grain * grain, ceil_div(SNAPSHOT_TOKENS, grain) * grain)


def document_disk_bytes(num_tokens: int, token_bytes: int, state_bytes: int = 0, grain: int = DISK_GRAIN_TOKENS) -> int:
    """The size of a document's files, with so many bytes of K and V a token. Its last tokens make no extent.

    `state_bytes`: size of a state; 0 if no layer is recurrent. Otherwise nothing is kept behind the last state.
    """
    num_states = 0
    if state_bytes:
        num_tokens, num_states = max(0, num_tokens - 1) // grain * grain, num_document_states(num_tokens, grain)
    num_extents = num_tokens // DISK_GRAIN_TOKENS
    kv_bytes = num_extents * DISK_GRAIN_TOKENS * token_bytes
    return kv_bytes + num_states * state_bytes + (num_extents + num_states) * DISK_HEADER_BYTES


class DiskMoves(NamedTuple):
    """Extents to write, and perhaps one load: extents to read, one after the other, until one is missing.

    Moves are numbered from 1. A load's number is one more than that of the load before it.
    """

    number: int
    stores: Seq[Extent] = ()
    loads: Seq[Extent] = ()
    load_number: int = 0


class DiskSetup(NamedTuple):
    """Parameters with which a rank opens the cache."""

    path: str
    model: str  # its name, for people
    limit_bytes: int  # limit of everything below the path
    board: str  # the address of the DiskBoard
    num_places: int  # blocks and snapshots
