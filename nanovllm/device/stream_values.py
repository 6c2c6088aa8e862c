"""Values in pinned memory that a CUDA stream writes, or waits for. torch has no call for either."""

import ctypes
from functools import cache

import torch

_WAIT_UNTIL_REACHED = 0  # CU_STREAM_WAIT_VALUE_GEQ: the signed difference is 0 or more


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for function in (driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2):
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return driver


def as_int32(number: int) -> int:
    """The number, wrapped around to 32 bits with a sign."""
    return (number + 2**31) % 2**32 - 2**31


def write_value(stream: torch.cuda.Stream, target: torch.Tensor, value: int) -> None:
    """Enqueue target <- value, after all that the stream was given. `target`: int32 [1], pinned. Hot."""
    _check(_driver().cuStreamWriteValue32_v2(stream.cuda_stream, target.data_ptr(), value & 0xFFFFFFFF, 0))


def wait_for_value(stream: torch.cuda.Stream, source: torch.Tensor, value: int) -> None:
    """What the stream is given next starts when `source` has reached `value`. The two may wrap around. Hot."""
    code = _driver().cuStreamWaitValue32_v2(
        stream.cuda_stream, source.data_ptr(), value & 0xFFFFFFFF, _WAIT_UNTIL_REACHED
    )
    _check(code)


def _check(code: int) -> None:
    if code:
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(message))
        raise RuntimeError(f"CUDA error {code}: {(message.value or b'unknown').decode()}")
