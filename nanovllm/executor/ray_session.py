"""Joining Ray and leaving it. Ray is one per process, and an engine may find it running or have to start it.

An engine uses the Ray that its process is connected to. If there is none, it calls `ray.init`, which connects to the
cluster that RAY_ADDRESS or `ray start` name, or starts Ray on this machine. The namespace tells later who called
`ray.init`: the last engine of the process disconnects what an engine has connected, and never what the caller has. If an
engine started Ray, Ray ends with that.
"""

import secrets
import signal
import threading

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from nanovllm.executor.rank_resources import busy_machine_error

_NAMESPACE = "nanovllm"
_RESERVE_TIMEOUT_S = 30.0  # an engine that was closed just now gives its GPUs back within seconds
_NODE_LABEL = "ray.io/node-id"  # Ray labels every node with its id


def join_ray() -> None:
    """Make sure that this process uses Ray.

    Ray's handler of SIGTERM is taken back, because what a signal does is the caller's choice.
    """
    if ray.is_initialized():
        return
    if threading.current_thread() is not threading.main_thread():
        _join_from_lasting_thread()
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _init()
    finally:
        signal.signal(signal.SIGTERM, handler)


def _init() -> None:
    ray.init(namespace=_NAMESPACE, include_dashboard=False)


def _join_from_lasting_thread() -> None:
    """Linux ends the processes of a Ray that was started here with the thread that started them, so that must stay."""
    done = threading.Event()
    errors: list[BaseException] = []

    def init_and_stay() -> None:
        try:
            _init()
        except BaseException as error:
            errors.append(error)
        done.set()
        if not errors:
            threading.Event().wait()

    threading.Thread(target=init_and_stay, name="nanovllm-ray", daemon=True).start()
    done.wait()
    if errors:
        raise errors[0]


def this_node() -> str:
    return ray.get_runtime_context().get_node_id()


def node_resources(node_id: str) -> dict[str, float]:
    """Everything that Ray may hand out on a node, whether it is in use or not."""
    return next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)


def reserve(num_ranks: int, needs: dict[str, float]) -> PlacementGroup:
    """Reserve `needs` for each of so many ranks on this machine. Ray frees them if this process ends.

    Raises ConfigError if they do not become free within _RESERVE_TIMEOUT_S.
    """
    name = f"{_name_prefix()}{secrets.token_hex(8)}"
    here = [{_NODE_LABEL: this_node()}] * num_ranks
    group = placement_group([needs] * num_ranks, strategy="STRICT_PACK", name=name, bundle_label_selector=here)
    try:
        if not group.wait(_RESERVE_TIMEOUT_S):
            raise busy_machine_error(num_ranks, needs, _RESERVE_TIMEOUT_S)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def release_and_leave(group: PlacementGroup) -> None:
    """Give back what was reserved, which also ends what still runs in it. Leave Ray if no other engine here uses it."""
    if not ray.is_initialized():
        return  # it was shut down before the engine, and took everything with it
    remove_placement_group(group)
    others = [
        other
        for other in placement_group_table().values()
        if other["placement_group_id"] != group.id.hex()
        and other["name"].startswith(_name_prefix())
        and other["state"] != "REMOVED"
    ]
    context = ray.get_runtime_context()
    if context.namespace == _NAMESPACE and context.get_actor_id() is None and not others:
        ray.shutdown()


def _name_prefix() -> str:
    return f"nanovllm-{ray.get_runtime_context().get_job_id()}-"
