"""RecurrentStates: the places of the states of recurrent layers.

A running sequence has a slot on the GPU, in which every step leaves its newest state. Attention can resume at any token
of a known text, but a recurrent layer needs the state at this token. So some states are copied to snapshots in CPU
memory, and a prefix hit ends at a snapshot. States are saved where they pay:
- at the end of a prompt, rounded down to whole grains, with at least one token after it;
- where a prompt diverges from known prefixes: other prompts may diverge there, too;
- where a waiting prompt diverges from a prompt that is being computed, because it waits for this state;
- every SNAPSHOT_TOKENS tokens, so that little has to be recomputed wherever a later prompt diverges.

A preempted sequence also saves its state, and resumes where it stopped if its blocks are still in memory.

A snapshot belongs to a prefix of the index and is dropped with the prefix. Without room for a new snapshot, the least
recently used one is dropped.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.kvcache.block_pool import PrefixMatch
from nanovllm.kvcache.seams import Companion, GpuBlockOf, Resumption
from nanovllm.kvcache.snapshots import Snapshots
from nanovllm.plan.kv_spec import SAVE_SLOTS, SNAPSHOT_TOKENS
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import SequenceStep
from nanovllm.utils.arithmetic import ceil_div


class StateFlush(NamedTuple):
    """A copy of the state in the slot of a preempted sequence to a snapshot."""

    slot: int
    snapshot: int


class StateFlushes(NamedTuple):
    """Step payload: copies that take effect before the step's states are loaded and its slots are written."""

    flushes: tuple[StateFlush, ...]

    @property
    def acts_by_layer(self) -> bool:
        return False


class SnapshotSave(NamedTuple):
    """A copy of the state after the first `num_tokens` new tokens of a sequence to a snapshot, from `slot`.

    `slot` is the sequence's slot if its new tokens end there, and otherwise an additional slot in which the step leaves
    the state, or -1 if the layers copy the state to the snapshot.
    """

    num_tokens: int
    slot: int
    snapshot: int


class StateStep(NamedTuple):
    """Sequence payload: the state that the new tokens start from and leave (see StateRows in state_tensors.py)."""

    source: int  # the slot whose state the new tokens start from, or -1 for zeros
    target: int  # the sequence's slot
    num_replayed: int = 0
    draft_slot: int = -1  # where drafts leave their states; -1 if the model itself does not draft
    load: int = -1  # the snapshot that is first copied to the source, or -1
    saves: tuple[SnapshotSave, ...] = ()  # in order of num_tokens

    def in_draft(self, draft: SequenceStep, step: SequenceStep, i: int) -> SequenceStep:
        slot = self.draft_slot
        if slot < 0:
            return draft
        return draft.with_payload(StateStep(slot, slot) if i else StateStep(self.source, slot, self.num_replayed))


class Paused(NamedTuple):
    """A preempted sequence that can resume where it stopped, as long as its K and V and its snapshot exist."""

    num_tokens: int  # computed tokens
    num_state_tokens: int  # tokens that the state covers; the other tokens were draft tokens, and are pending
    tail_block: int  # the block of the last tokens, or -1 if that block is full


@dataclass(slots=True)
class _Held:
    """The slot of a running sequence."""

    slot: int
    num_tokens: int  # tokens that the state in the slot covers, once all planned steps have run
    load: int = -1  # the snapshot to start from
    save_points: list[int] = field(default_factory=list)  # numbers of tokens, ascending


def _pause_key(seq: Sequence) -> int:
    """Return the key of a preempted sequence's snapshot, used like a prefix id; prefix ids are never negative."""
    return ~seq.seq_id


class RecurrentStates(Companion):
    snapshots: Snapshots
    first_slot = 1  # of sequences; the padding rows of graphs write to slot 0

    def __init__(
        self,
        num_slots: int,
        num_snapshots: int,
        *,
        model_drafts: bool = True,
        snapshot_tokens: int = SNAPSHOT_TOKENS,
    ) -> None:
        """Each running sequence needs a slot. `model_drafts`: the model itself makes the drafts and needs a slot for
        their states.
        """
        self.snapshots = Snapshots(num_snapshots)
        self.num_slots, self.snapshot_tokens, self.model_drafts = num_slots, snapshot_tokens, model_drafts
        self._free = list(range(num_slots - 1, self.first_slot - 1, -1))
        self._borrowed: list[int] = []  # slots that the step borrows
        self._held: dict[int, _Held] = {}  # by seq_id
        self._paused: dict[int, Paused] = {}  # by seq_id
        # Copies for the next step, each with the version of its snapshot
        self._flushes: list[tuple[StateFlush, int]] = []
        self.num_loads = self.num_saves = 0

    def begin_step(self) -> None:
        self._free += self._borrowed
        self._borrowed.clear()

    # -- sequences come and go -------------------------------------------------------------------------------------

    def resumption(self, seq: Sequence, match: PrefixMatch) -> Resumption | None:
        """See Companion. Returns None also if the state or a block is gone, and if the prefix cache has more of the
        sequence's tokens than the sequence itself had computed.
        """
        block_size = self.pool.index.block_size
        paused = self._paused.get(seq.seq_id) if _pause_key(seq) in self.snapshots else None
        if paused is None or paused.num_tokens <= len(match.full_blocks) * block_size + match.num_partial_tokens:
            return None
        num_full, num_tail_tokens = divmod(paused.num_tokens, block_size)
        tail = [paused.tail_block] if num_tail_tokens else []
        if len(match.known_blocks) < num_full or any(self.pool.blocks[i].tail_of != seq.seq_id for i in tail):
            return None
        return Resumption([*match.known_blocks[:num_full], *tail], paused.num_tokens)

    def admit(self, seq: Sequence, match: PrefixMatch, *, is_resumed: bool) -> None:
        """Give the sequence a slot, and decide where to save its states."""
        start, grain = seq.num_computed_tokens, self.pool.index.grain
        held = self._held[seq.seq_id] = _Held(self._free.pop(), start)
        prefix_id = match.prefix_id
        if is_resumed:
            prefix_id, held.num_tokens = _pause_key(seq), self._paused[seq.seq_id].num_state_tokens
        if prefix_id is not None:
            held.load = self.snapshots.use(prefix_id)
            self.num_loads += 1
        if self.snapshots.count:
            interval, last = ceil_div(self.snapshot_tokens, grain) * grain, (len(seq.token_ids) - 1) // grain * grain
            parting = max(match.num_known_tokens, seq.num_disk_tokens)
            points = {last, parting, *range(interval, last, interval)}
            held.save_points = sorted(point for point in points if point > start)
        self._forget_pause(seq)

    def preempt(self, seq: Sequence) -> None:
        """Save the state of the sequence, and mark its last block, so that the sequence can resume."""
        if not self.snapshots.count or not seq.num_computed_tokens:
            return
        block_idx, num_tail_tokens = divmod(seq.num_computed_tokens, self.pool.index.block_size)
        tail = seq.block_table[block_idx] if num_tail_tokens else -1
        if tail >= 0:
            self.pool.blocks[tail].tail_of = seq.seq_id
        held = self._held[seq.seq_id]
        self._paused[seq.seq_id] = Paused(seq.num_computed_tokens, held.num_tokens, tail)
        snapshot = self.snapshots.add(_pause_key(seq))
        self._flushes.append((StateFlush(held.slot, snapshot), int(self.snapshots.versions[snapshot])))

    def forget(self, seq: Sequence) -> None:
        held = self._held.pop(seq.seq_id, None)
        if held is not None:
            self._free.append(held.slot)
        else:
            self._forget_pause(seq)

    def _forget_pause(self, seq: Sequence) -> None:
        """Drop the pause of a sequence that no longer waits."""
        self.snapshots.forget(_pause_key(seq))
        paused = self._paused.pop(seq.seq_id, None)
        if paused is not None and paused.tail_block >= 0:
            block = self.pool.blocks[paused.tail_block]
            block.tail_of = -1 if block.tail_of == seq.seq_id else block.tail_of

    # -- one step --------------------------------------------------------------------------------------------------

    def plan_step(self, placed: Seq[tuple[Sequence, int]], gpu_block: GpuBlockOf) -> StateFlushes | None:
        # Skip a snapshot that was reused meanwhile: it may be filled from elsewhere
        versions = self.snapshots.versions
        flushes = tuple([flush for flush, version in self._flushes if versions[flush.snapshot] == version])
        self._flushes = []
        return StateFlushes(flushes) if flushes else None

    def num_placeable(self, seq: Sequence, num_tokens: int) -> int:
        """Count how many of the next `num_tokens` tokens a chunk may have so that each state to be saved has a slot.
        The state at the end of the chunk needs none. Other prompts in the step may still take the slots.
        """
        points, num_free = self._held[seq.seq_id].save_points, self.num_save_slots
        return min(num_tokens, points[num_free] - seq.num_computed_tokens) if num_free < len(points) else num_tokens

    def keep_prefix(self, seq: Sequence, num_tokens: int, chunk_end: int) -> bool:
        points = self._held[seq.seq_id].save_points
        if not self.snapshots.count:
            return False
        if num_tokens not in points:
            if bisect_left(points, chunk_end) + (num_tokens < chunk_end) > self.num_save_slots:
                return False
            insort(points, num_tokens)
        return True

    def can_draft(self, seq: Sequence) -> bool:
        """Return True if there is a slot for another sequence's drafts. The last slots are reserved for
        saved states.
        """
        return not self.model_drafts or len(self._free) > SAVE_SLOTS * (self.snapshots.count > 0)

    def plan_sequence(
        self, seq: Sequence, num_tokens: int, num_guesses: int, gpu_block: GpuBlockOf, *, has_drafts: bool
    ) -> StateStep:
        held, start = self._held[seq.seq_id], seq.num_computed_tokens
        end = start + num_tokens - num_guesses
        num_points = bisect_right(held.save_points, end)
        points, held.save_points = held.save_points[:num_points], held.save_points[num_points:]
        wanted = {point: prefix for point in points if (prefix := self.pool.prefix_id(seq, point)) is not None}
        for prefix in wanted.values():
            self.snapshots.touch(prefix)
        # If other chunks take the slots, the last states matter most: at the prompt's end, or where it diverges from
        # others
        new = [point for point, prefix in wanted.items() if prefix not in self.snapshots]
        num_free = self.num_save_slots + (end in new)
        saves = [
            SnapshotSave(
                point - start, held.slot if point == end else self._save_slot(), self.snapshots.add(wanted[point])
            )
            for point in new[len(new) - min(len(new), num_free) :]
        ]
        self.num_saves += len(saves)
        step = StateStep(
            held.slot if start else -1,
            held.slot,
            num_replayed=start - held.num_tokens,
            draft_slot=self._borrow() if has_drafts and self.model_drafts else -1,
            load=held.load,
            saves=tuple(saves),
        )
        held.num_tokens, held.load = end, -1
        return step

    @property
    def num_save_slots(self) -> int:
        """Count the states in the middle of chunks that the step can still save."""
        return len(self._free)

    def _save_slot(self) -> int:
        """Take a slot for a state in the middle of a chunk."""
        return self._borrow()

    def _borrow(self) -> int:
        """Take a slot for this step."""
        self._borrowed.append(self._free.pop())
        return self._borrowed[-1]

    def stats(self) -> dict[str, float | None]:
        return {
            "num_state_slots": self.num_slots - self.first_slot,
            "num_snapshots": self.snapshots.count,
            "num_used_snapshots": len(self.snapshots),
            "num_state_loads": self.num_loads,
            "num_state_saves": self.num_saves,
        }
