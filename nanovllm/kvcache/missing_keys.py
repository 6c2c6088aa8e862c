"""Missing keys: the keys of blocks without a slot. A step streams them in groups, or the CPU attends to them in place.

The missing blocks are put in a row. The first blocks are streamed, the last blocks are left to the CPU, and at most one
block is divided between link and CPU. A block that several sequences read comes first, since the link carries it only
once. Otherwise the row follows the order of CPU memory, so that contiguous blocks share a copy.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from nanovllm.kvcache.seams import STREAM_ALL, StepSplit
from nanovllm.plan.step_plan import CpuSpan, StreamedGroup


class MissingKeys(NamedTuple):
    """Groups to stream, and spans for the CPU."""

    streamed: tuple[StreamedGroup, ...] = ()
    cpu_spans: tuple[tuple[CpuSpan, ...], ...] = ()  # by sequence; empty if the CPU attends to nothing


def divide_missing(
    rows: Sequence[Sequence[int]],
    num_queries: Sequence[int],
    *,
    block_size: int,
    group_blocks: int,
    split: StepSplit,
) -> MissingKeys:
    """`rows`: the CPU blocks that each sequence misses, all full. `num_queries`: the new tokens of each sequence."""
    costs = dict.fromkeys((block_id for row in rows for block_id in row), 0.0)  # the CPU's seconds for a token
    if not costs:
        return MissingKeys()
    if not split.takes_part(num_queries):
        split = STREAM_ALL
    for row, n in zip(rows, num_queries, strict=True):
        token_cost_s = split.cpu_token_s(n)
        for block_id in row:
            costs[block_id] += token_cost_s
    block_ids = sorted(costs, key=lambda block_id: (-costs[block_id], block_id))
    num_tokens = len(block_ids) * block_size
    num_streamed = num_tokens - split.num_cpu_tokens([costs[block_id] for block_id in block_ids], block_size)
    assert 0 <= num_streamed <= num_tokens, f"{num_streamed} of {num_tokens} missing tokens are streamed"
    place = {block_id: i for i, block_id in enumerate(block_ids)}
    return MissingKeys(
        _groups(rows, place, num_streamed, block_size, group_blocks),
        _cpu_spans(rows, place, num_streamed, block_size) if num_streamed < num_tokens else (),
    )


def _groups(
    rows: Sequence[Sequence[int]], place: Mapping[int, int], num_streamed: int, block_size: int, group_blocks: int
) -> tuple[StreamedGroup, ...]:
    """Divide the first `num_streamed` tokens into groups of `group_blocks`. `place`: each block's index in the row."""
    num_blocks = -(-num_streamed // block_size)
    block_ids = [block_id for block_id, i in place.items() if i < num_blocks]
    starts = range(0, num_blocks, group_blocks)
    tables: list[list[tuple[int, ...]]] = [[()] * len(rows) for _ in starts]
    for row, missing in enumerate(rows):
        places = sorted(divmod(i, group_blocks) for block_id in missing if (i := place[block_id]) < num_blocks)
        for group, members in groupby(places, itemgetter(0)):
            tables[group][row] = tuple([i for _, i in members])
    num_cut = num_blocks * block_size - num_streamed
    return tuple(
        StreamedGroup(
            tuple(block_ids[start : start + group_blocks]),
            tuple(table),
            num_cut if start + group_blocks >= num_blocks else 0,
        )
        for start, table in zip(starts, tables, strict=True)
    )


def _cpu_spans(
    rows: Sequence[Sequence[int]], place: Mapping[int, int], num_streamed: int, block_size: int
) -> tuple[tuple[CpuSpan, ...], ...]:
    """Return the spans after the first `num_streamed` tokens."""
    return tuple(
        tuple(
            CpuSpan(block_id, start, block_size)
            for block_id in sorted(missing)
            if (start := max(0, num_streamed - place[block_id] * block_size)) < block_size
        )
        for missing in rows
    )
