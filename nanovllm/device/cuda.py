"""CUDA features that torch lacks: streams with one owner, pinned memory as a GPU tensor, copies of many rows, values in
memory that a stream writes or waits for, and memory that processes share.
"""

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

_STREAMS_OF_TORCH = 32  # per device
_owned: set[tuple[torch.device, int]] = set()  # device and address of the CUDA stream


def new_stream(device: torch.device, owner: object | None = None) -> torch.cuda.Stream:
    """Return a stream that no other call gets while `owner` lives. If `owner` is None, no other call ever gets it.

    torch has 32 CUDA streams per device and returns them in turn, so two torch.cuda.Stream objects can be the same
    stream. Then, if one of them captures a graph, work on the other fails; and if both copy, the copies do not overlap.
    Once all 32 are owned, they are shared.
    """
    for _ in range(_STREAMS_OF_TORCH):
        stream = torch.cuda.Stream(device)
        key = device, stream.cuda_stream
        if key not in _owned:
            _owned.add(key)
            if owner is not None:
                weakref.finalize(owner, _owned.discard, key)
            break
    return stream


class _CudaArray:
    """Pinned memory, presented to torch as an array on the GPU. address: where the GPU has the memory."""

    def __init__(self, pinned: torch.Tensor, address: int) -> None:
        self.pinned = pinned  # the tensor made from this object keeps it alive
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (pinned.nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def pinned_view(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The memory of a contiguous pinned tensor as a tensor on the GPU, for kernels that read or write a few rows of it.

    A copy of the same rows would wait: the copy engine first finishes the large copies that were enqueued on other
    streams, 0.2 ms each. Synchronize the two tensors like one tensor that two streams use.
    """
    return _view(pinned, pinned.data_ptr(), device)


def registered_view(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a `pinned_view` of memory that is registered with CUDA (pinned_memory.py). Unlike memory that CUDA has
    allocated, it has another address on the GPU on some systems, such as Windows.

    Raises UnsupportedDriverError if the GPU cannot reach the memory.
    """
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        _call_driver(
            "cuMemHostGetDevicePointer_v2",
            ctypes.byref(address),
            ctypes.c_void_p(pinned.data_ptr()),
            ctypes.c_uint(0),
        )
    return _view(pinned, address.value, device)


def _view(pinned: torch.Tensor, address: int, device: torch.device) -> torch.Tensor:
    assert pinned.is_contiguous() and pinned.is_pinned(), "the GPU can only reach contiguous pinned memory"
    view = torch.as_tensor(_CudaArray(pinned, address), device=device)
    assert view.data_ptr() == address, "torch has copied pinned memory instead of viewing it"
    return view.view(pinned.dtype).view(pinned.shape)


MAX_PITCH = 2**30  # CUDA allows less than 2^31 bytes from one row to the next
_HOST, _DEVICE = 1, 2  # CUmemorytype
_REFUSED = 1  # CUDA_ERROR_INVALID_VALUE: the call was checked, and nothing was enqueued


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
    """Enqueue dst <- src as one copy if the driver accepts it, otherwise row by row. Hot.

    Both are [R, ...] with equal shapes and dtypes, each row is contiguous, and host memory is pinned. For the host one
    call is faster than R calls. torch cannot enqueue such a copy as one call: it would make a contiguous copy first.

    The driver refuses copies of many rows whose GPU side lies in several physical allocations, and torch maps an
    expandable segment from allocations of 20 MiB. So the driver may refuse large tensors of rows far apart, like the
    layers of a KV cache; it refused 28 rows of 512 KiB. NVIDIA documents no limit. A copy of contiguous bytes may
    cross these allocations. Rows above 64 KiB gain little from this call: make one copy for each row instead.
    """
    row_bytes = dst[0].nbytes
    pitches = dst.stride(0) * dst.itemsize, src.stride(0) * src.itemsize
    if max(pitches) <= MAX_PITCH:
        copy = _Copy(_side(src, pitches[1]), _side(dst, pitches[0]), row_bytes, len(dst))
        error = _driver_copy()(ctypes.byref(copy), stream.cuda_stream)
        if not error:
            return
        if error != _REFUSED:
            raise RuntimeError(f"cuMemcpy2DAsync of {len(dst)} rows of {row_bytes} bytes failed (CUDA error {error})")
    with torch.cuda.stream(stream):
        for dst_row, src_row in zip(dst, src, strict=True):
            dst_row.copy_(src_row, non_blocking=True)


def _side(tensor: torch.Tensor, pitch: int) -> _Side:
    if tensor.is_cuda:
        return _Side(0, 0, _DEVICE, None, tensor.data_ptr(), None, pitch)
    return _Side(0, 0, _HOST, tensor.data_ptr(), 0, None, pitch)


_WAIT_UNTIL_REACHED = 0  # CU_STREAM_WAIT_VALUE_GEQ: the signed difference is 0 or more


class UnsupportedDriverError(RuntimeError):
    """The CUDA driver has no such call, or refuses it."""


@cache
def _driver() -> tuple[Any, Any]:
    """Return the driver's functions to write a value and to wait for a value."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        calls = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    except (OSError, AttributeError) as error:
        raise UnsupportedDriverError(f"the CUDA driver cannot wait for values in memory ({error})") from error
    for call in calls:
        call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return calls


def as_int32(number: int) -> int:
    """Wrap the number around to a signed 32-bit integer."""
    return (number + 2**31) % 2**32 - 2**31


def write_value(stream: torch.cuda.Stream, target: torch.Tensor, value: int) -> None:
    """Enqueue target <- value after all earlier work of the stream. `target`: int32 [1], pinned. Hot."""
    write, _ = _driver()
    _check(write(stream.cuda_stream, target.data_ptr(), value & 0xFFFFFFFF, 0))


def wait_for_value(stream: torch.cuda.Stream, source: torch.Tensor, value: int) -> None:
    """Let the stream's next work start when `source` has reached `value`. Both may wrap around. Hot."""
    _, wait = _driver()
    _check(wait(stream.cuda_stream, source.data_ptr(), value & 0xFFFFFFFF, _WAIT_UNTIL_REACHED))


def _check(code: int) -> None:
    if code:
        raise UnsupportedDriverError(f"the CUDA driver refuses to wait for values in memory (error {code})")


def _call_driver(name: str, *arguments: Any, must_succeed: bool = True) -> None:
    """Call a function of the CUDA driver API. Raises UnsupportedDriverError if there is none, and for an error."""
    try:
        error = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    except (OSError, AttributeError) as missing:
        raise UnsupportedDriverError(f"there is no CUDA driver with {name} ({missing})") from missing
    if error and must_succeed:
        raise UnsupportedDriverError(f"{name} failed (CUDA error {error})")


HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class SharedMemory:
    """Memory of a GPU that several processes use, each at a different address.

    Memory from `allocate` is freed with this object, and memory from `open` is closed. All methods raise
    UnsupportedDriverError if the driver refuses.
    """

    def __init__(self, address: int, close: str) -> None:
        self.address = address
        weakref.finalize(self, _call_driver, close, ctypes.c_uint64(address), must_succeed=False).atexit = False

    @classmethod
    def allocate(cls, num_bytes: int) -> "SharedMemory":
        """Allocate zeros on the current device, a multiple of 2 MiB, so that no other memory is shared."""
        assert num_bytes % 2**21 == 0, num_bytes
        address = ctypes.c_uint64()
        _call_driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        memory = cls(address.value, "cuMemFree_v2")
        _call_driver("cuMemsetD32_v2", address, 0, ctypes.c_size_t(num_bytes // 4))
        return memory

    @classmethod
    def open(cls, handle: bytes) -> "SharedMemory":
        """Open the memory of another process by its `handle`. The memory may be on another device."""
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        _call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_ENABLE_PEER_ACCESS))
        return cls(address.value, "cuIpcCloseMemHandle")

    def handle(self) -> bytes:
        """Return the bytes with which another process can `open` this memory."""
        handle = _Handle()
        _call_driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle.reserved)
