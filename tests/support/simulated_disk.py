"""A disk for the content model: extents of tags and states, moved by nobody knows when, lost at random.

`SimulatedDisk.step` does what the ranks' threads do, some of it: it reads extents from memory and writes them into
memory as late as chance has it, between any two steps. From time to time the disk hangs: no load goes on then, and one
that is cancelled ends.
"""

import random
from collections import deque
from typing import Any

import numpy as np

from nanovllm.capabilities.disk.disk_moves import DiskMoves, Extent
from nanovllm.capabilities.disk.tier import DiskBoard, DiskTier
from nanovllm.kvcache.block_manager import KVCacheManager
from nanovllm.plan.step_plan import StepPlan


class OddTimes:
    """Prompts take any time to compute, or it is not known."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        pass

    def prompt_s(self, num_tokens: int, position: int) -> float | None:
        return self._rng.choice([None, 1e9, 1e9, 0.0])


class SimulatedDisk:
    """`memory`: cells [blocks, tokens] that hold all blocks. `snapshots`: those of states. `checks_versions`: False for
    a fault to be noticed.
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
        self.tier = DiskTier(
            extents,
            kv,
            self.board,
            extent_bytes=8 * grain,
            state_bytes=8 if num_snapshots else 0,
            times=OddTimes(rng),
            stores_prompts=rng.random() < 0.7,
            grain=grain,
            clock=lambda: self.now_s,
        )
        self.num_loaded = self.num_loaded_states = 0
        self._stores: deque[Extent] = deque()
        self._loads: deque[Extent] = deque()
        self._load_number = self._num_loaded = 0
        self._hangs = False

    def step(self) -> None:
        self.now_s += self._rng.choice([0.01, 1.0])
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
        self.board.post_pending(0, len(self._stores))
        self.board.post_moves(0, moves.number)
        if moves.loads:
            assert not self.board.is_stuck, "a load begins although the disk does not answer"
            assert not self._loads, "a load begins before the last one has ended"
            assert moves.load_number == self._load_number + 1, "loads are numbered"
            self._loads.extend(moves.loads)
            self._load_number, self._num_loaded = moves.load_number, 0
            self.board.post_progress(0, self._load_number, 0, 0)

    def _cells(self, extent: Extent) -> Any:
        return self._memory[extent.block_id, extent.start : extent.start + self._grain]

    def keep(self, extent: Extent) -> None:
        """Write an extent, or a state."""
        assert len(extent.token_ids) == 8 * self._grain, "an extent is whole"
        if extent.is_state:
            self.extents[extent.key] = self._snapshots[extent.block_id - len(self._memory)]._replace(pending=())
        else:
            self.extents[extent.key] = self._cells(extent).copy()

    def _store(self) -> None:
        if self._stores:
            extent = self._stores.popleft()
            if not self._checks_versions or self.board.versions[extent.block_id] == extent.version:
                self.keep(extent)
            self.board.post_pending(0, len(self._stores))

    def _hang(self) -> None:
        """Begin or cease to hang. A load that is cancelled meanwhile ends, and its memory may be used at once."""
        self._hangs = self._rng.random() < (0.8 if self._hangs else 0.05)
        if self._hangs and self._loads and self.board.is_cancelled(self._load_number):
            self._loads.clear()
            self.board.post_stuck(0, True)
            self.board.post_end(0, self._load_number)
        if not self._hangs:
            self.board.post_stuck(0, False)

    def _load(self) -> None:
        if not self._loads or self._hangs:
            return
        extent = self._loads.popleft()
        is_read = extent.key in self.extents and not self.board.is_cancelled(self._load_number)
        if extent.is_state:
            self._snapshots[extent.block_id - len(self._memory)] = self.extents[extent.key] if is_read else None
            self.num_loaded_states += is_read
        else:
            self._cells(extent)[:] = self.extents[extent.key] if is_read else -2  # a failed read leaves anything
        if is_read:
            self._num_loaded += 1
            self.num_loaded += 1
            self.board.post_progress(0, self._load_number, self._num_loaded, self._rng.choice([0, 1, 10**6]))
        else:
            self._loads.clear()
        if not self._loads:
            self.board.post_end(0, self._load_number)
