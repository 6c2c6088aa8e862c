"""The embedding and the output head. Each rank has the weights of some token ids.

The embedding table is on the device, where it may be packed as in a GGUF file, or, where a GPU is short of memory, in
pinned CPU memory, which a kernel reads. The output head is dense or packed, or it is the embedding table if both are
tied.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.quantization import Quantization
from nanovllm.device.cuda import registered_view
from nanovllm.device.pinned_memory import HostBuffer
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.linear import NamedShard, WeightShard, new_weight, sum_over_ranks, weight_rows
from nanovllm.layers.packed_weight import PackedRows, PackedWeight, packed
from nanovllm.utils.arithmetic import ceil_div


class _VocabParallel(nn.Module):
    """A weight [ceil(vocab_size / tp), hidden_size] whose rows are this rank's token ids, starting at `first_row`.

    The vocabulary is padded to a multiple of the number of ranks. The padding rows are on the last ranks; they are
    never looked up, and their logits are cut off.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TPGroup) -> None:
        super().__init__()
        self.tp, self.vocab_size, self.hidden_size = tp, vocab_size, hidden_size
        self.rows_per_rank = ceil_div(vocab_size, tp.size)
        self.first_row = tp.rank * self.rows_per_rank

    def _shard(self, target: torch.Tensor | PackedRows, quantization: Quantization | None = None) -> NamedShard:
        """Fill `target`, all rows of this rank, from the checkpoint."""
        start = min(self.first_row, self.vocab_size)
        end = min(start + self.rows_per_rank, self.vocab_size)
        shape, index = (self.vocab_size, self.hidden_size), (slice(start, end), slice(None))
        return NamedShard(0, "weight", WeightShard(target[: end - start], shape, index, quantization))


class VocabParallelEmbedding(_VocabParallel):
    """The embedding table. `is_on_cpu`: keep it in pinned CPU memory, which `weight` shows as a tensor on the GPU.

    quantization: the format of the table, or None if it is not quantized. scale: a factor of the rows, which is rounded
    to `dtype` as in transformers.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: TPGroup,
        dtype: torch.dtype,
        is_on_cpu: bool = False,
        quantization: Quantization | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.dtype, self.quantization = dtype, quantization
        self.scale = float(torch.tensor(scale, dtype=dtype, device="cpu"))
        self.weight: nn.Parameter | PackedWeight
        self._pinned: torch.Tensor | None = None
        if is_on_cpu:
            device = torch.get_default_device()
            self._buffer = HostBuffer(self.rows_per_rank * hidden_size * dtype.itemsize, pinned_for=device)
            self._pinned = self._buffer.tensor.view(dtype).view(self.rows_per_rank, hidden_size)
            self.weight = nn.Parameter(registered_view(self._pinned, device), requires_grad=False)
        else:
            self.weight = new_weight([self.rows_per_rank], hidden_size, dtype=dtype, quantization=quantization)

    def weight_shards(self) -> Iterator[NamedShard]:
        target = weight_rows(self.weight, 0, self.rows_per_rank) if self._pinned is None else self._pinned
        yield self._shard(target, self.quantization)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size]; every id must be within the vocabulary."""
        rows = self._look_up(token_ids)
        rows = rows if self.tp.size == 1 else sum_over_ranks(rows, self.tp)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, and zeros for the tokens of other ranks."""
        if isinstance(self.weight, PackedWeight):
            from nanovllm.kernels import packed_values

            out = torch.empty(len(token_ids), self.hidden_size, dtype=self.dtype, device=token_ids.device)
            return packed_values.unpack_rows(packed(self.weight), token_ids, self.first_row, out)
        if self._pinned is not None:
            from nanovllm.kernels import embedding as kernels

            return kernels.embed(token_ids, self.weight, self.first_row)
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self.first_row
        foreign = (rows < 0) | (rows >= self.rows_per_rank)
        embedded = F.embedding(rows.masked_fill(foreign, 0), self.weight)
        return embedded.masked_fill(foreign.unsqueeze(-1), 0)


class ParallelLMHead(_VocabParallel):
    """The output head. With `tied_to`, the embedding's weight, the head owns no memory.

    quantization: the format of the weight, or None if it is not quantized. softcap: replace logits by
    softcap * tanh(logits / softcap), or None to leave them as they are.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: TPGroup,
        dtype: torch.dtype,
        softcap: float | None = None,
        tied_to: nn.Parameter | PackedWeight | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.is_tied, self.quantization, self.softcap = tied_to is not None, quantization, softcap
        self.weight = tied_to if tied_to is not None else self._new_weight(dtype)

    def _new_weight(self, dtype: torch.dtype) -> nn.Parameter | PackedWeight:
        return new_weight([self.rows_per_rank], self.hidden_size, dtype=dtype, quantization=self.quantization)

    def weight_shards(self) -> Iterator[NamedShard]:
        if not self.is_tied:  # the embedding lists a weight that both share
            yield self._shard(weight_rows(self.weight, 0, self.rows_per_rank), self.quantization)

    @property
    def padded_vocab_size(self) -> int:
        """Width of the logits of all ranks together, including padding."""
        return self.rows_per_rank * self.tp.size

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, hidden_size] -> logits [S, vocab_size], the same on every rank, in the dtype of `hidden`.

        The logits are written to `out` [S, padded_vocab_size] if given, else to a new tensor.
        """
        if self.tp.size == 1:
            return self._product(hidden, out)
        return self.tp.all_gather(self._product(hidden), out)[:, : self.vocab_size]

    def _product(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of this rank's token ids."""
        if isinstance(self.weight, PackedWeight):
            logits = self.weight.linear(hidden, None, out)
        else:
            logits = F.linear(hidden, self.weight) if out is None else torch.mm(hidden, self.weight.t(), out=out)
        return logits if self.softcap is None else soft_cap(logits, self.softcap)


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Replace logits [S, N] by cap * tanh(logits / cap), in place and rounded once. Hot: once per step."""
    if logits.is_cuda:
        from nanovllm.kernels import fused as kernels

        return kernels.softcap(logits, cap)
    return logits.copy_(logits.float().div_(cap).tanh_().mul_(cap))
