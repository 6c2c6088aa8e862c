"""HeadDrafts: drafts by the checkpoint's draft head (MTPHead in models/decoder.py). DraftHead: its memory on a rank.

At the end of a step the head runs on the step's tokens, each with its hidden state and the token after it: the prompt's
next token, or the token that the step has sampled. After a wrong draft token the head's outputs are garbage and are
ignored. The outputs for the last tokens are stored with the state of the sequence. The next step makes its first draft
token from the output for the last accepted token, and runs the head again for each further draft token.

A token and its hidden state have the same cell in the head's cache. So a step overwrites the cells that its drafts have
written, and the head's keys are in pages as the model's keys are in blocks: page i belongs to block i of the pool that
has room for all blocks. Without offload this pool is on the GPU, and the head is its last layer. With offload the pages
stay on the GPU, independent of where the blocks are.

At the end of a prefix hit or of a block that another sequence has computed, the last cell may have been computed with
another next token. That can cost a draft token.

Legend: N pages, P tokens of each, K kv heads, H query heads, D head dim. A step has T packed tokens of B sequences, and
samples S tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch
from nanovllm.capabilities.draft_head.pages import HeadStep, PageCopies, PageCopy
from nanovllm.capabilities.recurrent.places import StateStep
from nanovllm.kernels.state_tensors import LayerStates
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import CausalLM
from nanovllm.plan.step_limits import head_graph_sizes
from nanovllm.plan.step_plan import DraftTimes, KVMoves, SamplingRow, SequenceStep, StepPlan, find_payload
from nanovllm.runner.cuda_graphs import DecodeGraphs
from nanovllm.runner.graph_inputs import GraphBuffers, GraphShape
from nanovllm.runner.inputs import StepInputs, build_inputs, to_device
from nanovllm.runner.kv_memory import KVMemory, build_batches, last_token_batches
from nanovllm.runner.seams import CompanionMemory
from nanovllm.runner.step_runner import NUM_TIMED_STEPS, ModelDrafts, StepRunner
from nanovllm.utils.arithmetic import ceil_div


class DraftHead(CompanionMemory):
    def __init__(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        num_slots: int,
        max_guesses: int,
        hidden_size: int,
        backend: AttentionBackend,
        scale: float,
    ) -> None:
        """`cache`: K and V, each [N, P, K, D]. `num_slots`: state slots, including slot 0."""
        self.cache, self.backend, self.scale, self.max_guesses = cache, backend, scale, max_guesses
        self._slot_rows = 1 + max_guesses
        # The head's results for the last certain token of a slot's sequence, and for the draft tokens after it
        self.kept = cache[0].new_zeros(num_slots * self._slot_rows, hidden_size)

    def kept_rows(self, plan: StepPlan) -> np.ndarray:
        """Rows of `kept`, int64 [S], to which the results of a `followed_plan` are written."""
        states = (step.payload(StateStep) for step in plan.sequences)
        slots = (0 if state is None else state.target for state in states)
        rows = [
            slot * self._slot_rows + np.arange(step.num_sampled)
            for slot, step in zip(slots, plan.sequences, strict=True)
        ]
        return np.concatenate(rows)

    def first_rows(self, plan: StepPlan) -> np.ndarray:
        """Rows of `kept`, int64 [B]: the results from which first drafts are made, of the last certain token before
        each draft.
        """
        states = [step.payload(StateStep) for step in plan.sequences]
        rows = [0 if state is None else state.source * self._slot_rows + state.num_replayed for state in states]
        return np.array(rows, np.int64)


class HeadAttention:
    """The StepAttention of the head, which has a single layer. Makes `copies` once the new K and V are stored."""

    def __init__(
        self, head: DraftHead, slot_mapping_T: torch.Tensor, batch: PagedBatch, copies: Sequence[PageCopy] = ()
    ) -> None:
        """`batch`: for the rows whose results are used."""
        self.head, self.slot_mapping_T, self.batch, self.copies = head, slot_mapping_T, batch, copies

    def cells(self, layer: int) -> KVCells:
        return KVCells(*self.head.cache, self.slot_mapping_T)

    def layer_memory(self, layer: int) -> LayerStates:
        raise AssertionError("no layer of the draft head is recurrent")

    def attend(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        for source, target, num_tokens in self.copies:
            for pages_NPKD in self.head.cache:
                pages_NPKD[target, :num_tokens] = pages_NPKD[source, :num_tokens]
        if not len(q_THD):
            return q_THD
        return self.head.backend.attend(q_THD, *self.head.cache, self.batch, self.head.scale, sinks_H).out_THD


class HeadDrafts(ModelDrafts):
    needs_hidden = True

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self._drafted = head.kept[:0]  # the last hidden states that the head computed

    def begin(self, steps: StepRunner, plan: StepPlan) -> None:
        """The head does not read the cache, so its drafts need not wait for anything."""

    def run(self, steps: StepRunner, draft: StepPlan, is_first: bool) -> torch.Tensor:
        """Draft. The first drafts of a step need only the head's logits: the previous step has computed the rest."""
        inputs = draft_inputs(draft, steps.spec.block_size)
        before = self.head.first_rows(draft) if is_first else inputs.pending_rows
        sampling, rows = to_device((inputs.sampling, before), steps.device)
        if is_first:
            self._drafted = self.head.kept[rows]
        else:
            self._drafted = self._run_head(steps, draft, inputs, self._drafted[rows])
        return sample(steps.model.compute_logits(self._drafted), sampling)

    def follow(self, steps: StepRunner, plan: StepPlan, hidden: torch.Tensor | None) -> None:
        """Run the head on the tokens of the step."""
        assert hidden is not None, "the draft head needs the hidden states of all tokens"
        followed = followed_plan(plan, steps.spec.block_size)
        inputs = followed_inputs(followed, steps.spec.block_size)
        kept_rows = to_device(self.head.kept_rows(followed), steps.device)
        self.head.kept[kept_rows] = self._run_head(steps, followed, inputs, hidden)

    def _run_head(self, steps: StepRunner, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Run the head: see CausalLM.draft. Returns its results where the plan samples, [S, hidden_size]."""
        graphs = steps.graphs.draft_graphs
        fits = graphs is not None and plan.is_decode and plan.num_tokens <= graphs.sizes[-1]
        if fits and not plan.moves.payloads:
            assert isinstance(graphs, HeadGraphs)
            return graphs.run(inputs, hidden)
        tensors = to_device(inputs, steps.device)
        batches, rows = build_batches(plan, tensors, steps.spec.block_size), None
        if not plan.is_decode:
            batches, rows = last_token_batches(plan, batches, tensors), tensors.logits_rows
        copies = find_payload(plan.moves.payloads, PageCopies)
        attention = HeadAttention(
            self.head, tensors.slot_mapping, batches.paged, () if copies is None else copies.copies
        )
        rope_lens = tensors.rope_lens if steps.model.needs_rope_lens else None
        return steps.model.draft(steps.known_ids(tensors), tensors.positions, hidden, attention, rope_lens, rows)

    def make_graphs(self, buffers: GraphBuffers, memory: KVMemory, max_query_len: int) -> "HeadGraphs":
        return HeadGraphs(head_graph_sizes(buffers.max_graph_rows), max_query_len, buffers, memory, self.head)

    def measure(self, steps: StepRunner, max_model_len: int) -> DraftTimes:
        """Time drafts of one sequence that has as many keys as fit into the pages."""
        size = steps.spec.block_size
        num_keys = min(len(self.head.cache[0]) * size, max_model_len)
        few_s, many_s = (self._draft_s(steps, keys) for keys in (min(size, num_keys), num_keys))
        key_s = max(0.0, many_s - few_s) / num_keys
        return DraftTimes(many_s - num_keys * key_s, key_s)

    def _draft_s(self, steps: StepRunner, num_keys: int) -> float:
        """Time a draft after `num_keys` keys. The first draft of a step takes less."""
        num_drafts = max(1, min(NUM_TIMED_STEPS, self.head.max_guesses, num_keys - 1))
        pages = tuple(range(ceil_div(num_keys, steps.spec.block_size)))
        step = SequenceStep(
            seq_id=0,
            token_ids=np.zeros(1 + num_drafts, dtype=np.int64),
            position=num_keys - num_drafts,
            num_prompt_tokens=num_keys,
            block_table=pages,
            num_paged_keys=num_keys + 1,
            sampling=SamplingRow(),
            num_guesses=num_drafts,
            num_drafts=num_drafts,
            payloads=(HeadStep(pages, -1),),
        )
        for _ in range(2):  # the first drafts may be slow
            start_s = time.perf_counter()
            steps.draft(StepPlan((step,), KVMoves())).cpu()
        return (time.perf_counter() - start_s) / num_drafts


def followed_plan(plan: StepPlan, block_size: int) -> StepPlan:
    """Plan the head's run over the tokens of a step, each with the token after it, or -1 for a token that is sampled.
    The head's results are needed for the last token of each sequence, and where the step samples.
    """
    copies = find_payload(plan.moves.payloads, PageCopies)
    moves = KVMoves(payloads=() if copies is None else (copies,))
    return StepPlan(tuple(_followed(step, block_size) for step in plan.sequences), moves)


def _followed(step: SequenceStep, block_size: int) -> SequenceStep:
    num_keys = step.position + step.num_tokens
    head = step.payload(HeadStep)
    pages = (0,) * ceil_div(num_keys, block_size) if head is None else head.pages  # start-up has no pages
    last = np.full(step.num_sampled, -1)
    if step.sampling is None:
        assert head is not None, "the steps that start-up measures always sample"
        last = np.array([head.next_token])
    return step._replace(
        token_ids=np.concatenate([step.token_ids[1 : step.num_tokens + 1 - len(last)], last]),
        block_table=pages,
        num_paged_keys=num_keys,
        sampling=SamplingRow(),
        previous_row=-1,
        num_drafts=0,
    )


def followed_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    """The inputs of the head for a `followed_plan`, after the step."""
    inputs = build_inputs(plan, block_size, group_blocks=0)
    is_sampled = inputs.input_ids < 0
    inputs.pending_rows[is_sampled] = np.arange(np.count_nonzero(is_sampled))
    return inputs


def draft_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    """The inputs of the head for a draft. The head predicts the token after the next token."""
    inputs = build_inputs(plan, block_size, group_blocks=0)
    return inputs._replace(sampling=inputs.sampling._replace(position=inputs.sampling.position + 1))


class HeadGraphs(DecodeGraphs):
    """The draft head as graphs, on tokens whose hidden states are in `buffers.hidden`, where the head leaves its own
    hidden states. Runs after a decode step, or for drafts.
    """

    def __init__(
        self, sizes: list[int], max_query_len: int, buffers: GraphBuffers, memory: KVMemory, head: DraftHead
    ) -> None:
        super().__init__("draft head", sizes, max_query_len, buffers, memory)
        self.head = head

    def launch_kernels(self, model: CausalLM, size: int) -> None:
        shape, hidden = GraphShape.decode(size), self.buffers.hidden[:size]
        tensors, batch = self.buffers.tensors(shape), self.buffers.decode_batch(size, self.query_len(size))
        attention = HeadAttention(self.head, tensors.slot_mapping, batch)
        rope_lens = tensors.rope_lens if model.needs_rope_lens else None
        input_ids = self.buffers.input_ids(shape)
        with model.padded(tensors.slot_mapping):
            hidden.copy_(model.draft(input_ids, tensors.positions, hidden, attention, rope_lens))

    def run(self, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Run the head. `hidden` [T, hidden_size]: of the tokens before the tokens of `inputs`. Returns its hidden
        states. Hot.
        """
        rows = self.buffers.hidden[: len(hidden)]
        if rows.data_ptr() != hidden.data_ptr():
            rows.copy_(hidden)
        self.replay(inputs)
        return rows


@dataclass(frozen=True)
class HeadSetup:
    """A CompanionSetup."""

    num_cpu_blocks: int  # 0 without offload
    num_slots: int  # slots of states

    def allocate(self, memory: KVMemory) -> DraftHead:
        states = memory.spec.states
        k_pool, v_pool = memory.make_pool(self.num_cpu_blocks, num_layers=1) if self.num_cpu_blocks else memory.cache
        return DraftHead(
            (k_pool[-1], v_pool[-1]),
            self.num_slots,
            states.max_guesses,
            states.draft_size,
            memory.backend,
            memory.scale,
        )

    def make_drafts(self, companion: CompanionMemory) -> HeadDrafts:
        assert isinstance(companion, DraftHead)
        return HeadDrafts(companion)
