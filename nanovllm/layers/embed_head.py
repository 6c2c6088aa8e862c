"""Vocabulary-parallel embedding and output head. Each rank owns a range of token ids.

The vocabulary is padded to a multiple of the number of ranks. The padding rows are on the last ranks; they are never
looked up, and their logits are cut off.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.weights import NamedShard, WeightShard, new_parameter
from nanovllm.utils.arithmetic import ceil_div


class _VocabParallel(nn.Module):
    """A weight [ceil(vocab_size / tp), hidden_size] whose rows are this rank's token ids, starting at `first_row`."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tp: TPGroup, dtype: torch.dtype, tied_to: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.rows_per_rank = ceil_div(vocab_size, tp.size)
        self.first_row = tp.rank * self.rows_per_rank
        self.is_tied = tied_to is not None
        self.weight = new_parameter(self.rows_per_rank, hidden_size, dtype=dtype) if tied_to is None else tied_to

    def weight_shards(self) -> Iterator[NamedShard]:
        if self.is_tied:  # the embedding, which it is tied to, lists the weight
            return
        start = min(self.first_row, self.vocab_size)
        end = min(start + self.rows_per_rank, self.vocab_size)
        shape = (self.vocab_size, self.weight.shape[1])
        yield NamedShard(0, "weight", WeightShard(self.weight[: end - start], shape, (slice(start, end), slice(None))))


class VocabParallelEmbedding(_VocabParallel):
    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden_size]; every id must be within the vocabulary."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self.first_row
        foreign = (rows < 0) | (rows >= self.rows_per_rank)
        embedded = F.embedding(rows.masked_fill(foreign, 0), self.weight)
        return self.tp.all_reduce(embedded.masked_fill(foreign.unsqueeze(-1), 0))


class ParallelLMHead(_VocabParallel):
    """In a model with tied embeddings `tied_to` is the embedding's weight, and the head owns no memory."""

    @property
    def padded_vocab_size(self) -> int:
        """Width of the logits of all ranks together, including padding."""
        return self.rows_per_rank * self.tp.size

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, hidden_size] -> logits [S, vocab_size], the same on every rank, in the dtype of the weight.

        The logits are written to `out` [S, padded_vocab_size] if given, else to a new tensor.
        """
        if self.tp.size == 1:
            return F.linear(hidden, self.weight) if out is None else torch.mm(hidden, self.weight.t(), out=out)
        return self.tp.all_gather(F.linear(hidden, self.weight), out)[:, : self.vocab_size]
