"""CUDA streams that belong to one owner."""

import weakref

import torch

_STREAMS_OF_TORCH = 32  # per device
_owned: set[tuple[torch.device, int]] = set()  # device and address of the CUDA stream


def new_stream(device: torch.device, owner: object | None = None) -> torch.cuda.Stream:
    """A stream that nobody else gets from here while `owner` lives; None: for as long as the process runs.

    torch hands out 32 CUDA streams in turns, so that two torch.cuda.Stream objects can be the same stream. If one of
    them captures a graph, work given to the other fails; if both copy, neither overlaps the other. When all 32 are
    owned, they are shared.
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
