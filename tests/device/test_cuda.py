"""Copies of rows that do not follow each other, between pinned memory and the GPU."""

import pytest
import torch

from nanovllm.device import cuda

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
