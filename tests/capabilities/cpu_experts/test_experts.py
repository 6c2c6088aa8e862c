"""Experts on the CPU: every kernel and type of weight against fp64."""

import itertools
import random
import re
from dataclasses import replace

import pytest
import torch
from cpu_attention_cases import memory_before_guard_page
from cpu_experts_cases import Case
from tiers import RUNS_ALL

from nanovllm.capabilities.cpu_attention import build
from nanovllm.capabilities.cpu_attention.job import CpuKernel
from nanovllm.capabilities.cpu_experts import job as job_module
from nanovllm.capabilities.cpu_experts import store as store_module
from nanovllm.capabilities.cpu_experts.job import CExpertJob, scratch_bytes
from nanovllm.capabilities.cpu_experts.store import CExpertLayer, CMatrix
from nanovllm.plan import expert_formats as formats_module
from nanovllm.plan.expert_formats import TYPE_CODES, WEIGHT_TYPES
from nanovllm.utils.arithmetic import SWIGLU_ALPHA, SWIGLU_LIMIT

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def kernel(open_kernel, kernel_name: str) -> CpuKernel:
    """A kernel with two threads. Torch has one, because waking its threads for tiny products takes long."""
    return open_kernel(1 if kernel_name == "torch" else 2)


def test_each_type_and_dtype_is_as_exact_as_torch(kernel: CpuKernel) -> None:
    pairs = [*itertools.product(WEIGHT_TYPES, DTYPES)]
    for i, (name, dtype) in enumerate(pairs if RUNS_ALL else pairs[::2]):  # of each type, one or two
        activation = ("silu", "silu", "gelu_tanh")[i % 4 % 3]
        case = Case(name, dtype=dtype, seed=i, num_tokens=1 + i % 6, activation=activation)
        kernel.compute_experts(case.job, 0)
        case.check()


def test_biases_and_clamped_gates_of_each_type(kernel: CpuKernel) -> None:
    """Also with several tokens of an expert, which AMX multiplies together, and with columns as of gpt-oss: an odd
    number of blocks of 32.
    """
    for i, (name, block_type) in enumerate(WEIGHT_TYPES.items()):
        columns = 256 if block_type.num_values == 256 else 384 if block_type.num_values > 32 else 288
        shape = {"hidden_size": columns, "size": columns, "num_experts": 3}
        for dtype in DTYPES if RUNS_ALL else (DTYPES[i % 2],):
            given = {"seed": i, "num_tokens": 1 + 5 * (i % 2), "grouped": {"has_bias": True}}
            case = Case(name, dtype=dtype, activation="clamped_swiglu", **shape, **given)
            kernel.compute_experts(case.job, 0)
            case.check()
            assert (case.expected(0) - replace(case, activation="silu").expected(0)).abs().max() > 0.1


def test_sums_in_fp32_of_bf16_activations_are_close_to_the_reference(kernel: CpuKernel) -> None:
    """In bf16 the rounding of gate, up and hidden hides what the sums lose. The reference rounds at the same places, so
    only values that are rounded to another neighbour are left as differences. Errors of 0.1% in all weights fail.
    """
    for i, name in enumerate(WEIGHT_TYPES):
        case = Case(name, dtype=torch.bfloat16, out_dtype=torch.float32, seed=i, grouped={"has_zeros": True})
        case.job.run_in_torch(0)
        expected = case.job.out.clone()
        case.forget()
        kernel.compute_experts(case.job, 0)
        error = (case.job.out - expected).norm() / expected.norm()
        assert error < 3e-4, f"{name}: {error:.2g}"


def test_each_number_of_tokens(open_kernel, kernel_name: str) -> None:
    """Tokens of an expert are multiplied four at a time, then one by one, and 64 share a reading of the weights. With
    AMX, 3 to 16 tokens are multiplied together.
    """
    kernels = [open_kernel(num_threads) for num_threads in ((1,) if kernel_name == "torch" else (1, 2, 4))]
    more = [(name, torch.bfloat16) for name in ("INT4", "Q6_K", "Q5_1")] if "amx" in kernel_name else []
    for num_tokens in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 33, 63, 64) if RUNS_ALL else (1, 4, 7, 64):
        for name, dtype in (("Q4_K", torch.bfloat16), ("INT4", torch.float32), ("BF16", torch.bfloat16), *more):
            case = Case(name, dtype=dtype, num_tokens=num_tokens, num_chosen=3, seed=num_tokens)
            for kernel in kernels:
                case.forget()
                kernel.compute_experts(case.job, 0)
                case.check()


def test_more_tokens_than_share_a_reading(kernel: CpuKernel) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(
            "Q8_0", dtype=dtype, num_tokens=131, num_chosen=1, num_experts=1, absent=(), hidden_size=64, size=32
        )
        kernel.compute_experts(case.job, 0)
        case.check()


def test_each_type_with_many_tokens_of_an_expert(kernel: CpuKernel) -> None:
    """With AMX, columns that are not a multiple of 256 end in an incomplete step, where the type allows it."""
    for i, (name, block_type) in enumerate(WEIGHT_TYPES.items()):
        hidden_size, size = (512, 256) if block_type.num_values == 256 else (384, 128)
        shape = {"hidden_size": hidden_size, "size": size, "num_experts": 2, "absent": ()}
        case = Case(name, dtype=torch.bfloat16, num_tokens=5 + i % 9, num_chosen=2, seed=i, **shape)
        kernel.compute_experts(case.job, 0)
        case.check()


@pytest.mark.parametrize("name", ["INT4", "INT8", "E4M3"])
def test_groups_and_zeros(kernel: CpuKernel, name: str) -> None:
    """Groups of one slice and of several, of a whole block, of a whole row, and of one and a half blocks."""
    for i, (group_size, has_zeros) in enumerate(itertools.product((32, 64, 128, 192, 384), (False, True))):
        if name == "E4M3" and group_size == 32:
            continue
        grouped = {"group_size": group_size, "has_zeros": has_zeros}
        for dtype in DTYPES if RUNS_ALL else (DTYPES[i % 2],):
            case = Case(name, dtype=dtype, hidden_size=384, size=384, num_experts=3, seed=i, grouped=grouped)
            kernel.compute_experts(case.job, 0)
            case.check()


def test_types_differ_among_gate_up_and_down(kernel: CpuKernel) -> None:
    cases = (("Q4_K", "Q4_K", "Q6_K"), ("F16", "Q5_K", "Q4_1"), ("Q4_0", "F32", "Q8_0"), ("IQ4_XS", "Q5_1", "F16"))
    for (gate, up, down), dtype in itertools.product(cases, DTYPES):
        case = Case(gate, up, down, dtype=dtype, num_tokens=5)
        kernel.compute_experts(case.job, 0)
        case.check()


def test_output_in_fp32(kernel: CpuKernel) -> None:
    for dtype in DTYPES:
        case = Case("Q4_K", dtype=dtype, out_dtype=torch.float32)
        kernel.compute_experts(case.job, 0)
        case.check()


def test_absent_experts_and_numbers_out_of_range_are_skipped(kernel: CpuKernel) -> None:
    case = Case("Q4_0", absent=(0, 2, 5), num_tokens=6, num_chosen=4)
    case.job.experts[0] = torch.tensor([0, 2, 5, 0])  # no expert in CPU memory
    case.job.experts[1] = torch.tensor([3, -1, 6, 2**31 - 1])
    case.job.experts[2] = torch.tensor([-(2**31), 4, 1, 3])
    kernel.compute_experts(case.job, 0)
    case.check()
    assert not case.job.out[0].any()
    case.job.experts[:] = 2
    case.forget()
    kernel.compute_experts(case.job, 0)
    assert not case.job.out.any()


def test_layer_without_experts_gives_zeros(kernel: CpuKernel) -> None:
    case = Case("BF16", absent=range(6))
    kernel.compute_experts(case.job, 0)
    assert not case.job.out.any()


def test_expert_chosen_twice_counts_twice(kernel: CpuKernel) -> None:
    case = Case("Q8_0", num_tokens=4, num_chosen=3)
    case.job.experts[:] = torch.tensor([3, 3, 0])
    case.job.weights[:] = 0.25
    kernel.compute_experts(case.job, 0)
    case.check()


def test_layers_have_their_own_weights(kernel: CpuKernel) -> None:
    case = Case("Q5_0", num_layers=3)
    for layer in (2, 0, 1):
        case.forget()
        kernel.compute_experts(case.job, layer)
        case.check(layer)


def test_result_does_not_depend_on_the_number_of_threads(open_kernel) -> None:
    """Nor on who does what: each number is summed by one thread in one order."""
    if open_kernel().name == "torch":
        pytest.skip("torch divides the products among its threads")
    case = Case("Q4_K", dtype=torch.bfloat16, out_dtype=torch.float32, num_tokens=9, num_chosen=4)
    results = []
    for num_threads in (1, 2, 3, 4) * 3:
        case.forget()
        open_kernel(num_threads).compute_experts(case.job, 0)
        results.append(case.job.out.clone())
    assert all(torch.equal(result, results[0]) for result in results)


def test_token_gives_the_same_alone_and_among_others(kernel: CpuKernel) -> None:
    """Up to rounding: with several tokens the order of the sums may differ."""
    many = Case("Q6_K", num_tokens=8, num_chosen=3)
    kernel.compute_experts(many.job, 0)
    alone = Case("Q6_K", num_tokens=1, num_chosen=3)
    for token in range(8):
        alone.job.x.copy_(many.job.x[token : token + 1])
        alone.job.experts.copy_(many.job.experts[token : token + 1])
        alone.job.weights.copy_(many.job.weights[token : token + 1])
        alone.forget()
        kernel.compute_experts(alone.job, 0)
        alone.check()
        torch.testing.assert_close(alone.job.out[0], many.job.out[token], rtol=1e-5, atol=1e-5)


def test_large_gates_neither_overflow_nor_vanish(kernel: CpuKernel) -> None:
    for dtype, factor in itertools.product((torch.float32, torch.bfloat16), (60.0, 1e4)):
        case = Case("F32", dtype=dtype, num_tokens=4)
        case.job.x.mul_(factor)
        kernel.compute_experts(case.job, 0)
        case.check()


def test_nan_in_one_token_stays_in_it(kernel: CpuKernel) -> None:
    for name, dtype in itertools.product(("Q4_K", "BF16", "INT4"), DTYPES):
        case = Case(name, dtype=dtype, num_tokens=5, absent=())
        case.job.x[2, 100] = torch.nan
        kernel.compute_experts(case.job, 0)
        assert case.job.out[2].isnan().all() and not case.job.out[[0, 1, 3, 4]].isnan().any()


def test_random_jobs(open_kernel) -> None:
    kernels = [open_kernel(num_threads) for num_threads in (1, 3)]
    draw = random.Random(0)
    for seed in range(120 if RUNS_ALL else 12):
        num_experts = draw.randint(1, 9)
        names = [draw.choice(list(WEIGHT_TYPES)) for _ in range(3)]
        unit = max(WEIGHT_TYPES[name].num_values for name in names)
        case = Case(
            *names,
            dtype=draw.choice(DTYPES),
            num_tokens=draw.randint(1, 20),
            num_chosen=draw.randint(1, num_experts),
            hidden_size=max(unit, 64) * draw.randint(1, 3),
            size=max(unit, 64) * draw.randint(1, 3),
            num_experts=num_experts,
            absent=draw.sample(range(num_experts), draw.randint(0, num_experts - 1)),
            seed=seed,
            grouped={"group_size": 64, "has_zeros": draw.random() < 0.5},
        )
        draw.choice(kernels).compute_experts(case.job, 0)
        case.check()


@pytest.mark.slow
def test_nothing_is_read_after_the_weights(kernel: CpuKernel) -> None:
    """The last row of the last expert's down ends before a page that must not be read."""
    for name, dtype in itertools.product(WEIGHT_TYPES, (torch.float32, torch.bfloat16)):
        case = Case(name, dtype=dtype, num_tokens=5)
        with memory_before_guard_page(case.store.memory.nbytes) as memory:
            guarded = Case(name, dtype=dtype, num_tokens=5, memory=memory)
            kernel.compute_experts(guarded.job, 0)
            guarded.check()


def test_structs_are_those_of_the_sources() -> None:
    def names_in(file: str, struct: str) -> list[str]:
        text = (build.EXPERT_SOURCES / file).read_text()
        match = re.search(rf"struct {struct} \{{(.*?)\n(?:\n|\}};)", text, re.S)
        assert match is not None
        lines = [re.sub(r"//.*", "", line) for line in match[1].splitlines()]
        return [name for line in lines for name in re.findall(r"(\w+)\s*[,;]", line)]

    for file, name, struct in (
        ("formats.h", "Matrix", CMatrix),
        ("experts.h", "ExpertLayer", CExpertLayer),
        ("experts.h", "ExpertJob", CExpertJob),
    ):
        assert names_in(file, name) == [field[0] for field in struct._fields_], name


def test_constants_are_those_of_the_sources() -> None:
    formats, experts = ((build.EXPERT_SOURCES / name).read_text() for name in ("formats.h", "experts.h"))
    enum = re.search(r"enum WeightType : int64_t \{(.*?)\};", formats, re.S)
    assert enum is not None
    numbers = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", enum[1])}
    assert numbers == {block_type.name: number for block_type, number in TYPE_CODES.items()}
    for text, name, value in (
        (formats, "SLICE", formats_module.SLICE),
        (formats, "SLICE", job_module._SLICE),
        (formats, "MAX_INT4_ZERO", store_module._MAX_INT4_ZERO),
        (experts, "HIDDEN_ROWS", formats_module.ROW_MULTIPLE),
        (experts, "SWIGLU_ALPHA", f"{SWIGLU_ALPHA}f"),
        (experts, "SWIGLU_LIMIT", f"{SWIGLU_LIMIT}f"),
    ):
        assert re.search(rf"\b{name} = {value}[,;]", text), name


def test_scratch_is_as_large_as_the_kernels_use(kernel: CpuKernel) -> None:
    """Every expert is used, and the bytes after the scratch memory stay as they are."""
    for name in ("Q4_K", "F32"):
        case = Case(name, dtype=torch.bfloat16, num_tokens=7, num_chosen=5, num_experts=5, absent=())
        num_bytes = scratch_bytes(7, 5, 256, 256, 5)
        memory = torch.full((num_bytes + 4096,), 0x5A, dtype=torch.uint8)
        job = job_module.ExpertJob(
            case.store,
            x=case.job.x,
            experts=case.job.experts,
            weights=case.job.weights,
            out=case.job.out,
            scratch=memory[:num_bytes],
        )
        assert job.scratch.data_ptr() == memory.data_ptr()
        kernel.compute_experts(job, 0)
        case.check()
        assert (memory[num_bytes:] == 0x5A).all()
