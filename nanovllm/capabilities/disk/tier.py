"""DiskTier: the prefix cache's tier below the memory that holds the KV. It decides what is written and what is read.

It runs on rank 0 in the engine's thread, and works on integers and keys only; the ranks' DiskWorkers move the bytes
(transfer/disk_worker.py). What always holds:
- A load fills free blocks, which then enter the prefix index like those of a prompt that was computed. So a sequence
  waits for its load, and is then admitted with a hit. Meanwhile the others run. A load that fails, in part or as a
  whole, makes the hit shorter.
- With recurrent layers a hit ends at a state, so a load ends with one, which fills a snapshot. If it fails, the next
  one goes for an earlier state. Nothing is stored behind the last state of a sequence, where nobody could use it.
- The blocks of a load belong to a holder, a sequence that never runs, until every rank has ended the load. A rank ends
  a load that is cancelled at once, even if its disk hangs, because it reads files into buffers (disk_worker.py). After
  that nothing is loaded until the disk has answered.
- A store reads its block while the block may be given to others. Each allocation of a block raises its version, and an
  extent whose block has another version by the time it has been read is dropped. So nothing ever waits for a store.
- A prompt is loaded only if that takes less time than computing it, by what both have taken so far. Until both have
  been measured it is loaded, and so it is from time to time after a slow load, because disks are slow for many reasons.
  A load that turns out slower than computing the rest is cancelled.
"""

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from nanovllm.capabilities.disk.disk_moves import (
    DISK_GRAIN_TOKENS,
    LATER_S,
    NUM_READERS,
    DiskMoves,
    Extent,
    next_key,
    root_key,
    state_key,
)
from nanovllm.kvcache.block_manager import KVCacheManager
from nanovllm.plan.sequence import Sequence, SequenceStatus
from nanovllm.plan.step_plan import StepPlan

CLEANED_SHARE = 4  # keep the first 1/CLEANED_SHARE of the blocks that would be evicted next on disk
CLEAN_INTERVAL_S = 0.05  # between two looks at them
CLEANED_BLOCKS = 32  # written after one look
MIN_SLOW_S = 0.25  # a load is not given up before
HUNG_S = 10.0  # for an extent, where nothing is known about computing
RATE_S = 60.0  # lifetime of the last load's rate; after that it is taken to be unknown
_RANK_CELLS = 7  # see DiskBoard


class RankLoad(NamedTuple):
    """A rank's progress with a load."""

    num_loaded: int  # extents, without gaps
    has_ended: bool
    byte_per_s: float | None  # at which this rank reads; None if it has read nothing


class DiskBoard:
    """Numbers that rank 0's engine thread and the disk threads of all ranks share: an array of int64.

    Nothing waits for it. Each cell has one writer. Cell 0 is the number of the newest load that is cancelled. Then
    each rank has its load's number, the extents it has loaded, the number of the last load that has ended, its rate of
    reading, the extents it still has to write, the number of the newest moves it knows, and 1 while its disk has not
    answered reads of a load that was given up. The rest are the versions of blocks, then of snapshots.

    The board is a file without a name, which nobody can leave behind. All open it by rank 0's descriptor in /proc.
    """

    def __init__(self, num_ranks: int, num_places: int, address: str = "") -> None:
        """`num_places`: blocks and snapshots. `address`: that of the board to open; by default, a new one is made."""
        self.address, self._fd = address, -1
        size = 1 + num_ranks * _RANK_CELLS + num_places
        if not address:
            self._fd = os.memfd_create("nanovllm-disk")
            os.ftruncate(self._fd, size * 8)
            self.address = f"/proc/{os.getpid()}/fd/{self._fd}"
        with open(self.address, "r+b") as file:
            self._cells = np.frombuffer(mmap.mmap(file.fileno(), size * 8), dtype=np.int64)
        self._ranks = self._cells[1 : 1 + num_ranks * _RANK_CELLS].reshape(num_ranks, _RANK_CELLS)
        self.versions = self._cells[1 + num_ranks * _RANK_CELLS :]

    def cancel(self, load_number: int) -> None:
        self._cells[0] = load_number

    def is_cancelled(self, load_number: int) -> bool:
        return bool(self._cells[0] >= load_number)

    def post_progress(self, rank: int, load_number: int, num_loaded: int, byte_per_s: float) -> None:
        self._ranks[rank, 1] = num_loaded
        self._ranks[rank, 3] = int(byte_per_s)
        self._ranks[rank, 0] = load_number

    def post_rate(self, rank: int, byte_per_s: float) -> None:
        self._ranks[rank, 3] = int(byte_per_s)

    def post_stuck(self, rank: int, is_stuck: bool) -> None:
        self._ranks[rank, 6] = is_stuck

    @property
    def is_stuck(self) -> bool:
        """True if the disk of a rank has not answered reads of a load that was given up."""
        return bool(self._ranks[:, 6].any())

    def post_end(self, rank: int, load_number: int) -> None:
        """Say that the rank copies nothing more to the load's blocks. Call post_stuck first."""
        self._ranks[rank, 2] = load_number

    def post_pending(self, rank: int, num_extents: int) -> None:
        self._ranks[rank, 4] = num_extents

    def post_moves(self, rank: int, number: int) -> None:
        """After post_pending, which then includes these moves."""
        self._ranks[rank, 5] = number

    def progress(self, load_number: int) -> RankLoad:
        """Return the number of the rank that is furthest behind."""
        has_ended = bool((self._ranks[:, 2] == load_number).all())  # first, so that what follows is not older
        known = self._ranks[:, 0] == load_number
        rates = self._ranks[:, 3]
        slowest = int(rates.min())
        return RankLoad(int(np.where(known, self._ranks[:, 1], 0).min()), has_ended, slowest or None)

    def num_pending(self, number: int) -> int:
        """Extents that the slowest rank still has to write. At least 1 if a rank does not know moves `number`
        yet.
        """
        all_know = bool((self._ranks[:, 5] >= number).all())
        return max(int(self._ranks[:, 4].max()), not all_know)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PromptTimes(Protocol):
    """Learns from steps how long prompts take."""

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        """See StepMeter (engine/step_loop.py)."""

    def prompt_s(self, num_tokens: int, position: int) -> float | None:
        """The time to compute so many tokens of a prompt from `position` on; None if none was measured."""


class _Loadable(NamedTuple):
    """The part of a prompt that a load would bring."""

    num_known: int  # tokens that need not be computed without it
    start: int  # the first token to read; `end` if only the state is read
    end: int


@dataclass(slots=True)
class _Load:
    number: int
    seq: Sequence | None  # None: nobody waits for it any more
    holder: Sequence  # owns the blocks
    part: _Loadable
    keys: tuple[bytes, ...]  # what is loaded, in order
    snapshot: int  # for the state; -1: no layer is recurrent
    begun_s: float


class _Content(NamedTuple):
    """The content of a block."""

    version: int
    used_s: float  # the first extent's; see Extent
    parent: bytes  # the key of the prefix before
    keys: tuple[bytes, ...]


class DiskTier:
    def __init__(
        self,
        keys: Container[bytes],
        kv: KVCacheManager,
        board: DiskBoard,
        *,
        extent_bytes: int,
        state_bytes: int = 0,
        times: PromptTimes,
        stores_prompts: bool,
        least_prompt_s: Callable[[int, int], float | None] = lambda num_tokens, position: None,
        grain: int = DISK_GRAIN_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys`: the extents on disk, as far as is known. `extent_bytes`, `state_bytes`: of one rank.

        `stores_prompts`: write prompts once they have been computed, and not only what would be evicted.
        `least_prompt_s`: like `times.prompt_s`, a bound that holds before anything is measured. `grain`: tokens of an
        extent. Starts to count the versions of `kv`'s blocks and snapshots.
        """
        self.keys, self.kv, self.board = keys, kv, board
        self.extent_bytes, self.state_bytes = extent_bytes, state_bytes
        self.stores_prompts, self.grain = stores_prompts, grain
        self.times, self._least_prompt_s, self._clock = times, least_prompt_s, clock
        self._snapshots = kv.pool.index.snapshots
        kv.pool.versions = board.versions[: len(kv.pool.blocks)]
        if self._snapshots is not None:
            self._snapshots.versions = board.versions[len(kv.pool.blocks) :]
        self._waiting: deque[Sequence] = deque()  # for a load to begin
        self._load: _Load | None = None  # the one that the ranks work on
        self._ready: list[Sequence] = []  # sequences that wait for no load any more
        self._epoch_s = time.time() - time.perf_counter()  # start of the clock by which sequences arrive
        self._num_loads = self._num_moves = 0
        self._last_load_s = self._clock()  # when the last load ended
        self._stores: list[Extent] = []
        self._contents: dict[int, _Content] = {}  # by block
        self._submitted: dict[int, int] = {}  # block -> its version when all its extents were submitted
        self._states: dict[int, Extent] = {}  # by snapshot, what it held; not those that were stored since
        self._lost: set[bytes] = set()  # found missing by any rank, and not stored again since
        self._next_clean_s = 0.0
        self.num_loaded_tokens = self.num_loaded_states = self.num_cancelled_loads = 0

    # -- what the scheduler calls --------------------------------------------------------------------------------

    def wait_for_load(self, seq: Sequence) -> bool:
        """Begin to wait for a load if a prompt's hit continues on disk and loading is faster than computing.

        Returns False if the sequence may run at once.
        """
        if self._is_stuck or not seq.can_use_prefix_cache or self._worth_loading(seq) is None:
            return False
        self._waiting.append(seq)
        return True

    @property
    def _is_stuck(self) -> bool:
        """True if a load that was given up has not ended yet, or the disk has not answered since."""
        return self.board.is_stuck or (self._load is not None and self._load.seq is None)

    def take_ready(self) -> list[Sequence]:
        """Return the sequences whose loads have ended, and that have not been returned before."""
        ready, self._ready = self._ready, []
        return ready

    def forget(self, seq: Sequence) -> bool:
        """A sequence has been aborted. Returns True if it was here."""
        if self._load is not None and self._load.seq is seq:
            self._cancel(self._load)
            return True
        for queue in (self._waiting, self._ready):
            if seq in queue:
                queue.remove(seq)
                return True
        return False

    def may_overtake(self, seq: Sequence) -> bool:
        """Return False if an older sequence waits for blocks to load into: nobody may take them first."""
        return self._load is not None or not self._waiting or seq.seq_id < self._waiting[0].seq_id

    def prompt_computed(self, seq: Sequence) -> None:
        """The first token after a prompt has arrived.

        A sequence that was preempted meanwhile has no blocks. Prompts that are scored are not stored, since they would
        not be read either.
        """
        if seq.status is not SequenceStatus.RUNNING or not seq.can_use_prefix_cache:
            return
        states = self._note_states(seq, seq.num_prompt_tokens)
        if self.stores_prompts:
            extents = self._extents(seq, self._useful_end(seq, seq.num_prompt_tokens))
            self._stores += _latest_first([*extents, *states])
        elif states:  # their snapshots may be taken while the sequence runs
            self.note_contents(seq)

    def note_contents(self, seq: Sequence) -> None:
        """Note what the blocks of a running sequence hold, before they are freed, so that they can be stored later."""
        num_tokens = min(seq.num_computed_tokens, len(seq.token_ids)) if seq.can_use_prefix_cache else 0
        per_block, versions = self.kv.block_size // self.grain, self.board.versions
        self._note_states(seq, num_tokens)
        num_extents = self._useful_end(seq, num_tokens) // self.grain
        for first in range(0, num_extents, per_block):
            block_id = seq.block_table[first // per_block]
            keys = tuple(self._key(seq, i) for i in range(first, min(first + per_block, num_extents)))
            used_s = self._used_s(seq) - first * LATER_S
            noted = self._contents.get(block_id)
            if noted is not None and len(noted.keys) < len(keys):  # since they were submitted
                self._submitted.pop(block_id, None)
            self._contents[block_id] = _Content(int(versions[block_id]), used_s, self._parent(seq, first), keys)

    # -- what the step loop calls --------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of sequences that are here: they wait for a load, or have not been taken back after it."""
        is_loading = self._load is not None and self._load.seq is not None
        return len(self._waiting) + is_loading + len(self._ready)

    @property
    def holders(self) -> list[Sequence]:
        """The owners of blocks that are being loaded."""
        return [] if self._load is None else [self._load.holder]

    def next_moves(self) -> DiskMoves | None:
        """Take in what the ranks have loaded, and return what they shall move next. None if there is nothing.

        Called when all planned steps have been launched: they may still use blocks that have been freed, and a rank
        waits for what it has enqueued so far.
        """
        if self._load is not None:
            self._follow(self._load)
        if self._is_stuck:
            self._ready.extend(self._waiting)
            self._waiting.clear()
        loads: tuple[Extent, ...] = ()
        if self._load is None and self._waiting:
            loads = self._begin_load()
        stores, self._stores = [extent for extent in self._stores if self._is_in_memory(extent)], []
        if not stores and not self.num_pending:
            stores = self._clean()
        return self._make_moves(stores, loads) if stores or loads else None

    def _make_moves(self, stores: list[Extent], loads: tuple[Extent, ...] = ()) -> DiskMoves:
        self._num_moves += 1
        self._lost.difference_update(extent.key for extent in stores)
        return DiskMoves(self._num_moves, stores, loads, self._num_loads)

    @property
    def num_pending(self) -> int:
        """Extents that are still to be written."""
        return self.board.num_pending(self._num_moves)

    def last_moves(self) -> DiskMoves:
        """Everything in memory that a prompt could match and that is not on disk, at the engine's end."""
        stores = [extent for extent in self._stores if self._is_in_memory(extent)]
        for block_id in self.kv.pool.cached_ids:
            stores.extend(self._extents_of_block(block_id))
        stores.extend(self._take_states(list(self._states)))
        return self._make_moves(_latest_first(stores))

    def stats(self) -> dict[str, float | None]:
        return {
            "num_disk_hit_tokens": self.num_loaded_tokens,
            "num_disk_hit_states": self.num_loaded_states,
            "num_cancelled_disk_loads": self.num_cancelled_loads,
            "num_waiting_for_disk": self.num_waiting,
            "disk_read_byte_per_s": self.board.progress(self._num_loads).byte_per_s,
        }

    # -- keys ----------------------------------------------------------------------------------------------------

    def _token_ids(self, seq: Sequence, extent_idx: int) -> bytes:
        return seq.token_ids[extent_idx * self.grain : (extent_idx + 1) * self.grain].tobytes()

    def _key(self, seq: Sequence, extent_idx: int) -> bytes:
        """The key of an extent. Each is computed once, because token ids never change."""
        keys = seq.disk_keys
        for i in range(len(keys), extent_idx + 1):
            keys.append(next_key(keys[i - 1] if i else root_key(seq.hash_salt), self._token_ids(seq, i)))
        return keys[extent_idx]

    def _is_on_disk(self, key: bytes) -> bool:
        return key in self.keys and key not in self._lost

    def _parent(self, seq: Sequence, extent_idx: int) -> bytes:
        """The key of the prefix before an extent."""
        return self._key(seq, extent_idx - 1) if extent_idx else root_key(seq.hash_salt)

    # -- loads ---------------------------------------------------------------------------------------------------

    def _end_on_disk(self, seq: Sequence, start: int) -> int:
        """The end of the tokens from `start` on that are on disk without gaps, in whole grains of the prefix index."""
        extent_idx, limit = start // self.grain, (len(seq.token_ids) - 1) // self.grain
        while extent_idx < limit and self._is_on_disk(self._key(seq, extent_idx)):
            extent_idx += 1
        grain = self.kv.pool.index.grain
        return extent_idx * self.grain // grain * grain

    def _worth_loading(self, seq: Sequence) -> _Loadable | None:
        """Find what can be loaded. None if there is nothing, or if computing it takes less time."""
        num_known = self.kv.num_known_tokens(seq)
        start = len(self.kv.pool.match(seq).whole_blocks) * self.kv.block_size
        end = seq.num_disk_tokens = self._end_on_disk(seq, start)
        if self._snapshots is not None:
            end = self._last_state(seq, min(end, seq.num_loadable_tokens), num_known)
        if end <= num_known:
            return None
        found = _Loadable(num_known, min(start, end), end)
        compute_s = self._prompt_s(end - num_known, num_known)
        return found if compute_s is None or self._load_s(self._num_bytes(found)) < compute_s else None

    def _last_state(self, seq: Sequence, end: int, start: int) -> int:
        """The last place up to `end` after which there is a state on disk. `start` if there is none behind it."""
        grain = self.kv.pool.index.grain
        places = range(end // grain * grain, start, -grain)
        return next((place for place in places if self._is_on_disk(self._state_key(seq, place))), start)

    def _num_bytes(self, found: _Loadable) -> int:
        return (found.end - found.start) // self.grain * self.extent_bytes + self.state_bytes

    def _prompt_s(self, num_tokens: int, position: int) -> float | None:
        seconds = self.times.prompt_s(num_tokens, position)
        return self._least_prompt_s(num_tokens, position) if seconds is None else seconds

    def _load_s(self, num_bytes: int) -> float:
        """The time to load so many bytes, after the load that is under way. 0 if the rate is not known, or is old."""
        rate = self.board.progress(self._num_loads).byte_per_s
        if rate is None or (self._load is None and self._clock() > self._last_load_s + RATE_S):
            return 0.0
        return (num_bytes + (0 if self._load is None else self._num_bytes(self._load.part))) / rate

    def _begin_load(self) -> tuple[Extent, ...]:
        """Begin the oldest load that there is room for."""
        while self._waiting:
            seq = self._waiting[0]
            found = self._worth_loading(seq)
            if found is None:  # the blocks may be in memory by now
                self._ready.append(self._waiting.popleft())
                continue
            holder = self.kv.hold(seq, found.end)
            if holder is None:
                return ()
            self._waiting.popleft()
            self._num_loads += 1
            extents = [*self._extents(holder, found.end, found.start)]
            snapshot = -1
            if self._snapshots is not None:
                snapshot = self._snapshots.hold()
                extents.append(self._state(holder, found.end, snapshot))
            keys = tuple(extent.key for extent in extents)
            self._load = _Load(self._num_loads, seq, holder, found, keys, snapshot, self._clock())
            return tuple(extents)
        return ()

    def _follow(self, load: _Load) -> None:
        """Take in a load that has ended, and give up one that has become slower than computing."""
        progress = self.board.progress(load.number)
        if progress.has_ended:
            num_tokens = min(load.part.start + progress.num_loaded * self.grain, load.part.end)
            self.kv.fill(load.holder, num_tokens)
            self.num_loaded_tokens += num_tokens - load.part.start
            if load.seq is not None:
                self._lost.update(load.keys[progress.num_loaded :][:1])
            has_failed = self._snapshots is not None and not self._fill_snapshot(load, progress.num_loaded)
            if load.seq is not None and has_failed:
                load.seq.num_loadable_tokens = min(num_tokens, load.part.end - 1)
                self._waiting.appendleft(load.seq)
            elif load.seq is not None:
                self._ready.append(load.seq)
            self._load, self._last_load_s = None, self._clock()
        elif load.seq is not None and self._is_too_slow(load, progress.num_loaded):
            self._ready.append(load.seq)
            self._cancel(load)
            self.num_cancelled_loads += 1

    def _fill_snapshot(self, load: _Load, num_loaded: int) -> bool:
        """Let prompts match the state at a load's end. Returns False if it was not loaded, or what is before it."""
        assert self._snapshots is not None, "no layer is recurrent"
        is_loaded = num_loaded * self.grain > load.part.end - load.part.start
        prefix_id = self.kv.pool.prefix_id(load.holder, load.part.end) if is_loaded else None
        self._snapshots.give_back(load.snapshot, prefix_id)
        self.num_loaded_states += is_loaded
        return is_loaded

    def _is_too_slow(self, load: _Load, num_loaded: int) -> bool:
        """Return True if computing what is left takes less time than loading it at the pace so far.

        Some extents are being read, and count as loaded. Without its state, at the end, the whole load is of no use.
        """
        elapsed_s = self._clock() - load.begun_s
        num_known, start, end = load.part
        num_left = (end - start) // self.grain - num_loaded
        position = start + num_loaded * self.grain
        if self._snapshots is not None:
            num_left, position = num_left + 1, num_known
        compute_s = self._prompt_s(end - position, position)
        if compute_s is None:
            return elapsed_s > HUNG_S * (1 + num_loaded)
        if elapsed_s < MIN_SLOW_S:
            return False
        return elapsed_s / (num_loaded + NUM_READERS) * num_left > compute_s

    def _cancel(self, load: _Load) -> None:
        """Let nobody wait for a load. Its blocks are free when all ranks have noticed."""
        load.seq = None
        self.board.cancel(load.number)

    # -- stores --------------------------------------------------------------------------------------------------

    def _used_s(self, seq: Sequence) -> float:
        """Return when a sequence uses its extents: when it arrived."""
        return self._epoch_s + seq.arrival_s

    def _extents(self, owner: Sequence, end: int, start: int = 0) -> Iterator[Extent]:
        """The whole extents of tokens start..end-1, which are in the owner's blocks."""
        for extent_idx in range(start // self.grain, end // self.grain):
            block_idx, offset = divmod(extent_idx * self.grain, self.kv.block_size)
            block_id = owner.block_table[block_idx]
            version, used_s = int(self.board.versions[block_id]), self._used_s(owner) - extent_idx * LATER_S
            key, parent = self._key(owner, extent_idx), self._parent(owner, extent_idx)
            yield Extent(key, parent, self._token_ids(owner, extent_idx), used_s, block_id, offset, version)

    # -- states --------------------------------------------------------------------------------------------------

    def _state_key(self, seq: Sequence, place: int) -> bytes:
        """The key of the state after `place` tokens, which are whole extents."""
        return state_key(self._key(seq, place // self.grain - 1))

    def _state(self, owner: Sequence, place: int, snapshot: int) -> Extent:
        """The state after `place` tokens. It counts as a little older than the extent before it."""
        extent_idx, number = place // self.grain - 1, len(self.kv.pool.blocks) + snapshot
        key, parent = self._state_key(owner, place), self._parent(owner, extent_idx)
        version, used_s = int(self.board.versions[number]), self._used_s(owner) - (extent_idx + 0.5) * LATER_S
        return Extent(key, parent, self._token_ids(owner, extent_idx), used_s, number, 0, version)

    def _useful_end(self, seq: Sequence, end: int) -> int:
        """The end of a running sequence's tokens that are worth storing: the last ones before a state."""
        if self._snapshots is None:
            return end
        grain = self.kv.pool.index.grain
        for place in range(end // grain * grain, 0, -grain):
            is_in_memory = self._snapshots.find(self.kv.pool.prefix_id(seq, place)) is not None
            if is_in_memory or self._is_on_disk(self._state_key(seq, place)):
                return place
        return 0

    def _note_states(self, seq: Sequence, end: int) -> list[Extent]:
        """Note and return the states that snapshots hold of a running sequence's first `end` tokens.

        States that follow an extent that cannot be stored are left out.
        """
        if self._snapshots is None:
            return []
        grain, block_size, states = self.kv.pool.index.grain, self.kv.block_size, []
        for place in range(grain, end + 1, grain):
            snapshot = self._snapshots.find(self.kv.pool.prefix_id(seq, place))
            if snapshot is None:
                continue
            block_idx, before = divmod(place - 1, block_size)
            is_stored = self.kv.num_stored_tokens(seq.block_table[block_idx]) > before
            if is_stored or self._is_on_disk(self._key(seq, place // self.grain - 1)):
                states.append(self._state(seq, place, snapshot))
        self._states.update((state.block_id - len(self.kv.pool.blocks), state) for state in states)
        return states

    def _take_states(self, snapshots: Iterable[int | None]) -> Iterator[Extent]:
        """The states in some snapshots that have been noted and are neither on disk nor were taken before."""
        for snapshot in snapshots:
            state = None if snapshot is None else self._states.pop(snapshot, None)
            if state is not None and not self._is_on_disk(state.key) and self._is_in_memory(state):
                yield state

    def _extents_of_block(self, block_id: int) -> Iterator[Extent]:
        """The extents of a block without owners that are neither on disk nor submitted."""
        version = int(self.board.versions[block_id])
        noted = self._contents.get(block_id)
        if noted is None or noted.version != version or self._submitted.get(block_id) == version:
            return
        self._submitted[block_id] = version
        parent, token_ids = noted.parent, self.kv.pool.blocks[block_id].token_ids
        for i, key in enumerate(noted.keys[: len(token_ids) // self.grain]):
            start = i * self.grain
            tokens = token_ids[start : start + self.grain].tobytes()
            extent = Extent(key, parent, tokens, noted.used_s - i * LATER_S, block_id, start, version)
            if not self._is_on_disk(key) and self._is_in_memory(extent):
                yield extent
            parent = key

    def _is_in_memory(self, extent: Extent) -> bool:
        """Return True if the block still holds the extent, in the memory that is written from."""
        is_same = bool(extent.version == self.board.versions[extent.block_id])
        return is_same and (extent.is_state or self.kv.num_stored_tokens(extent.block_id) >= extent.start + self.grain)

    def _clean(self) -> list[Extent]:
        """Choose extents of blocks that will be evicted soon, and states that will."""
        pool, snapshots, now_s = self.kv.pool, self._snapshots, self._clock()
        num_soon = max(0, len(pool.blocks) // CLEANED_SHARE - len(pool.spare_ids))
        oldest = [] if snapshots is None else snapshots.oldest(CLEANED_SHARE)
        if not (num_soon or oldest) or now_s < self._next_clean_s:
            return []
        self._next_clean_s = now_s + CLEAN_INTERVAL_S
        holders = [block.block_id for prefix_id in oldest if (block := pool.index.holder(prefix_id)) is not None]
        chosen: list[Extent] = []
        num_blocks = 0
        for block_id in [*holders, *islice(pool.cached_ids, num_soon)]:
            of_block = list(self._extents_of_block(block_id))
            if snapshots is not None:  # they follow the extents, without which they are of no use
                of_block += self._take_states(map(snapshots.find, pool.blocks[block_id].prefix_ids[1:]))
            chosen += of_block
            num_blocks += bool(of_block)
            if num_blocks == CLEANED_BLOCKS:
                break
        return chosen


def _latest_first(extents: Iterable[Extent]) -> list[Extent]:
    """Sort by the last use: those without which the others are of no use come first."""
    return sorted(extents, key=lambda extent: -extent.used_s)
