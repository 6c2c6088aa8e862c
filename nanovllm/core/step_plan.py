"""The plan of one step: everything the ranks must do, in integers. Made on rank 0, frozen, pickled to the others."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class SlotLoad(NamedTuple):
    """CPU block -> GPU slot, every layer; the slot is read where it is from this step on."""

    cpu_block_id: int
    ring_slot: int
    num_tokens: int


class SlotCopy(NamedTuple):
    """The first tokens of one slot copied to another on the GPU, after this step's K/V are stored."""

    src_slot: int
    dst_slot: int
    num_tokens: int


class SlotOffload(NamedTuple):
    """Tokens start..end-1 of a slot copied out to the same place of a CPU block, every layer."""

    ring_slot: int
    cpu_block_id: int
    start: int
    end: int


class StreamedGroup(NamedTuple):
    """Full CPU blocks brought to staging together and attended in one call.

    `tables[row]`: which blocks of the group (by index into `cpu_block_ids`) sequence `row` of the step attends to.
    """

    cpu_block_ids: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class KVMoves:
    """What moves between CPU memory and the GPU in a step. Empty for the all-GPU engine.

    Order of effects: flushes (slots given up, copied out before anything overwrites them), then per layer: loads,
    store of the new K/V, copies, offloads, the paged call, the streamed groups.
    """

    flushes: tuple[SlotOffload, ...] = ()
    loads: tuple[SlotLoad, ...] = ()
    copies: tuple[SlotCopy, ...] = ()
    offloads: tuple[SlotOffload, ...] = ()
    streamed: tuple[StreamedGroup, ...] = ()
    taken_slots: tuple[int, ...] = ()  # slots that change owner in this step and are written by it


class SamplingRow(NamedTuple):
    """How to sample one sequence's next token. `position` and `seed` determine the noise, nothing else does."""

    temperature: float
    top_k: int  # 0: off
    top_p: float
    min_p: float
    seed: int
    position: int


@dataclass(frozen=True)
class SequenceStep:
    """The new tokens of one sequence and where its paged keys are.

    The paged keys are the sequence's keys with the streamed blocks cut out: `block_table` names their blocks, all
    full but the last, and in any order before the new tokens, which are the last `num_tokens` of the `context_len`
    paged keys.
    """

    seq_id: int
    token_ids: np.ndarray  # int64 [num_tokens]; a token still being sampled by the previous step is -1
    position: int  # of the first new token
    num_prompt_tokens: int
    block_table: tuple[int, ...]
    context_len: int
    sampling: SamplingRow | None  # None: no token is sampled (the prompt goes on in a later step)
    previous_row: int = -1  # row of the previous step whose sampled token is this step's last token

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class StepPlan:
    sequences: tuple[SequenceStep, ...]
    moves: KVMoves

    @property
    def num_tokens(self) -> int:
        return sum(seq.num_tokens for seq in self.sequences)

    @property
    def is_decode(self) -> bool:
        """Every sequence runs one token and samples."""
        return all(seq.num_tokens == 1 and seq.sampling is not None for seq in self.sequences)
