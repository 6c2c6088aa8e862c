"""Values in pinned memory that a CUDA stream writes, or waits for. torch has no call for either."""

import ctypes
from functools import cache
from typing import Any

import torch

_WAIT_UNTIL_REACHED = 0  # CU_STREAM_WAIT_VALUE_GEQ: the signed difference is 0 or more


class UnsupportedDriverError(RuntimeError):
    """The CUDA driver has no such call, or refuses it."""


@cache
def _driver() -> tuple[Any, Any]:
    """The driver's calls to write a value and to wait for one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        calls = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    except (OSError, AttributeError) as error:
        raise UnsupportedDriverError(f"the CUDA driver cannot wait for values in memory ({error})") from error
    for call in calls:
        call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return calls


def as_int32(number: int) -> int:
    """The number, wrapped around to 32 bits with a sign."""
    return (number + 2**31) % 2**32 - 2**31


def write_value(stream: torch.cuda.Stream, target: torch.Tensor, value: int) -> None:
    """Enqueue target <- value, after all that the stream was given. `target`: int32 [1], pinned. Hot."""
    write, _ = _driver()
    _check(write(stream.cuda_stream, target.data_ptr(), value & 0xFFFFFFFF, 0))


def wait_for_value(stream: torch.cuda.Stream, source: torch.Tensor, value: int) -> None:
    """What the stream is given next starts when `source` has reached `value`. The two may wrap around. Hot."""
    _, wait = _driver()
    _check(wait(stream.cuda_stream, source.data_ptr(), value & 0xFFFFFFFF, _WAIT_UNTIL_REACHED))


def _check(code: int) -> None:
    if code:
        raise UnsupportedDriverError(f"the CUDA driver refuses to wait for values in memory (error {code})")
