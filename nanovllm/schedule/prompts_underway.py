"""PromptsUnderway: finds a running prompt that is being computed and begins with the same tokens as a waiting prompt.

A waiting prompt can use the K and V of a running prompt as soon as a step that computes the K and V is planned. With
recurrent layers, the waiting prompt also needs a state, which is usable only one step later. A waiting prompt that
started at once would compute the same tokens again. So the scheduler lets the waiting prompt wait for the running
prompt, its *leader*.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from nanovllm.kvcache.block_manager import KVCacheManager
from nanovllm.plan.sequence import Sequence, SequenceStatus


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
