"""ChunkTimes: measures how long steps without chunks of prompts take, and how much longer steps take with them.

A chunk costs the time of its linear layers, which grows with its tokens, and the time of its attention, which grows
with tokens times keys. The model's shapes give the ratio of the two, so both are counted in one unit of work: a query
that attends to a key. The time that chunks add to a step is then a line in their work:

    fixed_s + work_s * work

`fixed_s` is the cost of any chunk, however short. Both are measured while the engine runs. Steps that are short enough
to run as a CUDA graph have a line of their own. All others are then long, and a single rate models these.

Now and then a step is slow for other reasons, for example because its kernels are prepared. So of two times of about
the same work, the lower one counts. Until a second time of its magnitude is known, a long chunk counts as no slower,
for its work, than shorter ones. Otherwise one slow step could make all later chunks so short that no other long one is
ever measured.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import combinations
from statistics import median
from typing import NamedTuple

from nanovllm.core.step_plan import StepPlan

NUM_DECODE_TIMES = 15  # the time of a step without chunks is the median of so many
NUM_CHUNK_TIMES = 3  # kept for each magnitude of work, so that a single slow step does not count
NUM_RATE_CHUNKS = 5
MAX_FIXED_SHARE = 0.5  # fixed_s is at most this share of the time of the chunk with the most work
MIN_RATIO = 4.0  # two works give a slope if they differ by this factor
MAX_RATIO = 16.0  # rates of two works are compared up to this factor; the rate of much less work is noise


def chunk_work(num_tokens: int, position: int, token_keys: int) -> float:
    """Return the work of a chunk at `position`. A token's linear layers cost as much as attending to `token_keys`."""
    return num_tokens * (token_keys + position + num_tokens / 2)


def chunk_tokens(work: float, position: int, token_keys: int) -> int:
    """Return the most tokens whose work is at most `work`: `chunk_work`, solved for the tokens."""
    each = token_keys + position
    return int(max(0.0, 2 * work / (each + math.sqrt(each * each + 2 * max(0.0, work)))))


class ChunkLine(NamedTuple):
    """The time that chunks add to a step: fixed_s + work_s * work."""

    fixed_s: float
    work_s: float
    knows_fixed: bool  # chunks of different work were measured; if not, fixed_s is 0


class ChunkTimes:
    """A step's time runs from the end of the step before to its own. Steps with chunks that bring in keys from CPU
    memory do not count: the link may take longer than the chunks.
    """

    def __init__(self, token_keys: int, graph_tokens: int = 0) -> None:
        """`graph_tokens`: most tokens of chunks in a step that runs as a graph; 0 if none does."""
        self.token_keys, self.graph_tokens = token_keys, graph_tokens
        self._decode_s: deque[float] = deque(maxlen=NUM_DECODE_TIMES)
        self._in_graphs = _MeasuredLine()
        self._launched: _MeasuredLine | _NewestRate = _NewestRate() if graph_tokens else _MeasuredLine()

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        """See StepMeter."""
        if seconds is None:
            return
        chunks = [step for step in plan.sequences if step.num_tokens > step.num_sampled]
        if not chunks:
            self._decode_s.append(seconds)
            return
        has_answers = len(chunks) < len(plan.sequences)
        if plan.moves.brings_in_keys or plan.moves.loads or (has_answers and not self._decode_s):
            return
        work = sum(chunk_work(step.num_tokens, step.position, self.token_keys) for step in chunks)
        added_s = seconds - (median(self._decode_s) if has_answers else 0.0)
        if added_s > 0:  # else the times of steps without chunks are of another load
            in_graph = sum(step.num_tokens for step in chunks) <= self.graph_tokens
            (self._in_graphs if in_graph else self._launched).add(work, added_s)

    @property
    def decode_s(self) -> float | None:
        """The time of a step without chunks; None if there was none."""
        return median(self._decode_s) if self._decode_s else None

    def line(self, *, in_graph: bool = False) -> ChunkLine | None:
        """Return the time that chunks add to a step; None if none was measured.

        `in_graph`: chunks of up to `graph_tokens` tokens. Until longer ones are measured, they are taken to follow the
        same line. With graphs, the line of longer ones has no fixed time.
        """
        in_graphs = self._in_graphs.line()
        return in_graphs if in_graph else self._launched.line() or in_graphs


class _MeasuredLine:
    """A line through the newest times of chunks."""

    def __init__(self) -> None:
        self._chunks: dict[int, deque[tuple[float, float]]] = defaultdict(_newest_chunks)  # by magnitude: work, time
        self._line: ChunkLine | None = None  # of self._chunks; None: to be computed

    def add(self, work: float, added_s: float) -> None:
        self._chunks[int(work).bit_length()].append((work, added_s))
        self._line = None

    def line(self) -> ChunkLine | None:
        """Fit the line. Its slope is the median of the slopes between any two magnitudes (Theil and Sen), which a few
        wrong times do not disturb.
        """
        if self._line is None and self._chunks:
            points = sorted((*_typical(newest), len(newest) > 1) for newest in self._chunks.values())
            self._line = _fitted_line(_without_slow_steps(points))
        return self._line


class _NewestRate:
    """The rate of the newest chunks. The slowest one does not count: its kernels may have been prepared."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[float, float]] = deque(maxlen=NUM_RATE_CHUNKS)  # work, time

    def add(self, work: float, added_s: float) -> None:
        self._chunks.append((work, added_s))

    def line(self) -> ChunkLine | None:
        if not self._chunks:
            return None
        by_rate = sorted(self._chunks, key=lambda point: point[1] / point[0])
        counted = by_rate[:-1] or by_rate
        return ChunkLine(0.0, sum(s for _, s in counted) / sum(w for w, _ in counted), knows_fixed=False)


def _newest_chunks() -> deque[tuple[float, float]]:
    return deque(maxlen=NUM_CHUNK_TIMES)


def _typical(newest: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the chunk with the median time per work, or the faster one of two, as work and seconds."""
    by_rate = sorted(newest, key=lambda point: point[1] / point[0])
    return by_rate[(len(by_rate) - 1) // 2]


def _without_slow_steps(points: list[tuple[float, float, bool]]) -> list[tuple[float, float]]:
    """Lower the times that were measured only once. `points`: work, seconds, True if measured twice; sorted by work."""
    kept = []
    for w, t, is_sure in points:
        rate = min((s / v for v, s, _ in points if v < w <= MAX_RATIO * v), default=math.inf)
        kept.append((w, t if is_sure else min(t, w * rate)))
    return kept


def _fitted_line(points: list[tuple[float, float]]) -> ChunkLine:
    """Fit a line to `points`: work and seconds, sorted by work.

    Times that do not fit a line must not make long chunks look free, so no point lies below `fixed_s`, and the point of
    the most work does not lie above the line. Nor may slow steps make chunks look useless: at least half of the time of
    the most work grows with it.
    """
    slopes = [(t - s) / (w - v) for (v, s), (w, t) in combinations(points, 2) if w >= MIN_RATIO * v]
    if not slopes:
        return ChunkLine(0.0, median(s / w for w, s in points), knows_fixed=False)
    slope = max(0.0, median(slopes))
    fixed_s = max(0.0, min(median(s - slope * w for w, s in points), *(s for _, s in points)))
    most_work, its_s = points[-1]
    fixed_s = min(fixed_s, MAX_FIXED_SHARE * its_s)
    return ChunkLine(fixed_s, max(slope, (its_s - fixed_s) / most_work), knows_fixed=True)
