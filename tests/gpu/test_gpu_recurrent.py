"""Models with recurrent layers or windows on a GPU: states inside CUDA graphs and in pinned memory, and the error in
bf16.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_engine import Reference, cache_options, speculating
from dense_model import random_prompt
from gpu_llm import GpuLLM
from odd_drafters import drafter_of
from offload_workload import BLOCK, DOCUMENT, prompts_of, serve_everything
from plain_head import let_head_agree
from tiny_models import write_tiny_model

from nanovllm.engine.setup import Internals
from nanovllm.plan.step_plan import StepPlan

pytestmark = pytest.mark.gpu

PROMPTS = prompts_of(3 * BLOCK - 5, 40, BLOCK - 3, 2 * BLOCK)
CACHES = pytest.mark.parametrize("num_gpu_blocks", [None, 3], ids=["all-GPU", "streamed"])


@pytest.mark.parametrize("enforce_eager", [False, True])
@CACHES
def test_everything_at_once(stateful: Reference, num_gpu_blocks: int | None, enforce_eager: bool) -> None:
    """Chunks, hits, preemption, an abort."""
    with GpuLLM(stateful, enforce_eager=enforce_eager, **cache_options(num_gpu_blocks)) as llm:
        serve_everything(llm)
        assert llm.stats()["num_state_loads"] > 0
        name = "resident" if num_gpu_blocks is None else "streamed"
        assert (llm.num_replays[name] > 3) == (not enforce_eager)


@CACHES
def test_questions_of_any_length_reuse_the_document(stateful: Reference, num_gpu_blocks: int | None) -> None:
    questions = [DOCUMENT + random_prompt(length, seed=length) for length in (300, 30, 700, 1)]
    end = len(DOCUMENT) // BLOCK * BLOCK
    with GpuLLM(stateful, **cache_options(num_gpu_blocks)) as llm:
        hits = [llm.answer_and_check([question])[0]["num_cached_tokens"] for question in questions]
        assert hits == [0, 0, end, end]


def knowing(kind: str, reference: Reference) -> Internals:
    """An engine that always guesses, with a drafter that knows the answers to PROMPTS."""
    with GpuLLM(reference, **cache_options(None)) as llm:
        outputs = llm.answer_and_check(PROMPTS, max_tokens=40)
    return speculating(drafter_of(kind, PROMPTS, [output["token_ids"] for output in outputs]))


@pytest.mark.parametrize(
    ("kind", "num_gpu_blocks"), [("mixed", None), ("random", 3), ("drafts", None), ("drafts", 3), ("wrong", 24)]
)
def test_guesses_in_graphs_leave_no_trace(stateful: Reference, kind: str, num_gpu_blocks: int | None) -> None:
    """One sequence, then four with different numbers of guesses and prompts mixed in."""
    options = cache_options(num_gpu_blocks) | {"speculation": "auto", "max_num_batched_tokens": 700}
    options |= {"num_speculative_tokens": 15}  # with 63, right guesses need hardly a pass
    with GpuLLM(stateful, internals=knowing(kind, stateful), **options) as llm:
        llm.answer_and_check(PROMPTS[:1], max_tokens=40)
        llm.answer_and_check(PROMPTS, max_tokens=40)
        assert llm.num_replays["streamed verifying" if num_gpu_blocks == 3 else "resident verifying"] > 3
        if kind in ("drafts", "mixed"):
            assert llm.num_replays["draft"] > 10
        if kind == "drafts" and num_gpu_blocks is None:
            assert llm.stats()["guess_acceptance"] == 1
        llm.assert_nothing_left()


def test_shadow_drafts_in_graphs(stateful: Reference) -> None:
    internals = replace(Internals(always_guesses=True), works_ahead=True)
    options = cache_options(3) | {"speculation": "shadow", "num_speculative_tokens": 7}
    with GpuLLM(stateful, internals=internals, **options) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=40)
        assert llm.num_replays["draft"] > 10 and llm.stats()["num_accepted_guesses"] > 0


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def with_head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A model whose draft head is often right."""
    directory, sizes = tmp_path_factory.mktemp("head"), {"num_layers": 4, "max_position_embeddings": 8192}
    return Reference(let_head_agree(write_tiny_model(directory, request.param, **sizes, with_mtp=True), 0.003))


@CACHES
def test_the_draft_head_follows_graphs(with_head: Reference, num_gpu_blocks: int | None) -> None:
    """Graphs leave it the hidden states that it needs: it drafts what it drafts without graphs, but for rounding."""
    options = cache_options(num_gpu_blocks) | {"speculation": "mtp", "num_speculative_tokens": 4}
    drafted: list[list[int]] = []
    for enforce_eager in (True, False):
        internals = Internals(always_guesses=True, works_ahead=True)
        with GpuLLM(with_head, internals=internals, enforce_eager=enforce_eager, **options) as llm:
            draft, ids = llm.runner.steps.draft, []

            def noted(plan: StepPlan, draft: Any = draft, ids: list[int] = ids) -> torch.Tensor:
                result = draft(plan)
                ids += result.tolist()
                return result  # type: ignore[no-any-return]

            llm.runner.steps.draft = noted
            llm.answer_and_check(PROMPTS, max_tokens=40)
            assert llm.stats()["num_accepted_guesses"] > 20
            if not enforce_eager:
                assert llm.num_replays["streamed verifying" if num_gpu_blocks else "resident verifying"] > 3
                assert llm.num_replays["draft head"] > 20
            llm.assert_nothing_left()
            drafted.append(ids)
    num_equal = sum(a == b for a, b in zip(*drafted, strict=False))
    assert num_equal > 0.9 * max(map(len, drafted)), drafted


@pytest.mark.parametrize("always", [True, False])
@CACHES
def test_the_draft_head_with_everything(with_head: Reference, num_gpu_blocks: int | None, always: bool) -> None:
    """Chunks, hits, preemption, an abort; then with as many guesses as pay, by the times that start-up has measured."""
    options = cache_options(num_gpu_blocks) | {"speculation": "mtp" if always else "auto"}
    with GpuLLM(with_head, internals=Internals(always_guesses=always), **options) as llm:
        serve_everything(llm)
        if always:
            assert llm.stats()["num_accepted_guesses"] > 0 and llm.stats()["num_preemptions"] > 0
        else:
            assert llm.scheduler.speculator.times._drafts.base_s > 0
            llm.answer_and_check(PROMPTS, max_tokens=100)
            assert llm.scheduler.speculator.times._plain_s


@CACHES
@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_moe"])
def test_bf16_is_as_good_as_plain_torch(tmp_path: Path, architecture: str, num_gpu_blocks: int | None) -> None:
    directory = write_tiny_model(tmp_path, architecture, num_layers=4, max_position_embeddings=2048)
    with GpuLLM(Reference(directory), dtype="bfloat16", **cache_options(num_gpu_blocks)) as llm:
        llm.assert_as_good_as_plain_torch(PROMPTS)
