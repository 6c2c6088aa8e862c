"""PrefixRouting: which replica answers a request. It remembers which replicas have read the beginnings of prompts.

A request goes to a replica that has read the beginning of its prompt, because the KV of the beginning is in the prefix
cache there. It goes elsewhere if that replica's queue is too long; from then on, several replicas hold the beginning.

Only a request's two longest beginnings are looked up. They cover at least a quarter of the prompt, so a system prompt
that all requests share does not draw them all to one replica, unless it is most of what they send.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping

import xxhash

from nanovllm.cluster.request_keys import RequestKey

NUM_LOOKED_UP = 2
MAX_QUEUE_GAP = 16  # requests that a replica's queue may be longer than the shortest one, for the sake of its cache
MAX_BEGINNINGS = 1 << 16  # that are remembered: about 15 MB, and 5,000 prompts of 4 MB


class PrefixRouting:
    """Used in one thread. Replicas are named by strings; `queues` has the number of open requests of each."""

    def __init__(self, max_queue_gap: int = MAX_QUEUE_GAP, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self._max_queue_gap, self._max_beginnings = max_queue_gap, max_beginnings
        self._holders: OrderedDict[int, set[str]] = OrderedDict()  # by beginning, the least recently used first

    def choose(self, key: RequestKey, queues: Mapping[str, int]) -> str:
        """The replica for a request, which is assumed to read the prompt. `queues` must not be empty."""
        replica = self._choose(key, queues)
        self._remember(key.beginnings, replica)
        return replica

    def forget_all_but(self, replicas: Collection[str]) -> None:
        """The caches of all other replicas are gone."""
        for beginning, holders in list(self._holders.items()):
            holders.intersection_update(replicas)
            if not holders:
                del self._holders[beginning]

    def _choose(self, key: RequestKey, queues: Mapping[str, int]) -> str:
        if key.is_sticky:
            return _preferred(queues, key.text_hash)
        longest_allowed = min(queues.values()) + self._max_queue_gap
        for beginning in key.beginnings[: -NUM_LOOKED_UP - 1 : -1]:
            holders = self._holders.get(beginning, set()) & queues.keys()
            if holders:
                replica = _shortest_queue({holder: queues[holder] for holder in holders}, key.text_hash)
                if queues[replica] <= longest_allowed:
                    return replica
        return _shortest_queue(queues, key.text_hash)

    def _remember(self, beginnings: tuple[int, ...], replica: str) -> None:
        for beginning in beginnings:
            self._holders.setdefault(beginning, set()).add(replica)
            self._holders.move_to_end(beginning)
        while len(self._holders) > self._max_beginnings:
            self._holders.popitem(last=False)


def _shortest_queue(queues: Mapping[str, int], text_hash: int) -> str:
    shortest = min(queues.values())
    return _preferred([replica for replica, queue in queues.items() if queue == shortest], text_hash)


def _preferred(replicas: Collection[str], text_hash: int) -> str:
    """By rendezvous hashing: a text keeps its replica as long as that exists, whichever others come and go."""
    return max(replicas, key=lambda replica: (xxhash.xxh3_64_intdigest(f"{text_hash} {replica}".encode()), replica))
