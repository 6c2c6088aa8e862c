"""devices_from_ray: devices for the ranks of an engine, reserved so that Ray gives them to no other job.

Ray only counts. The ranks are ordinary processes (processes.py) on this machine. This module is loaded only where Ray
is chosen.

An actor or a task has been given GPUs, and the ranks use these GPUs. A script has been given none, so a placement group
reserves them, in the Ray that the script's process is connected to. If there is no such Ray, the engine calls
`ray.init`, which connects to the cluster that RAY_ADDRESS or `ray start` names, or starts Ray on this machine. The
namespace later shows who called `ray.init`: the last engine of the process disconnects a connection that an engine
made, but never the caller's connection. If an engine started Ray, disconnecting also ends Ray.
"""

import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanovllm.errors import ConfigError
from nanovllm.executor.processes import threads_per_rank

RESERVE_TIMEOUT_S = 30.0  # an engine that was closed just now releases its GPUs within seconds
_NAMESPACE = "nanovllm"
_NODE_LABEL = "ray.io/node-id"  # Ray labels every node with its id


@contextmanager
def devices_from_ray(device_type: str, size: int, timeout_s: float = RESERVE_TIMEOUT_S) -> Iterator[list[torch.device]]:
    """Yield a device for each of `size` ranks, reserved for the duration of the block. `device_type`: "cuda" or "cpu".

    Raises ConfigError if this machine has too few devices, or if they are not free within the timeout.
    """
    if ray.is_initialized() and _is_in_ray():
        gpu_ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        if device_type == "cuda" and len(gpu_ids) < size:
            raise ConfigError(
                f"this Ray actor or task holds {len(gpu_ids)} GPUs, and tensor_parallel_size={size} needs {size}; give "
                f"it num_gpus={size}"
            )
        yield _devices(device_type, size, gpu_ids)
        return
    _join_ray()
    try:
        with _reserved(device_type, size, timeout_s) as gpu_ids:
            yield _devices(device_type, size, gpu_ids)
    finally:
        _leave_ray()


def _devices(device_type: str, size: int, gpu_ids: Sequence[str]) -> list[torch.device]:
    if device_type != "cuda":
        return [torch.device("cpu")] * size
    return visible_devices(gpu_ids[:size], os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_devices(gpu_ids: Sequence[str], visible: str | None) -> list[torch.device]:
    """Return torch's devices for Ray's ids of GPUs.

    `visible` is the process's CUDA_VISIBLE_DEVICES: it names the GPUs that the process sees, by the same ids, in the
    order in which torch counts them, or is None if the process sees all. Raises ConfigError if a GPU is not visible.
    """
    devices = []
    visible_ids = [] if visible is None else visible.split(",")
    for gpu_id in gpu_ids:
        if visible is None and gpu_id.isdecimal():
            devices.append(torch.device("cuda", int(gpu_id)))
        elif gpu_id in visible_ids:
            devices.append(torch.device("cuda", visible_ids.index(gpu_id)))
        else:
            raise ConfigError(
                f"Ray reserved GPU {gpu_id} for this engine, whose process does not see it (CUDA_VISIBLE_DEVICES="
                f"{'not set' if visible is None else visible!r}); give it the CUDA_VISIBLE_DEVICES that Ray started "
                "with"
            )
    return devices


@contextmanager
def _reserved(device_type: str, size: int, timeout_s: float) -> Iterator[list[str]]:
    """Reserve resources for all ranks on this machine, and yield the ids of the GPUs. Ray frees them with the process.

    A rank on a GPU needs the GPU and a CPU to drive it; on a CPU, as many CPUs as it has threads.
    """
    needs: dict[str, float] = {"GPU": size, "CPU": size}
    if device_type != "cuda":
        needs = {"CPU": size * threads_per_rank(size)}
    here = ray.get_runtime_context().get_node_id()
    total = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
    wanted = f"distributed_executor_backend='ray' needs {_names(needs)} for {size} ranks"
    if any(total.get(name, 0) < amount for name, amount in needs.items()):
        has = _names({name: total.get(name, 0) for name in needs})
        raise ConfigError(
            f"{wanted}, and Ray has {has} on this machine; lower tensor_parallel_size, start Ray with more, or use 'mp'"
        )
    name = f"{_name_prefix()}{secrets.token_hex(8)}"
    group = placement_group([needs], name=name, bundle_label_selector=[{_NODE_LABEL: here}])
    try:
        if not group.wait(timeout_s):
            raise ConfigError(
                f"{wanted}. Ray has them on this machine, but they were not free within {timeout_s:.0f} s; end what "
                "uses them (`ray status`), or lower tensor_parallel_size"
            )
        yield _gpu_ids_of(group, size) if device_type == "cuda" else []
    finally:
        if ray.is_initialized():
            remove_placement_group(group)


def _gpu_ids_of(group: PlacementGroup, num_gpus: int) -> list[str]:
    """Return the GPUs of a bundle, by a task that takes them all. They stay the same for as long as the group exists.

    The task is a lambda because Ray sends lambdas as code, so the process that runs the task need not import this
    package.
    """
    task = ray.remote(lambda: ray.get_runtime_context().get_accelerator_ids()["GPU"])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    found: list[str] = ray.get(task.options(num_cpus=1, num_gpus=num_gpus, scheduling_strategy=strategy).remote())
    return found


def _is_in_ray() -> bool:
    """Return True if this process is an actor or runs a task, and False if it is a script that uses Ray."""
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None or context.get_task_id() is not None


def _join_ray() -> None:
    """Make sure that this process uses Ray.

    Linux ends the processes of a Ray that was started here with the thread that started them, so a thread that never
    ends starts Ray. In a thread other than the main thread, Ray also leaves signal handlers alone.
    """
    if ray.is_initialized():
        return
    joined: Future[None] = Future()

    def join_and_stay() -> None:
        try:
            ray.init(namespace=_NAMESPACE, include_dashboard=False)
        except BaseException as error:
            joined.set_exception(error)
            return
        joined.set_result(None)
        while ray.is_initialized():
            time.sleep(1.0)

    threading.Thread(target=join_and_stay, name="nanovllm-ray", daemon=True).start()
    joined.result()


def _leave_ray() -> None:
    """Disconnect from Ray if an engine connected this process and this was its last engine."""
    if ray.is_initialized() and ray.get_runtime_context().namespace == _NAMESPACE and not has_reservations():
        ray.shutdown()


def has_reservations() -> bool:
    """Return True if an engine of this job has reserved anything."""
    return any(
        group["name"].startswith(_name_prefix()) and group["state"] != "REMOVED"
        for group in placement_group_table().values()
    )


def _name_prefix() -> str:
    """Prefix of the names of this job's reservations. A job is a script with all processes that it has started."""
    return f"nanovllm-{ray.get_runtime_context().get_job_id()}-"


def _names(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}{'' if amount == 1 else 's'}" for name, amount in resources.items())
