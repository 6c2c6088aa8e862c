"""CUDA streams that have one owner each."""

import weakref

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
