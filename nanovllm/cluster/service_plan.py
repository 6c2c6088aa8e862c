"""What Ray Serve is told about the replicas: their resources, their number, how they are watched and how they end."""

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.cluster.prefix_routing import MAX_QUEUE_GAP
from nanovllm.cluster.service_options import ServiceOptions
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.server.options import ServerOptions

ROUTER = "nanovllm.cluster.service_router.PrefixRouter"
HEALTH_PERIOD_S = 2.0  # Serve replaces a replica after three bad answers
HEALTH_TIMEOUT_S = 30.0
DRAIN_CHECK_S = 0.5  # how often a replica that is to end looks whether its last answer has ended
MAX_STARTS = 3  # of a replica that fails at its start
MAX_SMALL_REQUESTS = 64  # open in one replica, besides those in its queue and its engine


def replica_resources(config: Config, service: ServiceOptions, num_cluster_gpus: int) -> dict[str, Any]:
    """What Ray reserves for each replica. Ray sets the number of CPU threads, and shows it only its own GPUs."""
    needs_gpu = config.device == "cuda" or (config.device == "auto" and num_cluster_gpus > 0)
    resources: dict[str, Any] = {
        "num_cpus": service.replica_cpus,
        "num_gpus": config.tensor_parallel_size if needs_gpu else 0,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(service.replica_cpus)}},
    }
    if config.enable_cpu_offload and config.cpu_memory_gb is not None:
        resources["memory"] = int(config.cpu_memory_gb * 2**30)
    return resources


def check_room(service: ServiceOptions, resources: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise ConfigError if the replicas cannot all run at once. nodes: the resources of each, by Ray's names."""
    assert service.num_replicas is not None, "checked by the command"
    needs = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"], "memory": resources.get("memory", 0)}
    needs = {name: amount for name, amount in needs.items() if amount}
    room = sum(min(int(node.get(name, 0) // amount) for name, amount in needs.items()) for node in nodes)
    if room < service.num_replicas:
        parts = ", ".join(f"{amount / 2**30:g} GiB" if name == "memory" else f"{amount:g} {name}"
                          for name, amount in needs.items())  # fmt: skip
        raise ConfigError(
            f"num_replicas={service.num_replicas}, but the nodes of the Ray cluster have room for {room} (a replica "
            f"takes {parts}); lower num_replicas, or add nodes"
        )


def deployment_options(config: Config, options: ServerOptions, service: ServiceOptions) -> dict[str, Any]:
    """The options of the Serve deployment, apart from its resources.

    The queue of each replica, and not Serve, limits what may wait (AdmissionQueue).
    """
    return {
        **_scale(config, service),
        "max_ongoing_requests": options.max_queue + config.max_num_seqs + MAX_SMALL_REQUESTS,
        "max_queued_requests": options.max_queue,
        "graceful_shutdown_timeout_s": options.drain_s,
        "graceful_shutdown_wait_loop_s": DRAIN_CHECK_S,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": MAX_STARTS,
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
        "request_router_config": {
            "request_router_class": ROUTER,
            "request_router_kwargs": {"max_queue_gap": min(MAX_QUEUE_GAP, config.max_num_seqs)},
        },
    }


def _scale(config: Config, service: ServiceOptions) -> dict[str, Any]:
    if service.max_replicas in (None, service.num_replicas):
        return {"num_replicas": service.num_replicas}
    scaling = {
        "min_replicas": service.num_replicas,
        "max_replicas": service.max_replicas,
        "target_ongoing_requests": config.max_num_seqs,
    }
    return {"autoscaling_config": scaling}
