"""Copies of rows that do not follow each other, between pinned memory and the GPU."""

import pytest
import torch

from nanovllm.device import cuda
from nanovllm.device.devices import use_expandable_segments

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("max_pitch", [cuda.MAX_PITCH, 1], ids=["one copy", "row by row"])
@pytest.mark.parametrize("to_gpu", [False, True], ids=["to the host", "to the GPU"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_copied_and_nothing_else(
    dtype: torch.dtype, to_gpu: bool, max_pitch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "MAX_PITCH", max_pitch)
    generator = torch.Generator().manual_seed(0)
    host = torch.randn(5, 40, 3, 8, generator=generator).to(dtype).pin_memory()
    gpu = torch.randn(5, 64, 3, 8, generator=generator).to(dtype).cuda()
    dst, src = (gpu, host) if to_gpu else (host, gpu)
    expected = dst.clone()
    expected[:, 7:24] = src[:, 11:28].to(dst.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    cuda.copy_rows(stream, dst[:, 7:24], src[:, 11:28])
    stream.synchronize()
    assert torch.equal(dst, expected)


@pytest.mark.alone
@pytest.mark.parametrize("pitch", [2**28, 2**30 - 2**20, 2**30, 2**30 + 2**20, 2**31 - 2**20])
def test_rows_that_are_far_apart_are_copied(pitch: int) -> None:
    """The layers of a KV cache of 68 GiB are 1.3e9 bytes apart."""
    num_rows = min(28, torch.cuda.mem_get_info()[0] * 3 // 4 // pitch)
    cache = torch.empty(num_rows, pitch, dtype=torch.uint8, device="cuda")
    host = torch.randint(256, (num_rows, 2**19), dtype=torch.uint8).pin_memory()
    stream = torch.cuda.current_stream()
    cuda.copy_rows(stream, cache[:, 4096 : 4096 + 2**19], host)
    back = torch.empty_like(host).pin_memory()
    cuda.copy_rows(stream, back, cache[:, 4096 : 4096 + 2**19])
    stream.synchronize()
    assert torch.equal(back, host)


# Tokens per row, blocks and tokens per block of Qwen3-0.6B's layers: a decode step's tokens, short chunks, whole blocks
ROWS = [(1, 30, 256), (1, 250, 256), (32, 100, 256), (256, 30, 256), (256, 250, 256), (1, 14, 4096), (4096, 14, 4096)]


@pytest.mark.parametrize("to_gpu", [False, True], ids=["to the host", "to the GPU"])
@pytest.mark.parametrize("size", ROWS, ids=str)
def test_rows_of_a_cache_in_expandable_segments_are_copied(size: tuple[int, int, int], to_gpu: bool) -> None:
    """The driver refused rows of 512 KiB that lay in several of the pieces from which torch maps such a cache."""
    num_tokens, num_blocks, block_size = size
    use_expandable_segments()
    cache = torch.zeros(28, num_blocks * block_size, 8, 128, dtype=torch.bfloat16, device="cuda")
    rows = cache[:, (num_blocks // 2) * block_size :][:, :num_tokens]
    value = torch.randn(rows.shape, device="cuda").bfloat16()
    host = torch.zeros(rows.shape, dtype=torch.bfloat16).pin_memory()
    (host if to_gpu else rows).copy_(value)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    cuda.copy_rows(stream, *((rows, host) if to_gpu else (host, rows)))
    stream.synchronize()
    assert torch.equal(host, value.cpu()) and torch.equal(rows, value)
    rows.zero_()
    assert not cache.any(), "something else was written, too"
