"""Page-locked host memory of exact size.

torch's own pinned allocator rounds up to a power of two and pins 1.6 GiB/s. Here an anonymous mapping is touched by
many threads (which is what makes its pages), then registered with CUDA in one call. A private mapping gets huge pages
where the machine has them; a shared one, Python's default, takes 4 KiB pages and six times as long (docs/log.md).
"""

import ctypes
import errno
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from nanovllm.errors import ConfigError

_TOUCH_BYTES = 64 * 2**20


class HostBuffer:
    """`num_bytes` of host memory as a uint8 tensor, page-locked for the GPU that will copy from and to it, if any.

    `close()` unregisters the buffer; if it was never called, the finalizer does. Otherwise CUDA would treat the next
    mapping at this address as already registered. Tensors made from `tensor` must not be used after that.
    """

    def __init__(self, num_bytes: int, pinned_for: torch.device | None) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise()
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., HostBuffer] | None = None
        if pinned_for is not None:
            self._touch()
            self._register(pinned_for)

    def _advise(self) -> None:
        """Ask for huge pages, and keep the memory out of forked processes."""
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the kernel has no transparent huge pages; small ones do as well
                raise
        # Not mere advice: after a fork a write would move a pinned page away from under the GPU
        self._map.madvise(mmap.MADV_DONTFORK)

    def _touch(self) -> None:
        address, num_bytes = self.tensor.data_ptr(), self.tensor.numel()

        def touch(start: int) -> None:
            ctypes.memset(address + start, 0, min(_TOUCH_BYTES, num_bytes - start))

        with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
            list(pool.map(touch, range(0, num_bytes, _TOUCH_BYTES)))

    def _register(self, device: torch.device) -> None:
        num_bytes = self.tensor.numel()
        with torch.cuda.device(device):
            error = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0))
        if error:
            raise ConfigError(
                f"cudaHostRegister could not pin {num_bytes / 2**30:.2f} GiB of host memory (CUDA error {error}); "
                "lower num_cpu_blocks or cpu_memory_gb, or raise the limit on locked memory (ulimit -l)"
            )
        self._unpin = weakref.finalize(self, _unregister, self.tensor.data_ptr(), device)
        self._unpin.atexit = False  # the process ends anyway

    def close(self) -> None:
        """Unpin. The mapping itself goes with the last tensor on it."""
        if self._unpin is not None:
            self._unpin()


def _unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        with suppress(RuntimeError):  # a GPU that has failed is not copying any more
            torch.cuda.synchronize()  # an engine that is dropped in the middle of its work has copies under way
        torch.cuda.cudart().cudaHostUnregister(address)
