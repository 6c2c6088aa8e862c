"""What Ray sets aside for ranks, and the device that a rank has then, for made-up machines and environments."""

import os

import pytest
import torch

from nanovllm.errors import ConfigError
from nanovllm.executor.rank_resources import (
    busy_machine_error,
    check_bundles,
    check_held,
    check_machine,
    rank_device,
    rank_environment,
    rank_resources,
)

GPU_RANK = {"GPU": 1.0, "CPU": 1.0}


def test_rank_resources_a_gpu_and_a_cpu_or_a_cpu_for_each_thread() -> None:
    assert rank_resources("cuda", num_threads=24) == GPU_RANK
    assert rank_resources("cpu", num_threads=3) == {"CPU": 3}


@pytest.mark.parametrize(
    ("gpu_id", "visible", "index"),
    [
        ("0", None, 0),
        ("3", None, 3),
        ("3", "3", 0),  # in an actor, which sees its own GPU only
        ("3", "2,3", 1),
        ("0", "1,0", 1),  # torch counts in the order of the variable
        ("GPU-aa", "GPU-bb,GPU-aa", 1),
        ("MIG-aa", "MIG-aa", 0),
        ("3", "0,1,2,3", 3),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES
    ],
)
def test_rank_device_is_the_index_among_the_visible_gpus(gpu_id: str, visible: str | None, index: int) -> None:
    assert rank_device("cuda", [gpu_id], visible) == torch.device("cuda", index)


def test_rank_device_cpu_asks_for_no_gpu() -> None:
    assert rank_device("cpu", [], None) == torch.device("cpu")


@pytest.mark.parametrize(("gpu_id", "visible"), [("2", "0,1"), ("1", ""), ("GPU-aa", None), ("1", "11")])
def test_rank_device_unseen_gpu_is_refused(gpu_id: str, visible: str | None) -> None:
    with pytest.raises(ConfigError, match=rf"reserved GPU {gpu_id} .*CUDA_VISIBLE_DEVICES=.*; give it the"):
        rank_device("cuda", [gpu_id], visible)


def test_rank_environment_shares_settings_and_import_path_but_not_gpus_or_tokens() -> None:
    environ = {"NCCL_P2P_DISABLE": "1", "HF_HOME": "/hf", "CUDA_VISIBLE_DEVICES": "3", "RAY_ADDRESS": "x", "HOME": "/"}
    environ["HF_TOKEN"] = environ["HF_HUB_TOKEN"] = "secret"
    assert rank_environment(environ, ["", "/lib"]) == {
        "NCCL_P2P_DISABLE": "1",
        "HF_HOME": "/hf",
        "PYTHONPATH": f"{os.getcwd()}{os.pathsep}/lib",
    }


@pytest.mark.parametrize("gpu_ids", [[], ["0", "1"]])
def test_check_held_other_than_one_gpu_is_refused_on_a_gpu_only(gpu_ids: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"holds {len(gpu_ids)} GPUs, .*num_gpus=1, or use 'mp'"):
        check_held("cuda", gpu_ids)
    check_held("cpu", gpu_ids)
    check_held("cuda", ["0"])


def test_check_bundles_counts_those_that_a_rank_fits_in() -> None:
    check_bundles(2, GPU_RANK, [GPU_RANK, GPU_RANK])
    with pytest.raises(ConfigError, match=r"needs 2 bundles of 1 GPU and 1 CPU .* has 1 here; make it \[.*\] \* 2"):
        check_bundles(2, GPU_RANK, [GPU_RANK, {"GPU": 1.0}])


def test_check_machine_too_small_is_refused() -> None:
    check_machine(2, GPU_RANK, {"GPU": 2.0, "CPU": 8.0, "memory": 1e9})
    with pytest.raises(ConfigError, match=r"needs 2 GPUs and 2 CPUs for 2 ranks, and Ray has 1 GPU and 8 CPUs"):
        check_machine(2, GPU_RANK, {"GPU": 1.0, "CPU": 8.0})
    with pytest.raises(ConfigError, match=r"Ray has 0 GPUs and 8 CPUs"):
        check_machine(2, GPU_RANK, {"CPU": 8.0})


def test_busy_machine_error_names_what_is_missing_and_how_long_it_waited() -> None:
    error = busy_machine_error(2, GPU_RANK, 30)
    assert "needs 2 GPUs and 2 CPUs for 2 ranks" in str(error) and "within 30 s" in str(error)
