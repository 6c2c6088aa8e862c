"""A ModelRunner on the CPU for tests of what happens on a GPU, and attention for batches as CUDA graphs have them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.attention.base import HostTables, PagedBatch, PartialAttention
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.capabilities.cpu_attention.rates import make_cpu_attention
from nanovllm.capabilities.cpu_experts.layer import RankExperts
from nanovllm.checkpoint.read_config import load_config
from nanovllm.config import Config
from nanovllm.device.tp_group import TPGroup
from nanovllm.models.loader import CpuExpertsFactory
from nanovllm.plan.kv_spec import kv_cache_spec
from nanovllm.runner.graph_inputs import GraphBuffers
from nanovllm.runner.kv_memory import make_offload_engine
from nanovllm.runner.model_runner import ModelRunner

BLOCK, NUM_TOKENS, NUM_SEQS = 256, 300, 5


class HostlessTorch(TorchBackend):
    """Reads the sizes from the tensors where the batch does not tell them."""

    def attend(
        self,
        q_THD: torch.Tensor,
        k_NPKD: torch.Tensor,
        v_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        if batch.host is None:
            sizes = (batch.cu_seqlens_q.diff(), batch.context_lens, batch.block_tables)
            batch = replace(batch, host=HostTables(*(size.tolist() for size in sizes)))
        return super().attend(q_THD, k_NPKD, v_NPKD, batch, scale, sinks_H)


def graph_buffers(runner: ModelRunner, max_num_rows: int, **options: Any) -> GraphBuffers:
    """The buffers of graphs that neither compute logits nor sample."""
    return GraphBuffers(
        max_num_rows=max_num_rows,
        max_num_tokens=4096,
        max_model_len=runner.max_model_len,
        block_size=runner.spec.block_size,
        vocab_size=1,
        padded_vocab_size=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        **options,
    )


def make_runner(
    model: Path, num_cpu_blocks: int, make_cpu_experts: CpuExpertsFactory = RankExperts, **options: Any
) -> ModelRunner:
    """Steps of up to NUM_TOKENS tokens and NUM_SEQS sequences, without speculation. With CPU blocks, it offloads."""
    options = {"speculation": "off"} | options
    config = Config(
        model=str(model),
        device="cpu",
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=NUM_TOKENS,
        enable_cpu_offload=num_cpu_blocks > 0,
        kvcache_block_size=BLOCK,
        **options,
    )
    model_config, directory = load_config(str(model))
    model_config = model_config.quantized(config.quantization, config.quantize_head, config.tensor_parallel_size)
    if model_config.experts is not None and config.num_gpu_expert_layers is not None:
        model_config = replace(model_config, experts=model_config.experts.on_gpu(config.num_gpu_expert_layers))
    spec = kv_cache_spec(config, model_config, tp_size=1)
    device, factories = torch.device("cpu"), (make_offload_engine, make_cpu_attention, make_cpu_experts)
    return ModelRunner(config, model_config, directory, spec, TPGroup(), device, *factories)
