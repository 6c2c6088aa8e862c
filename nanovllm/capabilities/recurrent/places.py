"""RecurrentStates: the places of the states of recurrent layers. Snapshots: states that are kept for later prompts.

A running sequence has a slot on the GPU, in which every step leaves its newest state. Attention can go on anywhere in a
known text, but a recurrent layer needs the state there. So some states are copied to snapshots in CPU memory, and a
prefix hit ends where there is one. States are kept where they pay:
- at the end of a prompt, rounded down to whole grains, with at least one token behind it;
- where a prompt parts from what is known: others may part there, too;
- where a waiting prompt parts from one that is being computed, because it waits for that state;
- every SNAPSHOT_TOKENS tokens, so that little has to be computed again wherever a later prompt parts.

A preempted sequence leaves its state too, and goes on where it was if its blocks are still there.

A snapshot belongs to a prefix of the index and goes with it. Without room for a new one, the least recently used goes.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from nanovllm.plan.kv_spec import SAVE_SLOTS, SNAPSHOT_TOKENS
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import StateFlush, StateSave, StateStep
from nanovllm.utils.arithmetic import ceil_div


class Snapshots:
    """The snapshots by prefix, least recently used first: each holds the state after its prefix.

    `version` counts changes.
    """

    def __init__(self, count: int) -> None:
        self.count, self.version = count, 0
        self.versions: np.ndarray | None = None  # number of states that each was given; None: nobody asks
        self._unused = list(reversed(range(count)))
        self._held: set[int] = set()  # snapshots that are being loaded from disk
        self._by_prefix: OrderedDict[int, int] = OrderedDict()  # prefix id -> snapshot

    def __contains__(self, prefix_id: int) -> bool:
        return prefix_id in self._by_prefix

    def __len__(self) -> int:
        """Number of snapshots in use."""
        return len(self._by_prefix)

    def find(self, prefix_id: int | None) -> int | None:
        """The snapshot of a prefix, if it has one."""
        return None if prefix_id is None else self._by_prefix.get(prefix_id)

    def oldest(self, share: int) -> list[int]:
        """The prefixes that lose their snapshots when 1/`share` of all snapshots is taken."""
        return list(islice(self._by_prefix, max(0, self.count // share - len(self._unused))))

    def use(self, prefix_id: int) -> int:
        """Return the snapshot of a prefix, which becomes the most recently used one."""
        self.touch(prefix_id)
        return self._by_prefix[prefix_id]

    def touch(self, prefix_id: int) -> None:
        """Make the snapshot of a prefix, if it has one, the most recently used one."""
        if prefix_id in self._by_prefix:
            self._by_prefix.move_to_end(prefix_id)

    def add(self, prefix_id: int) -> int:
        """Choose the snapshot for a prefix that has none."""
        snapshot = self._by_prefix[prefix_id] = self._take()
        return snapshot

    def _take(self) -> int:
        snapshot = self._unused.pop() if self._unused else self._by_prefix.popitem(last=False)[1]
        if self.versions is not None:
            self.versions[snapshot] += 1
        self.version += 1
        return snapshot

    def hold(self) -> int:
        """Choose a snapshot for a state that is loaded from disk, until `give_back`."""
        assert len(self._held) + 1 < self.count, "no snapshot would be left for states that are computed"
        snapshot = self._take()
        self._held.add(snapshot)
        return snapshot

    def give_back(self, snapshot: int, prefix_id: int | None) -> None:
        """A held snapshot has the state after a prefix now; None: it has none."""
        self._held.remove(snapshot)
        if prefix_id is None or prefix_id in self._by_prefix:
            self._unused.append(snapshot)
        else:
            self._by_prefix[prefix_id] = snapshot
        self.version += 1

    def forget(self, prefix_id: int) -> None:
        """Nothing holds the K and V of the prefix any more."""
        snapshot = self._by_prefix.pop(prefix_id, None)
        if snapshot is not None:
            self._unused.append(snapshot)
            self.version += 1


class Paused(NamedTuple):
    """A preempted sequence that can go on where it was, as long as its K and V and its snapshot are there."""

    num_tokens: int  # computed
    num_state_tokens: int  # tokens that the state covers; the others were guesses, and are pending
    tail_block: int  # the block of the last tokens if it is not full; -1: it is


@dataclass(slots=True)
class _Held:
    """The slot of a running sequence."""

    slot: int
    num_tokens: int  # tokens that the state in the slot covers, once all planned steps have run
    load: int = -1  # the snapshot to start from
    save_points: list[int] = field(default_factory=list)  # numbers of tokens, ascending


def _pause_key(seq: Sequence) -> int:
    """In the place of a prefix id, which is never negative: the snapshot of a preempted sequence."""
    return ~seq.seq_id


class RecurrentStates:
    def __init__(self, num_slots: int, num_snapshots: int, *, snapshot_tokens: int = SNAPSHOT_TOKENS) -> None:
        """`num_slots`: with slot 0, which is nobody's. There must be one for each sequence that runs."""
        self.snapshots = Snapshots(num_snapshots)
        self.num_slots, self.snapshot_tokens = num_slots, snapshot_tokens
        self._free = list(range(num_slots - 1, 0, -1))
        self._borrowed: list[int] = []  # in the step being planned
        self._held: dict[int, _Held] = {}  # by seq_id
        self._paused: dict[int, Paused] = {}  # likewise
        self._flushes: list[StateFlush] = []  # for the next step
        self.num_loads = self.num_saves = 0

    def begin_step(self) -> None:
        self._free += self._borrowed
        self._borrowed.clear()

    def admit(
        self, seq: Sequence, prefix_id: int | None, num_matched_tokens: int, grain: int, *, is_resumed: bool
    ) -> None:
        """Give a sequence a slot. Its computed tokens are the prefix `prefix_id`, or those of its pause if it is
        resumed, or else there are none. `num_matched_tokens`: those whose K and V are known.
        """
        start = seq.num_computed_tokens
        held = self._held[seq.seq_id] = _Held(self._free.pop(), start)
        if is_resumed:
            prefix_id, held.num_tokens = _pause_key(seq), self._paused[seq.seq_id].num_state_tokens
        if prefix_id is not None:
            held.load = self.snapshots.use(prefix_id)
            self.num_loads += 1
        if self.snapshots.count:
            interval, last = ceil_div(self.snapshot_tokens, grain) * grain, (len(seq.token_ids) - 1) // grain * grain
            points = {last, num_matched_tokens, *range(interval, last, interval)}
            held.save_points = sorted(point for point in points if point > start)

    def pause(self, seq: Sequence, tail_block: int) -> None:
        """The sequence is about to be preempted: keep its state. `free` follows."""
        held = self._held[seq.seq_id]
        self._paused[seq.seq_id] = Paused(seq.num_computed_tokens, held.num_tokens, tail_block)
        self._flushes.append(StateFlush(held.slot, self.snapshots.add(_pause_key(seq))))

    def find_paused(self, seq: Sequence) -> Paused | None:
        """Find the rest of a waiting sequence that was preempted; None if its state is gone."""
        return self._paused.get(seq.seq_id) if _pause_key(seq) in self.snapshots else None

    def forget_paused(self, seq: Sequence) -> Paused | None:
        """The sequence does not wait any more."""
        self.snapshots.forget(_pause_key(seq))
        return self._paused.pop(seq.seq_id, None)

    def take_flushes(self) -> tuple[StateFlush, ...]:
        flushes, self._flushes = tuple(self._flushes), []
        return flushes

    def hold_snapshot(self) -> int:
        """Choose a snapshot for a state that is loaded from disk. No step that is planned from here on writes to it."""
        snapshot = self.snapshots.hold()
        self._flushes = [flush for flush in self._flushes if flush.snapshot != snapshot]
        return snapshot

    def free(self, seq: Sequence) -> None:
        """The sequence no longer runs."""
        self._free.append(self._held.pop(seq.seq_id).slot)

    def num_with_saves(self, seq: Sequence, num_tokens: int) -> int:
        """Count how many of the next `num_tokens` tokens a chunk may have so that each state to be kept has a slot. The
        state at the end of the chunk needs none. Prompts that share the step may still take the slots.
        """
        points, num_free = self._held[seq.seq_id].save_points, len(self._free)
        return min(num_tokens, points[num_free] - seq.num_computed_tokens) if num_free < len(points) else num_tokens

    def keep_at(self, seq: Sequence, num_tokens: int, chunk_end: int) -> bool:
        """Also keep the state after the sequence's first `num_tokens` tokens, which end in the chunk that has just been
        placed. Returns False if there is no slot for the state.
        """
        points = self._held[seq.seq_id].save_points
        if not self.snapshots.count:
            return False
        if num_tokens not in points:
            if bisect_left(points, chunk_end) + (num_tokens < chunk_end) > len(self._free):
                return False
            insort(points, num_tokens)
        return True

    @property
    def can_draft(self) -> bool:
        """True if there is a slot for one more sequence's drafts. The last ones are left to states that are saved."""
        return len(self._free) > SAVE_SLOTS * (self.snapshots.count > 0)

    def step(
        self, seq: Sequence, num_tokens: int, prefix_id: Callable[[int], int | None], *, has_drafts: bool
    ) -> StateStep:
        """Plan what a step does with the state of a sequence that is placed in it with `num_tokens` certain tokens.

        `prefix_id`: returns the id of the sequence's prefix of so many tokens, if the index knows it.
        """
        held, start = self._held[seq.seq_id], seq.num_computed_tokens
        end = start + num_tokens
        num_points = bisect_right(held.save_points, end)
        points, held.save_points = held.save_points[:num_points], held.save_points[num_points:]
        wanted = {point: prefix for point in points if (prefix := prefix_id(point)) is not None}
        for prefix in wanted.values():
            self.snapshots.touch(prefix)
        # If other chunks take the slots, the last states count most: of the whole prompt, or where it parts from others
        new = [point for point, prefix in wanted.items() if prefix not in self.snapshots]
        num_free = len(self._free) + (end in new)
        saves = [
            StateSave(point - start, held.slot if point == end else self._borrow(), self.snapshots.add(wanted[point]))
            for point in new[len(new) - min(len(new), num_free) :]
        ]
        self.num_saves += len(saves)
        step = StateStep(
            held.slot if start else -1,
            held.slot,
            num_replayed=start - held.num_tokens,
            draft_slot=self._borrow() if has_drafts else -1,
            load=held.load,
            saves=tuple(saves),
        )
        held.num_tokens, held.load = end, -1
        return step

    def _borrow(self) -> int:
        """Take a slot for this step."""
        self._borrowed.append(self._free.pop())
        return self._borrowed[-1]

    def stats(self) -> dict[str, float | None]:
        return {
            "num_state_slots": self.num_slots - 1,
            "num_snapshots": self.snapshots.count,
            "num_used_snapshots": len(self.snapshots),
            "num_state_loads": self.num_loads,
            "num_state_saves": self.num_saves,
        }
