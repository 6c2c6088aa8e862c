"""Which GPUs Ray gives the ranks, on a machine that claims four, and engines that are made inside Ray actors."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from checked_engine import cache_options, greedy
from rank_backends import is_gone, worker_pids_of
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_cluster import small_cluster
from test_worker_group import wait_until
from tiny_models import write_tiny_model

from nanovllm import LLM
from nanovllm.errors import ConfigError
from nanovllm.executor.ray_placement import Placement, has_reservations, own_device, own_gpu_ids, place_ranks, release
from nanovllm.executor.worker import Job

SHORT_S = 1.0
LONG_S = 30.0
GPU_RANK = {"GPU": 1, "CPU": 1}
SAME_IMPORTS = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with small_cluster(num_gpus=4) as cluster:
        yield cluster


def gpu_job(size: int = 2) -> Job:
    return Job(b"", size, "cuda", port=0, num_threads=1)


def on_rank(placement: Placement, rank: int) -> tuple[list[str], torch.device]:
    """The GPU of a rank, and what torch calls it there."""
    options = placement.options(rank) | {"runtime_env": SAME_IMPORTS}
    return ray.get(ray.remote(lambda: (own_gpu_ids(), own_device("cuda"))).options(**options).remote())


def test_two_engines_of_scripts_share_no_gpu_and_a_third_finds_none(cluster: Cluster) -> None:
    placements = [place_ranks(gpu_job(), LONG_S) for _ in range(2)]
    indices = [placement.rank_0_device.index for placement in placements]  # this process sees all GPUs
    for placement in placements:
        (gpu_id,), device = on_rank(placement, 1)
        indices.append(int(gpu_id))
        assert device == torch.device("cuda", 0)  # an actor sees only its own
    assert sorted(indices) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"needs 2 GPUs and 2 CPUs for 2 ranks.*within 1 s"):
        place_ranks(gpu_job(), SHORT_S)
    release(placements[0])
    again = place_ranks(gpu_job(), LONG_S)
    assert again.rank_0_device.index == indices[0]
    assert has_reservations()
    for placement in (placements[1], again):
        release(placement)
    assert not has_reservations()


def test_more_ranks_than_the_machine_has_gpus_are_refused_at_once(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="needs 8 GPUs and 8 CPUs for 8 ranks, and Ray has 4 GPUs and 16 CPUs"):
        place_ranks(gpu_job(8), LONG_S)


def test_gpu_that_the_script_does_not_see_is_refused_and_given_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    with pytest.raises(ConfigError, match=r"reserved GPU \d for this rank, .*CUDA_VISIBLE_DEVICES='9'"):
        place_ranks(gpu_job(), LONG_S)
    assert not has_reservations()


class Caller:
    """An actor that calls what it is given."""

    def call(self, function: Callable[[], Any]) -> Any:
        return function()


def place_in_actor() -> tuple[list[str], torch.device, list[str], bool]:
    placement = place_ranks(gpu_job(), LONG_S)
    (gpu_id,), device = on_rank(placement, 1)
    assert device == torch.device("cuda", 0)
    found = own_gpu_ids(), placement.rank_0_device, [gpu_id], placement.is_reserved
    release(placement)
    return found


def caller(**options: Any) -> Any:
    return ray.remote(Caller).options(runtime_env=SAME_IMPORTS, **options).remote()


@pytest.mark.parametrize("has_group", [True, False])
def test_engine_of_an_actor_has_the_actors_gpu_and_others_from_its_group(cluster: Cluster, has_group: bool) -> None:
    group = placement_group([GPU_RANK] * 2, strategy="STRICT_PACK")
    try:
        options = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group)} if has_group else {}
        actor = caller(num_cpus=1, num_gpus=1, **options)
        rank_0, device, rank_1, is_reserved = ray.get(actor.call.remote(place_in_actor))
        assert device == torch.device("cuda", 0) and rank_0 != rank_1
        assert is_reserved != has_group
        ray.kill(actor)
    finally:
        remove_placement_group(group)


def test_actor_that_holds_the_gpus_of_all_ranks_is_told_to_use_processes(cluster: Cluster) -> None:
    actor = caller(num_cpus=1, num_gpus=2)
    with pytest.raises(ConfigError, match=r"this Ray actor holds 2 GPUs.*use 'mp'"):
        ray.get(actor.call.remote(place_in_actor))
    ray.kill(actor)


def test_actor_whose_group_is_too_small_is_refused(cluster: Cluster) -> None:
    group = placement_group([GPU_RANK, {"CPU": 1}], strategy="STRICT_PACK")
    actor = caller(num_cpus=1, num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0))
    with pytest.raises(ConfigError, match="needs 2 bundles of 1 GPU and 1 CPU"):
        ray.get(actor.call.remote(place_in_actor))
    remove_placement_group(group)


class Engine:
    def __init__(self, model: Path, **options: Any) -> None:
        self.llm = LLM(str(model), device="cpu", dtype="float32", **cache_options(None), **options)

    def answer(self, prompt: list[int]) -> list[int]:
        return self.llm.generate([prompt], greedy(), use_tqdm=False)[0]["token_ids"]

    def worker_pids(self) -> list[int]:
        return worker_pids_of(self.llm)


def test_engine_in_an_actor_answers_and_its_ranks_end_with_it(cluster: Cluster, tmp_path: Path) -> None:
    model, prompt = write_tiny_model(tmp_path), list(range(50))
    expected = Engine(model).answer(prompt)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    actor = ray.remote(Engine).options(num_cpus=1, runtime_env=SAME_IMPORTS).remote(model, **ranks)
    assert ray.get(actor.answer.remote(prompt)) == expected
    (worker,) = ray.get(actor.worker_pids.remote())
    assert not is_gone(worker)
    ray.kill(actor)
    assert wait_until(lambda: is_gone(worker), timeout_s=30)
