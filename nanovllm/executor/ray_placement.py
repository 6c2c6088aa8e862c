"""Where Ray puts the ranks of an engine: all on this machine, each with resources that nobody else is given.

Rank 0 stays in the process that makes the engine:

- Ray does not count what a script uses. So a placement group reserves a bundle for every rank, and rank 0 uses the GPU
  of bundle 0.
- An actor uses its own GPU. The other ranks take bundles of the actor's placement group. If it has none, bundles are
  reserved for them.
"""

import os
import secrets
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanovllm.executor.rank_resources import (
    busy_machine_error,
    check_bundles,
    check_held,
    check_machine,
    rank_device,
    rank_resources,
)
from nanovllm.executor.ray_session import is_actor
from nanovllm.executor.worker import Job

ANY_BUNDLE = -1
_NODE_LABEL = "ray.io/node-id"  # Ray labels every node with its id


@dataclass(frozen=True)
class Placement:
    group: PlacementGroup
    is_reserved: bool  # for this engine, which gives it back
    bundle_of_rank_1: int  # the other ranks' follow; or ANY_BUNDLE
    needs: dict[str, float]  # of each rank
    rank_0_device: torch.device

    def options(self, rank: int) -> dict[str, Any]:
        """Options of the Ray actor or task that has the resources of `rank`, which is not 0."""
        bundle = ANY_BUNDLE if self.bundle_of_rank_1 == ANY_BUNDLE else self.bundle_of_rank_1 + rank - 1
        return _options(self.group, bundle, self.needs)


def place_ranks(job: Job, reserve_timeout_s: float) -> Placement:
    """Find room for all ranks. Raises ConfigError if there is none, or none within the timeout."""
    needs = rank_resources(job.device_type, job.num_threads)
    if not is_actor():
        group = _reserve(job.size, job.size, needs, reserve_timeout_s)
        try:
            return Placement(group, True, 1, needs, _device_of_bundle(group, 0, job.device_type, needs))
        except BaseException:
            remove_placement_group(group)
            raise
    check_held(job.device_type, own_gpu_ids())
    device = own_device(job.device_type)
    current = get_current_placement_group()
    if current is None:
        return Placement(_reserve(job.size - 1, job.size, needs, reserve_timeout_s), True, 0, needs, device)
    check_bundles(job.size, needs, _bundles_here(current))
    return Placement(current, False, ANY_BUNDLE, needs, device)


def release(placement: Placement) -> None:
    """Give back what was reserved, which also ends what still runs in it."""
    if placement.is_reserved:
        remove_placement_group(placement.group)


def has_reservations() -> bool:
    """Whether an engine of this job has reserved anything."""
    return any(
        group["name"].startswith(_name_prefix()) and group["state"] != "REMOVED"
        for group in placement_group_table().values()
    )


def own_gpu_ids() -> list[str]:
    return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def own_device(device_type: str) -> torch.device:
    """The device of the actor that this is called in."""
    return rank_device(device_type, own_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _reserve(num_bundles: int, num_ranks: int, needs: dict[str, float], timeout_s: float) -> PlacementGroup:
    """Reserve bundles on this machine, for the other ranks or for all. Ray frees them when this process ends."""
    here = ray.get_runtime_context().get_node_id()
    total = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
    check_machine(num_ranks, needs, total)
    name = f"{_name_prefix()}{secrets.token_hex(8)}"
    labels = [{_NODE_LABEL: here}] * num_bundles
    group = placement_group([needs] * num_bundles, strategy="STRICT_PACK", name=name, bundle_label_selector=labels)
    try:
        if not group.wait(timeout_s):
            raise busy_machine_error(num_bundles, needs, timeout_s)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _device_of_bundle(group: PlacementGroup, bundle: int, device_type: str, needs: dict[str, float]) -> torch.device:
    """This process's device, if it has the resources of a bundle.

    The GPU of a bundle is the same as long as the group exists, so a task in the bundle can tell it. The task is a
    lambda because Ray sends those as code, and the process that runs it then need not import this package and torch.
    """
    gpu_ids = []
    if device_type == "cuda":
        task = ray.remote(lambda: ray.get_runtime_context().get_accelerator_ids()["GPU"])
        gpu_ids = ray.get(task.options(**_options(group, bundle, needs)).remote())
    return rank_device(device_type, gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _options(group: PlacementGroup, bundle: int, needs: dict[str, float]) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "scheduling_strategy": strategy}


def _bundles_here(group: PlacementGroup) -> list[dict[str, float]]:
    table, here = placement_group_table(group), ray.get_runtime_context().get_node_id()
    return [table["bundles"][index] for index, node_id in table["bundles_to_node_id"].items() if node_id == here]


def _name_prefix() -> str:
    """Names of the reservations of this job, which is a script with all that it has started."""
    return f"nanovllm-{ray.get_runtime_context().get_job_id()}-"
