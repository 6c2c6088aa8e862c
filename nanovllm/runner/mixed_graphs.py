"""Steps in which answers run beside short chunks of prompts, as CUDA graphs from token ids to hidden states.

Launched kernel by kernel, such a step costs the host 0.7 ms a layer, which for a short chunk is many times what the GPU
needs. As a graph it takes one copy and one replay. All of its keys must be on the GPU. Logits and sampling follow
outside of the graph, because only some of the tokens are sampled from.

The tokens of a step are packed as usual, and padding follows them. Sequences with a single token come first: these are
the step's *rows*, and the decode kernel attends to them. The sequences after them are its *chunks*, for the prefill
kernel. How many of the tokens are rows is read on the device:

    tokens     | row | row | chunk    | chunk  | padding |
    decode     |     R rows     |                           what it writes behind the last row is discarded
    prefill                | up to C tokens    |
"""

from itertools import takewhile

import numpy as np
import torch

from nanovllm.attention.base import StepAttention
from nanovllm.core.step_limits import MAX_GRAPH_CHUNKS, MixedSize
from nanovllm.core.step_plan import StepPlan
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import GraphKind, MakeAttention
from nanovllm.runner.graph_inputs import GraphBuffers, GraphShape
from nanovllm.runner.inputs import StepInputs


class _MixedAttention:
    """A StepAttention that attends to rows as `rows` does, and to all other tokens as `chunks` does."""

    def __init__(self, rows: StepAttention, chunks: StepAttention, is_row: torch.Tensor) -> None:
        """`is_row`: bool [R], of the first tokens."""
        self._rows, self._chunks, self._is_row_R11 = rows, chunks, is_row[:, None, None]

    def cells(self, layer: int) -> KVCells:
        return self._chunks.cells(layer)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        if len(q_THD) == 0:
            return q_THD
        out_THD = self._chunks.attend(layer, q_THD)
        first = slice(0, len(self._is_row_R11))
        rows_RHD = self._rows.attend(layer, q_THD[first])
        out_THD[first] = torch.where(self._is_row_R11, rows_RHD, out_THD[first])
        return out_THD


class MixedGraphs(GraphKind[MixedSize]):
    def __init__(self, buffers: GraphBuffers, hidden_size: int, dtype: torch.dtype) -> None:
        """`dtype`: of the hidden states, which have `hidden_size` entries."""
        super().__init__("mixed", buffers.mixed_sizes)
        self._buffers = buffers
        self._hidden = torch.zeros(self.sizes[-1].num_tokens, hidden_size, dtype=dtype, device=buffers.device)

    @property
    def device(self) -> torch.device:
        return self._buffers.device

    @property
    def largest_sizes(self) -> list[MixedSize]:
        """With a shorter chunk, more programs share its keys, and leave results for all tokens of the step."""
        return [size for size in self.sizes if size.num_rows == self.sizes[-1].num_rows]

    # -- what the graphs capture -----------------------------------------------------------------------------------

    def launch_kernels(self, model: CausalLM, make_attention: MakeAttention, size: MixedSize) -> None:
        shape, num_rows = GraphShape.mixed(size), size.num_rows
        given, batch = self._buffers.tensors(shape), self._buffers.batch
        row = self._buffers.cu_seqlens_q(num_rows, max_query_len=1)
        first_chunk = shape.first_counted
        chunk_lens = given.context_lens[first_chunk:]
        attention = _MixedAttention(
            make_attention(given.slot_mapping, batch(row, given.context_lens[:num_rows], 1)),
            make_attention(
                given.slot_mapping, batch(given.cu_seqlens_q, chunk_lens, size.num_chunk_tokens, first_seq=first_chunk)
            ),
            is_row=row[:-1] < given.cu_seqlens_q[0],
        )
        self._hidden[: size.num_tokens].copy_(self._buffers.run_layers(model, shape, attention))

    # -- one step ------------------------------------------------------------------------------------------------

    def find_size(self, plan: StepPlan) -> MixedSize | None:
        """The smallest size that can run the step, whose keys must all be on the GPU; None if there is none."""
        num_rows = _num_rows(plan)
        if len(plan.sequences) - num_rows > MAX_GRAPH_CHUNKS:
            return None
        needed = num_rows, plan.num_tokens - num_rows
        return next((size for size in self.sizes if size[0] >= needed[0] and size[1] >= needed[1]), None)

    def replay(self, plan: StepPlan, inputs: StepInputs, size: MixedSize) -> torch.Tensor:
        """Run a step of a size that `find_size` has found. Returns the hidden states of its tokens, [T, hidden_size],
        valid until the next replay. Hot.
        """
        shape, num_rows, seqs = GraphShape.mixed(size), _num_rows(plan), np.arange(len(plan.sequences))
        seqs[num_rows:] += shape.first_counted - num_rows
        cu_seqlens_q = np.full(MAX_GRAPH_CHUNKS + 1, plan.num_tokens)  # the last ones have no queries
        cu_seqlens_q[: len(seqs) - num_rows + 1] = inputs.cu_seqlens_q[num_rows:]
        self._buffers.fill(inputs, shape, seqs, cu_seqlens_q)
        self._graphs[size][0].replay()
        return self._hidden[: plan.num_tokens]


def _num_rows(plan: StepPlan) -> int:
    return sum(1 for _ in takewhile(lambda step: step.num_tokens == 1, plan.sequences))
