"""A worker that rank 0 has not spawned gets the same shared memory and the other ends of the pipes."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait

import pytest

from nanovllm.executor.channel import Receiver, Sender
from nanovllm.executor.handover import Handover, take_over

TIMEOUT_S = 10.0


def test_handover_connects_each_worker_to_memory_and_pipes() -> None:
    handover = Handover(segment_bytes=64)
    with ThreadPoolExecutor(2) as pool:
        taken = [pool.submit(take_over, handover.address, rank) for rank in (1, 2)]
        connected = [handover.serve_one(TIMEOUT_S) for _ in taken]
        handover.close()
    for worker in connected:
        assert worker is not None
        os.close(worker.pidfd)
    workers = {worker.rank: worker for worker in connected if worker is not None}
    ends = [each.result() for each in taken]
    assert workers.keys() == {1, 2} and workers[1].pid == os.getpid()
    sender = Sender(handover.segment, [workers[rank].control for rank in (1, 2)])
    message = ("call", bytes(1000))  # in pieces
    sending = threading.Thread(target=sender.send, args=(message,))
    received: list[object] = []
    receivers = [Receiver(each.segment, each.control) for each in ends]
    threads = [threading.Thread(target=lambda r=r: received.append(r.receive())) for r in receivers]
    for thread in (sending, *threads):
        thread.start()
    for thread in (sending, *threads):
        thread.join(TIMEOUT_S)
    assert received == [message] * 2
    for rank, each in zip((1, 2), ends, strict=True):
        each.reports.send(rank)
        assert workers[rank].reports.recv() == rank


def test_worker_sees_the_end_of_rank_0_and_rank_0_that_of_the_worker() -> None:
    handover = Handover(segment_bytes=64)
    with ThreadPoolExecutor(1) as pool:
        taken = [pool.submit(take_over, handover.address, rank) for rank in (1, 2)]
        first, second = handover.serve_one(TIMEOUT_S), handover.serve_one(TIMEOUT_S)
    handover.close()
    assert first is not None and second is not None
    os.close(first.pidfd)
    os.close(second.pidfd)
    ends = {first.rank: taken[first.rank - 1].result(), second.rank: taken[second.rank - 1].result()}
    assert not wait([ends[first.rank].reports], 0)
    first.reports.close()
    assert wait([ends[first.rank].reports], TIMEOUT_S)
    ends[second.rank].reports.close()
    assert wait([second.reports], TIMEOUT_S)


def test_serve_one_worker_dies_before_it_is_served_returns_none() -> None:
    handover = Handover(segment_bytes=64)
    for data in (b"", b"\1"):
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(handover.address)
            worker.sendall(data)
        assert handover.serve_one(TIMEOUT_S) is None
    handover.close()


def test_serve_one_nobody_connects_returns_none_and_a_late_worker_is_refused() -> None:
    handover = Handover(segment_bytes=64)
    assert handover.serve_one(0.01) is None
    handover.close()
    with pytest.raises(ConnectionRefusedError):
        take_over(handover.address, 1)
