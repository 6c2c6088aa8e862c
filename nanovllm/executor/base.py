"""Executor: everything that the engine asks of the ranks that hold the model and its KV cache.

The engine knows this protocol and nothing behind it: not how many ranks there are, nor in which processes or on which
machines they run. An executor holds one Runner per rank and keeps them in step, because ranks meet in collectives.
"""

from collections.abc import Mapping
from typing import Protocol

from nanovllm.core.kv_spec import KVCacheSizes
from nanovllm.core.start_report import StartReport
from nanovllm.core.step_plan import StepPlan


class LaunchedStep(Protocol):
    """The sampled tokens of a step that may still be running."""

    def is_done(self) -> bool: ...

    def token_ids(self) -> list[int]:
        """One id per sampling sequence of the plan. Waits for the step."""


class Runner(Protocol):
    """One rank: its part of the model, and its part of the KV cache."""

    def measure_num_gpu_blocks(self, num_cpu_blocks: int, most_gpu_blocks: int) -> tuple[int, str]:
        """The number of KV blocks that fit on every rank, and a description of rank 0's memory.

        `most_gpu_blocks`: more than these the engine has no use for.
        """

    def allocate_kv_cache(self, sizes: KVCacheSizes) -> None:
        """Allocate all KV memory. Steps can be launched from here on."""

    def capture_graphs(self, num_gpu_blocks: int) -> None:
        """Decode steps become CUDA graphs from here on. Needs a GPU and the KV cache."""

    def freeze_objects(self) -> None:
        """Let the garbage collector leave out what exists now, until `close`."""

    def start_report(self) -> StartReport:
        """What the engine must know of the ranks, asked once at the end of the start."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue one step, or on a CPU run it. Steps run in the order in which they are launched. Hot."""

    def stats(self) -> Mapping[str, float | None]:
        """Counters of the copies between host and device. Any thread may ask."""

    def close(self) -> None:
        """Finish what is enqueued and give all memory back."""


class Executor(Runner, Protocol):
    """All ranks, called like one: a call runs on every rank, and its result is rank 0's. `start_report` and `stats`
    are rank 0's alone.

    One thread calls at a time, except for `stats`. With several ranks, whatever one of them raises ends the executor,
    because they no longer agree on what was run, and a rank that is gone raises WorkerDiedError. After `close` every
    call that runs something raises EngineError. Closing twice is fine.
    """

    def wait_for(self, step: LaunchedStep) -> None:
        """Make sure that `step.token_ids()` returns: notice a rank that died while the others wait for it. Hot."""
