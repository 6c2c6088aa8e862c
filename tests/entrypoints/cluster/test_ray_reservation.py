"""GPUs that Ray gives the ranks, on a machine that claims four, and engines in scripts and in Ray actors."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from checked_engine import cache_options, greedy
from rank_processes import is_gone, wait_until, worker_pids_of
from ray.cluster_utils import Cluster
from ray_cluster import small_cluster
from tiny_models import write_tiny_model

from nanovllm import LLM
from nanovllm.errors import ConfigError, WorkerDiedError
from nanovllm.executor.ray_reservation import devices_from_ray, has_reservations, visible_devices

LONG_S = 30.0
SAME_IMPORTS = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
BY_RAY = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


def test_visible_devices_are_the_indices_among_the_visible_gpus() -> None:
    for gpu_id, visible, index in (
        ("0", None, 0),
        ("3", None, 3),
        ("3", "3", 0),
        ("3", "2,3", 1),
        ("0", "1,0", 1),  # torch counts in the order of the variable
        ("GPU-aa", "GPU-bb,GPU-aa", 1),
        ("MIG-aa", "MIG-aa", 0),
        ("3", "0,1,2,3", 3),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES
    ):
        assert visible_devices([gpu_id], visible) == [torch.device("cuda", index)]
    for gpu_id, visible in (("2", "0,1"), ("1", ""), ("GPU-aa", None), ("1", "11")):
        with pytest.raises(ConfigError, match=rf"reserved GPU {gpu_id} .*CUDA_VISIBLE_DEVICES=.*; give it the"):
            visible_devices([gpu_id], visible)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with small_cluster(num_gpus=4) as cluster:
        yield cluster


def test_two_engines_of_scripts_share_no_gpu_and_a_third_finds_none(cluster: Cluster) -> None:
    with ExitStack() as stack, devices_from_ray("cuda", 2, LONG_S) as second:
        with devices_from_ray("cuda", 2, LONG_S) as first:
            assert sorted(device.index for device in (*first, *second)) == [0, 1, 2, 3]
            with pytest.raises(ConfigError, match=r"needs 2 GPUs and 2 CPUs for 2 ranks.*within 1 s"):
                stack.enter_context(devices_from_ray("cuda", 2, 1.0))
        assert set(stack.enter_context(devices_from_ray("cuda", 2, LONG_S))) == set(first)
        assert has_reservations()
    assert not has_reservations()


def test_gpus_that_are_not_there_or_not_seen_are_refused_and_given_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(ConfigError, match="needs 8 GPUs and 8 CPUs for 8 ranks, and Ray has 4 GPUs and 16 CPUs"),
        devices_from_ray("cuda", 8),
    ):
        pass
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    with (
        pytest.raises(ConfigError, match=r"reserved GPU \d for this engine, .*CUDA_VISIBLE_DEVICES='9'"),
        devices_from_ray("cuda", 2),
    ):
        pass
    assert not has_reservations()


def test_engine_in_a_task_has_the_gpus_of_the_task(cluster: Cluster) -> None:
    def place(size: int) -> tuple[list[torch.device], bool]:
        with devices_from_ray("cuda", size) as devices:
            return devices, has_reservations()

    task = ray.remote(place).options(num_gpus=2, runtime_env=SAME_IMPORTS)
    assert ray.get(task.remote(2)) == ([torch.device("cuda", 0), torch.device("cuda", 1)], False)
    with pytest.raises(ConfigError, match=r"holds 2 GPUs, and tensor_parallel_size=3 needs 3; give it num_gpus=3"):
        ray.get(task.remote(3))


class Engine:
    def __init__(self, model: Path, **options: Any) -> None:
        self.llm = LLM(str(model), device="cpu", dtype="float32", **cache_options(None), **options)

    def answer(self, prompt: list[int]) -> list[int]:
        return self.llm.generate([prompt], greedy(), use_tqdm=False)[0]["token_ids"]

    def worker_pids(self) -> list[int]:
        return worker_pids_of(self.llm.engine.executor)


def test_engines_answer_and_their_ranks_end_with_them(cluster: Cluster, tmp_path: Path) -> None:
    """One in this script, which closes its engine or loses a rank, and one in an actor, which is killed."""
    model, prompt = write_tiny_model(tmp_path), list(range(50))
    expected = Engine(model).answer(prompt)
    here = Engine(model, **BY_RAY)
    assert here.answer(prompt) == expected and has_reservations()
    (worker,) = here.worker_pids()
    here.llm.close()
    assert is_gone(worker) and not has_reservations()
    dying = Engine(model, **BY_RAY)
    os.kill(dying.worker_pids()[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rank 1 died with signal SIGKILL"):
        dying.answer(prompt)
    assert not has_reservations()
    actor = ray.remote(Engine).options(num_cpus=1, runtime_env=SAME_IMPORTS).remote(model, **BY_RAY)
    assert ray.get(actor.answer.remote(prompt)) == expected
    (worker,) = ray.get(actor.worker_pids.remote())
    assert not is_gone(worker)
    ray.kill(actor)
    assert wait_until(lambda: is_gone(worker), timeout_s=30)
