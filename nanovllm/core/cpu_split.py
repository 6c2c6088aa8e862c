"""CpuSplit: how many of the tokens that a step misses the CPU attends to, and how many are streamed.

In each layer the link and the CPU work side by side, and the layer waits for the slower of the two. The link needs
`missing tokens * token_bytes / link_byte_per_s`, and works ahead: it is never idle. The CPU needs the layer's query
before it can start and is idle until then, for `idle_s` a layer. So with x tokens on the CPU a layer takes

    max((missing - x) * link_s, idle_s + x * cpu_s)

and x is chosen to make both sides equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

UNIT_TOKENS = 64  # a tile of the compiled kernels
MIN_GAIN = 0.02  # of a layer's time; a smaller gain is within the error of the rates


class CpuRate(NamedTuple):
    """The bytes of K and V that the CPU attends to in a second, with `num_queries` queries of each sequence."""

    num_queries: int
    byte_per_s: float


@dataclass(frozen=True, kw_only=True)
class CpuSplit:
    """What start-up measured. Every rate was measured while the other side was busy."""

    token_bytes: int  # of a token's K and V in one layer, on one rank
    max_queries: int  # of a whole step; with more of them, everything is streamed
    max_sequence_queries: int  # of any sequence in the step; likewise
    is_forced: bool  # the CPU takes its share even where that gains nothing
    link_byte_per_s: float | None = None  # None on a CPU: there is no link, so the CPU attends to everything
    cpu_rates: tuple[CpuRate, ...] = ()  # by rising num_queries, the first for 1
    idle_s: float = 0.0  # of the CPU in each layer, measured with one sequence
    unit_tokens: int = UNIT_TOKENS  # the CPU's share of a block is a multiple of this, or the whole block

    def takes_part(self, num_queries: Sequence[int]) -> bool:
        """Whether the CPU may attend in a step whose sequences have so many queries each."""
        return sum(num_queries) <= self.max_queries and max(num_queries) <= self.max_sequence_queries

    def link_s(self, num_tokens: int) -> float:
        """How long the link takes for the tokens of a layer."""
        return num_tokens * self.token_bytes / self.link_byte_per_s if self.link_byte_per_s else float("inf")

    def cpu_token_s(self, num_queries: int) -> float:
        """How long the CPU takes for a token and so many queries: as for the next larger number that was measured."""
        if self.link_byte_per_s is None:
            return 0.0
        return self.token_bytes / next(rate.byte_per_s for rate in self.cpu_rates if num_queries <= rate.num_queries)

    def num_cpu_tokens(self, token_costs_s: Sequence[float], block_size: int) -> int:
        """How many tokens the CPU takes of blocks in a row, counted from their end.

        `token_costs_s`: for each block, how long the CPU takes for one of its tokens, for all sequences that read it.
        """
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
        """The CPU's rate with one query for each sequence, where it was measured."""
        return self.cpu_rates[0].byte_per_s if self.cpu_rates else None
