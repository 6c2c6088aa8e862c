"""units_on_ray: the units of a job on several engines, each of which is an actor that Ray Data feeds."""

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError

from nanovllm.entrypoints.cluster.batch_engine import NUM_UNITS, BatchEngine, EngineJob
from nanovllm.entrypoints.cluster.batch_job import BatchJob
from nanovllm.entrypoints.cluster.batch_rows import Unit
from nanovllm.entrypoints.cluster.resources import (
    EngineNeeds,
    choose_device,
    connected,
    default_num_engines,
    nodes_of_cluster,
    plan_placement,
)
from nanovllm.errors import EngineError
from nanovllm.utils.interrupt import ended_by_sigterm

logger = logging.getLogger("nanovllm")

OBJECT_STORE_BYTES = 200 << 20  # only units and counts pass through it
NEVER = -1  # no limit for a unit, because long answers may take hours


@contextmanager
def units_on_ray(job: BatchJob, engine: EngineJob, units: Mapping[int, Unit]) -> Iterator[Iterator[dict[str, Any]]]:
    """Start engines on the cluster of `job.options`, which run the units. See UnitRunner."""
    # Connecting sets Ray's own handler of SIGTERM, which prints its stack
    with connected(job.options.ray_address, OBJECT_STORE_BYTES), ended_by_sigterm():
        engine, needs, num_engines = _place(job, engine, len(units))
        with closing(_unit_results(job.engine_class, engine, units, needs, num_engines)) as results:
            yield results


def _place(job: BatchJob, engine: EngineJob, num_units: int) -> tuple[EngineJob, EngineNeeds, int]:
    """Return the engine's job with the options for this cluster, the needs of an engine, and the number of engines."""
    nodes = nodes_of_cluster()
    ranks = job.config.tensor_parallel_size
    device = choose_device(job.config.device, nodes)
    wanted = job.options.num_engines or default_num_engines(nodes, ranks, device)
    num_engines = min(wanted, num_units)
    needs = plan_placement(nodes, num_engines, ranks, device)
    logger.info("units: %d, engines: %d; each engine takes %s", num_units, num_engines, needs.describe())
    return (
        replace(
            engine,
            options=job.options_on(device),
            engines_per_node=needs.engines_per_node,
            memory_bytes=needs.memory_bytes,
        ),
        needs,
        num_engines,
    )


def _unit_results(
    engine_class: type[BatchEngine], engine: EngineJob, units: Mapping[int, Unit], needs: EngineNeeds, num_engines: int
) -> Generator[dict[str, Any], None, None]:
    """Run the units, and yield the counts that BatchEngine returns for each, in the order in which the units end.

    One task is one unit. Ray Data restarts an actor that dies, and runs the actor's tasks again, without limit.
    """
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # warns that progress bars are off
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # Ray's bars count blocks; the job's bar counts rows
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = NEVER
    items = [{"unit": unit_idx, "places": unit.packed} for unit_idx, unit in units.items()]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        engine_class,
        fn_constructor_args=(engine,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            size=num_engines, max_tasks_in_flight_per_actor=NUM_UNITS, max_concurrent_calls_per_actor=NUM_UNITS
        ),
        num_cpus=needs.cpus,
        num_gpus=needs.gpus,
        memory=needs.memory_bytes or None,
    )
    try:
        yield from dataset.iter_rows()
    except RayError as error:
        raise EngineError(
            f"Ray has failed: {error}\nRepeat the command to resume. All machines need the same nanovllm and Ray"
        ) from error
