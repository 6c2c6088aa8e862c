"""StepBound: limits the chunks of a step, so that a step ends soon and running answers keep their pace.

No step is longer than `max_step_s`, as far as shorter chunks can help. A second rule limits the chunks of long prompts
beside other work. They are spread in one of two ways:

- *In every step*, as long as the step takes at most PACE times as long as a step without chunks. This does not help
  when the fixed cost of a chunk dominates, or when its history is streamed from CPU memory, which takes the same time
  for one token as for thousands. With CUDA graphs it is not done either: it slows down every token, whereas long steps
  slow down one of 160.
- *In one long step out of LONG_STEP_INTERVAL* otherwise, which is as long as allowed. A running answer then waits for a
  long step less than once in a hundred tokens, so the 99th percentile of its time per token is that of the other steps.
  Chunks of short prompts cannot wait, and each step that is slow because of them puts the next long step off by
  LONG_STEP_INTERVAL steps. Long steps come sooner if a long prompt would otherwise get less than a fifth of the time
  (REST_SHARE), so it takes at most about five times as long as alone. Several long prompts get more.

Short prompts run in any step: they need a short time to first token, and cost little.

All times are estimates from measurements while the engine runs. While nothing is known, long prompts run in long steps
of any length. The first chunk of a step has at least MIN_CHUNK_TOKENS, so prompts always progress.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import combinations
from statistics import median
from typing import NamedTuple

from nanovllm.plan.step_plan import StepPlan

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
    """Measures how long steps without chunks of prompts take, and how much longer steps take with them.

    A chunk costs the time of its linear layers, which grows with its tokens, and the time of its attention, which grows
    with tokens times keys. The model's shapes give the ratio of the two, so both are counted in one unit of work: a
    query that attends to a key. The time that chunks add to a step is then a line in their work:

        fixed_s + work_s * work

    `fixed_s` is the cost of any chunk, however short. Both are measured while the engine runs. Steps that are short
    enough to run as a CUDA graph have a line of their own. All others are then long, and a single rate models these.

    Now and then a step is slow for other reasons, for example because its kernels are prepared. So of two times of
    about the same work, the lower one counts. Until a second time of its magnitude is known, a long chunk counts as no
    slower, for its work, than shorter ones. Otherwise one slow step could make all later chunks so short that no other
    long one is ever measured.

    A step's time runs from the end of the step before to its own. Steps with chunks that bring in keys from CPU
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
        self._line: ChunkLine | None = None  # fitted to self._chunks; None: to be computed

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


PACE = 2.5  # the promise is 3; the margin is for estimates that are too low
LONG_STEP_INTERVAL = 160  # 0.6% of the steps, which leaves room for steps that are slow for other reasons
REST_SHARE = 4.0  # longest time between two long steps, relative to a long one, for many others and one long prompt
MIN_USEFUL_SHARE = 0.5  # so much of the time that a chunk adds to a step must grow with its length
MIN_CHUNK_TOKENS = 256


class StepBound:
    def __init__(self, times: ChunkTimes, *, max_step_s: float, missing_token_s: float = 0.0) -> None:
        """`missing_token_s`: time to stream one token's keys and values, all layers of them."""
        self.times, self.max_step_s, self._missing_token_s = times, max_step_s, missing_token_s
        self._num_steps_since = LONG_STEP_INTERVAL  # since the last step with a chunk of a long prompt, with this one
        self._num_slow_since = 0  # slow steps with short prompts since then, while long ones waited
        self._rest_s = 0.0  # time of the steps since then
        self._long_s = max_step_s  # time of that step
        # State of the step that is being planned
        self._num_chunks, self._num_tokens, self._work = 0, 0, 0.0  # placed so far
        self._short_s = 0.0  # time of the chunks of short prompts
        self._has_long = self._is_paced = False  # a long prompt has a chunk; its chunk keeps the pace
        self._holds_long = False  # long prompts have to wait
        self._long_limit_s = self._streaming_s = 0.0  # time for chunks of long prompts, and to stream their keys
        self._least_tokens = MIN_CHUNK_TOKENS  # the first chunk's minimum

    def begin_step(self, num_others: int, num_long: int, num_missing_tokens: int) -> None:
        """Begin to plan a step. `num_others`: answers and short prompts with work to do. `num_long`: long prompts.

        `num_missing_tokens`: keys of the oldest long prompt that are not on the GPU.
        """
        self._num_steps_since += 1
        self._num_chunks, self._num_tokens, self._work = 0, 0, 0.0
        self._short_s, self._has_long = 0.0, False
        self._set_long_limit(num_others, num_long, num_missing_tokens * self._missing_token_s)
        self._holds_long = num_long > 0 and not self.runs_long_prompts
        self._rest_s += self.times.decode_s or 0.0

    @property
    def runs_long_prompts(self) -> bool:
        """True if this step runs chunks of long prompts. If not, they wait for a later step."""
        return self._long_limit_s > 0

    @property
    def is_long_step(self) -> bool:
        """True if the planned step is a long one. Even its launch takes as long as several other steps."""
        return self._has_long and not self._is_paced and self._num_tokens > self.times.graph_tokens

    def max_tokens(self, position: int, *, is_long: bool, is_oldest: bool) -> int:
        """Return the most tokens of a chunk at `position`; 0 if its prompt must wait for a later step.

        The oldest prompt gets at least half the time.
        """
        limit_s = self._long_limit_s if is_long else self.max_step_s
        num_tokens = self._tokens_within(limit_s, position, least_share=0.5 if is_oldest else 0.0)
        return num_tokens if self._num_chunks and not is_oldest else max(num_tokens, self._least_tokens)

    def chunk_placed(self, num_tokens: int, position: int, *, is_long: bool) -> None:
        """Count a chunk that the step runs."""
        self._num_tokens += num_tokens
        line = self.times.line(in_graph=self._num_tokens <= self.times.graph_tokens)
        work, is_first = chunk_work(num_tokens, position, self.times.token_keys), not self._num_chunks
        was_slow = self._is_slow()
        self._num_chunks += 1
        self._work += work
        self._has_long |= is_long
        if is_long:
            self._num_steps_since = self._num_slow_since = 0
            self._rest_s = 0.0
            chunks_s = self.max_step_s if line is None else line.fixed_s + line.work_s * self._work
            self._long_s = max(chunks_s, self._streaming_s)
        elif self._holds_long:
            added_s = 0.0 if line is None else line.fixed_s * is_first + line.work_s * work
            self._short_s += added_s
            self._rest_s += added_s
            self._num_slow_since += self._is_slow() and not was_slow

    def _is_slow(self) -> bool:
        """Return True if short prompts make the step so long that answers notice."""
        return self._num_chunks > 0 and self._short_s >= (PACE - 1) * (self.times.decode_s or 0.0)

    def _set_long_limit(self, num_others: int, num_long: int, streaming_s: float) -> None:
        """Choose the time for chunks of long prompts in this step; 0 if they have to wait.

        The work that is done while keys are streamed takes no time of its own.
        """
        self._streaming_s, long_s = streaming_s, max(self.max_step_s, streaming_s)
        self._long_limit_s, self._least_tokens, self._is_paced = long_s, MIN_CHUNK_TOKENS, False
        if num_others and num_long:
            if paced_s := self._paced_s(streaming_s):
                self._long_limit_s, self._least_tokens, self._is_paced = paced_s, 1, True
            elif not self._has_rested(num_others, num_long):
                self._long_limit_s = 0.0

    def _paced_s(self, streaming_s: float) -> float:
        """Return the time that a chunk may add to a step with answers; 0 if that is too little to be useful."""
        decode_s, line = self.times.decode_s, self.times.line()
        if self.times.graph_tokens or decode_s is None or line is None or not line.knows_fixed:
            return 0.0
        added_s = min(PACE * decode_s, self.max_step_s) - decode_s
        return added_s if line.fixed_s + streaming_s <= (1 - MIN_USEFUL_SHARE) * added_s else 0.0

    def _has_rested(self, num_others: int, num_long: int) -> bool:
        """Return True if the next long step may run. Many long prompts beside few others get more of the time."""
        longest_rest_s = REST_SHARE * self._long_s * num_others / (num_others + num_long)
        num_slow = 1 + self._num_slow_since
        return self._num_steps_since >= LONG_STEP_INTERVAL * num_slow or self._rest_s >= longest_rest_s

    def _tokens_within(self, seconds: float, position: int, least_share: float = 0.0) -> int:
        """Return the tokens that fit into what the chunks placed before have left of `seconds`.

        At least `least_share` of the seconds count as left. While nothing is known, any number fits.
        """
        line = self.times.line()
        if line is None or not line.work_s:
            return 2**31
        work = max(0.0, seconds - line.fixed_s) / line.work_s
        return chunk_tokens(max(work - self._work, least_share * work), position, self.times.token_keys)
