"""Kernels are chosen by a GPU's capability and shared memory, not its name; and forcing another GPU's choices."""

import itertools

import pytest
import torch

from nanovllm.device import kernel_target
from nanovllm.device.kernel_target import INTERPRETER, KNOWN_TARGETS, KernelTarget

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_target_of_cpu_is_the_interpreter() -> None:
    target = kernel_target.target_of(CPU)
    assert target == INTERPRETER
    assert not target.has_dependent_launches and not target.has_shared_operands


def test_features_follow_the_capability() -> None:
    features = {(8, 0): (False, False), (8, 9): (False, False), (9, 0): (True, True)}
    features |= {(10, 3): (True, True), (12, 1): (True, False)}
    for capability, expected in features.items():
        target = KernelTarget(capability, 99 * 1024, 82)
        assert (target.has_dependent_launches, target.has_shared_operands) == expected


def test_configs_of_an_unknown_gpu_are_those_of_one_like_it() -> None:
    pytest.importorskip("triton")
    from nanovllm.kernels.configs import decode_config, prefill_config

    for capability, shared_kib, like in (((8, 7), 163, "8.0"), ((12, 1), 99, "12.0"), ((10, 3), 227, "10.0")):
        targets = KernelTarget(capability, shared_kib * 1024, 82), KNOWN_TARGETS[like]
        for head_dim, itemsize in itertools.product((64, 128, 256), (2, 4)):
            for query in ((1, 1), (1, 2), (2048, 1), (2048, 8), (2049, 1)):
                assert len({prefill_config(target, head_dim, itemsize, *query) for target in targets}) == 1
            assert len({decode_config(target, head_dim, itemsize, 16) for target in targets}) == 1


def test_force_target_changes_gpus_and_not_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from benchmarks.forced_target import force_target

    monkeypatch.setattr(kernel_target, "target_of", kernel_target.target_of)  # both are put back afterwards
    monkeypatch.setattr(triton.knobs.runtime, "override_arch", None)
    assert force_target("8.9") == KNOWN_TARGETS["8.9"] == kernel_target.target_of(CUDA)
    assert kernel_target.target_of(CPU) == INTERPRETER
    assert triton.knobs.runtime.override_arch == "sm89"


@pytest.mark.gpu
def test_target_of_gpu_is_what_the_tables_say(pytestconfig: pytest.Config) -> None:
    target = kernel_target.target_of(CUDA)
    major, minor = target.capability
    assert target.shared_bytes == KNOWN_TARGETS.get(f"{major}.{minor}", target).shared_bytes
    if not pytestconfig.getoption("--kernel-target"):
        assert target.capability == torch.cuda.get_device_capability()
        assert target.num_sms == torch.cuda.get_device_properties(CUDA).multi_processor_count
