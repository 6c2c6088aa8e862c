"""A disk for the content model: extents of tags and states, moved at random times and lost at random.

`SimulatedDisk.step` does some of the work of the ranks' threads: between any two steps it may read extents from memory
and write extents into memory. From time to time the disk hangs: then no load goes on, and a cancelled load ends.
"""

import random
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from nanovllm.capabilities.disk.disk_moves import DiskMoves, Extent
from nanovllm.capabilities.disk.tier import DiskBoard, DiskTier
from nanovllm.kvcache.block_manager import KVCacheManager


class GarbageState(NamedTuple):
    """What a failed read leaves of a state."""

    tag: int = -2
    pending: tuple[int, ...] = ()


class SimulatedDisk:
    """`memory`: cells [blocks, tokens] that hold all blocks. `snapshots`: of states. `checks_versions`: False to store
    extents even if their blocks have been given away.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        memory: np.ndarray,
        grain: int,
        rng: random.Random,
        extents: dict[bytes, Any],
        snapshots: dict[int, Any],
        checks_versions: bool = True,
    ) -> None:
        self.extents, self._memory, self._grain, self._rng = extents, memory, grain, rng
        self._snapshots, self._checks_versions = snapshots, checks_versions
        num_snapshots = 0 if kv.pool.index.snapshots is None else kv.pool.index.snapshots.count
        self.board = DiskBoard(1, len(memory) + num_snapshots)
        self.now_s = 0.0
        least_tokens = rng.choice([0, 0, 0, 8])
        self.tier = DiskTier(
            extents, kv, self.board, least_load_tokens=least_tokens, grain=grain, clock=lambda: self.now_s
        )
        self.num_loaded = self.num_loaded_states = 0
        self._stores: deque[Extent] = deque()
        self._loads: dict[int, Extent] = {}  # those left of the newest load
        self._load_number = 0
        self._hangs = False

    def step(self) -> None:
        self.now_s += self._rng.choice([0.01, 1.0, 20.0])
        moves = self.tier.next_moves()
        if moves is not None:
            self._submit(moves)
        for _ in range(self._rng.randrange(4)):
            self._store()
        self._hang()
        for _ in range(self._rng.randrange(4)):
            self._load()
        if self.extents and self._rng.random() < 0.05:
            del self.extents[self._rng.choice(list(self.extents))]

    def _submit(self, moves: DiskMoves) -> None:
        self._stores.extend(moves.stores)
        if moves.loads:
            assert not self._loads, "a load begins before the last one has ended"
            assert moves.load_number == self._load_number + 1, "loads are numbered"
            self._loads = dict(enumerate(moves.loads))
            self._load_number = moves.load_number
            self.board.num_loaded[0], self.board.missing[0] = 0, -1

    def _cells(self, extent: Extent) -> Any:
        return self._memory[extent.place, extent.start : extent.start + self._grain]

    def keep(self, extent: Extent) -> None:
        """Write an extent, or a state."""
        assert len(extent.token_ids) == 8 * self._grain, "an extent is whole"
        if extent.is_state:
            self.extents[extent.key] = self._snapshots[extent.place - len(self._memory)]._replace(pending=())
        else:
            self.extents[extent.key] = self._cells(extent).copy()

    def _store(self) -> None:
        if self._stores:
            extent = self._stores.popleft()
            if not self._checks_versions or self.board.versions[extent.place] == extent.version:
                self.keep(extent)
            self.board.num_stored[0] += 1

    def _hang(self) -> None:
        """Begin or cease to hang. A load that is cancelled meanwhile ends, and its memory may be used at once."""
        self._hangs = self._rng.random() < (0.8 if self._hangs else 0.05)
        if self._hangs and self._loads and self._is_cancelled:
            self._loads.clear()
            self.board.ended_load[0] = self._load_number

    @property
    def _is_cancelled(self) -> bool:
        return bool(self.board.cancelled_load[0] >= self._load_number)

    def _load(self) -> None:
        if not self._loads or self._hangs:
            return
        i = self._rng.choice(list(self._loads))
        extent = self._loads.pop(i)
        is_read = extent.key in self.extents and not self._is_cancelled
        if extent.is_state:
            self._snapshots[extent.place - len(self._memory)] = self.extents[extent.key] if is_read else GarbageState()
            self.num_loaded_states += is_read
        else:
            self._cells(extent)[:] = self.extents[extent.key] if is_read else -2  # a failed read leaves garbage
        if is_read:
            self.num_loaded += 1
            self.board.num_loaded[0] += 1
        else:
            self.board.missing[0] = -1 if self._is_cancelled else i
            self._loads.clear()
        if not self._loads:
            self.board.ended_load[0] = self._load_number
