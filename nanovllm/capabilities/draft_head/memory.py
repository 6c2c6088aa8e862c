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

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.capabilities.recurrent.places import StateStep
from nanovllm.plan.step_plan import StepPlan
from nanovllm.runner.companion_memory import CompanionMemory


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
