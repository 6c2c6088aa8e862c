"""ChunkTimes: how long steps without chunks of prompts take, and how much longer a step takes with them.

A chunk costs the time of its linear layers, which grows with its tokens, and the time of its attention, which grows
with tokens times keys. The shapes of the model give the ratio of the two, so both are counted in one unit: a query that
attends to a key. What a step takes longer because of its chunks is then a line in their work:

    fixed_s + work_s * work

`fixed_s` is what any chunk costs, however short it is: a step with chunks runs without CUDA graphs. Both are measured
while the engine runs.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import combinations
from statistics import median
from typing import NamedTuple

from nanovllm.core.step_plan import StepPlan

NUM_DECODE_TIMES = 15  # whose median is the time of a step without chunks
NUM_CHUNK_TIMES = 3  # of each magnitude of work, so that a single slow step does not count
MIN_RATIO = 4.0  # of two works, from whose times a slope can be told


def chunk_work(num_tokens: int, position: int, token_keys: int) -> float:
    """Work of a chunk that begins at `position`. A token's linear layers cost as much as attending to `token_keys`."""
    return num_tokens * (token_keys + position + num_tokens / 2)


def chunk_tokens(work: float, position: int, token_keys: int) -> int:
    """The most tokens whose work is not above `work`: `chunk_work`, solved for the tokens."""
    each = token_keys + position
    return int(max(0.0, 2 * work / (each + math.sqrt(each * each + 2 * max(0.0, work)))))


class ChunkLine(NamedTuple):
    """What chunks add to the time of a step: fixed_s + work_s * work."""

    fixed_s: float
    work_s: float
    knows_fixed: bool  # whether chunks of different work were measured; if not, fixed_s is 0


class ChunkTimes:
    """A step's time runs from the arrival of the tokens of the step before to that of its own, as in LinkMeter. Steps
    with chunks that bring in keys from CPU memory do not count: the link may take longer than the chunks.
    """

    def __init__(self, token_keys: int, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.token_keys, self._now_s = token_keys, now_s
        self._decode_s: deque[float] = deque(maxlen=NUM_DECODE_TIMES)
        self._chunks: dict[int, deque[tuple[float, float]]] = defaultdict(_newest_chunks)  # by magnitude: work, time
        self._line: ChunkLine | None = None  # of self._chunks; None: to be computed
        self._last_end_s: float | None = None

    def step_ended(self, plan: StepPlan) -> None:
        """Called for every step, in order, when its tokens have arrived."""
        last_end_s, self._last_end_s = self._last_end_s, self._now_s()
        if last_end_s is None:
            return
        seconds = self._last_end_s - last_end_s
        chunks = [step for step in plan.sequences if step.num_tokens > step.num_sampled]
        if not chunks:
            self._decode_s.append(seconds)
            return
        has_answers = len(chunks) < len(plan.sequences)
        if plan.moves.brings_in_keys or plan.moves.loads or (has_answers and not self._decode_s):
            return
        work = sum(chunk_work(step.num_tokens, step.position, self.token_keys) for step in chunks)
        added_s = seconds - (median(self._decode_s) if has_answers else 0.0)
        self._chunks[int(work).bit_length()].append((work, max(0.0, added_s)))
        self._line = None

    def pause(self) -> None:
        """The engine has run out of requests. Do not count the time until the next step."""
        self._last_end_s = None

    @property
    def decode_s(self) -> float | None:
        """Time of a step without chunks; None if there was none."""
        return median(self._decode_s) if self._decode_s else None

    def line(self) -> ChunkLine | None:
        """What chunks add to the time of a step; None if no chunk was measured.

        The slope is the median of the slopes between any two magnitudes of work (Theil and Sen), which few wrong times
        do not disturb.
        """
        if self._line is None and self._chunks:
            points = [(median(w for w, _ in newest), median(s for _, s in newest)) for newest in self._chunks.values()]
            self._line = _fitted_line(sorted(points))
        return self._line


def _newest_chunks() -> deque[tuple[float, float]]:
    return deque(maxlen=NUM_CHUNK_TIMES)


def _fitted_line(points: list[tuple[float, float]]) -> ChunkLine:
    """`points`: work and seconds, in order of work.

    Times that do not fit a line must not make long chunks look free. So no point lies below `fixed_s`, and that of the
    most work does not lie above the line.
    """
    slopes = [(t - s) / (w - v) for (v, s), (w, t) in combinations(points, 2) if w >= MIN_RATIO * v]
    if not slopes:
        return ChunkLine(0.0, median(s / w for w, s in points), knows_fixed=False)
    slope = max(0.0, median(slopes))
    fixed_s = max(0.0, min(median(s - slope * w for w, s in points), *(s for _, s in points)))
    most_work, its_s = points[-1]
    return ChunkLine(fixed_s, max(slope, (its_s - fixed_s) / most_work), knows_fixed=True)
