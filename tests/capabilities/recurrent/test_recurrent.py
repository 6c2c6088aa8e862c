"""Models with recurrent layers or windows through the whole engine: the logits of transformers, whatever happens to
states.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from checked_engine import ALL_GPU, OFFLOAD, CheckedLLM, Reference, cache_options, greedy, small_staging, speculating
from content_model import companion_of
from cpu_splits import splitting
from dense_model import random_prompt
from odd_drafters import OddDrafter, drafter_of
from offload_workload import BLOCK, DOCUMENT, MIXED, prompts_of, serve_everything
from simulated_streams import SimulatedStreams
from tiers import tiered
from tiny_models import write_tiny_model

from nanovllm import LLM
from nanovllm.capabilities.recurrent.places import RecurrentStates, StateStep
from nanovllm.engine.setup import Internals
from nanovllm.errors import ConfigError
from nanovllm.plan.sequence import Sequence

NUM_TOKENS = 20
PROMPTS = prompts_of(3 * BLOCK - 5, 40, BLOCK - 3, 2 * BLOCK)  # answers cross the edges of blocks


@pytest.fixture(scope="module")
def answers(stateful: Reference) -> list[list[int]]:
    with CheckedLLM(stateful, **ALL_GPU) as llm:
        return [output["token_ids"] for output in llm.answer_and_check(PROMPTS, max_tokens=NUM_TOKENS)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_gpu_blocks", "max_num_batched_tokens", "works_ahead"),
    [
        *((None, 37, True), (2, 300, True), (None, 5000, False)),
        *(pytest.param(*case, marks=SLOW) for case in ((2, 37, False), (None, 300, False), (2, 5000, True))),
    ],
)
def test_chunks_of_any_size_and_several_sequences_at_once(
    stateful: Reference, num_gpu_blocks: int | None, max_num_batched_tokens: int, works_ahead: bool
) -> None:
    options = cache_options(num_gpu_blocks) | {"max_num_batched_tokens": max_num_batched_tokens}
    internals = replace(small_staging(BLOCK, 2), works_ahead=works_ahead)
    with CheckedLLM(stateful, internals=internals, **options) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=8)
        llm.assert_nothing_left()


def test_the_cpu_attends_to_missing_keys(stateful: Reference) -> None:
    options = OFFLOAD | {"num_gpu_blocks": 2, "cpu_attention": "on"}
    with CheckedLLM(stateful, internals=splitting(100), **options) as llm:
        llm.answer_and_check(MIXED)
        assert any(any(plan.moves.cpu_spans) for plan in llm.plans)


@pytest.mark.parametrize(
    ("num_gpu_blocks", "seed"), [(None, 0), (3, 0), *(pytest.param(3, seed, marks=SLOW) for seed in (1, 2, 3))]
)
def test_everything_at_once(stateful: Reference, num_gpu_blocks: int | None, seed: int) -> None:
    """Hits, preemption, an abort."""
    streams = SimulatedStreams("random", seed) if num_gpu_blocks else None
    with CheckedLLM(stateful, streams=streams, **cache_options(num_gpu_blocks)) as llm:
        serve_everything(llm)
        assert llm.stats()["num_state_loads"] > 0


@pytest.mark.parametrize("num_gpu_blocks", [None, 3])
def test_questions_of_any_length_reuse_the_document(stateful: Reference, num_gpu_blocks: int | None) -> None:
    """The first one leaves a state at its own end, which the second does not reach. It leaves one where they part."""
    questions = [DOCUMENT + random_prompt(length, seed=length) for length in (300, 30, 700, 1)]
    end = len(DOCUMENT) // BLOCK * BLOCK
    with CheckedLLM(stateful, **cache_options(num_gpu_blocks)) as llm:
        hits = [llm.answer_and_check([question])[0]["num_cached_tokens"] for question in questions]
        assert hits == [0, 0, end, end]
        (again,) = llm.answer_and_check([questions[2]])
        assert again["num_cached_tokens"] == (len(questions[2]) - 1) // BLOCK * BLOCK
        stats = llm.stats()
        assert stats["num_state_loads"] == 3 and stats["num_used_snapshots"] > 2


@pytest.mark.parametrize("speculation", ["off", pytest.param("prompt_lookup", marks=SLOW)])
def test_an_engine_for_one_sequence_reuses_the_document(stateful: Reference, speculation: str) -> None:
    """Regression: one slot was left for states within a chunk, and the question's end took it every time."""
    options = ALL_GPU | {"max_num_seqs": 1, "max_num_batched_tokens": 5000, "speculation": speculation}
    with CheckedLLM(stateful, **options) as llm:
        questions = [DOCUMENT + random_prompt(length, seed=length) for length in (300, 700, 530)]
        hits = [llm.answer_and_check([question])[0]["num_cached_tokens"] for question in questions]
        assert hits == [0, 0, len(DOCUMENT) // BLOCK * BLOCK]


def test_a_long_prompt_leaves_states_on_its_way(stateful: Reference) -> None:
    """Another text that parts from it anywhere has to be computed from the last of these on."""
    first, options = random_prompt(4 * BLOCK + 9), ALL_GPU | {"max_num_batched_tokens": 5 * BLOCK}
    with CheckedLLM(stateful, **options) as llm:
        companion_of(llm.scheduler.kv, RecurrentStates).snapshot_tokens = 2 * BLOCK
        llm.answer_and_check([first])
        (plan,) = (plan for plan in llm.plans if plan.num_tokens > 1)
        assert len(plan.sequences[0].payload(StateStep).saves) == 2
        (output,) = llm.answer_and_check([first[: 3 * BLOCK] + random_prompt(50, seed=5)])
        assert output["num_cached_tokens"] == 2 * BLOCK


@pytest.mark.parametrize(("num_gpu_blocks", "speculation"), [(None, "off"), (3, "auto")])
def test_a_preempted_sequence_goes_on_where_it_was(
    stateful: Reference, answers: list[list[int]], num_gpu_blocks: int | None, speculation: str
) -> None:
    """Nothing is computed twice, and the inputs of right guesses that its state does not cover come back too."""
    internals = Internals() if speculation == "off" else speculating(drafter_of("right", PROMPTS, answers))
    options = cache_options(num_gpu_blocks) | ({} if speculation == "off" else {"num_speculative_tokens": 3})
    options |= {"speculation": speculation}
    with CheckedLLM(stateful, internals=internals, **options) as llm:

        def preempt(num_step: int) -> None:
            if llm.plans and llm.plans[-1].is_decode and not llm.stats()["num_preemptions"]:
                llm.preempt_next()

        llm.answer_and_check(PROMPTS[:2], max_tokens=NUM_TOKENS, before_step=preempt)
        assert llm.stats()["num_preemptions"] == 1
        assert llm.num_computed_tokens == sum(map(len, PROMPTS[:2])) + 2 * (NUM_TOKENS - 1)
        llm.assert_nothing_left()


@pytest.mark.parametrize(("num_snapshots", "num_hits"), [(0, 0), (1, 1)])
def test_few_snapshots(hybrid: Reference, num_snapshots: int, num_hits: int) -> None:
    prompts = prompts_of(BLOCK + 5, BLOCK + 7)
    with CheckedLLM(hybrid, **ALL_GPU) as llm:
        snapshots = llm.scheduler.kv.pool.index.snapshots
        snapshots.count, snapshots._unused = num_snapshots, list(range(num_snapshots))
        for _ in range(2):
            hits = [llm.answer_and_check([prompt])[0]["num_cached_tokens"] for prompt in (*prompts, prompts[1])]
        assert hits == [0, 0, num_hits * BLOCK]


@pytest.mark.parametrize(
    ("kind", "num_gpu_blocks"),
    [
        *(("right", 2), ("random", 2), ("drafts", None), ("mixed", 2)),
        *(
            pytest.param(kind, None, marks=SLOW)
            for kind in ("right", "wrong", "mixed", "wrong at the last", "too many")
        ),
        *(pytest.param(kind, 2, marks=SLOW) for kind in ("drafts", "end tokens", "outside")),
    ],
)
def test_guesses_of_every_kind_leave_no_trace(
    stateful: Reference, answers: list[list[int]], kind: str, num_gpu_blocks: int | None
) -> None:
    options = cache_options(num_gpu_blocks) | {"speculation": "auto", "num_speculative_tokens": 7}
    with CheckedLLM(stateful, internals=speculating(drafter_of(kind, PROMPTS, answers)), **options) as llm:
        outputs = llm.answer_and_check(PROMPTS, max_tokens=NUM_TOKENS)
        assert [output["token_ids"] for output in outputs] == answers
        stats = llm.stats()
        assert stats["num_guesses"] > 0
        assert (stats["num_accepted_guesses"] > 0) == (kind != "wrong")
        if kind == "right" or (kind == "drafts" and num_gpu_blocks is None):  # drafts from the right states
            assert stats["guess_acceptance"] == 1
        llm.assert_nothing_left()


@pytest.mark.parametrize("num_right", [0, 2, 5, *(pytest.param(n, marks=SLOW) for n in (1, 3, 4))])
def test_garbage_from_any_guess_on_leaves_no_trace(
    stateful: Reference, answers: list[list[int]], num_right: int
) -> None:
    """Always five guesses, of which so many are right."""
    drafter = drafter_of("right", PROMPTS, answers)

    class Garbage(OddDrafter):
        def guess(self, seq: Sequence, max_guesses: int) -> Any:
            right = drafter.guess(seq, max_guesses)
            ids = [t if i < num_right else (t + 7 * i + 1) % 320 for i, t in enumerate(right.token_ids)]
            return right._replace(token_ids=tuple(ids))

    internals = speculating(Garbage("right", lambda seq, count: [], 320))
    options = ALL_GPU | {"speculation": "prompt_lookup", "num_speculative_tokens": 5}
    with CheckedLLM(stateful, internals=internals, **options) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=NUM_TOKENS)


@pytest.mark.parametrize(
    ("speculation", "works_ahead"),
    [("shadow", True), pytest.param("resident", False, marks=SLOW), pytest.param("auto", True, marks=SLOW)],
)
def test_drafters_leave_answers_alone(stateful: Reference, speculation: str, works_ahead: bool) -> None:
    internals = Internals(always_guesses=True, works_ahead=works_ahead)
    options = OFFLOAD | {"num_gpu_blocks": 2, "speculation": speculation}
    with CheckedLLM(stateful, internals=internals, **options) as llm:
        llm.answer_and_check([PROMPTS[0] + PROMPTS[0][:300], *PROMPTS[1:]], max_tokens=30)
        assert llm.stats()["num_accepted_guesses"] > 0
        assert any(plan.draft_rows() for plan in llm.plans)


@SLOW
def test_two_ranks(stateful: Reference, answers: list[list[int]]) -> None:
    internals = speculating(drafter_of("mixed", PROMPTS, answers))
    options = OFFLOAD | {"num_gpu_blocks": 2, "speculation": "shadow", "tensor_parallel_size": 2}
    with LLM(str(stateful.directory), device="cpu", dtype="float32", internals=internals, **options) as llm:
        for _ in range(2):  # the second time with hits
            outputs = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == [answer[:12] for answer in answers]
        assert llm.stats()["num_state_loads"] > 0


def test_experts(tmp_path: Path) -> None:
    reference = Reference(write_tiny_model(tmp_path, "qwen3_5_moe", num_layers=4, max_position_embeddings=2048))
    with CheckedLLM(reference, **cache_options(3)) as llm:
        llm.answer_and_check(PROMPTS)


def test_ranks_that_would_share_a_head_are_refused(hybrid: Reference) -> None:
    with pytest.raises(ConfigError, match="divisible by tensor_parallel_size=4"):
        LLM(str(hybrid.directory), device="cpu", tensor_parallel_size=4)


@pytest.mark.parametrize(
    ("num_gpu_blocks", "chunked_prefill", "works_ahead"),
    tiered(
        product((None, 20), (True, False), (False, True)),
        [(None, True, True), (None, False, False), (20, True, False), (20, False, True)],
    ),
)
def test_n_answers_compute_the_prompt_once(
    hybrid: Reference, num_gpu_blocks: int | None, chunked_prefill: bool, works_ahead: bool
) -> None:
    """Regression: n answers computed the prompt n times if it fitted into one step, and so did questions about one
    document. What is left to each is less than a grain of 256 tokens.
    """
    document = random_prompt(1000)
    options = cache_options(num_gpu_blocks) | {"max_num_batched_tokens": 8192, "chunked_prefill": chunked_prefill}
    with CheckedLLM(hybrid, internals=Internals(works_ahead=works_ahead), **options) as llm:
        llm.answer_and_check([document] * 6, max_tokens=2)
        assert llm.stats()["num_prefill_tokens"] == 1000 + 5 * (1000 - 3 * BLOCK)
        questions = [[7, *document, *random_prompt(20, seed=i)] for i in range(4)]
        llm.answer_and_check(questions, max_tokens=2)
        assert llm.stats()["num_prefill_tokens"] == 2160 + 1021 + 3 * (1021 - 3 * BLOCK)
        llm.assert_nothing_left()
