"""Drafts of the checkpoint's draft head are those of a plain one, and they change no token, whatever its weights."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checked_engine import ALL_GPU, OFFLOAD, CheckedLLM, Reference, cache_options, greedy, small_staging
from content_model import page_copies
from cpu_runner import HostlessTorch, graph_buffers
from cpu_splits import splitting
from dense_model import random_prompt
from model_files import edit_json
from offload_workload import BLOCK, MIXED, RESUMED, prompts_of, serve_everything, serve_resumed
from plain_head import PlainHead, let_head_agree
from simulated_streams import SimulatedStreams
from tiny_models import write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.capabilities.draft_head.drafts import DraftHead, HeadDrafts, HeadGraphs
from nanovllm.checkpoint.read_config import config_without_weights
from nanovllm.engine.setup import Internals
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.plan.step_limits import head_graph_sizes
from nanovllm.runner.step_runner import GraphSet

SLOW = pytest.mark.slow
ALWAYS = Internals(always_guesses=True)
MTP: dict[str, Any] = {"speculation": "mtp", "num_speculative_tokens": 4}
PROMPTS = prompts_of(3 * BLOCK - 5, 40, BLOCK - 3, 2 * BLOCK)  # answers cross the edges of blocks
SIZES: dict[str, Any] = {"num_layers": 4, "max_position_embeddings": 8192, "with_mtp": True}
SOMETIMES = 0.003  # see let_head_agree: with it, half of the guesses are right


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The head has random weights."""
    return Reference(write_tiny_model(tmp_path_factory.mktemp("stranger"), "qwen3_5", **SIZES))


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Half of the guesses are right."""
    directory = write_tiny_model(tmp_path_factory.mktemp("helper"), "qwen3_5", **SIZES)
    return Reference(let_head_agree(directory, SOMETIMES))


class GuessingLLM(CheckedLLM):
    """Compares the logits of every draft with those of the plain head over the whole text."""

    def __init__(self, reference: Reference, **options: Any) -> None:
        super().__init__(reference, **({"internals": ALWAYS} | options | MTP))
        self.head = PlainHead(reference.directory)
        self.draft_logits: list[torch.Tensor] = []

    def _recording_compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = super()._recording_compute_logits(hidden, out)
        if self.is_drafting:
            self.draft_logits += logits
        return logits

    def answer_and_check_guesses(self, prompts: list[list[int]], max_tokens: int) -> int:
        """Returns how many guesses there were."""
        first_plan = len(self.plans)
        self.draft_logits.clear()
        ids = [self.add_request(prompt, greedy(max_tokens)) for prompt in prompts]
        finished = self.finish_all()
        texts = {i: prompt + finished[i]["token_ids"] for i, prompt in zip(ids, prompts, strict=True)}
        hidden = {i: self.head.hidden(text) for i, text in texts.items()}
        ours = iter(self.draft_logits)
        for plan in self.plans[first_plan:]:
            expected: dict[int, torch.Tensor] = {}
            for i, rows in enumerate(plan.draft_rows()):
                for row in rows:
                    step = plan.sequences[row]
                    if row not in expected:
                        known = step.position + 1
                        text, states = texts[step.seq_id][:known], hidden[step.seq_id][: known - 1]
                        _, expected[row] = self.head.guess(text, states, step.num_drafts - 1)
                    error = (next(ours) - expected[row][step.position - 1 + i]).abs().max()
                    assert error < 2e-4, f"guess {i} after token {step.position} has logits that are {error:.1e} off"
        assert next(ours, None) is None
        self.assert_nothing_left()
        return len(self.draft_logits)


@pytest.mark.parametrize(
    ("model", "num_gpu_blocks", "max_num_batched_tokens"),
    [
        *(("helper", None, 37), ("stranger", 2, 300)),
        *(pytest.param("helper", *case, marks=SLOW) for case in ((2, 37), (3, 5000))),
        *(pytest.param("stranger", *case, marks=SLOW) for case in ((None, 300), (2, 37))),
    ],
)
def test_guesses_are_those_of_the_plain_head(
    request: pytest.FixtureRequest, model: str, num_gpu_blocks: int | None, max_num_batched_tokens: int
) -> None:
    options = cache_options(num_gpu_blocks) | {"max_num_batched_tokens": max_num_batched_tokens}
    with GuessingLLM(request.getfixturevalue(model), **options) as llm:
        assert llm.answer_and_check_guesses(PROMPTS[1:], max_tokens=12) > 15
        assert (llm.stats()["num_accepted_guesses"] > 5) == (model == "helper")


def head_of_runner(runner: Any) -> DraftHead:
    assert isinstance(runner.steps.drafts, HeadDrafts)
    return runner.steps.drafts.head


class ReplayingLLM(GuessingLLM):
    """The head's graphs are replayed: what one would hold is launched, on the same static inputs."""

    def __init__(self, reference: Reference, **options: Any) -> None:
        super().__init__(reference, **options)
        runner: Any = self.runner
        head, config = head_of_runner(runner), runner.model.config
        paddings = runner.memory.column_paddings
        buffers = graph_buffers(runner, 40, column_paddings=paddings, hidden_size=config.hidden_size)
        self.head_graphs = HeadGraphs(
            head_graph_sizes(40), 1 + MTP["num_speculative_tokens"], buffers, runner.memory, head
        )
        sizes = self.head_graphs.sizes
        self.head_graphs._graphs = {
            size: [SimpleNamespace(replay=lambda size=size: self._run_size(size))] for size in sizes
        }
        self.num_rows: list[int] = []
        graphs: Any = SimpleNamespace(draft_graphs=self.head_graphs, buffers=buffers, kinds=[], reset=lambda: None)
        graphs.find = graphs.find_mixed = lambda *args: None
        graphs.share = lambda sampled_ids: GraphSet.share(graphs, sampled_ids)
        runner.steps.graphs = graphs

    @torch.inference_mode()
    def _run_size(self, size: int) -> None:
        runner: Any = self.runner
        self.num_rows.append(size)
        head = head_of_runner(runner)
        own, head.backend = head.backend, HostlessTorch()
        self.head_graphs.launch_kernels(runner.model, size)
        head.backend = own


@pytest.mark.parametrize("num_gpu_blocks", [None, 2])
def test_the_head_runs_as_graphs_where_a_step_only_decodes(helper: Reference, num_gpu_blocks: int | None) -> None:
    """Rows of padding, chains of drafts that end at different lengths, and steps with several tokens of a sequence."""
    with ReplayingLLM(helper, **cache_options(num_gpu_blocks)) as llm:
        assert llm.answer_and_check_guesses(PROMPTS[1:], max_tokens=12) > 15
        assert llm.stats()["num_accepted_guesses"] > 5
        assert {1, 4, 8} <= set(llm.num_rows)


def test_guesses_may_follow_the_last_token_of_a_prompt(helper: Reference) -> None:
    """It is in a step of its own, and the step before samples nothing."""
    with GuessingLLM(helper, **ALL_GPU, max_num_batched_tokens=40) as llm:
        llm.answer_and_check_guesses([random_prompt(41)], max_tokens=6)
        assert llm.plans[1].sequences[0].position == 40 and llm.plans[1].draft_rows()
        stats = llm.stats()
        assert (stats["num_prefill_tokens"], stats["num_decode_tokens"]) == (41, 5)


@pytest.mark.parametrize("num_gpu_blocks", [None, pytest.param(2, marks=SLOW)])
def test_a_prefix_hit_finds_the_keys_of_the_head(helper: Reference, num_gpu_blocks: int | None) -> None:
    """The second text goes on as the first one did, so the cells of the hit are its own."""
    prompt = random_prompt(2 * BLOCK + 9)
    with GuessingLLM(helper, **cache_options(num_gpu_blocks)) as llm:
        for num_hits in (0, 2 * BLOCK):
            before = llm.num_computed_tokens
            assert llm.answer_and_check_guesses([prompt], max_tokens=8) > 3
            assert llm.plans[-1].sequences and llm.num_computed_tokens - before >= len(prompt) - num_hits
        assert llm.stats()["num_state_loads"] == 1


def test_a_hit_inside_a_block_copies_the_keys_of_the_head(helper: Reference) -> None:
    prompt = random_prompt(2 * BLOCK + 200)
    options = OFFLOAD | {"kvcache_block_size": 4 * BLOCK, "num_gpu_blocks": 3}
    with GuessingLLM(helper, **options) as llm:
        for _ in range(2):
            assert llm.answer_and_check_guesses([prompt], max_tokens=8) > 3
        assert [copy.num_tokens for plan in llm.plans for copy in page_copies(plan)] == [2 * BLOCK]


@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_everything_at_once(helper: Reference, num_gpu_blocks: int | None) -> None:
    """Hits, preemption, an abort; the ranks run ahead of the host where nothing is guessed."""
    streams = SimulatedStreams("random", 0) if num_gpu_blocks else None
    internals = replace(ALWAYS, works_ahead=True)
    with CheckedLLM(helper, streams=streams, internals=internals, **(cache_options(num_gpu_blocks) | MTP)) as llm:
        serve_everything(llm)
        assert llm.stats()["num_accepted_guesses"] > 0 and llm.stats()["num_preemptions"] > 0


@SLOW
def test_a_preempted_sequence_is_back_in_another_slot(helper: Reference) -> None:
    with CheckedLLM(helper, internals=ALWAYS, **(OFFLOAD | RESUMED | MTP)) as llm:
        serve_resumed(llm)


def test_the_cpu_attends_and_the_head_drafts(helper: Reference) -> None:
    options = OFFLOAD | MTP | {"num_gpu_blocks": 2, "cpu_attention": "on"}
    with CheckedLLM(helper, internals=splitting(100, always_guesses=True), **options) as llm:
        llm.answer_and_check(MIXED)
        assert any(any(plan.moves.cpu_spans) and plan.draft_rows() for plan in llm.plans)


PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=16, ignore_eos=True, **others)
    for temperature, seed, others in (
        (0.0, 0, {}),
        (1.0, 1, {"top_p": 0.9}),
        (1.5, 2, {"repetition_penalty": 1.3, "logprobs": 2}),
        (0.7, 3, {"frequency_penalty": 0.6, "min_p": 0.05, "logit_bias": {7: 4.0}}),
    )
]


@pytest.mark.parametrize("num_gpu_blocks", [None, pytest.param(2, marks=SLOW)])
def test_sampled_tokens_are_those_without_guesses(helper: Reference, num_gpu_blocks: int | None) -> None:
    answers = []
    for speculation in ("off", "mtp"):
        options = cache_options(num_gpu_blocks) | MTP | {"speculation": speculation}
        with CheckedLLM(helper, internals=ALWAYS, **options) as llm:
            answers.append([output["token_ids"] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)])
            stats = llm.stats()
    assert answers[0] == answers[1]
    assert stats["num_accepted_guesses"] > 10


def test_a_head_that_agrees_is_always_right_at_any_temperature(tmp_path: Path) -> None:
    """The draws of drafts have the noise of the tokens that they guess."""
    reference = Reference(let_head_agree(write_tiny_model(tmp_path, "qwen3_5", **SIZES), 0.0))
    with CheckedLLM(reference, internals=ALWAYS, **ALL_GPU, **MTP) as llm:
        llm.generate(PROMPTS[1:3], PARAMS[:2], use_tqdm=False)
        assert llm.stats()["guess_acceptance"] == 1


@pytest.mark.parametrize("value", [float("nan"), *(pytest.param(value, marks=SLOW) for value in (0.0, float("inf")))])
def test_a_broken_head_costs_time_and_no_token(helper: Reference, value: float) -> None:
    with CheckedLLM(helper, internals=ALWAYS, **ALL_GPU, **MTP) as llm:
        llm.runner.model.mtp.fc.weight.data.mul_(value)
        llm.answer_and_check(PROMPTS, max_tokens=10)
        assert llm.stats()["num_guesses"] > 30
        llm.assert_nothing_left()


@pytest.mark.parametrize("num_gpu_blocks", [pytest.param(None, marks=SLOW), 2])
def test_auto_knows_the_head(helper: Reference, num_gpu_blocks: int | None) -> None:
    """It takes the place of other drafts, and is used as far as it gains."""
    options = cache_options(num_gpu_blocks) | {"speculation": "auto"}
    with CheckedLLM(helper, internals=small_staging(BLOCK, 2), **options) as llm:
        assert [drafter.name for drafter in llm.scheduler.speculator.drafters] == ["prompt_lookup", "mtp"]
        assert llm.scheduler.speculator.times._drafts.base_s > 0
        llm.answer_and_check(PROMPTS, max_tokens=6)


def test_auto_does_without_a_head_whose_keys_take_too_much(helper: Reference, caplog: pytest.LogCaptureFixture) -> None:
    options = cache_options(2) | {"speculation": "auto", "gpu_memory_utilization": 1e-6}
    with caplog.at_level(logging.INFO, "nanovllm"), CheckedLLM(helper, **options) as llm:
        assert [drafter.name for drafter in llm.scheduler.speculator.drafters] == ["prompt_lookup", "resident"]
        assert llm.runner.model.mtp is None and not isinstance(llm.runner.steps.drafts, HeadDrafts)
        assert re.search("draft head: left out, its K and V would take 2.50 MiB", caplog.text)
        llm.answer_and_check(PROMPTS[1:3], max_tokens=4)


@SLOW
def test_two_ranks(helper: Reference) -> None:
    answers = []
    for options in ({"speculation": "off"}, MTP | {"tensor_parallel_size": 2}):
        given = cache_options(2) | options | {"dtype": "float32", "device": "cpu"}
        with LLM(str(helper.directory), internals=ALWAYS, **given) as llm:
            answers += [
                [output["token_ids"] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] for _ in range(2)
            ]
            stats = llm.stats()
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert stats["num_accepted_guesses"] > 20


@SLOW
@pytest.mark.parametrize("scale", [1.0, SOMETIMES])
def test_experts(tmp_path: Path, scale: float) -> None:
    directory = write_tiny_model(tmp_path, "qwen3_5_moe", **SIZES)
    reference = Reference(directory if scale == 1 else let_head_agree(directory, scale))
    for num_gpu_blocks in (None, 3):
        with GuessingLLM(reference, **cache_options(num_gpu_blocks)) as llm:
            assert llm.answer_and_check_guesses(PROMPTS, max_tokens=10) > 20
            assert (llm.stats()["num_accepted_guesses"] > 5) == (scale < 1)


def test_auto_does_without_the_head_if_blocks_come_from_disk(helper: Reference, tmp_path: Path) -> None:
    with CheckedLLM(helper, **ALL_GPU, speculation="auto", kv_disk_path=str(tmp_path)) as llm:
        assert [drafter.name for drafter in llm.scheduler.speculator.drafters] == ["prompt_lookup"]
        assert llm.runner.model.mtp is None


@pytest.mark.parametrize("sharded", [False, True])
def test_a_head_that_only_config_json_has_is_not_used(tmp_path: Path, sharded: bool) -> None:
    """Regression: tools that quantize leave the head out. Then "auto" failed, and "mtp" did once all was loaded."""
    directory = write_tiny_model(tmp_path, "qwen3_5", num_layers=4, sharded=sharded)
    edit_json(tmp_path / "config.json", mtp_num_hidden_layers=1)
    with CheckedLLM(Reference(directory), **ALL_GPU, speculation="auto") as llm:
        assert [drafter.name for drafter in llm.scheduler.speculator.drafters] == ["prompt_lookup"]
        llm.answer_and_check(PROMPTS[1:2])
    assert not config_without_weights(str(directory)).has_mtp  # regression: `plan` counted it
    with pytest.raises(ConfigError, match=r"speculation='mtp' drafts with the head .* which .* does not have"):
        LLM(str(directory), device="cpu", speculation="mtp")
    if not sharded:
        nested = b"[" * 100_000  # regression: it raised RecursionError
        for content in (b"", b"\xff" * 100, (3).to_bytes(8, "little") + b"[1]", (10**5).to_bytes(8, "little") + nested):
            (tmp_path / "model.safetensors").write_bytes(content)
            with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
                LLM(str(directory), device="cpu", speculation="mtp")


def test_a_head_that_is_missing_or_does_not_fit_is_refused(tmp_path: Path, stranger: Reference) -> None:
    without = write_tiny_model(tmp_path, "qwen3_5", num_layers=4)
    with pytest.raises(ConfigError, match=r"speculation='mtp' drafts with the head .* which .* does not have"):
        LLM(str(without), device="cpu", speculation="mtp")
    with pytest.raises(ConfigError, match="speculation='mtp' needs the draft head's own K and V, which kv_disk_path"):
        LLM(str(stranger.directory), device="cpu", speculation="mtp", kv_disk_path="x")
    with pytest.raises(ConfigError, match=r"no room for num_gpu_blocks=2 .*smaller CPU pool.* head takes 2\.50 MiB"):
        LLM(str(stranger.directory), device="cpu", **(OFFLOAD | MTP), gpu_memory_utilization=1e-6)
