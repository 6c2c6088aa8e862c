"""All decode graphs of a rank: for steps whose keys are all on the GPU and, with offload, for streamed steps."""

from collections.abc import Sequence

import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch, StepAttention
from nanovllm.device.memory_profile import memory_remedy
from nanovllm.device.tp_group import TPGroup
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import DecodeGraphs, StepGraphs
from nanovllm.runner.decode_inputs import DecodeInputs
from nanovllm.runner.kv_memory import KVMemory


class GraphSet:
    def __init__(
        self,
        *,
        inputs: DecodeInputs,
        model: CausalLM,
        memory: KVMemory,
        backend: AttentionBackend,
        scale: float,
        num_heads: int,
        tp: TPGroup,
    ) -> None:
        """Captures nothing yet. `num_heads`: query heads of this rank."""
        self.inputs, self.model, self.memory, self.tp = inputs, model, memory, tp
        self.backend, self.scale = backend, scale
        self.resident = DecodeGraphs(inputs)
        self.streamed = memory.streamed_graphs(inputs, backend, scale, num_heads)

    @property
    def kinds(self) -> list[StepGraphs]:
        return [self.resident] if self.streamed is None else [self.resident, self.streamed]

    def __str__(self) -> str:
        """The number of sizes of each kind, such as `67 resident, 6 streamed`."""
        return ", ".join(f"{len(graphs.sizes)} {graphs.name}" for graphs in self.kinds)

    def capture_all(self) -> None:
        for graphs in self.kinds:
            self._capture(graphs, graphs.sizes)

    def capture_largest(self) -> None:
        """Capture the largest size of each kind. The other sizes would share its memory."""
        for graphs in self.kinds:
            self._capture(graphs, graphs.sizes[-1:])

    @torch.inference_mode()
    def _capture(self, graphs: StepGraphs, sizes: Sequence[int]) -> None:
        if self.tp.size > 1:
            self.tp.on_close.append(graphs.reset)
        with memory_remedy("capturing CUDA graphs"):
            graphs.capture(self.model, self._paged_attention, sizes, show_progress=self.tp.rank == 0)

    def launch_kernels(self) -> None:
        """Launch the graphs' kernels one by one, for the largest size and for each size that is a power of two."""
        for graphs in self.kinds:
            for size in graphs.sizes:
                if size & (size - 1) == 0 or size == graphs.sizes[-1]:
                    graphs.launch_kernels(self.model, self._paged_attention, size)

    def _paged_attention(self, slot_mapping: torch.Tensor, batch: PagedBatch) -> StepAttention:
        return self.memory.paged_attention(self.backend, self.scale, slot_mapping, batch)

    def reset(self) -> None:
        """Destroy all graphs."""
        for graphs in self.kinds:
            graphs.reset()
        self.tp.on_close.clear()
