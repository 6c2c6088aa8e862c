"""A happens-before race detector for memory that several streams touch.

Each stream has a vector clock: `clock[i]` is the last epoch of stream i whose work is ordered before what the stream
does next. An access at epoch e of stream i is ordered before a clock when `clock[i] >= e`. Any two accesses of one
byte by different streams, at least one of them a write, must be ordered, or `StreamRaceError` names both.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch


class StreamRaceError(AssertionError):
    """Two conflicting accesses that no event orders."""


class Site(NamedTuple):
    """A line of the code under test."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Access(NamedTuple):
    """One read or write by a stream; `epoch` is the stream's own."""

    stream: str
    stream_index: int
    epoch: int
    verb: Literal["reads", "writes"]
    site: Site

    def before(self, clock: list[int]) -> bool:
        return clock[self.stream_index] >= self.epoch

    def __str__(self) -> str:
        return f"{self.stream} {self.verb} at {self.site}"


class _Segment(NamedTuple):
    """Bytes start..end-1 with one history: the last write, and of each stream the last read since."""

    start: int
    end: int
    write: Access | None
    reads: dict[int, Access]

    def unordered(self, access: Access, clock: list[int]) -> Access | None:
        """An earlier access that conflicts with `access` and does not happen before `clock`."""
        if self.write is not None and not self.write.before(clock):
            return self.write
        if access.verb == "writes":
            return next((read for read in self.reads.values() if not read.before(clock)), None)
        return None


class _Conflict(NamedTuple):
    earlier: Access
    start: int
    end: int


class _Memory:
    """Histories of disjoint byte ranges, sorted by address.

    The last write and each stream's last read are enough: what is ordered after them is ordered after all before.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: list[_Segment] = []

    def access(self, start: int, end: int, access: Access, clock: list[int]) -> _Conflict | None:
        """Enter an access to bytes start..end-1 made at `clock`, or return the conflict that forbids it."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._segments[first].end <= start:
            first += 1
        last = bisect_left(self._starts, end)
        old = self._segments[first:last]
        for segment in old:
            if (earlier := segment.unordered(access, clock)) is not None:
                return _Conflict(earlier, max(start, segment.start), min(end, segment.end))
        new = []
        if old and old[0].start < start:
            new.append(old[0]._replace(end=start))
        new.extend(self._history(start, end, access, old))
        if old and old[-1].end > end:
            new.append(old[-1]._replace(start=end))
        self._segments[first:last] = new
        self._starts[first:last] = [segment.start for segment in new]
        return None

    @staticmethod
    def _history(start: int, end: int, access: Access, old: list[_Segment]) -> Iterator[_Segment]:
        """The segments of start..end-1 after `access`: one for a write; a read keeps those there and fills gaps."""
        if access.verb == "writes":
            yield _Segment(start, end, access, {})
            return
        reads = {access.stream_index: access}
        for segment in old:
            if start < segment.start:
                yield _Segment(start, segment.start, None, reads)
            start = max(start, segment.start)
            yield _Segment(start, min(end, segment.end), segment.write, segment.reads | reads)
            start = min(end, segment.end)
        if start < end:
            yield _Segment(start, end, None, reads)


class _Region(NamedTuple):
    name: str
    tensor: torch.Tensor

    def describe(self, start: int, end: int) -> str | None:
        """Bytes start..end-1 as an index of up to three leading dimensions; None when they are not all in here."""
        base, shape, size = self.tensor.data_ptr(), self.tensor.shape[:3], self.tensor.element_size()
        if not base <= start < end <= base + self.tensor.numel() * size:
            return None
        cell_bytes = self.tensor[(0,) * len(shape)].numel() * size
        first = np.unravel_index((start - base) // cell_bytes, shape)
        last = np.unravel_index((end - 1 - base) // cell_bytes, shape)
        index = []
        for low, high in zip(first, last, strict=True):
            index.append(str(low) if low == high else f"{low}:{high + 1}")
            if low != high:
                break
        return f"{self.name}[{', '.join(index)}]"


class RaceDetector:
    """The histories of all memory that streams touched, and the names of its regions."""

    def __init__(self) -> None:
        self._memory = _Memory()
        self._regions: list[_Region] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is ever given out twice

    def name_region(self, name: str, tensor: torch.Tensor) -> None:
        """Call the memory of a contiguous tensor `name[...]` in messages."""
        assert tensor.is_contiguous(), f"{name} must be contiguous"
        self._regions.append(_Region(name, tensor))

    def check(self, tensor: torch.Tensor, access: Access, clock: list[int]) -> None:
        """Enter an access to all of a contiguous tensor, made at `clock`. Raises StreamRaceError."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage
        start = tensor.data_ptr()
        conflict = self._memory.access(start, start + tensor.numel() * tensor.element_size(), access, clock)
        if conflict is not None:
            where = self._describe(conflict.start, conflict.end)
            raise StreamRaceError(f"{where}: {access}, not ordered after {conflict.earlier}")

    def _describe(self, start: int, end: int) -> str:
        named = (region.describe(start, end) for region in self._regions)
        return next((name for name in named if name is not None), f"{end - start} bytes at {start:#x}")
