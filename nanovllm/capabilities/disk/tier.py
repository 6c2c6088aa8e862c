"""DiskTier: decides which prefixes are written to disk, and which prefixes are loaded from disk.

The tier runs on rank 0 in the engine's thread, and works on integers and keys only. The DiskWorkers of all ranks move
the bytes (worker.py). Invariants:
- A prompt is written once it has been computed, and an answer when it ends. If sequences have states, extents after the
  last saved state are not written, because a prefix hit ends at a state and cannot use them.
- A load fills free blocks, which then enter the prefix index like the blocks of a computed prompt. The sequence waits
  for its load and is then admitted with a hit. Other sequences run meanwhile.
- A load succeeds as a whole or not at all. If an extent is missing or damaged, the next load ends before the extent.
- The blocks of a load belong to an owner, a sequence that never runs, until every rank has ended the load. A rank ends
  a cancelled load at once, even if the rank's disk hangs, because files are read into separate buffers.
- A block may be given to another sequence while a store reads the block. Each allocation of a block raises the block's
  version. If the version has changed after the block was read, the extent is dropped. So no allocation waits for a
  store.
- Start-up decides from which length on a prefix is loaded (`least_load_tokens`). A disk that hangs later delays one
  sequence for STALL_S; after the delay, nothing is loaded for PAUSE_S.
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
from nanovllm.schedule.seams import PromptStore

STALL_S = 10.0  # a load is cancelled if no extent arrives for this time
_RANK_CELLS = 4  # cells per rank on the DiskBoard


class DiskBoard:
    """An array of int64 that rank 0's engine thread and the disk threads of all ranks share.

    Reading and writing the board never waits, and each cell has one writer. A rank writes `num_loaded` and `missing`
    before `ended_load`. The board is a file without a name, so that no file is left over when a process is killed. All
    ranks open the file through rank 0's descriptor in /proc.
    """

    def __init__(self, num_ranks: int, num_places: int, address: str = "") -> None:
        """num_places: the number of blocks and snapshots. address: the board to open, or "" to make a new board."""
        self.address, self._fd = address, -1
        size = 1 + num_ranks * _RANK_CELLS + num_places
        if not address:
            self._fd = os.memfd_create("nanovllm-disk")
            os.ftruncate(self._fd, size * 8)
            self.address = f"/proc/{os.getpid()}/fd/{self._fd}"
        with open(self.address, "r+b") as file:
            cells = np.frombuffer(mmap.mmap(file.fileno(), size * 8), dtype=np.int64)
        self.cancelled_load = cells[:1]  # number of the newest cancelled load
        # By rank: the count of loaded extents of the newest load; the index of a missing extent of the newest load, or
        # -1; the number of the newest load that has ended; the count of extents written or dropped since the start
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
    seq: Sequence | None  # the sequence that waits, or None once the load is cancelled
    holder: Sequence  # the owner of the blocks
    start: int  # the first token to read, or `end` if only the state is read
    end: int
    keys: tuple[bytes, ...]  # of the extents to load
    snapshot: int  # place for the state, or -1 if sequences have no states
    num_loaded: int  # number of loaded extents when the tier last looked
    arrived_s: float  # time at which the newest extent arrived or the load began


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
        """Start to count the versions of `kv`'s blocks and snapshots.

        keys: the keys of the extents on disk that rank 0 knows. least_load_tokens: length of the shortest prefix to
        load. grain: tokens of an extent.
        """
        self.keys, self.kv, self.board = keys, kv, board
        self.least_load_tokens, self.grain, self._clock = least_load_tokens, grain, clock
        self._snapshots = kv.pool.index.snapshots
        kv.pool.versions = board.versions[: len(kv.pool.blocks)]
        if self._snapshots is not None:
            self._snapshots.versions = board.versions[len(kv.pool.blocks) :]
        self._waiting: deque[Sequence] = deque()  # sequences whose loads have not begun
        self._load: _PrefixLoad | None = None  # the load that the ranks work on
        self._ready: list[Sequence] = []  # sequences that no longer wait for a load
        self._epoch_s = time.time() - time.perf_counter()  # converts Sequence.arrival_s to time.time
        self._paused_until_s = 0.0  # by `clock`
        self._num_loads = self._num_stores = 0
        self._stores: list[Extent] = []
        self._lost: set[bytes] = set()  # keys that a rank found missing, and that have not been stored again
        self.num_loaded_tokens = self.num_loaded_states = self.num_cancelled_loads = 0

    # -- called by the scheduler ---------------------------------------------------------------------------------

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
        """Drop a sequence that was aborted. Returns True if the sequence was waiting for a load."""
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
        """Store the computed K and V of a running sequence: the prompt when the first token of the answer has arrived,
        and the answer when the sequence ends.

        Extents that are on disk are submitted, too, because other ranks may lack them, and to record their use. Prompts
        with prompt_logprobs are not stored, because they would not be loaded either.
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
        """Count the sequences that wait for a load, or that `take_ready` has not returned yet."""
        is_loading = self._load is not None and self._load.seq is not None
        return len(self._waiting) + is_loading + len(self._ready)

    @property
    def holders(self) -> list[Sequence]:
        """Return the owners of blocks that are being loaded."""
        return [] if self._load is None else [self._load.holder]

    # -- called by the step loop ---------------------------------------------------------------------------------

    def next_moves(self) -> DiskMoves | None:
        """Process the loads that the ranks have ended, and return the next moves of the ranks, or None without moves.

        Called when all planned steps have been launched: the steps may still use freed blocks, so each rank finishes
        its enqueued work before it executes the moves.
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
        """Count the extents that the slowest rank still has to write."""
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
        """Return True if the disk has hung less than PAUSE_S ago."""
        return self._clock() < self._paused_until_s

    def _find(self, seq: Sequence) -> tuple[int, int] | None:
        """Return the start and end tokens of a load for a prompt, or None if a load would not help the prompt."""
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
        """Begin the load of the oldest waiting sequence, if there are free blocks. Returns the extents to read."""
        while self._waiting:
            seq = self._waiting[0]
            found = self._find(seq)
            if found is None:  # for instance, because another sequence has computed the same prefix meanwhile
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
        """Process the load if it has ended, and cancel it if no extent has arrived for STALL_S.

        The blocks of a cancelled load are freed when all ranks have ended the load.
        """
        has_ended = bool((self.board.ended_load == load.number).all())  # must be read before the other cells
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
        """Add the loaded blocks to the prefix index if the load is whole. Otherwise let the sequence wait for a shorter
        load.
        """
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
        """Return the K and V extent that ends before token `end` in the owner's blocks, or the extent of the state at
        `end` in `snapshot`.

        A state gets a slightly earlier time of use than the K and V extent.
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
        """Return the key of a prefix of whole extents. Each key is computed once, because token ids never change."""
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
        """Return True if the place still holds the whole extent, in CPU memory with offload."""
        is_same = bool(extent.version == self.board.versions[extent.place])
        return is_same and (extent.is_state or self.kv.num_stored_tokens(extent.place) >= extent.start + self.grain)
