"""Kernels that are only compiled: nothing runs, nothing is left to compile afterwards, and each is launched right."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")


@pytest.mark.gpu
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_compile_only_compiles_and_loads_without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.kernels import fused
    from nanovllm.kernels.launch import compile_only

    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda src, **_: compiled.append(src.name))
    weight = torch.rand(24, device="cuda")
    x = torch.rand(5, 24, device="cuda")
    with compile_only():
        for _ in range(3):
            fused.rms_norm(x, weight, 1e-6)
        fused.act_and_mul(x)
    assert sorted(compiled) == ["_act_and_mul_kernel", "_rms_norm_kernel"]
    expected = x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() * weight
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-6), expected)
    torch.testing.assert_close(fused.act_and_mul(x), torch.nn.functional.silu(x[:, :12]) * x[:, 12:])
    assert len(compiled) == 2


def test_kernels_that_are_loaded_at_the_same_time_get_their_own_launchers() -> None:
    """Regression: a start failed now and then, because a kernel was launched by another one's C module."""
    from nanovllm.kernels.launch import _CompilingThreads

    shared: dict[str, int] = {}  # as Triton's modules share the entry of their name in sys.modules

    class Kernel:
        def __init__(self, number: int) -> None:
            self.number = number

        @property
        def run(self) -> None:
            shared["__triton_launcher"] = self.number
            time.sleep(1e-3)
            self.launcher = shared["__triton_launcher"]

    with ThreadPoolExecutor(8) as threads:
        makers = [partial(Kernel, number) for number in range(40)]
        kernels = list(threads.map(_CompilingThreads._compile_and_load, makers))
    assert [kernel.launcher for kernel in kernels] == list(range(40))


@pytest.mark.slow
def test_threads_can_parse_kernels_at_once() -> None:
    """Regression: with Python 3.11.7, compiling in threads failed now and then. Its parser allocates objects, which can
    start the garbage collector, whose callbacks give other threads a turn in the middle of it.
    """
    from nanovllm.kernels import prefill

    def give_others_a_turn(*_: object) -> None:
        time.sleep(0)

    kernel: Any = triton.JITFunction(prefill._prefill_kernel.fn)
    threshold = gc.get_threshold()
    gc.callbacks.append(give_others_a_turn)
    gc.set_threshold(300)
    try:
        with ThreadPoolExecutor(8) as threads:
            trees = list(threads.map(lambda _: kernel.parse(), range(1000)))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(give_others_a_turn)
    assert len({len(tree.body[0].body) for tree in trees}) == 1
