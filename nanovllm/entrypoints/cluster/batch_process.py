"""units_in_process: the units of a job on one engine in a child process, without Ray.

A process of the engine may die at any moment: BatchEngine ends it after an error, and a step may run out of memory. The
command then starts another process with the units that have not ended.
"""

import asyncio
import multiprocessing
import signal
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from nanovllm.entrypoints.cluster.batch_engine import MAX_TRIES, NUM_UNITS, BatchEngine, EngineJob
from nanovllm.entrypoints.cluster.batch_job import BatchJob
from nanovllm.entrypoints.cluster.batch_rows import Unit
from nanovllm.errors import EngineError
from nanovllm.llm import resolve_device
from nanovllm.utils.interrupt import end_with_parent, ended_by_sigterm

CLOSE_S = 60.0  # time for the engine to close after its last unit
# Processes that end in a row without a result. TryCount ends a job earlier, unless a process dies before it counts:
# each of MAX_TRIES tries of a unit may need MAX_TRIES starts
MAX_DEATHS = MAX_TRIES**2


@contextmanager
def units_in_process(job: BatchJob, engine: EngineJob, units: Mapping[int, Unit]) -> Iterator[Iterator[dict[str, Any]]]:
    """Start an engine on this machine, which runs the units. See UnitRunner."""
    engine = replace(engine, options=job.options_on(str(resolve_device(job.config))))
    with ended_by_sigterm(), closing(_unit_results(job.engine_class, engine, units)) as results:
        yield results


def _unit_results(
    engine_class: type[BatchEngine], engine: EngineJob, units: Mapping[int, Unit]
) -> Generator[dict[str, Any], None, None]:
    todo = {unit_idx: unit.packed for unit_idx, unit in units.items()}
    num_deaths = 0
    while todo:
        with _started(engine_class, engine, todo) as (process, results), suppress(EOFError):
            while todo:
                result = results.recv()
                del todo[result["unit"]]
                num_deaths = 0
                yield result
        num_deaths += 1
        if num_deaths == MAX_DEATHS:
            raise EngineError(
                f"the process of the engine has ended {MAX_DEATHS} times before it ran a unit, last with status "
                f"{process.exitcode}"
            )


@contextmanager
def _started(
    engine_class: type[BatchEngine], engine: EngineJob, todo: Mapping[int, bytes]
) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run units in a child process, and yield the process and the connection from which the counts of its units are
    read. The end of the block ends the process.
    """
    context = multiprocessing.get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_units, args=(engine_class, engine, dict(todo), sender), name="engine")
    with results:
        with sender:  # the process has its own copy; without one here, the end of the process is the end of the file
            process.start()
        try:
            yield process, results
            process.join(CLOSE_S)
        finally:
            process.kill()
            process.join()


def _run_units(
    engine_class: type[BatchEngine], engine: EngineJob, todo: Mapping[int, bytes], results: Connection
) -> None:
    """Run the units in this new process, NUM_UNITS at a time, and send the counts of each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the command ends this process
    end_with_parent()

    async def run() -> None:
        runner = engine_class(engine)
        remaining = iter(todo.items())

        async def run_some() -> None:
            for unit_idx, packed in remaining:
                counts = await runner({"unit": [unit_idx], "places": [packed]})
                results.send({name: value for name, (value,) in counts.items()})

        await asyncio.gather(*(run_some() for _ in range(NUM_UNITS)))
        runner.close()

    asyncio.run(run())
