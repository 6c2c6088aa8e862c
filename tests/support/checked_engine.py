"""An LLM on a tiny model whose every logit is compared with transformers', and the hooks that tests drive it with.

Comparing logits, and not tokens alone, tells when a single key of thousands is missing.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from integrity import check_scheduler
from simulated_streams import SimulatedStreams, TrackedAttention, TrackedBackend, tracked_fill
from tiny_models import reference_model

from nanovllm import LLM, SamplingParams
from nanovllm.capabilities.shadow.memory import Shadow
from nanovllm.capabilities.speculation.drafters import Drafter
from nanovllm.engine.setup import Internals
from nanovllm.offload.offload_engine import OffloadEngine
from nanovllm.plan.kv_spec import StagingSizes
from nanovllm.plan.outputs import RequestOutput
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_limits import max_step_rows
from nanovllm.plan.step_plan import StepPlan

TOLERANCE = 1e-4  # for logits in fp32
OFFLOAD = {
    "enable_cpu_offload": True,
    "num_cpu_blocks": 40,
    "kvcache_block_size": 256,
    "cpu_attention": "off",
    "speculation": "off",
}
ALL_GPU = {"num_kvcache_blocks": 40}
BeforeStep = Callable[[int], None]  # gets the number of the step that follows, from 0 on
WORKS_AHEAD = Internals(works_ahead=True)  # as on a GPU: plan a step before the tokens of the last one are back


def cache_options(num_gpu_blocks: int | None) -> dict[str, Any]:
    """The cache with so many slots; None: all on the GPU."""
    return dict(ALL_GPU) if num_gpu_blocks is None else OFFLOAD | {"num_gpu_blocks": num_gpu_blocks}


def small_staging(group_tokens: int, num_groups: int) -> Internals:
    """Staging for few tokens, so that a few blocks fill it and it wraps."""
    return Internals(staging=StagingSizes(group_tokens, num_groups))


def speculating(drafter: Drafter, internals: Internals = Internals()) -> Internals:
    """Guess in every step, whatever is gained."""
    return replace(internals, drafters=(drafter,), always_guesses=True)


def greedy(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class Reference:
    """transformers on the CPU in fp32; remembers what it was asked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._model = reference_model(directory)
        self._logits: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}

    def logits(self, token_ids: list[int], num_last: int) -> torch.Tensor:
        """The logits of the last positions, [num_last, vocab_size]."""
        key = tuple(token_ids), num_last
        if key not in self._logits:
            with torch.inference_mode():
                self._logits[key] = self._model(torch.tensor([token_ids]), logits_to_keep=num_last).logits[0]
        return self._logits[key]

    def check(self, prompt: list[int], answer: list[int], rows: list[torch.Tensor]) -> None:
        """`answer` is the greedy answer, and each of its logits is right."""
        expected = self.logits(prompt + answer[:-1], len(answer))
        assert answer == expected.argmax(-1).tolist(), f"prompt of {len(prompt)} tokens is answered wrongly"
        error = (torch.stack(rows) - expected).abs().max().item()
        assert error < TOLERANCE, f"prompt of {len(prompt)} tokens: logits are {error:.1e} off"


class CheckedLLM(LLM):
    """Records the logits of each request and the plans of all steps. `streams`: None for those of the device."""

    def __init__(
        self,
        reference: Reference,
        *,
        streams: SimulatedStreams | None = None,
        internals: Internals = Internals(),
        **options: Any,
    ) -> None:
        self.reference = reference
        defaults = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 300, "enforce_eager": True}
        if streams is not None:
            internals = replace(internals, make_offload_engine=lambda *args: OffloadEngine(*args, streams))
        super().__init__(str(reference.directory), internals=internals, **(defaults | options))
        if streams is not None:
            self._track(streams)
        self.plans: list[StepPlan] = []
        self.logits: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.is_drafting = False
        self._launch, self._compute_logits = self.runner.launch, self.runner.model.compute_logits
        self._draft = self.runner.steps.draft
        self.runner.launch, self.runner.steps.draft = self._recording_launch, self._noted_draft
        self.runner.model.compute_logits = self._recording_compute_logits

    def _track(self, streams: SimulatedStreams) -> None:
        """Let `streams` know what the model reads and writes."""
        runner, memory = self.runner, self.runner.memory
        drafts = self.runner.steps.drafts
        attention, draft_attention = memory.attention, drafts.attention  # for a step, and for its drafts
        memory.attention = lambda *args: TrackedAttention(attention(*args), streams)
        drafts.attention = lambda *args: TrackedAttention(draft_attention(*args), streams)
        for companion in memory.companions:
            if isinstance(companion, Shadow):
                companion._fill = tracked_fill(companion._fill, streams)
        memory.backend = TrackedBackend(memory.backend, streams)
        for name in ("k_cache_cpu", "v_cache_cpu", "k_cache_gpu", "v_cache_gpu", "k_staging", "v_staging"):
            streams.name_region(name, getattr(runner.offload, name))

    def _recording_launch(self, plan: StepPlan) -> Any:
        num_rows = max_step_rows(self.config, self.stats()["num_gpu_blocks"])
        assert plan.num_sampled <= num_rows, f"{plan.num_sampled} tokens are sampled, there is room for {num_rows}"
        self.plans.append(plan)
        return self._launch(plan)

    def _noted_draft(self, plan: StepPlan) -> torch.Tensor:
        self.is_drafting = True
        try:
            return self._draft(plan)
        finally:
            self.is_drafting = False

    def _recording_compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._compute_logits(hidden, out)
        if not self.is_drafting:
            self.record_logits(logits.float().cpu().clone())
        return logits

    def record_logits(self, logits: torch.Tensor) -> None:
        """The drafts of the step that was launched last. After a wrong guess, the next step's take their places."""
        rows = iter(logits)
        for step in self.plans[-1].sequences:
            if step.sampling is not None:
                known = self.logits[step.seq_id]
                del known[step.sampled_position - step.num_prompt_tokens :]
                known.extend(next(rows) for _ in range(step.num_sampled))
        assert next(rows, None) is None, "more logits than the step samples"

    # -- requests by hand ----------------------------------------------------------------------------------------

    def finish_all(self, before_step: BeforeStep | None = None) -> dict[int, RequestOutput]:
        """Step until no request is left."""
        finished: dict[int, RequestOutput] = {}
        for num_step in count():
            if self.is_finished():
                break
            if before_step is not None:
                before_step(num_step)
            finished |= self.step().finished
        return finished

    def check(self, request_id: int, prompt: list[int], output: RequestOutput) -> None:
        rows = self.logits[request_id][: len(output["token_ids"])]  # a step may have run ahead
        self.reference.check(prompt, output["token_ids"], rows)

    def answer_and_check(
        self, prompts: list[list[int]], max_tokens: int = 6, before_step: BeforeStep | None = None
    ) -> list[RequestOutput]:
        """All prompts together; checks every answer and every logit."""
        ids = [self.add_request(prompt, greedy(max_tokens)) for prompt in prompts]
        finished = self.finish_all(before_step)
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.check(request_id, prompt, finished[request_id])
        return [finished[request_id] for request_id in ids]

    def preempt_next(self) -> None:
        """Once, a running sequence finds no room, so that the tail of running must go. Waits until two run."""
        kv = self.scheduler.kv
        num_placeable, admit = kv.num_placeable, kv.admit
        admitted_at: set[int] = set()  # steps; a running sequence's room is certain once others are admitted

        def no_room(seq: Sequence, num_tokens: int) -> int:
            if len(self.plans) in admitted_at or len(self.scheduler.running) < 2:
                return num_placeable(seq, num_tokens)
            kv.num_placeable, kv.admit = num_placeable, admit  # type: ignore[method-assign]
            return 0

        def noted_admit(seq: Sequence) -> None:
            admitted_at.add(len(self.plans))
            admit(seq)

        kv.num_placeable, kv.admit = no_room, noted_admit  # type: ignore[method-assign]

    # -- checks --------------------------------------------------------------------------------------------------

    @property
    def num_computed_tokens(self) -> int:
        return sum(plan.num_tokens for plan in self.plans)

    def assert_nothing_left(self) -> None:
        check_scheduler(self.scheduler)
        stats = self.stats()
        kind = "cpu" if self.config.enable_cpu_offload else "gpu"
        assert stats[f"num_{kind}_blocks"] == stats[f"num_free_{kind}_blocks"]
        assert stats["num_running"] == stats["num_waiting"] == 0
