"""One rank in this process, and two in two processes: calls, collectives, deaths, and what is left afterwards."""

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import is_gone, worker_pids_of
from waiting import LIMIT_S, wait_until

from nanovllm.device.tp_group import TPGroup
from nanovllm.engine.startup import rank_devices
from nanovllm.errors import EngineError, WorkerDiedError
from nanovllm.executor.base import LaunchedStep, LocalExecutor
from nanovllm.executor.processes import (
    SEGMENT_BYTES,
    STARTED,
    Job,
    MessageReceiver,
    ProcessExecutor,
    Sender,
    _worker_main,
)
from nanovllm.plan.step_plan import KVMoves, StepPlan
from nanovllm.runner.step_result import StepEnd, StepResult

PLAN = StepPlan((), KVMoves())


class EchoRunner:
    """Remembers what it was called with. Also the factory of itself: EchoRunner(tp)."""

    def __init__(self, tp: TPGroup) -> None:
        self.tp, self.device = tp, tp.device
        self.calls: list[int] = []
        self.num_closed = 0
        self.num_threads_at_start = torch.get_num_threads()
        self.last_end: StepEnd | None = None

    def remember(self, call: int) -> None:
        self.calls.append(call)

    def calls_of_all_ranks(self) -> list[list[int]]:
        return self.tp.all_gather(torch.tensor([self.calls], device=self.device).T.contiguous()).T.tolist()

    def sum_of_all_ranks(self, token_ids: np.ndarray) -> int:
        return int(self.tp.all_reduce(torch.from_numpy(token_ids).sum().to(self.device)))

    def collectives(self) -> tuple[list[float], list[list[float]], list[float]]:
        mine = torch.tensor([[self.tp.rank + 1.0]], device=self.device)
        gathered = self.tp.all_gather(mine)
        return self.tp.all_reduce(mine.clone())[0].tolist(), gathered.tolist(), self.tp.broadcast(mine)[0].tolist()

    def launch(self, plan: StepPlan) -> StepResult:
        result = StepResult(self.tp.all_gather(torch.tensor([7 + self.tp.rank])), end_before=self.last_end)
        self.last_end = result.end
        return result

    def raise_on_worker(self) -> None:
        if self.tp.rank == 1:
            raise KeyError("what the worker says")

    def raise_on_rank_0(self) -> None:
        if self.tp.rank == 0:
            time.sleep(0.2)  # the worker is waiting by then
            raise ValueError("what rank 0 says")
        self.tp.all_reduce(torch.zeros(1))

    def num_threads(self) -> list[list[int]]:
        """For each rank the value when it was made and the value now."""
        mine = torch.tensor([[self.num_threads_at_start, torch.get_num_threads()]])
        return self.tp.all_gather(mine.T.contiguous()).T.tolist()

    def pids(self) -> list[int]:
        return self.tp.all_gather(torch.tensor([os.getpid()])).tolist()

    def nap_on_worker(self, seconds: float) -> None:
        if self.tp.rank == 1:
            time.sleep(seconds)

    def exit_in_collective(self) -> None:
        if self.tp.rank == 1:
            time.sleep(0.2)  # rank 0 is waiting by then
            os._exit(3)
        self.tp.all_reduce(torch.zeros(1))

    def close(self) -> None:
        self.num_closed += 1


class Step(LaunchedStep):
    def __init__(self, is_done: Callable[[], bool]) -> None:
        self.is_done = is_done  # type: ignore[method-assign]


def failing_factory(tp: TPGroup) -> EchoRunner:
    if tp.rank == 1:
        raise torch.OutOfMemoryError("no memory on rank 1")
    tp.all_reduce(torch.zeros(1))  # building waits for the other ranks, as measuring the pool does
    return EchoRunner(tp)


def two_ranks(
    make_runner: Callable[[TPGroup], Any] = EchoRunner, device_type: str = "cpu", segment_bytes: int = SEGMENT_BYTES
) -> ProcessExecutor:
    return ProcessExecutor(make_runner, rank_devices(device_type, 2), segment_bytes)


@pytest.fixture
def seven_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(num_threads)


def test_call_reaches_every_rank_in_order_and_whole_until_a_worker_ends_inside_a_collective() -> None:
    executor = two_ranks(segment_bytes=16)  # so small that every call goes in pieces
    os.kill(worker_pids_of(executor)[0], signal.SIGINT)  # Ctrl-C reaches the whole terminal; rank 0 decides
    for call in range(200):
        executor.call(EchoRunner.remember, call)
    assert executor.call(EchoRunner.calls_of_all_ranks) == [list(range(200))] * 2
    token_ids = np.arange(20_000)  # 160 KB through 16 bytes
    assert executor.call(EchoRunner.sum_of_all_ranks, token_ids) == 2 * token_ids.sum()
    assert executor.call(EchoRunner.collectives) == ([3.0], [[1.0, 2.0]], [1.0])
    step = executor.launch(PLAN)
    executor.wait_for(step)
    assert step.token_ids() == [7, 8]
    for _ in range(2):  # every later call raises it, too
        with pytest.raises(WorkerDiedError, match="rank 1 died with exit code 3"):
            executor.call(EchoRunner.exit_in_collective)


@pytest.mark.slow
def test_wait_for_polls_until_done_and_raises_once_a_worker_is_killed() -> None:
    executor = two_ranks()
    looks = iter([False] * 100 + [True])
    executor.wait_for(Step(lambda: next(looks)))
    assert not list(looks)
    executor.check()
    os.kill(worker_pids_of(executor)[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1 died with signal SIGKILL"):
        executor.wait_for(Step(lambda: False))


def test_local_executor_has_one_rank_in_this_process_and_all_threads(seven_threads: None) -> None:
    executor = LocalExecutor(EchoRunner)  # type: ignore[arg-type]
    assert executor.call(EchoRunner.collectives) == ([1.0], [[1.0]], [1.0])
    assert executor.call(EchoRunner.pids) == [os.getpid()] and executor.call(EchoRunner.num_threads) == [[7, 7]]
    runner = executor.runner
    executor.close()
    executor.close()
    assert isinstance(runner, EchoRunner) and runner.num_closed == 1
    for call in (lambda: executor.launch(PLAN), lambda: executor.call(EchoRunner.pids)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_launched_step_tells_the_time_since_the_end_of_the_one_before() -> None:
    executor = LocalExecutor(EchoRunner)  # type: ignore[arg-type]
    before_s = time.perf_counter()
    first = executor.launch(PLAN)
    time.sleep(0.01)
    second = executor.launch(PLAN)
    after_s = time.perf_counter()
    assert first.token_ids() and first.seconds() is None
    seconds = second.token_ids() and second.seconds()
    assert seconds is not None and 0.01 <= seconds <= after_s - before_s


@pytest.mark.slow
def test_executors_beside_each_other_share_threads_and_end_apart(seven_threads: None) -> None:
    """Regression: workers had their share of the threads, rank 0 had all. Each executor divides the same threads."""
    first, second, third = two_ranks(), two_ranks(), two_ranks()
    for each in (first, second, first):
        assert each.call(EchoRunner.num_threads) == [[3, 3], [3, 3]]
        assert torch.get_num_threads() == 7
    (worker,) = worker_pids_of(first)
    with pytest.raises(ValueError, match="what rank 0 says"):  # a later call would meet the worker's collective
        first.call(EchoRunner.raise_on_rank_0)
    assert torch.get_num_threads() == 7 and is_gone(worker)
    with pytest.raises(EngineError, match="closed"):
        first.call(EchoRunner.pids)
    torch.set_num_threads(5)  # the user's choice in between stays
    assert second.call(EchoRunner.num_threads) == [[3, 3], [3, 3]]
    (worker,) = worker_pids_of(second)
    assert second.call(EchoRunner.pids) == [os.getpid(), worker]
    runner = second.runner
    second.close()
    second.close()
    assert isinstance(runner, EchoRunner) and runner.num_closed == 1
    assert torch.get_num_threads() == 5 and is_gone(worker)
    assert {child.pid for child in multiprocessing.active_children()} == set(worker_pids_of(third))
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*"))
    with pytest.raises(EngineError, match="closed"):
        second.launch(PLAN)
    assert third.call(EchoRunner.collectives)[0] == [3.0]
    third.close()


@pytest.mark.slow
def test_call_worker_raises_is_reported_with_its_traceback() -> None:
    executor = two_ranks()
    (worker,) = worker_pids_of(executor)
    executor.call(EchoRunner.raise_on_worker)  # rank 0 does not notice: its own part went well
    with pytest.raises(WorkerDiedError, match=r"rank 1 failed:\n(.*\n)*.*in raise_on_worker\n(.*\n)*.*what the worker"):
        executor.call(EchoRunner.collectives)
    with pytest.raises(WorkerDiedError, match="what the worker says"):
        executor.call(EchoRunner.collectives)
    assert is_gone(worker)


@pytest.mark.slow
def test_factory_fails_on_a_worker_raises_and_leaves_nothing() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(WorkerDiedError, match=r"rank 1 failed:\n(.*\n)*.*no memory on rank 1"):
        two_ranks(failing_factory)
    assert multiprocessing.active_children() == before


SCRIPT = """
import time
from test_executor import EchoRunner, two_ranks, worker_pids_of
if __name__ == "__main__":
    executor = two_ranks()
    print(worker_pids_of(executor)[0], flush=True)
    {then}
"""


def start_script(tmp_path: Path, then: str) -> tuple[subprocess.Popen[str], int]:
    """A process that starts two ranks; returns it and the pid of its worker."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(then=then))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, str(script)], stdout=pipe, stderr=pipe, text=True, env=env)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


FORK = multiprocessing.get_context("fork")  # spawned processes would take seconds to import torch


def start_worker(job: Job, control: Connection, reports: Connection, pids: Connection) -> None:
    args = job, 1, FORK.RawArray(ctypes.c_char, 16), control, reports
    worker = FORK.Process(target=_worker_main, args=args)
    worker.start()
    pids.send(worker.pid)
    time.sleep(2 * LIMIT_S)


def test_worker_that_is_stuck_ends_with_its_parent() -> None:
    """It waits for a store that never answers, as it may for a rank that has died."""
    _, control = FORK.Pipe()
    (reports, worker_reports), (pids, sender) = FORK.Pipe(duplex=False), FORK.Pipe(duplex=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = Job(b"", [torch.device("cpu")] * 2, port=silent.getsockname()[1], num_threads=1)
        parent = FORK.Process(target=start_worker, args=(job, control, worker_reports, sender))
        parent.start()
        worker = pids.recv()
        assert reports.recv() == (STARTED, "")
        time.sleep(0.05)
        assert not is_gone(worker)
        parent.kill()
        parent.join()
        try:
            wait_until(lambda: is_gone(worker))
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
def test_parent_killed_leaves_no_worker(tmp_path: Path) -> None:
    """The worker is busy, so it does not see the end of its control pipe."""
    process, worker = start_script(tmp_path, "executor.call(EchoRunner.nap_on_worker, 600); time.sleep(600)")
    time.sleep(0.2)
    process.kill()
    process.wait()
    wait_until(lambda: is_gone(worker))


@pytest.mark.slow
def test_close_forgotten_exits_silently_and_leaves_no_worker(tmp_path: Path) -> None:
    process, worker = start_script(tmp_path, then="pass")
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (0, "")
    wait_until(lambda: is_gone(worker))


# -- the channel -----------------------------------------------------------------------------------------------------

CONTEXT = multiprocessing.get_context("spawn")


def make_channel(num_receivers: int, segment_bytes: int) -> tuple[Sender, list[MessageReceiver], list[Connection]]:
    segment = CONTEXT.RawArray(ctypes.c_char, segment_bytes)
    pipes = [CONTEXT.Pipe() for _ in range(num_receivers)]
    sender = Sender(segment, [near for near, _ in pipes])
    return sender, [MessageReceiver(segment, far) for _, far in pipes], [end for pipe in pipes for end in pipe]


def test_send_any_size_arrives_whole_and_in_order() -> None:
    for num_bytes in (1, 63, 64, 65, 128, 1000):
        sender, receivers, _ = make_channel(num_receivers=3, segment_bytes=64)
        messages = [(i, bytes([i]) * num_bytes) for i in range(20)]
        received: list[list[object]] = [[] for _ in receivers]

        def receive_all(receiver: MessageReceiver, into: list[object]) -> None:
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


def test_closed_end_raises_on_the_other_side() -> None:
    sender, (receiver,), ends = make_channel(num_receivers=1, segment_bytes=64)
    sender.send("last")
    ends[0].close()
    with pytest.raises((EOFError, OSError)):
        receiver.receive()
        receiver.receive()
    sender, _, ends = make_channel(num_receivers=1, segment_bytes=64)
    ends[1].close()
    with pytest.raises((EOFError, OSError)):
        sender.send("first")
        sender.send("second")


# -- on GPUs ----------------------------------------------------------------------------------------------------------


class GpuRunner:
    """Runs on its rank's GPU; also the factory of itself."""

    def __init__(self, tp: TPGroup) -> None:
        assert tp.device is not None
        torch.cuda.set_device(tp.device)  # rank 0 is in this process, where cuda:0 is current anyway
        self.tp = tp
        self.x = torch.ones(4, device=tp.device)

    def replay_all_reduce(self) -> list[float]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.tp.all_reduce(self.x)
        graph.replay()
        graph.replay()
        return self.x.tolist()

    def all_reduce(self, dies: bool) -> torch.cuda.Event:
        if dies and self.tp.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.tp.all_reduce(self.x)
        event = torch.cuda.Event()
        event.record()
        return event

    def close(self) -> None:
        pass


@pytest.mark.multi_gpu
def test_collectives_two_gpus_also_inside_a_graph() -> None:
    for make_runner, method, expected in (
        (EchoRunner, EchoRunner.collectives, ([3.0], [[1.0, 2.0]], [1.0])),
        (GpuRunner, GpuRunner.replay_all_reduce, [4.0] * 4),
    ):
        executor = two_ranks(make_runner, "cuda")
        assert executor.call(method) == expected
        executor.close()


@pytest.mark.multi_gpu
def test_wait_for_two_gpus_worker_killed_raises_and_frees_the_gpu() -> None:
    executor = two_ranks(GpuRunner, "cuda")
    executor.wait_for(Step(executor.call(GpuRunner.all_reduce, False).query))
    event = executor.call(GpuRunner.all_reduce, True)
    with pytest.raises(WorkerDiedError, match="rank 1 died with signal SIGKILL"):
        executor.wait_for(Step(event.query))
    torch.cuda.synchronize()  # the collective that waited for rank 1 has ended
