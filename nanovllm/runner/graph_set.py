"""All graphs of a rank: of decode steps whose keys are all on the GPU and, with offload, of streamed decode steps.

With speculation there is another kind of both, for verification steps, and there may be a kind for drafts. The last
kind is for steps with short chunks of prompts, if all layers are attention.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nanovllm.device.devices import memory_remedy
from nanovllm.device.tp_group import TPGroup
from nanovllm.models.decoder import CausalLM
from nanovllm.plan.step_limits import (
    MixedSize,
    graph_sizes,
    streamed_graph_sizes,
    streamed_verifying_graph_sizes,
    verifying_graph_sizes,
)
from nanovllm.plan.step_plan import StepPlan
from nanovllm.runner.cuda_graphs import DecodeGraphs, GraphKind, MixedGraphs, Size, StepGraphs
from nanovllm.runner.graph_inputs import GraphBuffers
from nanovllm.runner.kv_memory import KVMemory
from nanovllm.runner.streamed_graphs import StreamedDecodeGraphs


class GraphSet:
    def __init__(
        self,
        *,
        buffers: GraphBuffers,
        model: CausalLM,
        memory: KVMemory,
        num_heads: int,
        max_guesses: int,
        tp: TPGroup,
        make_draft_graphs: Callable[[GraphBuffers, KVMemory, int], StepGraphs | None],
    ) -> None:
        """Captures nothing yet. `num_heads`: query heads of this rank. `max_guesses`: draft tokens per sequence, 0
        without speculation. `make_draft_graphs`: ModelDrafts.make_graphs.
        """
        self.buffers, self.model, self.memory, self.tp = buffers, model, memory, tp
        self._num_heads = num_heads
        self._by_kind: dict[tuple[bool, bool], StepGraphs] = {}  # (streams keys, verifies draft tokens)
        rows = buffers.max_num_rows
        self._add("", graph_sizes(rows), streamed_graph_sizes(rows))
        if max_guesses:
            sizes = verifying_graph_sizes(rows), streamed_verifying_graph_sizes(rows)
            self._add(" verifying", *sizes, max_query_len=1 + max_guesses)
        self.draft_graphs = make_draft_graphs(buffers, memory, 1 + max_guesses)
        self.mixed: MixedGraphs | None = None  # None if chunks are launched kernel by kernel
        if not buffers.column_paddings:
            self.mixed = MixedGraphs(buffers, model.config.hidden_size, memory.dtype)

    def _add(self, suffix: str, sizes: list[int], streamed_sizes: list[int], max_query_len: int = 1) -> None:
        """Add a kind for steps whose keys are all on the GPU and, with offload, a kind for streamed steps."""
        verifies = max_query_len > 1
        self._by_kind[False, verifies] = DecodeGraphs(self.buffers, f"resident{suffix}", sizes, max_query_len)
        if self.memory.offload is not None:
            self._by_kind[True, verifies] = StreamedDecodeGraphs(
                self.buffers,
                f"streamed{suffix}",
                streamed_sizes,
                max_query_len,
                memory=self.memory,
                num_heads=self._num_heads,
            )

    @property
    def kinds(self) -> Sequence[GraphKind[Any]]:
        others = [kind for kind in (self.draft_graphs, self.mixed) if kind is not None]
        return [*self._by_kind.values(), *others]

    def find(self, plan: StepPlan, is_draft: bool = False) -> StepGraphs | None:
        """Return the graphs that can run a decode step from token ids to sampled tokens, or None."""
        moves = plan.moves
        if not plan.is_decode or moves.loads or moves.copies or moves.acts_by_layer:
            return None
        graphs: StepGraphs = self._by_kind[moves.brings_in_keys, plan.has_guesses]
        if is_draft and self.draft_graphs is not None:
            graphs = self.draft_graphs
        return graphs if plan.num_tokens <= graphs.sizes[-1] else None

    def find_mixed(self, plan: StepPlan) -> MixedSize | None:
        """Return the size of `mixed` that can run the layers of a step with chunks of prompts, or None."""
        needs_copies = plan.moves.brings_in_keys or plan.moves.loads or plan.moves.copies
        return None if self.mixed is None or plan.is_decode or needs_copies else self.mixed.find_size(plan)

    def __str__(self) -> str:
        """Return the number of sizes of each kind, such as `67 resident, 6 streamed`."""
        return ", ".join(f"{len(graphs.sizes)} {graphs.name}" for graphs in self.kinds)

    def capture_all(self) -> None:
        for graphs in self.kinds:
            self._capture(graphs, graphs.sizes)

    def capture_largest(self) -> None:
        """Capture the largest sizes of each kind. The other sizes would share their memory."""
        for graphs in self.kinds:
            self._capture(graphs, graphs.largest_sizes)

    @torch.inference_mode()
    def _capture(self, graphs: GraphKind[Size], sizes: Sequence[Size]) -> None:
        if self.tp.size > 1:
            self.tp.on_close.append(graphs.reset)
        with memory_remedy("capturing CUDA graphs"):
            graphs.capture(self.model, self.memory.paged_attention, sizes, show_progress=self.tp.rank == 0)

    def launch_kernels(self) -> None:
        """Launch the graphs' kernels one by one, for the largest size and for each size that is a power of two. Steps
        with chunks need no additional kernels.
        """
        for graphs in self.kinds:
            if not isinstance(graphs, StepGraphs):
                continue
            for size in graphs.sizes:
                if size & (size - 1) == 0 or size == graphs.sizes[-1]:
                    graphs.launch_kernels(self.model, self.memory.paged_attention, size)

    def reset(self) -> None:
        """Destroy all graphs."""
        for graphs in self.kinds:
            graphs.reset()
        self.tp.on_close.clear()
