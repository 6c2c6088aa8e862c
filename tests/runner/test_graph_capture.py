"""A capture ends whatever happens in it; CUDA's part is played by a fake, test_gpu_memory.py has the real one."""

from typing import Any, ClassVar

import pytest
import torch

from nanovllm.runner import cuda_graphs


class FakeGraph:
    """As torch.cuda.CUDAGraph: one capture at a time in the process, and a spoiled one fails when it is ended."""

    is_capturing = False
    generators_capture = False  # torch's random generators, until a capture ends well
    modes: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.end_errors: list[Exception] = []

    def capture_begin(self, pool: Any, capture_error_mode: str = "global") -> None:
        assert not FakeGraph.is_capturing
        FakeGraph.modes.append(capture_error_mode)
        FakeGraph.is_capturing = FakeGraph.generators_capture = True

    def capture_end(self) -> None:
        if not FakeGraph.is_capturing:
            raise RuntimeError("the stream is not capturing")
        FakeGraph.is_capturing = False
        if self.end_errors:
            raise self.end_errors.pop()
        FakeGraph.generators_capture = False

    def reset(self) -> None:
        pass


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *args, **options: torch.zeros(1))
    FakeGraph.is_capturing = FakeGraph.generators_capture = False
    FakeGraph.modes = []


def test_capture_whose_end_fails_leaves_capture_mode_and_shows_its_own_error() -> None:
    """Regression: an error of capture_end itself left the random generators in capture mode for ever."""
    with pytest.raises(RuntimeError, match="spoiled"), cuda_graphs.capture(None) as graph:
        graph.end_errors.append(RuntimeError("spoiled"))  # type: ignore[attr-defined]
    assert not FakeGraph.is_capturing and not FakeGraph.generators_capture


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_capture_error_inside_ends_the_capture_and_is_shown(is_spoiled: bool) -> None:
    with pytest.raises(ValueError, match="mine"), cuda_graphs.capture(None) as graph:
        if is_spoiled:
            graph.end_errors.append(RuntimeError("spoiled"))  # type: ignore[attr-defined]
        raise ValueError("mine")
    assert not FakeGraph.is_capturing and not FakeGraph.generators_capture


def test_capture_binds_this_thread_alone() -> None:
    """Regression: while one engine captured its graphs, an allocation in another engine's step failed and closed it."""
    with cuda_graphs.capture(None):
        pass
    assert FakeGraph.modes == ["thread_local"]
