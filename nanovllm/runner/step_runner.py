"""StepRunner: runs planned steps on one rank, as graphs where there are any, else kernel by kernel. GraphSet: which
graphs there are.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from nanovllm.attention.base import StepAttention
from nanovllm.device.devices import memory_remedy
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.sampler import resample_edited, sample
from nanovllm.models.decoder import CausalLM
from nanovllm.plan.step_limits import (
    MixedSize,
    graph_sizes,
    has_mixed_graphs,
    streamed_graph_sizes,
    streamed_verifying_graph_sizes,
    verifying_graph_sizes,
)
from nanovllm.plan.step_plan import DraftTimes, KVMoves, SamplingRow, SequencePayload, SequenceStep, StepPlan
from nanovllm.runner.cuda_graphs import DecodeGraphs, GraphKind, MixedGraphs, Size, StepGraphs
from nanovllm.runner.graph_inputs import GraphBuffers
from nanovllm.runner.inputs import LateInputs, StepInputs, build_inputs, late_inputs, to_device
from nanovllm.runner.kv_memory import KVMemory, OffloadMemory, StepBatches, build_batches, cpu_rows, last_token_batches
from nanovllm.runner.seams import CompanionColumns, CompanionMemory
from nanovllm.runner.step_result import LogprobTensors, StepEnd, StepResult, prompt_logprobs, sampled_logprobs
from nanovllm.runner.streamed_graphs import StreamedDecodeGraphs
from nanovllm.utils.arithmetic import ceil_div

NUM_TIMED_STEPS = 4


def draft_steps(plan: StepPlan) -> list[StepPlan]:
    """The drafts of a step as steps: one token of each sequence that drafts, over the keys on the GPU.

    The steps are in order. Each step's pending tokens are sampled by the previous step. No step moves blocks.
    """
    steps = []
    previous_rows: dict[int, int] = {}  # row of the plan -> row of the draft before
    for i, rows in enumerate(plan.draft_rows()):
        sequences = (_draft(plan.sequences[row], i, previous_rows.get(row, -1)) for row in rows)
        steps.append(StepPlan(tuple(sequences), KVMoves()))
        previous_rows = {row: previous for previous, row in enumerate(rows)}
    return steps


def _draft(step: SequenceStep, i: int, previous_row: int) -> SequenceStep:
    """Plan draft i: run the step's known token, or a draft token, and sample with the noise of the predicted token."""
    assert step.sampling is not None and step.num_tokens == 1 + step.num_guesses, "only a decoding sequence drafts"
    draft = step._replace(
        token_ids=step.token_ids[:1] if i == 0 else np.array([-1]),
        position=step.position + i,
        num_paged_keys=step.num_paged_keys - step.num_guesses + i,
        previous_row=previous_row,
        num_guesses=0,
        num_drafts=0,
        edits=None,  # drafts are not edited: a draft may be any token
        num_logprobs=None,
    )
    for payload in step.payloads:
        draft = payload.in_draft(draft, step, i)
    return draft


def timed_draft(
    position: int, block_table: tuple[int, ...], num_keys: int, payloads: tuple[SequencePayload, ...] = ()
) -> StepPlan:
    """Plan a draft of one sequence whose newest `num_keys` keys are in `block_table`."""
    step = SequenceStep(
        seq_id=0,
        token_ids=np.zeros(1, dtype=np.int64),
        position=position,
        num_prompt_tokens=position + 1,
        block_table=block_table,
        num_paged_keys=num_keys,
        sampling=SamplingRow(),
        payloads=payloads,
    )
    return StepPlan((step,), KVMoves())


class StepPass(NamedTuple):
    """Results of the model's forward pass over a step's tokens. Valid until the next forward pass."""

    input_ids: torch.Tensor  # int64 [T]
    logits: torch.Tensor  # [S, vocab_size]
    sampled_ids: torch.Tensor  # int64 [S], sampled from the logits
    late: LateInputs  # on the device
    prompt_logprobs: LogprobTensors | None = None
    hidden: torch.Tensor | None = None  # [T, hidden_size]; or None if drafts do not need it


# Graphs of decode steps, by whether they stream keys and verify draft tokens: a name, and the sizes by the most rows
DECODE_KINDS: dict[tuple[bool, bool], tuple[str, Callable[[int], list[int]]]] = {
    (False, False): ("resident", graph_sizes),
    (True, False): ("streamed", streamed_graph_sizes),
    (False, True): ("resident verifying", verifying_graph_sizes),
    (True, True): ("streamed verifying", streamed_verifying_graph_sizes),
}


class RankGraphs:
    """The graphs of a rank. The base class has none: every step is launched kernel by kernel."""

    kinds: Sequence[GraphKind[Any]] = ()
    draft_graphs: StepGraphs | None = None  # None if drafts run in the graphs of decode steps

    def find(self, plan: StepPlan, is_draft: bool = False) -> StepGraphs | None:
        """Return the graphs that can run a decode step from token ids to sampled tokens, or None."""
        return None

    def find_mixed(self, plan: StepPlan) -> tuple[MixedGraphs, MixedSize] | None:
        """Return the graphs that can run the layers of a step with chunks of prompts, and their size, or None."""
        return None

    def share(self, sampled_ids: torch.Tensor) -> None:
        """Copy the last sampled tokens to where the next graph reads them, unless a graph has sampled them there."""

    def reset(self) -> None:
        """Destroy all graphs."""


class GraphSet(RankGraphs):
    """All kinds of graphs: the DECODE_KINDS that the engine needs, a kind for drafts if drafts need one, and, if all
    layers are attention, a kind for steps with short chunks of prompts.
    """

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
        self.buffers, self.model, self.tp = buffers, model, tp
        self._by_kind: dict[tuple[bool, bool], StepGraphs] = {}
        for (streams, verifies), (name, sizes) in DECODE_KINDS.items():
            if verifies and not max_guesses:
                continue
            kind = name, sizes(buffers.max_graph_rows), 1 + max_guesses if verifies else 1, buffers
            if not streams:
                self._by_kind[streams, verifies] = DecodeGraphs(*kind, memory)
            elif isinstance(memory, OffloadMemory):
                self._by_kind[streams, verifies] = StreamedDecodeGraphs(*kind, memory, num_heads)
        self.draft_graphs = make_draft_graphs(buffers, memory, 1 + max_guesses)
        self.mixed: MixedGraphs | None = None  # None if chunks are launched kernel by kernel
        if has_mixed_graphs(model.config):
            self.mixed = MixedGraphs(buffers, memory, model.config.hidden_size)

        others = [kind for kind in (self.draft_graphs, self.mixed) if kind is not None]
        self.kinds = [*self._by_kind.values(), *others]

    def find(self, plan: StepPlan, is_draft: bool = False) -> StepGraphs | None:
        moves = plan.moves
        if not plan.is_decode or moves.loads or moves.copies or moves.acts_by_layer:
            return None
        graphs = self._by_kind[moves.brings_in_keys, plan.has_guesses]
        if is_draft and self.draft_graphs is not None:
            graphs = self.draft_graphs
        return graphs if plan.num_tokens <= graphs.sizes[-1] else None

    def find_mixed(self, plan: StepPlan) -> tuple[MixedGraphs, MixedSize] | None:
        needs_copies = plan.moves.brings_in_keys or plan.moves.loads or plan.moves.copies
        if self.mixed is None or plan.is_decode or needs_copies:
            return None
        size = self.mixed.find_size(plan)
        return None if size is None else (self.mixed, size)

    def share(self, sampled_ids: torch.Tensor) -> None:
        shared = self.buffers.sampled_ids[: len(sampled_ids)]
        if shared.data_ptr() != sampled_ids.data_ptr():
            shared.copy_(sampled_ids)

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
            graphs.capture(self.model, sizes, show_progress=self.tp.rank == 0)

    def launch_kernels(self) -> None:
        """Launch the graphs' kernels one by one, for the largest size and for each size that is a power of two. Steps
        with chunks need no additional kernels.
        """
        for graphs in self.kinds:
            if not isinstance(graphs, StepGraphs):
                continue
            for size in graphs.sizes:
                if size & (size - 1) == 0 or size == graphs.sizes[-1]:
                    graphs.launch_kernels(self.model, size)

    def reset(self) -> None:
        for graphs in self.kinds:
            graphs.reset()
        self.tp.on_close.clear()


class StepRunner:
    def __init__(self, model: CausalLM, memory: KVMemory, tp: TPGroup, drafts: "ModelDrafts") -> None:
        self.model, self.memory, self.spec, self.tp, self.device = model, memory, memory.spec, tp, memory.device
        self.drafts = drafts
        self.graphs = RankGraphs()
        self._sampled_ids = torch.zeros(0, dtype=torch.int64, device=self.device)  # sampled by the last step
        self._last_end: StepEnd | None = None  # the end of the last step
        # Steps that may still run. A kernel writes a step's results to pinned memory, which must exist until the step
        # has ended.
        self._running: deque[StepResult] = deque()

    def build_inputs(self, plan: StepPlan) -> StepInputs:
        columns = self.memory.companion_columns(plan)
        return build_inputs(plan, self.spec.block_size, self.memory.group_blocks, columns)

    def launch(self, plan: StepPlan) -> StepResult:
        """Enqueue a step. Hot."""
        inputs = self.build_inputs(plan)
        self.memory.begin_step(plan)
        drafted_ids = self.draft(plan)
        ran = self.run_pass(plan, inputs)
        if edited := ran.late.edits:
            resample_edited(edited.edits, edited.sampling, ran.logits, ran.input_ids, ran.sampled_ids)
        self._keep_sampled(ran.sampled_ids)
        asked = ran.late.logprobs
        logprobs = None if asked is None else sampled_logprobs(asked, ran.logits, self._sampled_ids)
        times = self.memory.end_step()
        tokens = torch.cat([self._sampled_ids, drafted_ids]) if len(drafted_ids) else self._sampled_ids
        result = StepResult(tokens, logprobs, ran.prompt_logprobs, self._last_end, times)
        self._last_end = result.end
        self._running.append(result)
        self.drafts.follow(self, plan, ran.hidden)
        while self._running and self._running[0].is_done():
            self._running.popleft()
        return result

    def draft(self, plan: StepPlan) -> torch.Tensor:
        """Draft tokens one after another (see StepPlan.draft_rows). Returns their ids. From now on the step finds its
        pending tokens among the drafted tokens.
        """
        steps = draft_steps(plan)
        if not steps:
            return self._sampled_ids[:0]
        drafted: list[torch.Tensor] = []
        self.drafts.begin(self, plan)
        for step in steps:
            self._keep_sampled(self.drafts.run(self, step, is_first=not drafted))
            drafted.append(self._sampled_ids.clone())
        self._sampled_ids = torch.cat(drafted)
        self.graphs.share(self._sampled_ids)
        return self._sampled_ids

    def known_ids(self, tensors: StepInputs) -> torch.Tensor:
        """Return the input ids of a step, with the last sampled tokens in the places of pending ids, which the host may
        not know yet. An invalid id ends its request soon; while start-up only compiles kernels, ids are arbitrary.
        """
        if not len(self._sampled_ids):
            return tensors.input_ids
        pending, last = tensors.pending_rows, self.model.config.vocab_size - 1
        pending_ids = self._sampled_ids[pending.clamp(min=0)].clamp_(0, last)
        return torch.where(pending < 0, tensors.input_ids, pending_ids)

    @torch.inference_mode()
    def measure_drafts(self, max_model_len: int) -> DraftTimes:
        return self.drafts.measure(self, max_model_len)

    def run_pass(self, plan: StepPlan, inputs: StepInputs, is_draft: bool = False) -> StepPass:
        """Run one forward pass of the model, with graphs if possible."""
        graphs = self.graphs.find(plan, is_draft)
        if graphs is None:
            return self._run_in_parts(plan, inputs, is_draft)
        if plan.moves.brings_in_keys:
            logits = graphs.replay(inputs, cpu_rows(plan))
        elif is_draft:
            logits = graphs.replay(inputs)
        else:
            self.memory.begin_all_layers()
            logits = graphs.replay(inputs)
            self.memory.ran_all_layers()
        num_rows, buffers = len(logits), graphs.buffers
        sampled_ids, late = buffers.sampled_ids[:num_rows], to_device(self._late_inputs(plan, inputs), self.device)
        return StepPass(buffers.read_ids(num_rows), logits, sampled_ids, late, hidden=buffers.hidden[:num_rows])

    def _late_inputs(self, plan: StepPlan, inputs: StepInputs) -> LateInputs:
        """Compute the late inputs on the host. Call this once the layers are enqueued."""
        return late_inputs(plan, inputs.sampling, self.model.config.vocab_size)

    def _run_in_parts(self, plan: StepPlan, inputs: StepInputs, is_draft: bool) -> StepPass:
        """Run any step. Its layers may run as a graph; the sampler is always launched kernel by kernel."""
        found = None if is_draft else self.graphs.find_mixed(plan)
        if found is None:
            tensors = to_device(inputs, self.device)
            input_ids, hidden, has_all_rows = self._launch_layers(plan, tensors, is_draft)
            logits_rows, sampling = tensors.logits_rows, tensors.sampling
            late = to_device(self._late_inputs(plan, inputs), self.device)
        else:
            mixed, size = found
            self.memory.begin_all_layers()
            hidden, has_all_rows = mixed.replay(plan, inputs, size), True
            self.memory.ran_all_layers()
            input_ids = mixed.buffers.read_ids(len(hidden))
            asked = inputs.logits_rows, inputs.sampling, self._late_inputs(plan, inputs)
            logits_rows, sampling, late = to_device(asked, self.device)
        vocab_size, logprobs, all_hidden = self.model.config.vocab_size, None, hidden if has_all_rows else None
        if scored := late.prompt_logprobs:
            logprobs = prompt_logprobs(scored, hidden, self.model.compute_logits, vocab_size)
        if has_all_rows and not plan.is_decode:
            hidden = hidden[logits_rows]
        if not len(hidden):
            none = hidden.new_empty(0, vocab_size)
            return StepPass(input_ids, none, self._sampled_ids[:0], late, logprobs, all_hidden)
        logits = self.model.compute_logits(hidden)
        return StepPass(input_ids, logits, sample(logits, sampling), late, logprobs, all_hidden)

    def _launch_layers(
        self, plan: StepPlan, tensors: StepInputs, is_draft: bool
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Launch the layers without graphs. Returns the token ids, the hidden states after the last layer, and whether
        the hidden states are of all tokens or only of the tokens after which the step samples.
        """
        input_ids = self.known_ids(tensors) if plan.has_pending else tensors.input_ids
        rope_lens = tensors.rope_lens if self.model.needs_rope_lens else None
        needs_all = plan.is_decode or plan.has_scores or self.drafts.needs_hidden
        rows = None if needs_all else tensors.logits_rows
        attention = self._attention(plan, tensors, needs_all, is_draft)
        return input_ids, self.model(input_ids, tensors.positions, attention, rope_lens, rows), needs_all

    def _attention(self, plan: StepPlan, tensors: StepInputs, needs_all: bool, is_draft: bool) -> StepAttention:
        """`needs_all`: the last layer returns all rows."""
        max_query_len = max(step.num_tokens for step in plan.sequences)
        columns = CompanionColumns(tensors.companion_columns, tensors.cu_seqlens_q, max_query_len, plan)
        if is_draft:
            batches = self.drafts.batches(self, plan, tensors)
            return self.drafts.attention(self.memory, tensors.slot_mapping, batches, columns)
        batches = build_batches(plan, tensors, self.spec.block_size)
        ends_otherwise = self.model.config.layer_kinds[-1] != "attention"  # all attention layers attend to all rows
        last = batches if needs_all or ends_otherwise else last_token_batches(plan, batches, tensors)
        return self.memory.attention(plan, tensors.slot_mapping, batches, last, columns)

    def _keep_sampled(self, sampled_ids: torch.Tensor) -> None:
        """Store the sampled tokens of rank 0 on every rank, where the next forward pass finds them."""
        if len(sampled_ids):
            self._sampled_ids = self.tp.broadcast(sampled_ids)
            self.graphs.share(self._sampled_ids)
        else:
            self._sampled_ids = self._sampled_ids[:0]


class ModelDrafts:
    """Drafts by the model over the keys on the GPU. Owned by the StepRunner, without a reference to the StepRunner."""

    needs_hidden = False  # True if `follow` needs the model's hidden states of all tokens

    def begin(self, steps: StepRunner, plan: StepPlan) -> None:
        """Prepare for the drafts of a step."""
        assert not (plan.moves.loads or plan.moves.copies), "a draft would read slots before they are filled"
        steps.memory.begin_all_layers()

    def run(self, steps: StepRunner, draft: StepPlan, is_first: bool) -> torch.Tensor:
        """Draft a token of each sequence. Returns their ids, int64 [sequences]."""
        return steps.run_pass(draft, self.inputs(steps, draft), is_draft=True).sampled_ids

    def follow(self, steps: StepRunner, plan: StepPlan, hidden: torch.Tensor | None) -> None:
        """Called after the step has run. `hidden`: [T, hidden_size], see `needs_hidden`."""

    def inputs(self, steps: StepRunner, draft: StepPlan) -> StepInputs:
        return steps.build_inputs(draft)

    def batches(self, steps: StepRunner, draft: StepPlan, tensors: StepInputs) -> StepBatches:
        return build_batches(draft, tensors, steps.spec.block_size)

    def attention(
        self, memory: KVMemory, slot_mapping: torch.Tensor, batches: StepBatches, columns: CompanionColumns
    ) -> StepAttention:
        """Make the attention of a draft that is launched kernel by kernel."""
        return memory.paged_attention(slot_mapping, batches.paged, columns)

    def make_graphs(self, buffers: GraphBuffers, memory: KVMemory, max_query_len: int) -> StepGraphs | None:
        """Make the graphs of drafts, or return None if drafts run in the graphs of decode steps. `max_query_len`: the
        most tokens of a sequence in a verification step.
        """
        return None

    def measure(self, steps: StepRunner, max_model_len: int) -> DraftTimes:
        """Time drafts of one sequence that has as many keys as fit into the GPU's blocks."""
        size, num_blocks = steps.spec.block_size, steps.memory.cache[0].shape[1]
        num_keys = min(num_blocks * size, max_model_len)
        table = tuple(range(ceil_div(num_keys, size)))
        return DraftTimes(self.seconds(steps, timed_draft(num_keys - 1, table, num_keys)))

    def seconds(self, steps: StepRunner, draft: StepPlan) -> float:
        ran: Any = None
        for num_steps in (2, NUM_TIMED_STEPS):  # the first steps may be slow
            start_s = time.perf_counter()
            for _ in range(num_steps):
                ran = steps.run_pass(draft, self.inputs(steps, draft), is_draft=True)
            ran.sampled_ids.cpu()
        return (time.perf_counter() - start_s) / NUM_TIMED_STEPS


class CompanionSetup(Protocol):
    """What start-up sends to every rank to allocate a CompanionMemory. Can be pickled."""

    def allocate(self, memory: KVMemory) -> CompanionMemory:
        """Allocate the memory. The KV blocks are allocated already."""

    def make_drafts(self, companion: CompanionMemory) -> ModelDrafts | None:
        """Return the drafts that use the memory from `allocate`, or None if the companion does not change drafting."""
