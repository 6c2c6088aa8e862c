"""Capture of one CUDA graph that ends whatever happens inside it.

A stream that is left capturing fails every later call of the process, `torch.cuda.synchronize` included, and hides the
error that came first. torch.cuda.graph, which ends its captures too, collects garbage and empties the allocator's cache
before each: 1.7 s of a start with 67 graphs.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from nanovllm.device.cuda_streams import new_stream


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures in the process: cuBLAS keeps a workspace of 32 MiB for every stream it has seen."""
    return new_stream(device)


@contextmanager
def capture(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what the current stream, not the default one, is given inside. `pool`: a graph_pool_handle().

    Only this thread must avoid calls that a capture does not allow. In CUDA's default mode an allocation in another
    thread, in a step of another engine say, would fail and spoil the capture as well.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield graph
        graph.capture_end()  # may fail too: for lack of memory, or because a call inside has spoiled the capture
    except BaseException:
        abandon(graph)
        raise


def abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture in which something was raised, so that the process can go on as if it had not begun."""
    try:
        graph.capture_end()
    except RuntimeError:  # a call that is not allowed in a capture has spoiled it
        _leave_capture_mode()
    with suppress(RuntimeError):
        graph.reset()


def _leave_capture_mode() -> None:
    """torch's random generators stay in capture mode after a spoiled capture, until another one ends well."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    with suppress(RuntimeError):  # without memory for this the capture is empty, which does as well
        torch.empty(1, device="cuda").zero_()
    graph.capture_end()
    graph.reset()
