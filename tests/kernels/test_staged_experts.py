"""Experts that are streamed to a GPU have the values that are in CPU memory: in Triton's interpreter, and on a GPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_engine import CheckedLLM, Reference, cache_options
from dense_model import random_prompt
from gguf_files import write_gguf
from interpreter import INTERPRETED, needs_triton, on_device
from mxfp4_files import write_mxfp4
from quantized_models import FORMATS, write_quantized
from simulated_streams import MODES, Mode, SimulatedStreams
from staged_experts import load_experts, make_staging, pack_on_cpu, staged_values, stored_values
from tiny_models import write_tiny_model

from nanovllm.capabilities.cpu_experts import staging as staging_module
from nanovllm.capabilities.cpu_experts.job import EXCHANGE_SIZE, ExpertJob
from nanovllm.capabilities.cpu_experts.layer import RankExperts
from nanovllm.capabilities.cpu_experts.link import ExpertLink
from nanovllm.capabilities.cpu_experts.staging import target_rows
from nanovllm.checkpoint.quantization import QUANTIZATIONS
from nanovllm.device.tp_group import TPGroup
from nanovllm.engine.setup import Internals
from nanovllm.layers.moe import Experts
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.offload.streams import make_streams

pytestmark = needs_triton
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
CHECKPOINTS = ("awq", "packed 4", "packed 8 channel", "gptq dynamic", "fp8 blocks", "fp8 tensor", "float channel")
MIXED = ("Q4_K Q6_K Q8_0", "Q6_K F16 Q4_K Q8_0", "BF16 Q4_0")  # types of matrices, in turn
WIDE = ("fp8 blocks", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", *MIXED)  # the blocks have up to 256 columns
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True}


def experts_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> RankExperts:
    """Load a mixture in a format; with types that differ between layers, three layers."""
    if INTERPRETED:
        pack_on_cpu(monkeypatch)
    num_layers, size = 3 if name in MIXED else 1, 256 if name in WIDE else 128
    sizes = {"hidden_size": size, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "vocab_size": 64}
    experts = EXPERTS | {"moe_intermediate_size": 256 if name == "int4" else size}
    path = write_tiny_model(tmp_path / "x", "qwen3_moe", num_layers=num_layers, experts=experts, **sizes)  # type: ignore[arg-type]
    if name in FORMATS:
        path, _ = write_quantized(path, tmp_path, name)
    elif name in (*BLOCKS, *MIXED):
        path = write_gguf(tmp_path / "x.gguf", path, types=name.split())
    tp = TPGroup(1, 2) if name == "int4" else TPGroup()
    quantization = name if name in QUANTIZATIONS else None
    return load_experts(path, tp=tp, dtype=DTYPE, device=device, quantization=quantization)


@on_device
@pytest.mark.parametrize("name", ["int4", "", "fp8", "fp8_dynamic", *CHECKPOINTS, *BLOCKS, *MIXED])
def test_staged_experts_have_the_values_in_cpu_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, name: str
) -> None:
    """Regression: scales that a row, or a block of rows, shares on the GPU had no place there. Types that differ
    between layers take turns in two buffers. Blocks arrive in pieces that end inside of experts.
    """
    if name in BLOCKS:
        monkeypatch.setattr(staging_module, "STAGED_PIECE_BYTES", 16_000)
    rank = experts_of(name, tmp_path, monkeypatch, device)
    staging = make_staging(rank)
    for number in range(len(rank.store.layers)):
        staged = staged_values(staging.experts(number))
        for values, matrix in zip(staged, rank.store.layers[number].matrices, strict=True):
            assert torch.equal(values, stored_values(matrix)) and values.std() > 0.01
        staging.multiplied(number)


@pytest.mark.slow
@on_device
def test_experts_are_streamed_again_after_kernels_were_only_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Regression: a layer was taken to be in its buffer although nothing had packed its blocks. It stayed wrong if no
    other layer used the buffer.
    """
    from nanovllm.kernels.launch import compiling_in

    rank = experts_of("Q4_K", tmp_path, monkeypatch, device)
    staging = make_staging(rank)
    with ThreadPoolExecutor(1) as threads, compiling_in(threads, None):
        staging.experts(0)
        staging.multiplied(0)
    for values, matrix in zip(staged_values(staging.experts(0)), rank.store.layers[0].matrices, strict=True):
        assert torch.equal(values, stored_values(matrix))


@on_device
@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "awq", "Q4_K"])
def test_slots_have_the_values_of_the_experts_that_the_gpu_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, name: str
) -> None:
    rank = experts_of(name, tmp_path, monkeypatch, device)
    link = ExpertLink(rank.store.layers, rank._gpu_experts, make_streams(rank.device), share=128)
    for number, layer in enumerate(rank.store.layers):
        for chosen in ([1, -1], [1, 0]):
            own = link._experts[layer.kind]
            for source, rows in zip(link._sources[number], target_rows(own), strict=True):
                link._fill(source, rows, torch.tensor(chosen, dtype=torch.int32, device=device))
            for values, matrix in zip(staged_values(own), layer.matrices, strict=True):
                stored = stored_values(matrix)
                assert all(torch.equal(values[i], stored[expert]) for i, expert in enumerate(chosen) if expert >= 0)


@on_device
@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gpu_adds_the_biases_of_experts_in_cpu_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, is_packed: bool
) -> None:
    """The experts of a layer that is streamed, and the experts that the GPU reads while the CPU computes the others."""
    if INTERPRETED:
        pack_on_cpu(monkeypatch)
        monkeypatch.setattr(Experts, "_sum_by_expert", Experts._sum_of_products)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 32}
    mixture = {"num_local_experts": 3, "num_experts_per_tok": 2}
    path = write_tiny_model(tmp_path / "x", "gpt_oss", experts=mixture, **sizes)
    path = write_mxfp4(tmp_path / "packed", path, tmp_path / "values") if is_packed else path
    rank, num_tokens = load_experts(path, dtype=DTYPE, device=device), 2
    staging = make_staging(rank)
    link = ExpertLink(rank.store.layers, rank._gpu_experts, make_streams(rank.device), share=128)
    activation = rank.experts.activation
    job = ExpertJob.of_rows(rank.store, num_tokens, 2, DTYPE, is_pinned=False, activation=activation)
    job.x.normal_()
    job.weights.uniform_()
    chosen = torch.tensor([[0, 2], [1, 0]])
    x, experts, weights = job.x.to(device), chosen.to(device), job.weights.to(device)
    for number in range(len(rank.store.layers)):
        job.experts.copy_(chosen)
        job.run_in_torch(number)
        expected = job.out.float().clone()
        staged = staging.experts(number)
        assert isinstance(staged.down, PackedWeight) == is_packed
        got = staged.sums(x, experts, weights, rank.biases[number])
        staging.multiplied(number)
        tolerance = 30 * torch.finfo(DTYPE).eps * float(expected.abs().max())
        assert (got.cpu().float() - expected).abs().max() <= tolerance
        own = link.begin(number, x, experts, weights, None, job.experts.copy_, rank.biases[number])
        assert 0 < (job.experts < 0).sum() < job.experts.numel(), "both compute some"
        job.run_in_torch(number)
        assert (own.cpu().float() + job.out.float() - expected).abs().max() <= tolerance


@on_device
def test_experts_are_divided_between_gpu_and_cpu(device: str) -> None:
    from nanovllm.kernels.read_experts import divide

    for num_tokens, num_chosen, num_experts, num_slots, share in (
        *((1, 8, 128, 3, 96), (1, 2, 2, 1, 128), (5, 3, 60, 16, 100), (64, 8, 200, 16, 128), (7, 4, 32, 1, 256)),
    ):
        experts = torch.rand(num_tokens, num_experts).topk(num_chosen).indices
        cells = torch.arange(num_tokens).masked_fill(torch.rand(num_tokens) < 0.3, -1)
        for padding in (None, cells):
            is_used = torch.ones_like(experts, dtype=torch.bool)
            if padding is not None:
                is_used &= (padding >= 0)[:, None]
            distinct = experts[is_used].unique().tolist()
            read = distinct[: min(num_slots, len(distinct) * share // 256)]
            divided = divide(
                experts.to(device),
                None if padding is None else padding.to(device),
                num_experts=num_experts,
                num_slots=num_slots,
                share=share,
            )
            slot_of = torch.full((num_experts,), -1)
            slot_of[read] = torch.arange(len(read))
            slots = slot_of[experts].masked_fill(~is_used, -1)
            assert torch.equal(divided.slots.cpu(), slots)
            assert torch.equal(divided.on_cpu.cpu(), experts.masked_fill(~is_used | (slots >= 0), -1))
            assert divided.slot_experts.tolist() == read + [-1] * (num_slots - len(read))


class StreamingExperts:
    """Lets an engine on the CPU send, receive and stream experts as on a GPU. Declares what products read."""

    def __init__(self, rank: RankExperts, streams: SimulatedStreams, max_rows: int, link_share: int) -> None:
        from nanovllm.kernels.expert_exchange import ExchangedRows

        job, self.exchange = rank.job, torch.zeros(EXCHANGE_SIZE, dtype=torch.int32)
        rank._exchange, counts = self.exchange, torch.zeros(2, dtype=torch.int32)
        rank._rows = ExchangedRows(job.x, job.experts, job.weights, job.out, self.exchange, counts)
        rank.staging = make_staging(rank, streams)
        if link_share:
            rank.link = ExpertLink(rank.store.layers, rank._gpu_experts, make_streams(rank.device), link_share)
        rank._server = rank._threads.serve_experts(job, self.exchange)
        rank.is_gpu, rank.max_rows = True, max_rows
        for number, arena in enumerate(rank.staging._arenas):
            streams.name_region(f"arena {number}", arena)
        self._streams, self._experts = streams, rank.staging.experts
        rank.staging.experts = self.experts  # type: ignore[method-assign]

    def experts(self, layer: int) -> Experts:
        experts = self._experts(layer)
        for each in experts.parameters():
            self._streams.compute.read(each.data)
        return experts


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU: tests/gpu/test_gpu_experts.py")
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(("mode", "link_share"), [*((mode, 0) for mode in MODES), (MODES[0], 128)])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3_5_moe", cache_options(None) | {"speculation": "mtp", "num_gpu_expert_layers": 0}),
        ("qwen3_moe", cache_options(None) | {"speculation": "prompt_lookup", "num_gpu_expert_layers": 0}),
        ("qwen3_moe", cache_options(2) | {"speculation": "resident", "num_gpu_expert_layers": 1}),
    ],
)
def test_engine_that_exchanges_and_streams_has_the_logits_of_transformers(
    tmp_path: Path, architecture: str, options: dict[str, Any], mode: Mode, link_share: int, device: str
) -> None:
    """The CPU computes up to three rows: often the last layer of a step that streams the others. In some cases the GPU
    reads some of their experts.
    """
    sizes: dict[str, Any] = {"num_layers": 4, "with_mtp": architecture == "qwen3_5_moe"}
    reference = Reference(write_tiny_model(tmp_path, architecture, max_position_embeddings=1024, **sizes))
    options = options | {"enable_expert_offload": True, "max_num_batched_tokens": 70}
    with CheckedLLM(reference, internals=Internals(always_guesses=True), **options) as llm:
        rank = llm.runner.model.cpu_experts
        StreamingExperts(rank, SimulatedStreams(mode), max_rows=3, link_share=link_share)
        llm.answer_and_check([random_prompt(length, seed=length) for length in (150, 2, 9)], max_tokens=5)
        llm.answer_and_check([random_prompt(5)], max_tokens=5)
        stats = llm.stats()
        assert stats["num_cpu_computed_layers"] > 9 and stats["num_streamed_expert_layers"] >= 9
