"""TPGroup where there is no GPU: what closing does, against a stand-in for nccl, and ranks that share no memory."""

import logging
import threading

import pytest
import torch
from thread_ranks import run_ranks

from nanovllm.device import tp_group
from nanovllm.device.cuda import SharedMemory, UnsupportedDriverError
from nanovllm.device.tp_group import Inboxes, TPGroup

TIMEOUT_S = 120.0


class LikeNccl:
    """abort() begins by ending the kernels that wait, and returns when no graph is left."""

    def __init__(self) -> None:
        self.begun, self.graphs_gone = threading.Event(), threading.Event()
        self.ended = False

    def abort(self) -> None:
        self.begun.set()
        self.ended = self.graphs_gone.wait(TIMEOUT_S)


def test_close_destroys_graphs_while_the_group_aborts() -> None:
    """An abort alone never returned: nccl waits for the graphs that captured a collective."""
    nccl = LikeNccl()
    tp = TPGroup(0, 2, nccl)

    def destroy_graphs() -> None:
        assert nccl.begun.wait(TIMEOUT_S), "a graph that waits for a dead rank would not end"
        nccl.graphs_gone.set()

    tp.on_close.append(destroy_graphs)
    tp.close()
    assert nccl.ended and not tp.on_close


def test_close_tells_kernels_to_give_up_without_the_driver() -> None:
    """Regression: after an error such as an illegal address the driver refuses every call, and so the one that let
    kernels give up. Its refusal replaced the original error, and the group was not aborted.
    """
    nccl, inboxes = LikeNccl(), Inboxes.__new__(Inboxes)  # its constructor pins memory, which needs a GPU
    inboxes._pinned = torch.zeros(1, dtype=torch.int32)
    tp = TPGroup(0, 2, nccl, inboxes=inboxes, on_close=[nccl.graphs_gone.set])
    tp.close()
    assert nccl.ended and not tp.on_close and inboxes._pinned.item() == 1


class Memory:
    """In place of SharedMemory."""

    address = 2**40

    def handle(self) -> bytes:
        return bytes(range(tp_group.HANDLE_BYTES))


def open_inboxes(tp: TPGroup) -> object:
    return tp_group._open_inboxes(tp, torch.device("cpu"))


def test_no_rank_has_inboxes_if_nccl_must_not_use_the_memory_of_other_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: where a GPU opens the memory of another but cannot write to it, users set this; sums would hang."""
    caplog.set_level(logging.INFO, logger="nanovllm")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setattr(SharedMemory, "open", lambda handle: Memory())
    monkeypatch.setattr(SharedMemory, "allocate", lambda num_bytes: Memory())
    assert run_ranks(2, open_inboxes) == [None, None]
    assert len(caplog.records) == 2
    assert all("NCCL_P2P_DISABLE is set" in record.getMessage() for record in caplog.records)


def test_no_rank_has_inboxes_if_one_cannot_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(num_bytes: int) -> None:
        raise UnsupportedDriverError("cuMemAlloc_v2 failed (CUDA error 2)")

    caplog.set_level(logging.INFO, logger="nanovllm")
    first = threading.Lock()
    monkeypatch.setattr(SharedMemory, "open", lambda handle: Memory())
    monkeypatch.setattr(SharedMemory, "allocate", lambda n: Memory() if first.acquire(blocking=False) else refuse(n))
    assert run_ranks(2, open_inboxes) == [None, None]
    assert {record.getMessage().partition(": ")[2] for record in caplog.records} == {
        "cuMemAlloc_v2 failed (CUDA error 2)",
        "another rank cannot share memory",
    }
