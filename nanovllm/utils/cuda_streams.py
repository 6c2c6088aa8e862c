"""CUDA streams that belong to one owner."""

import weakref

import torch

_owned: weakref.WeakSet[torch.cuda.Stream] = weakref.WeakSet()


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else has got from here.

    torch hands out 32 CUDA streams in turns, so that two torch.cuda.Stream objects can be the same stream. If one of
    them captures a graph, work given to the other fails; if both copy, neither overlaps the other. When 32 are in use,
    they are shared again.
    """
    for _ in range(33):
        stream = torch.cuda.Stream(device)
        if stream not in _owned:
            break
    _owned.add(stream)
    return stream
