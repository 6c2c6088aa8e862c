"""Kernels that are only compiled: nothing runs, and nothing is left to compile afterwards."""

import os

import pytest
import torch

triton = pytest.importorskip("triton")


@pytest.mark.gpu
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_compile_only_compiles_and_loads_without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.kernels import fused as kernels
    from nanovllm.kernels.launch import compile_only

    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda src, **_: compiled.append(src.name))
    weight = torch.rand(24, device="cuda")
    x = torch.rand(5, 24, device="cuda")
    with compile_only():
        for _ in range(3):
            kernels.rms_norm(x, weight, 1e-6)
        kernels.silu_and_mul(x)
    assert sorted(compiled) == ["_rms_norm_kernel", "_silu_and_mul_kernel"]
    expected = x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() * weight
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), expected)
    torch.testing.assert_close(kernels.silu_and_mul(x), torch.nn.functional.silu(x[:, :12]) * x[:, 12:])
    assert len(compiled) == 2
