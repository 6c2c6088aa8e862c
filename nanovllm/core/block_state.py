"""BlockState: where a KV block is, and what the last step did with it. For display only."""

from enum import IntEnum


class BlockState(IntEnum):
    """Each block is in one state. Where two would fit, the later one counts. So a block is STREAMED if a step streams
    one part of it and leaves the other to the CPU.
    """

    FREE = 0  # holds nothing, or nothing that a request could use
    CACHED = 1  # no request owns it, but a new prompt can match its tokens; with offload, it is in CPU memory only
    WAITING = 2  # a request owns it; it is in CPU memory only, and the last step did not read it
    RESIDENT = 3  # on the GPU; with offload, some request owns it or a new prompt can match it
    CPU_ATTENDED = 4  # the CPU attended to it in the last step, where it lies
    STREAMED = 5  # copied to the GPU for the last step, layer by layer
    WRITTEN = 6  # the last step wrote to it, or the next step will
