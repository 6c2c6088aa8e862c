"""The plan of a job: which rows are answered together, and written to one part of the output.

A unit is the piece of work that an engine takes, and that runs again if the engine dies. The plan follows from the
input alone, so that every run of a job, on any number of engines, has the same units. It holds where rows are, and
never what is in them.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_UNIT_ROWS = 256
MAX_UNIT_BYTES = 2**20  # of input; long prompts make small units, so that all engines get some
NO_DOCUMENT = -1


class RowPlace(NamedTuple):
    """Where a row is, and which rows it shares a document with."""

    file_idx: int
    line: int  # lines of JSON or rows of Parquet before it in the file
    offset: int  # bytes before it in a file of JSON lines; 0 for Parquet
    document: int = NO_DOCUMENT  # counted from 0 in the order in which the documents appear in the input


class ScannedRow(NamedTuple):
    file_idx: int
    line: int
    offset: int
    num_bytes: int
    document_key: bytes | None


@dataclass(frozen=True)
class UnitLimits:
    """A unit is closed before it would exceed a limit. The rows of one document stay together whatever their number."""

    max_rows: int = MAX_UNIT_ROWS
    max_bytes: int = MAX_UNIT_BYTES


class Unit:
    """A list of rows, stored as integers: a job of a million rows is 32 MB."""

    def __init__(self, places: Iterable[RowPlace] = (), packed: bytes = b"") -> None:
        """`packed`: what another unit's `packed` was."""
        self._numbers = array("q", packed)
        for place in places:
            self.add(place)

    def add(self, place: RowPlace) -> None:
        self._numbers.extend(place)

    def __len__(self) -> int:
        return len(self._numbers) // len(RowPlace._fields)

    @property
    def packed(self) -> bytes:
        return self._numbers.tobytes()

    @property
    def places(self) -> list[RowPlace]:
        numbers = iter(self._numbers)
        return [RowPlace(*place) for place in zip(*[numbers] * len(RowPlace._fields), strict=True)]

    def describe(self, names: Sequence[str]) -> str:
        """Where its rows come from, for a message. `names`: of the input files."""
        places = self.places
        first, last = places[0], places[-1]
        if len(places) == 1:
            return f"line {first.line + 1} of {names[first.file_idx]}"
        where = f"{len(places)} rows from line {first.line + 1} of {names[first.file_idx]} to line {last.line + 1}"
        return where if first.file_idx == last.file_idx else f"{where} of {names[last.file_idx]}"


class _Group:
    """Rows that stay together."""

    def __init__(self) -> None:
        self.rows = Unit()
        self.num_bytes = 0

    def add(self, row: ScannedRow, document: int) -> None:
        self.rows.add(RowPlace(row.file_idx, row.line, row.offset, document))
        self.num_bytes += row.num_bytes


def plan_units(rows: Iterable[ScannedRow], limits: UnitLimits = UnitLimits()) -> list[Unit]:
    """The units in order. Rows keep their order, except that a document's rows follow its first one."""
    units: list[Unit] = []
    num_bytes = 0
    for group in _groups(rows):
        fits = units and len(units[-1]) + len(group.rows) <= limits.max_rows
        if not fits or num_bytes + group.num_bytes > limits.max_bytes:
            units.append(Unit())
            num_bytes = 0
        for place in group.rows.places:
            units[-1].add(place)
        num_bytes += group.num_bytes
    return units


def _groups(rows: Iterable[ScannedRow]) -> Iterator[_Group]:
    """Each row without a document, and all rows of each document, in the order in which they begin.

    From the first document on they are collected, because its last row may be the last of the input.
    """
    collected: list[_Group] = []
    documents: dict[bytes, tuple[int, _Group]] = {}
    for row in rows:
        key = row.document_key
        if key is not None and key in documents:
            number, group = documents[key]
            group.add(row, number)
            continue
        group = _Group()
        number = NO_DOCUMENT if key is None else len(documents)
        group.add(row, number)
        if key is not None:
            documents[key] = (number, group)
        if documents:
            collected.append(group)
        else:
            yield group
    yield from collected


def runs_of(places: Sequence[RowPlace]) -> Iterator[list[int]]:
    """The indices of rows that stay together: those of each document, and each row without one by itself."""
    run: list[int] = []
    for i, place in enumerate(places):
        if run and (place.document == NO_DOCUMENT or place.document != places[run[-1]].document):
            yield run
            run = []
        run.append(i)
    if run:
        yield run
