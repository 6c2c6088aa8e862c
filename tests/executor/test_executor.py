"""LocalExecutor and ProcessExecutor: the calls of the protocol over one rank and over several."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import pytest
import torch
from rank_backends import RankBackend

from nanovllm.core.kv_spec import KVCacheSizes
from nanovllm.core.start_report import StartReport
from nanovllm.core.step_plan import KVMoves, StepPlan
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import EngineError, WorkerDiedError
from nanovllm.executor.base import Executor, LaunchedStep, Runner
from nanovllm.executor.local import LocalExecutor
from nanovllm.executor.processes import ProcessExecutor
from nanovllm.runner.step_result import StepEnd, StepResult


class RecordingRunner(Runner):
    """Counts what it is called for; a launched step samples the counts of all ranks. Also the factory of itself."""

    def __init__(self, tp: TPGroup) -> None:
        self.tp, self.num_calls, self.num_closed = tp, 0, 0
        self.last_end: StepEnd | None = None

    def measure_num_gpu_blocks(self, num_cpu_blocks: int, most_gpu_blocks: int) -> tuple[int, str]:
        self.num_calls += 1
        fitting = torch.tensor([most_gpu_blocks - num_cpu_blocks - self.tp.rank])
        return int(self.tp.all_gather(fitting).min()), f"rank {self.tp.rank}"

    def allocate_kv_cache(self, sizes: KVCacheSizes) -> None:
        self.num_calls += sizes.num_gpu_blocks

    def capture_graphs(self, num_gpu_blocks: int) -> None:
        self.num_calls += num_gpu_blocks

    def freeze_objects(self) -> None:
        self.num_calls += 1

    def build_next_plan(self) -> bool:
        self.num_calls += 1
        return self.tp.rank == 0

    def start_report(self) -> StartReport:
        return StartReport(needs_rope_lens=False, link_byte_per_s=None, phases=f"rank {self.tp.rank}")

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.num_calls += 1
        result = StepResult(self.tp.all_gather(torch.tensor([self.num_calls])), end_before=self.last_end)
        self.last_end = result.end
        return result

    def stats(self) -> Mapping[str, float | None]:
        return {"num_calls": self.num_calls, "rank": self.tp.rank}

    def close(self) -> None:
        self.num_closed += 1


class StuckRunner(RecordingRunner):
    def launch(self, plan: StepPlan) -> LaunchedStep:
        if self.tp.rank == 1:
            os._exit(3)
        return super().launch(plan)


AnyExecutor: TypeAlias = LocalExecutor | ProcessExecutor
PLAN = StepPlan((), KVMoves())


@pytest.fixture(params=[1, 2])
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def executor(num_ranks: int, backend: RankBackend) -> Iterator[AnyExecutor]:
    executor = (
        LocalExecutor(RecordingRunner)
        if num_ranks == 1
        else ProcessExecutor(RecordingRunner, num_ranks, "cpu", backend.make_workers())
    )
    yield executor
    executor.close()


def test_calls_run_on_every_rank_in_order_and_return_the_result_of_rank_0(
    executor: AnyExecutor, num_ranks: int
) -> None:
    assert executor.measure_num_gpu_blocks(3, 20) == (17 - (num_ranks - 1), "rank 0")
    executor.allocate_kv_cache(KVCacheSizes(10))
    executor.capture_graphs(100)
    executor.freeze_objects()
    assert executor.build_next_plan()
    step = executor.launch(PLAN)
    executor.wait_for(step)
    assert step.token_ids() == [114] * num_ranks


def test_a_launched_step_tells_the_time_since_the_end_of_the_one_before(executor: AnyExecutor) -> None:
    before_s = time.perf_counter()
    first = executor.launch(PLAN)
    time.sleep(0.01)
    second = executor.launch(PLAN)
    after_s = time.perf_counter()
    assert first.token_ids() and first.seconds() is None
    seconds = second.token_ids() and second.seconds()
    assert seconds is not None and 0.01 <= seconds <= after_s - before_s


def test_report_and_stats_are_those_of_rank_0_and_call_no_other(executor: AnyExecutor, num_ranks: int) -> None:
    """Any thread may ask for the stats, also while another one is in the middle of a call."""
    assert executor.start_report().phases == "rank 0"
    assert executor.stats() == {"num_calls": 0, "rank": 0}
    assert executor.launch(PLAN).token_ids() == [1] * num_ranks


def test_close_twice_closes_the_runner_once_and_then_calls_are_refused(executor: AnyExecutor) -> None:
    executor.close()
    executor.close()
    assert isinstance(executor.runner, RecordingRunner) and executor.runner.num_closed == 1
    for call in (
        lambda: executor.launch(PLAN),
        lambda: executor.measure_num_gpu_blocks(3, 20),
        lambda: executor.allocate_kv_cache(KVCacheSizes(10)),
        lambda: executor.capture_graphs(100),
        executor.freeze_objects,
        executor.build_next_plan,
    ):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_launch_rank_dies_raises_and_so_does_every_later_call(backend: RankBackend) -> None:
    executor: Executor = ProcessExecutor(StuckRunner, 2, "cpu", backend.make_workers())
    for call in (lambda: executor.launch(PLAN), lambda: executor.freeze_objects()):
        with pytest.raises(WorkerDiedError, match=backend.exited_with_3):
            call()
    executor.close()
