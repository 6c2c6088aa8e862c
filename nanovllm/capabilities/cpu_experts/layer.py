"""CpuExperts: a layer whose experts are in CPU memory. RankExperts: what all such layers of a rank share.

Steps with few rows are computed by the CPU. The GPU hands over the rows and waits for the results
(kernels/expert_exchange.py), without a call of the host, so that such steps are CUDA graphs as usual. For steps with
many rows the experts are streamed to the GPU (staging.py). Without a GPU the CPU computes all rows.

Edges between the GPU's stream and the CPU's threads:
  E17  rows in CPU memory -> computed   compute -> cpu  exchange[ARRIVED]
  E18  computed -> received             cpu -> compute  exchange[DONE]
No other edge is needed: compute receives the results of a layer (E18) before it sends the next layer's rows.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from statistics import median
from time import perf_counter

import torch
from torch import nn

from nanovllm.capabilities.cpu_attention.job import CpuKernel, ExpertServer
from nanovllm.capabilities.cpu_experts.formats import layer_format
from nanovllm.capabilities.cpu_experts.job import EXCHANGE_NUMBERS, ExpertJob
from nanovllm.capabilities.cpu_experts.rows import ExpertRows
from nanovllm.capabilities.cpu_experts.staging import ExpertStaging
from nanovllm.capabilities.cpu_experts.store import ExpertLayer, ExpertStore, store_bytes
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.model_layout import Linear, model_layout
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.device.cuda import pinned_view
from nanovllm.device.pinned_memory import HostBuffer
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.layers.linear import NamedShard, WeightShard, divide, sum_over_ranks
from nanovllm.layers.moe import Experts
from nanovllm.offload.streams import make_streams
from nanovllm.plan.step_limits import MAX_CPU_EXPERT_ROWS

NUM_TIMED_CALLS = 5


class RankExperts:
    """The experts of a rank that are in CPU memory, the threads that compute them, and the buffers on the GPU."""

    def __init__(self, config: ModelConfig, tp: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the experts' memory, pinned if there is a GPU. device: of the model."""
        assert config.experts is not None, "only mixtures have experts"
        self.config, self.experts, self.tp, self.dtype, self.device = config, config.experts, tp, dtype, device
        self.local_size = divide(self.experts.intermediate_size, tp.size, "moe_intermediate_size")
        self.numbers = list(self.experts.cpu_layers)  # of the model's layers, in the order of the store
        if config.has_mtp:
            self.numbers.append(config.num_layers)
        stored = [
            layer_format(
                self.formats(number),
                str(dtype).removeprefix("torch."),
                hidden_size=config.hidden_size,
                size=self.experts.intermediate_size,
                num_ranks=tp.size,
            )
            for number in self.numbers
        ]
        places = [torch.arange(self.experts.num_experts, dtype=torch.int32)] * len(stored)
        self.is_gpu = device.type == "cuda"
        self._buffer = HostBuffer(store_bytes(stored, places), device if self.is_gpu else None)
        self.store = ExpertStore(stored, places, self._buffer.tensor)
        self.max_rows = MAX_CPU_EXPERT_ROWS  # of a step that the CPU computes. The experts are streamed for larger steps
        self.cells: torch.Tensor | None = None  # int64 [T], negative for rows of padding; None if there is no padding
        self._server: ExpertServer | None = None

    @cached_property
    def _linears(self) -> dict[str, Linear]:
        return model_layout(self.config).linears()

    def formats(self, number: int) -> tuple[Quantization | None, ...]:
        """Return the checkpoint's formats of gate, up and down in a layer of the model."""
        name = "mtp.layers.0" if number == self.config.num_layers else f"model.layers.{number}"
        parts = (self._linears[f"{name}.mlp.experts.{part}"] for part in ("gate_up", "down"))
        return tuple(each for part in parts for each in part.formats(self.config))

    def layer(self, number: int) -> "CpuExperts":
        """Return the module of a layer of the model."""
        return CpuExperts(self, self.numbers.index(number))

    # -- start-up --------------------------------------------------------------------------------------------------

    def start(self, kernel: CpuKernel) -> None:
        """Start the server, and choose by measured rates which steps the CPU computes. The layers have been filled.

        All ranks call together. Raises CheckpointError for scales that a GPU cannot read.
        """
        self.kernel = kernel
        self.job = ExpertJob.of_rows(
            self.store, MAX_CPU_EXPERT_ROWS, self.experts.num_experts_per_token, self.dtype, is_pinned=self.is_gpu
        )
        if not self.is_gpu:
            return
        from nanovllm.kernels.expert_exchange import ExchangedRows

        exchange = torch.zeros(EXCHANGE_NUMBERS, dtype=torch.int32).pin_memory()
        job, counts = self.job, torch.zeros(2, dtype=torch.int32, device=self.device)
        shared = (job.x, job.experts, job.weights, job.out, exchange)
        self._rows = ExchangedRows(*(pinned_view(each, self.device) for each in shared), counts)
        self._server = kernel.serve_experts(job, exchange)
        self.staging = ExpertStaging(self.store.layers, self._staged_experts, make_streams(self.device))
        self._choose_max_rows()

    def _staged_experts(self, layer: int) -> Experts:
        with self.device:
            formats = self.formats(self.numbers[layer])
            experts = Experts(self.config.hidden_size, self.experts, self.tp, self.dtype, formats)
        for weight, matrix in zip(experts.weights, self.store.layers[layer].matrices, strict=True):
            if matrix.scale_dtype is not None and not matrix.format.type.is_float:
                weight.choose_scales(matrix.scale_dtype, f"experts of layer {self.numbers[layer]}")
        return experts

    def close(self) -> None:
        """End the threads, and release the memory."""
