"""One asynchronous copy of many rows, which need not follow each other in memory. torch has no call for it: it would
make a contiguous copy first.
"""

import ctypes
from functools import cache
from typing import Any

import torch

MAX_PITCH = 2**31 - 1  # bytes from one row to the next that CUDA allows (CU_DEVICE_ATTRIBUTE_MAX_PITCH)
_HOST, _DEVICE = 1, 2  # CUmemorytype


class _Side(ctypes.Structure):
    """The source or the target in CUDA_MEMCPY2D."""

    _fields_ = [
        ("x_bytes", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("memory_type", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    ]


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D of the CUDA driver API."""

    _fields_ = [("src", _Side), ("dst", _Side), ("row_bytes", ctypes.c_size_t), ("num_rows", ctypes.c_size_t)]


@cache
def _driver_copy() -> Any:
    call = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    call.argtypes = [ctypes.POINTER(_Copy), ctypes.c_void_p]
    return call


def copy_rows(stream: torch.cuda.Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
    """Enqueue dst <- src. Both are [R, ...] with equal shapes and dtypes, each row is contiguous, and host memory is
    pinned. Rows that are further apart than MAX_PITCH are copied one by one. Hot.
    """
    row_bytes = dst[0].nbytes
    pitches = dst.stride(0) * dst.itemsize, src.stride(0) * src.itemsize
    if max(pitches) > MAX_PITCH:
        with torch.cuda.stream(stream):
            for dst_row, src_row in zip(dst, src, strict=True):
                dst_row.copy_(src_row, non_blocking=True)
        return
    copy = _Copy(_side(src, pitches[1]), _side(dst, pitches[0]), row_bytes, len(dst))
    error = _driver_copy()(ctypes.byref(copy), stream.cuda_stream)
    if error:
        raise RuntimeError(f"cuMemcpy2DAsync of {len(dst)} rows of {row_bytes} bytes failed (CUDA error {error})")


def _side(tensor: torch.Tensor, pitch: int) -> _Side:
    if tensor.is_cuda:
        return _Side(0, 0, _DEVICE, None, tensor.data_ptr(), None, pitch)
    return _Side(0, 0, _HOST, tensor.data_ptr(), 0, None, pitch)
