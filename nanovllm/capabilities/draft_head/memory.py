"""DraftHead: how the checkpoint's draft head (MTPHead in models/decoder.py) follows the steps of the engine.

At the end of a step the head goes through the step's tokens, each with its hidden state and the token after it: the
next one of the prompt, or the one that the step has sampled. Behind a wrong guess it goes through nonsense, which
nobody reads. What it yields for the last tokens is kept beside the state of the sequence. The next step makes its first
guess from that of the last token that proved right, and for each further one lets the head run again.

The cell of a token in the head's cache is that of its hidden state. So a step overwrites what its drafts have written,
and the head's keys are in pages as the model's are in blocks: page i belongs to block i of the pool that has room for
all blocks. Without offload that is the pool on the GPU, of which the head is the last layer. With offload the pages
stay on the GPU, wherever the blocks are.

Where a block that another sequence has computed ends, or a prefix hit, the last cell may have been computed with the
token that came next there. That can cost a guess.

Legend: N pages, P tokens of each, K kv heads, D head dim, T packed tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch
from nanovllm.capabilities.draft_head.pages import HeadStep, PageCopies, PageCopy
from nanovllm.capabilities.recurrent.places import StateStep
from nanovllm.kernels.state_tensors import LayerStates
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.plan.step_plan import KVMoves, SamplingRow, SequenceStep, StepPlan, find_payload
from nanovllm.runner.inputs import StepInputs, build_inputs
from nanovllm.utils.arithmetic import ceil_div


class HeadAttention:
    """The StepAttention of the head, which has a single layer. Makes `copies` once the new K and V are stored."""

    def __init__(
        self, head: "DraftHead", slot_mapping_T: torch.Tensor, batch: PagedBatch, copies: Sequence[PageCopy] = ()
    ) -> None:
        """`batch`: for the rows that the head is asked for."""
        self.head, self.slot_mapping_T, self.batch, self.copies = head, slot_mapping_T, batch, copies

    def cells(self, layer: int) -> KVCells:
        return KVCells(*self.head.cache, self.slot_mapping_T)

    def states(self, layer: int) -> LayerStates:
        raise AssertionError("no layer of the draft head is recurrent")

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        for source, target, num_tokens in self.copies:
            for pages_NPKD in self.head.cache:
                pages_NPKD[target, :num_tokens] = pages_NPKD[source, :num_tokens]
        if not len(q_THD):
            return q_THD
        return self.head.backend.attend(q_THD, *self.head.cache, self.batch, self.head.scale).out_THD


class DraftHead:
    """One rank's memory of the head."""

    def __init__(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        num_slots: int,
        max_guesses: int,
        hidden_size: int,
        backend: AttentionBackend,
        scale: float,
    ) -> None:
        """`cache`: K and V, each [N, P, K, D]. `num_slots`: of states, with slot 0."""
        self.cache, self.backend, self.scale = cache, backend, scale
        self._slot_rows = 1 + max_guesses
        # The head's results for the last certain token of a slot's sequence, and for the guesses behind it
        self.kept = cache[0].new_zeros(num_slots * self._slot_rows, hidden_size)

    def kept_rows(self, plan: StepPlan) -> np.ndarray:
        """Rows of `kept`, int64 [S]: where the results of a `followed_plan` go."""
        states = (step.payload(StateStep) for step in plan.sequences)
        slots = (0 if state is None else state.target for state in states)
        rows = [
            slot * self._slot_rows + np.arange(step.num_sampled)
            for slot, step in zip(slots, plan.sequences, strict=True)
        ]
        return np.concatenate(rows)

    def first_rows(self, plan: StepPlan) -> np.ndarray:
        """Rows of `kept`, int64 [B]: the results that first drafts are made from. They are for the last certain tokens
        before them.
        """
        states = [step.payload(StateStep) for step in plan.sequences]
        rows = [0 if state is None else state.source * self._slot_rows + state.num_replayed for state in states]
        return np.array(rows, np.int64)


def followed_plan(plan: StepPlan, block_size: int) -> StepPlan:
    """The head's way through the tokens of a step, each with the token after it; -1 for those that are sampled. Its
    results are wanted for the last token of each sequence, and where the step samples.
    """
    copies = find_payload(plan.moves.payloads, PageCopies)
    moves = KVMoves(payloads=() if copies is None else (copies,))
    return StepPlan(tuple(_followed(step, block_size) for step in plan.sequences), moves)


def _followed(step: SequenceStep, block_size: int) -> SequenceStep:
    num_keys = step.position + step.num_tokens
    head = step.payload(HeadStep)
    pages = (0,) * ceil_div(num_keys, block_size) if head is None else head.pages  # start-up has no pages
    last = np.full(step.num_sampled, -1)
    if step.sampling is None:
        assert head is not None, "what start-up measures always samples"
        last = np.array([head.next_token])
    return step._replace(
        token_ids=np.concatenate([step.token_ids[1 : step.num_tokens + 1 - len(last)], last]),
        block_table=pages,
        num_paged_keys=num_keys,
        sampling=SamplingRow(),
        previous_row=-1,
        num_drafts=0,
    )


def followed_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    """The inputs of the head for a `followed_plan`, after the step."""
    inputs = build_inputs(plan, block_size, group_blocks=0)
    is_sampled = inputs.input_ids < 0
    inputs.pending_rows[is_sampled] = np.arange(np.count_nonzero(is_sampled))
    return inputs


def draft_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    """The inputs of the head for a draft. It guesses not the token after the one it runs, but the one after that."""
    inputs = build_inputs(plan, block_size, group_blocks=0)
    return inputs._replace(sampling=inputs.sampling._replace(position=inputs.sampling.position + 1))
