"""Finds what an engine still knows of requests that have ended."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from nanovllm.plan.sequence import Sequence

FIRST_ID = 10**12  # no other number in an engine is as large; ids of requests begin here where a test looks for them


def leftovers(root: Any) -> list[str]:
    """Return the paths from `root` to every id of a request and every Sequence, through objects of nanovllm."""
    return list(_search(root, type(root).__name__, set()))


def _search(value: Any, path: str, seen: set[int]) -> Iterator[str]:
    if isinstance(value, int):
        if FIRST_ID <= max(value, ~value) < FIRST_ID + 10**6:  # ~seq_id is a key of snapshots
            yield f"{path} = {value}"
        return
    if isinstance(value, str | bytes | float) or value is None or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Sequence):
        yield f"{path} = sequence {value.seq_id}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _search(key, f"{path}[key]", seen)
            yield from _search(item, f"{path}[{key!r:.30}]", seen)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from _search(item, f"{path}[]", seen)
    elif type(value).__module__.startswith("nanovllm"):
        names = {
            *getattr(value, "__dict__", ()),
            *(n for c in type(value).__mro__ for n in getattr(c, "__slots__", ())),
        }
        for name in sorted(names):
            yield from _search(getattr(value, name, None), f"{path}.{name}", seen)
