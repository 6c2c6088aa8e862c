"""HeadPages: how the checkpoint's draft head follows a step. The head's cells are in pages that belong to blocks.

Page i belongs to block i of the pool that has room for all blocks (see memory.py).
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from nanovllm.kvcache.block_pool import Block
from nanovllm.kvcache.seams import Companion, GpuBlockOf
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import SequenceStep
from nanovllm.utils.arithmetic import ceil_div


class PageCopy(NamedTuple):
    """A copy of the first tokens of one page of the draft head to another."""

    source: int
    target: int
    num_tokens: int


class PageCopies(NamedTuple):
    """Step payload: copies that take effect once this step's K and V are stored. They are made in order, because a copy
    may read what an earlier copy has written.
    """

    copies: tuple[PageCopy, ...]

    @property
    def acts_by_layer(self) -> bool:
        return False  # the head runs after the layers of the model


class HeadStep(NamedTuple):
    """Sequence payload: the draft head's run over the new tokens, each with the token after it."""

    pages: tuple[int, ...]  # the pages of the sequence's blocks, in order
    next_token: int  # the token after the new tokens, or -1 if the step samples it

    def in_draft(self, draft: SequenceStep, step: SequenceStep, i: int) -> SequenceStep:
        """Draft from the token before the token that the model would run."""
        return draft._replace(
            token_ids=np.array([-1]),
            position=step.position + i - 1,
            block_table=self.pages,
            num_paged_keys=step.position + i,
        )


class HeadPages(Companion):
    def __init__(self) -> None:
        self._copies: list[PageCopy] = []  # the step's

    def begin_step(self) -> None:
        self._copies.clear()

    def copy_prefix(self, source: Block, target: Block, num_tokens: int) -> None:
        self._copies.append(PageCopy(source.block_id, target.block_id, num_tokens))

    def plan_step(self, placed: Seq[tuple[Sequence, int]], gpu_block: GpuBlockOf) -> PageCopies | None:
        return PageCopies(tuple(self._copies)) if self._copies else None

    def plan_sequence(
        self, seq: Sequence, num_tokens: int, num_guesses: int, gpu_block: GpuBlockOf, *, has_drafts: bool
    ) -> HeadStep:
        start = seq.num_computed_tokens
        pages = tuple(seq.block_table[: ceil_div(start + num_tokens, self.pool.index.block_size)])
        end = start + num_tokens - num_guesses
        return HeadStep(pages, -1 if end == seq.num_tokens else seq.token_ids[end])
