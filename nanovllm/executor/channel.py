"""Messages of any size from one process to several. The bytes go through shared memory, the wake-ups over pipes.

A message is pickled and cut into pieces that fit the segment. The sender writes a piece and wakes each receiver with
a header over that receiver's pipe; the receiver copies the piece out and answers with an empty message. What always
holds: the sender overwrites the segment only after every receiver has answered. It reads the answers when it next
needs the segment, so it waits only for a receiver that lags.

A process that dies closes its ends of the pipes, so the other side gets an EOFError or an OSError instead of waiting.
The segment has no name, so it is gone with the last process that maps it, however the processes end.
"""

import ctypes
import mmap
import pickle
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any, TypeAlias

Segment: TypeAlias = ctypes.Array[ctypes.c_char] | mmap.mmap

_HEADER = struct.Struct("QQ")  # bytes in this piece, bytes of the message still to come


def make_segment(context: SpawnContext, num_bytes: int) -> Segment:
    """Shared memory to hand to the other processes as an argument when they start."""
    return context.RawArray(ctypes.c_char, num_bytes)


class ChannelSender:
    def __init__(self, segment: Segment, connections: Sequence[Connection]) -> None:
        """`connections`: one end of a duplex pipe to each receiver."""
        self._segment = memoryview(segment).cast("B")
        self._connections = tuple(connections)
        self._unanswered: list[Connection] = []  # receivers that have not yet copied the last piece out

    def send(self, message: object) -> None:
        """Hot: once per step. Raises EOFError or OSError when a receiver is gone."""
        data = memoryview(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        for start in range(0, len(data), len(self._segment)):
            piece = data[start : start + len(self._segment)]
            while self._unanswered:
                self._unanswered.pop().recv_bytes()
            self._segment[: len(piece)] = piece
            header = _HEADER.pack(len(piece), len(data) - start - len(piece))
            for connection in self._connections:
                connection.send_bytes(header)
                self._unanswered.append(connection)


class ChannelReceiver:
    def __init__(self, segment: Segment, connection: Connection) -> None:
        self._segment = memoryview(segment).cast("B")
        self._connection = connection

    def receive(self) -> Any:
        """The next message, waiting for it. Raises EOFError when the sender has closed its end or died."""
        data = bytearray()
        remaining = 1
        while remaining:
            num_bytes, remaining = _HEADER.unpack(self._connection.recv_bytes())
            data += self._segment[:num_bytes]
            self._connection.send_bytes(b"")
        return pickle.loads(data)
