"""What Triton does once in every process, ahead of the first kernel."""

import os
import threading

import pytest

pytest.importorskip("triton")

from triton.runtime import cache
from triton.runtime.driver import DriverConfig

from nanovllm.kernels.triton_start import TritonStart

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def test_files_are_hashed_and_the_driver_is_loaded_in_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_in: list[threading.Thread] = []

    class Driver:
        @property
        def utils(self) -> None:
            loaded_in.append(threading.current_thread())

    monkeypatch.setattr(DriverConfig, "active", Driver())
    cache.triton_key.cache_clear()
    start = TritonStart()
    start.wait()
    assert cache.triton_key.cache_info().currsize == 1
    assert len(loaded_in) == 1 and loaded_in[0] is not threading.current_thread() and not loaded_in[0].is_alive()
    start.wait()


def test_failure_is_left_to_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: DriverConfig) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(DriverConfig, "active", property(fail))
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    TritonStart().wait()
    assert not failed
