"""The static buffers that all graphs read and write. A step fills them with one copy.

Only one graph may be in use at a time. Replays follow each other on the compute stream, and the results of a step are
read before the next step overwrites them.
"""

import typing
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.attention.base import PagedBatch, StepAttention
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import CausalLM
from nanovllm.plan.step_limits import MAX_GRAPH_CHUNKS, MixedSize, mixed_graph_sizes
from nanovllm.runner.inputs import (
    SAMPLING_DTYPES,
    Array,
    Packing,
    StepInputs,
    make_staging,
    packed_starts,
    to_device,
)
from nanovllm.runner.seams import CompanionColumns
from nanovllm.utils.arithmetic import ceil_div

NO_CELL = -1  # in the slot mapping: a token that stores nothing
ID_BYTES = 8  # bytes of a token id


class GraphShape(NamedTuple):
    """Sizes of a graph's inputs. The inputs that a step does not fill are padding.

    The sequences of a mixed step are its answers, the *rows*, and then its chunks, from index `first_chunk` on:

        | rows | padding to a multiple of 4 | chunks |

    A decode step has no rows in front: all of its sequences count as chunks in cu_seqlens_q.
    """

    num_tokens: int
    num_seqs: int
    first_chunk: int  # the first sequence whose queries cu_seqlens_q counts
    num_sampled: int

    @classmethod
    def decode(cls, size: int) -> "GraphShape":
        return cls(size, size, 0, size)

    @classmethod
    def mixed(cls, size: MixedSize) -> "GraphShape":
        first_chunk = ceil_div(size.num_rows, 4) * 4  # so that the chunks' arrays are aligned, too
        return cls(size.num_tokens, first_chunk + MAX_GRAPH_CHUNKS, first_chunk, 0)


class GraphInputs(NamedTuple):
    """The inputs of a graph: numpy arrays of a staging buffer, or tensors in the static buffer."""

    # Arrays that no graph reads are empty. Block tables have a separate buffer, because most steps do not change them.
    step: StepInputs
    # int64 [T], where each token's id is in the static buffer, which also holds `sampled_ids`. Replaces pending_rows
    token_source: Array


@cache
def _packing(shape: GraphShape, column_paddings: tuple[int, ...]) -> Packing[GraphInputs]:
    """Return the places of a graph's inputs in a buffer. The arrays are padding, which is what a step does not fill."""
    num_tokens, num_seqs = shape.num_tokens, shape.num_seqs
    none = np.zeros(0, np.int64)
    step = StepInputs(
        input_ids=np.zeros(num_tokens, np.int64),
        pending_rows=none,
        positions=np.zeros(num_tokens, np.int64),
        rope_lens=np.zeros(num_tokens, np.int64),
        slot_mapping=np.full(num_tokens, NO_CELL, np.int64),
        cu_seqlens_q=np.zeros(num_seqs - shape.first_chunk + 1, np.int32),
        context_lens=np.zeros(num_seqs, np.int32),
        block_tables=none,
        sampling_seqs=none,
        sampling_cu_seqlens=none,
        logits_rows=none,
        sampling=SamplingTensors._make(np.zeros(shape.num_sampled, dtype) for dtype in SAMPLING_DTYPES),
        groups=(),
        companion_columns=tuple(np.full(num_seqs, padding, np.int32) for padding in column_paddings),
    )
    return Packing(GraphInputs(step, token_source=np.zeros(num_tokens, np.int64)))


class GraphBuffers:
    """Buffers for graphs of up to `max_num_rows` rows and, with chunks of prompts, of up to `max_num_tokens` tokens.

    `sampled_ids`, int64 [max_num_rows], are the tokens that the last step sampled, by their row in the last step. They
    share a buffer with the step's input ids, so that one index, `token_source`, finds an id both if the host knows it
    already and if it does not:

        | sampled_ids | input_ids | positions | ...
    """

    def __init__(
        self,
        *,
        max_num_rows: int,
        max_num_tokens: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        padded_vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        column_paddings: tuple[int, ...] = (),
        hidden_size: int = 0,
        max_graph_rows: int | None = None,
    ) -> None:
        """A row of logits has `padded_vocab_size` entries (see ParallelLMHead), of which the first `vocab_size` are
        valid. `dtype` is the dtype of the logits. `column_paddings`: for each companion column, its value in a padding
        row. `hidden_size`: of the hidden states that decode steps leave in `hidden`, or 0 if drafts do not need them.
        `max_graph_rows`: most tokens of a decode step in a graph, by default `max_num_rows`.
        """
        self.max_num_rows, self.vocab_size, self.max_model_len = max_num_rows, vocab_size, max_model_len
        self.max_graph_rows = min(max_num_rows, max_graph_rows or max_num_rows)
        self.device, self.column_paddings = device, column_paddings
        self.mixed_sizes = mixed_graph_sizes(max_num_tokens, max_num_rows)
        shapes = GraphShape.decode(max_num_rows), GraphShape.mixed(self.mixed_sizes[-1])
        table_shape = max(shape.num_seqs for shape in shapes), ceil_div(max_model_len, block_size)
        self._start = packed_starts([max_num_rows * ID_BYTES])[-1]  # start of the step's inputs, in bytes
        num_bytes = self._start + max(_packing(shape, column_paddings).num_bytes for shape in shapes)
        with torch.device(device):
            self._static = torch.zeros(num_bytes, dtype=torch.uint8)
            self._block_tables = torch.zeros(table_shape, dtype=torch.int32)
            self._single_queries = torch.arange(max_num_rows + 1, dtype=torch.int32)
            self._logits = torch.zeros(max_num_rows, padded_vocab_size, dtype=dtype)
            self.hidden = torch.zeros(max_num_rows if hidden_size else 0, hidden_size, dtype=dtype)
            self._read_ids = torch.zeros(max(shape.num_tokens for shape in shapes), dtype=torch.int64)
        self._ids = self._static.view(torch.int64)  # token_source has indices into this
        self.sampled_ids = self._ids[:max_num_rows]
        self._host_tables = np.zeros(table_shape, dtype=np.int32)  # the same values as _block_tables

    # -- what the graphs capture -----------------------------------------------------------------------------------

    def tensors(self, shape: GraphShape) -> StepInputs:
        """Return the static inputs of a graph, without block tables."""
        return self._inputs(shape).step

    def _inputs(self, shape: GraphShape) -> GraphInputs:
        return _packing(shape, self.column_paddings).view(self._static[self._start :])

    def input_ids(self, shape: GraphShape) -> torch.Tensor:
        """Return the tokens of the step, int64 [T], including tokens that the last step sampled.

        If the last step sampled no valid token (INVALID_TOKEN), the model runs on token 0 instead. The host is about to
        end that request, and the other requests must not be affected.
        """
        read_ids = self._read_ids[: shape.num_tokens]
        torch.index_select(self._ids, 0, self._inputs(shape).token_source, out=read_ids)
        return read_ids.clamp_(min=0)

    def single_queries(self, num_seqs: int) -> torch.Tensor:
        """int32 [num_seqs + 1]: cu_seqlens_q of sequences with one query each, 0 to num_seqs."""
        return self._single_queries[: num_seqs + 1]

    def cu_seqlens_q(self, size: int, max_query_len: int) -> torch.Tensor:
        """int32 [size + 1]: the queries of up to `size` sequences with `size` queries in all. If no sequence has more
        than one query, the values never change.
        """
        if max_query_len == 1:
            return self.single_queries(size)
        return self.tensors(GraphShape.decode(size)).cu_seqlens_q

    def batch(
        self, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, max_query_len: int, first_seq: int = 0
    ) -> PagedBatch:
        """Return the paged keys of the sequences from index `first_seq` on."""
        return PagedBatch(
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            block_tables=self._block_tables[first_seq : first_seq + len(context_lens)],
            max_query_len=max_query_len,
            max_context_len=self.max_model_len,
            causal=True,
        )

    def decode_batch(self, size: int, max_query_len: int) -> PagedBatch:
        """Return the paged keys of up to `size` sequences with `size` queries in all."""
        context_lens = self.tensors(GraphShape.decode(size)).context_lens
        return self.batch(self.cu_seqlens_q(size, max_query_len), context_lens, max_query_len)

    def companion_columns(self, size: int, max_query_len: int) -> CompanionColumns:
        """Return the companion columns for up to `size` sequences with `size` tokens in all."""
        columns = self.tensors(GraphShape.decode(size)).companion_columns
        return CompanionColumns(columns, self.cu_seqlens_q(size, max_query_len), max_query_len)

    def forward(self, model: CausalLM, size: int, attention: StepAttention) -> None:
        """Run the model and the sampler on a decode step. Leaves results in `logits`, `sampled_ids` and `hidden`."""
        shape = GraphShape.decode(size)
        hidden = self.run_layers(model, shape, attention)
        if len(self.hidden):
            self.hidden[:size].copy_(hidden)
        logits = model.compute_logits(hidden, out=self._logits[:size])
        sample(logits, self.tensors(shape).sampling, self.sampled_ids[:size])

    def run_layers(self, model: CausalLM, shape: GraphShape, attention: StepAttention) -> torch.Tensor:
        """Run the model on the static inputs. Returns the hidden states [T, hidden_size]."""
        tensors = self.tensors(shape)
        rope_lens = tensors.rope_lens if model.needs_rope_lens else None
        with model.padded(tensors.slot_mapping):
            return model(self.input_ids(shape), tensors.positions, attention, rope_lens)

    # -- one step ------------------------------------------------------------------------------------------------

    def logits(self, num_rows: int) -> torch.Tensor:
        """Return the first `num_rows` logits of the last replay, [num_rows, vocab_size]."""
        return self._logits[:num_rows, : self.vocab_size]

    def read_ids(self, num_tokens: int) -> torch.Tensor:
        """Return the tokens that the last replay has run on, int64 [num_tokens]."""
        return self._read_ids[:num_tokens]

    def fill_decode(self, inputs: StepInputs, size: int) -> None:
        """Enqueue the copy of a decode step, padded to `size` rows. Hot: once per step.

        Each padding row is a separate sequence without keys.
        """
        self.fill(inputs, GraphShape.decode(size), 0, padded_cu_seqlens(inputs.cu_seqlens_q, size))

    def fill(self, inputs: StepInputs, shape: GraphShape, num_rows: int, cu_seqlens_q: np.ndarray) -> None:
        """Enqueue the copy of a step's inputs. Its first `num_rows` sequences are the first sequences of the graph; the
        other sequences follow from `shape.first_chunk` on. Hot: once per step.
        """
        context_lens = np.zeros(shape.num_seqs, np.int32)
        num_others = len(inputs.context_lens) - num_rows
        places = slice(0, num_rows), slice(shape.first_chunk, shape.first_chunk + num_others)
        for place, rows in zip(places, (slice(num_rows), slice(num_rows, None)), strict=True):
            context_lens[place] = inputs.context_lens[rows]
            self._copy_tables(inputs.block_tables[rows], place)
        own_ids = self._start // ID_BYTES + np.arange(len(inputs.input_ids))  # input_ids come first
        token_source = np.where(inputs.pending_rows < 0, own_ids, inputs.pending_rows)
        packing = _packing(shape, self.column_paddings)
        staging = make_staging(packing.num_bytes, self.device)
        flat = staging.numpy()
        flat[:] = packing.packed
        step = inputs._replace(
            context_lens=context_lens,
            cu_seqlens_q=cu_seqlens_q,
            groups=(),
            companion_columns=inputs.companion_columns or packing.tree.step.companion_columns,
        )
        packing.write(flat, GraphInputs(step, token_source))
        self._static[self._start :][: len(staging)].copy_(staging, non_blocking=True)

    def _copy_tables(self, tables: np.ndarray, place: slice) -> None:
        """Update block tables, which most steps do not change. Columns beyond a context are never read."""
        columns = slice(0, tables.shape[1])
        known = self._host_tables[place, columns]
        if not np.array_equal(known, tables):
            self._block_tables[place, columns].copy_(typing.cast(Any, to_device(tables, self.device)))
            known[:] = tables


def padded_cu_seqlens(cu_seqlens_q: np.ndarray, size: int) -> np.ndarray:
    """int32 [size + 1]: append a sequence of one query for each padding row, and then sequences without queries."""
    num_more = size + 1 - len(cu_seqlens_q)
    padding = np.minimum(cu_seqlens_q[-1] + 1 + np.arange(num_more, dtype=np.int32), size)
    return np.concatenate([cu_seqlens_q, padding], dtype=np.int32)
