"""Every Triton kernel compiled for the GPUs that people have, without one: does it fit, and does it load ahead?

The kernels were made for an H200 alone. For compute capability 12.0 the prefill kernel needed 192 KiB of shared memory
where a program may have 99, for 8.6 and 8.9 it needed 112 at head dim 256, and on 8.x it loaded keys and values by
narrow, synchronous loads.
"""

import importlib
import itertools
import os
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dense_model import state_rows
from offline_compiler import Compiled, compiling_for
from triton.runtime.jit import JITFunction

from nanovllm import kernels
from nanovllm.attention.base import PartialAttention, RunningMerge
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.checkpoint.gguf import TYPES
from nanovllm.checkpoint.quantization import BLOCK_TYPES, Quantization
from nanovllm.device.kernel_target import KNOWN_TARGETS, KernelTarget
from nanovllm.kernels import (
    decode,
    delta_net,
    embedding,
    expert_exchange,
    fused,
    gguf_pack,
    logit_edits,
    merge,
    packed_linear,
    packed_values,
    peer_sum,
    prefill,
    quantizing,
    read_experts,
    sampler,
    shadow,
    small_linear,
    window_rows,
)
from nanovllm.kernels.packed_words import DENSE, E4M3, INT4, INT8
from nanovllm.kernels.sampling_tensors import NUM_EDIT_COLUMNS, EditTensors, SamplingTensors
from nanovllm.kernels.state_tensors import DeltaWeights, LayerStates, StateSave
from nanovllm.layers.packed_weight import PackedWeight, packed
from nanovllm.plan.shadow_spec import SINK_TOKENS, ShadowSpec

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

PAGE = 256
PARKED_VALUES = 2  # that a loop may spill: ptxas does so to stay at a round number of registers
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PATHS = ("8.0", "8.6", "9.0", "10.0", "12.0")  # 8.9 has the choices and the PTX of 8.6


def rotating(number: int) -> KernelTarget:
    """The target of a test's choice `number`: all choices for all targets would take hours."""
    return list(KNOWN_TARGETS.values())[number % len(KNOWN_TARGETS)]


def kernel_names() -> set[str]:
    """Every kernel of the package."""
    names = set()
    for info in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        functions = vars(importlib.import_module(info.name)).values()
        names |= {f.fn.__name__ for f in functions if isinstance(f, JITFunction)}
    return {name for name in names if name.endswith("_kernel")}


def launch_prefill(
    head_dim: int,
    dtype: torch.dtype,
    max_query_len: int,
    causal: bool,
    heads: tuple[int, int],
    num_splits: int = 1,
    **window_and_sinks: Any,
) -> None:
    q, *caches, lens, tables = paged_inputs(head_dim, dtype, heads)
    inputs = q, *caches, torch.zeros(3, dtype=torch.int32), lens, tables
    prefill.paged_prefill(*inputs, max_query_len, scale=0.1, causal=causal, num_splits=num_splits, **window_and_sinks)


def launch_decode(
    head_dim: int,
    dtype: torch.dtype,
    num_splits: int,
    heads: tuple[int, int],
    max_query_len: int | None = None,
    causal: bool = True,
    **window_and_sinks: Any,
) -> None:
    """One query for each sequence, or up to `max_query_len`."""
    q, *paged = paged_inputs(head_dim, dtype, heads)
    few: dict[str, Any] = {}
    if max_query_len is not None:
        few = {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32), "max_query_len": max_query_len, "causal": causal}
    decode.paged_decode(q, *paged, scale=0.1, num_splits=num_splits, **few, **window_and_sinks)


def paged_inputs(head_dim: int, dtype: torch.dtype, heads: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    caches = torch.zeros(2, 2, PAGE, heads[1], head_dim, dtype=dtype)
    lens, tables = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    return torch.zeros(2, heads[0], head_dim, dtype=dtype), *caches, lens, tables


def launch_rotary(head_dim: int, dtype: torch.dtype, num_tokens: int, normed: bool, heads: tuple[int, int]) -> None:
    qkv = torch.zeros(num_tokens, heads[0] + 2 * heads[1], head_dim, dtype=dtype)
    weight = torch.zeros(head_dim, dtype=dtype) if normed else None
    _, *caches, _, _ = paged_inputs(head_dim, dtype, heads)
    for norms_v in (False, True) if normed else (False,):
        fused.norm_rotate_store(
            *qkv.split([heads[0], heads[1], heads[1]], dim=1),
            weight,
            weight,
            1e-6,
            torch.zeros(num_tokens, head_dim),
            *caches,
            torch.zeros(num_tokens, dtype=torch.int64),
            norms_v=norms_v,
        )


def launch_merge(head_dim: int, dtype: torch.dtype, num_tokens: int) -> None:
    """Two parts into the result, and with more to come the fp32 running result and two parts into that."""
    parts = [(torch.zeros(num_tokens, 4, head_dim, dtype=dtype), torch.zeros(4, num_tokens)) for _ in range(2)]
    merge.merge_into(*parts[0], parts)
    running = torch.zeros(num_tokens, 4, head_dim), torch.zeros(4, num_tokens)
    merge.merge_into(*running, [running, *parts])


def launch_layers(hidden_size: int, dtype: torch.dtype) -> None:
    """The kernels that know no heads."""
    x, weight = torch.zeros(2, hidden_size, dtype=dtype), torch.zeros(6, hidden_size, dtype=dtype)
    fused.rms_norm(x, weight[0], 1e-6)
    fused.add_rms_norm(x, x, weight[0], 1e-6)
    wide = torch.zeros(hidden_size)
    for scalar, following in ((None, wide), (weight[0, :1], None)):
        fused.norm_add_norm(x, x, wide, 1e-6, scalar=scalar, next_weight=following)
    fused.softcap(x, 30.0)
    for activation in ("silu", "gelu_tanh"):
        fused.act_and_mul(x, activation)
    fused.sigmoid_and_mul(x, x)
    fused.select_columns(x, torch.arange(hidden_size, dtype=torch.int32))
    for bias in (None, weight[0, :6]):
        small_linear.small_linear(x[:1], weight, bias)
        small_linear.small_gate_up(x[:1], weight, bias)
    small_linear.small_gate_up(x[:1], weight, None, activation="gelu_tanh")
    fused.choose_experts(small_linear.small_linear(x, weight, None, dtype=FP32), 4, norms=True)
    numbers = torch.zeros(256, dtype=torch.int32)
    inboxes = SimpleNamespace(addresses=numbers.long(), num_sums=numbers, gave_up=numbers, max_words=2**16)
    peer_sum.peer_sum(x, 1, 2, inboxes)  # type: ignore[arg-type]
    embedding.embed(numbers.long(), weight, 0)
    experts, weights = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    rows = expert_exchange.ExchangedRows(x, experts.int(), weights, x, numbers, numbers)
    for cells in (None, experts[:, 0]):
        expert_exchange.send(rows, 0, x, experts, weights, cells)
    expert_exchange.receive(rows, x)


def launch_sampler(vocab_size: int, dtype: torch.dtype) -> None:
    """Sample from logits as they are, and from edited ones, which are in fp32."""
    numbers, ids = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    params = SamplingTensors(numbers, ids, numbers, numbers, ids, ids)
    logits = torch.zeros(2, vocab_size, dtype=dtype)
    sampler.sample_tokens(logits, params)
    mask = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int32)
    penalties = {"repetition", "frequency", "presence"}
    columns = [numbers if name in penalties else ids for name in EditTensors._fields[:NUM_EDIT_COLUMNS]]
    short = ids.int()
    edits = EditTensors(*columns, short, short, short, numbers, mask, mask)
    sampler.sample_tokens(logit_edits.edit_logits(logits, edits, ids), params)


PACKED_KINDS: dict[str, Callable[[int, torch.dtype], packed_values.Packed]] = {
    "plain": lambda size, dtype: packed_values.Packed(torch.zeros(256, size, dtype=dtype)),
    "int4": lambda size, _: packed_values.Packed(*packed_words(size, 4), INT4.value, FP16),
    "int4 in groups of 32": lambda size, _: packed_values.Packed(
        *packed_words(size, 4), INT4.value, BF16, group_size=32
    ),
    "int4 by row": lambda size, _: packed_values.Packed(*packed_words(size, 4), INT4.value, FP16, 1, size),
    "int8": lambda size, _: packed_values.Packed(*packed_words(size, 8), INT8.value, FP16),
    "int8 in groups of 64": lambda size, _: packed_values.Packed(
        *packed_words(size, 8), INT8.value, BF16, group_size=64
    ),
    "fp8": lambda size, _: packed_values.Packed(*fp8_words(size), E4M3.value, None, 128, 128),
    "fp8 in blocks": lambda size, _: packed_values.Packed(
        fp8_words(size)[0], torch.zeros(1, 8, size // 128), E4M3.value, None, 128, 128
    ),
    "fp8 by row": lambda size, _: packed_values.Packed(*fp8_words(size), E4M3.value, None, 1, size),
    "Q4_K": lambda size, _: blocks("Q4_K", size),
    "Q5_1": lambda size, _: blocks("Q5_1", size),
    "Q6_K": lambda size, _: blocks("Q6_K", size),
    "Q8_0": lambda size, _: blocks("Q8_0", size),
    "IQ4_XS": lambda size, _: blocks("IQ4_XS", size),
}


def blocks(name: str, size: int) -> packed_values.Packed:
    return packed(PackedWeight([256], size, BLOCK_TYPES[name]))


def packed_words(size: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.zeros(256, size * bits // 32, dtype=torch.int32)
    return words, packed_values.new_scales(256, size // 32, torch.int32)


def fp8_words(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    words, scales = packed_words(size, 8)
    return words, scales.float()


def launch_packed(
    kind: str,
    size: int,
    dtype: torch.dtype,
    gates: tuple[bool, ...] = (False, True),
    rows: tuple[int, ...] = (1, 16, 64),
    tiles: tuple[int, ...] = (16, 32, 64, 128),
) -> None:
    """A packed weight [256, size], all of it and as two experts."""
    weight = PACKED_KINDS[kind](size, dtype)
    x, experts = torch.zeros(64, size, dtype=dtype), torch.zeros(1, 2, dtype=torch.int64)
    for gated in gates:
        for num_rows in rows:
            packed_linear.products(x[:num_rows], weight, gated=gated)
        packed_linear.products(x[:1], weight, gated=gated, experts=experts, num_experts=2)
        if gated:
            packed_linear.products(x[:1], weight, gated=True, activation="gelu_tanh")
        for block_m in tiles:
            routing = packed_linear.route(experts, 2, block_m)
            packed_linear.products(x[:1], weight, gated=gated, routing=routing, factors=torch.zeros(2))
    if dtype != FP32:
        packed_linear.sum_of_experts(x[:2], weight, experts, 2, torch.zeros(1, 2))
    if weight.scales is not None:
        packed_values.unpack(weight, 0, torch.zeros(256, size, dtype=dtype))


def launch_quantize_weight(size: int, dtype: torch.dtype) -> None:
    quantizing.quantize_weight(torch.zeros(256, size, dtype=dtype), PACKED_KINDS["fp8 by row"](size, dtype), 0, 0)


def launch_read_experts() -> None:
    """A layer of 128 experts in CPU memory, in int4 with groups of 128."""
    with torch.device("cpu"):
        weight = PackedWeight([64] * 4, 256, Quantization(method="gptq", bits=4, block=(1, 128)))
    weight.choose_scales(BF16, "here")
    experts = torch.zeros(1, 8, dtype=torch.int64)
    divided = read_experts.divide(experts, None, num_experts=128, num_slots=4, share=128)
    read_experts.read_rows(
        torch.zeros(128, 64, 128, dtype=torch.uint8), divided.slot_experts, weight.codes.view(4, 64, -1)
    )
    rows, scales = gguf_pack.PartRows(0, 64, 64), torch.zeros(128, 64, 2)
    read_experts.arrange_scales(scales, None, packed(weight), rows, middle=8, experts=divided.slot_experts)


def launch_pack_blocks(names: Iterable[str]) -> None:
    for name in names:
        weight = blocks(name, 4096)
        row_bytes = next(4096 // each.num_values * each.num_bytes for each in TYPES.values() if each.name == name)
        rows = torch.zeros(64, row_bytes, dtype=torch.uint8)
        gguf_pack.pack_blocks(rows, weight, gguf_pack.PartRows(0, 32, 64), 0)


def launch_quantize_rows(hidden_sizes: Sequence[int], inner_sizes: Sequence[int]) -> None:
    """The kernels that compute rows and quantize them, which need a GPU with fp8."""
    for size in hidden_sizes:
        x, weight = torch.zeros(70, size, dtype=BF16), torch.zeros(size, dtype=BF16)
        quantizing.rms_norm_and_quantize(x, None, weight, 1e-6)
        quantizing.rms_norm_and_quantize(x, x.clone(), weight.float(), 1e-6)
    for size in inner_sizes:
        quantizing.act_and_quantize(torch.zeros(70, 2 * size, dtype=BF16))


def launch_shadow(head_dim: int, dtype: torch.dtype, bits: int) -> None:
    num_heads, num_kv_heads = 28, 4
    cache, tables = torch.zeros(1, 1, 256, num_kv_heads, head_dim, dtype=dtype), torch.zeros(1, 2, dtype=torch.int32)
    q = torch.zeros(1, num_heads, head_dim, dtype=dtype)
    spec = ShadowSpec(bits=bits, page_size=256, num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim)
    pages = torch.zeros(1, 1, num_kv_heads, spec.head_words, dtype=torch.int32)
    sinks = torch.zeros(1, 2, SINK_TOKENS, num_kv_heads, head_dim, dtype=FP16)
    shadow.quantize(cache, cache, pages, spec, tables)
    shadow.attend(q, pages[0], sinks, spec, tables[0], tables, 131072, 0.1, num_sms=132)


def launch_delta_net(heads: tuple[int, int], key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """One token in few rows and in many, and a chunk with a save. heads: of keys and of values."""
    key_heads, value_heads = heads
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    weights = DeltaWeights(
        torch.zeros(4, channels, dtype=dtype),
        torch.zeros(value_heads),
        torch.zeros(value_heads),
        torch.zeros(value_dim, dtype=dtype),
        1e-6,
        key_heads,
        key_dim,
    )
    conv = torch.zeros(2, 3, channels, dtype=dtype)
    matrix, pending = torch.zeros(2, value_heads, key_dim, value_dim), torch.zeros(2, 4, channels + 2 * value_heads)
    for num_tokens, saves in (([1], ()), ([1] * 64, ()), ([100], [StateSave(0, 64, 1)])):
        ones, zeros, num_rows = [1] * len(num_tokens), [0] * len(num_tokens), sum(num_tokens)
        rows = state_rows(num_tokens, ones, ones, zeros, zeros, saves)
        qkvz = torch.zeros(num_rows, channels + value_heads * value_dim, dtype=dtype)
        qkv, z = qkvz.split((channels, value_heads * value_dim), dim=1)
        ba = torch.zeros(num_rows, 2 * value_heads, dtype=dtype)
        delta_net.delta_net(qkv, z, ba, LayerStates(conv, matrix, pending.to(dtype), rows), weights)


def faults(kernel: Compiled, target: KernelTarget) -> Iterator[str]:
    """Yield what slows a kernel down: too much shared memory, spilled registers, tiles loaded synchronously, and
    operands of products with few rows that pass through shared memory.

    Of the attention kernels only the queries may be loaded through registers; keys and values go to shared memory, by
    TMA or in copies of 16 bytes a thread.
    """
    if kernel.shared_bytes > target.shared_bytes:
        yield f"needs {kernel.shared_bytes} bytes of shared memory"
    if (num_spills := kernel.num_spills_in_loops()) > PARKED_VALUES:
        yield f"loads or stores {num_spills} spilled registers in loops"
    is_packed = kernel.name == "products_kernel" and kernel.constants["KIND"] != DENSE.value
    if is_packed and re.search(r"wgmma\.wait_group\.sync\.aligned [1-9]", kernel.ptx):
        yield "overwrites values that the tensor cores still read"
    if kernel.name in ("few_products_kernel", "one_row_kernel"):
        sums_bytes = 4 * 16 * kernel.constants.get("BLOCK_M", 8) * kernel.constants["num_warps"]
        if kernel.shared_bytes > sums_bytes:  # which depends on the layouts that Triton chooses
            yield f"needs {kernel.shared_bytes} bytes of shared memory where the sums take {sums_bytes}"
    if kernel.name not in ("_prefill_kernel", "_decode_kernel"):
        return
    if kernel.num_tile_loads != 1:
        yield "loads keys or values through registers"
    if kernel.constants["D"] < 64:  # only the models of tests; fewer than 16 bytes of a tile for each thread
        return
    by_tma = bool(kernel.constants.get("TMA"))
    if by_tma != ("cp.async.bulk.tensor" in kernel.ptx) or by_tma == ("cp.async.cg.shared.global" in kernel.ptx):
        yield "does not load as it was told"
    if "cp.async.ca" in kernel.ptx:
        yield "copies less than 16 bytes at a time"


def check(compiled: list[Compiled], target: KernelTarget) -> None:
    assert compiled
    distinct = {kernel.kernel.hash: kernel for kernel in compiled}.values()
    found = [f"{kernel}: {fault}" for kernel in distinct for fault in faults(kernel, target)]
    assert not found, "\n".join(found)


def test_largest_kernels_fit_the_least_shared_memory() -> None:
    """For the first tier: kernels of attention, packed weights and recurrent layers, which come closest to limits."""
    with compiling_for(target := KNOWN_TARGETS["8.6"]) as compiled:
        launch_prefill(128, BF16, 64, causal=True, heads=(16, 8), num_splits=5)
        launch_decode(128, BF16, num_splits=8, heads=(16, 8), max_query_len=16)
        launch_packed("int4", 4096, BF16, gates=(False,), rows=(1,), tiles=(128,))
        launch_delta_net((16, 32), 128, 128, BF16)
    check(compiled, target)


def launch_choices_of_the_target(head_dim: int, dtype: torch.dtype) -> None:
    """The kernels of attention whose tiles depend on the target, those with the most registers and shared memory."""
    launch_prefill(head_dim, dtype, max_query_len=4096, causal=True, heads=(28, 4))
    launch_prefill(head_dim, dtype, max_query_len=64, causal=False, heads=(28, 4), num_splits=5)
    most_heads = 32 if head_dim * dtype.itemsize < 2048 else 16  # that share keys: 32 of 2 KiB do not fit
    launch_decode(head_dim, dtype, num_splits=128, heads=(most_heads, 1))
    launch_decode(head_dim, dtype, num_splits=128, heads=(28, 4), max_query_len=16)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_kernels_fit_at_common_shapes(name: str) -> None:
    """Head dim 128 in bf16 (Qwen3, Llama 3): for two targets every kernel, for the others attention and states."""
    with compiling_for(target := KNOWN_TARGETS[name]) as compiled:
        launch_choices_of_the_target(128, BF16)
        launch_prefill(128, BF16, 64, causal=True, heads=(16, 8), num_splits=5)  # two heads in a tile
        launch_decode(128, BF16, num_splits=100, heads=(16, 8))
        launch_decode(128, BF16, num_splits=8, heads=(16, 8), max_query_len=16)
        launch_delta_net((16, 32), 128, 128, BF16)
        if name in ("8.6", "9.0"):
            launch_rotary(128, BF16, num_tokens=1, normed=True, heads=(16, 8))
            launch_merge(128, BF16, num_tokens=16)
            launch_layers(4096, BF16)
            launch_sampler(151936, BF16)
            launch_packed("int4", 4096, BF16, gates=(False,), rows=(1, 64), tiles=(128,))
            for size in (4096, 2816):  # all warps have as many blocks, and some warps have one less
                packed_linear.products(torch.zeros(1, size, dtype=BF16), PACKED_KINDS["Q6_K"](size, BF16))
            launch_quantize_weight(4096, BF16)
            launch_pack_blocks(["Q4_K"])
            launch_read_experts()
            launch_shadow(128, BF16, bits=4)
            rows = torch.zeros(64, dtype=torch.int32)
            window_rows.window_rows(torch.zeros(65, dtype=torch.int32), rows, rows, 1024, 128, 9, 900)
            only_fp8 = {"_rms_norm_and_quantize_kernel", "_act_and_quantize_kernel"}
            if name == "9.0":
                launch_quantize_rows((4096,), (12288,))
            assert {kernel.name for kernel in compiled} == kernel_names() - (set() if name == "9.0" else only_fp8)
    check(compiled, target)
    uses_pdl = {"griddepcontrol.wait" in kernel.ptx for kernel in compiled if kernel.name == "_decode_kernel"}
    assert uses_pdl == {target.has_dependent_launches}


@pytest.mark.slow
def test_sorted_experts_in_fp32_fit() -> None:
    """Regression: with the tiles of 16 bits they asked for more shared memory than any GPU has."""
    weight, experts = packed_values.Packed(torch.zeros(256, 4096)), torch.zeros(1, 2, dtype=torch.int64)
    with compiling_for(target := KNOWN_TARGETS["8.6"]) as compiled:
        routing = packed_linear.route(experts, 2, block_m=128)
        packed_linear.products(torch.zeros(1, 4096), weight, routing=routing, factors=torch.zeros(2))
    assert {kernel.name for kernel in compiled} == {"sort_by_expert_kernel", "products_kernel"}
    check(compiled, target)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8.6", "9.0", "12.0"])
def test_experts_with_biases_and_padded_rows_fit(name: str) -> None:
    """The experts of gpt-oss: rows of 2,880 columns in MXFP4, and the clamped gate."""
    with compiling_for(target := KNOWN_TARGETS[name]) as compiled:
        weight, bias = blocks("MXFP4", 2880), torch.zeros(256, dtype=BF16)
        assert weight.padding == 64
        x, experts, factors = torch.zeros(2, 2880, dtype=BF16), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2)
        clamped = {"gated": True, "activation": "clamped_swiglu"}
        packed_linear.products(x[:1], weight, bias, experts=experts, num_experts=2, **clamped)
        packed_linear.sum_of_experts(x, weight, experts, 2, factors, bias)
        for block_m in (16, 32, 64, 128):
            routing = packed_linear.route(experts, 2, block_m)
            packed_linear.products(x[:1], weight, bias, routing=routing, **clamped)
            packed_linear.products(x, weight, bias, routing=routing, factors=factors.flatten())
        packed_linear.products(x, weight, bias)
        packed_values.unpack(weight, 0, torch.zeros(256, 2880, dtype=BF16))
        rows = torch.zeros(64, 2880 // 32 * 17, dtype=torch.uint8)
        gguf_pack.pack_blocks(rows, weight, gguf_pack.PartRows(0, 32, 64), 0)
    check(compiled, target)


def launch_other_choices(head_dim: int, dtype: torch.dtype) -> None:
    """The other choices that the host functions make for this head dim and dtype, and group sizes of real models."""
    launch_prefill(head_dim, dtype, 64, causal=True, heads=(16, 8))
    launch_prefill(head_dim, dtype, 4096, causal=False, heads=(16, 8))
    launch_decode(head_dim, dtype, num_splits=1, heads=(28, 4))
    for heads, causal in (((8, 8), True), ((16, 8), False), ((64, 8), False)):
        launch_decode(head_dim, dtype, num_splits=8, heads=heads, max_query_len=16, causal=causal)
    for num_tokens, normed in ((1, True), (2048, False)):
        launch_merge(head_dim, dtype, num_tokens)
        launch_rotary(head_dim, dtype, num_tokens, normed, heads=(32, 8))


# Head dim, dtype and target; tiles depend on the next power of two of the head dim
ALL_CHOICES = [(64, BF16, "9.0"), (80, BF16, "12.0"), (256, BF16, "8.6"), (64, FP32, "8.0")]
LARGEST = [(16, BF16, "8.0"), (32, BF16, "12.0"), (64, BF16, "8.6"), (80, BF16, "9.0"), (96, BF16, "10.0")]
LARGEST += [(112, BF16, "8.6"), (128, FP16, "8.9"), (160, BF16, "8.0"), (160, BF16, "9.0"), (192, BF16, "12.0")]
LARGEST += [(256, BF16, "10.0"), (128, FP32, "8.6"), (160, FP32, "9.0"), (256, FP32, "8.9")]
LARGEST += [(512, BF16, name) for name in PATHS] + [(512, FP32, "8.6")]


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "dtype", "name"), ALL_CHOICES + LARGEST)
def test_attention_fits_at_other_shapes(head_dim: int, dtype: torch.dtype, name: str) -> None:
    with compiling_for(target := KNOWN_TARGETS[name]) as compiled:
        launch_choices_of_the_target(head_dim, dtype)
        if (head_dim, dtype, name) in ALL_CHOICES:
            launch_other_choices(head_dim, dtype)
    check(compiled, target)


# The layers with windows or sinks of gpt-oss and Gemma 4: heads, head dim, window, has sinks
LAYERS = [((64, 8), 64, 128, True), ((64, 8), 64, None, True), ((32, 16), 256, 1024, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_dim", "window", "has_sinks"), LAYERS)
@pytest.mark.parametrize("name", ["8.6", "9.0", "12.0"])
def test_windows_and_sinks_fit(
    name: str, heads: tuple[int, int], head_dim: int, window: int | None, has_sinks: bool
) -> None:
    given: Any = {"window": window, "sinks_H": torch.zeros(heads[0], dtype=BF16) if has_sinks else None}
    with compiling_for(target := KNOWN_TARGETS[name]) as compiled:
        launch_prefill(head_dim, BF16, 4096, causal=True, heads=heads, **given)
        launch_prefill(head_dim, BF16, 64, causal=True, heads=heads, num_splits=5, **given)
        launch_decode(head_dim, BF16, num_splits=8, heads=heads, **given)
        launch_decode(head_dim, BF16, num_splits=8, heads=heads, max_query_len=16, **given)
    check(compiled, target)


@pytest.mark.slow
def test_launch_kernels_leaves_no_prefill_kernel_and_no_merge_to_compile() -> None:
    """Whatever the lengths, the mask and the number of splits."""
    target, caches = KNOWN_TARGETS["9.0"], torch.zeros(2, PAGE, 8, 128, dtype=BF16)
    q_THD, sinks_H = torch.zeros(4096, 16, 128, dtype=BF16), torch.zeros(17, dtype=BF16)
    with compiling_for(target) as compiled:
        backend = TritonBackend()
        backend.launch_kernels(q_THD, caches)
        backend.launch_kernels(q_THD, caches, window=128, sinks_H=sinks_H[:16])
        known = {kernel.kernel.hash for kernel in compiled}
        compiled.clear()
        for num_parts, num_tokens in itertools.product((2, 3, 4, 7, 12, 41), (1, 77)):
            merged = RunningMerge(backend.merge, num_parts)
            for _ in range(num_parts):
                merged.add(PartialAttention(q_THD[:num_tokens].clone(), torch.zeros(16, num_tokens)))
        for causal in (True, False):
            for max_query_len, num_splits in ((17, 1), (64, 2), (300, 16), (2048, 32), (2049, 1), (4096, 1)):
                launch_prefill(128, BF16, max_query_len, causal, heads=(16, 8), num_splits=num_splits)
                if causal:  # any window, and sinks at any address
                    given: Any = {"window": max_query_len, "sinks_H": sinks_H[1:]}
                    launch_prefill(128, BF16, max_query_len, causal, heads=(16, 8), num_splits=num_splits, **given)
        for num_splits in (2, 5, 9, 31, 33, 128):
            launch_decode(128, BF16, num_splits, heads=(16, 8))
    new = {kernel.kernel.name for kernel in compiled if kernel.kernel.hash not in known}
    assert new == {"_decode_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "dtype", "bits", "name"),
    [
        *((64, BF16, 3, "8.0"), (96, BF16, 4, "10.0"), (112, FP32, 4, "9.0"), (128, BF16, 3, "8.6")),
        *((192, FP32, 4, "8.9"), (256, BF16, 3, "12.0")),  # 160, padded to 256, spills in 3 bits
    ],
)
def test_shadow_kernels_fit(head_dim: int, dtype: torch.dtype, bits: int, name: str) -> None:
    """Three bits take longer to compile than four."""
    with compiling_for(target := KNOWN_TARGETS[name]) as compiled:
        launch_shadow(head_dim, dtype, bits)
    check(compiled, target)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_packed_products_fit(kind: str) -> None:
    """Each kind of weight with all tiles, on one target. What differs only by its scales' groups has a few of them."""
    with compiling_for(target := rotating(1 + list(PACKED_KINDS).index(kind))) as compiled:
        if kind in ("plain", "int4", "int8", "fp8") or kind in BLOCK_TYPES:
            launch_packed(kind, 4096, BF16, gates=(False,), rows=(1,), tiles=(16, 128))
            launch_packed(kind, 4096, BF16, gates=(True,), rows=(16, 32, 64), tiles=(32, 64))
        else:
            launch_packed(kind, 4096, BF16, gates=(True,), rows=(16, 32, 64), tiles=(128,))
    check(compiled, target)


@pytest.mark.slow
def test_quantizing_of_rows_fits() -> None:
    for name in ("8.9", "9.0"):
        with compiling_for(target := KNOWN_TARGETS[name]) as compiled:
            for size, group in ((4096, 128), (4096, 4096), (12288, 12288)):
                quantizing.quantize_rows(torch.zeros(70, size, dtype=BF16), group)
            launch_quantize_rows((4096, 8192), (3072, 12288, 28672))
        check(compiled, target)
        rows_in_registers = [each for each in compiled if each.name != "_quantize_kernel"]
        assert len(rows_in_registers) == 7 and not any(each.stack_bytes() for each in rows_in_registers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int4 by row"])
def test_two_programs_of_a_wide_packed_product_fit_on_a_multiprocessor(kind: str) -> None:
    """Each takes 1 KiB more of shared memory than it asks for. There is nothing to spare."""
    x, weight = torch.zeros(256, 4096, dtype=BF16), PACKED_KINDS[kind](4096, BF16)
    tile = packed_linear.choose_tile(256, 24576 // 16, target := KNOWN_TARGETS["9.0"], x, weight)
    assert isinstance(tile, packed_linear.ManyRowsTile) and tile.num_per_sm == 2
    with compiling_for(target) as compiled:
        packed_linear.products(x, weight, gated=True, tile=tile)
    check(compiled, target)
    (kernel,) = compiled
    assert 2 * (kernel.shared_bytes + 1024) <= 228 * 1024 and kernel.stack_bytes() == 0


@pytest.mark.slow
def test_quantizing_of_weights_fits_and_is_exact() -> None:
    """One kernel, whatever the shapes: it is compiled while weights are loaded."""
    for name, dtype in (*((name, BF16) for name in PATHS), ("9.0", FP32), ("8.9", FP16)):
        with compiling_for(target := KNOWN_TARGETS[name]) as compiled:
            launch_quantize_weight(4096, dtype)
            if dtype == BF16:
                launch_quantize_weight(768, dtype)
        check(compiled, target)
        assert len({kernel.kernel.hash for kernel in compiled}) == 1
        for kernel in compiled:
            assert "div.rn.f32" in kernel.ptx and ".ftz" not in kernel.ptx, "subnormal numbers count"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8.6", "9.0"])
def test_packing_of_blocks_fits(name: str) -> None:
    """Each type of blocks, without a spilled register."""
    with compiling_for(target := KNOWN_TARGETS[name]) as compiled:
        launch_pack_blocks(BLOCK_TYPES)
    check(compiled, target)
    assert len(compiled) == len(BLOCK_TYPES) and not any(kernel.stack_bytes() for kernel in compiled)


# By dtype a target, and the hidden sizes of layers: their blocks are the next powers of two
SIZES = {BF16: ("10.0", (64, 3584, 12288)), FP16: ("12.0", (896, 8192, 12288)), FP32: ("8.9", (64, 1024, 12288))}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SIZES)
def test_delta_nets_and_layers_fit_at_other_shapes(dtype: torch.dtype) -> None:
    name, hidden_sizes = SIZES[dtype]
    with compiling_for(target := KNOWN_TARGETS[name]) as compiled:
        for heads, key_dim, value_dim in (((16, 48), 128, 128), ((2, 4), 64, 128), ((2, 4), 16, 16)):
            launch_delta_net(heads, key_dim, value_dim, dtype)
        for hidden_size in hidden_sizes:
            launch_layers(hidden_size, dtype)
        if dtype == FP16:
            launch_sampler(32000, dtype)
    check(compiled, target)
