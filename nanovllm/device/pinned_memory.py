"""Page-locked host memory of exactly the requested size.

torch's own pinned allocator rounds sizes up to a power of two and pins 1.6 GiB/s. Here many threads touch an anonymous
mapping, so that the OS kernel makes its pages in parallel, and then one call registers the whole mapping with CUDA. The
mapping is private, because private mappings get huge pages where the machine has them. A shared mapping, Python's
default, gets pages of 4 KiB and takes six times as long (docs/log/2026-11-21.md).
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
    """`num_bytes` of host memory as a uint8 tensor. `pinned_for`: the GPU that copies from and to the memory, or None
    if the memory is not pinned.

    `close()` unregisters the memory from CUDA. If `close()` is never called, a finalizer unregisters the memory,
    because CUDA would otherwise treat the next mapping at this address as already registered. After `close()`, `tensor`
    and tensors made from it must not be used.
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
        """Ask for huge pages, and exclude the memory from forked processes."""
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the kernel has no transparent huge pages; small pages also work
                raise
        # Correctness depends on this call: after a fork, a write would move the data to a new page (copy-on-write),
        # while the GPU would go on using the old page.
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
                "lower num_cpu_blocks or cpu_memory_gb, raise num_gpu_expert_layers, use embedding_on_cpu=False, "
                "or raise the limit on locked memory (ulimit -l)"
            )
        self._unpin = weakref.finalize(self, _unregister, self.tensor.data_ptr(), device)
        self._unpin.atexit = False  # when the process ends, its memory is unpinned anyway

    def close(self) -> None:
        """Unpin the memory. The mapping itself is freed with the last tensor that uses it."""
        if self._unpin is not None:
            self._unpin()


def _unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        with suppress(RuntimeError):  # a failed GPU no longer copies anything
            torch.cuda.synchronize()  # an engine that is dropped during a step may still be copying
        torch.cuda.cudart().cudaHostUnregister(address)
