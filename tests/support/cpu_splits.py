"""Splits between the link and the CPU that a test chooses, in place of the measured one."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.capabilities.cpu_attention.cpu_split import CpuSplit, FollowingSplit
from nanovllm.engine.setup import Internals
from nanovllm.kvcache.seams import STREAM_ALL, KeySplitter

ALL = 2**40


@dataclass(frozen=True, kw_only=True)
class FixedSplit(CpuSplit):
    """The CPU takes `num_tokens` of the missing tokens, or all there are."""

    num_tokens: int
    token_bytes: int = 1
    max_queries: int = 512
    max_sequence_queries: int = 512
    is_forced: bool = True

    def num_cpu_tokens(self, token_costs_s: Sequence[float], block_size: int) -> int:
        return min(self.num_tokens, len(token_costs_s) * block_size)


@dataclass(frozen=True, kw_only=True)
class RandomSplit(FixedSplit):
    """Another number whenever the missing blocks change: none, all, a single token, or any other."""

    num_tokens: int = 0
    generator: random.Random = field(default_factory=lambda: random.Random(0))

    def num_cpu_tokens(self, token_costs_s: Sequence[float], block_size: int) -> int:
        most = len(token_costs_s) * block_size
        return self.generator.choice([0, 1, most - 1, most, self.generator.randint(0, most)])


def splitter(split: CpuSplit | None) -> KeySplitter:
    """What a cache manager takes for a split, or for none."""
    return STREAM_ALL if split is None else FollowingSplit(split)


def splitting(num_tokens: int, **others: Any) -> Internals:
    """An engine whose CPU attends to so many of the missing tokens."""
    return Internals(cpu_split=FixedSplit(num_tokens=num_tokens), **others)
