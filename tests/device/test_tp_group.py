"""TPGroup where there is no GPU: what closing does, against a stand-in for nccl."""

import threading

from nanovllm.device.tp_group import TPGroup

TIMEOUT_S = 5.0


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
