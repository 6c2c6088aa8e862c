"""What Ray sets aside for the ranks of an engine, and which device a rank has then. Arithmetic, without Ray."""

import os
from collections.abc import Mapping, Sequence

import torch

from nanovllm.errors import ConfigError

# Settings that must be the same in every rank. A Ray worker otherwise has the environment in which Ray was started.
_SHARED_PREFIXES = ("NCCL_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "HF_", "OMP_", "MKL_", "XDG_CACHE_HOME")
_SET_BY_RAY = ("CUDA_VISIBLE_DEVICES",)


def rank_resources(device_type: str, num_threads: int) -> dict[str, float]:
    """A rank on a GPU needs the GPU and a CPU to drive it; on a CPU, as many CPUs as it has threads."""
    return {"GPU": 1, "CPU": 1} if device_type == "cuda" else {"CPU": num_threads}


def rank_environment(environ: Mapping[str, str], import_path: Sequence[str]) -> dict[str, str]:
    """What the other ranks must share with rank 0: such settings as those of NCCL, and where it imports from."""
    left_out = [*_SET_BY_RAY, *(name for name in environ if "TOKEN" in name)]  # Ray shows these settings to its users
    shared = {name: environ[name] for name in environ if name.startswith(_SHARED_PREFIXES) and name not in left_out}
    return shared | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in import_path)}


def rank_device(device_type: str, gpu_ids: Sequence[str], visible: str | None) -> torch.device:
    """The device of a rank that was given the GPU with Ray's id `gpu_ids[0]`.

    `visible` is the process's CUDA_VISIBLE_DEVICES: it names the GPUs that the process sees, by the same ids, in the
    order in which torch counts them. None: the process sees all. Raises ConfigError if it does not see this one.
    """
    if device_type != "cuda":
        return torch.device("cpu")
    (gpu_id,) = gpu_ids
    if visible is None and gpu_id.isdecimal():
        return torch.device("cuda", int(gpu_id))
    visible_ids = [] if visible is None else visible.split(",")
    if gpu_id not in visible_ids:
        raise ConfigError(
            f"Ray reserved GPU {gpu_id} for this rank, whose process does not see it (CUDA_VISIBLE_DEVICES="
            f"{'not set' if visible is None else visible!r}); give it the CUDA_VISIBLE_DEVICES that Ray started with"
        )
    return torch.device("cuda", visible_ids.index(gpu_id))


def check_held(device_type: str, gpu_ids: Sequence[str]) -> None:
    """Raise ConfigError unless the Ray actor that rank 0 runs in holds the GPU of rank 0, and no others."""
    if device_type == "cuda" and len(gpu_ids) != 1:
        raise ConfigError(
            f"this Ray actor holds {len(gpu_ids)} GPUs, but with distributed_executor_backend='ray' it must hold one, "
            "for rank 0, and the other ranks take theirs; give the actor num_gpus=1, or use 'mp', which runs all ranks "
            "on the GPUs of the actor"
        )


def check_bundles(size: int, needs: Mapping[str, float], bundles: Sequence[Mapping[str, float]]) -> None:
    """Raise ConfigError if a placement group has too few bundles on this machine. One of them is rank 0's."""
    fitting = [bundle for bundle in bundles if _fits(needs, bundle)]
    if len(fitting) < size:
        raise ConfigError(
            f"tensor_parallel_size={size} needs {size} bundles of {_names(needs)} on one machine, and the placement "
            f"group of this actor has {len(fitting)} here; make it [{dict(needs)}] * {size} with strategy STRICT_PACK"
        )


def check_machine(size: int, needs: Mapping[str, float], total: Mapping[str, float]) -> None:
    """Raise ConfigError if the machine could never hold `size` ranks. `total`: what Ray has on it."""
    all_ranks = {name: size * amount for name, amount in needs.items()}
    if not _fits(all_ranks, total):
        has = {name: total.get(name, 0) for name in needs}
        raise ConfigError(
            f"distributed_executor_backend='ray' needs {_names(all_ranks)} for {size} ranks, and Ray has {_names(has)} "
            "on this machine; lower tensor_parallel_size, start Ray with more, or use 'mp'"
        )


def busy_machine_error(size: int, needs: Mapping[str, float], waited_s: float) -> ConfigError:
    all_ranks = {name: size * amount for name, amount in needs.items()}
    return ConfigError(
        f"distributed_executor_backend='ray' needs {_names(all_ranks)} for {size} ranks. Ray has them on this machine, "
        f"but they were not free within {waited_s:.0f} s; end what uses them (`ray status`), or lower "
        "tensor_parallel_size"
    )


def _fits(needs: Mapping[str, float], room: Mapping[str, float]) -> bool:
    return all(room.get(name, 0) >= amount for name, amount in needs.items())


def _names(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}{'' if amount == 1 else 's'}" for name, amount in resources.items())
