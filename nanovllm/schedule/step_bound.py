"""StepBound: limits the prompt chunks of a step, so that a step ends soon and running answers keep their pace.

Chunks are short enough that no step takes longer than `max_step_s`, unless the step takes longer even with the shortest
chunk. A second rule limits chunks of long prompts while other sequences run. The chunks are spread in one of two ways:

- *Over every step*, if a step with a chunk takes at most PACE times as long as a step without chunks. Chunks in every
  step are useless if the fixed cost of a chunk dominates, or if the chunk's earlier keys are streamed from CPU memory,
  which takes the same time for one token as for thousands. With CUDA graphs, chunks never run in every step: they would
  slow down every token, whereas long steps slow down one token in 160.
- *In one long step out of LONG_STEP_INTERVAL* otherwise. The long step takes up to `max_step_s`. A running answer then
  meets a long step less than once in a hundred tokens, so long steps do not raise the 99th percentile of its time per
  token. Chunks of short prompts cannot wait, and each step that they make slow delays the next long step by
  LONG_STEP_INTERVAL steps. Long steps come sooner if a long prompt would otherwise get less than a fifth of the time
  (REST_SHARE), so a long prompt takes at most about five times as long as alone. Several long prompts get more time.

Short prompts run in any step: they need a short time to first token, and cost little.

All durations are estimates from measurements while the engine runs. Before the first measurement, long prompts run in
long steps of any length. The first chunk of a step has at least MIN_CHUNK_TOKENS, so prompts always progress.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import combinations
from statistics import median
from typing import NamedTuple

from nanovllm.plan.step_plan import StepPlan

NUM_DECODE_TIMES = 15  # newest durations of steps without chunks, of which the median counts
NUM_CHUNK_TIMES = 3  # newest durations for each magnitude of work, so that a single slow step does not count
NUM_RATE_CHUNKS = 5  # newest chunks that give the rate of long chunks
MAX_FIXED_SHARE = 0.5  # fixed_s is at most this share of the time of the chunk with the most work
MIN_RATIO = 4.0  # two chunks give a slope if their works differ by at least this factor
MAX_RATIO = 16.0  # rates of two chunks are compared if their works differ by at most this factor; beyond is noise


def chunk_work(num_tokens: int, position: int, token_keys: int) -> float:
    """Return the work of a chunk at `position`. A token's linear layers cost as much as `token_keys` keys."""
    return num_tokens * (token_keys + position + num_tokens / 2)


def chunk_tokens(work: float, position: int, token_keys: int) -> int:
    """Return the most tokens whose work is at most `work`: the inverse of `chunk_work`."""
    each = token_keys + position
    return int(max(0.0, 2 * work / (each + math.sqrt(each * each + 2 * max(0.0, work)))))


class ChunkLine(NamedTuple):
    """The time that chunks add to a step: fixed_s + work_s * work."""

    fixed_s: float
    work_s: float
    knows_fixed: bool  # True if chunks of different work were measured; otherwise fixed_s is 0


class ChunkTimes:
    """Measures how long steps without prompt chunks take, and how much time prompt chunks add to a step.

    A chunk costs the time of its linear layers, which grows with its tokens, and the time of its attention, which grows
    with tokens times keys. The model's shapes give the ratio of the two costs, so both are counted in one unit of work:
    a query that attends to a key. The time that chunks add to a step is then linear in their work:

        fixed_s + work_s * work

    `fixed_s` is the cost of any chunk, however short. Both coefficients are measured while the engine runs. Steps that
    are short enough to run as a CUDA graph have a separate line. With CUDA graphs, all other steps are long, so a
    single rate without a fixed cost models them.

    Now and then a step is slow for unrelated reasons, for example because its kernels are compiled. So of two durations
    of about the same work, the shorter one counts. Until two durations of a magnitude of work are known, a long chunk
    is assumed to be no slower, relative to its work, than shorter chunks. Otherwise one slow step could make all later
    chunks so short that no other long chunk is ever measured.

    The duration of a step runs from the end of the previous step to its end. Steps with chunks that bring in keys from
    CPU memory do not count: the link may take longer than the chunks.
    """

    def __init__(self, token_keys: int, graph_tokens: int = 0) -> None:
        """graph_tokens: most tokens of the chunks in a step that runs as a CUDA graph, or 0 without such graphs."""
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
        if added_s > 0:  # otherwise the steps without chunks were measured under a different load
            in_graph = sum(step.num_tokens for step in chunks) <= self.graph_tokens
            (self._in_graphs if in_graph else self._launched).add(work, added_s)

    @property
    def decode_s(self) -> float | None:
        """Return the duration of a step without chunks, or None if no such step was measured."""
        return median(self._decode_s) if self._decode_s else None

    def line(self, *, in_graph: bool = False) -> ChunkLine | None:
        """Return the time that chunks add to a step, or None if no chunk was measured.

        in_graph: True for chunks of up to `graph_tokens` tokens. Until longer chunks are measured, longer chunks are
        assumed to follow the line of chunks in graphs. With graphs, the line of longer chunks has no fixed time.
        """
        in_graphs = self._in_graphs.line()
        return in_graphs if in_graph else self._launched.line() or in_graphs


class _MeasuredLine:
    """A line through the newest durations of chunks."""

    def __init__(self) -> None:
        self._chunks: dict[int, deque[tuple[float, float]]] = defaultdict(_newest_chunks)  # by magnitude: work, seconds
        self._line: ChunkLine | None = None  # fitted to self._chunks, or None if it must be fitted again

    def add(self, work: float, added_s: float) -> None:
        self._chunks[int(work).bit_length()].append((work, added_s))
        self._line = None

    def line(self) -> ChunkLine | None:
        """Fit the line. The slope is the median of the slopes between any two magnitudes (Theil-Sen estimator), which a
        few wrong durations do not change much.
        """
        if self._line is None and self._chunks:
            points = sorted((*_typical(newest), len(newest) > 1) for newest in self._chunks.values())
            self._line = _fitted_line(_without_slow_steps(points))
        return self._line


class _NewestRate:
    """The rate of the newest chunks. The slowest chunk does not count: its kernels may have been compiled."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[float, float]] = deque(maxlen=NUM_RATE_CHUNKS)  # work, seconds

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
    """Return the chunk with the median time per work, or the faster chunk of two, as work and seconds."""
    by_rate = sorted(newest, key=lambda point: point[1] / point[0])
    return by_rate[(len(by_rate) - 1) // 2]


def _without_slow_steps(points: list[tuple[float, float, bool]]) -> list[tuple[float, float]]:
    """Lower the times that were measured only once to what the rates of shorter chunks allow.

    points: work, seconds, and True if measured at least twice; sorted by work.
    """
    kept = []
    for w, t, is_sure in points:
        rate = min((s / v for v, s, _ in points if v < w <= MAX_RATIO * v), default=math.inf)
        kept.append((w, t if is_sure else min(t, w * rate)))
    return kept


def _fitted_line(points: list[tuple[float, float]]) -> ChunkLine:
    """Fit a line to `points`: work and seconds, sorted by work.

    Points that fit no line must not make long chunks look free. So `fixed_s` is at most the time of every point, and
    the line is not below the point with the most work. Slow steps must not make chunks look useless either: at most
    MAX_FIXED_SHARE of the time of the point with the most work is fixed.
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
REST_SHARE = 4.0  # longest time between two long steps, relative to a long step, for many others and one long prompt
MIN_USEFUL_SHARE = 0.5  # at least this share of the time that a chunk adds to a step must grow with its length
MIN_CHUNK_TOKENS = 256


class StepBound:
    def __init__(self, times: ChunkTimes, *, max_step_s: float, missing_token_s: float = 0.0) -> None:
        """missing_token_s: time to stream the keys and values of one token in all layers."""
        self.times, self.max_step_s, self._missing_token_s = times, max_step_s, missing_token_s
        # "The last long step" below is the last step with a chunk of a long prompt
        self._num_steps_since = LONG_STEP_INTERVAL  # steps since the last long step, including the planned step
        self._num_slow_since = 0  # slow steps with short prompts since the last long step, while long prompts waited
        self._rest_s = 0.0  # time of the steps since the last long step
        self._long_s = max_step_s  # time of the chunks in the last long step
        # State of the step that is being planned
        self._num_chunks, self._num_tokens, self._work = 0, 0, 0.0  # placed so far
        self._short_s = 0.0  # time of the chunks of short prompts
        self._has_long = self._is_paced = False  # a long prompt has a chunk; chunks of long prompts run in every step
        self._holds_long = False  # long prompts have to wait
        self._long_limit_s = self._streaming_s = 0.0  # time for chunks of long prompts, and to stream their keys
        self._least_tokens = MIN_CHUNK_TOKENS  # minimum length of the first chunk

    def begin_step(self, num_others: int, num_long: int, num_missing_tokens: int) -> None:
        """Begin to plan a step.

        num_others: answers and short prompts with work to do. num_long: long prompts with work to do.
        num_missing_tokens: keys of the oldest long prompt that are not on the GPU.
        """
        self._num_steps_since += 1
        self._num_chunks, self._num_tokens, self._work = 0, 0, 0.0
        self._short_s, self._has_long = 0.0, False
        self._set_long_limit(num_others, num_long, num_missing_tokens * self._missing_token_s)
        self._holds_long = num_long > 0 and not self.runs_long_prompts
        self._rest_s += self.times.decode_s or 0.0

    @property
    def runs_long_prompts(self) -> bool:
        """Return True if this step may run chunks of long prompts. Otherwise long prompts wait for a later step."""
        return self._long_limit_s > 0

    @property
    def is_long_step(self) -> bool:
        """Return True if the planned step is long. Launching a long step already takes as long as several others."""
        return self._has_long and not self._is_paced and self._num_tokens > self.times.graph_tokens

    def max_tokens(self, position: int, *, is_long: bool, is_oldest: bool) -> int:
        """Return the most tokens of a chunk at `position`, or 0 if the prompt must wait for a later step.

        The oldest prompt gets at least half of the time limit.
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
        """Set the time limit for chunks of long prompts in this step, 0 if long prompts have to wait.

        Computing while keys are streamed adds no time to a step.
        """
        self._streaming_s, long_s = streaming_s, max(self.max_step_s, streaming_s)
        self._long_limit_s, self._least_tokens, self._is_paced = long_s, MIN_CHUNK_TOKENS, False
        if num_others and num_long:
            if paced_s := self._paced_s(streaming_s):
                self._long_limit_s, self._least_tokens, self._is_paced = paced_s, 1, True
            elif not self._has_rested(num_others, num_long):
                self._long_limit_s = 0.0

    def _paced_s(self, streaming_s: float) -> float:
        """Return the time that a chunk may add to a step with answers, or 0 if so short a chunk would be useless."""
        decode_s, line = self.times.decode_s, self.times.line()
        if self.times.graph_tokens or decode_s is None or line is None or not line.knows_fixed:
            return 0.0
        added_s = min(PACE * decode_s, self.max_step_s) - decode_s
        return added_s if line.fixed_s + streaming_s <= (1 - MIN_USEFUL_SHARE) * added_s else 0.0

    def _has_rested(self, num_others: int, num_long: int) -> bool:
        """Return True if the next long step may run. The share of time for long prompts grows with their number."""
        longest_rest_s = REST_SHARE * self._long_s * num_others / (num_others + num_long)
        num_slow = 1 + self._num_slow_since
        return self._num_steps_since >= LONG_STEP_INTERVAL * num_slow or self._rest_s >= longest_rest_s

    def _tokens_within(self, seconds: float, position: int, least_share: float = 0.0) -> int:
        """Return how many tokens fit into the part of `seconds` that the chunks placed so far do not use.

        At least `least_share` of `seconds` counts as unused. Before the first measurement, any number of tokens fits.
        """
        line = self.times.line()
        if line is None or not line.work_s:
            return 2**31
        work = max(0.0, seconds - line.fixed_s) / line.work_s
        return chunk_tokens(max(work - self._work, least_share * work), position, self.times.token_keys)
