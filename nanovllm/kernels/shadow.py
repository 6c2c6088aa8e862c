"""Attention of single queries over the shadow, and the quantization that fills it (plan/shadow_spec.py).

Legend: B sequences, H query heads, K kv heads, D head dim, L layers, N pages, P tokens per page, S splits or sinks, T
tokens of a sink, 2 its K and V.

A page of a head consists of int32 words: codes of K, codes of V, scales and offsets of K, scales and offsets of V.

Codes of b bits are packed so that a shift and a mask leave two of them in the halves of a register, as neighbours in
the dimension that the tensor cores sum over: channels for K, tokens for V. Word (t, c) of a unit of 16 * 16 / b tokens
of K has, from bit b * s + 16 * h on, the code of token 16 * s + t and channel 2 * c + h. Word (d, u) of V has there the
code of token 16 * s + 2 * u + h and channel d. The tokens with the same s are a slice.

The scales of K are [P / 64, D] in fp16, and the scales of V are [groups of channels, P]. So a word holds the scales of
two neighbours, and one instruction turns two codes into numbers: fma.f16x2.

In `attend` each warp of a program has separate keys, and the warps' results are merged at the end. The first program of
a sequence also reads its sink, in place of the same tokens of its first page. Products are in fp16 for all models,
because the numbers have no more precision than fp16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import KernelTarget
from nanovllm.kernels.configs import plan_num_splits
from nanovllm.kernels.launch import LN_2, LOG2_E, let_next_start, on_grid, pdl_options, wait_for_previous
from nanovllm.kernels.merge import merge_splits
from nanovllm.kernels.packed_words import mask_and_set
from nanovllm.plan.shadow_spec import KEY_BITS, KEY_GROUP, SINK_TOKENS, SLICE_TOKENS, ShadowSpec

MAX_ROWS = 16  # query heads of a program
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_GROUP = tl.constexpr(KEY_GROUP)
_SINK = tl.constexpr(SINK_TOKENS)
_SLICE = tl.constexpr(SLICE_TOKENS)


def _layout(spec: ShadowSpec) -> dict[str, int]:
    return {
        "KEY_BITS": KEY_BITS,
        "VALUE_BITS": spec.value_bits,
        "VALUE_GROUP": spec.value_group,
        "NUM_VALUE_GROUPS": spec.num_value_groups,
        "HEAD_WORDS": spec.head_words,
        "KEY_WORDS": spec.key_words,
        "VALUE_WORDS": spec.value_words,
        "KEY_SCALE_WORDS": spec.key_scale_words,
        "VALUE_SCALE_WORDS": spec.value_scale_words,
    }


class ShadowTile(NamedTuple):
    """Launch options of `attend`. Each warp of a program attends to separate units."""

    num_warps: int
    num_stages: int


def choose_tile(spec: ShadowSpec, target: KernelTarget) -> ShadowTile:
    """Let copies run two units ahead where two programs of an SM have room for them, else one."""
    unit_bytes = 4 * spec.head_words // spec.page_size * (SLICE_TOKENS * 16 // spec.value_bits)
    num_warps = 4 if 4 * unit_bytes + 2048 <= target.shared_bytes else 2
    room = target.shared_bytes // (num_warps * unit_bytes + 2048)
    return ShadowTile(num_warps, 3 if room >= 4 else 2)


@triton.jit
def _halves(words):
    """Split words into the two numbers that each holds: [.., n] -> fp16 [.., 2 n]."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    both = tl.join(low, high)
    return both.reshape(both.shape[:-2] + [2 * both.shape[-2]])  # noqa: RUF005  # Triton cannot unpack here


@triton.jit
def _at(words, PLACE: tl.constexpr, TARGET: tl.constexpr):
    """Move the bits at PLACE to TARGET."""
    if PLACE > TARGET:
        words = words >> (PLACE - TARGET)
    elif PLACE < TARGET:
        words = words << (TARGET - PLACE)
    return words


@triton.jit
def _codes(words, s: tl.constexpr, BITS: tl.constexpr):
    """2^BITS + code in fp16, two in each word, of slice `s`.

    The code is in the highest bits of the mantissa, and the exponent is the exponent of 2^BITS.
    """
    if BITS == 4:
        words = mask_and_set(
            _at(words, 4 * s, 6), 0x03C003C0, 0x4C004C00, "lop3.b32 $0, $1, 0x03C003C0, 0x4C004C00, 0xEA;"
        )
    else:
        words = mask_and_set(
            _at(words, 2 * s, 8), 0x03000300, 0x44004400, "lop3.b32 $0, $1, 0x03000300, 0x44004400, 0xEA;"
        )
    return words


@triton.jit
def _numbers(codes, scales, offsets):
    """Codes, scales and offsets, two in each word [.., n] -> numbers in fp16 [.., 2 n]."""
    if _INTERPRETED:
        numbers = _halves(codes).to(tl.float32) * _halves(scales).to(tl.float32) + _halves(offsets).to(tl.float32)
        numbers = numbers.to(tl.float16)
    else:
        asm: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;"
        words = tl.inline_asm_elementwise(
            asm, "=r,r,r,r", [codes, scales, offsets], dtype=tl.int32, is_pure=True, pack=1
        )
        numbers = _halves(words)
    return numbers


@triton.jit
def _load(ptrs, is_there, ALL_ARE: tl.constexpr):
    if ALL_ARE:
        loaded = tl.load(ptrs)
    else:
        loaded = tl.load(ptrs, mask=is_there, other=0)
    return loaded


# -- attention ---------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["table_stride", "num_splits"],
    do_not_specialize_on_alignment=["context_lens_ptr", "block_tables_ptr"],
)
def _attend_kernel(
    q_ptr,
    pages_ptr,  # [N, K, words]
    sinks_ptr,  # [S, 2, T, K, D]
    out_ptr,  # [B, H, S, D]
    lse_ptr,  # [B, H, S], natural log
    context_lens_ptr,
    block_tables_ptr,  # a sink or -1, then pages
    q_stride_b,
    q_stride_h,
    table_stride,
    num_splits,
    scale_log2,
    PAGE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    NUM_VALUE_GROUPS: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    KEY_SCALE_WORDS: tl.constexpr,
    VALUE_SCALE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    KEY_SLICES: tl.constexpr = 16 // KEY_BITS  # in a unit of K
    SLICES: tl.constexpr = 16 // VALUE_BITS
    UNIT: tl.constexpr = SLICES * 16  # tokens
    GROUP_SLICES: tl.constexpr = 4
    CHUNK: tl.constexpr = min(BLOCK_D, 128)  # channels of K that are in registers at once
    split, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    kv_head, tile = tl.program_id(1) % NUM_KV_HEADS, tl.program_id(1) // NUM_KV_HEADS
    num_units = tl.load(context_lens_ptr + sequence) // UNIT
    table_ptr = block_tables_ptr + sequence * table_stride
    sink = tl.load(table_ptr).to(tl.int64)
    table_ptr += 1
    has_sink = (sink >= 0) & (num_units > 0)
    num_sink_steps = tl.where(has_sink, tl.cdiv(_SINK, WARPS * _SLICE), 0)
    # The first split reads the sink, which takes as long as units of as many steps
    taken = num_sink_steps * WARPS
    per_split = tl.cdiv(tl.cdiv(num_units + taken, num_splits), WARPS) * WARPS
    first = tl.minimum(tl.maximum(split * per_split - taken, 0), num_units)
    last = tl.minimum(tl.maximum((split + 1) * per_split - taken, 0), num_units)

    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < HEADS_PER_KV
    head = kv_head * HEADS_PER_KV + row
    q = tl.tuple(())
    for chunk in tl.static_range(BLOCK_D // CHUNK):
        dim = chunk * CHUNK + tl.arange(0, CHUNK)
        q_ptrs = q_ptr + sequence * q_stride_b + head[None, :] * q_stride_h + dim[:, None]
        part = tl.load(q_ptrs, mask=is_row[None, :] & (dim < D)[:, None], other=0.0).to(tl.float16)
        q += (tl.broadcast_to(part[None, :, :], (WARPS, CHUNK, ROWS)),)
    warp = tl.arange(0, WARPS)[:, None, None]
    token = tl.arange(0, _SLICE)[None, :, None]
    channel, couple = tl.arange(0, VALUE_GROUP)[None, :, None], tl.arange(0, _SLICE // 2)[None, None, :]
    row_max = tl.full((WARPS, 1, ROWS), float("-inf"), tl.float32)
    row_sum = tl.zeros((WARPS, _SLICE, ROWS), tl.float32)
    accs = tl.tuple(())
    for _ in tl.static_range(NUM_VALUE_GROUPS):
        accs += (tl.zeros((WARPS, VALUE_GROUP, ROWS), tl.float32),)
    for step in tl.range(0, tl.where(split == 0, num_sink_steps, 0), num_stages=1):
        sink_token = (step * WARPS + warp) * _SLICE + token
        sink_ptr = sinks_ptr + ((sink * 2 * _SINK + sink_token) * NUM_KV_HEADS + kv_head) * D
        score = tl.broadcast_to(tl.where(sink_token < _SINK, 0.0, float("-inf")), (WARPS, _SLICE, ROWS))
        for chunk in tl.static_range(BLOCK_D // CHUNK):
            d = chunk * CHUNK + tl.arange(0, CHUNK)[None, None, :]
            k = tl.load(sink_ptr + d, mask=(sink_token < _SINK) & (d < D), other=0.0)
            score = tl.dot(k, q[chunk], score)
        new_max = tl.maximum(row_max, tl.max(score, 1, keep_dims=True) * scale_log2)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - shift)
        row_max = new_max
        weight = tl.exp2(score * scale_log2 - shift)
        row_sum = row_sum * rescale + weight
        weight = weight.to(tl.float16)
        new_accs = tl.tuple(())
        for g in tl.static_range(NUM_VALUE_GROUPS):
            d = g * VALUE_GROUP + tl.arange(0, VALUE_GROUP)[None, None, :]
            v_ptrs = sink_ptr + _SINK * NUM_KV_HEADS * D + d
            v = tl.load(v_ptrs, mask=(sink_token < _SINK) & (d < D), other=0.0)
            new_accs += (tl.dot(tl.permute(v, 0, 2, 1), weight, accs[g] * rescale),)
        accs = new_accs
    next_page = tl.load(table_ptr + tl.minimum(first + warp, last - 1) * UNIT // PAGE, mask=first < last, other=0)
    for start in tl.range(first, last, WARPS, num_stages=STAGES):
        is_unit = start + warp < last
        unit = tl.minimum(start + warp, last - 1)  # a warp without a unit reads one and masks it
        base = pages_ptr + (next_page.to(tl.int64) * NUM_KV_HEADS + kv_head) * HEAD_WORDS
        # Look up one unit ahead, so that copies do not wait for a look-up
        next_page = tl.load(table_ptr + tl.minimum(start + WARPS + warp, last - 1) * UNIT // PAGE)
        unit = unit % (PAGE // UNIT)
        # Initial value of the scores, and of the scores of tokens that a sink holds if the unit is the first
        masked = tl.broadcast_to(tl.where(is_unit, 0.0, float("-inf")), (WARPS, _SLICE, ROWS))
        is_read = is_unit & ((start + warp > 0) | (sink < 0))
        masked_sink = tl.broadcast_to(tl.where(is_read, 0.0, float("-inf")), (WARPS, _SLICE, ROWS))
        scores = tl.tuple(())
        for chunk in tl.static_range(BLOCK_D // CHUNK):
            pair = chunk * (CHUNK // 2) + tl.arange(0, CHUNK // 2)[None, None, :]
            is_pair = pair < D // 2
            k_words = tl.tuple(())
            for i in tl.static_range(SLICES // KEY_SLICES):
                at = ((unit * (SLICES // KEY_SLICES) + i) * _SLICE + token) * (D // 2) + pair
                k_words += (_load(base + at, is_pair, D == BLOCK_D),)
            scale_ptr = base + KEY_WORDS + VALUE_WORDS + unit * (SLICES // GROUP_SLICES) * (D // 2) + pair
            sums = tl.tuple(())
            for s in tl.static_range(SLICES):
                if s % GROUP_SLICES == 0:
                    group_ptr = scale_ptr + s // GROUP_SLICES * (D // 2)
                    k_scale = _load(group_ptr, is_pair, D == BLOCK_D)
                    k_offset = _load(group_ptr + KEY_SCALE_WORDS, is_pair, D == BLOCK_D)
                k = _numbers(_codes(k_words[s // KEY_SLICES], s % KEY_SLICES, KEY_BITS), k_scale, k_offset)
                before = scores[s] if chunk else masked_sink if s * _SLICE < _SINK else masked
                sums += (tl.dot(k, q[chunk], before),)
            scores = sums
        new_max = row_max
        for s in tl.static_range(SLICES):
            new_max = tl.maximum(new_max, tl.max(scores[s], 1, keep_dims=True) * scale_log2)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - shift)
        row_max = new_max
        row_sum *= rescale
        weights = tl.tuple(())
        for s in tl.static_range(SLICES):
            weight = tl.exp2(scores[s] * scale_log2 - shift)
            row_sum += weight
            weights += (weight.to(tl.float16),)
        new_accs = tl.tuple(())
        for g in tl.static_range(NUM_VALUE_GROUPS):
            d = g * VALUE_GROUP + channel
            at = (unit * D + d) * (_SLICE // 2) + couple
            v_words = _load(base + KEY_WORDS + at, d < D, D % VALUE_GROUP == 0)
            v_scale_ptr = base + KEY_WORDS + VALUE_WORDS + 2 * KEY_SCALE_WORDS + (g * PAGE + unit * UNIT) // 2 + couple
            acc = accs[g] * rescale
            for s in tl.static_range(SLICES):
                v_scale = tl.load(v_scale_ptr + s * _SLICE // 2)
                v_offset = tl.load(v_scale_ptr + VALUE_SCALE_WORDS + s * _SLICE // 2)
                v = _numbers(_codes(v_words, s, VALUE_BITS), v_scale, v_offset)
                acc = tl.dot(v, weights[s], acc)
            new_accs += (acc,)
        accs = new_accs

    top = tl.max(row_max, 0, keep_dims=True)
    top = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp2(row_max - top)  # [WARPS, 1, ROWS]
    total = tl.sum(tl.sum(row_sum * share, 1), 0)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)  # without keys, out is 0 and lse is -inf
    part = (sequence * (NUM_KV_HEADS * HEADS_PER_KV) + head) * num_splits + split
    for g in tl.static_range(NUM_VALUE_GROUPS):
        d = g * VALUE_GROUP + tl.arange(0, VALUE_GROUP)
        out = tl.sum(accs[g] * share, 0) * inverse[None, :]
        tl.store(
            out_ptr + part[None, :] * D + d[:, None],
            out.to(out_ptr.dtype.element_ty),
            mask=is_row[None, :] & (d < D)[:, None],
        )
    lse = (tl.max(tl.max(row_max, 1), 0) + tl.log2(total)) * LN_2
    tl.store(lse_ptr + part, tl.where(total == 0.0, float("-inf"), lse), mask=is_row)


def attend(
    q_BHD: torch.Tensor,
    pages_NKW: torch.Tensor,
    sinks_S2TKD: torch.Tensor,
    spec: ShadowSpec,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    scale: float,
    num_sms: int,
    tile: ShadowTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend, one query per sequence, to `context_lens` keys in whole pages: `(out [B, H, D], lse [H, B] fp32)`.

    `pages_NKW`, `sinks_S2TKD`: the pages of one layer, int32, and its sinks, fp16. `block_tables`: for each sequence
    the sink that holds its first tokens or -1, then its pages, int32 [B, columns]. Hot: once per layer of a draft.
    """
    batch_size, num_heads, head_dim = q_BHD.shape
    num_kv_heads = pages_NKW.shape[1]
    heads_per_kv = num_heads // num_kv_heads
    tile = tile or choose_tile(spec, kernel_target.target_of(q_BHD.device))
    rows = min(MAX_ROWS, max(8, triton.next_power_of_2(heads_per_kv)))
    num_tiles = triton.cdiv(heads_per_kv, rows)
    assert q_BHD.stride(2) == 1 and block_tables.stride(1) == 1, "the last dimension must be contiguous"
    assert pages_NKW.is_contiguous() and sinks_S2TKD.is_contiguous(), "a layer's memory must be contiguous"
    num_splits = plan_num_splits(batch_size * num_kv_heads * num_tiles, max_context_len, num_sms)
    out_BHD = torch.empty(q_BHD.shape, dtype=q_BHD.dtype, device=q_BHD.device)
    lse_BH = torch.empty((batch_size, num_heads), dtype=torch.float32, device=q_BHD.device)
    part_out, part_lse = out_BHD, lse_BH
    if num_splits > 1:
        part_out = out_BHD.new_empty((batch_size, num_heads, num_splits, head_dim), dtype=torch.float32)
        part_lse = lse_BH.new_empty((batch_size, num_heads, num_splits))
    on_grid(_attend_kernel, (num_splits, num_kv_heads * num_tiles, batch_size))(
        q_BHD,
        pages_NKW,
        sinks_S2TKD,
        part_out,
        part_lse,
        context_lens,
        block_tables,
        q_BHD.stride(0),
        q_BHD.stride(1),
        block_tables.stride(0),
        num_splits,
        scale * LOG2_E.value,
        PAGE=spec.page_size,
        NUM_KV_HEADS=num_kv_heads,
        HEADS_PER_KV=heads_per_kv,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        **_layout(spec),
        ROWS=rows,
        WARPS=tile.num_warps,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **pdl_options(q_BHD.device),
    )
    if num_splits > 1:
        merge_splits(part_out, part_lse, out_BHD, lse_BH)
    return out_BHD, lse_BH.t()


# -- quantization ------------------------------------------------------------------------------------------------


@triton.jit
def _quantize(x, inside, AXIS: tl.constexpr, SECOND_AXIS: tl.constexpr, BITS: tl.constexpr):
    """Quantize numbers that share scales along one or two axes -> codes, and the scales and offsets in fp16."""
    lowest = tl.min(tl.where(inside, x, float("inf")), AXIS, keep_dims=True)
    highest = tl.max(tl.where(inside, x, float("-inf")), AXIS, keep_dims=True)
    if SECOND_AXIS >= 0:
        lowest, highest = tl.min(lowest, SECOND_AXIS, keep_dims=True), tl.max(highest, SECOND_AXIS, keep_dims=True)
    scale = tl.minimum(tl.div_rn(highest - lowest, 2.0**BITS - 1), 65504.0 / 2**BITS).to(tl.float16)
    wide = scale.to(tl.float32)
    offset = tl.minimum(tl.maximum(lowest - wide * 2**BITS, -65504.0), 65504.0).to(tl.float16)
    inverse = tl.div_rn(tl.full(wide.shape, 1.0, tl.float32), tl.where(wide == 0.0, 1.0, wide))
    code = (x - offset.to(tl.float32)) * inverse + (0.5 - 2**BITS)
    code = tl.minimum(tl.maximum(code, 0.0), 2**BITS - 1).to(tl.int32)  # rounded, as code is not negative
    return code, scale, offset


@triton.jit(do_not_specialize_on_alignment=["moves_ptr"])  # the strides are multiples of 16, so loads are wide
def _quantize_kernel(
    k_ptr,  # [L, N, P, K, D]
    v_ptr,
    pages_ptr,  # [L, pages, K, words]
    moves_ptr,  # int32 [moves, 2]: block and page
    source_stride,  # of a layer
    page_stride,  # of a layer
    PAGE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    NUM_VALUE_GROUPS: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    KEY_SCALE_WORDS: tl.constexpr,
    VALUE_SCALE_WORDS: tl.constexpr,
):
    """Quantize 128 tokens of a block in one layer and head per program: the unit of 2-bit codes, the longest unit."""
    CHUNK: tl.constexpr = 128
    move, part = tl.program_id(0) // (PAGE // CHUNK), tl.program_id(0) % (PAGE // CHUNK)
    head, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    block, page = tl.load(moves_ptr + 2 * move).to(tl.int64), tl.load(moves_ptr + 2 * move + 1).to(tl.int64)
    source = layer * source_stride + ((block * PAGE + part * CHUNK) * NUM_KV_HEADS + head) * D
    k_ptr += source
    v_ptr += source
    pages_ptr += layer * page_stride + (page * NUM_KV_HEADS + head) * HEAD_WORDS
    GROUP_SLICES: tl.constexpr = 4
    VALUE_UNIT: tl.constexpr = 4 // VALUE_BITS
    # Tiles are loaded in memory order, and then viewed as [slices, tokens of a slice, pairs, halves]
    s = tl.arange(0, GROUP_SLICES)[:, None, None, None]
    token, pair = tl.arange(0, _SLICE), tl.arange(0, BLOCK_D // 2)
    half, row, dim = tl.arange(0, 2), tl.arange(0, _GROUP)[:, None], tl.arange(0, BLOCK_D)[None, :]
    k_dim = pair[None, None, :, None] * 2 + half[None, None, None, :]
    is_pair = pair < D // 2
    scale_ptr = (pages_ptr + KEY_WORDS + VALUE_WORDS).to(tl.pointer_type(tl.float16))
    for group in tl.static_range(CHUNK // _GROUP):
        k = tl.load(k_ptr + (group * _GROUP + row) * (NUM_KV_HEADS * D) + dim, mask=dim < D, other=0.0)
        k = k.reshape([GROUP_SLICES, _SLICE, BLOCK_D // 2, 2])
        code, scale, offset = _quantize(k.to(tl.float32), k_dim < D, 0, 1, KEY_BITS)
        at = (part * (CHUNK // _GROUP) + group) * D + k_dim
        tl.store(scale_ptr + at, scale, mask=k_dim < D)
        tl.store(scale_ptr + 2 * KEY_SCALE_WORDS + at, offset, mask=k_dim < D)
        words = tl.sum(tl.sum(code << (s * KEY_BITS + half[None, None, None, :] * 16), 3), 0)
        unit = part * (CHUNK // _GROUP) + group  # of K: 64 tokens
        at = pages_ptr + (unit * _SLICE + token[:, None]) * (D // 2) + pair[None, :]
        tl.store(at, words, mask=is_pair[None, :])

    # [slices, couples of tokens, halves, channels]
    couple, channel = tl.arange(0, _SLICE // 2), tl.arange(0, VALUE_GROUP)
    v_token = s * _SLICE + couple[None, :, None, None] * 2 + half[None, None, :, None]
    scale_ptr += 4 * KEY_SCALE_WORDS
    for g in tl.static_range(NUM_VALUE_GROUPS):
        d = g * VALUE_GROUP + channel
        v_dim = d[None, None, None, :]
        words = tl.zeros((_SLICE // 2, VALUE_GROUP), tl.int32)
        for group in tl.static_range(CHUNK // _GROUP):
            v = tl.load(
                v_ptr + (group * _GROUP + row) * (NUM_KV_HEADS * D) + d[None, :], mask=d[None, :] < D, other=0.0
            )
            v = v.reshape([GROUP_SLICES, _SLICE // 2, 2, VALUE_GROUP])
            code, scale, offset = _quantize(v.to(tl.float32), v_dim < D, 3, -1, VALUE_BITS)
            at = g * PAGE + part * CHUNK + group * _GROUP + v_token
            tl.store(scale_ptr + at, scale)
            tl.store(scale_ptr + 2 * VALUE_SCALE_WORDS + at, offset)
            place = (group % VALUE_UNIT * GROUP_SLICES + s) * VALUE_BITS + half[None, None, :, None] * 16
            words |= tl.sum(tl.sum(code << place, 2), 0)
            if (group + 1) % VALUE_UNIT == 0:
                unit = part * (CHUNK // _GROUP // VALUE_UNIT) + group // VALUE_UNIT
                at = pages_ptr + KEY_WORDS + (unit * D + d[None, :]) * (_SLICE // 2) + couple[:, None]
                tl.store(at, words, mask=d[None, :] < D)
                words = tl.zeros((_SLICE // 2, VALUE_GROUP), tl.int32)


def quantize(
    k_LNPKD: torch.Tensor, v_LNPKD: torch.Tensor, pages_LNKW: torch.Tensor, spec: ShadowSpec, moves: torch.Tensor
) -> None:
    """Fill pages from full blocks. `moves`: int32 [moves, 2], the block and the page of each move. Except for the first
    dimension, the tensors must be contiguous.
    """
    num_layers, _, page_size, num_kv_heads, head_dim = k_LNPKD.shape
    assert k_LNPKD[0].is_contiguous() and v_LNPKD[0].is_contiguous() and pages_LNKW[0].is_contiguous()
    assert k_LNPKD.stride(0) == v_LNPKD.stride(0) and page_size == spec.page_size
    on_grid(_quantize_kernel, (len(moves) * page_size // 128, num_kv_heads, num_layers))(
        k_LNPKD,
        v_LNPKD,
        pages_LNKW,
        moves,
        k_LNPKD.stride(0),
        pages_LNKW.stride(0),
        PAGE=page_size,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        **_layout(spec),
        num_warps=4,
        enable_fp_fusion=False,  # the reference does not fuse, and a code may depend on the last bit
    )
