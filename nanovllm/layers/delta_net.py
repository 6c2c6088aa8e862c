"""GatedDeltaNet: a layer whose memory of a sequence is a matrix per head instead of keys and values (arXiv 2412.06464).

The inputs of q, k and v first go through a causal convolution over the newest tokens, and silu. Then each head reads
and writes its matrix S, with a decay exp(g) and a strength beta of every token:

    S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  out = S^T q

Several tokens are computed at once by solving for what each of them writes (arXiv 2406.06484). The functions here are
the reference, in plain torch; on a GPU kernels/delta_net.py computes the same.

Legend: T packed tokens, N state slots, C channels of the convolution, W its width - 1, H value heads and Q key heads of
this rank, K key head dim, V value head dim. Value head h uses key head h * Q // H.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.model_config import RecurrentConfig
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.device.tp_group import TPGroup
from nanovllm.kernels.state_tensors import DeltaWeights, LayerStates
from nanovllm.layers.linear import MergedColumnParallelLinear, NamedShard, RowParallelLinear, WeightShard, share
from nanovllm.layers.packed_weight import new_parameter

CHUNK_TOKENS = 64  # computed at once
L2_EPS = 1e-6  # added to the squared length of q and k before the root


class HasLayerMemory(Protocol):
    """The part of StepAttention (attention/base.py) that recurrent layers use."""

    def layer_memory(self, layer: int) -> Any:
        """Return the memory of a layer that does not attend to all keys: LayerStates, which a recurrent layer updates
        in place, or WindowKeys (attention/base.py). Hot: once per layer.
        """
        ...


class GatedDeltaNet(nn.Module):
    """Its modules and parameters have the names that they have in the checkpoint.

    Raises ConfigError if the heads are not divisible by the number of ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        config: RecurrentConfig,
        layer: int,
        eps: float,
        tp: TPGroup,
        dtype: torch.dtype,
        formats: Sequence[Sequence[Quantization | None]] = ((None, None), (None, None), (None,)),
    ) -> None:
        """layer: index among the recurrent layers. formats: of the layers in in_proj_qkvz, in_proj_ba and out_proj."""
        super().__init__()
        self.layer, self.config = layer, config
        key_size = config.num_key_heads * config.key_head_dim
        value_size = config.num_value_heads * config.value_head_dim
        heads = config.num_value_heads
        value_rows = share(0, heads, tp, "linear_num_value_heads").rows
        share(0, config.num_key_heads, tp, "linear_num_key_heads")
        self.conv_parts = [  # rows of q, of k and of v
            share(0, key_size, tp, "q"),
            share(0, key_size, tp, "k", key_size),
            share(0, value_size, tp, "v", 2 * key_size),
        ]
        self.in_proj_qkvz = MergedColumnParallelLinear(
            hidden_size,
            [config.conv_channels, value_size],
            bias=False,
            tp=tp,
            dtype=dtype,
            formats=formats[0],
            parts=[*self.conv_parts, share(1, value_size, tp, "z")],
        )
        self.in_proj_ba = MergedColumnParallelLinear(
            hidden_size, [heads, heads], bias=False, tp=tp, dtype=dtype, formats=formats[1]
        )
        self.out_proj = RowParallelLinear(
            value_size, hidden_size, bias=False, tp=tp, dtype=dtype, quantization=formats[2][0]
        )
        self.value_rows = value_rows
        local_heads = value_rows.stop - value_rows.start
        self.local_sizes = [config.conv_channels // tp.size, value_size // tp.size]
        self.conv = new_parameter(config.conv_kernel, self.local_sizes[0], dtype=dtype)
        self.A_log = new_parameter(local_heads, dtype=torch.float32)
        self.dt_bias = new_parameter(local_heads, dtype=torch.float32)
        self.norm = new_parameter(config.value_head_dim, dtype=dtype)
        self.weights = DeltaWeights(
            self.conv, self.A_log, self.dt_bias, self.norm, eps, config.num_key_heads // tp.size, config.key_head_dim
        )

    def forward(
        self, hidden: torch.Tensor, cos_sin: torch.Tensor, attn: HasLayerMemory, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size], or [S, hidden_size] if `rows` [S] selects tokens. Hot: once per layer.

        The states are updated with all tokens.
        """
        qkv, z = self.in_proj_qkvz(hidden).split(self.local_sizes, dim=-1)
        ba = self.in_proj_ba(hidden)
        states: LayerStates = attn.layer_memory(self.layer)
        if hidden.is_cuda:
            from nanovllm.kernels import delta_net as kernels

            out = kernels.delta_net(qkv, z, ba, states, self.weights)
        else:
            out = delta_net(qkv, z, ba, states, self.weights)
        return self.out_proj(out if rows is None else out[rows])

    def weight_shards(self) -> Iterator[NamedShard]:
        config, end = self.config, 0
        shape = config.conv_channels, 1, config.conv_kernel
        for _, rows in self.conv_parts:
            start, end = end, end + rows.stop - rows.start
            target = self.conv[:, start:end].t().unsqueeze(1)
            yield NamedShard(0, "conv1d.weight", WeightShard(target, shape, (rows, slice(None), slice(None))))
        for name, parameter in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            yield NamedShard(0, name, WeightShard(parameter, (config.num_value_heads,), (self.value_rows,)))
        yield NamedShard(0, "norm.weight", WeightShard(self.norm, tuple(self.norm.shape), (slice(None),)))


# -- plain torch -----------------------------------------------------------------------------------------------------


def delta_net(
    qkv_TC: torch.Tensor, z_TX: torch.Tensor, ba_TX: torch.Tensor, states: LayerStates, weights: DeltaWeights
) -> torch.Tensor:
    """Everything between the projections: [T, H * V]. Updates the states of every row.

    z_TX: [T, H * V], the gates of the outputs. ba_TX: [T, 2 * H], from which beta and g are computed.
    """
    rows = states.rows
    assert rows.host is not None, "the sizes of rows are not known on the host"
    inputs_TI, host, outs, end = torch.cat((qkv_TC, ba_TX), dim=-1), rows.host, [], 0
    for row, num_tokens in enumerate(host.num_tokens):
        start, end = end, end + num_tokens
        num_guesses = host.num_guesses[row]
        saves = {save.num_tokens: save.slot for save in host.saves if save.row == row}
        cuts = {num_tokens - num_guesses: host.target_slots[row]}
        outs.append(
            _run_row(
                inputs_TI[start:end],
                states,
                weights,
                host.source_slots[row],
                host.num_replayed[row],
                tuple((cut, slot) for each in (saves, cuts) for cut, slot in each.items()),
            )
        )
        if num_guesses:
            states.pending_NGI[host.target_slots[row], :num_guesses] = inputs_TI[end - num_guesses : end]
    return gated_norm(torch.cat(outs).to(qkv_TC.dtype), z_TX, weights.norm_V, weights.eps)


def _run_row(
    inputs_TI: torch.Tensor,
    states: LayerStates,
    weights: DeltaWeights,
    source: int,
    num_replayed: int,
    kept: tuple[tuple[int, int], ...],
) -> torch.Tensor:
    """Compute one row's outputs before the norm, fp32 [T, H, V].

    kept: for each saved state, the number of tokens before it and its slot.
    """
    width, num_channels = states.conv_NWC.shape[1:]
    replayed = max(source, 0)
    inputs_TI = torch.cat((states.pending_NGI[replayed, :num_replayed], inputs_TI))
    if source < 0:
        past_WC, matrix = states.conv_NWC.new_zeros(width, num_channels), torch.zeros_like(states.matrix_NHKV[0])
    else:
        past_WC, matrix = states.conv_NWC[source], states.matrix_NHKV[source].clone()
    qkv_TC, ba_TX = inputs_TI[:, :num_channels], inputs_TI[:, num_channels:]
    seen_TC = torch.cat((past_WC, qkv_TC))
    mixed_TC = qkv_TC  # a row may have no token
    if len(inputs_TI):
        mixed_TC = F.silu(F.conv1d(seen_TC.t(), weights.conv_XC.t().unsqueeze(1), groups=num_channels)).t()
    q, k, v = _heads(mixed_TC, weights, matrix.shape[0])
    beta, g = gates(ba_TX, weights)
    kept = tuple(sorted((num_replayed + num_tokens, slot) for num_tokens, slot in kept))
    ends = sorted({*range(CHUNK_TOKENS, len(inputs_TI), CHUNK_TOKENS), *(end for end, _ in kept), len(inputs_TI)})
    outs, start = [v[:, :0]], 0
    for end in ends:
        if start < end:
            chunk = slice(start, end)
            out, matrix = delta_rule(q[:, chunk], k[:, chunk], v[:, chunk], g[:, chunk], beta[:, chunk], matrix)
            outs.append(out)
        for at, slot in kept:
            if at == end:
                states.conv_NWC[slot], states.matrix_NHKV[slot] = seen_TC[end : end + width], matrix
        start = end
    return torch.cat(outs, dim=1).transpose(0, 1)[num_replayed:]


def _heads(
    mixed_TC: torch.Tensor, weights: DeltaWeights, num_value_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k [H, T, K], normed, and v [H, T, V] of every value head, in fp32."""
    key_size = weights.num_key_heads * weights.key_head_dim
    q, k, v = mixed_TC.float().split((key_size, key_size, mixed_TC.shape[1] - 2 * key_size), dim=1)
    q, k = (each.unflatten(1, (weights.num_key_heads, -1)).transpose(0, 1) for each in (q, k))
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + L2_EPS) for each in (q, k))
    q, k = (each.repeat_interleave(num_value_heads // weights.num_key_heads, dim=0) for each in (q, k))
    return q * weights.key_head_dim**-0.5, k, v.unflatten(1, (num_value_heads, -1)).transpose(0, 1)


def gates(ba_TX: torch.Tensor, weights: DeltaWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """beta and g of every token, fp32 [H, T]. beta is rounded to the dtype of `ba_TX`."""
    b_TH, a_TH = ba_TX.chunk(2, dim=1)
    g_TH = -weights.decay_log_H.exp() * F.softplus(a_TH.float() + weights.dt_bias_H)
    return b_TH.sigmoid().float().t(), g_TH.t()


def delta_rule(
    q_HTK: torch.Tensor,
    k_HTK: torch.Tensor,
    v_HTV: torch.Tensor,
    g_HT: torch.Tensor,
    beta_HT: torch.Tensor,
    matrix_HKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run several tokens of one sequence at once. Returns their outputs [H, T, V] and the matrix after them.

    With G the sum of g up to a token, token i writes d_i, where
    d_i = beta_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_i . k_j) d_j).
    """
    decay_HT = g_HT.cumsum(1)
    ratio_HTT = decay_HT.unsqueeze(2) - decay_HT.unsqueeze(1)
    later = torch.ones(ratio_HTT.shape[1:], dtype=torch.bool, device=ratio_HTT.device).triu(1)
    ratio_HTT = ratio_HTT.masked_fill(later, float("-inf")).exp()
    from_start_HT1, beta_HT1 = decay_HT.exp().unsqueeze(2), beta_HT.unsqueeze(2)
    system_HTT = beta_HT1 * (k_HTK @ k_HTK.transpose(1, 2)) * ratio_HTT
    written_HTV = torch.linalg.solve_triangular(
        system_HTT, beta_HT1 * (v_HTV - from_start_HT1 * (k_HTK @ matrix_HKV)), upper=False, unitriangular=True
    )
    out_HTV = from_start_HT1 * (q_HTK @ matrix_HKV) + (q_HTK @ k_HTK.transpose(1, 2) * ratio_HTT) @ written_HTV
    to_end_HT1 = (decay_HT[:, -1:] - decay_HT).exp().unsqueeze(2)
    matrix_HKV = from_start_HT1[:, -1:] * matrix_HKV + (to_end_HT1 * k_HTK).transpose(1, 2) @ written_HTV
    return out_HTV, matrix_HKV


def gated_norm(out_THV: torch.Tensor, z_TX: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each head's output, times silu(z): [T, H * V], in the output's dtype, rounded as in transformers."""
    out32 = out_THV.float()
    normed = out32 * torch.rsqrt(out32.square().mean(-1, keepdim=True) + eps)
    scaled = (weight_V * normed.to(out_THV.dtype)).flatten(1)
    return (scaled * F.silu(z_TX.float())).to(out_THV.dtype)
