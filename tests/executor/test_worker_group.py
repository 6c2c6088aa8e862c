import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_backends import RankBackend, is_gone

from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import EngineError, WorkerDiedError
from nanovllm.executor.local import LocalExecutor
from nanovllm.executor.worker_group import WorkerGroup

NOTICED_WITHIN_S = 5.0


class EchoRunner:
    """Remembers what it was called with. Also the factory of itself: EchoRunner(tp)."""

    def __init__(self, tp: TPGroup) -> None:
        self.tp, self.device = tp, tp.device
        self.calls: list[int] = []
        self.num_threads_at_start = torch.get_num_threads()

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

    def die_in_collective(self) -> None:
        if self.tp.rank == 1:
            time.sleep(0.2)  # rank 0 is waiting by then
            os.kill(os.getpid(), signal.SIGKILL)
        self.tp.all_reduce(torch.zeros(1))


def failing_factory(tp: TPGroup) -> EchoRunner:
    if tp.rank == 1:
        raise torch.OutOfMemoryError("no memory on rank 1")
    tp.all_reduce(torch.zeros(1))  # building waits for the other ranks, as measuring the pool does
    return EchoRunner(tp)


def wait_until(condition: Callable[[], bool], timeout_s: float = NOTICED_WITHIN_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def group(backend: RankBackend) -> Iterator[WorkerGroup[EchoRunner]]:
    """Two ranks and a segment so small that every call goes in pieces."""
    group = WorkerGroup(EchoRunner, 2, "cpu", backend.make_workers(), segment_bytes=16)
    yield group
    group.close()


def test_call_many_calls_reach_every_rank_in_order(group: WorkerGroup[EchoRunner]) -> None:
    for call in range(200):
        group.call(EchoRunner.remember, call)
    assert group.call(EchoRunner.calls_of_all_ranks) == [list(range(200))] * 2


def test_call_message_larger_than_the_segment_arrives_whole(group: WorkerGroup[EchoRunner]) -> None:
    token_ids = np.arange(20_000)  # 160 KB through 16 bytes; 8 MB through 1 MiB is far less work
    assert group.call(EchoRunner.sum_of_all_ranks, token_ids) == 2 * token_ids.sum()


def test_collectives_two_ranks(group: WorkerGroup[EchoRunner]) -> None:
    assert group.call(EchoRunner.collectives) == ([3.0], [[1.0, 2.0]], [1.0])


def test_wait_for_polls_until_done(group: WorkerGroup[EchoRunner]) -> None:
    deadline = time.perf_counter() + 0.2
    group.wait_for(lambda: time.perf_counter() > deadline)
    assert deadline < time.perf_counter() < deadline + NOTICED_WITHIN_S
    group.check()


def test_local_executor_has_one_rank_in_this_process_and_all_threads(seven_threads: None) -> None:
    runner = LocalExecutor(EchoRunner).runner  # type: ignore[arg-type]
    assert isinstance(runner, EchoRunner)
    assert runner.collectives() == ([1.0], [[1.0]], [1.0])
    assert runner.pids() == [os.getpid()] and runner.num_threads() == [[7, 7]]


def test_close_beside_another_group_leaves_nothing_of_its_own(
    group: WorkerGroup[EchoRunner], backend: RankBackend
) -> None:
    other = WorkerGroup(EchoRunner, 2, "cpu", backend.make_workers())
    rank_0, worker = other.call(EchoRunner.pids)
    assert rank_0 == os.getpid() == group.call(EchoRunner.pids)[0] and worker != group.call(EchoRunner.pids)[1]
    other.close()
    other.close()
    assert is_gone(worker) and worker not in backend.worker_pids()
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*"))
    with pytest.raises(EngineError, match="closed"):
        other.call(EchoRunner.pids)
    assert group.call(EchoRunner.collectives)[0] == [3.0]


@pytest.fixture
def seven_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(7)
    yield
    torch.set_num_threads(num_threads)


def test_call_every_rank_has_its_share_of_the_threads_and_the_process_has_all_between(
    seven_threads: None, backend: RankBackend
) -> None:
    """Regression: workers had their share, rank 0 had all threads. A second group divides the same threads again."""
    first, second = (WorkerGroup(EchoRunner, 2, "cpu", backend.make_workers()) for _ in range(2))
    for group in (first, second, first):
        assert group.call(EchoRunner.num_threads) == [[3, 3], [3, 3]]
        assert torch.get_num_threads() == 7
    with pytest.raises(ValueError, match="what rank 0 says"):
        first.call(EchoRunner.raise_on_rank_0)
    assert torch.get_num_threads() == 7
    torch.set_num_threads(5)  # the user's choice in between stays
    assert second.call(EchoRunner.num_threads) == [[3, 3], [3, 3]]
    first.close()
    second.close()
    assert torch.get_num_threads() == 5


def test_call_worker_raises_is_reported_with_its_traceback(backend: RankBackend) -> None:
    group = WorkerGroup(EchoRunner, 2, "cpu", backend.make_workers())
    worker = group.call(EchoRunner.pids)[1]
    group.call(EchoRunner.raise_on_worker)  # rank 0 does not notice: its own part went well
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"rank 1 failed:\n(.*\n)*.*in raise_on_worker\n(.*\n)*.*what the worker"):
        group.call(EchoRunner.collectives)
    assert time.monotonic() - start < NOTICED_WITHIN_S
    with pytest.raises(WorkerDiedError, match="what the worker says"):
        group.call(EchoRunner.collectives)
    assert is_gone(worker)


def test_call_rank_0_raises_ends_the_group(backend: RankBackend) -> None:
    """The worker waits in a collective that rank 0 never entered: going on would pair it with a later one."""
    group = WorkerGroup(EchoRunner, 2, "cpu", backend.make_workers())
    worker = group.call(EchoRunner.pids)[1]
    start = time.monotonic()
    with pytest.raises(ValueError, match="what rank 0 says"):
        group.call(EchoRunner.raise_on_rank_0)
    assert time.monotonic() - start < NOTICED_WITHIN_S
    assert is_gone(worker)
    with pytest.raises(EngineError, match="closed"):
        group.call(EchoRunner.pids)


def test_wait_for_worker_killed_raises(backend: RankBackend) -> None:
    group = WorkerGroup(EchoRunner, 2, "cpu", backend.make_workers())
    os.kill(group.call(EchoRunner.pids)[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match=backend.killed):
        group.wait_for(lambda: False)
    assert time.monotonic() - start < NOTICED_WITHIN_S


def test_call_worker_killed_inside_a_collective_raises(backend: RankBackend) -> None:
    group = WorkerGroup(EchoRunner, 2, "cpu", backend.make_workers())
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match=backend.killed):
        group.call(EchoRunner.die_in_collective)
    assert time.monotonic() - start < NOTICED_WITHIN_S


def test_worker_group_factory_fails_on_a_worker_raises_and_leaves_nothing(backend: RankBackend) -> None:
    before = backend.worker_pids()
    with pytest.raises(WorkerDiedError, match=r"rank 1 failed:\n(.*\n)*.*no memory on rank 1"):
        WorkerGroup(failing_factory, 2, "cpu", backend.make_workers())
    assert backend.worker_pids() == before


SCRIPT = """
import time
from nanovllm.engine.startup import make_workers
from nanovllm.executor.worker_group import WorkerGroup
from test_worker_group import EchoRunner
if __name__ == "__main__":
    group = WorkerGroup(EchoRunner, 2, "cpu", make_workers("{backend}"))
    print(group.call(EchoRunner.pids)[1], flush=True)
    {then}
"""


def start_script(tmp_path: Path, backend: RankBackend, then: str) -> tuple[subprocess.Popen[str], int]:
    """A process that starts a group of two; returns it and the pid of its worker."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(backend=backend.name, then=then))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, str(script)], stdout=pipe, stderr=pipe, text=True, env=env)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_parent_killed_leaves_no_worker(tmp_path: Path, backend: RankBackend) -> None:
    """The worker is busy, so it does not see the end of its control pipe."""
    process, worker = start_script(tmp_path, backend, then="group.call(EchoRunner.nap_on_worker, 60); time.sleep(60)")
    time.sleep(0.2)
    process.kill()
    process.wait()
    assert wait_until(lambda: is_gone(worker), timeout_s=30)  # half as long as it naps; Ray takes a while


def test_close_forgotten_exits_silently_and_leaves_no_worker(tmp_path: Path, backend: RankBackend) -> None:
    process, worker = start_script(tmp_path, backend, then="pass")
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, backend.unexpected_lines(errors)) == (0, [])
    assert wait_until(lambda: is_gone(worker), timeout_s=30)


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

    def launch(self, dies: bool) -> torch.cuda.Event:
        if dies and self.tp.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.tp.all_reduce(self.x)
        event = torch.cuda.Event()
        event.record()
        return event


@pytest.mark.multi_gpu
def test_collectives_two_gpus(backend: RankBackend) -> None:
    group = WorkerGroup(EchoRunner, 2, "cuda", backend.make_workers())
    assert group.call(EchoRunner.collectives) == ([3.0], [[1.0, 2.0]], [1.0])
    group.close()


@pytest.mark.multi_gpu
def test_all_reduce_two_gpus_inside_a_graph(backend: RankBackend) -> None:
    group = WorkerGroup(GpuRunner, 2, "cuda", backend.make_workers())
    assert group.call(GpuRunner.replay_all_reduce) == [4.0] * 4
    group.close()


@pytest.mark.multi_gpu
def test_wait_for_two_gpus_worker_killed_raises_and_frees_the_gpu(backend: RankBackend) -> None:
    group = WorkerGroup(GpuRunner, 2, "cuda", backend.make_workers())
    group.wait_for(group.call(GpuRunner.launch, False).query)
    event = group.call(GpuRunner.launch, True)
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match=backend.killed):
        group.wait_for(event.query)
    torch.cuda.synchronize()  # the collective that waited for rank 1 has ended
    assert time.monotonic() - start < NOTICED_WITHIN_S
