"""Kernels of the gated delta net for chunks of prompts, and the device functions that they share with delta_net.py.

Rows are cut into tiles of tokens, and also after each token whose state is saved. `_mix_tiles_kernel` computes the
convolution of all tiles. For each tile and head, `_solve_kernel` computes how its tokens depend on each other and read
each other, and `_invert_kernel` computes the inverse of this unit triangular matrix, I + L (the UT transform of arXiv
2406.06484, with the decay of arXiv 2412.06464). `_pass_kernel` has one program for each row, head and part of the
values. The program goes through the row's tiles with the state matrix in registers, in fp32.

Legend: T new tokens, B rows, C channels of the convolution, W its width - 1, H value heads, V value head dim,
I = C + 2 H inputs of a token, E tokens of all chunks including the replayed tokens, S tokens of a tile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.device import kernel_target
from nanovllm.kernels.launch import let_next_start, on_grid, pdl_options, wait_for_previous

if TYPE_CHECKING:
    from nanovllm.kernels.state_tensors import DeltaWeights, HostStateRows, LayerStates

UNALIGNED = (  # views that start at any address within other arrays
    *("cu_seqlens_ptr", "sources_ptr", "targets_ptr", "num_replayed_ptr", "num_guesses_ptr"),
    *("tile_rows_ptr", "tile_starts_ptr", "tile_lens_ptr", "tile_slots_ptr", "first_tiles_ptr", "first_tokens_ptr"),
)


# -- device functions of both paths ------------------------------------------------------------------------------------


@triton.jit
def load_inputs(inputs, at, channel, inside, CHANNELS: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr):
    """Load inputs of the convolution at tokens [tokens, 1], counted from a row's first replayed token, and at channels.

    inputs: the row's first new token and the stride between tokens; the window and the pending inputs of the state
    that the row starts from; how many pending inputs are replayed; the slot of that state, negative if the row starts
    from zeros.
    """
    new_ptr, new_stride, window_ptr, pending_ptr, num_replayed, source = inputs
    has_state = source >= 0
    # Selecting a token's address takes fewer registers than loading from every candidate address
    new_ptr += (at - num_replayed).to(tl.int64) * new_stride
    old_ptr = tl.where(at < 0, window_ptr + (at + WIDTH) * CHANNELS, pending_ptr + at * INPUTS)
    ptr = tl.where(at >= num_replayed, new_ptr, old_ptr) + channel[None, :]
    return tl.load(ptr, mask=inside & ((at >= 0) | has_state), other=0.0)


@triton.jit
def convolve(
    inputs, at, channel, within, weight_ptr, CHANNELS: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr
):
    """Compute the convolution in fp32; arguments as in `load_inputs`."""
    acc = tl.zeros(within.shape, tl.float32)
    for tap in tl.static_range(WIDTH + 1):
        x = load_inputs(inputs, at - WIDTH + tap, channel, within, CHANNELS, INPUTS, WIDTH)
        weight = tl.load(weight_ptr + tap * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        acc += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    return acc


@triton.jit
def silu(x, dtype: tl.constexpr):
    """silu(x), rounded where torch rounds."""
    x = x.to(dtype).to(tl.float32)
    return (x / (1.0 + tl.exp(-x))).to(dtype)


@triton.jit
def log_decay(a, decay_log, dt_bias):
    """g = -exp(decay_log) softplus(a + dt_bias)."""
    x = a.to(tl.float32) + dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(decay_log) * softplus


@triton.jit
def strength(b):
    """beta = sigmoid(b), rounded where torch rounds."""
    return (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)


@triton.jit
def inverse_norm(x, AXIS: tl.constexpr):
    return 1.0 / tl.sqrt(tl.sum(x * x, AXIS) + 1e-6)  # L2_EPS of layers/delta_net.py


# -- chunks of prompts -------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """The tiles of a step on the device, int32, in order of row and token. A tile ends where a state is saved."""

    rows: torch.Tensor  # [number of tiles]
    starts: torch.Tensor  # index of the tile's first token in its row
    lens: torch.Tensor
    slots: torch.Tensor  # state slots that get the state after the tile; -1: not saved
    first_tiles: torch.Tensor  # [B + 1]: index of each row's first tile
    first_tokens: torch.Tensor  # [B]: index of each row's first token among the E tokens
    num_tokens: int  # E


@triton.jit(do_not_specialize=["max_pending"], do_not_specialize_on_alignment=UNALIGNED)
def _mix_tiles_kernel(
    qkv_ptr,
    conv_weight_ptr,
    window_ptr,  # [B, W, C]: windows of the states that rows start from
    replayed_ptr,  # [B, max_pending, I]
    conv_ptr,
    pending_ptr,
    mixed_ptr,  # [E, C]
    tile_rows_ptr,
    tile_starts_ptr,
    tile_lens_ptr,
    tile_slots_ptr,
    first_tokens_ptr,
    cu_seqlens_ptr,
    sources_ptr,
    targets_ptr,
    num_replayed_ptr,
    num_guesses_ptr,
    qkv_stride,
    conv_stride,
    pending_stride,
    max_pending,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    tile = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    wait_for_previous(PDL)
    row, start, length = tl.load(tile_rows_ptr + tile), tl.load(tile_starts_ptr + tile), tl.load(tile_lens_ptr + tile)
    slot, source = tl.load(tile_slots_ptr + tile).to(tl.int64), tl.load(sources_ptr + row)
    num_replayed, num_guesses = tl.load(num_replayed_ptr + row), tl.load(num_guesses_ptr + row)
    first = tl.load(cu_seqlens_ptr + row)
    num_certain = num_replayed + tl.load(cu_seqlens_ptr + row + 1) - first - num_guesses
    new_ptr = qkv_ptr + first.to(tl.int64) * qkv_stride
    window_ptr += row.to(tl.int64) * (CHANNELS * WIDTH)
    replayed_ptr += row.to(tl.int64) * max_pending * INPUTS
    inputs = new_ptr, qkv_stride, window_ptr, replayed_ptr, num_replayed, source
    i = tl.arange(0, S)
    at, within = start + i, (i < length)[:, None] & inside[None, :]
    sums = convolve(inputs, at[:, None], channel, within, conv_weight_ptr, CHANNELS, INPUTS, WIDTH)
    token = tl.load(first_tokens_ptr + row) + at
    out_ptr = mixed_ptr + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out_ptr, silu(sums, mixed_ptr.dtype.element_ty), mask=within)
    if slot >= 0:
        place = tl.arange(0, BLOCK_WIDTH)[:, None]
        kept, before = inside[None, :] & (place < WIDTH), start + length - WIDTH
        window = load_inputs(inputs, before + place, channel, kept, CHANNELS, INPUTS, WIDTH)
        tl.store(conv_ptr + slot * conv_stride + place * CHANNELS + channel[None, :], window, mask=kept)
    if start >= num_certain:
        pending_ptr += tl.load(targets_ptr + row).to(tl.int64) * pending_stride
        guess_ptr = new_ptr + (at - num_replayed).to(tl.int64)[:, None] * qkv_stride + channel[None, :]
        guess = tl.load(guess_ptr, mask=within)
        tl.store(pending_ptr + (at - num_certain)[:, None] * INPUTS + channel[None, :], guess, mask=within)


@triton.jit
def _load_heads(ptr, token, within, CHANNELS: tl.constexpr, SIZE: tl.constexpr):
    """Load a tile [tokens, SIZE] of `mixed`."""
    offset = token.to(tl.int64)[:, None] * CHANNELS + tl.arange(0, SIZE)[None, :]
    return tl.load(ptr + offset, mask=within[:, None], other=0.0)


@triton.jit(do_not_specialize=["max_pending"], do_not_specialize_on_alignment=UNALIGNED)
def _solve_kernel(
    mixed_ptr,
    ba_ptr,
    replayed_ptr,
    decay_log_ptr,
    dt_bias_ptr,
    pending_ptr,
    inverse_ptr,  # fp32 [tiles, H, S, S]
    scores_ptr,  # [tiles, H, S, S]: how much each token reads of what the others write
    factors_ptr,  # fp32 [E, H, 4]
    decays_ptr,  # fp32 [tiles, H]
    tile_rows_ptr,
    tile_starts_ptr,
    tile_lens_ptr,
    first_tokens_ptr,
    cu_seqlens_ptr,
    targets_ptr,
    num_replayed_ptr,
    num_guesses_ptr,
    ba_stride,
    pending_stride,
    max_pending,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    head, tile = tl.program_id(0), tl.program_id(1)
    decay_log, dt_bias = tl.load(decay_log_ptr + head), tl.load(dt_bias_ptr + head)
    wait_for_previous(PDL)
    inputs: tl.constexpr = CHANNELS + 2 * HEADS
    row, start, length = tl.load(tile_rows_ptr + tile), tl.load(tile_starts_ptr + tile), tl.load(tile_lens_ptr + tile)
    num_replayed, num_guesses = tl.load(num_replayed_ptr + row), tl.load(num_guesses_ptr + row)
    first = tl.load(cu_seqlens_ptr + row)
    num_certain = num_replayed + tl.load(cu_seqlens_ptr + row + 1) - first - num_guesses
    i = tl.arange(0, S)
    at, within = start + i, i < length
    token = tl.load(first_tokens_ptr + row) + at
    is_new = within & (at >= num_replayed)
    new_ptr = ba_ptr + (first + at - num_replayed).to(tl.int64) * ba_stride + head
    old_ptr = replayed_ptr + (row.to(tl.int64) * max_pending + at) * inputs + CHANNELS + head
    is_old = within & (at < num_replayed)
    b = tl.load(new_ptr, mask=is_new, other=0.0) + tl.load(old_ptr, mask=is_old, other=0.0)
    a = tl.load(new_ptr + HEADS, mask=is_new, other=0.0) + tl.load(old_ptr + HEADS, mask=is_old, other=0.0)
    b, a = b.to(ba_ptr.dtype.element_ty), a.to(ba_ptr.dtype.element_ty)
    if start >= num_certain:  # the tile has draft tokens
        kept_ptr = pending_ptr + tl.load(targets_ptr + row).to(tl.int64) * pending_stride
        kept_ptr += (at - num_certain) * inputs + CHANNELS + head
        tl.store(kept_ptr, b, mask=within)
        tl.store(kept_ptr + HEADS, a, mask=within)
    beta = tl.where(within, strength(b), 0.0)
    g = tl.where(within, log_decay(a, decay_log, dt_bias), 0.0)
    sums = tl.cumsum(g, 0)
    whole = tl.sum(g, 0)
    key_head = head // (HEADS // KEY_HEADS)
    q = _load_heads(mixed_ptr + key_head * K, token, within, CHANNELS, K)
    k = _load_heads(mixed_ptr + (KEY_HEADS + key_head) * K, token, within, CHANNELS, K)
    q_scale, k_scale = inverse_norm(q.to(tl.float32), 1) * (K**-0.5), inverse_norm(k.to(tl.float32), 1)
    # Later tokens have smaller sums, so only the part below the diagonal may be exponentiated
    below = i[:, None] >= i[None, :]
    ratio = tl.exp(tl.where(below, sums[:, None] - sums[None, :], float("-inf")))
    products = tl.dot(k, tl.trans(k), input_precision="ieee")
    system = tl.where(i[:, None] > i[None, :], products * ratio, 0.0) * (beta * k_scale)[:, None] * k_scale[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * ratio * q_scale[:, None] * k_scale[None, :]
    place = tile * HEADS + head.to(tl.int64)
    offset = place * (S * S) + i[:, None] * S + i[None, :]
    tl.store(scores_ptr + offset, scores.to(scores_ptr.dtype.element_ty))
    tl.store(inverse_ptr + offset, system)
    factors_ptr += (token.to(tl.int64) * HEADS + head) * 4
    from_start = tl.exp(sums)
    tl.store(factors_ptr, beta, mask=within)
    tl.store(factors_ptr + 1, beta * from_start * k_scale, mask=within)
    tl.store(factors_ptr + 2, from_start * q_scale, mask=within)
    tl.store(factors_ptr + 3, tl.exp(whole - sums) * k_scale, mask=within)
    tl.store(decays_ptr + place, tl.exp(whole))


@triton.jit
def _join_blocks(ptr, S: tl.constexpr, HALF: tl.constexpr):
    """Compute the lower left part of the inverse of each block from the inverses of its two diagonal halves."""
    i = tl.arange(0, HALF)
    offset = i[:, None] * S + i[None, :]
    for pair in tl.static_range(S // (2 * HALF)):
        corner_ptr = ptr + pair * (2 * HALF * (S + 1))
        first = tl.load(corner_ptr + offset)
        second = tl.load(corner_ptr + HALF * (S + 1) + offset)
        below = tl.load(corner_ptr + HALF * S + offset)
        product = tl.dot(tl.dot(second, below, input_precision="ieee"), first, input_precision="ieee")
        tl.store(corner_ptr + HALF * S + offset, -product)


@triton.jit
def _invert_kernel(matrices_ptr, S: tl.constexpr, PDL: tl.constexpr):
    """Replace L by (I + L)^-1 in each of the matrices [S, S], starting with blocks on the diagonal, row by row."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    ptr = matrices_ptr + tl.program_id(0).to(tl.int64) * (S * S)
    block: tl.constexpr = 16
    part, i, j = tl.arange(0, S // block), tl.arange(0, block), tl.arange(0, block)
    offset = part[:, None, None] * (block * (S + 1)) + i[None, :, None] * S + j[None, None, :]
    inverse = -tl.load(ptr + offset)
    for row in range(1, block):
        is_row = (i == row)[None, :, None]
        current = tl.sum(tl.where(is_row, inverse, 0.0), 1)  # [S / block, block]
        current += tl.sum(current[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, current[:, None, :], inverse)
    inverse += (i[:, None] == j[None, :]).to(tl.float32)[None, :, :]
    tl.store(ptr + offset, inverse)
    if S >= 32:
        tl.debug_barrier()  # other threads load what a thread has stored
        _join_blocks(ptr, S, 16)
    if S >= 64:
        tl.debug_barrier()
        _join_blocks(ptr, S, 32)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def _pass_kernel(
    mixed_ptr,
    inverse_ptr,
    scores_ptr,
    factors_ptr,
    decays_ptr,
    matrix_ptr,
    out_ptr,  # [T, H * V]
    tile_starts_ptr,
    tile_lens_ptr,
    tile_slots_ptr,
    first_tiles_ptr,
    first_tokens_ptr,
    cu_seqlens_ptr,
    sources_ptr,
    num_replayed_ptr,
    matrix_stride,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row, head, part = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    key_head = head // (HEADS // KEY_HEADS)
    value = part * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, S)
    wait_for_previous(PDL)
    source, num_replayed = tl.load(sources_ptr + row), tl.load(num_replayed_ptr + row)
    first, first_token = tl.load(cu_seqlens_ptr + row), tl.load(first_tokens_ptr + row)
    dtype = mixed_ptr.dtype.element_ty
    cell = head * (K * V) + tl.arange(0, K)[:, None] * V + value[None, :]
    matrix_row = matrix_ptr + tl.maximum(source, 0).to(tl.int64) * matrix_stride
    first_tile, last_tile = tl.load(first_tiles_ptr + row), tl.load(first_tiles_ptr + row + 1)
    there = (source >= 0) & (first_tile < last_tile) & (cell >= 0)
    matrix = tl.load(matrix_row + cell, mask=there, other=0.0)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        start, length = tl.load(tile_starts_ptr + tile), tl.load(tile_lens_ptr + tile)
        slot = tl.load(tile_slots_ptr + tile)
        at, within = start + i, i < length
        token = first_token + at
        q = _load_heads(mixed_ptr + key_head * K, token, within, CHANNELS, K)
        k = _load_heads(mixed_ptr + (KEY_HEADS + key_head) * K, token, within, CHANNELS, K)
        v_ptr = mixed_ptr + 2 * KEY_HEADS * K + head * V
        v = tl.load(v_ptr + token.to(tl.int64)[:, None] * CHANNELS + value[None, :], mask=within[:, None], other=0.0)
        factor_ptr = factors_ptr + (token.to(tl.int64) * HEADS + head) * 4
        beta = tl.load(factor_ptr, mask=within, other=0.0)
        of_old = tl.load(factor_ptr + 1, mask=within, other=0.0)
        of_read = tl.load(factor_ptr + 2, mask=within, other=0.0)
        of_kept = tl.load(factor_ptr + 3, mask=within, other=0.0)
        place = tile * HEADS + head.to(tl.int64)
        square = place * (S * S) + i[:, None] * S + i[None, :]
        inverse, scores = tl.load(inverse_ptr + square).to(dtype), tl.load(scores_ptr + square)
        rounded = matrix.to(dtype)
        old = tl.dot(k, rounded, input_precision="ieee")
        wanted = beta[:, None] * v.to(tl.float32) - of_old[:, None] * old
        written = tl.dot(inverse, wanted.to(dtype), input_precision="ieee")
        out = of_read[:, None] * tl.dot(q, rounded, input_precision="ieee")
        out += tl.dot(scores, written.to(dtype), input_precision="ieee")
        new_token = (first + at - num_replayed).to(tl.int64)
        kept_out = (within & (at >= num_replayed))[:, None]
        tl.store(out_ptr + new_token[:, None] * (HEADS * V) + head * V + value[None, :], out.to(dtype), mask=kept_out)
        kept = (of_kept[:, None] * written).to(dtype)
        matrix = matrix * tl.load(decays_ptr + place) + tl.dot(tl.trans(k), kept, input_precision="ieee")
        if slot >= 0:
            tl.store(matrix_ptr + slot.to(tl.int64) * matrix_stride + cell, matrix)


class PassConfig(NamedTuple):
    """Tokens of a tile, and launch options of `_pass_kernel`."""

    tile_tokens: int
    block_v: int  # values of a head that a program computes
    num_warps: int
    num_stages: int


def _choose(device: torch.device, dtype: torch.dtype, value_dim: int) -> PassConfig:
    if dtype == torch.float32:  # no matrix units
        return PassConfig(16, min(16, value_dim), 8, 1)
    num_warps, num_stages = (4, 2) if kernel_target.target_of(device).has_shared_operands else (8, 1)
    return PassConfig(64, min(32, value_dim), num_warps, num_stages)


@lru_cache(maxsize=2)
def _cut(
    host: HostStateRows, few: int, tile_tokens: int, device: torch.device, stream: torch.cuda.Stream | None
) -> Tiles:
    """Cut the rows with more than `few` new tokens. The tiles are cached, because all layers of a step use the same.

    `stream`: the current stream, on which the tiles are copied to the device. It is part of the key, because the copy
    of another engine's tiles may not have finished on its own stream.
    """
    tiles: list[tuple[int, int, int, int]] = []  # row, start, length, slot
    first_tiles, first_tokens, num_done = [0], [], 0
    for row, num_new in enumerate(host.num_tokens):
        start, total, kept = 0, 0, {}
        if num_new > few:
            total = host.num_replayed[row] + num_new
            kept = {host.num_replayed[row] + save.num_tokens: save.slot for save in host.saves if save.row == row}
            kept[total - host.num_guesses[row]] = host.target_slots[row]
        for cut in sorted({*kept, total}):
            ends = [*range(start + tile_tokens, cut, tile_tokens), cut]
            tiles += [
                (row, first, end - first, kept.get(end, -1))
                for first, end in zip([start, *ends[:-1]], ends, strict=True)
                if first < end or end in kept
            ]
            start = cut
        first_tiles.append(len(tiles))
        first_tokens.append(num_done)
        num_done += total
    columns = [*map(list, zip(*tiles, strict=True)), first_tiles, first_tokens]
    packed = torch.tensor([number for column in columns for number in column], dtype=torch.int32, device="cpu")
    if device.type == "cuda":  # an ordinary copy would wait for the GPU
        packed = packed.pin_memory()
    sizes = [len(column) for column in columns]
    return Tiles._make((*packed.to(device, non_blocking=True).split(sizes), num_done))


def run_chunks(
    qkv: torch.Tensor,
    ba: torch.Tensor,
    states: LayerStates,
    weights: DeltaWeights,
    out: torch.Tensor,
    few: int,
    config: PassConfig | None,
) -> None:
    """Compute the rows with more than `few` new tokens."""
    conv, matrix, pending, rows = states
    device, dtype = qkv.device, qkv.dtype
    width, num_channels = conv.shape[1:]
    num_heads, key_dim, value_dim = matrix.shape[1:]
    max_pending, num_inputs = pending.shape[1:]
    size, block_v, num_warps, num_stages = config or _choose(device, dtype, value_dim)
    assert rows.host is not None, "chunks of prompts are not captured in CUDA graphs"
    tiles = _cut(rows.host, few, size, device, torch.cuda.current_stream(device) if device.type == "cuda" else None)
    num_tiles = len(tiles.rows)
    # Copy: a program may store the target's window while another reads the source's, and both may be the same slot
    sources = rows.source_slots.clamp(min=0)
    windows, replayed = conv[sources], pending[sources] if any(rows.host.num_replayed) else pending  # unread
    mixed = torch.empty((tiles.num_tokens, num_channels), dtype=dtype, device=device)
    block = min(64, triton.next_power_of_2(num_channels))
    pdl = pdl_options(device)
    on_grid(_mix_tiles_kernel, (triton.cdiv(num_channels, block), num_tiles))(
        qkv,
        weights.conv_XC,
        windows,
        replayed,
        conv,
        pending,
        mixed,
        *tiles[:4],
        tiles.first_tokens,
        *rows[:5],
        qkv.stride(0),
        conv.stride(0),
        pending.stride(0),
        max_pending,
        CHANNELS=num_channels,
        INPUTS=num_inputs,
        WIDTH=width,
        S=size,
        BLOCK=block,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        num_warps=8,
        **pdl,
    )
    inverse = torch.empty((num_tiles, num_heads, size, size), dtype=torch.float32, device=device)
    scores = torch.empty((num_tiles, num_heads, size, size), dtype=dtype, device=device)
    factors = torch.empty((tiles.num_tokens, num_heads, 4), dtype=torch.float32, device=device)
    decays = torch.empty((num_tiles, num_heads), dtype=torch.float32, device=device)
    sizes = {"CHANNELS": num_channels, "HEADS": num_heads, "KEY_HEADS": weights.num_key_heads, "K": key_dim, "S": size}
    on_grid(_solve_kernel, (num_heads, num_tiles))(
        mixed,
        ba,
        replayed,
        weights.decay_log_H,
        weights.dt_bias_H,
        pending,
        inverse,
        scores,
        factors,
        decays,
        *tiles[:3],
        tiles.first_tokens,
        rows.cu_seqlens,
        rows.target_slots,
        rows.num_replayed,
        rows.num_guesses,
        ba.stride(0),
        pending.stride(0),
        max_pending,
        **sizes,
        num_warps=4,
        **pdl,
    )
    on_grid(_invert_kernel, (num_tiles * num_heads,))(inverse, S=size, num_warps=2, **pdl)
    on_grid(_pass_kernel, (value_dim // block_v, num_heads, len(rows.source_slots)))(
        mixed,
        inverse,
        scores,
        factors,
        decays,
        matrix,
        out,
        *tiles[1:6],
        rows.cu_seqlens,
        rows.source_slots,
        rows.num_replayed,
        matrix.stride(0),
        **sizes,
        V=value_dim,
        BLOCK_V=block_v,
        STAGES=num_stages,
        num_warps=num_warps,
        **pdl,
    )
