"""ProcessExecutor: several ranks on one machine. Rank 0 runs in this process, the others in processes of their own."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.core.cpu_split import CpuSplit
from nanovllm.core.kv_spec import KVCacheSizes
from nanovllm.core.start_report import StartReport
from nanovllm.core.step_plan import StepPlan
from nanovllm.device.tp_group import TPGroup
from nanovllm.executor.base import Executor, LaunchedStep, Runner
from nanovllm.executor.worker_group import WorkerGroup
from nanovllm.executor.workers import Workers


class ProcessExecutor(Executor):
    def __init__(
        self, make_runner: Callable[[TPGroup], Runner], num_ranks: int, device_type: str, workers: Workers
    ) -> None:
        """`make_runner` is pickled and makes each rank's runner in its own process. `device_type`: "cuda" or "cpu".
        `workers` starts the processes.
        """
        self._group: WorkerGroup[Runner] = WorkerGroup(make_runner, num_ranks, device_type, workers)
        self._is_closed = False
        self.runner = self._group.runner  # rank 0's

    def measure_num_gpu_blocks(self, num_cpu_blocks: int, most_gpu_blocks: int) -> tuple[int, str]:
        return self._group.call(Runner.measure_num_gpu_blocks, num_cpu_blocks, most_gpu_blocks)

    def allocate_kv_cache(self, sizes: KVCacheSizes) -> None:
        self._group.call(Runner.allocate_kv_cache, sizes)

    def capture_graphs(self, num_gpu_blocks: int) -> None:
        self._group.call(Runner.capture_graphs, num_gpu_blocks)

    def measure_cpu_split(self) -> CpuSplit | None:
        return self._group.call(Runner.measure_cpu_split)

    def measure_draft_s(self) -> float:
        return self._group.call(Runner.measure_draft_s)

    def freeze_objects(self) -> None:
        self._group.call(Runner.freeze_objects)

    def build_next_plan(self) -> bool:
        return self._group.call(Runner.build_next_plan)

    def start_report(self) -> StartReport:
        return self.runner.start_report()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self._group.call(Runner.launch, plan)

    def wait_for(self, step: LaunchedStep) -> None:
        self._group.wait_for(step.is_done)

    def check(self) -> None:
        self._group.check()

    def stats(self) -> Mapping[str, Any]:
        return self.runner.stats()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.runner.close()
        finally:
            self._group.close()  # the workers' memory goes with their processes
