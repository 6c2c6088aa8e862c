"""The static buffers that all graphs read and write. A step fills them with one copy.

Only one graph may be in use at a time: replays follow each other on the compute stream, and what a step leaves here is
read before the next step overwrites it.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.attention.base import PagedBatch, StepAttention
from nanovllm.core.step_limits import MAX_GRAPH_CHUNKS, MixedSize, mixed_graph_sizes
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.inputs import SAMPLING_DTYPES, StepInputs, packed_starts, to_device, torch_dtype
from nanovllm.utils.arithmetic import ceil_div

NO_CELL = -1  # in the slot mapping: a token that stores nothing


class GraphShape(NamedTuple):
    """Sizes of a graph's inputs. What a step does not fill is padding."""

    num_tokens: int
    num_seqs: int
    num_ends: int  # sequences whose queries cu_seqlens_q counts: the last ones
    num_sampled: int

    @classmethod
    def decode(cls, size: int) -> "GraphShape":
        return cls(size, size, size, size)

    @classmethod
    def mixed(cls, size: MixedSize) -> "GraphShape":
        """The chunks come after the rows, where their arrays are aligned too."""
        return cls(size.num_tokens, ceil_div(size.num_rows, 4) * 4 + MAX_GRAPH_CHUNKS, MAX_GRAPH_CHUNKS, 0)

    @property
    def first_counted(self) -> int:
        """The first sequence whose queries cu_seqlens_q counts."""
        return self.num_seqs - self.num_ends


class GraphInputs(NamedTuple):
    """The inputs of a graph: numpy arrays of a staging buffer, or tensors in the static buffer."""

    input_ids: Any  # int64 [T]
    token_source: Any  # int64 [T], where each token's id is in the static buffer, which also holds `sampled_ids`
    positions: Any  # int64 [T]
    rope_lens: Any  # int64 [T]
    slot_mapping: Any  # int64 [T]
    context_lens: Any  # int32 [B]
    cu_seqlens_q: Any  # int32 [ends + 1]
    sampling: SamplingTensors  # each [S]


_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)
_DTYPES: tuple[np.dtype, ...] = (*[_INT64] * 5, *[_INT32] * 2, *SAMPLING_DTYPES)
_NUM_OWN = len(_DTYPES) - len(SAMPLING_DTYPES)  # arrays besides those of `sampling`


@cache
def _layout(shape: GraphShape) -> tuple[list[tuple[int, int, np.dtype]], int]:
    """Where each array starts and ends, with its dtype, and the size of them all, in bytes."""
    sampling = [shape.num_sampled] * len(SAMPLING_DTYPES)
    lengths = [*[shape.num_tokens] * 5, shape.num_seqs, shape.num_ends + 1, *sampling]
    sizes = [length * dtype.itemsize for length, dtype in zip(lengths, _DTYPES, strict=True)]
    *starts, num_bytes = packed_starts(sizes)
    places = zip(starts, sizes, _DTYPES, strict=True)
    return [(start, start + size, dtype) for start, size, dtype in places], num_bytes


def _inputs(buffer: Any, shape: GraphShape) -> GraphInputs:
    """The arrays in a buffer of bytes, of numpy or torch."""
    is_array = isinstance(buffer, np.ndarray)
    places, _ = _layout(shape)
    arrays = [buffer[start:end].view(dtype if is_array else torch_dtype(dtype)) for start, end, dtype in places]
    return GraphInputs._make((*arrays[:_NUM_OWN], SamplingTensors._make(arrays[_NUM_OWN:])))


class GraphBuffers:
    """Buffers for graphs of up to `max_num_rows` rows and, beside chunks of prompts, of up to `max_num_tokens` tokens.

    `sampled_ids`, int64 [max_num_rows], are the tokens that the last step sampled, by their row in that step. They are
    in the same buffer as the step's own input ids, so that one index, `token_source`, finds an id whether or not the
    host knows it yet.
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
    ) -> None:
        """A row of logits has `padded_vocab_size` entries (see ParallelLMHead), of which the first `vocab_size` are
        valid. `dtype` is the logits'.
        """
        self.max_num_rows, self.vocab_size, self.max_model_len = max_num_rows, vocab_size, max_model_len
        self.device = device
        self.mixed_sizes = mixed_graph_sizes(max_num_tokens, max_num_rows)
        shapes = GraphShape.decode(max_num_rows), GraphShape.mixed(self.mixed_sizes[-1])
        table_shape = max(shape.num_seqs for shape in shapes), ceil_div(max_model_len, block_size)
        self._start = packed_starts([max_num_rows * _INT64.itemsize])[-1]  # of the step's inputs, in bytes
        num_bytes = self._start + max(_layout(shape)[1] for shape in shapes)
        with torch.device(device):
            self._static = torch.zeros(num_bytes, dtype=torch.uint8)
            self._block_tables = torch.zeros(table_shape, dtype=torch.int32)
            self._single_queries = torch.arange(max_num_rows + 1, dtype=torch.int32)
            self._logits = torch.zeros(max_num_rows, padded_vocab_size, dtype=dtype)
            self._read_ids = torch.zeros(max(shape.num_tokens for shape in shapes), dtype=torch.int64)
        self._ids = self._static.view(torch.int64)  # what token_source points to
        self.sampled_ids = self._ids[:max_num_rows]
        self._host_tables = np.zeros(table_shape, dtype=np.int32)  # the same values as _block_tables

    # -- what the graphs capture -----------------------------------------------------------------------------------

    def tensors(self, shape: GraphShape) -> GraphInputs:
        return _inputs(self._static[self._start :], shape)

    def input_ids(self, shape: GraphShape) -> torch.Tensor:
        """The tokens of the step, int64 [T], including those that the last step sampled.

        If the last step sampled no valid token (INVALID_TOKEN), the model runs on token 0 instead. The host is about to
        end that request, and the other requests must not be affected.
        """
        read_ids = self._read_ids[: shape.num_tokens]
        torch.index_select(self._ids, 0, self.tensors(shape).token_source, out=read_ids)
        return read_ids.clamp_(min=0)

    def cu_seqlens_q(self, size: int, max_query_len: int) -> torch.Tensor:
        """int32 [size + 1]: the queries of up to `size` sequences with `size` queries in all. If no sequence has more
        than one, these never change.
        """
        if max_query_len == 1:
            return self._single_queries[: size + 1]
        return self.tensors(GraphShape.decode(size)).cu_seqlens_q

    def batch(
        self, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, max_query_len: int, first_seq: int = 0
    ) -> PagedBatch:
        """The paged keys of the sequences from number `first_seq` on."""
        return PagedBatch(
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            block_tables=self._block_tables[first_seq : first_seq + len(context_lens)],
            max_query_len=max_query_len,
            max_context_len=self.max_model_len,
            causal=True,
        )

    def decode_batch(self, size: int, max_query_len: int) -> PagedBatch:
        """The paged keys of up to `size` sequences with `size` queries in all."""
        context_lens = self.tensors(GraphShape.decode(size)).context_lens
        return self.batch(self.cu_seqlens_q(size, max_query_len), context_lens, max_query_len)

    def forward(self, model: CausalLM, size: int, attention: StepAttention) -> None:
        """Run the model and the sampler on a decode step. Leaves the results in `logits` and `sampled_ids`."""
        shape = GraphShape.decode(size)
        hidden = self.run_layers(model, shape, attention)
        logits = model.compute_logits(hidden, out=self._logits[:size])
        sample(logits, self.tensors(shape).sampling, self.sampled_ids[:size])

    def run_layers(self, model: CausalLM, shape: GraphShape, attention: StepAttention) -> torch.Tensor:
        """Run the model on the static inputs. Returns the hidden states [T, hidden_size]."""
        tensors = self.tensors(shape)
        rope_lens = tensors.rope_lens if model.needs_rope_lens else None
        return model(self.input_ids(shape), tensors.positions, attention, rope_lens)

    # -- one step ------------------------------------------------------------------------------------------------

    def logits(self, num_rows: int) -> torch.Tensor:
        """The first `num_rows` logits of the last replay, [num_rows, vocab_size]."""
        return self._logits[:num_rows, : self.vocab_size]

    def read_ids(self, num_tokens: int) -> torch.Tensor:
        """int64 [num_tokens]: the tokens that the last replay has run on."""
        return self._read_ids[:num_tokens]

    def fill_decode(self, inputs: StepInputs, size: int) -> None:
        """Enqueue the copy of a decode step, padded to `size` rows. Hot: once per step.

        Each row of padding is a sequence of its own, without keys.
        """
        seqs = slice(0, len(inputs.context_lens))
        cu_seqlens_q = padded_cu_seqlens(inputs.cu_seqlens_q, size)
        self.fill(inputs, GraphShape.decode(size), seqs, cu_seqlens_q, inputs.sampling)

    def fill(
        self,
        inputs: StepInputs,
        shape: GraphShape,
        seqs: slice | np.ndarray,
        cu_seqlens_q: np.ndarray,
        sampling: Sequence[Any] = (),
    ) -> None:
        """Enqueue the copy of a step's inputs, whose sequences get the numbers `seqs` in the graph. Hot."""
        num_tokens = len(inputs.input_ids)
        own_ids = self._start // _INT64.itemsize + np.arange(num_tokens)
        staging = torch.zeros(_layout(shape)[1], dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        given = _inputs(staging.numpy(), shape)
        given.input_ids[:num_tokens] = inputs.input_ids
        given.token_source[:num_tokens] = np.where(inputs.pending_rows < 0, own_ids, inputs.pending_rows)
        given.positions[:num_tokens] = inputs.positions
        given.rope_lens[:num_tokens] = inputs.rope_lens
        given.slot_mapping[:num_tokens] = inputs.slot_mapping
        given.slot_mapping[num_tokens:] = NO_CELL
        given.context_lens[seqs] = inputs.context_lens
        given.cu_seqlens_q[:] = cu_seqlens_q
        for column, values in zip(given.sampling, sampling, strict=False):
            column[: len(values)] = values
        self._static[self._start :][: len(staging)].copy_(staging, non_blocking=True)
        self._copy_tables(inputs.block_tables, seqs)

    def _copy_tables(self, tables: np.ndarray, seqs: slice | np.ndarray) -> None:
        """Update the block tables, which most steps do not change. Columns beyond a context are never read."""
        num_columns = tables.shape[1]
        if np.array_equal(self._host_tables[seqs, :num_columns], tables):
            return
        self._host_tables[seqs, :num_columns] = tables
        num_seqs = seqs.stop if isinstance(seqs, slice) else int(seqs[-1]) + 1
        (on_device,) = to_device((self._host_tables[:num_seqs],), self.device)
        self._block_tables[:num_seqs].copy_(on_device)


def padded_cu_seqlens(cu_seqlens_q: np.ndarray, size: int) -> np.ndarray:
    """int32 [size + 1]: a sequence of one query for each row of padding, and then sequences without queries."""
    num_more = size + 1 - len(cu_seqlens_q)
    padding = np.minimum(cu_seqlens_q[-1] + 1 + np.arange(num_more, dtype=np.int32), size)
    return np.concatenate([cu_seqlens_q, padding], dtype=np.int32)
