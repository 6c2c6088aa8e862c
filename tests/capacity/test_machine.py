"""The table of GPUs: names, plausible figures, and the machines made from it."""

import pytest

from nanovllm.capacity.machine import GPUS, H200, LINK_PEAK_GB_PER_S, Machine, find_gpu, gpu_of_cuda_name
from nanovllm.errors import ConfigError

GIB = 2**30
# These share a CUDA name with a card of another size, which is the one that the name alone means
SAME_NAME = tuple(find_gpu(name) for name in ("RTX 3080 12GB", "RTX 4060 Ti 8GB", "RTX 5060 Ti 8GB"))


def test_find_gpu_any_spelling_is_found() -> None:
    cases: tuple[tuple[str, str], ...] = (
        *((gpu.name, gpu.name) for gpu in GPUS),
        *((f"NVIDIA {name}", gpu.name) for gpu in GPUS for name in gpu.cuda_names if gpu not in SAME_NAME),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("rtx 3060", "RTX 3060 12GB"),
        ("4060 Ti", "RTX 4060 Ti 16GB"),
        ("4060 ti 8gb", "RTX 4060 Ti 8GB"),
        ("4070 SUPER", "RTX 4070 SUPER"),
        ("RTX 3080", "RTX 3080 10GB"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX 4070 Laptop"),
        ("a100-80gb", "A100 80GB"),
        ("rtx_pro_6000", "RTX PRO 6000 Blackwell"),
        ("h100 sxm", "H100 SXM"),
    )
    for name, found in cases:
        assert find_gpu(name).name == found


def test_find_gpu_unknown_or_ambiguous_name_lists_the_known_ones() -> None:
    cases: tuple[str, ...] = ("H100", "A100", "RTX 5050", "RTX 5090 Laptop GPU", "MI300X", "")
    for name in cases:
        with pytest.raises(ConfigError, match=rf"gpu='{name}' is unknown; choose one of RTX 3060 12GB, .*, GH200, or"):
            find_gpu(name)
    with pytest.raises(ConfigError, match=r"gpu='v100' has compute capability 7\.0, but .* need 8\.0; choose one of"):
        find_gpu("v100")


def test_gpus_no_two_answer_to_one_name_and_figures_are_plausible() -> None:
    cuda_names = [name for gpu in GPUS if gpu not in SAME_NAME for name in gpu.cuda_names]
    assert len({gpu.name for gpu in GPUS}) == len(GPUS) and len(set(cuda_names)) == len(cuda_names)
    for gpu in GPUS:
        names = () if gpu in SAME_NAME else (*gpu.cuda_names, *gpu.aliases)
        assert all(find_gpu(name) is gpu for name in (gpu.name, *names))
        assert 7 < gpu.memory_gib < 200 and 200 < gpu.memory_gb_per_s < 10_000
        assert 20 < gpu.bf16_tflop_per_s < 3000 and (8, 0) <= gpu.capability <= (12, 0)
        link_byte_per_s = Machine.gpu(GIB, gpu).link_byte_per_s
        assert link_byte_per_s and 0.8 < link_byte_per_s / 1e9 / LINK_PEAK_GB_PER_S[gpu.link] < 1


def test_machine_has_the_rates_of_its_own_gpu() -> None:
    """Regression: a plan for another GPU kept the H200's rates."""
    machine = Machine.gpu(100 * GIB)
    assert (machine.gpu_bytes, machine.capability) == (139 * GIB, (9, 0))
    assert machine.link_byte_per_s == pytest.approx(54.6e9)
    assert (machine.memory_byte_per_s, machine.flop_per_s) == (4.3e12, 690e12)
    assert machine.link_source == "PCIe 5 x16, measured on an H200"
    machine = Machine.gpu(100 * GIB, find_gpu("RTX 4090"))
    assert machine.link_byte_per_s == pytest.approx(27.3e9)
    assert (machine.memory_byte_per_s, machine.flop_per_s) == (1008e9, 165.2e12)
    assert (machine.link_source, machine.rates_source) == ("PCIe 4 x16, projected", "data sheet")


def test_machine_found_has_its_own_memory_and_the_rates_of_its_name() -> None:
    machine = Machine.found_gpu(GIB, "NVIDIA GeForce RTX 4060 Ti", 8 * GIB, (8, 9))
    assert (machine.name, machine.gpu_bytes) == ("NVIDIA GeForce RTX 4060 Ti", 8 * GIB)
    assert machine.memory_byte_per_s == 288e9
    for gib, rate in ((9.7, 760e9), (11.7, 912e9)):  # two cards of one name
        machine = Machine.found_gpu(GIB, "NVIDIA GeForce RTX 3080", int(gib * GIB), (8, 6))
        assert machine.memory_byte_per_s == rate
    assert Machine.found_gpu(GIB, "NVIDIA H200", 140 * GIB, (9, 0)).flop_per_s == H200.bf16_tflop_per_s * 1e12


def test_machine_found_that_is_not_in_the_table_has_no_rates() -> None:
    cases: tuple[str, ...] = ("NVIDIA GeForce RTX 5050", "NVIDIA GeForce RTX 3060 Laptop GPU", "Graphics")
    for name in cases:
        assert gpu_of_cuda_name(name) is None
        machine = Machine.found_gpu(GIB, name, 16 * GIB, (8, 9))
        assert machine.gpu_bytes == 16 * GIB and machine.capability == (8, 9)
        assert machine.link_byte_per_s is machine.memory_byte_per_s is machine.flop_per_s is None


@pytest.mark.gpu
def test_find_machine_has_the_memory_of_the_gpu_here() -> None:
    import torch

    from nanovllm.config import Config
    from nanovllm.engine.setup import find_machine

    machine = find_machine(Config(model="m", device="cuda:0"))
    assert machine.gpu_bytes == torch.cuda.mem_get_info(0)[1]
    assert machine.capability == torch.cuda.get_device_capability(0)
    assert machine.name == torch.cuda.get_device_name(0)
    known = gpu_of_cuda_name(machine.name)
    if known is not None:  # the table is right about the GPU that runs this
        assert machine.capability == known.capability
        assert machine.gpu_bytes == pytest.approx(known.memory_gib * GIB, rel=0.02)
