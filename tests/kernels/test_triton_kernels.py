"""Our Triton kernels: the same tests in Triton's interpreter, on CPU, and on a GPU at real sizes.

The interpreter truncates to bf16 where a GPU rounds; but for merges it is tested in fp16.
"""

import itertools

import pytest
import torch
from interpreter import INTERPRETED, on_device
from paged_cases import assert_as_good_as_plain_torch, make_paged
from rounding import MAX_ROUNDINGS, PART_COUNTS, make_parts, rms

from nanovllm.attention.base import PartialAttention, RunningMerge, merge_parts
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.checkpoint.model_config import HEAD_DIMS
from nanovllm.device import kernel_target
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers.layernorm import add_rms_norm, norm_add_norm, rms_norm
from nanovllm.layers.linear import act_and_mul
from nanovllm.layers.rotary_embedding import KVCells, rotate_and_store
from nanovllm.layers.vocabulary import soft_cap

pytest.importorskip("triton")

from nanovllm.kernels.configs import MAX_WAVES, max_split_bytes, plan_num_prefill_splits, plan_prefill_splits

if INTERPRETED:
    DTYPES = [torch.float32, torch.float16]
    PAGED = [((2, 1), 16, 256, torch.float32), ((7, 1), 32, 256, torch.float16), ((3, 3), 16, 512, torch.float32)]
    PAGED += [((4, 2), 80, 256, torch.float16), ((2, 2), 112, 256, torch.float32), ((2, 2), 192, 256, torch.float16)]
    ROTATED = [(heads, head_dim) for heads in [(16, 8), (9, 3)] for head_dim in (32, 80, 96)]
    SIZES = [(1, 8), (3, 100)]
else:
    DTYPES = [torch.float32, torch.float16, torch.bfloat16]
    BF16, PAGED = torch.bfloat16, []
    PAGED += [(heads, 128, 1024, BF16) for heads in [(8, 8), (16, 8), (32, 8), (28, 4), (8, 1)]]
    PAGED += [((16, 8), 128, page, torch.float16) for page in (256, 4096)]
    PAGED += [((28, 4), head_dim, 256, dtype) for head_dim in (64, 128) for dtype in (BF16, torch.float32)]
    PAGED += [((6, 3), head_dim, 512, dtype) for head_dim in HEAD_DIMS for dtype in DTYPES]
    ROTATED = [((16, 8), 64), ((16, 8), 128), *(((9, 3), head_dim) for head_dim in HEAD_DIMS)]
    SIZES = [(1, 1024), (513, 4096), (77, 3584)]
# Keys and values by TMA and by pointers: what the interpreter takes, or what this GPU and an RTX 40 would take
LOADS = ["tma", "pointers"] if INTERPRETED else ["own", "8.9"]
MODES = [(True, LOADS[0]), (False, LOADS[0]), (True, LOADS[1])]  # causal, loads
PREFILLS = [(*shape, *mode) for shape in PAGED for mode in MODES]
SPLITS = [(*case, num_splits) for case in PREFILLS for num_splits in (2, 3, 32)]
DECODES = [(*shape, num_splits) for shape in PAGED for num_splits in (1, 2, 5, None)]
if INTERPRETED:  # everything for a head dim that fills its tiles and one that does not, some of it for the others
    others = [(*shape, *MODES[i % 3]) for i, shape in enumerate(PAGED) if i not in (0, 3)]
    PREFILLS = [*PREFILLS[:3], *PREFILLS[9:12], *others]
    SPLITS = [(*case, 2 + i % 2) for i, case in enumerate(PREFILLS)] + [(*PREFILLS[0], 32)]
    DECODES = [case for i, case in enumerate(DECODES) if i // 4 in (0, 3) or i % 4 == i // 4 % 2 * 2]


@pytest.fixture
def loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill kernel loads as the test's parameter says."""
    from nanovllm.kernels import prefill
    from nanovllm.kernels.configs import prefill_config

    if INTERPRETED:
        tma = request.param == "tma"
        monkeypatch.setattr(prefill, "prefill_config", lambda *args: prefill_config(*args)._replace(tma=tma))
    elif request.param != "own":
        monkeypatch.setattr(kernel_target, "target_of", lambda device: kernel_target.KNOWN_TARGETS[request.param])


@on_device
@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize(("heads", "head_dim", "page", "dtype", "causal", "loads"), PREFILLS, indirect=["loads"])
def test_attend_queries_matches_naive(device, heads, head_dim, page, dtype, causal):
    """Decodes, chunks and whole prompts in one batch, at odd lengths around the edges of tiles and blocks. In the
    last chunk all but the first token see the last key of a tile.
    """
    if INTERPRETED:
        lens = [(1, 1), (3, 258), (40, 40), (7, 300), (20, 274)]
    else:
        lens = [(1, 1), (1, page + 1), (5, page), (333, 2 * page + 77), (129, 129), (64, page - 1), (1000, 1000)]
        lens.append((20, page + 18))
    if not causal:
        lens.insert(1, (3, 0))
    case = make_paged(lens, page, heads, causal=causal, head_dim=head_dim, dtype=dtype, device=device)
    scale = head_dim**-0.5
    got = TritonBackend().attend(case.q_THD, case.k_cache, case.v_cache, case.batch, scale)
    assert_as_good_as_plain_torch(got, case, scale)


@on_device
@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize(
    ("heads", "head_dim", "page", "dtype", "causal", "loads", "num_splits"), SPLITS, indirect=["loads"]
)
def test_prefill_splits_match_naive(device, heads, head_dim, page, dtype, num_splits, causal):
    """Sequences of very different lengths, without keys, with one, and with fewer tiles of keys than splits."""
    from nanovllm.kernels.prefill import paged_prefill

    if INTERPRETED:
        lens = [(1, 1), (0, 9), (19, page + 37), (33, 33)]
    else:
        lens = [(1, 1), (0, 9), (17, 20 * page + 37), (250, 8 * page - 1), (129, 129), (64, page), (1000, 1003)]
    if not causal:
        lens[1:1] = [(3, 0), (5, 1)]
    case = make_paged(lens, page, heads, causal=causal, head_dim=head_dim, dtype=dtype, device=device)
    batch = case.batch
    got = paged_prefill(
        case.q_THD,
        case.k_cache,
        case.v_cache,
        batch.cu_seqlens_q,
        batch.context_lens,
        batch.block_tables,
        batch.max_query_len,
        head_dim**-0.5,
        causal,
        num_splits=num_splits,
    )
    assert_as_good_as_plain_torch(PartialAttention(*got), case, head_dim**-0.5)


@pytest.mark.slow
@on_device
@pytest.mark.parametrize("causal", [True, False])
def test_attend_short_chunk_with_long_history_shares_keys(device, causal):
    """The backend plans the splits. A decode stands before the chunk."""
    context_len = 5000 if INTERPRETED else 70001
    lens = [(1, 300), (20, context_len)]
    case = make_paged(lens, 256, (1, 1), causal=causal, head_dim=16, device=device)
    assert plan_prefill_splits(case.q_THD[1:], 1, 1, 20, context_len, 4) > 1
    got = TritonBackend().attend(case.q_THD, case.k_cache, case.v_cache, case.batch, 0.2)
    assert_as_good_as_plain_torch(got, case, 0.2)


@on_device
@pytest.mark.parametrize(("heads", "head_dim", "page", "dtype", "num_splits"), DECODES)
def test_attend_one_query_each_matches_naive(device, heads, head_dim, page, dtype, num_splits):
    """Lengths around a block's edge, a sequence without keys, splits without keys; None: as the backend plans."""
    from nanovllm.kernels.decode import paged_decode

    contexts = [1, 0, 300, 257] if INTERPRETED else [1, 0, 17, page - 1, page, page + 1, 3 * page + 5]
    case = make_paged(
        [(1, n) for n in contexts], page, heads, causal=True, head_dim=head_dim, dtype=dtype, device=device
    )
    if num_splits is None:
        got = TritonBackend().attend(case.q_THD, case.k_cache, case.v_cache, case.batch, head_dim**-0.5)
    else:
        paged = case.k_cache, case.v_cache, case.batch.context_lens, case.batch.block_tables
        got = PartialAttention(*paged_decode(case.q_THD, *paged, head_dim**-0.5, num_splits))
    assert got.lse_HT[:, 1].isneginf().all() and not got.out_THD[1].any()
    assert_as_good_as_plain_torch(got, case, head_dim**-0.5)


@on_device
@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize("block_n", [16, 32])
def test_decode_other_tiles_match_naive(device, block_n, head_dim):
    """The tiles of GPUs with less shared memory."""
    from nanovllm.kernels.configs import DecodeConfig
    from nanovllm.kernels.decode import paged_decode

    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    case = make_paged(
        [(1, n) for n in (1, 0, 300)], 256, (4, 2), causal=True, head_dim=head_dim, dtype=dtype, device=device
    )
    paged = case.k_cache, case.v_cache, case.batch.context_lens, case.batch.block_tables
    got = paged_decode(case.q_THD, *paged, 0.2, 3, DecodeConfig(block_n, num_warps=4, num_stages=3))
    assert_as_good_as_plain_torch(PartialAttention(*got), case, 0.2)


@on_device
@pytest.mark.usefixtures("loads")
@pytest.mark.parametrize("loads", LOADS, indirect=True)
@pytest.mark.parametrize("head_dim", [32, 80])
@pytest.mark.parametrize("query_len", [1, 5])
def test_attend_sees_no_other_head(device, query_len, head_dim):
    """Tiles are wider than a head whose dim is not a power of two; the next head's keys and values must stay out."""
    case = make_paged([(query_len, 300)], 256, (4, 2), causal=True, head_dim=head_dim, device=device)
    want = case.naive(0.2)
    for cache in (case.k_cache, case.v_cache):
        cache[:, :, 1] = torch.nan
    got = TritonBackend().attend(case.q_THD, case.k_cache, case.v_cache, case.batch, 0.2)
    torch.testing.assert_close(got.out_THD[:, :2].double(), want.out_THD[:, :2], atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(got.lse_HT[:2].double(), want.lse_HT[:2], atol=5e-6, rtol=5e-6)


@on_device
def test_attend_strided_queries(device):
    """q as a view of the qkv product."""
    case = make_paged([(5, 5), (1, 9)], 256, (4, 2), causal=True, head_dim=32, device=device)
    qkv = torch.randn(6, 8, 32, device=device)
    qkv[:, :4] = case.q_THD
    got = TritonBackend().attend(qkv[:, :4], case.k_cache, case.v_cache, case.batch, 0.2)
    assert_as_good_as_plain_torch(got, case, 0.2)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 37])
@pytest.mark.parametrize("num_parts", [2, 3])
@pytest.mark.parametrize("running", ["none", "kept", "rounded"])
def test_merge_equals_plain_merge(device, dtype, num_tokens, num_parts, running):
    """Rows where one, another or all saw no key; lse of either layout. The result lies in the first part of its dtype:
    "none": nothing has been merged yet; "kept": in fp32, in place; "rounded": the last merge.
    """
    parts = []
    for i in range(num_parts):
        part_dtype = torch.float32 if running != "none" and i == 0 else dtype
        out = torch.randn(num_tokens, 3, 24, device=device).to(part_dtype)
        lse = torch.randn(num_tokens, 3, device=device).t() if i else torch.randn(3, num_tokens, device=device)
        empty = torch.rand(3, num_tokens, device=device) < 0.4
        out[empty.t()] = 0
        parts.append(PartialAttention(out, lse.masked_fill(empty, float("-inf"))))
    result_dtype = dtype if running == "rounded" else torch.float32
    want_out, want_lse = merge_parts(parts, result_dtype)
    got = TritonBackend().merge(parts, result_dtype)
    same_dtype = [part.out_THD.data_ptr() for part in parts if part.out_THD.dtype == result_dtype]
    assert got.out_THD.data_ptr() in same_dtype[:1] or not same_dtype
    assert got.out_THD.dtype == result_dtype
    tolerance = 4 * (num_parts - 1) * torch.finfo(result_dtype).eps
    torch.testing.assert_close(got.out_THD, want_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got.lse_HT, want_lse, atol=1e-6, rtol=1e-6)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_parts", PART_COUNTS)
def test_merge_many_parts_rounds_once(device, dtype, num_parts):
    """The kernel rounded the running result to its dtype after every part. One rounding is the kernel's own here:
    the exact result merged with a part that saw no key.
    """
    backend = TritonBackend()
    parts, whole = make_parts(num_parts, dtype, num_tokens=5 if INTERPRETED else 37, device=device)
    rounded_once = backend.merge([PartialAttention(*(x.float() for x in whole)), no_key_like(parts[0])], dtype).out_THD
    merged = RunningMerge(backend.merge, num_parts)
    for part in parts:
        merged.add(part)
    got = merged.result()
    assert got.out_THD.dtype == dtype
    one_rounding = rms(rounded_once.double() - whole.out_THD)
    assert rms(got.out_THD.double() - whole.out_THD) <= MAX_ROUNDINGS * one_rounding
    torch.testing.assert_close(got.lse_HT.double(), whole.lse_HT, atol=1e-5, rtol=1e-6)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_seeing", [1, 2])
@pytest.mark.parametrize("place", range(3))
def test_merge_part_without_keys_is_the_identity_bit_for_bit(device, dtype, num_seeing, place):
    """In front of, between or behind the others."""
    backend = TritonBackend()
    seeing = make_parts(num_seeing, dtype, num_tokens=5, device=device)[0]
    place = min(place, num_seeing)
    parts = [*seeing[:place], no_key_like(seeing[0]), *seeing[place:]]
    want_out, want_lse = seeing[0]
    if num_seeing == 2:
        want_out, want_lse = backend.merge(cloned(seeing), torch.float32)
    got = backend.merge(cloned(parts), torch.float32)
    assert torch.equal(got.out_THD, want_out.float()) and torch.equal(got.lse_HT, want_lse)


def cloned(parts: list[PartialAttention]) -> list[PartialAttention]:
    return [PartialAttention(*(x.clone() for x in part)) for part in parts]


def no_key_like(part: PartialAttention) -> PartialAttention:
    return PartialAttention(torch.zeros_like(part.out_THD), torch.full_like(part.lse_HT, float("-inf")))


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), SIZES)
def test_layer_kernels_equal_plain_torch(device, dtype, num_tokens, size):
    """One rounding apart at most, since sums run in another order. Plain torch runs on the CPU."""
    from nanovllm.kernels import fused

    x, residual = (torch.randn(num_tokens, size).to(dtype) for _ in range(2))
    weight = torch.randn(size).to(dtype)
    wide = 1 + torch.randn(size)  # of norms that multiply by 1 + weight: nothing is rounded before it
    x_, residual_, weight_, wide_ = (each.to(device) for each in (x, residual, weight, wide))
    pairs = [
        (fused.rms_norm(x_, weight_, 1e-6), rms_norm(x, weight, 1e-6)),
        *zip(fused.add_rms_norm(x_, residual_, weight_, 1e-6), add_rms_norm(x, residual, weight, 1e-6), strict=True),
        *zip(fused.add_rms_norm(x_, residual_, wide_, 1e-6), add_rms_norm(x, residual, wide, 1e-6), strict=True),
        *((fused.act_and_mul(x_, each), act_and_mul(x, each)) for each in ("silu", "gelu_tanh")),
    ]
    for got, want in pairs:
        torch.testing.assert_close(got.cpu(), want, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)
    cap, eps = 7.5, torch.finfo(torch.float32).eps  # errors of its tanh, 2 / (1 + exp) - 1, are relative to the cap
    capped = soft_cap(20 * x, cap)
    torch.testing.assert_close(
        fused.softcap(20 * x_, cap).cpu(), capped, atol=4 * eps * cap, rtol=2 * torch.finfo(dtype).eps
    )


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), SIZES)
def test_norm_add_norm_equals_plain_torch(device, dtype, num_tokens, size):
    """Within the roundings of the terms, which a sum close to zero keeps."""
    from nanovllm.kernels import fused

    x, residual = (torch.randn(num_tokens, size).to(dtype) for _ in range(2))
    weight, next_weight = (1 + torch.randn(size) for _ in range(2))
    scalar = torch.full((1,), 0.7, dtype=dtype)
    eps = 2 * torch.finfo(dtype).eps
    terms = torch.maximum(residual.abs(), rms_norm(x, weight, 1e-6).abs()).float()
    for options in ({"scalar": scalar}, {"next_weight": next_weight}):  # (the sum, the sum), (its norm, the sum)
        want, total = norm_add_norm(x, residual, weight, 1e-6, **options)
        given = {"scalar": None, "next_weight": None} | {name: each.to(device) for name, each in options.items()}
        got, got_total = fused.norm_add_norm(*(each.to(device) for each in (x, residual, weight)), 1e-6, **given)
        assert ((got_total.cpu() - total).abs() <= 1e-6 + eps * terms).all()
        factors = next_weight.abs() / total.float().square().mean(1, keepdim=True).sqrt()
        bounds = eps * (terms if "scalar" in options else want.abs() + terms * factors)
        assert ((got.cpu() - want).abs() <= 1e-6 + bounds).all()


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), ROTATED)
@pytest.mark.parametrize("normed", [True, False, "in fp32"])
@pytest.mark.parametrize("many_tokens", [1, 1000])
def test_norm_rotate_store_equals_plain_torch(device, dtype, heads, head_dim, normed, many_tokens):
    """With norms (Qwen3) and without, of views of the qkv product; -1 is skipped, other cells stay as they are.

    Head dims that are not powers of two, such as 80 and 96, did not compile.
    """
    from nanovllm.kernels import fused

    num_tokens = 3 if INTERPRETED else 70
    qkv = torch.randn(num_tokens, heads[0] + 2 * heads[1], head_dim, device=device).to(dtype)
    q, k, v = qkv.split([heads[0], heads[1], heads[1]], dim=1)
    weight_dtype = torch.float32 if normed == "in fp32" else dtype
    weights = torch.randn(2, head_dim, device=device).to(weight_dtype) if normed else (None, None)
    angles = torch.randn(num_tokens, head_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slot_mapping = torch.randperm(96)[:num_tokens]
    slot_mapping[1] = -1
    caches = torch.randn(2, 3, 32, heads[1], head_dim, device=device).to(dtype)
    want_cells = KVCells(*caches.cpu(), slot_mapping)
    cpu = [x if x is None else x.cpu() for x in (q, k, v, *weights)]
    want_q = rotate_and_store(*cpu, 1e-6, cos_sin.cpu(), want_cells)
    q = fused.norm_rotate_store(q, k, v, *weights, 1e-6, cos_sin, *caches, slot_mapping.to(device), many_tokens)
    assert q.is_contiguous()
    tolerance = 4 * torch.finfo(dtype).eps
    for got, want in zip((q, caches[0]), (want_q, want_cells.k_cache_NPKD), strict=True):
        torch.testing.assert_close(got.cpu(), want, atol=tolerance, rtol=tolerance)
    assert torch.equal(caches[1].cpu(), want_cells.v_cache_NPKD)


@on_device
@pytest.mark.parametrize("head_dim", [32, 80] if INTERPRETED else [128, 256, 512])
def test_norm_rotate_store_norms_v_which_may_be_k(device, head_dim):
    """The layers of Gemma 4. K is normed by a weight and rotated, V is not."""
    from nanovllm.kernels import fused

    for has_v, many_tokens in ((True, 1), (False, 1000)):
        num_tokens, heads = (3, (6, 3)) if INTERPRETED else (70, (16, 2))
        qkv = torch.randn(num_tokens, heads[0] + (1 + has_v) * heads[1], head_dim, device=device).to(DTYPES[-1])
        q, k, *v = qkv.split([heads[0], heads[1], *[heads[1]] * has_v], dim=1)
        qkv, weights = (q, k, v[0] if has_v else k), 1 + torch.randn(2, head_dim, device=device)
        angles = torch.randn(num_tokens, head_dim // 2, device=device)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        slot_mapping = torch.randperm(96)[:num_tokens]
        slot_mapping[1] = -1
        caches = torch.randn(2, 3, 32, heads[1], head_dim, device=device).to(q.dtype)
        want = KVCells(*caches.cpu(), slot_mapping)
        want_q = rotate_and_store(*(x.cpu() for x in (*qkv, *weights)), 1e-6, cos_sin.cpu(), want, norms_v=True)
        where = slot_mapping.to(device)
        got_q = fused.norm_rotate_store(*qkv, *weights, 1e-6, cos_sin, *caches, where, many_tokens, norms_v=True)
        for got, expected in zip((got_q, *caches), (want_q, want.k_cache_NPKD, want.v_cache_NPKD), strict=True):
            tolerance = 4 * torch.finfo(q.dtype).eps
            torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)


@on_device
@pytest.mark.parametrize("head_dim", [pytest.param(80, marks=pytest.mark.slow)] if INTERPRETED else [80, 128])
def test_every_kernel_stays_inside_its_memory(device, head_dim):
    """Cases for compute-sanitizer (benchmarks/targets.py): odd sizes, and beside ours only torch's elementwise kernels.

    What is computed is compared elsewhere: a reference would call cuBLAS, in whose kernels racecheck sees hazards.
    """
    from nanovllm.kernels import fused, sampler, small_linear

    dtype, page = (torch.float16, 256) if INTERPRETED else (torch.bfloat16, 512)
    heads = (4, 2) if INTERPRETED else (28, 4)
    chunks = [(1, 1), (3, page + 1), (9, 9)] if INTERPRETED else [(1, page + 1), (333, 2 * page + 77), (129, 129)]
    few = [(3, page + 2), (16, 16), (1, 7)]
    backend, results = TritonBackend(), []
    for lens in (
        chunks,
        [(n, context_len) for n, context_len in [(3, 0), *chunks]],
        [(1, 0), (1, 1), (1, page + 5)],
        few,
    ):
        causal = lens[0][1] > 0
        case = make_paged(lens, page, heads, causal=causal, head_dim=head_dim, dtype=dtype, device=device)
        part = backend.attend(case.q_THD, case.k_cache, case.v_cache, case.batch, head_dim**-0.5)
        others = [PartialAttention(torch.randn_like(part.out_THD), torch.randn_like(part.lse_HT)) for _ in range(3)]
        running = backend.merge([part, *others[:2]], torch.float32)
        results += backend.merge([running, others[2]], dtype)

    def new(*shape):
        return torch.randn(shape, device=device).to(dtype)

    num_tokens, size = (3, 104) if INTERPRETED else (77, 3584)
    x, residual, weight = new(num_tokens, size), new(num_tokens, size), new(size)
    results += [fused.rms_norm(x, weight, 1e-6), *fused.add_rms_norm(x, residual, weight, 1e-6)]
    results += [fused.act_and_mul(x)]
    qkv = new(num_tokens, heads[0] + 2 * heads[1], head_dim).split([heads[0], heads[1], heads[1]], dim=1)
    caches, slot_mapping = new(2, 1, page, heads[1], head_dim), torch.randperm(page, device=device)[:num_tokens]
    slot_mapping[1] = -1
    cos_sin = torch.randn(num_tokens, head_dim, device=device)
    for many_tokens in (1, 1000):
        cells = *caches, slot_mapping
        results += [fused.norm_rotate_store(*qkv, *new(2, head_dim), 1e-6, cos_sin, *cells, many_tokens), caches]
    for num_rows in (1, 3):
        results += [small_linear.small_linear(x[:num_rows], new(57, size), new(57))]
        results += [small_linear.small_gate_up(x[:num_rows], new(114, size), None)]
    logits, fraction = new(num_tokens, 5001), torch.rand(num_tokens, device=device)
    for top_k in (torch.zeros_like(slot_mapping), 3 + slot_mapping):  # the latter more and fewer than there are groups
        filters = top_k, 1 - fraction / 2, fraction / 20
        tokens = sampler.sample_tokens(logits, SamplingTensors(fraction, *filters, slot_mapping, slot_mapping))
        assert ((tokens >= 0) & (tokens < 5001)).all()
    assert all(result.isfinite().all() for result in results)


def test_plan_num_splits_fills_the_gpu():
    from nanovllm.kernels.configs import plan_num_splits

    assert plan_num_splits(8, 40960, 132) * 8 in range(240, 265)  # one sequence: one full wave
    assert plan_num_splits(64, 40960, 132) * 64 in range(240, 265)
    assert plan_num_splits(256 * 8, 1024, 132) == 1  # many short ones: splitting only costs
    assert plan_num_splits(8, 1, 132) == 1
    assert plan_num_splits(320, 40960, 132) > 1  # 1.2 waves whole: the second would be nearly empty


def test_plan_num_prefill_splits_stays_within_its_waves():
    sizes = (1, 16, 64, 300, 5000), (0, 1, 300, 4096, 40960, 131072), (264, 132, 24)
    for num_programs, context_len, programs_per_wave in itertools.product(*sizes):
        num_splits = plan_num_prefill_splits(num_programs, context_len, programs_per_wave, 32)
        assert 1 <= num_splits <= 32
        assert num_splits == 1 or num_programs * num_splits <= MAX_WAVES * programs_per_wave
        assert num_splits <= max(1, context_len // 64)


def test_plan_num_prefill_splits_fills_the_gpu():
    assert plan_num_prefill_splits(64, 65536, 264, 32) * 64 in range(240, 265)  # 250 queries of 16 heads: one full wave
    assert plan_num_prefill_splits(16, 65536, 264, 32) * 16 in range(240, 265)
    assert plan_num_prefill_splits(256, 102400, 264, 32) == 1  # nearly full without splits
    assert plan_num_prefill_splits(300, 102400, 264, 32) > 1  # the second wave would be nearly empty
    assert plan_num_prefill_splits(128, 512, 264, 32) == 1  # a merge costs more
    assert plan_num_prefill_splits(4096, 102400, 132, 32) == 1


def test_plan_prefill_splits_bounds_the_memory_of_the_parts(monkeypatch):
    """Whatever the lengths of the sequences in a batch."""
    monkeypatch.setattr(kernel_target, "target_of", lambda device: kernel_target.KNOWN_TARGETS["9.0"])
    for query_lens in ([17], [64], [250], [1000], [2048], [17] * 9, [1500, 20, 20], [65, 65]):
        for (num_heads, num_kv_heads), context_len in itertools.product(
            ((1, 1), (8, 8), (16, 8), (28, 4), (32, 4)), (3000, 20000, 100_000)
        ):
            q_THD = torch.empty(sum(query_lens), num_heads, 128, dtype=torch.bfloat16, device="meta")
            lens = len(query_lens), max(query_lens), context_len
            num_splits = plan_prefill_splits(q_THD, num_kv_heads, *lens, 132)
            part_bytes = num_splits * q_THD[:, :, 0].numel() * 129 * 4
            assert num_splits == 1 or part_bytes <= max_split_bytes(q_THD, 132) < 40 * 2**20
    long = torch.empty(2049, 1, 128, dtype=torch.bfloat16, device="meta")
    assert plan_prefill_splits(long, 1, 1, 2049, 100_000, 132) == 1
