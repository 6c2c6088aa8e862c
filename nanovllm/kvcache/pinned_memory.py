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

import torch

_TOUCH_BYTES = 64 * 2**20


class HostBuffer:
    """`num_bytes` of host memory as a uint8 tensor; page-locked when a CUDA device will copy from or to it.

    `close()` unregisters it, and so does its end where nobody called that: CUDA would take the next mapping at this
    address for registered. Tensors made from `tensor` must not be used after that.
    """

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise()
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._unpin: weakref.finalize[..., HostBuffer] | None = None
        if pinned:
            self._touch()
            self._register()

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

    def _register(self) -> None:
        num_bytes = self.tensor.numel()
        error = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0))
        if error:
            raise RuntimeError(
                f"cudaHostRegister could not pin {num_bytes / 2**30:.2f} GiB of host memory (CUDA error {error}); "
                "lower num_cpu_blocks or cpu_memory_gb, or raise the limit on locked memory (ulimit -l)"
            )
        self._unpin = weakref.finalize(self, _unregister, self.tensor.data_ptr())
        self._unpin.atexit = False  # the process ends anyway

    def close(self) -> None:
        """Unpin. The mapping itself goes with the last tensor on it."""
        if self._unpin is not None:
            self._unpin()


def _unregister(address: int) -> None:
    torch.cuda.synchronize()  # of an engine dropped in the middle of its work copies are under way
    torch.cuda.cudart().cudaHostUnregister(address)
