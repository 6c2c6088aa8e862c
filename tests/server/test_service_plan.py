"""What the options of a service mean for Ray, without Ray."""

import subprocess
import sys
from typing import Any

import pytest

from nanovllm.cli.main import main
from nanovllm.cluster.service_options import ServiceOptions, check_engine
from nanovllm.cluster.service_plan import check_room, deployment_options, replica_resources
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.server.options import ServerOptions


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


@pytest.mark.parametrize(
    ("options", "num_cluster_gpus", "num_gpus"),
    [
        ({}, 0, 0),
        ({}, 8, 1),
        ({"tensor_parallel_size": 4}, 8, 4),
        ({"device": "cpu"}, 8, 0),
        ({"device": "cuda"}, 0, 1),
    ],
)
def test_replica_takes_a_gpu_for_each_rank(options: dict[str, Any], num_cluster_gpus: int, num_gpus: int) -> None:
    resources = replica_resources(config(**options), ServiceOptions(num_replicas=2, replica_cpus=3), num_cluster_gpus)
    assert resources["num_gpus"] == num_gpus and resources["num_cpus"] == 3 and "memory" not in resources
    assert resources["runtime_env"]["env_vars"] == {"OMP_NUM_THREADS": "3"}


def test_offload_reserves_its_memory() -> None:
    offload = config(enable_cpu_offload=True, cpu_memory_gb=8.0)
    assert replica_resources(offload, ServiceOptions(num_replicas=1), 1)["memory"] == 8 << 30


@pytest.mark.parametrize(
    ("nodes", "room"),
    [
        ([{"CPU": 8, "GPU": 2}], 1),
        ([{"CPU": 8, "GPU": 8}], 4),
        ([{"CPU": 8, "GPU": 1}, {"CPU": 8, "GPU": 1}], 0),  # a replica is on one node
        ([{"CPU": 3, "GPU": 8}, {"CPU": 8}], 1),
        ([], 0),
    ],
)
def test_replicas_that_do_not_fit_are_refused(nodes: list[dict[str, float]], room: int) -> None:
    resources = {"num_cpus": 2, "num_gpus": 2}
    if room:
        check_room(ServiceOptions(num_replicas=room), resources, nodes)
    with pytest.raises(ConfigError, match=f"room for {room} .a replica takes 2 CPU, 2 GPU.; lower num_replicas"):
        check_room(ServiceOptions(num_replicas=room + 1), resources, nodes)


def test_number_is_fixed_or_scaled_by_open_requests() -> None:
    fixed = deployment_options(config(), ServerOptions(), ServiceOptions(num_replicas=2, max_replicas=2))
    assert fixed["num_replicas"] == 2 and "autoscaling_config" not in fixed
    scaled = deployment_options(
        config(max_num_seqs=64), ServerOptions(), ServiceOptions(num_replicas=1, max_replicas=4)
    )
    expected = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 64}
    assert scaled["autoscaling_config"] == expected and "num_replicas" not in scaled


def test_drain_and_queue_are_those_of_the_server_options() -> None:
    options = ServerOptions(drain_s=7, max_queue=100)
    deployment = deployment_options(config(max_num_seqs=8), options, ServiceOptions(num_replicas=1))
    assert deployment["graceful_shutdown_timeout_s"] == 7 and deployment["max_queued_requests"] == 100
    assert deployment["max_ongoing_requests"] > 108  # a replica's own queue refuses before Serve does
    assert deployment["request_router_config"]["request_router_kwargs"] == {"max_queue_gap": 8}


def test_serve_names_the_flag_that_is_to_blame(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "demo", "--max-replicas", "3"]) == 2
    assert "--max-replicas=3 needs --num-replicas" in capsys.readouterr().err


def test_without_ray_num_replicas_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; from nanovllm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", "--model", "demo", "--num-replicas", "2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'nanovllm[ray]'" in done.stderr, done.stderr


def test_what_needs_no_cluster_loads_no_ray() -> None:
    names = "app_call front metrics_text prefix_routing request_keys service_options service_plan".split()
    modules = ", ".join(f"nanovllm.cluster.{name}" for name in names)
    code = f"import sys, nanovllm.cli.main, nanovllm.server.lifecycle, {modules}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
