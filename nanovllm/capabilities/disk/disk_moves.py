"""KV on disk in plain data: the keys of extents, and the moves of extents between disk and memory.

An extent holds K and V of DISK_GRAIN_TOKENS consecutive tokens, in all layers of a rank. The key of an extent is a
cryptographic hash of the cache salt and of all tokens up to the extent's end, so equal keys mean equal prefixes.
Engines with different block sizes, with and without offload, share extents. For this reason an extent has 256 tokens,
which divides every block size, and a key does not depend on the block size.

The state of a sequence after a prefix, of its recurrent layers or the keys in its windows, is another kind of extent.
Its key is the key of the last K and V extent of the prefix, except for the last byte, which encodes the kind.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import NamedTuple

from nanovllm.config import BLOCK_SIZE_STEP
from nanovllm.plan.kv_spec import SNAPSHOT_TOKENS
from nanovllm.utils.arithmetic import ceil_div

DISK_GRAIN_TOKENS = BLOCK_SIZE_STEP  # every block size is a multiple of it
NUM_READERS = 4  # extents that a rank reads concurrently: some wait for the disk while others are checked
DISK_HEADER_BYTES = 4096  # at the start of an extent's file, before K and V
KEY_BYTES = 21  # a hash of 20 bytes, and a byte for the kind
_KV, _STATE = b"\0", b"\1"
PAUSE_S = 60.0  # writing pauses this long after the disk was full or failed, and loading after the disk hung
LATER_S = 1e-6  # the recorded time of use of each extent of a prompt is earlier by this than its predecessor's


def root_key(salt: int) -> bytes:
    """Return the key of the empty prefix."""
    return blake2b(b"nanovllm prefix %d" % salt, digest_size=KEY_BYTES - 1).digest() + _KV


def next_key(parent: bytes, token_ids: bytes) -> bytes:
    """Return the key of the prefix that continues the prefix with key `parent` by these tokens. token_ids: int64."""
    return blake2b(parent + token_ids, digest_size=KEY_BYTES - 1).digest() + _KV


def state_key(key: bytes) -> bytes:
    """Return the key of the state after the prefix with this key."""
    return key[:-1] + _STATE


def prefix_key(key: bytes) -> bytes:
    """Return the key of the prefix that ends at the state with this key."""
    return key[:-1] + _KV


def is_state_key(key: bytes) -> bool:
    return key.endswith(_STATE)


class Extent(NamedTuple):
    """An extent, and its place in memory.

    A place is a block or a snapshot of a state. Places are numbered: first the blocks (of CPU memory with offload,
    otherwise of the GPU), then the snapshots. `version` counts the allocations of the place. If a place has been
    allocated again, it holds, or will soon hold, other tokens.

    `used_s` is the time of last use, by time.time. The first extent of a prompt has the latest time, because later
    extents cannot be used without the first one. A state extent has the same parent and tokens as the K and V extent
    that ends at the state.
    """

    key: bytes
    parent: bytes  # the key of the prefix before the extent
    token_ids: bytes
    used_s: float
    place: int
    start: int  # offset of the extent's first token in the block
    version: int

    @property
    def is_state(self) -> bool:
        return is_state_key(self.key)


class DiskMoves(NamedTuple):
    """Extents to write, and perhaps a load. A load is a list of extents to read that are useful only together.

    Loads are numbered consecutively.
    """

    stores: Seq[Extent] = ()
    loads: Seq[Extent] = ()
    load_number: int = 0


class DiskSetup(NamedTuple):
    """Parameters with which a rank opens the cache."""

    path: str
    model: str  # the model's name, for people
    limit_bytes: int  # limit on the size of all files below the path
    board: str  # the address of the DiskBoard
    num_places: int  # number of blocks and snapshots


class DiskRates(NamedTuple):
    """The speed of computing and of reading, measured at start-up on the slowest rank."""

    num_tokens: int  # length of the prompt that was computed
    prompt_s: float  # time to compute the prompt
    read_byte_per_s: float  # per rank, or 0 if no extent could be read


# -- arithmetic ------------------------------------------------------------------------------------------------------


def least_load_tokens(
    rates: DiskRates, flop: Callable[[int], float], token_bytes: int, state_bytes: int, most_tokens: int
) -> int:
    """Return the length of the shortest prefix that reading from disk provides sooner than computing.

    flop: returns the floating-point operations of computing a prompt of the given number of tokens. token_bytes: size
    of the K and V of a token on one rank. state_bytes: size of a state on one rank. Returns 0 if the rate of reading is
    unknown, and more than `most_tokens` if computing is always faster.
    """
    if not rates.read_byte_per_s:
        return 0
    flop_per_s = flop(rates.num_tokens) / rates.prompt_s
    for num_tokens in range(DISK_GRAIN_TOKENS, most_tokens + 1, DISK_GRAIN_TOKENS):
        load_s = (num_tokens * token_bytes + state_bytes) / rates.read_byte_per_s
        if load_s < flop(num_tokens) / flop_per_s:
            return num_tokens
    return most_tokens + 1


def num_document_states(num_tokens: int, grain: int = DISK_GRAIN_TOKENS) -> int:
    """Count the states of a document: one every SNAPSHOT_TOKENS, and one at the last whole `grain` before its end."""
    return ceil_div(max(0, num_tokens - 1) // grain * grain, ceil_div(SNAPSHOT_TOKENS, grain) * grain)


def document_disk_bytes(num_tokens: int, token_bytes: int, state_bytes: int = 0, grain: int = DISK_GRAIN_TOKENS) -> int:
    """Return the size of a document's files. Tokens that do not fill an extent are not stored.

    token_bytes: size of the K and V of a token. state_bytes: size of a state, or 0 if sequences have no states. If they
    have, tokens after the last state are not stored.
    """
    num_states = 0
    if state_bytes:
        num_tokens, num_states = max(0, num_tokens - 1) // grain * grain, num_document_states(num_tokens, grain)
    num_extents = num_tokens // DISK_GRAIN_TOKENS
    kv_bytes = num_extents * DISK_GRAIN_TOKENS * token_bytes
    return kv_bytes + num_states * state_bytes + (num_extents + num_states) * DISK_HEADER_BYTES
