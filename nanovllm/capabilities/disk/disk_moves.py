"""KV on disk in plain data: how a piece of a prompt is named, and what moves between disk and memory.

The unit is the extent: K and V of DISK_GRAIN_TOKENS consecutive tokens, in all layers of a rank. Its key is a
cryptographic hash of the cache salt and of all tokens up to its last one, so equal keys mean equal prefixes. The key
does not depend on the block size: engines with other blocks, with and without offload, share extents. So an extent has
256 tokens, and prefix hits are counted in the same unit.

The state of the recurrent layers after a prefix is another kind of extent. Its key is the key of the extent of K and V
that ends there, except for the last byte, which tells the kind.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import NamedTuple

from nanovllm.config import BLOCK_SIZE_STEP
from nanovllm.plan.kv_spec import SNAPSHOT_TOKENS
from nanovllm.utils.arithmetic import ceil_div

DISK_GRAIN_TOKENS = BLOCK_SIZE_STEP  # every size of block is a multiple
NUM_READERS = 4  # extents that a rank reads at once: some wait for the disk while others are checked
DISK_HEADER_BYTES = 4096  # at the start of an extent's file, before K and V
KEY_BYTES = 21  # a hash, and the kind
_KV, _STATE = b"\0", b"\1"
PAUSE_S = 60.0  # without writing after the disk was full or failed, and without loading after it hung
LATER_S = 1e-6  # each extent of a prompt counts as used this much earlier than the extent before it


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
    """An extent, and its place in memory: `start` is its first token's offset in the block.

    Places are numbered: the blocks (of CPU memory with offload, otherwise of the GPU), then the snapshots of states.
    `version` counts the allocations of the place. A place that has been allocated again holds, or will soon hold,
    other tokens.

    `used_s` is the time of last use, by time.time. The first extent of a prompt has the latest, because the others
    cannot be used without it. A state has the parent and the tokens of the extent that ends where the state is.
    """

    key: bytes
    parent: bytes  # the key of the prefix before it
    token_ids: bytes
    used_s: float
    place: int
    start: int
    version: int

    @property
    def is_state(self) -> bool:
        return is_state_key(self.key)


class DiskMoves(NamedTuple):
    """Extents to write, and perhaps a load: extents to read, which are of use only together.

    The number of a load is one more than the number of the load before it.
    """

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


class DiskRates(NamedTuple):
    """The speed of computing and of reading, as the slowest rank has measured it at the start."""

    num_tokens: int  # of the prompt that was computed
    prompt_s: float  # time to compute the prompt
    read_byte_per_s: float  # of one rank; 0 if nothing could be read


# -- arithmetic ------------------------------------------------------------------------------------------------------


def least_load_tokens(
    rates: DiskRates, flop: Callable[[int], float], token_bytes: int, state_bytes: int, most_tokens: int
) -> int:
    """Return the length from which on the beginning of a prompt is read from disk sooner than it is computed.

    `flop`: operations of a prompt of that many tokens. `token_bytes`, `state_bytes`: size of K and V of a token, and of
    a state, on one rank. Returns 0 if the rate of reading is unknown, and more than `most_tokens` if computing is
    always faster.
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

    `token_bytes`: K and V of a token. `state_bytes`: size of a state; 0 if no layer is recurrent. If layers are
    recurrent, tokens after the last state are not stored.
    """
    num_states = 0
    if state_bytes:
        num_tokens, num_states = max(0, num_tokens - 1) // grain * grain, num_document_states(num_tokens, grain)
    num_extents = num_tokens // DISK_GRAIN_TOKENS
    kv_bytes = num_extents * DISK_GRAIN_TOKENS * token_bytes
    return kv_bytes + num_states * state_bytes + (num_extents + num_states) * DISK_HEADER_BYTES
