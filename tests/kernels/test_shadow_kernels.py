"""The shadow's kernels against its format in plain torch, and attention against fp64 over the same numbers."""

import itertools

import pytest
import torch
from interpreter import INTERPRETED, needs_triton, on_device

from nanovllm.capabilities.shadow.memory import dequantize_page, quantize_page
from nanovllm.plan.shadow_spec import SHADOW_BITS, SINK_TOKENS, ShadowSpec

pytestmark = needs_triton
NUM_SMS = 4 if INTERPRETED else 132
NUM_KV_HEADS, NUM_PAGES = 2, 5
HEAD_DIMS = [(64, 256), (80, 512)] if INTERPRETED else [(size, 1024) for size in (16, 64, 80, 96, 128, 160, 192, 256)]
DTYPES, NUM_HEADS = (torch.float32, torch.bfloat16, torch.float16), (4, 14, 40)
SHAPES = [(bits, *sizes) for bits in SHADOW_BITS for sizes in HEAD_DIMS]
CASES = [(*shape, *query) for shape in SHAPES for query in itertools.product(DTYPES, NUM_HEADS)]
if INTERPRETED:
    CASES = [(*shape, DTYPES[i % 3], NUM_HEADS[i % 3]) for i, shape in enumerate(SHAPES)]


def make_spec(bits: int, head_dim: int, page_size: int) -> ShadowSpec:
    return ShadowSpec(bits=bits, page_size=page_size, num_layers=2, num_kv_heads=NUM_KV_HEADS, head_dim=head_dim)


def filled_pages(spec: ShadowSpec, device: str) -> torch.Tensor:
    """Pages [L, N, K, W] of random blocks, by the reference."""
    shape = spec.page_size, NUM_KV_HEADS, spec.head_dim
    pages = [quantize_page(torch.randn(shape) * 2, torch.randn(shape), spec) for _ in range(2 * NUM_PAGES)]
    return torch.stack(pages).unflatten(0, (2, NUM_PAGES)).to(device)


@on_device
@pytest.mark.parametrize(("bits", "head_dim", "page_size"), SHAPES)
def test_quantization_is_that_of_the_reference(device: str, bits: int, head_dim: int, page_size: int) -> None:
    from nanovllm.kernels.shadow import quantize

    spec = make_spec(bits, head_dim, page_size)
    k, v = torch.randn(2, 2, NUM_PAGES, page_size, NUM_KV_HEADS, head_dim, dtype=torch.bfloat16).to(device)
    k[0, 1, :64, 0, 3] = 0.75  # a group of equal keys
    v[1, 2, 5] = 1e5  # beyond fp16
    pages = torch.zeros(2, NUM_PAGES, NUM_KV_HEADS, spec.head_words, dtype=torch.int32, device=device)
    quantize(k, v, pages, spec, torch.tensor([[1, 4], [2, 0]], dtype=torch.int32, device=device))
    assert not pages[:, 1:4].any()
    for layer in range(2):
        for block, page in ((1, 4), (2, 0)):
            expected = quantize_page(k[layer, block].cpu(), v[layer, block].cpu(), spec)
            ours, its = (dequantize_page(words, spec) for words in (pages[layer, page].cpu(), expected))
            for got, wanted in zip(ours, its, strict=True):  # a division may round a code the other way
                assert torch.isfinite(got).all() and ((got - wanted).abs() > 1e-3).float().mean() < 1e-4


@on_device
@pytest.mark.parametrize(("bits", "head_dim", "page_size", "dtype", "num_heads"), CASES)
def test_attention_is_that_over_the_numbers(
    device: str, bits: int, head_dim: int, page_size: int, dtype: torch.dtype, num_heads: int
) -> None:
    """The kernel rounds queries and numbers to fp16, so it is compared with attention over those."""
    from nanovllm.kernels.shadow import ShadowTile, attend

    spec = make_spec(bits, head_dim, page_size)
    pages = filled_pages(spec, device)
    sinks = (torch.randn(2, 2, SINK_TOKENS, NUM_KV_HEADS, head_dim) * 2).half().to(device)
    q = torch.randn(4, num_heads, head_dim).to(dtype).to(device)
    rounded = q.half() if dtype == torch.float32 else q
    tables = [[1, 3, 0, 4], [-1, 2], [0], [0, 2]]  # sinks and pages
    padded = torch.tensor([[1, 3, 0, 4], [-1, 2, 1, 1], [0] * 4, [0, 2, 1, 1]], dtype=torch.int32, device=device)
    lens = torch.tensor([(len(table) - 1) * page_size for table in tables], dtype=torch.int32, device=device)
    scale, longest = head_dim**-0.5, 3 * page_size
    # With few and many splits, and with a sink that is read in one step and in two
    for max_context_len, tile in ((longest, None), (64 * longest, ShadowTile(num_warps=2, num_stages=2))):
        out, lse = attend(q, pages[1], sinks, spec, lens, padded, max_context_len, scale, NUM_SMS, tile)
        for row, (sink, *table) in enumerate(tables):
            if not table:
                assert not out[row].any() and (lse[:, row] == -torch.inf).all()
                continue
            numbers = [dequantize_page(pages[1, page].cpu(), spec) for page in table]
            k, v = (torch.cat(parts).half().double() for parts in zip(*numbers, strict=True))
            if sink >= 0:
                k[:SINK_TOKENS], v[:SINK_TOKENS] = sinks[sink].double().cpu()
            k, v = (x.repeat_interleave(num_heads // NUM_KV_HEADS, 1) for x in (k, v))
            scores = torch.einsum("hd,nhd->hn", rounded[row].double().cpu(), k) * scale
            expected = torch.einsum("hn,nhd->hd", scores.softmax(1), v)
            # Weights are rounded to fp16, too. The result is rounded once, which the interpreter does by truncation
            rtol = torch.finfo(dtype).eps
            torch.testing.assert_close(out[row].double().cpu(), expected, rtol=rtol, atol=3e-4)
            torch.testing.assert_close(lse[:, row].double().cpu(), scores.logsumexp(1), rtol=0, atol=1e-4)
