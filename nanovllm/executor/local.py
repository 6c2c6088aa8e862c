"""LocalExecutor: a single rank, in this process. Every call goes straight to its runner."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.core.cpu_split import CpuSplit
from nanovllm.core.kv_spec import KVCacheSizes
from nanovllm.core.start_report import StartReport
from nanovllm.core.step_plan import StepPlan
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import EngineError
from nanovllm.executor.base import Executor, LaunchedStep, Runner


class LocalExecutor(Executor):
    def __init__(self, make_runner: Callable[[TPGroup], Runner]) -> None:
        self.runner = make_runner(TPGroup())
        self._is_closed = False

    def measure_num_gpu_blocks(self, num_cpu_blocks: int, most_gpu_blocks: int) -> tuple[int, str]:
        self._check_open()
        return self.runner.measure_num_gpu_blocks(num_cpu_blocks, most_gpu_blocks)

    def allocate_kv_cache(self, sizes: KVCacheSizes) -> None:
        self._check_open()
        self.runner.allocate_kv_cache(sizes)

    def capture_graphs(self, num_gpu_blocks: int) -> None:
        self._check_open()
        self.runner.capture_graphs(num_gpu_blocks)

    def measure_cpu_split(self) -> CpuSplit | None:
        self._check_open()
        return self.runner.measure_cpu_split()

    def measure_draft_s(self) -> float:
        self._check_open()
        return self.runner.measure_draft_s()

    def freeze_objects(self) -> None:
        self._check_open()
        self.runner.freeze_objects()

    def build_next_plan(self) -> bool:
        self._check_open()
        return self.runner.build_next_plan()

    def start_report(self) -> StartReport:
        return self.runner.start_report()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._check_open()
        return self.runner.launch(plan)

    def check(self) -> None:
        """Nothing to do: this rank cannot have died."""

    def wait_for(self, step: LaunchedStep) -> None:
        """Nothing to do: no other rank can die while `token_ids` waits."""

    def stats(self) -> Mapping[str, Any]:
        return self.runner.stats()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.runner.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the engine's executor is closed")
