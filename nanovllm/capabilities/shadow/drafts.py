"""ShadowDrafts: drafts by the model over the newest keys in full precision and all others in the shadow.

Legend: T packed tokens, H query heads, D head dim.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend, HostTables, PagedBatch, PartialAttention, StepAttention
from nanovllm.capabilities.shadow.memory import Shadow
from nanovllm.capabilities.shadow.pages import DraftKeys
from nanovllm.models.decoder import CausalLM
from nanovllm.plan.shadow_spec import ShadowSpec
from nanovllm.plan.step_limits import draft_graph_sizes
from nanovllm.plan.step_plan import DraftTimes, StepPlan
from nanovllm.runner.cuda_graphs import DecodeGraphs
from nanovllm.runner.graph_inputs import GraphBuffers, GraphShape
from nanovllm.runner.inputs import GroupInputs, StepInputs, pad_tables, padded_groups, to_device
from nanovllm.runner.kv_memory import KVMemory, PagedAttention, StepBatches
from nanovllm.runner.seams import CompanionColumns, CompanionMemory, CpuRows, LayerMemoryOf
from nanovllm.runner.step_runner import ModelDrafts, StepRunner, timed_draft
from nanovllm.utils.arithmetic import ceil_div

MAX_TIMED_CPU_PAGES = 32  # a CPU unpacks each page in a millisecond and layer, and a context may have thousands


class DraftAttention(PagedAttention):
    """The StepAttention of a draft: the newest keys in full precision, and all others from the shadow."""

    def __init__(
        self,
        backend: AttentionBackend,
        cache: tuple[torch.Tensor, torch.Tensor],
        slot_mapping_T: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        layer_memory: LayerMemoryOf,
        shadow: Shadow,
        shadow_batch: PagedBatch,
    ) -> None:
        super().__init__(backend, cache, slot_mapping_T, batch, batch, scale, layer_memory)
        self.shadow, self.shadow_batch = shadow, shadow_batch

    def attend_paged(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None) -> PartialAttention:
        exact = super().attend_paged(layer, q_THD, sinks_H)
        rest = self.shadow.attend(layer, q_THD, self.shadow_batch, self.scale, self.backend)
        return self.backend.merge((exact, rest), q_THD.dtype)


class ShadowDrafts(ModelDrafts):
    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow

    def inputs(self, steps: StepRunner, draft: StepPlan) -> StepInputs:
        """Compute the inputs of a draft. The sinks and pages take the place of a streamed group."""
        lens, tables = _sinks_and_pages(steps, draft)
        group = GroupInputs(np.array(lens, np.int32), pad_tables(tables, max(2, *map(len, tables))))
        return steps.build_inputs(draft)._replace(groups=(group,))

    def batches(self, steps: StepRunner, draft: StepPlan, tensors: StepInputs) -> StepBatches:
        batches = super().batches(steps, draft, tensors._replace(groups=()))
        lens, tables = _sinks_and_pages(steps, draft)
        context_lens, block_tables = tensors.groups[0]
        pages = replace(
            batches.paged,
            context_lens=context_lens,
            block_tables=block_tables,
            max_context_len=max(lens),
            causal=False,
            host=HostTables([1] * len(lens), lens, tables),
        )
        return batches._replace(groups=(pages,))

    def attention(
        self, memory: KVMemory, slot_mapping: torch.Tensor, batches: StepBatches, columns: CompanionColumns
    ) -> StepAttention:
        layer_memory = memory.layer_memory(columns)
        return DraftAttention(
            memory.backend,
            memory.cache,
            slot_mapping,
            batches.paged,
            memory.scale,
            layer_memory,
            self.shadow,
            batches.groups[0],
        )

    def make_graphs(self, buffers: GraphBuffers, memory: KVMemory, max_query_len: int) -> "DraftGraphs":
        return DraftGraphs(draft_graph_sizes(buffers.max_graph_rows), buffers, memory, self)

    def measure(self, steps: StepRunner, max_model_len: int) -> DraftTimes:
        """Time drafts of one sequence that has as many keys as fit into the shadow."""
        size = steps.spec.block_size
        num_pages = max(1, min(self.shadow.pages_LNKW.shape[1], max_model_len // size))
        if steps.device.type == "cpu":
            num_pages = min(num_pages, MAX_TIMED_CPU_PAGES)
        few, many = (
            self.seconds(
                steps, timed_draft(max_model_len - 1, (0,), size, (DraftKeys(0, tuple(range(pages)), (0,), size),))
            )
            for pages in (1, num_pages)
        )
        key_s = max(0.0, many - few) / (num_pages * size)
        return DraftTimes(many - num_pages * size * key_s, key_s)


def _sinks_and_pages(steps: StepRunner, draft: StepPlan) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return each sequence's number of keys in pages, and its sink or -1, followed by its pages."""
    tables = [(keys.sink, *keys.pages) if (keys := step.payload(DraftKeys)) else (-1,) for step in draft.sequences]
    return [(len(table) - 1) * steps.spec.block_size for table in tables], tables


class DraftGraphs(DecodeGraphs):
    """Drafts that read the shadow: one token of each sequence."""

    def __init__(self, sizes: list[int], buffers: GraphBuffers, memory: KVMemory, drafts: ShadowDrafts) -> None:
        super().__init__("draft", sizes, 1, buffers, memory)
        self.drafts = drafts
        num_columns = 1 + ceil_div(buffers.max_model_len, memory.spec.block_size)  # a sink and pages
        self._lens = torch.zeros(sizes[-1], dtype=torch.int32, device=buffers.device)
        self._tables = torch.zeros(sizes[-1], num_columns, dtype=torch.int32, device=buffers.device)
        self._held = b""  # the content of the tables and lengths

    def launch_kernels(self, model: CausalLM, size: int) -> None:
        batch = self.buffers.decode_batch(size, 1)
        pages = replace(batch, context_lens=self._lens[:size], block_tables=self._tables[:size], causal=False)
        batch = replace(batch, max_context_len=2 * self.memory.spec.block_size)  # the newest keys need few programs
        slot_mapping = self.buffers.tensors(GraphShape.decode(size)).slot_mapping
        columns = self.buffers.companion_columns(size, 1)
        attention = self.drafts.attention(self.memory, slot_mapping, StepBatches(batch, (pages,)), columns)
        self.buffers.forward(model, size, attention)

    def replay(self, inputs: StepInputs, cpu_rows: CpuRows | None = None) -> torch.Tensor:
        lens, tables = inputs.groups[0]
        held = lens.tobytes() + tables.tobytes()
        if held != self._held:  # the drafts of a step read the same pages
            self._held = held
            (padded,) = padded_groups(inputs.groups, len(self._lens))
            on_device = torch.as_tensor(to_device(padded, self.device))
            self._lens.copy_(on_device[:, 0])
            self._tables[:, : tables.shape[1]].copy_(on_device[:, 1:])
        return super().replay(inputs._replace(groups=()))


@dataclass(frozen=True)
class ShadowSetup:
    """A CompanionSetup."""

    num_pages: int
    bits: int

    def allocate(self, memory: KVMemory) -> Shadow:
        return Shadow(ShadowSpec.of(memory.spec, self.bits), self.num_pages, memory.device)

    def make_drafts(self, companion: CompanionMemory) -> ShadowDrafts:
        assert isinstance(companion, Shadow)
        return ShadowDrafts(companion)
