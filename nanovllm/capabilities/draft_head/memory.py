"""DraftHead: how the checkpoint's draft head (MTPHead in models/decoder.py) follows the steps of the engine.

At the end of a step the head runs on the step's tokens, each with its hidden state and the token after it: the prompt's
next token, or the token that the step has sampled. After a wrong draft token the head's outputs are garbage and are
ignored. The outputs for the last tokens are stored with the state of the sequence. The next step makes its first draft
token from the output for the last accepted token, and runs the head again for each further draft token.

A token and its hidden state have the same cell in the head's cache. So a step overwrites the cells that its drafts have
written, and the head's keys are in pages as the model's keys are in blocks: page i belongs to block i of the pool that
has room for all blocks. Without offload this pool is on the GPU, and the head is its last layer. With offload the pages
stay on the GPU, independent of where the blocks are.

At the end of a prefix hit or of a block that another sequence has computed, the last cell may have been computed with
another next token. That can cost a draft token.

Legend: N pages, P tokens of each, K kv heads, D head dim, T packed tokens.
"""

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.capabilities.recurrent.places import StateStep
from nanovllm.plan.step_plan import StepPlan
from nanovllm.runner.seams import CompanionMemory


class DraftHead(CompanionMemory):
    def __init__(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        num_slots: int,
        max_guesses: int,
        hidden_size: int,
        backend: AttentionBackend,
        scale: float,
    ) -> None:
        """`cache`: K and V, each [N, P, K, D]. `num_slots`: state slots, including slot 0."""
        self.cache, self.backend, self.scale = cache, backend, scale
        self._slot_rows = 1 + max_guesses
        # The head's results for the last certain token of a slot's sequence, and for the draft tokens after it
        self.kept = cache[0].new_zeros(num_slots * self._slot_rows, hidden_size)

    def kept_rows(self, plan: StepPlan) -> np.ndarray:
        """Rows of `kept`, int64 [S], to which the results of a `followed_plan` are written."""
        states = (step.payload(StateStep) for step in plan.sequences)
        slots = (0 if state is None else state.target for state in states)
        rows = [
            slot * self._slot_rows + np.arange(step.num_sampled)
            for slot, step in zip(slots, plan.sequences, strict=True)
        ]
        return np.concatenate(rows)

    def first_rows(self, plan: StepPlan) -> np.ndarray:
        """Rows of `kept`, int64 [B]: the results from which first drafts are made, of the last certain token before
        each draft.
        """
        states = [step.payload(StateStep) for step in plan.sequences]
        rows = [0 if state is None else state.source * self._slot_rows + state.num_replayed for state in states]
        return np.array(rows, np.int64)
