"""Snapshots: what prefix hits need besides K and V, kept in CPU memory."""

from collections import OrderedDict

import numpy as np


class Snapshots:
    """Which snapshot belongs to which prefix, least recently used first. `version` counts changes."""

    def __init__(self, count: int) -> None:
        self.count, self.version = count, 0
        self.versions = np.zeros(count, np.int64)  # how often each snapshot was taken
        self._unused = list(reversed(range(count)))
        self._held: set[int] = set()  # snapshots that are being filled from elsewhere
        self._by_prefix: OrderedDict[int, int] = OrderedDict()  # prefix id -> snapshot

    def __contains__(self, prefix_id: int) -> bool:
        return prefix_id in self._by_prefix

    def __len__(self) -> int:
        """Number of snapshots in use."""
        return len(self._by_prefix)

    def find(self, prefix_id: int | None) -> int | None:
        """Return the snapshot of a prefix, or None."""
        return None if prefix_id is None else self._by_prefix.get(prefix_id)

    def use(self, prefix_id: int) -> int:
        """Return the snapshot of a prefix, which becomes the most recently used snapshot."""
        self.touch(prefix_id)
        return self._by_prefix[prefix_id]

    def touch(self, prefix_id: int) -> None:
        """Make the snapshot of a prefix, if it has one, the most recently used snapshot."""
        if prefix_id in self._by_prefix:
            self._by_prefix.move_to_end(prefix_id)

    def add(self, prefix_id: int) -> int:
        """Choose the snapshot for a prefix that has none."""
        snapshot = self._by_prefix[prefix_id] = self._take()
        return snapshot

    def _take(self) -> int:
        snapshot = self._unused.pop() if self._unused else self._by_prefix.popitem(last=False)[1]
        self.versions[snapshot] += 1
        self.version += 1
        return snapshot

    def hold(self) -> int:
        """Choose a snapshot to be filled from elsewhere, until `give_back`."""
        assert len(self._held) + 1 < self.count, "no snapshot would be left for the steps"
        snapshot = self._take()
        self._held.add(snapshot)
        return snapshot

    def give_back(self, snapshot: int, prefix_id: int | None) -> None:
        """Give a held snapshot to a prefix, or to none if `prefix_id` is None."""
        self._held.remove(snapshot)
        if prefix_id is None or prefix_id in self._by_prefix:
            self._unused.append(snapshot)
        else:
            self._by_prefix[prefix_id] = snapshot
        self.version += 1

    def forget(self, prefix_id: int) -> None:
        """Drop the snapshot of a prefix whose K and V are no longer held."""
        snapshot = self._by_prefix.pop(prefix_id, None)
        if snapshot is not None:
            self._unused.append(snapshot)
            self.version += 1
