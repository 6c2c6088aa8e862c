"""CpuSplit: how many of a step's missing tokens the CPU attends to, and how many are streamed.

In each layer the link and the CPU work concurrently, and the layer waits for the slower of the two. The link streams
keys of later layers ahead of time, so the link is never idle. The CPU cannot start before it has the layer's query, and
is idle for `idle_s` in each layer. Let a token take `link_s` on the link and `cpu_s` on the CPU. If the CPU attends to
x of the missing tokens, a layer takes

    max((missing - x) * link_s, idle_s + x * cpu_s)

and x is chosen to make both arguments of max equal.

Start-up measures the rates. FollowingSplit adjusts the rates to the durations of steps, because other programs may use
the machine's memory and cores, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nanovllm.plan.step_plan import LayerTimes, StepPlan

UNIT_TOKENS = 64  # a tile of the compiled kernels
MIN_GAIN = 0.02  # share of a layer's time; a smaller gain is within the error of the rates
MIN_TIMED_S = 2e-4  # shortest expected duration of work that is timed; shorter work says little about rates
WEIGHT = 1 / 12  # weight of a step in the running mean
MAX_RATIO = 2.0  # bound on a step's slowness relative to the running mean, so that an outlier has little effect
MIN_CHANGE = 1.04  # ratio of rates; a smaller change is within the noise of the measurements
FORGETTING = 1 / 512  # decay of the CPU's learned slowness per step with too little CPU work to time


class CpuRate(NamedTuple):
    """Bytes of K and V per second that the CPU attends to, with `num_queries` queries of each sequence."""

    num_queries: int
    byte_per_s: float


@dataclass(frozen=True, kw_only=True)
class CpuSplit:
    """A StepSplit from the rates of the link and of the CPU, which start-up measured while both were busy."""

    token_bytes: int  # K and V of a token in one layer, on one rank
    max_queries: int  # most queries of a step; in steps with more queries, all missing keys are streamed
    max_sequence_queries: int  # most queries of a sequence; in steps with a larger sequence, all keys are streamed
    is_forced: bool  # True if the CPU attends to its share even without a gain
    link_byte_per_s: float | None = None  # or None without a GPU: there is no link, so the CPU attends to all keys
    cpu_rates: tuple[CpuRate, ...] = ()  # by increasing num_queries, the first for 1 query
    idle_s: float = 0.0  # time for which the CPU is idle in each layer, measured with one sequence
    signal_s: float = 0.0  # the part of idle_s that a job with a single token takes, by the GPU's clock
    rank_0_lead: tuple[float, float] = (1.0, 1.0)  # rank 0's link and CPU rates, relative to the slowest rank's
    unit_tokens: int = UNIT_TOKENS  # the CPU's share of a block is a multiple of this, or the whole block

    def takes_part(self, num_queries: Sequence[int]) -> bool:
        """Return True if the CPU may attend in a step whose sequences have these numbers of queries."""
        return sum(num_queries) <= self.max_queries and max(num_queries) <= self.max_sequence_queries

    def link_s(self, num_tokens: int) -> float:
        """Return the seconds that the link takes for `num_tokens` tokens of a layer."""
        return num_tokens * self.token_bytes / self.link_byte_per_s if self.link_byte_per_s else float("inf")

    def cpu_token_s(self, num_queries: int) -> float:
        """Return the seconds that the CPU takes for a token and `num_queries` queries.

        The rate is the one that was measured with `num_queries` queries, or with the next larger number.
        """
        if self.link_byte_per_s is None:
            return 0.0
        return self.token_bytes / next(rate.byte_per_s for rate in self.cpu_rates if num_queries <= rate.num_queries)

    def num_cpu_tokens(self, token_costs_s: Sequence[float], block_size: int) -> int:
        """See StepSplit."""
        if self.link_byte_per_s is None:
            return len(token_costs_s) * block_size
        all_s = self.link_s(len(token_costs_s) * block_size)
        link_s, cpu_s = all_s, self.idle_s
        num_tokens = 0
        for token_cost_s in reversed(token_costs_s):
            num_balanced = (link_s - cpu_s) / (self.link_s(1) + token_cost_s)
            num_taken = max(0, int(num_balanced)) // self.unit_tokens * self.unit_tokens
            if num_balanced >= block_size:
                num_taken = block_size
            num_tokens += num_taken
            link_s, cpu_s = link_s - self.link_s(num_taken), cpu_s + num_taken * token_cost_s
            if num_taken < block_size:
                break
        if self.is_forced:
            return max(num_tokens, min(UNIT_TOKENS, block_size))
        return num_tokens if num_tokens and max(link_s, cpu_s) <= (1 - MIN_GAIN) * all_s else 0

    @property
    def cpu_byte_per_s(self) -> float | None:
        """Return the CPU's rate with one query per sequence, or None if not measured."""
        return self.cpu_rates[0].byte_per_s if self.cpu_rates else None

    def slowed(self, link_slowness: float, cpu_slowness: float) -> "CpuSplit":
        """Return the split for a link and a CPU that take `link_slowness` and `cpu_slowness` times as long."""
        assert self.link_byte_per_s is not None, "without a link there is nothing to divide"
        rates = tuple(rate._replace(byte_per_s=rate.byte_per_s / cpu_slowness) for rate in self.cpu_rates)
        return replace(self, link_byte_per_s=self.link_byte_per_s / link_slowness, cpu_rates=rates)


class FollowingSplit:
    """The KeySplitter that starts with the measured split and adjusts its rates to the durations of steps.

    The link and the CPU each have a slowness: the ratio of the measured duration of work to the duration expected from
    start-up's rates, as a running mean over about a dozen steps. The split changes only if a slowness has clearly
    changed. Only rank 0's durations count, because every rank runs rank 0's plans.
    """

    def __init__(self, start: CpuSplit) -> None:
        self.start = self.now = start
        self._slowness = self._used = 1.0, 1.0  # of link and CPU: the running means, and the values that `now` uses

    @property
    def cpu_byte_per_s(self) -> float | None:
        """Return the rate that `now` uses for the CPU with one query per sequence, or None if not measured."""
        return self.now.cpu_byte_per_s

    def step_ended(self, plan: StepPlan, times: LayerTimes | None) -> None:
        """See KeySplitter. Hot."""
        if times is None or self.start.link_byte_per_s is None or not plan.moves.brings_in_keys:
            return
        (link_slowness, cpu_slowness), (link_lead, cpu_lead) = self._slowness, self.start.rank_0_lead
        if times.link is not None:
            num_tokens, seconds = times.link
            link_slowness = _followed(link_slowness, self.start.link_s(1) * num_tokens / link_lead, seconds)
        cpu_s = self._expected_cpu_s(plan) / cpu_lead
        if cpu_s < MIN_TIMED_S:  # too little work to time; decay, so that the CPU gets work again after a while
            cpu_slowness **= 1 - FORGETTING
        elif times.cpu_s is not None:
            cpu_slowness = _followed(cpu_slowness, cpu_s, times.cpu_s - self.start.signal_s)
        self._slowness = link_slowness, cpu_slowness
        if any(max(a / b, b / a) > MIN_CHANGE for a, b in zip(self._slowness, self._used, strict=True)):
            self._used = self._slowness
            self.now = self.start.slowed(*self._used)

    def _expected_cpu_s(self, plan: StepPlan) -> float:
        """Return the seconds that the CPU would have taken for a layer at start-up's rates."""
        rows = zip(plan.sequences, plan.moves.cpu_spans, strict=False)  # cpu_spans is empty if the CPU has no keys
        return sum(
            self.start.cpu_token_s(step.num_tokens) * sum(span.end - span.start for span in spans)
            for step, spans in rows
            if spans
        )


def _followed(slowness: float, expected_s: float, seconds: float) -> float:
    """Return the slowness after a step whose work took `seconds` instead of `expected_s`."""
    if expected_s < MIN_TIMED_S:
        return slowness
    return slowness * (1 - WEIGHT + WEIGHT * min(MAX_RATIO, seconds / expected_s / slowness))
