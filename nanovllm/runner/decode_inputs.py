"""The static buffers that decode graphs read and write. A step fills them with one copy."""

from typing import NamedTuple

import numpy as np
import torch

from nanovllm.attention.base import PagedBatch, StepAttention
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.inputs import SAMPLING_DTYPES, StepArrays, torch_dtype
from nanovllm.utils.arithmetic import ceil_div


class DecodeTensors(NamedTuple):
    """A decode step's arrays in the static buffers: fields of StepTensors, and `token_source` (int64 [T]), the index of
    each token's id in the static buffer. Every token samples.
    """

    input_ids: torch.Tensor
    token_source: torch.Tensor
    positions: torch.Tensor
    rope_lens: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    sampling: SamplingTensors


_STEP_DTYPES = {
    "input_ids": torch.int64,
    "token_source": torch.int64,
    "positions": torch.int64,
    "rope_lens": torch.int64,
    "slot_mapping": torch.int64,
    "context_lens": torch.int32,
    "cu_seqlens_q": torch.int32,
}
_DTYPES = (*_STEP_DTYPES.values(), *map(torch_dtype, SAMPLING_DTYPES))  # one per row of the static buffer


def _even(num_entries: int) -> int:
    """Round up to an even count so that every array is 16-byte aligned; Triton recompiles a kernel when a pointer's
    alignment changes.
    """
    return num_entries + num_entries % 2


class DecodeInputs:
    """Buffers of all decode graphs, for up to `max_num_rows` tokens of sequences of `max_model_len` tokens.

    A token is a row. A sequence has one, or with guesses several, so there may be fewer sequences than rows.

    `sampled_ids`, int64 [max_num_rows], are the tokens that the last step sampled, by their row in that step. They are
    in the same buffer as the step's own input ids, so that one index, `token_source`, finds an id whether or not the
    host knows it yet.
    """

    def __init__(
        self,
        *,
        max_num_rows: int,
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
        self.vocab_size = vocab_size
        self.max_num_rows, self.max_model_len = max_num_rows, max_model_len
        self.device = device
        num_columns = ceil_div(max_model_len, block_size)
        with torch.device(device):
            self._static = torch.zeros(_even(max_num_rows) * (1 + len(_DTYPES)), dtype=torch.int64)
            self._block_tables = torch.zeros(max_num_rows, num_columns, dtype=torch.int32)
            self._single_queries = torch.arange(max_num_rows + 1, dtype=torch.int32)
            self._logits = torch.zeros(max_num_rows, padded_vocab_size, dtype=dtype)
            self._read_ids = torch.zeros(max_num_rows, dtype=torch.int64)
        self.sampled_ids = self._static[:max_num_rows]
        self._first_row = _even(max_num_rows)  # where the step's arrays begin
        self._host_tables = np.zeros((max_num_rows, num_columns), dtype=np.int32)  # the same values as _block_tables

    # -- what the graphs capture -----------------------------------------------------------------------------------

    def _rows(self, size: int) -> torch.Tensor:
        """The static arrays for one size, int64 [arrays, _even(size)]. 4-byte elements fill half of a row."""
        return self._static[self._first_row :][: len(_DTYPES) * _even(size)].view(len(_DTYPES), -1)

    def tensors(self, size: int) -> DecodeTensors:
        """The static arrays for one size, each [size], except that cu_seqlens_q is [size + 1]."""
        rows = [row.view(dtype) for dtype, row in zip(_DTYPES, self._rows(size), strict=True)]
        arrays = [row[: size + (i == _CU_SEQLENS_ROW)] for i, row in enumerate(rows)]
        num_own = len(_STEP_DTYPES)
        return DecodeTensors._make((*arrays[:num_own], SamplingTensors._make(arrays[num_own:])))

    def input_ids(self, size: int) -> torch.Tensor:
        """The tokens of the step [size], including those that the last step sampled.

        If the last step sampled no valid token (INVALID_TOKEN), the model runs on token 0 instead. The host is about to
        end that request, and the other requests must not be affected.
        """
        read_ids = self._read_ids[:size]
        torch.index_select(self._static, 0, self.tensors(size).token_source, out=read_ids)
        return read_ids.clamp_(min=0)

    def cu_seqlens_q(self, size: int, max_query_len: int) -> torch.Tensor:
        """int32 [size + 1]: the queries of up to `size` sequences with `size` queries in all. If no sequence has more
        than one, these never change.
        """
        return self._single_queries[: size + 1] if max_query_len == 1 else self.tensors(size).cu_seqlens_q

    def batch(self, size: int, max_query_len: int) -> PagedBatch:
        """The paged keys of up to `size` sequences with `size` queries in all."""
        return PagedBatch(
            cu_seqlens_q=self.cu_seqlens_q(size, max_query_len),
            context_lens=self.tensors(size).context_lens,
            block_tables=self._block_tables[:size],
            max_query_len=max_query_len,
            max_context_len=self.max_model_len,
            causal=True,
        )

    def forward(self, model: CausalLM, size: int, attention: StepAttention) -> None:
        """Run the model and the sampler on the static inputs. Leaves the results in `logits` and `sampled_ids`."""
        tensors = self.tensors(size)
        rope_lens = tensors.rope_lens if model.needs_rope_lens else None
        hidden = model(self.input_ids(size), tensors.positions, attention, rope_lens)
        logits = model.compute_logits(hidden, out=self._logits[:size])
        sample(logits, tensors.sampling, self.sampled_ids[:size])

    # -- one step ------------------------------------------------------------------------------------------------

    def logits(self, num_rows: int) -> torch.Tensor:
        """The first `num_rows` logits of the last replay, [num_rows, vocab_size]."""
        return self._logits[:num_rows, : self.vocab_size]

    def read_ids(self, num_rows: int) -> torch.Tensor:
        """int64 [num_rows]: the tokens that the last replay has run on."""
        return self._read_ids[:num_rows]

    def fill(self, arrays: StepArrays, size: int) -> None:
        """Enqueue the copy of a decode step's arrays, padded to `size` rows. Hot: once per step.

        Each row of padding is a sequence of its own, without keys.
        """
        num_rows = len(arrays.input_ids)
        token_source = self._first_row + np.arange(num_rows)
        token_source[arrays.pending_tokens] = arrays.pending_rows
        columns = arrays._asdict()
        columns["token_source"] = token_source
        columns["cu_seqlens_q"] = padded_cu_seqlens(arrays.cu_seqlens_q, size)
        staging = torch.zeros(len(_DTYPES), _even(size), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        rows = staging.numpy()
        own = [columns[name] for name in _STEP_DTYPES]
        for values, row in zip((*own, *arrays.sampling), rows, strict=True):
            row.view(values.dtype)[: len(values)] = values
        rows[_SLOT_MAPPING_ROW, num_rows:] = -1  # padding stores nothing
        self._rows(size).copy_(staging, non_blocking=True)
        self._copy_tables(arrays.block_tables)

    def _copy_tables(self, tables: np.ndarray) -> None:
        """Update the block tables, which most steps do not change. Columns beyond a context are never read."""
        num_seqs, num_columns = tables.shape
        known = self._host_tables[:num_seqs, :num_columns]
        if np.array_equal(known, tables):
            return
        known[:] = tables
        pin_memory = self.device.type == "cuda"
        staging = torch.empty(num_seqs, self._host_tables.shape[1], dtype=torch.int32, pin_memory=pin_memory)
        staging.numpy()[:] = self._host_tables[:num_seqs]
        self._block_tables[:num_seqs].copy_(staging, non_blocking=True)


def padded_cu_seqlens(cu_seqlens_q: np.ndarray, size: int) -> np.ndarray:
    """int32 [size + 1]: a sequence of one query for each row of padding, and then sequences without queries."""
    num_more = size + 1 - len(cu_seqlens_q)
    padding = np.minimum(cu_seqlens_q[-1] + 1 + np.arange(num_more, dtype=np.int32), size)
    return np.concatenate([cu_seqlens_q, padding], dtype=np.int32)


_SLOT_MAPPING_ROW = DecodeTensors._fields.index("slot_mapping")
_CU_SEQLENS_ROW = DecodeTensors._fields.index("cu_seqlens_q")
