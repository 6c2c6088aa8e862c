import ctypes
import multiprocessing
import threading
from multiprocessing.connection import Connection

import numpy as np
import pytest

from nanovllm.executor.processes import Receiver, Sender

CONTEXT = multiprocessing.get_context("spawn")


def make_channel(num_receivers: int, segment_bytes: int) -> tuple[Sender, list[Receiver], list[Connection]]:
    segment = CONTEXT.RawArray(ctypes.c_char, segment_bytes)
    pipes = [CONTEXT.Pipe() for _ in range(num_receivers)]
    sender = Sender(segment, [near for near, _ in pipes])
    return sender, [Receiver(segment, far) for _, far in pipes], [end for pipe in pipes for end in pipe]


def test_send_any_size_arrives_whole_and_in_order() -> None:
    for num_bytes in (1, 63, 64, 65, 128, 1000):
        sender, receivers, _ = make_channel(num_receivers=3, segment_bytes=64)
        messages = [(i, bytes([i]) * num_bytes) for i in range(20)]
        received: list[list[object]] = [[] for _ in receivers]

        def receive_all(receiver: Receiver, into: list[object]) -> None:
            into.extend(receiver.receive() for _ in range(20))

        threads = [threading.Thread(target=receive_all, args=pair) for pair in zip(receivers, received, strict=True)]
        for thread in threads:
            thread.start()
        for message in messages:
            sender.send(message)
        for thread in threads:
            thread.join()
        assert received == [messages] * 3


def test_send_idle_receiver_does_not_wait_until_the_segment_is_needed_again() -> None:
    sender, (receiver,), _ = make_channel(num_receivers=1, segment_bytes=4096)
    sender.send("first")  # nobody has received it yet
    second = threading.Thread(target=sender.send, args=("second",))
    second.start()
    second.join(timeout=0.05)
    assert second.is_alive(), "the sender overwrote a piece that was not read"
    assert receiver.receive() == "first"
    assert receiver.receive() == "second"
    second.join()


def test_receive_array_is_writable_and_equal() -> None:
    sender, (receiver,), _ = make_channel(num_receivers=1, segment_bytes=1 << 16)
    token_ids = np.arange(100)
    sender.send(token_ids)
    assert np.array_equal(receiver.receive(), token_ids)


def test_receive_sender_closed_raises_eof() -> None:
    sender, (receiver,), ends = make_channel(num_receivers=1, segment_bytes=64)
    sender.send("last")
    ends[0].close()
    with pytest.raises((EOFError, OSError)):
        receiver.receive()
        receiver.receive()


def test_send_receiver_closed_raises() -> None:
    sender, _, ends = make_channel(num_receivers=1, segment_bytes=64)
    ends[1].close()
    with pytest.raises((EOFError, OSError)):
        sender.send("first")
        sender.send("second")
