"""What a job asks of Ray: a cluster, the resources of its machines, and a Dataset that runs the units in actors."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError

from nanovllm.capacity.machine import Machine
from nanovllm.cluster.batch_engine import NUM_UNITS, EngineJob
from nanovllm.cluster.batch_plan import Unit
from nanovllm.cluster.batch_resources import EngineNeeds, Node
from nanovllm.config import Config
from nanovllm.errors import CheckpointError, ConfigError, EngineError

NEVER = -1  # a unit of long answers may take longer than any limit


def nodes_of_cluster() -> list[Node]:
    """The machines that are alive."""
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(each.get("CPU", 0), each.get("GPU", 0), each.get("memory", 0)) for each in resources]


def on_an_engines_node(
    needs: EngineNeeds, plan: Callable[..., EngineNeeds], config: Config, find_machine: Callable[[Config], Machine]
) -> EngineNeeds:
    """`plan(needs, config, memory of the machine, find_machine)`, called on a machine that has room for an engine."""

    def call() -> EngineNeeds | Exception:
        node_id = ray.get_runtime_context().get_node_id()
        memory_bytes = next(node["Resources"]["memory"] for node in ray.nodes() if node["NodeID"] == node_id)
        try:
            return plan(needs, config, memory_bytes, find_machine)
        except (ConfigError, CheckpointError) as error:  # as a value, because Ray would change its type
            return error

    task = ray.remote(call).options(num_cpus=needs.cpus, num_gpus=needs.gpus)
    with _ray_errors():
        planned: EngineNeeds | Exception = ray.get(task.remote())
    if isinstance(planned, Exception):
        raise planned
    return planned


def unit_results(
    engine: EngineJob, units: Mapping[int, Unit], needs: EngineNeeds, num_engines: int
) -> Iterator[dict[str, Any]]:
    """Run the units, and yield what BatchEngine returns for each, in the order in which they end.

    One task is one unit. Ray Data restarts an actor that dies, and runs its tasks again, as often as it takes.
    """
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # it warns that its bars are off
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # they count blocks; the job's own counts rows
    context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = NEVER
    items = [{"unit": unit_idx, "places": unit.packed} for unit_idx, unit in units.items()]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        engine.engine_class,
        fn_constructor_args=(engine,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            size=num_engines, max_tasks_in_flight_per_actor=NUM_UNITS, max_concurrent_calls_per_actor=NUM_UNITS
        ),
        num_cpus=needs.cpus,
        num_gpus=needs.gpus,
        memory=needs.memory_bytes or None,
    )
    with _ray_errors():
        yield from dataset.iter_rows()


@contextmanager
def _ray_errors() -> Iterator[None]:
    """Raise what Ray could not mend as an EngineError."""
    try:
        yield
    except RayError as error:
        raise EngineError(
            f"Ray has given up: {error}\nRepeat the command to go on. All machines need the same nanovllm and Ray"
        ) from error
