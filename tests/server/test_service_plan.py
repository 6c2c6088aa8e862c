"""What the options of a service mean for Ray, without Ray."""

import subprocess
import sys
from typing import Any

import pytest

from nanovllm.cli.main import main
from nanovllm.cluster.options import ServiceOptions, check_engine
from nanovllm.cluster.resources import EngineNeeds, Node, check_room, deployment_options, replica_needs
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.server.options import ServerOptions

GIB = 2**30


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_replicas": 0}, "num_replicas=0 must be between 1 and 1024"),
        ({"num_replicas": 2, "max_replicas": 1}, "max_replicas=1 must be between num_replicas=2"),
        ({"num_replicas": 1, "replica_cpus": 0}, "replica_cpus=0 must be 1 or more"),
        ({"num_replicas": 1, "ray_address": "ray://host:10001"}, "must be host:port or auto"),
        ({"max_replicas": 2}, "max_replicas=2 needs num_replicas"),
        ({"replica_cpus": 2}, "replica_cpus=2 needs num_replicas"),
        ({"ray_address": "host:1"}, "ray_address='host:1' needs num_replicas"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ServiceOptions(**options)


def test_options_of_one_engine_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"device='cuda:1'.*give device='cuda'"):
        check_engine(config(device="cuda:1"))
    with pytest.raises(ConfigError, match="needs cpu_memory_gb"):
        check_engine(config(enable_cpu_offload=True))
    check_engine(config(device="cuda", enable_cpu_offload=True, cpu_memory_gb=8))


def config(**options: Any) -> Config:
    return Config(model="m", **options)


def test_replica_takes_a_gpu_for_each_rank_and_the_memory_of_offload() -> None:
    service, gpus, none = ServiceOptions(num_replicas=2, replica_cpus=3), [Node(8, 8, GIB)], [Node(8, 0, GIB)]
    for options, nodes, num_gpus in (
        ({}, none, 0),
        ({}, gpus, 1),
        ({"tensor_parallel_size": 4}, gpus, 4),
        ({"device": "cpu"}, gpus, 0),
        ({"device": "cuda"}, none, 1),
    ):
        assert replica_needs(config(**options), service, nodes) == EngineNeeds(gpus=num_gpus, cpus=3)
    offload = config(enable_cpu_offload=True, cpu_memory_gb=8.0)
    assert replica_needs(offload, service, gpus).memory_bytes == 8 * GIB


def test_replicas_that_do_not_fit_are_refused() -> None:
    needs = EngineNeeds(gpus=2, cpus=2)
    for nodes, room in (
        ([Node(8, 2, GIB)], 1),
        ([Node(8, 8, GIB)], 4),
        ([Node(8, 1, GIB), Node(8, 1, GIB)], 0),  # a replica is on one node
        ([Node(3, 8, GIB), Node(8, 0, GIB)], 1),
        ([], 0),
    ):
        check_room(needs, nodes, room, "num_replicas")
        with pytest.raises(ConfigError, match=f"room for {room} of num_replicas={room + 1}: each needs 2 GPUs, 2 CPUs"):
            check_room(needs, nodes, room + 1, "num_replicas")


def deployment(service: ServiceOptions, server: dict[str, Any], **options: Any) -> dict[str, Any]:
    server_options = ServerOptions(**server)
    return deployment_options(config(**options), server_options, service, EngineNeeds(gpus=2, cpus=3, memory_bytes=GIB))


def test_number_is_fixed_or_scaled_by_open_requests() -> None:
    fixed = deployment(ServiceOptions(num_replicas=2, max_replicas=2), {})
    assert fixed["num_replicas"] == 2 and "autoscaling_config" not in fixed
    scaled = deployment(ServiceOptions(num_replicas=1, max_replicas=4), {}, max_num_seqs=64)
    expected = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 64}
    assert scaled["autoscaling_config"] == expected and "num_replicas" not in scaled


def test_deployment_has_the_resources_and_the_drain_and_queue_of_the_server() -> None:
    found = deployment(ServiceOptions(num_replicas=1), {"drain_s": 7, "max_queue": 100}, max_num_seqs=8)
    environment = {"env_vars": {"OMP_NUM_THREADS": "3"}}
    resources = {"num_cpus": 3, "num_gpus": 2, "memory": GIB, "runtime_env": environment}
    assert found["ray_actor_options"] == resources
    assert found["graceful_shutdown_timeout_s"] == 7 and found["max_queued_requests"] == 100
    assert found["max_ongoing_requests"] > 108  # a replica's own queue refuses before Serve does
    assert found["request_router_config"]["request_router_kwargs"] == {"max_queue_gap": 8}


def test_serve_names_the_flag_that_is_to_blame(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "demo", "--max-replicas", "3"]) == 2
    assert "--max-replicas=3 needs --num-replicas" in capsys.readouterr().err


def test_without_ray_num_replicas_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; from nanovllm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", "--model", "demo", "--num-replicas", "2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'nanovllm[ray]'" in done.stderr, done.stderr


def test_what_needs_no_cluster_loads_no_ray() -> None:
    names = ("front", "options", "resources", "routing")
    modules = ", ".join(f"nanovllm.cluster.{name}" for name in names)
    code = f"import sys, nanovllm.cli.main, nanovllm.server.lifecycle, {modules}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
