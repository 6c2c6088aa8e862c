"""How prompts share steps. PromptSharing: their order, and how many tokens each may run. PromptsUnderway: which waiting
prompts begin with the same tokens as a running prompt.

A waiting prompt can use the K and V of a running prompt as soon as a step that computes the K and V is planned. If hits
need snapshots (kvcache/snapshots.py), the waiting prompt also needs the snapshot, which is usable only one step later.
A waiting prompt that started at once would compute the same tokens again. So the scheduler lets the waiting prompt wait
for the running prompt, its *leader*.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from nanovllm.kvcache.block_manager import KVCacheManager
from nanovllm.plan.sequence import Sequence, SequenceStatus
from nanovllm.schedule.planned_step import PlannedStep
from nanovllm.schedule.step_bound import StepBound


def arrival(seq: Sequence) -> int:
    """Return the key that sorts sequences by their arrival."""
    return seq.seq_id


class Leader(NamedTuple):
    """A running prompt that shares its first `num_common_tokens` tokens with a waiting prompt, and has not computed all
    of them.

    The step being planned computes the leader's tokens `start` to `end` - 1. The range is empty if the step does not
    run the leader.
    """

    seq: Sequence
    num_common_tokens: int  # a multiple of the prefix index's grain
    start: int
    end: int


class PromptsUnderway:
    """The running prompts, indexed by the hashes of their grains. A grain's hash covers all tokens up to its end.

    If hashes collide, a prompt may wait for a running prompt without a common prefix, until the running prompt ends.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv, self._pool = kv, kv.pool
        self._prompts: dict[int, tuple[Sequence, set[int]]] = {}  # by seq_id, with the hashes of the prompt's grains
        self._by_hash: dict[int, dict[int, Sequence]] = {}  # by hash, then by seq_id
        self._chunks: dict[int, tuple[int, int]] = {}  # by seq_id: start and end of the chunk in the step being planned

    def begin_step(self) -> None:
        """Begin to plan a step, and forget the prompts that have been computed."""
        self._chunks.clear()
        grain = self._pool.index.grain
        for seq, _ in list(self._prompts.values()):
            if seq.num_computed_tokens >= len(seq.token_ids) // grain * grain:
                self.remove(seq)

    def placed(self, seq: Sequence, num_tokens: int) -> None:
        """Note that the step being planned computes the next `num_tokens` tokens of a prompt."""
        start, grain = seq.num_computed_tokens, self._pool.index.grain
        self._chunks[seq.seq_id] = start, start + num_tokens
        num_grains = len(seq.token_ids) // grain
        if self._pool.enable_prefix_caching and seq.seq_id not in self._prompts and start < num_grains * grain:
            hashes = {self._pool.index.grain_hash(seq, i) for i in range(num_grains)}
            self._prompts[seq.seq_id] = seq, hashes
            for grain_hash in hashes:
                self._by_hash.setdefault(grain_hash, {})[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """Forget a prompt that has been computed, or whose sequence no longer runs."""
        self._chunks.pop(seq.seq_id, None)
        for grain_hash in self._prompts.pop(seq.seq_id, (seq, set()))[1]:
            prompts = self._by_hash[grain_hash]
            del prompts[seq.seq_id]
            if not prompts:
                del self._by_hash[grain_hash]

    def leader(self, seq: Sequence) -> Leader | None:
        """Find the leader of a waiting prompt: the running prompt with the most common tokens.

        Among several, the leader is the prompt with the most computed tokens.
        """
        if not self._by_hash or not seq.can_use_prefix_cache:
            return None
        index = self._pool.index
        num_grains = (len(seq.token_ids) - 1) // index.grain
        if not num_grains or index.grain_hash(seq, 0) not in self._by_hash:
            return None
        by_hash, at_least, most = self._by_hash, 1, num_grains  # grains in common
        while len(seq.grain_hashes) < most:  # hashes are computed only if they are needed
            longer = min(2 * at_least, num_grains)
            at_least, most = (longer, most) if index.grain_hash(seq, longer - 1) in by_hash else (at_least, longer)
        num_common = bisect_left(seq.grain_hashes, True, at_least, most, key=lambda each: each not in by_hash)
        num_common_tokens = num_common * index.grain
        prompts = self._by_hash[seq.grain_hashes[num_common - 1]].values()
        computing = [other for other in prompts if other.num_computed_tokens < num_common_tokens]
        if not computing:
            return None
        leader = max(computing, key=lambda other: other.num_computed_tokens)
        start = leader.num_computed_tokens
        return Leader(leader, num_common_tokens, *self._chunks.get(leader.seq_id, (start, start)))

    def leaders(self, prompts: list[Sequence]) -> dict[int, Sequence]:
        """Find the running prompts that waiting prompts could follow, by the seq_id of the waiting prompt."""
        running = {seq.seq_id for seq in prompts if seq.status is SequenceStatus.RUNNING}
        waiting = [seq for seq in prompts if seq.status is SequenceStatus.WAITING] if running else []
        found = ((seq.seq_id, self.leader(seq)) for seq in waiting)
        return {seq_id: leader.seq for seq_id, leader in found if leader is not None and leader.seq.seq_id in running}

    def waits_for_leader(self, seq: Sequence, max_tokens: int) -> bool:
        """Return True if a waiting prompt, which could run `max_tokens` tokens, should not start in this step: its
        leader computes at least as much of their common tokens. So the prompt loses no time, and the leader cannot
        leave the prompt waiting in a step in which the leader does not run.
        """
        leader = self.leader(seq)
        if leader is None or leader.start == leader.end:
            return False
        num_common, num_known = leader.num_common_tokens, self._kv.num_known_tokens(seq)
        if num_known >= num_common:
            return False
        # Unless hits need snapshots, the leader's chunk of this step is known, too
        start = num_known if self._pool.index.snapshots is not None else min(num_known, leader.start)
        if leader.end < min(start + max_tokens, num_common):
            return False
        return leader.end < num_common or self._kv.companions.keep_prefix(leader.seq, num_common, leader.end)

    def serve_followers(self, waiting: Iterable[Sequence]) -> bool:
        """Keep the prefixes at which waiting prompts part from their leaders in this step.

        Returns True if there is such a prefix: less is left of its prompt now.
        """
        has_followers = False
        for leader in map(self.leader, waiting):
            if leader is not None and leader.num_common_tokens <= leader.end:
                self._kv.companions.keep_prefix(leader.seq, leader.num_common_tokens, leader.end)
                has_followers = True
        return has_followers


SHORT_SHARE = 8


class PromptSharing:
    """Decides in which order prompts share a step, and how many tokens each of them may run.

    A prompt's size is the number of tokens that the prompt had to compute when it began to wait; tokens in the prefix
    cache do not count. Sizes are compared by magnitude: prompts of at most 1/SHORT_SHARE of a step have equal sizes,
    and so have all prompts between this limit and twice the limit, and so on. Prompts of equal size are served in order
    of arrival, one after the other: sharing a step finishes none of them sooner. A smaller prompt goes ahead of a
    larger prompt. So a short prompt is in the next step that is planned, however many long prompts arrived before it.

    The oldest prompt, of any size, is guaranteed half of what the step has for prompts. So the oldest prompt ends at
    most about twice as late as if it were served first, and then the next prompt is the oldest.

    If a waiting prompt has a leader (see PromptsUnderway), the leader goes directly before the waiting prompt, and has
    its guarantee.
    """

    def __init__(self, step_tokens: int, bound: StepBound | None) -> None:
        """`step_tokens`: the budget of a step. `bound`: bounds the duration of steps, or None without a bound."""
        self.bound, self._step_tokens = bound, step_tokens

    def size_class(self, seq: Sequence) -> int:
        """Return 0 for a short prompt, and one more for each doubling of the size."""
        return (max(0, seq.num_queued_tokens - 1) * SHORT_SHARE // self._step_tokens).bit_length()

    def is_long(self, seq: Sequence) -> bool:
        return self.size_class(seq) > 0

    def in_order(self, prompts: list[Sequence], leaders: Mapping[int, Sequence]) -> list[Sequence]:
        """Sort smaller prompts first, and prompts of equal size in order of arrival. `leaders`: see turns."""
        places = {seq.seq_id: (self.size_class(seq), seq.seq_id, 1) for seq in prompts}
        for seq_id, leader in leaders.items():
            places[leader.seq_id] = min(places[leader.seq_id], (*places[seq_id][:2], 0))
        return sorted(prompts, key=lambda seq: places[seq.seq_id])

    def turns(
        self, prompts: list[Sequence], step: PlannedStep, kv: KVCacheManager, leaders: Mapping[int, Sequence]
    ) -> Iterator[tuple[Sequence, int]]:
        """Yield each prompt, and how many tokens the prompt may run in this step. A prompt must be placed before the
        next prompt is asked for.

        `step`: holds the running answers already. `leaders`: among `prompts`, by the seq_id of prompts that wait.
        """
        allowed = self._allowed(self.in_order(prompts, leaders), len(step), kv)
        if not allowed:
            return
        oldest = min(allowed, key=arrival)
        leader = leaders.get(oldest.seq_id, oldest)
        oldest = leader if leader in allowed else oldest
        num_left_to_oldest = min(oldest.num_uncomputed_tokens, (step.budget + 1) // 2)
        if oldest.status is SequenceStatus.WAITING:  # admit it first, so that no other prompt takes its room
            ahead = allowed[: allowed.index(oldest)]
            num_ahead = sum(seq.num_queued_tokens for seq in ahead if seq.seq_id not in leaders)
            yield oldest, self._bounded(oldest, max(num_left_to_oldest, step.budget - num_ahead), is_oldest=True)
            allowed.remove(oldest)
            num_left_to_oldest = 0
        for seq in allowed:
            if seq is oldest:
                num_left_to_oldest = 0
            yield seq, self._bounded(seq, step.budget - num_left_to_oldest, is_oldest=seq is oldest)

    def _allowed(self, prompts: list[Sequence], num_answers: int, kv: KVCacheManager) -> list[Sequence]:
        """Return the prompts that may run in this step: all of them, or only the short ones."""
        if self.bound is None:
            return prompts
        short = [seq for seq in prompts if not self.is_long(seq)]
        long = [seq for seq in prompts if self.is_long(seq)]
        num_missing_tokens = kv.num_missing_tokens(min(long, key=arrival)) if long else 0
        self.bound.begin_step(num_answers + len(short), len(long), num_missing_tokens)
        return prompts if self.bound.runs_long_prompts else short

    def _bounded(self, seq: Sequence, num_tokens: int, is_oldest: bool) -> int:
        if self.bound is None:
            return num_tokens
        position = max(seq.num_computed_tokens, seq.num_tokens - seq.num_queued_tokens)  # after the hits it will have
        return min(num_tokens, self.bound.max_tokens(position, is_long=self.is_long(seq), is_oldest=is_oldest))

    def placed(self, seq: Sequence, num_tokens: int) -> None:
        """Note that the step runs the next `num_tokens` tokens of this prompt."""
        if self.bound is not None:
            self.bound.chunk_placed(num_tokens, seq.num_computed_tokens, is_long=self.is_long(seq))
