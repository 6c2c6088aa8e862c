"""DiskTier: decides which prefixes are written to disk, and which are loaded from it.

The tier runs on rank 0 in the engine's thread, and works on integers and keys only. The DiskWorkers of all ranks move
the bytes (worker.py). What always holds:
- A prompt is written once it has been computed, and an answer when it ends. With recurrent layers only the extents
  before the last state are written, because a prefix hit ends at a state.
- A load fills free blocks, which then enter the prefix index like the blocks of a prompt that was computed. The
  sequence waits for its load and is then admitted with a hit. Other sequences run meanwhile.
- A load succeeds as a whole or not at all. If an extent is missing or damaged, the next load ends before it.
- The blocks of a load belong to a holder, a sequence that never runs, until every rank has ended the load. A rank ends
  a cancelled load at once, even if its disk hangs, because it reads files into separate buffers.
- A store reads its block while the block may be given to another sequence. Each allocation of a block raises the
  block's version. An extent whose block has another version once it has been read is dropped. So nothing ever waits
  for a store.
- Start-up decides from which length on a prefix is loaded (`least_load_tokens`). A disk that hangs later delays one
  sequence for STALL_S; after the delay nothing is loaded for PAUSE_S.
"""

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np

from nanovllm.capabilities.disk.disk_moves import (
    DISK_GRAIN_TOKENS,
    LATER_S,
    PAUSE_S,
    DiskMoves,
    Extent,
    next_key,
    root_key,
    state_key,
)
from nanovllm.kvcache.block_manager import KVCacheManager
from nanovllm.plan.sequence import Sequence, SequenceStatus
from nanovllm.schedule.prompt_store import PromptStore

STALL_S = 10.0  # a load is cancelled if no extent arrives for this time
_RANK_CELLS = 4  # see DiskBoard


class DiskBoard:
    """Numbers that rank 0's engine thread and the disk threads of all ranks share: an array of int64.

    Reading and writing the board waits for nothing, and each cell has one writer. A rank writes `num_loaded` and
    `missing` before `ended_load`. The board is a file without a name, so that no process can leave it over. All ranks
    open it by rank 0's descriptor in /proc.
    """

    def __init__(self, num_ranks: int, num_places: int, address: str = "") -> None:
        """`num_places`: blocks and snapshots. `address`: of the board to open; by default, a new one is made."""
        self.address, self._fd = address, -1
        size = 1 + num_ranks * _RANK_CELLS + num_places
        if not address:
            self._fd = os.memfd_create("nanovllm-disk")
            os.ftruncate(self._fd, size * 8)
            self.address = f"/proc/{os.getpid()}/fd/{self._fd}"
        with open(self.address, "r+b") as file:
            cells = np.frombuffer(mmap.mmap(file.fileno(), size * 8), dtype=np.int64)
        self.cancelled_load = cells[:1]  # number of the newest load that is cancelled
        # By rank: extents loaded of the newest load, one of its extents that is missing or -1, the newest load after
        # which nothing more is copied, and extents that were written or dropped since the start.
        ranks = cells[1 : 1 + num_ranks * _RANK_CELLS].reshape(num_ranks, _RANK_CELLS)
        self.num_loaded, self.missing, self.ended_load, self.num_stored = ranks.T
        self.versions = cells[1 + num_ranks * _RANK_CELLS :]  # by place

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(slots=True)
class _PrefixLoad:
    number: int
    seq: Sequence | None  # None once it is cancelled
    holder: Sequence  # owns the blocks
    start: int  # the first token to read; `end` if only the state is read
    end: int
    keys: tuple[bytes, ...]  # of what is loaded
    snapshot: int  # for the state; -1 if no layer is recurrent
    num_loaded: int  # extents, when the tier last looked
    arrived_s: float  # when the newest extent arrived, or when the load began


class DiskTier(PromptStore):
    def __init__(
        self,
        keys: Container[bytes],
        kv: KVCacheManager,
        board: DiskBoard,
        *,
        least_load_tokens: int = 0,
        grain: int = DISK_GRAIN_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys`: the extents on disk that rank 0 knows. `least_load_tokens`: shorter prefixes are not loaded.
        `grain`: tokens of an extent. Starts to count the versions of `kv`'s blocks and snapshots.
        """
        self.keys, self.kv, self.board = keys, kv, board
        self.least_load_tokens, self.grain, self._clock = least_load_tokens, grain, clock
        self._snapshots = kv.pool.index.snapshots
        kv.pool.versions = board.versions[: len(kv.pool.blocks)]
        if self._snapshots is not None:
            self._snapshots.versions = board.versions[len(kv.pool.blocks) :]
        self._waiting: deque[Sequence] = deque()  # for a load to begin
        self._load: _PrefixLoad | None = None  # the one that the ranks work on
        self._ready: list[Sequence] = []  # sequences that no longer wait for a load
        self._epoch_s = time.time() - time.perf_counter()  # start of the clock by which sequences arrive
        self._paused_until_s = 0.0  # by the clock
        self._num_loads = self._num_stores = 0
        self._stores: list[Extent] = []
        self._lost: set[bytes] = set()  # keys that a rank found missing, and that were not stored again since
        self.num_loaded_tokens = self.num_loaded_states = self.num_cancelled_loads = 0

    # -- what the scheduler calls --------------------------------------------------------------------------------

    def wait_for_load(self, seq: Sequence) -> bool:
        """Begin to wait for a load if the disk has more of a prompt than memory. Otherwise return False."""
        if self._is_paused or not seq.can_use_prefix_cache or self._find(seq) is None:
            return False
        self._waiting.append(seq)
        return True

    def take_ready(self) -> list[Sequence]:
        """Return the sequences whose loads have ended, and that have not been returned before."""
        ready, self._ready = self._ready, []
        return ready

    def forget(self, seq: Sequence) -> bool:
        """Drop a sequence that was aborted. Returns True if it was here."""
        if self._load is not None and self._load.seq is seq:
            self._load.seq, self.board.cancelled_load[0] = None, self._load.number
            return True
        for queue in (self._waiting, self._ready):
            if seq in queue:
                queue.remove(seq)
                return True
        return False

    def may_overtake(self, seq: Sequence) -> bool:
        """Return False if an older sequence waits for blocks to load into: no other sequence may take them first."""
        return self._load is not None or not self._waiting or seq.seq_id < self._waiting[0].seq_id

    def store(self, seq: Sequence) -> None:
        """Store what a running sequence has computed: its prompt, when the first token after it has arrived, and the
        rest when the sequence ends.

        Extents that are on disk are submitted, too, because other ranks may lack them, and to record their use. Prompts
        that are scored are not stored, because they would not be read either.
        """
        if seq.status is not SequenceStatus.RUNNING or not seq.can_use_prefix_cache:
            return
        first, last = seq.num_submitted_tokens, min(seq.num_computed_tokens, len(seq.token_ids))
        if self._snapshots is not None:
            grain = self.kv.pool.index.grain
            last = last // grain * grain
            while last > first and self._snapshot(seq, last) is None and not self._has_state(seq, last):
                last -= grain
        for end in range(first + self.grain, last + 1, self.grain):
            extent, snapshot = self._extent(seq, end), self._snapshot(seq, end)
            if not self._is_in_memory(extent):
                break
            self._stores.append(extent)
            if snapshot is not None:
                self._stores.append(self._extent(seq, end, snapshot))
            seq.num_submitted_tokens = end

    @property
    def num_waiting(self) -> int:  # type: ignore[override]
        """Number of sequences that wait for a load, or have not been taken back after it."""
        is_loading = self._load is not None and self._load.seq is not None
        return len(self._waiting) + is_loading + len(self._ready)

    @property
    def holders(self) -> list[Sequence]:
        """The owners of blocks that are being loaded."""
        return [] if self._load is None else [self._load.holder]

    # -- what the step loop calls --------------------------------------------------------------------------------

    def next_moves(self) -> DiskMoves | None:
        """Take in what the ranks have loaded, and return what they are to move next, or None if there is nothing.

        Called when all planned steps have been launched: they may still use blocks that have been freed, and a rank
        waits for what it has enqueued so far.
        """
        if self._load is not None:
            self._follow(self._load)
        if self._is_paused:
            self._ready.extend(self._waiting)
            self._waiting.clear()
        loads = self._begin_load() if self._load is None else ()
        stores, self._stores = [extent for extent in self._stores if self._is_in_memory(extent)], []
        if not stores and not loads:
            return None
        self._num_stores += len(stores)
        self._lost.difference_update(extent.key for extent in stores)
        return DiskMoves(stores, loads, self._num_loads)

    @property
    def num_pending(self) -> int:  # type: ignore[override]
        """Extents that the slowest rank still has to write."""
        return self._num_stores - int(self.board.num_stored.min())

    def stats(self) -> dict[str, float | None]:
        return {
            "num_disk_hit_tokens": self.num_loaded_tokens,
            "num_disk_hit_states": self.num_loaded_states,
            "num_cancelled_disk_loads": self.num_cancelled_loads,
            "num_waiting_for_disk": self.num_waiting,
        }

    def close(self) -> None:
        self.board.close()

    # -- loads ---------------------------------------------------------------------------------------------------

    @property
    def _is_paused(self) -> bool:
        """True if the disk has hung less than PAUSE_S ago."""
        return self._clock() < self._paused_until_s

    def _find(self, seq: Sequence) -> tuple[int, int] | None:
        """Return the first token to read and the end of a load for a prompt, or None if the prompt should not wait."""
        num_known = self.kv.num_known_tokens(seq)
        start = len(self.kv.pool.match(seq).whole_blocks) * self.kv.block_size
        end = start
        while end + self.grain < len(seq.token_ids) and self._is_on_disk(self._key(seq, end + self.grain)):
            end += self.grain
        grain = self.kv.pool.index.grain
        end = seq.num_disk_tokens = end // grain * grain
        if self._snapshots is not None:  # a load ends at a state
            while end > num_known and not self._has_state(seq, end):
                end -= grain
        return (min(start, end), end) if end > num_known and end >= self.least_load_tokens else None

    def _begin_load(self) -> tuple[Extent, ...]:
        """Begin the oldest load, if there is room for it."""
        while self._waiting:
            seq = self._waiting[0]
            found = self._find(seq)
            if found is None:  # the blocks may be in memory by now
                self._ready.append(self._waiting.popleft())
                continue
            start, end = found
            holder = self.kv.hold(seq, end)
            if holder is None:
                return ()
            self._waiting.popleft()
            self._num_loads += 1
            extents = [self._extent(holder, each) for each in range(start + self.grain, end + 1, self.grain)]
            snapshot = -1
            if self._snapshots is not None:
                snapshot = self._snapshots.hold()
                extents.append(self._extent(holder, end, snapshot))
            keys = tuple(extent.key for extent in extents)
            self._load = _PrefixLoad(self._num_loads, seq, holder, start, end, keys, snapshot, 0, self._clock())
            return tuple(extents)
        return ()

    def _follow(self, load: _PrefixLoad) -> None:
        """Take in a load that has ended, and cancel one that no extent arrives for.

        The blocks of a cancelled load are freed when all ranks have ended it.
        """
        has_ended = bool((self.board.ended_load == load.number).all())  # first, so that the others are not older
        num_loaded = int(self.board.num_loaded.min())
        if has_ended:
            self._end(load, is_whole=num_loaded == len(load.keys))
        elif num_loaded != load.num_loaded:
            load.num_loaded, load.arrived_s = num_loaded, self._clock()
        elif load.seq is not None and self._clock() > load.arrived_s + STALL_S:
            self._ready.append(load.seq)
            load.seq, self.board.cancelled_load[0] = None, load.number
            self.num_cancelled_loads += 1
            self._paused_until_s = self._clock() + PAUSE_S

    def _end(self, load: _PrefixLoad, *, is_whole: bool) -> None:
        """Let prompts match what was loaded, if all of it was. Otherwise find a shorter load for the sequence."""
        self._load = None
        self.kv.fill(load.holder, load.end if is_whole else load.start)
        if self._snapshots is not None:
            prefix_id = self.kv.pool.prefix_id(load.holder, load.end) if is_whole else None
            self._snapshots.give_back(load.snapshot, prefix_id)
        if is_whole:
            self.num_loaded_tokens += load.end - load.start
            self.num_loaded_states += self._snapshots is not None
        else:
            self._lost.update(load.keys[i] for i in self.board.missing if i >= 0)
        if load.seq is not None:
            if is_whole:
                self._ready.append(load.seq)
            else:
                self._waiting.appendleft(load.seq)

    # -- extents -------------------------------------------------------------------------------------------------

    def _extent(self, owner: Sequence, end: int, snapshot: int | None = None) -> Extent:
        """Return the extent that ends before token `end`, in the owner's block, or the state there, in a snapshot.

        A state counts as used a little earlier than the extent.
        """
        start, key = end - self.grain, self._key(owner, end)
        used_s = self._epoch_s + owner.arrival_s - start // self.grain * LATER_S
        if snapshot is None:
            block_idx, offset = divmod(start, self.kv.block_size)
            place = owner.block_table[block_idx]
        else:
            key, used_s = state_key(key), used_s - LATER_S / 2
            place, offset = len(self.kv.pool.blocks) + snapshot, 0
        parent, token_ids = self._key(owner, start), owner.token_ids[start:end].tobytes()
        return Extent(key, parent, token_ids, used_s, place, offset, int(self.board.versions[place]))

    def _key(self, seq: Sequence, num_tokens: int) -> bytes:
        """Return the key of a prefix of whole extents. Each is computed once, because token ids never change."""
        keys = seq.disk_keys
        if not keys:
            keys.append(root_key(seq.hash_salt))
        for end in range(len(keys) * self.grain, num_tokens + 1, self.grain):
            keys.append(next_key(keys[-1], seq.token_ids[end - self.grain : end].tobytes()))
        return keys[num_tokens // self.grain]

    def _is_on_disk(self, key: bytes) -> bool:
        return key in self.keys and key not in self._lost

    def _has_state(self, seq: Sequence, num_tokens: int) -> bool:
        """Return True if the state after `num_tokens` tokens, which are whole extents, is on disk."""
        return self._is_on_disk(state_key(self._key(seq, num_tokens)))

    def _snapshot(self, seq: Sequence, num_tokens: int) -> int | None:
        """Return the snapshot of the state after `num_tokens` tokens of a running sequence, or None."""
        if self._snapshots is None or num_tokens % self.kv.pool.index.grain:
            return None
        return self._snapshots.find(self.kv.pool.prefix_id(seq, num_tokens))

    def _is_in_memory(self, extent: Extent) -> bool:
        """Return True if the place still holds the extent, in the memory that is written from."""
        is_same = bool(extent.version == self.board.versions[extent.place])
        return is_same and (extent.is_state or self.kv.num_stored_tokens(extent.place) >= extent.start + self.grain)
