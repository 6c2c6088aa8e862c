"""Captures one CUDA graph, and ends the capture whatever happens inside it.

A stream that is left in capture mode makes every later call of the process fail, even `torch.cuda.synchronize`, and
hides the original error. torch.cuda.graph ends its captures too, but before each it collects garbage and empties the
allocator's cache, which takes 1.7 s of a start-up with 67 graphs.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from nanovllm.device.cuda_streams import new_stream


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for all captures on a device. cuBLAS keeps a 32 MiB workspace for every stream it has seen."""
    return new_stream(device)


@contextmanager
def capture(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the work that is enqueued inside on the current stream, which must not be the default stream.

    `pool` is a graph_pool_handle(). Only this thread must avoid calls that a capture does not allow. In CUDA's default
    mode, an allocation in another thread, for example in a step of another engine, would fail and also invalidate the
    capture.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield graph
        graph.capture_end()  # may fail too, if memory runs out or a call inside has invalidated the capture
    except BaseException:
        abandon(graph)
        raise


def abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture in which an exception was raised, and leave the process as if the capture had never begun."""
    try:
        graph.capture_end()
    except RuntimeError:  # a call that is not allowed in a capture has invalidated it
        _leave_capture_mode()
    with suppress(RuntimeError):
        graph.reset()


def _leave_capture_mode() -> None:
    """Make torch's random generators leave capture mode.

    After an invalidated capture they stay in it until another capture succeeds.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    with suppress(RuntimeError):  # if there is no memory for this, an empty capture will do
        torch.empty(1, device="cuda").zero_()
    graph.capture_end()
    graph.reset()
