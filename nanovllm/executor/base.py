"""Executor: how the engine uses the ranks, which hold the model and its KV cache.

The engine knows only this interface, but not the number of ranks or their processes. There is one Runner per rank. All
ranks run the same calls in the same order, because they join the same collectives. LocalExecutor has a single rank, in
this process; ProcessExecutor (processes.py) has several.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import EngineError
from nanovllm.plan.kv_spec import KVCacheSizes, StartReport
from nanovllm.plan.outputs import NO_LOGPROBS, StepLogprobs
from nanovllm.plan.step_plan import LayerTimes, StepPlan
from nanovllm.runner.step_runner import CompanionSetup

P = ParamSpec("P")
Result = TypeVar("Result")


class LaunchedStep(Protocol):
    """The sampled tokens of a step that may still be running."""

    def is_done(self) -> bool: ...

    def token_ids(self) -> list[int]:
        """Return one id per sampled token of the plan. Waits for the step."""
        ...

    def seconds(self) -> float | None:
        """Return the time from the end of the previous step to the end of this step, by the clock of rank 0's GPU, or
        None if unknown. Called after `token_ids`.

        A delay on the host, such as the launch of the next step, does not change the time. If the GPU has had to wait
        for this step's launch, the waiting time is included.
        """
        return None

    def layer_times(self) -> LayerTimes | None:
        """Return times of the link and the CPU on rank 0, or None if the step was not timed. Called
        after `token_ids`.
        """
        return None

    def logprobs(self) -> StepLogprobs:
        """Return the log-probabilities that the plan asks for. Called after `token_ids`."""
        return NO_LOGPROBS


class Runner(Protocol):
    """One rank: its part of the model, and its part of the KV cache."""

    def allocate_kv_cache(self, sizes: KVCacheSizes, companions: Sequence[CompanionSetup] = ()) -> None:
        """Allocate all KV memory. Steps can be launched from now on. Raises ConfigError if memory runs out."""

    def capture_graphs(self, num_gpu_blocks: int) -> None:
        """Capture the CUDA graphs that decode steps replay from now on. Needs a GPU and an allocated KV cache."""

    def apply(self, function: Callable[[Any], Result]) -> Result:
        """Run a function of start-up on this rank's runner, and return its result.

        Start-up measures memory and speed with it, by steps as requests will run them. A capability also starts its
        half on the rank with it.
        """
        ...

    def move(self, moves: Any) -> None:
        """Begin to move prompts between memory and a store (schedule/seams.py), in other threads.

        Called between steps, when all planned steps were launched.
        """

    def freeze_objects(self) -> None:
        """Exempt all objects that exist now from garbage collection, until `close`."""

    def start_report(self) -> StartReport:
        """Report to the engine what it needs to know about the ranks. Called once, at the end of start-up."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue one step; on a CPU, run it. Steps run in the order of their launches. Hot."""

    def stats(self) -> Mapping[str, Any]:
        """Counters of the copies between host and device. Any thread may call this."""

    def close(self) -> None:
        """Finish what is enqueued and release all memory."""


class Executor(Protocol):
    """All ranks, called like one.

    Only one thread may make calls at a time. With several ranks, an exception on any of them ends the executor, because
    the ranks no longer agree on what has run.
    """

    runner: Runner  # rank 0's runner. Its `start_report` and `stats` concern rank 0 alone, and are not calls

    def call(self, method: Callable[Concatenate[Any, P], Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Call `runner.method(*args, **kwargs)` on every rank; returns rank 0's result. Hot: once per step.

        `method` is one of Runner's, so that the call can be type checked. Raises EngineError after `close`, and
        WorkerDiedError if another rank has died or has raised an exception.
        """

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Call Runner.launch on every rank. Hot."""
        return self.call(Runner.launch, plan)

    def wait_for(self, step: LaunchedStep) -> None:
        """Make sure that `step.token_ids()` cannot hang. Raises WorkerDiedError if a rank dies during the step. Hot."""

    def check(self) -> None:
        """Raise WorkerDiedError if a rank has died. Without this check, only the next step would notice."""

    def close(self) -> None:
        """Release all memory and end the other ranks. Closing twice is fine."""


class LocalExecutor(Executor):
    """A single rank, in this process."""

    def __init__(self, make_runner: Callable[[TPGroup], Runner]) -> None:
        self.runner = make_runner(TPGroup())
        self._is_closed = False

    def call(self, method: Callable[Concatenate[Any, P], Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        if self._is_closed:
            raise EngineError("the engine's executor is closed")
        result: Result = getattr(self.runner, method.__name__)(*args, **kwargs)
        return result

    def wait_for(self, step: LaunchedStep) -> None:
        """Do nothing: no other rank can die while `token_ids` waits."""

    def check(self) -> None:
        """Do nothing: this rank cannot have died."""

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.runner.close()
