"""Tensors of recurrent layers: the states of sequences, their use by the rows of a step, and the layers' weights."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StateSave(NamedTuple):
    """A state to save within a row: the state after the row's first `num_tokens` new tokens is also written to `slot`.

    At least one token of the row follows, and none of the first `num_tokens` is a draft token.
    """

    row: int
    num_tokens: int
    slot: int


class HostStateRows(NamedTuple):
    """The numbers of StateRows on the host, one per row, and the saves, in order of row and `num_tokens`.

    Hashable, so that all layers of a step can share what is computed from them.
    """

    num_tokens: tuple[int, ...]
    source_slots: tuple[int, ...]
    target_slots: tuple[int, ...]
    num_replayed: tuple[int, ...]
    num_guesses: tuple[int, ...]
    saves: tuple[StateSave, ...] = ()


class StateRows(NamedTuple):
    """The states that the rows of a step, its sequences, read and write. The same for all recurrent layers.

    A row starts from the state in its source slot, or from zeros if the source slot is -1. The row first replays the
    inputs of the first `num_replayed` tokens that are pending in the source slot: the previous step's draft tokens that
    were accepted. Then it goes through its new tokens. The last `num_guesses` of the new tokens are draft tokens: their
    outputs are computed, but the state before them goes to the target slot, and their inputs become pending there. So a
    rejected draft token leaves no trace.

    Source and target may be the same slot, but a slot is the target of only one row. Slot 0 is an exception: no
    sequence owns it, any number of rows may leave arbitrary states there, and none starts from it. A CUDA graph has
    more rows than sequences: the padding rows have slot 0 as their target, and start from zeros. Some rows have no
    token; a row without tokens leaves its state unchanged.
    """

    cu_seqlens: torch.Tensor  # [B + 1] int32, boundaries of the rows in the packed new tokens
    source_slots: torch.Tensor  # [B] int32; -1 to start from zeros
    target_slots: torch.Tensor  # [B] int32
    num_replayed: torch.Tensor  # [B] int32
    num_guesses: torch.Tensor  # [B] int32
    max_num_tokens: int  # largest of any row; inside a CUDA graph the largest that the graph can run
    host: HostStateRows | None = None  # None inside a CUDA graph


class LayerStates(NamedTuple):
    """The states of one recurrent layer on this rank, and how the step's rows use them.

    N state slots, C channels of the convolution, W its width - 1, H value heads, K key head dim, V value head dim,
    G draft tokens at most, I numbers that a token gives the recurrence: C + 2 H. All layers share the memory of a slot,
    so the first dimension is not contiguous with the others. Unused slots hold arbitrary, finite numbers.
    """

    conv_NWC: torch.Tensor  # in the model's dtype: the convolution's newest inputs, oldest first
    matrix_NHKV: torch.Tensor  # fp32
    pending_NGI: torch.Tensor  # in the model's dtype: inputs of draft tokens (q, k and v before the convolution, b, a)
    rows: StateRows


class DeltaWeights(NamedTuple):
    """The parameters of a layer other than its projections, and its sizes on this rank."""

    conv_XC: torch.Tensor  # X = W + 1
    decay_log_H: torch.Tensor  # fp32: g = -exp(decay_log) softplus(a + dt_bias)
    dt_bias_H: torch.Tensor  # fp32
    norm_V: torch.Tensor
    eps: float
    num_key_heads: int
    key_head_dim: int
