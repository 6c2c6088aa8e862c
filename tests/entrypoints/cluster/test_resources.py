"""The options of a job and of a service as Ray gets them, without Ray."""

import subprocess
import sys
from typing import Any

import pytest

from nanovllm.capacity.machine import Machine
from nanovllm.config import Config
from nanovllm.entrypoints.cli.main import main
from nanovllm.entrypoints.cluster.resources import (
    BatchOptions,
    EngineNeeds,
    Node,
    ServiceOptions,
    check_engine,
    check_room,
    choose_device,
    default_num_engines,
    deployment_options,
    needs_ray,
    plan_placement,
    replica_needs,
    sizes_within,
)
from nanovllm.entrypoints.server.options import ServerOptions
from nanovllm.errors import ConfigError
from nanovllm.models.retrieval_model import build_retrieval_model

GIB = 2**30


def test_bad_options_are_refused() -> None:
    for options, complaint in (
        ({"num_replicas": 0}, "num_replicas=0 must be between 1 and 1024"),
        ({"num_replicas": 2, "max_replicas": 1}, "max_replicas=1 must be between num_replicas=2"),
        ({"num_replicas": 1, "replica_cpus": 0}, "replica_cpus=0 must be 1 or more"),
        ({"num_replicas": 1, "ray_address": "ray://host:10001"}, "must be host:port or auto"),
        ({"max_replicas": 2}, "max_replicas=2 needs num_replicas"),
        ({"replica_cpus": 2}, "replica_cpus=2 needs num_replicas"),
        ({"ray_address": "host:1"}, "ray_address='host:1' needs num_replicas"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            ServiceOptions(**options)
    for name, value in (
        ("num_engines", 0),
        ("num_engines", 10**6),
        ("document_column", ""),
        ("ray_address", "ray://x:1"),
        ("ray_address", "head"),
    ):
        with pytest.raises(ConfigError, match=name):
            BatchOptions(**{name: value})


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


def test_deployment_has_the_replicas_resources_drain_and_queue_of_the_options() -> None:
    fixed = deployment(ServiceOptions(num_replicas=2, max_replicas=2), {})
    assert fixed["num_replicas"] == 2 and "autoscaling_config" not in fixed
    scaled = deployment(ServiceOptions(num_replicas=1, max_replicas=4), {}, max_num_seqs=64)
    expected = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 64}
    assert scaled["autoscaling_config"] == expected and "num_replicas" not in scaled
    found = deployment(ServiceOptions(num_replicas=1), {"drain_s": 7, "max_queue": 100}, max_num_seqs=8)
    environment = {"env_vars": {"OMP_NUM_THREADS": "3"}}
    resources = {"num_cpus": 3, "num_gpus": 2, "memory": GIB, "runtime_env": environment}
    assert found["ray_actor_options"] == resources
    assert found["graceful_shutdown_timeout_s"] == 7 and found["max_queued_requests"] == 100
    assert found["max_ongoing_requests"] > 108  # a replica's own queue refuses before Serve does
    assert found["request_router_config"]["request_router_kwargs"] == {"max_queue_gap": 8}


def test_plan_placement_shares_gpus_and_cpus_out() -> None:
    nodes = [Node(16, 8, 100 * GIB), Node(16, 4, 100 * GIB), Node(8, 0, GIB)]
    assert default_num_engines(nodes, 2, "cuda") == 6
    needs = plan_placement(nodes, 6, 2, "cuda")
    assert (needs.gpus, needs.cpus) == (2, 3)
    with pytest.raises(ConfigError, match=r"room for 6 of num_engines=7: each needs 2 GPUs, 3 CPUs.*num_engines to 6"):
        plan_placement(nodes, 7, 2, "cuda")
    with pytest.raises(ConfigError, match=r"room for 0 of num_engines=1.*lower tensor_parallel_size"):
        plan_placement([Node(4, 1, GIB)], 1, 2, "cuda")
    with pytest.raises(ConfigError, match=r"each needs 2 GPUs, 3 CPUs and 40\.00 GiB of memory.*cpu_memory_gb"):
        check_room(EngineNeeds(gpus=2, cpus=3, memory_bytes=40 * GIB), [Node(16, 8, 30 * GIB)], 1)
    for num_engines, cpus in ((1, 8), (2, 8), (3, 4), (4, 4), (5, 2)):
        assert plan_placement([Node(8, 0, GIB), Node(8, 0, GIB)], num_engines, 1, "cpu").cpus == cpus


def test_choose_device() -> None:
    with_gpu, without = [Node(1, 0, 1), Node(1, 1, 1)], [Node(1, 0, 1)]
    assert choose_device("auto", with_gpu) == "cuda" and choose_device("auto", without) == "cpu"
    assert choose_device("cpu", with_gpu) == "cpu"
    with pytest.raises(ConfigError, match="device='cuda:1' names one GPU"):
        choose_device("cuda:1", with_gpu)


def test_plan_placement_gives_each_engine_the_largest_even_share_of_memory() -> None:
    large, small = Node(16, 8, 80 * GIB), Node(16, 8, 30 * GIB)
    for nodes, num_engines, share, per_node in (
        ([large], 1, 80, 1),
        ([large], 8, 10, 8),
        ([large, large], 2, 80, 1),
        ([large, small], 2, 40, 2),  # both on the large machine
        ([large, small], 4, 26, 3),  # an engine of the small machine can have 30
        ([Node(16, 8, 0)], 2, 0, 2),
    ):
        needs = plan_placement(nodes, num_engines, 1, "cuda")
        assert (needs.memory_bytes // GIB, needs.engines_per_node) == (share, per_node), (nodes, num_engines)


def sizes(machine: Machine, share_gib: float, **options: Any) -> dict[str, Any]:
    return sizes_within(int(share_gib * GIB), Config(model=str(build_retrieval_model()), **options), machine)


def test_sizes_keep_an_engine_within_its_share() -> None:
    """By default, each of two engines would take 70% of the available memory for its pool."""
    machine = Machine.gpu(host_bytes=100 * GIB)
    whole, half = (sizes(machine, share, enable_cpu_offload=True)["num_cpu_blocks"] for share in (8, 4))
    assert 0 < half == whole // 2
    scarce = sizes(Machine.gpu(host_bytes=4 * GIB), 8, enable_cpu_offload=True)  # what is free is less than that
    assert scarce["num_cpu_blocks"] == half
    assert sizes(machine, 50, enable_cpu_offload=True, cpu_memory_gb=20.0)["cpu_memory_gb"] is None
    with pytest.raises(ConfigError, match="memory is available"):
        sizes(machine, 12, enable_cpu_offload=True, cpu_memory_gb=20.0)
    few = sizes(Machine.cpu(10 * GIB), 4, device="cpu", num_kvcache_blocks=64)
    default = sizes(Machine.cpu(10 * GIB), 4, device="cpu")
    assert few["num_kvcache_blocks"] == 64 < default["num_kvcache_blocks"]
    for given, is_on_cpu in (("auto", False), (True, True)):  # the engine must not choose by the whole machine's memory
        assert sizes(machine, 8, embedding_on_cpu=given)["embedding_on_cpu"] is is_on_cpu


def test_serve_names_the_flag_that_is_to_blame(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "demo", "--max-replicas", "3"]) == 2
    assert "--max-replicas=3 needs --num-replicas" in capsys.readouterr().err


def test_without_ray_num_replicas_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; from nanovllm.entrypoints.cli.main import main; "
    code += "sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", "--model", "demo", "--num-replicas", "2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install --constraint constraints.txt '.[ray]'" in done.stderr, done.stderr


def test_needs_ray_only_for_several_engines_or_a_cluster() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
        ({}, {}, 0, ""),
        ({}, {}, 1, ""),
        ({}, {}, 2, "num_engines=2, the default on 2 GPUs (num_engines=1 does not need Ray),"),
        ({}, {"tensor_parallel_size": 2}, 3, ""),
        ({}, {"device": "cuda:1"}, 4, ""),
        ({}, {"device": "cpu"}, 4, ""),
        ({"num_engines": 1}, {}, 4, ""),
        ({"num_engines": 2}, {}, 1, "num_engines=2"),
        ({"num_engines": 1, "ray_address": "auto"}, {}, 1, "ray_address='auto'"),
    ]
    for options, config, num_gpus, reason in cases:
        assert needs_ray(BatchOptions(**options), Config(model="demo", **config), num_gpus) == reason
