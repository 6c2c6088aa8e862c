"""StepBound: how long the chunks of a step may be, so that a step ends soon and running answers keep their pace.

No step is longer than `max_step_s`, as far as shorter chunks can help. There is a second rule for the chunks of long
prompts where anyone else has work to do. They are spread in one of two ways:

- *In one long step out of LONG_STEP_INTERVAL*, which is as long as allowed. A running answer then waits for a long step
  less than once in a hundred tokens, so the 99th percentile of its time per token is that of the other steps. Steps
  with chunks of short prompts cannot wait, and each that takes long puts the next long step off by LONG_STEP_INTERVAL
  steps. But where that, or steps that take long themselves, would leave a long prompt less than a fifth of the time
  (REST_SHARE), the long steps come sooner: it takes at most about five times as long as alone. Several get more.
- *In every step*, where steps without chunks take so long that this would happen. A step then takes at most PACE times
  as long as one without a chunk. That is only useful if most of the added time is work that grows with the chunk, and
  if QUERY_TILE_TOKENS fit into it. On a GPU the step must be a CUDA graph, and no keys may be streamed from CPU memory:
  that takes the same time for one token as for thousands. Steps with short prompts go without, because attention would
  divide the long history among few programs. So does one step in MEASURING_INTERVAL, to see how long it takes.

Short prompts run in any step. They are what the time to first token is about, and they cost little.

Every time is an estimate from what the engine has measured while it runs. While nothing is known, long prompts run in
long steps of any length. The first chunk of a step has at least MIN_CHUNK_TOKENS, so prompts always progress.
"""

from nanovllm.scheduling.chunk_times import ChunkLine, ChunkTimes, chunk_tokens, chunk_work

PACE = 2.6  # three times is what is promised; the rest is for estimates that are too low
MAX_SHORT_STEPS = 8  # in a row, with short prompts, for which a paced prompt waits
MEASURING_INTERVAL = 32
QUERY_TILE_TOKENS = 64  # attention takes as long for one token as for so many
LONG_STEP_INTERVAL = 160  # 0.6% of the steps, which leaves room for steps that are slow for other reasons
REST_SHARE = 4.0  # most time between two long steps, in times of a long one, for many others and one long prompt
MIN_USEFUL_SHARE = 0.5  # of the time that a chunk adds to a step, which must grow with its length
MIN_CHUNK_TOKENS = 256


class StepBound:
    def __init__(self, times: ChunkTimes, *, max_step_s: float, missing_token_s: float = 0.0) -> None:
        """`missing_token_s`: time to stream one token's keys and values, all layers of them."""
        self.times, self.max_step_s, self._missing_token_s = times, max_step_s, missing_token_s
        self._num_steps_since = LONG_STEP_INTERVAL  # the last step with a chunk of a long prompt, this step included
        self._num_short_since = 0  # slow steps with short prompts since then, while long ones waited
        self._rest_s = 0.0  # time of the steps since then
        self._long_s = max_step_s  # time of that step
        self._num_paced = 0  # steps with a paced chunk since the last one without
        self._num_unpaced = 0  # steps with short prompts since the last one with a paced chunk
        # State of the step that is being planned
        self._num_chunks, self._num_tokens, self._work = 0, 0, 0.0  # placed so far
        self._holds_long = False  # whether long prompts have to wait
        self._long_limit_s = self._streaming_s = 0.0  # time for chunks of long prompts, and to stream their keys
        self._is_paced = False  # whether the step must run as a graph
        self._has_long = False  # whether a chunk of a long prompt was placed
        self._short_s, self._is_slow = 0.0, False  # time of the chunks of short prompts, and whether it is long

    def begin_step(
        self, num_answers: int, num_short: int, num_long: int, num_missing_tokens: int, position: int = 0
    ) -> None:
        """How many answers, short prompts and long prompts have work to do. `num_missing_tokens`: keys of the oldest
        long prompt that are not on the GPU. `position`: where its next chunk begins.
        """
        self._num_steps_since += 1
        self._num_chunks, self._num_tokens, self._work, self._has_long = 0, 0, 0.0, False
        self._short_s, self._is_slow = 0.0, False
        self._set_long_limit(num_answers, num_short, num_long, num_missing_tokens, position)
        self._holds_long = num_long > 0 and not self.runs_long_prompts
        self._rest_s += self.times.decode_s or 0.0

    @property
    def runs_long_prompts(self) -> bool:
        """Whether this step runs chunks of long prompts. If not, they wait for a later step."""
        return self._long_limit_s > 0

    @property
    def is_long_step(self) -> bool:
        """Whether the planned step has a chunk of a long prompt that is launched kernel by kernel, which takes long."""
        return self._has_long and not self._is_paced

    def max_tokens(self, position: int, *, is_long: bool, is_oldest: bool) -> int:
        """The most tokens of a chunk that begins at `position`; 0 if its prompt must wait for a later step. The oldest
        prompt gets at least half the time.
        """
        least_share = 0.5 if is_oldest else 0.0
        must_run = is_oldest or not self._num_chunks
        if is_long and self._is_paced and (num_left := self._num_left_in_graph()) > 0:
            line = self.times.line(in_graph=self._has_graphs)
            num_tokens = self._tokens_within(self._long_limit_s, position, line, least_share)
            whole_tiles = max(1, num_tokens // self._tile_tokens) * self._tile_tokens
            return min(num_left, whole_tiles if must_run else num_tokens)
        limit_s = self._long_limit_s if is_long else self.max_step_s
        num_tokens = self._tokens_within(limit_s, position, self.times.line(), least_share)
        return max(num_tokens, MIN_CHUNK_TOKENS) if must_run else num_tokens

    def chunk_placed(self, num_tokens: int, position: int, *, is_long: bool) -> None:
        """The step runs this chunk."""
        self._num_tokens += num_tokens
        line = self.times.line(in_graph=self._num_tokens <= self.times.graph_tokens)
        work = chunk_work(num_tokens, position, self.times.token_keys)
        is_first = not self._num_chunks
        self._num_chunks += 1
        self._work += work
        self._has_long |= is_long
        if is_long:
            self._num_short_since = 0
        if is_long and not self._is_paced:
            self._num_steps_since, self._rest_s = 0, 0.0
            chunks_s = self.max_step_s if line is None else line.fixed_s + line.work_s * self._work
            self._long_s = max(chunks_s, self._streaming_s)
        elif self._holds_long and not is_long:
            added_s = 0.0 if line is None else line.fixed_s * is_first + line.work_s * work
            self._rest_s += added_s
            self._short_s += added_s
            if not self._is_slow and self._short_s > (PACE - 1) * (self.times.decode_s or 0.0):
                self._num_short_since, self._is_slow = self._num_short_since + 1, True

    def _set_long_limit(
        self, num_answers: int, num_short: int, num_long: int, num_missing_tokens: int, position: int
    ) -> None:
        """Choose the time for chunks of long prompts in this step; 0 if they have to wait.

        The work that is done while keys are streamed takes no time of its own.
        """
        self._streaming_s = num_missing_tokens * self._missing_token_s
        self._long_limit_s, self._is_paced = max(self.max_step_s, self._streaming_s), False
        num_others = num_answers + num_short
        if num_others and num_long:
            paced_s = self._paced_s(position) if not num_missing_tokens or not self._has_graphs else 0.0
            if paced_s > 0 and self._needs_pacing():
                self._is_paced = True
                self._long_limit_s = 0.0 if self._goes_without(num_answers, num_short) else paced_s
            elif not self._has_rested(num_others, num_long):
                self._long_limit_s = 0.0

    def _needs_pacing(self) -> bool:
        """Whether long steps at their interval would leave a long prompt too little of the time."""
        return LONG_STEP_INTERVAL * (self.times.decode_s or 0.0) > REST_SHARE * self.max_step_s

    def _goes_without(self, num_answers: int, num_short: int) -> bool:
        """Whether this step has no paced chunk, although there could be one."""
        if not self._has_graphs:
            return False
        waits = num_short > 0 and self._num_unpaced < MAX_SHORT_STEPS
        measures = num_answers > 0 and not num_short and self._num_paced >= MEASURING_INTERVAL - 1
        self._num_unpaced = self._num_unpaced + 1 if waits else 0
        self._num_paced = 0 if waits or measures else self._num_paced + 1
        return waits or measures

    @property
    def _has_graphs(self) -> bool:
        return self.times.graph_tokens > 0

    @property
    def _tile_tokens(self) -> int:
        return QUERY_TILE_TOKENS if self._has_graphs else 1

    def _num_left_in_graph(self) -> int:
        """Tokens of chunks that the step may still take. Without graphs, any number."""
        return self.times.graph_tokens - self._num_tokens if self._has_graphs else 2**31

    def _paced_s(self, position: int) -> float:
        """How much longer a step with answers may take because of a chunk at `position`; 0 if that is too little to be
        useful. Graphs are tried as long as their times are not known.
        """
        decode_s, line = self.times.decode_s, self.times.line(in_graph=self._has_graphs)
        if decode_s is None:
            return 0.0
        added_s = min(PACE * decode_s, self.max_step_s) - decode_s
        if line is None or not line.knows_fixed:
            return added_s if self._has_graphs else 0.0
        tile_s = line.work_s * chunk_work(self._tile_tokens, position, self.times.token_keys)
        most_fixed_s = min((1 - MIN_USEFUL_SHARE) * added_s, added_s - tile_s)
        return added_s if line.fixed_s + self._streaming_s <= most_fixed_s else 0.0

    def _has_rested(self, num_others: int, num_long: int) -> bool:
        """Whether the next long step may run. Many long prompts beside few others get more of the time."""
        longest_rest_s = REST_SHARE * self._long_s * num_others / (num_others + num_long)
        num_slow = 1 + self._num_short_since
        return self._num_steps_since >= LONG_STEP_INTERVAL * num_slow or self._rest_s >= longest_rest_s

    def _tokens_within(self, seconds: float, position: int, line: ChunkLine | None, least_share: float) -> int:
        """Tokens that take what the chunks placed before have left of `seconds`, or `least_share` of it if that is
        more. While nothing is known, any number.
        """
        if line is None or not line.work_s:
            return 2**31
        work = max(0.0, seconds - line.fixed_s) / line.work_s
        return chunk_tokens(max(work - self._work, least_share * work), position, self.times.token_keys)
