"""Kernels of the gated delta net: everything between the projections, with the numerics of layers/delta_net.py.

A row's tokens are the pending tokens that are replayed, followed by the step's new tokens. Rows with few tokens are
computed here (`_run_tokens`), and chunks of prompts in delta_chunks.py. A captured step has only rows with few tokens.

`_mix_kernel` computes the convolution and leaves its new window and the pending inputs. `_recur_kernel` has one program
for each row, head and part of the values. The program holds its part of the head's matrix in registers and goes through
the tokens one by one, so it reads the matrix once and writes it once.

Both paths leave outputs for `_norm_kernel`, which applies the gated norm. In both paths, q and k stay as the
convolution yields them, in the model's dtype, until they are multiplied; their norms are factors of the products, in
fp32.

Legend: T new tokens, B rows, C channels of the convolution, H value heads, V value head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nanovllm.kernels.delta_chunks import (
    UNALIGNED,
    PassConfig,
    convolve,
    inverse_norm,
    load_inputs,
    log_decay,
    run_chunks,
    silu,
    strength,
)
from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous

if TYPE_CHECKING:
    from nanovllm.kernels.state_tensors import DeltaWeights, LayerStates


def delta_net(
    qkv: torch.Tensor,
    z: torch.Tensor,
    ba: torch.Tensor,
    states: LayerStates,
    weights: DeltaWeights,
    config: PassConfig | None = None,
) -> torch.Tensor:
    """See layers/delta_net.py. The rows of `qkv`, `z` and `ba` may be strided. `config` is for chunks of prompts;
    without a `config` the device decides. Hot: once per layer.
    """
    rows = states.rows
    assert qkv.stride(1) == z.stride(1) == ba.stride(1) == 1, "the last dimension must be contiguous"
    num_heads, _, value_dim = states.matrix_NHKV.shape[1:]
    out = torch.empty((len(qkv), num_heads * value_dim), dtype=qkv.dtype, device=qkv.device)
    few = rows.max_num_tokens
    if rows.host is not None:
        # The row length of CUDA graphs, so that these kernels are compiled already
        few = 1 + states.pending_NGI.shape[1]
        if any(rows.host.num_tokens[save.row] <= few for save in rows.host.saves):
            few = 0
        if rows.max_num_tokens > few:
            run_chunks(qkv, ba, states, weights, out, few, config)
    if rows.host is None or min(rows.host.num_tokens) <= few:
        _run_tokens(qkv, ba, states, weights, out, few)
    return _norm(out, z, weights)


# -- few tokens --------------------------------------------------------------------------------------------------------


@triton.jit
def _load_row(row, cu_seqlens_ptr, sources_ptr, targets_ptr, num_replayed_ptr, num_guesses_ptr, max_tokens):
    """Load a row's first new token, its slots, and the number of its replayed tokens, of its tokens without draft
    tokens, and of all its tokens. A chunk of a prompt, which has more than `max_tokens`, gets no token and no target.
    """
    first = tl.load(cu_seqlens_ptr + row)
    num_tokens = tl.load(cu_seqlens_ptr + row + 1) - first
    source, target = tl.load(sources_ptr + row), tl.load(targets_ptr + row)
    num_replayed, num_guesses = tl.load(num_replayed_ptr + row), tl.load(num_guesses_ptr + row)
    total, num_certain = num_replayed + num_tokens, num_replayed + num_tokens - num_guesses
    is_chunk = num_tokens > max_tokens
    total, target = tl.where(is_chunk, 0, total), tl.where(is_chunk, 0, target)
    return first, source, target, num_replayed, num_certain, total, is_chunk


@triton.jit(do_not_specialize=["places", "max_tokens"], do_not_specialize_on_alignment=UNALIGNED)
def _mix_kernel(
    qkv_ptr,
    ba_ptr,
    conv_weight_ptr,
    conv_ptr,
    pending_ptr,
    mixed_ptr,  # [B, places, C]
    gates_ptr,  # [B, places, 2 * H]
    cu_seqlens_ptr,
    sources_ptr,
    targets_ptr,
    num_replayed_ptr,
    num_guesses_ptr,
    qkv_stride,
    ba_stride,
    conv_stride,
    pending_stride,
    places,
    max_tokens,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_GATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Mix a block of channels. The last program of a row instead copies the inputs of the gates."""
    let_next_start(PDL)
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    wait_for_previous(PDL)
    first, source, target, num_replayed, num_certain, total, _ = _load_row(
        row, cu_seqlens_ptr, sources_ptr, targets_ptr, num_replayed_ptr, num_guesses_ptr, max_tokens
    )
    slot = tl.maximum(source, 0).to(tl.int64)
    new_ptr = qkv_ptr + first.to(tl.int64) * qkv_stride
    window_ptr, replayed_ptr = conv_ptr + slot * conv_stride, pending_ptr + slot * pending_stride
    kept_ptr = pending_ptr + target.to(tl.int64) * pending_stride
    at = tl.arange(0, BLOCK_PLACES)[:, None]
    if tl.program_id(1) == tl.num_programs(1) - 1:
        gates: tl.constexpr = INPUTS - CHANNELS
        column = tl.arange(0, BLOCK_GATES)[None, :]
        wanted = (at < total) & (column < gates)
        gate_ptr = ba_ptr + (first + at - num_replayed).to(tl.int64) * ba_stride + column
        new = tl.load(gate_ptr, mask=wanted & (at >= num_replayed), other=0.0)
        old = tl.load(replayed_ptr + at * INPUTS + CHANNELS + column, mask=wanted & (at < num_replayed), other=0.0)
        gate = tl.where(at < num_replayed, old, new)
        tl.store(gates_ptr + (row.to(tl.int64) * places + at) * gates + column, gate, mask=wanted)
        tl.debug_barrier()  # the target may be the source
        is_kept = wanted & (at >= num_certain) & (target > 0)
        tl.store(kept_ptr + (at - num_certain) * INPUTS + CHANNELS + column, gate, mask=is_kept)
    else:
        within = (at < total) & inside[None, :]
        inputs = new_ptr, qkv_stride, window_ptr, replayed_ptr, num_replayed, source
        sums = convolve(inputs, at, channel, within, conv_weight_ptr, CHANNELS, INPUTS, WIDTH)
        out_ptr = mixed_ptr + (row.to(tl.int64) * places + at) * CHANNELS + channel[None, :]
        tl.store(out_ptr, silu(sums, mixed_ptr.dtype.element_ty), mask=within)
        if target > 0:
            place = tl.arange(0, BLOCK_WIDTH)[:, None]
            kept = inside[None, :] & (place < WIDTH)
            window = load_inputs(inputs, num_certain - WIDTH + place, channel, kept, CHANNELS, INPUTS, WIDTH)
            tl.debug_barrier()  # the target may be the source
            target_ptr = conv_ptr + target.to(tl.int64) * conv_stride + place * CHANNELS + channel[None, :]
            tl.store(target_ptr, window, mask=kept)
            is_guess = within & (at >= num_certain)
            guess_ptr = new_ptr + (at - num_replayed).to(tl.int64) * qkv_stride + channel[None, :]
            guess = tl.load(guess_ptr, mask=is_guess, other=0.0)
            tl.store(kept_ptr + (at - num_certain) * INPUTS + channel[None, :], guess, mask=is_guess)


@triton.jit
def _load_token(
    at,
    total,
    head,
    value,
    mixed_ptr,  # the row's part
    gates_ptr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
):
    """Load q, k, v, b and a of one head and token."""
    key, key_head = tl.arange(0, K), head // (HEADS // KEY_HEADS)
    mixed_ptr += at * CHANNELS
    q = tl.load(mixed_ptr + key_head * K + key, mask=(key < K) & (at < total), other=0.0)
    k = tl.load(mixed_ptr + (KEY_HEADS + key_head) * K + key, mask=(key < K) & (at < total), other=0.0)
    v_ptr = mixed_ptr + 2 * KEY_HEADS * K + value
    v = tl.load(v_ptr, mask=(value >= 0) & (at < total), other=0.0)
    gates_ptr += at * (2 * HEADS) + head
    b = tl.load(gates_ptr, mask=at < total, other=0.0)
    a = tl.load(gates_ptr + HEADS, mask=at < total, other=0.0)
    return q, k, v, b, a


@triton.jit(do_not_specialize=["places", "max_tokens"], do_not_specialize_on_alignment=UNALIGNED)
def _recur_kernel(
    mixed_ptr,
    gates_ptr,
    decay_log_ptr,
    dt_bias_ptr,
    out_ptr,  # [T, H * V]
    matrix_ptr,
    cu_seqlens_ptr,
    sources_ptr,
    targets_ptr,
    num_replayed_ptr,
    num_guesses_ptr,
    matrix_stride,
    places,
    max_tokens,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    value = head * V + part * BLOCK_V + tl.arange(0, BLOCK_V)
    decay_log, dt_bias = tl.load(decay_log_ptr + head), tl.load(dt_bias_ptr + head)
    wait_for_previous(PDL)
    first, source, target, num_replayed, num_certain, total, is_chunk = _load_row(
        row, cu_seqlens_ptr, sources_ptr, targets_ptr, num_replayed_ptr, num_guesses_ptr, max_tokens
    )
    cell = head * (K * V) + part * BLOCK_V + tl.arange(0, K)[:, None] * V + tl.arange(0, BLOCK_V)[None, :]
    there = (source >= 0) & ~is_chunk & (cell >= 0)
    matrix_row = matrix_ptr + tl.maximum(source, 0).to(tl.int64) * matrix_stride
    matrix = tl.load(matrix_row + cell, mask=there, other=0.0)
    kept_ptr = matrix_ptr + target.to(tl.int64) * matrix_stride
    if (num_certain == 0) & (target > 0):
        tl.store(kept_ptr + cell, matrix)
    mixed_ptr += row.to(tl.int64) * places * CHANNELS
    gates_ptr += row.to(tl.int64) * places * (2 * HEADS)
    q, k, v, b, a = _load_token(0, total, head, value, mixed_ptr, gates_ptr, CHANNELS, HEADS, KEY_HEADS, K)
    for at in range(total):
        next_q, next_k, next_v, next_b, next_a = _load_token(  # while this token is computed
            at + 1, total, head, value, mixed_ptr, gates_ptr, CHANNELS, HEADS, KEY_HEADS, K
        )
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        q *= inverse_norm(q, 0) * (K**-0.5)
        k *= inverse_norm(k, 0)
        decay = tl.exp(log_decay(a, decay_log, dt_bias))
        of_k, of_q = tl.sum(matrix * k[:, None], 0), tl.sum(matrix * q[:, None], 0)
        written = strength(b) * (v - decay * of_k)
        out = decay * of_q + tl.sum(q * k, 0) * written
        matrix = decay * matrix + k[:, None] * written[None, :]
        if at >= num_replayed:
            token = (first + at - num_replayed).to(tl.int64)
            tl.store(out_ptr + token * (HEADS * V) + value, out.to(out_ptr.dtype.element_ty))
        if (at + 1 == num_certain) & (target > 0):
            tl.store(kept_ptr + cell, matrix)
        q, k, v, b, a = next_q, next_k, next_v, next_b, next_a


def _run_tokens(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    states: LayerStates,
    weights: DeltaWeights,
    out: torch.Tensor,
    max_tokens: int,
) -> None:
    """Compute the rows with up to `max_tokens` new tokens."""
    conv, matrix, pending, rows = states
    width, num_channels = conv.shape[1:]
    num_heads, key_dim, value_dim = matrix.shape[1:]
    max_pending, num_inputs = pending.shape[1:]
    num_rows, places = len(rows.source_slots), max_tokens + max_pending
    mixed = torch.empty((num_rows, places, num_channels), dtype=qkv.dtype, device=qkv.device)
    gates = torch.empty((num_rows, places, 2 * num_heads), dtype=qkv.dtype, device=qkv.device)
    block_places = triton.next_power_of_2(max(1, places))
    block = min(max(16, 2048 // block_places), 512 if num_rows >= 64 else 128, triton.next_power_of_2(num_channels))
    pdl = pdl_options(qkv.device)
    on_grid(_mix_kernel, (num_rows, triton.cdiv(num_channels, block) + 1))(
        qkv,
        ba,
        weights.conv_XC,
        conv,
        pending,
        mixed,
        gates,
        *rows[:5],
        qkv.stride(0),
        ba.stride(0),
        conv.stride(0),
        pending.stride(0),
        places,
        max_tokens,
        CHANNELS=num_channels,
        INPUTS=num_inputs,
        WIDTH=width,
        BLOCK=block,
        BLOCK_PLACES=block_places,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        BLOCK_GATES=triton.next_power_of_2(2 * num_heads),
        num_warps=4,
        **pdl,
    )
    block_v = min(32, value_dim)
    on_grid(_recur_kernel, (value_dim // block_v, num_heads, num_rows))(
        mixed,
        gates,
        weights.decay_log_H,
        weights.dt_bias_H,
        out,
        matrix,
        *rows[:5],
        matrix.stride(0),
        places,
        max_tokens,
        CHANNELS=num_channels,
        HEADS=num_heads,
        KEY_HEADS=weights.num_key_heads,
        K=key_dim,
        V=value_dim,
        BLOCK_V=block_v,
        num_warps=max(1, key_dim * block_v // 1024),
        **pdl,
    )


# -- the gated norm ----------------------------------------------------------------------------------------------------


@triton.jit
def _norm_kernel(
    x_ptr, z_ptr, norm_ptr, out_ptr, z_stride, eps, HEADS: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Apply the gated norm to some heads of a token."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head, value = tl.program_id(1) * GROUP + tl.arange(0, GROUP), tl.arange(0, V)
    offset, inside = head[:, None] * V + value[None, :], (head < HEADS)[:, None]
    norm = tl.load(norm_ptr + value).to(tl.float32)
    wait_for_previous(PDL)
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * (HEADS * V) + offset, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + offset, mask=inside, other=0.0).to(tl.float32)
    normed = (x / tl.sqrt(tl.sum(x * x, 1) / V + eps)[:, None]).to(dtype).to(tl.float32)
    scaled = (normed * norm[None, :]).to(dtype).to(tl.float32) * (z / (1.0 + tl.exp(-z)))
    tl.store(out_ptr + token * (HEADS * V) + offset, scaled.to(dtype), mask=inside)


def _norm(x: torch.Tensor, z: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
    """Apply the gated norm to outputs [T, H * V] in place."""
    value_dim = len(weights.norm_V)
    num_tokens, num_heads = len(x), x.shape[1] // value_dim
    group = max(1, min(1024 // value_dim, triton.next_power_of_2(num_heads)))
    if num_tokens:
        on_grid(_norm_kernel, (num_tokens, triton.cdiv(num_heads, group)))(
            x,
            z,
            weights.norm_V,
            x,
            z.stride(0),
            weights.eps,
            HEADS=num_heads,
            V=value_dim,
            GROUP=group,
            num_warps=4,
            **pdl_options(x.device),
        )
    return x
