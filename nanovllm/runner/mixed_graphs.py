"""Steps in which answers run beside short chunks of prompts, as CUDA graphs from token ids to hidden states.

Launched kernel by kernel, such a step costs the host 0.7 ms a layer, which for a short chunk is many times what the GPU
needs. As a graph it takes two copies and one replay. All of its keys must be on the GPU. Logits and sampling follow
outside of the graph, because only some of the tokens are sampled from.

The tokens of a step are packed as usual, and padding follows them. Sequences with a single token come first: these are
the step's *rows*, and the decode kernel attends to them. The sequences after them are its *chunks*, for the prefill
kernel. How many of the tokens are rows is read on the device:

    tokens     | row | row | chunk    | chunk  | padding |
    decode     |     R rows     |                           what it writes behind the last row is discarded
    prefill                | up to C tokens    |
"""

from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.attention.base import PagedBatch, StepAttention
from nanovllm.core.step_limits import MAX_GRAPH_CHUNKS, MixedSize
from nanovllm.core.step_plan import StepPlan
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import GraphKind, MakeAttention, capture
from nanovllm.runner.decode_inputs import DecodeInputs
from nanovllm.runner.inputs import StepArrays
from nanovllm.runner.kv_memory import KVMemory
from nanovllm.utils.arithmetic import ceil_div

NO_CELL = -1  # a token that stores nothing
NOT_PENDING = -1


class _Inputs(NamedTuple):
    """Inputs of a graph of T tokens and up to R rows, int64: on the host numpy arrays, on the device tensors."""

    input_ids: Any  # [T]
    pending_rows: Any  # [T], the row of the last step that sampled the token; NOT_PENDING: it is in input_ids
    positions: Any  # [T]
    rope_lens: Any  # [T]
    slot_mapping: Any  # [T]
    row_context_lens: Any  # [R]
    chunk_context_lens: Any  # [MAX_GRAPH_CHUNKS]
    chunk_cu_seqlens: Any  # [MAX_GRAPH_CHUNKS + 1]
    num_rows: Any  # [1]


def _input_lens(size: MixedSize) -> list[int]:
    """Number of entries of each array of _Inputs."""
    return [size.num_tokens] * 5 + [size.num_rows, MAX_GRAPH_CHUNKS, MAX_GRAPH_CHUNKS + 1, 1]


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
    def __init__(self, inputs: DecodeInputs, memory: KVMemory, model: CausalLM, sizes: list[MixedSize]) -> None:
        """`inputs`: where the tokens are that the last step sampled."""
        super().__init__("mixed", sizes)
        self._sampled_ids, self._max_model_len = inputs.sampled_ids, inputs.max_model_len
        k_cache, _ = memory.cache
        block_size, most_tokens = k_cache.shape[2], sizes[-1].num_tokens
        num_sequences = sizes[-1].num_rows + MAX_GRAPH_CHUNKS
        num_columns = ceil_div(inputs.max_model_len, block_size)
        with torch.device(inputs.device):
            self._static = torch.zeros(sum(_input_lens(sizes[-1])), dtype=torch.int64)
            self._block_tables = torch.zeros(num_sequences, num_columns, dtype=torch.int32)
            self._read_ids = torch.zeros(most_tokens, dtype=torch.int64)
            self._hidden = torch.zeros(most_tokens, model.config.hidden_size, dtype=k_cache.dtype)

    @property
    def device(self) -> torch.device:
        return self._static.device

    @property
    def largest_sizes(self) -> list[MixedSize]:
        """With a shorter chunk, more programs share its keys, and leave results for all tokens of the step."""
        return [size for size in self.sizes if size.num_rows == self.sizes[-1].num_rows]

    # -- what the graphs capture -----------------------------------------------------------------------------------

    def _tensors(self, size: MixedSize) -> _Inputs:
        lens = _input_lens(size)
        return _Inputs._make(self._static[: sum(lens)].split(lens))

    def launch_kernels(self, model: CausalLM, make_attention: MakeAttention, size: MixedSize) -> None:
        given = self._tensors(size)
        sampled_ids = self._sampled_ids[given.pending_rows.clamp(min=0)].clamp_(min=0)  # see DecodeInputs.input_ids
        read_ids = self._read_ids[: size.num_tokens]
        read_ids.copy_(torch.where(given.pending_rows == NOT_PENDING, given.input_ids, sampled_ids))
        row = torch.arange(size.num_rows + 1, device=self.device)
        attention = _MixedAttention(
            make_attention(given.slot_mapping, self._batch(row, given.row_context_lens, 0, 1)),
            make_attention(
                given.slot_mapping,
                self._batch(given.chunk_cu_seqlens, given.chunk_context_lens, size.num_rows, size.num_chunk_tokens),
            ),
            is_row=row[:-1] < given.num_rows,
        )
        rope_lens = given.rope_lens if model.needs_rope_lens else None
        self._hidden[: size.num_tokens].copy_(model(read_ids, given.positions, attention, rope_lens))

    def _batch(
        self, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, first_table: int, max_query_len: int
    ) -> PagedBatch:
        return PagedBatch(
            cu_seqlens_q=cu_seqlens_q.int(),
            context_lens=context_lens.int(),
            block_tables=self._block_tables[first_table : first_table + len(context_lens)],
            max_query_len=max_query_len,
            max_context_len=self._max_model_len,
            causal=True,
        )

    def _capture_size(self, model: CausalLM, make_attention: MakeAttention, size: MixedSize, pools: list[Any]) -> None:
        with capture(pools[0]) as graph:
            self.launch_kernels(model, make_attention, size)
        self._graphs[size] = [graph]

    # -- one step ------------------------------------------------------------------------------------------------

    def find_size(self, plan: StepPlan) -> MixedSize | None:
        """The smallest size that can run the step, whose keys must all be on the GPU; None if there is none."""
        num_rows = _num_rows(plan)
        if len(plan.sequences) - num_rows > MAX_GRAPH_CHUNKS:
            return None
        needed = num_rows, plan.num_tokens - num_rows
        return next((size for size in self.sizes if size[0] >= needed[0] and size[1] >= needed[1]), None)

    def replay(self, plan: StepPlan, arrays: StepArrays, size: MixedSize) -> torch.Tensor:
        """Run a step of a size that `find_size` has found. Returns the hidden states of its tokens, [T, hidden_size],
        valid until the next replay. Hot.
        """
        self._fill(arrays, _num_rows(plan), size)
        self._graphs[size][0].replay()
        return self._hidden[: plan.num_tokens]

    def read_ids(self, num_tokens: int) -> torch.Tensor:
        """int64 [num_tokens]: the tokens that the last replay has run on."""
        return self._read_ids[:num_tokens]

    def _fill(self, arrays: StepArrays, num_rows: int, size: MixedSize) -> None:
        """Enqueue the copies of a step's arrays."""
        num_tokens, num_chunks = len(arrays.input_ids), len(arrays.context_lens) - num_rows
        pinned = self.device.type == "cuda"
        lens = _input_lens(size)
        staging = torch.zeros(sum(lens), dtype=torch.int64, pin_memory=pinned)
        given = _Inputs._make(np.split(staging.numpy(), np.cumsum(lens)[:-1]))
        given.input_ids[:num_tokens] = arrays.input_ids
        given.pending_rows[:] = NOT_PENDING
        given.pending_rows[arrays.pending_tokens] = arrays.pending_rows
        given.positions[:num_tokens] = arrays.positions
        given.rope_lens[:num_tokens] = arrays.rope_lens
        given.slot_mapping[:num_tokens] = arrays.slot_mapping
        given.slot_mapping[num_tokens:] = NO_CELL
        given.row_context_lens[:num_rows] = arrays.context_lens[:num_rows]
        given.chunk_context_lens[:num_chunks] = arrays.context_lens[num_rows:]
        given.chunk_cu_seqlens[: num_chunks + 1] = arrays.cu_seqlens_q[num_rows:]
        given.chunk_cu_seqlens[num_chunks + 1 :] = num_tokens  # sequences without queries
        given.num_rows[:] = num_rows
        self._static[: len(staging)].copy_(staging, non_blocking=True)

        num_columns = arrays.block_tables.shape[1]
        tables = torch.zeros(size.num_rows + MAX_GRAPH_CHUNKS, num_columns, dtype=torch.int32, pin_memory=pinned)
        tables.numpy()[:num_rows] = arrays.block_tables[:num_rows]
        tables.numpy()[size.num_rows : size.num_rows + num_chunks] = arrays.block_tables[num_rows:]
        self._block_tables[: len(tables), :num_columns].copy_(tables, non_blocking=True)


def _num_rows(plan: StepPlan) -> int:
    return sum(1 for _ in takewhile(lambda step: step.num_tokens == 1, plan.sequences))
