"""StepRunner: runs planned steps on one rank, as graphs where there are any, else kernel by kernel."""

import time
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.attention.base import StepAttention
from nanovllm.capabilities.draft_head.memory import (
    DraftHead,
    HeadAttention,
    draft_inputs,
    followed_inputs,
    followed_plan,
)
from nanovllm.capabilities.draft_head.pages import HeadStep, PageCopies
from nanovllm.capabilities.recurrent.memory import state_rows
from nanovllm.capabilities.shadow.pages import DraftKeys
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.sampler import resample_edited, sample
from nanovllm.models.decoder import CausalLM
from nanovllm.plan.step_plan import DraftTimes, KVMoves, SamplingRow, SequenceStep, StepPlan, find_payload
from nanovllm.runner.graph_set import GraphSet
from nanovllm.runner.inputs import (
    StepInputs,
    build_inputs,
    edit_inputs,
    prompt_logprob_inputs,
    sampled_logprob_inputs,
    to_device,
)
from nanovllm.runner.kv_memory import KVMemory, build_batches, cpu_rows, last_token_batches
from nanovllm.runner.step_result import LogprobTensors, StepEnd, StepResult, prompt_logprobs, sampled_logprobs
from nanovllm.utils.arithmetic import ceil_div

NUM_TIMED_STEPS = 4
MAX_TIMED_CPU_PAGES = 32  # a CPU unpacks each page in a millisecond and layer, and a context may have thousands


def draft_steps(plan: StepPlan) -> list[StepPlan]:
    """The drafts of a step as steps of their own: one token of each sequence that drafts, over the keys on the GPU.

    In order. Each step's pending tokens are those that the one before it samples. None of them moves anything."""
    steps = []
    previous_rows: dict[int, int] = {}  # row of the plan -> row of the draft before
    for i, rows in enumerate(plan.draft_rows()):
        sequences = (_draft(plan.sequences[row], i, previous_rows.get(row, -1)) for row in rows)
        steps.append(StepPlan(tuple(sequences), KVMoves()))
        previous_rows = {row: previous for previous, row in enumerate(rows)}
    return steps


def _draft(step: SequenceStep, i: int, previous_row: int) -> SequenceStep:
    """Draft number i: the step's known token, or a draft after it, with the noise of the token that it guesses."""
    assert step.sampling is not None and step.num_tokens == 1 + step.num_guesses, "only a decoding sequence drafts"
    draft = step._replace(
        token_ids=step.token_ids[:1] if i == 0 else np.array([-1]),
        position=step.position + i,
        num_paged_keys=step.num_paged_keys - step.num_guesses + i,
        previous_row=previous_row,
        num_guesses=0,
        num_drafts=0,
        edits=None,  # a draft may be any token
        num_logprobs=None,
    )
    for payload in step.payloads:
        draft = payload.in_draft(draft, step, i)
    return draft


def _timed_draft(position: int, block_table: tuple[int, ...], num_keys: int, pages: tuple[int, ...]) -> StepPlan:
    """A draft of one sequence, whose newest `num_keys` keys are in `block_table`. `pages`: empty without a shadow."""
    step = SequenceStep(
        seq_id=0,
        token_ids=np.zeros(1, dtype=np.int64),
        position=position,
        num_prompt_tokens=position + 1,
        block_table=block_table,
        num_paged_keys=num_keys,
        sampling=SamplingRow(),
        payloads=(DraftKeys(pages, block_table, num_keys),) if pages else (),
    )
    return StepPlan((step,), KVMoves())


class _Pass(NamedTuple):
    """Results of the model's pass over a step's tokens. Valid until the next pass."""

    input_ids: torch.Tensor  # int64 [T]
    logits: torch.Tensor  # [S, vocab_size]
    sampled_ids: torch.Tensor  # int64 [S], by these logits
    prompt_logprobs: LogprobTensors | None = None
    hidden: torch.Tensor | None = None  # [T, hidden_size], if there is a draft head


class StepRunner:
    def __init__(self, model: CausalLM, memory: KVMemory, tp: TPGroup) -> None:
        self.model, self.memory, self.spec, self.tp, self.device = model, memory, memory.spec, tp, memory.device
        self.graphs: GraphSet | None = None  # None: every step is launched kernel by kernel
        self._sampled_ids = torch.zeros(0, dtype=torch.int64, device=self.device)  # by the last step
        self._last_end: StepEnd | None = None  # that step's end
        self._drafted = torch.zeros(0, device=self.device)  # hidden states that the draft head yielded last
        # Steps that may still run. A kernel writes their results to pinned memory, which must exist until then.
        self._running: deque[StepResult] = deque()

    def _build_inputs(self, plan: StepPlan) -> StepInputs:
        spec = self.spec
        return build_inputs(plan, spec.block_size, spec.staging_group_blocks, has_states=spec.states is not None)

    def launch(self, plan: StepPlan) -> StepResult:
        """Enqueue a step. Hot."""
        inputs = self._build_inputs(plan)
        self.memory.begin_step(plan)
        drafted_ids = self._draft(plan)
        ran = self._run(plan, inputs)
        asked = edit_inputs(plan, inputs.sampling, self.model.config.vocab_size), sampled_logprob_inputs(plan)
        edited, scored = to_device(asked, self.device)
        if edited is not None:
            resample_edited(edited.edits, edited.sampling, ran.logits, ran.input_ids, ran.sampled_ids)
        self._keep_sampled(ran.sampled_ids)
        logprobs = None if scored is None else sampled_logprobs(scored, ran.logits, self._sampled_ids)
        times = self.memory.end_step()
        tokens = torch.cat([self._sampled_ids, drafted_ids]) if len(drafted_ids) else self._sampled_ids
        result = StepResult(tokens, logprobs, ran.prompt_logprobs, self._last_end, times)
        self._last_end = result.end
        self._running.append(result)
        if self.memory.draft_head is not None:
            assert ran.hidden is not None, "the draft head needs the hidden states of all tokens"
            self._follow(self.memory.draft_head, plan, ran.hidden)
        while self._running and self._running[0].is_done():
            self._running.popleft()
        return result

    def _draft(self, plan: StepPlan) -> torch.Tensor:
        """Draft tokens by the keys that are on the GPU, one after another: see StepPlan.draft_rows.

        The K/V of drafts go to the cells of the guesses, and the step's own pass writes them again. Meanwhile the keys
        of its first layers are on their way. From here on the drafted tokens are where the step finds its pending ones.
        """
        steps = draft_steps(plan)
        if not steps:
            return self._sampled_ids[:0]
        head = self.memory.draft_head
        drafted: list[torch.Tensor] = []
        if head is None:
            assert not (plan.moves.loads or plan.moves.copies), "a draft would read slots before they are filled"
            self.memory.begin_all_layers()
        for step in steps:
            if head is None:
                sampled_ids = self._run(step, self._build_inputs(step), is_draft=True).sampled_ids
            else:
                sampled_ids = self._run_head(head, step, is_first=not drafted)
            self._keep_sampled(sampled_ids)
            drafted.append(self._sampled_ids.clone())
        self._sampled_ids = torch.cat(drafted)
        self._share_with_graphs()
        return self._sampled_ids

    def _run_head(self, head: DraftHead, plan: StepPlan, is_first: bool) -> torch.Tensor:
        """Draft a token of each sequence. Returns their ids. The first ones are known but for the head's logits."""
        inputs = draft_inputs(plan, self.spec.block_size)
        before = head.first_rows(plan) if is_first else inputs.pending_rows
        sampling, rows = to_device((inputs.sampling, before), self.device)
        if is_first:
            self._drafted = head.kept[rows]
        else:
            self._drafted = self._draft_hidden(head, plan, inputs, self._drafted[rows])
        return sample(self.model.compute_logits(self._drafted), sampling)

    def _follow(self, head: DraftHead, plan: StepPlan, hidden: torch.Tensor) -> None:
        """Let the draft head go through the tokens of a step that has run. `hidden`: the model's, of all tokens."""
        followed = followed_plan(plan, self.spec.block_size)
        inputs = followed_inputs(followed, self.spec.block_size)
        kept_rows = to_device(head.kept_rows(followed), self.device)
        head.kept[kept_rows] = self._draft_hidden(head, followed, inputs, hidden)

    def _draft_hidden(self, head: DraftHead, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Run the draft head: see CausalLM.draft. Returns its results where the plan samples, [S, hidden_size]."""
        graphs = None if self.graphs is None else self.graphs.find_head(plan)
        if graphs is not None:
            return graphs.run(inputs, hidden)
        tensors = to_device(inputs, self.device)
        batches, rows = build_batches(plan, tensors, self.spec.block_size), None
        if not plan.is_decode:
            batches, rows = last_token_batches(plan, batches, tensors), tensors.logits_rows
        copies = find_payload(plan.moves.payloads, PageCopies)
        attention = HeadAttention(head, tensors.slot_mapping, batches.paged, () if copies is None else copies.copies)
        rope_lens = tensors.rope_lens if self.model.needs_rope_lens else None
        return self.model.draft(self._known_ids(tensors), tensors.positions, hidden, attention, rope_lens, rows)

    def _known_ids(self, tensors: StepInputs) -> torch.Tensor:
        """The input ids of a step, with those sampled last in the places of pending ones, which the host may not have
        yet. An invalid id ends its request soon; while start-up only compiles kernels, they are arbitrary.
        """
        if not len(self._sampled_ids):
            return tensors.input_ids
        pending, last = tensors.pending_rows, self.model.config.vocab_size - 1
        pending_ids = self._sampled_ids[pending.clamp(min=0)].clamp_(0, last)
        return torch.where(pending < 0, tensors.input_ids, pending_ids)

    @torch.inference_mode()
    def measure_drafts(self, max_model_len: int) -> DraftTimes:
        """Time drafts of one sequence that has as many keys as fit into the GPU's blocks, the shadow, or the pages of
        the draft head.
        """
        size, num_blocks = self.spec.block_size, self.memory.cache[0].shape[1]
        if self.memory.draft_head is not None:
            num_keys = min(len(self.memory.draft_head.cache[0]) * size, max_model_len)
            few_s, many_s = (self._head_draft_s(keys) for keys in (min(size, num_keys), num_keys))
            key_s = max(0.0, many_s - few_s) / num_keys
            return DraftTimes(many_s - num_keys * key_s, key_s)
        if self.memory.shadow is None:
            num_keys = min(num_blocks * size, max_model_len)
            table = tuple(range(ceil_div(num_keys, size)))
            return DraftTimes(self._draft_s(_timed_draft(num_keys - 1, table, num_keys, ())))
        num_pages = max(1, min(self.memory.shadow.pages_LNKW.shape[1], max_model_len // size))
        if self.device.type == "cpu":
            num_pages = min(num_pages, MAX_TIMED_CPU_PAGES)
        few, many = (
            self._draft_s(_timed_draft(max_model_len - 1, (0,), size, tuple(range(pages)))) for pages in (1, num_pages)
        )
        key_s = max(0.0, many - few) / (num_pages * size)
        return DraftTimes(many - num_pages * size * key_s, key_s)

    def _head_draft_s(self, num_keys: int) -> float:
        """Time a draft by the draft head after so many keys. The first one of a step takes less."""
        most = 1 if self.spec.states is None else self.spec.states.max_guesses
        num_drafts = max(1, min(NUM_TIMED_STEPS, most, num_keys - 1))
        pages = tuple(range(ceil_div(num_keys, self.spec.block_size)))
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
        for _ in range(2):  # the first ones may be slow
            start_s = time.perf_counter()
            self._draft(StepPlan((step,), KVMoves())).cpu()
        return (time.perf_counter() - start_s) / num_drafts

    def _draft_s(self, plan: StepPlan) -> float:
        for num_steps in (2, NUM_TIMED_STEPS):  # the first ones may be slow
            start_s = time.perf_counter()
            for _ in range(num_steps):
                ran = self._run(plan, self._build_inputs(plan), is_draft=True)
            ran.sampled_ids.cpu()
        return (time.perf_counter() - start_s) / NUM_TIMED_STEPS

    def _run(self, plan: StepPlan, inputs: StepInputs, is_draft: bool = False) -> _Pass:
        """One pass of the model, by graphs if they can run it."""
        graphs = None if self.graphs is None else self.graphs.find(plan, is_draft)
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
        sampled_ids = buffers.sampled_ids[:num_rows]
        return _Pass(buffers.read_ids(num_rows), logits, sampled_ids, hidden=buffers.hidden[:num_rows])

    def _run_in_parts(self, plan: StepPlan, inputs: StepInputs, is_draft: bool) -> _Pass:
        """Run any step. Its layers may still be a graph; the sampler is always launched kernel by kernel."""
        size = None if self.graphs is None or is_draft else self.graphs.find_mixed(plan)
        if size is None:
            tensors = to_device(inputs, self.device)
            input_ids, hidden, has_all_rows = self._launch_layers(plan, tensors, is_draft)
            logits_rows, sampling = tensors.logits_rows, tensors.sampling
        else:
            assert self.graphs is not None and self.graphs.mixed is not None
            self.memory.begin_all_layers()
            hidden, has_all_rows = self.graphs.mixed.replay(plan, inputs, size), True
            self.memory.ran_all_layers()
            input_ids = self.graphs.buffers.read_ids(len(hidden))
            logits_rows, sampling = to_device((inputs.logits_rows, inputs.sampling), self.device)
        vocab_size, logprobs, all_hidden = self.model.config.vocab_size, None, hidden if has_all_rows else None
        if scored := to_device(prompt_logprob_inputs(plan), self.device):
            logprobs = prompt_logprobs(scored, hidden, self.model.compute_logits, vocab_size)
        if has_all_rows and not plan.is_decode:
            hidden = hidden[logits_rows]
        if not len(hidden):
            return _Pass(input_ids, hidden.new_empty(0, vocab_size), self._sampled_ids[:0], logprobs, all_hidden)
        logits = self.model.compute_logits(hidden)
        return _Pass(input_ids, logits, sample(logits, sampling), logprobs, all_hidden)

    def _launch_layers(
        self, plan: StepPlan, tensors: StepInputs, is_draft: bool
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Without graphs. Returns the token ids, the hidden states after the last layer, and whether these are of all
        tokens or only of those after which the step samples.
        """
        input_ids = self._known_ids(tensors) if plan.has_pending else tensors.input_ids
        rope_lens = tensors.rope_lens if self.model.needs_rope_lens else None
        needs_all = plan.is_decode or plan.has_scores or self.memory.draft_head is not None
        rows = None if needs_all else tensors.logits_rows
        attention = self._attention(plan, tensors, needs_all, is_draft)
        return input_ids, self.model(input_ids, tensors.positions, attention, rope_lens, rows), needs_all

    def _attention(self, plan: StepPlan, tensors: StepInputs, needs_all: bool, is_draft: bool) -> StepAttention:
        """`needs_all`: the last layer returns all rows."""
        batches, states = build_batches(plan, tensors, self.spec.block_size), state_rows(plan, tensors)
        if is_draft:
            return self.memory.draft_attention(tensors.slot_mapping, batches.paged, states, batches.shadow)
        ends_otherwise = self.model.config.layer_kinds[-1] != "attention"  # all attention layers attend to all rows
        last = batches if needs_all or ends_otherwise else last_token_batches(plan, batches, tensors)
        return self.memory.attention(plan, tensors.slot_mapping, batches, last, states)

    def _keep_sampled(self, sampled_ids: torch.Tensor) -> None:
        """Keep the tokens of a pass, those of rank 0 on every rank, where the next one finds them."""
        if len(sampled_ids):
            self._sampled_ids = self.tp.broadcast(sampled_ids)
            self._share_with_graphs()
        else:
            self._sampled_ids = self._sampled_ids[:0]

    def _share_with_graphs(self) -> None:
        """Put the tokens sampled last where the next graph reads them, unless a graph has sampled them there."""
        if self.graphs is None:
            return
        shared = self.graphs.buffers.sampled_ids[: len(self._sampled_ids)]
        if shared.data_ptr() != self._sampled_ids.data_ptr():
            shared.copy_(self._sampled_ids)
