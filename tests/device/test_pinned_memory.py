"""Page-locked memory, with a stand-in for CUDA's runtime."""

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

from nanovllm.device.pinned_memory import HostBuffer
from nanovllm.errors import ConfigError

GPU = torch.device("cuda", 1)


class Cudart:
    """Refuses an address that is registered already, as CUDA does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.registered: set[int] = set()
        self.current = torch.device("cuda", 0)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        self.current, before = device, self.current
        yield
        self.current = before

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert self.current == GPU, "memory is registered with the GPU that will use it"
        if address in self.registered:
            return 712
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert self.current == GPU
        self.registered.remove(address)
        self.calls.append("unregister")
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: cudart.calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "device", cudart.on_device)
    return cudart


@pytest.mark.parametrize("num_closes", [0, 1, 2])
def test_buffer_is_unpinned_once_after_all_copies_whether_closed_or_dropped(cudart: Cudart, num_closes: int) -> None:
    """Regression: dropped without close it stayed registered, and the next one at its address could not be pinned."""
    buffer = HostBuffer(3 * 4096, pinned_for=GPU)
    assert cudart.registered == {buffer.tensor.data_ptr()} and not cudart.calls
    for _ in range(num_closes):
        buffer.close()
        assert not cudart.registered
    del buffer
    assert cudart.calls == ["synchronize", "unregister"]


def test_buffer_that_is_not_pinned_does_not_touch_cuda(cudart: Cudart) -> None:
    buffer = HostBuffer(100, pinned_for=None)
    buffer.tensor[:] = 7
    buffer.close()
    assert buffer.tensor.sum() == 700 and not cudart.calls


def test_buffer_that_cannot_be_pinned_says_what_helps(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudart, "cudaHostRegister", lambda *_: 2)
    with pytest.raises(ConfigError, match=r"could not pin 0\.00 GiB .*CUDA error 2.*lower num_cpu_blocks"):
        HostBuffer(4096, pinned_for=GPU)
    assert not cudart.calls


class Madvise(mmap.mmap):
    """A kernel that refuses some advice."""

    refused: ClassVar[dict[int, int]] = {}
    taken: ClassVar[list[int]] = []

    def madvise(self, option: int, *args: int) -> None:
        if option in self.refused:
            raise OSError(self.refused[option], os.strerror(self.refused[option]))
        self.taken.append(option)


@pytest.fixture
def madvise(monkeypatch: pytest.MonkeyPatch) -> type[Madvise]:
    monkeypatch.setattr(Madvise, "refused", {})
    monkeypatch.setattr(Madvise, "taken", [])
    monkeypatch.setattr(mmap, "mmap", Madvise)
    return Madvise


def test_buffer_without_transparent_huge_pages_uses_small_ones(madvise: type[Madvise], cudart: Cudart) -> None:
    """Regression: MADV_HUGEPAGE raised OSError on such kernels, and no engine with a CPU pool started."""
    madvise.refused = {mmap.MADV_HUGEPAGE: errno.EINVAL}
    buffer = HostBuffer(3 * 4096, pinned_for=GPU)
    buffer.tensor[:] = 7
    assert buffer.tensor.sum() == 7 * 3 * 4096
    assert madvise.taken == [mmap.MADV_DONTFORK]
    del buffer


@pytest.mark.parametrize(("advice", "error"), [(mmap.MADV_HUGEPAGE, errno.ENOMEM), (mmap.MADV_DONTFORK, errno.EINVAL)])
def test_buffer_other_refusals_are_not_hidden(madvise: type[Madvise], advice: int, error: int) -> None:
    """A page that a fork can move would be copied from where it no longer is."""
    madvise.refused = {advice: error}
    with pytest.raises(OSError) as raised:
        HostBuffer(4096, pinned_for=None)
    assert raised.value.errno == error
