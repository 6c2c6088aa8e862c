"""Speculation changes no token: answers and logits with every drafter and cache are those without it."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checked_engine import ALL_GPU, OFFLOAD, CheckedLLM, Reference, cache_options, greedy, speculating
from cpu_splits import RandomSplit, splitting
from odd_drafters import KINDS, OddDrafter, drafter_of
from offload_workload import BLOCK, prompts_of, serve_everything
from simulated_streams import Mode, SimulatedStreams

from nanovllm import LLM, SamplingParams
from nanovllm.engine.setup import Internals
from nanovllm.entrypoints.haystack import build_haystack
from nanovllm.models.retrieval_model import build_retrieval_model
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import StepPlan

PROMPTS = prompts_of(3 * BLOCK - 5, 40, BLOCK - 3, 2 * BLOCK)  # answers cross the edges of blocks
NUM_TOKENS = 24
SLOW = pytest.mark.slow
CASES = [
    *[(kind, 3) for kind in KINDS],
    *(("random", None), ("drafts", 2)),
    *[pytest.param(*case, marks=SLOW) for case in (("random", 2), ("random", 8), ("drafts", None), ("drafts", 8))],
]


def sampled(max_tokens: int) -> list[SamplingParams]:
    filters: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05, "top_k": 30}]
    return [
        SamplingParams(temperature=0.8, max_tokens=max_tokens, ignore_eos=True, seed=i, **filters[i % 4])
        for i in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def answers(reference: Reference) -> dict[str, list[list[int]]]:
    """Without speculation, all on the GPU: greedy, and sampled."""
    with LLM(str(reference.directory), device="cpu", dtype="float32", enforce_eager=True, **ALL_GPU) as llm:
        return {
            name: [output["token_ids"] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
            for name, params in (("greedy", greedy(NUM_TOKENS)), ("sampled", sampled(NUM_TOKENS)))
        }


@pytest.mark.parametrize(("kind", "num_gpu_blocks"), CASES)
def test_every_kind_of_guess_leaves_answers_and_logits_alone(
    reference: Reference, answers: dict[str, list[list[int]]], kind: str, num_gpu_blocks: int | None
) -> None:
    internals = speculating(drafter_of(kind, PROMPTS, answers["greedy"]))
    options = cache_options(num_gpu_blocks) | {"speculation": "auto", "num_speculative_tokens": 7}
    with CheckedLLM(reference, internals=internals, **options) as llm:
        outputs = llm.answer_and_check(PROMPTS, max_tokens=NUM_TOKENS)
        assert [output["token_ids"] for output in outputs] == answers["greedy"]
        stats = llm.stats()
        assert stats["num_guesses"] > 0
        assert (stats["num_accepted_guesses"] > 0) == (kind != "wrong")
        if kind == "right":
            assert stats["guess_acceptance"] == 1 and stats["tokens_per_pass"] > 4  # they share the rows of a step
        llm.assert_nothing_left()


@pytest.mark.parametrize(
    ("kind", "num_gpu_blocks", "works_ahead"),
    [
        *(("right", None, False), ("mixed", 3, True)),
        *(pytest.param(*case, marks=SLOW) for case in (("right", None, True), ("mixed", 3, False))),
    ],
)
def test_sampled_answers_are_the_same(
    reference: Reference, answers: dict[str, list[list[int]]], num_gpu_blocks: int | None, kind: str, works_ahead: bool
) -> None:
    """With filters, and with prompts mixed in."""
    internals = speculating(drafter_of(kind, PROMPTS, answers["sampled"]), Internals(works_ahead=works_ahead))
    options = cache_options(num_gpu_blocks) | {"speculation": "auto", "max_num_batched_tokens": 100}
    with CheckedLLM(reference, internals=internals, **options) as llm:
        outputs = llm.generate(PROMPTS, sampled(NUM_TOKENS), use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == answers["sampled"]
        assert any(plan.has_guesses and not plan.is_decode for plan in llm.plans)
        assert llm.stats()["num_accepted_guesses"] > 0


@pytest.mark.parametrize("num_tokens", [1, pytest.param(100, marks=SLOW), 2**40])
def test_the_cpu_attends_to_missing_keys_of_guesses(
    reference: Reference, answers: dict[str, list[list[int]]], num_tokens: int
) -> None:
    internals = speculating(drafter_of("random", PROMPTS, answers["greedy"]), splitting(num_tokens))
    options = OFFLOAD | {"num_gpu_blocks": 2, "cpu_attention": "on", "speculation": "auto"}
    with CheckedLLM(reference, internals=internals, **options) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=NUM_TOKENS)
        assert any(plan.has_guesses and any(plan.moves.cpu_spans) for plan in llm.plans)


@pytest.mark.parametrize(
    ("speculation", "works_ahead"),
    [
        ("prompt_lookup", True),
        *(pytest.param(*case, marks=SLOW) for case in [("prompt_lookup", False), ("resident", False), ("auto", True)]),
        *(pytest.param(*case, marks=SLOW) for case in [("resident", True), ("auto", False)]),
    ],
)
def test_drafters_leave_answers_alone(reference: Reference, speculation: str, works_ahead: bool) -> None:
    """A tiny model soon repeats itself, so that looking up finds something."""
    internals = Internals(always_guesses=True, works_ahead=works_ahead)
    options = OFFLOAD | {"num_gpu_blocks": 2, "speculation": speculation}
    with CheckedLLM(reference, internals=internals, **options) as llm:
        llm.answer_and_check([PROMPTS[0] + PROMPTS[0][:300], *PROMPTS[1:]], max_tokens=30)
        stats = llm.stats()
        assert stats["num_accepted_guesses"] > 0
        assert any(plan.draft_rows() for plan in llm.plans) == (speculation != "prompt_lookup")


@pytest.mark.parametrize(
    ("mode", "seed"),
    [
        *(("late", 0), ("early", 1), ("random", 1)),
        *(pytest.param(*case, marks=SLOW) for case in [("late", 1), ("early", 0), ("random", 0)]),
    ],
)
def test_everything_with_simulated_streams(reference: Reference, mode: Mode, seed: int) -> None:
    """Preemption, an abort, partial hits; copies late, early and at random times; the CPU attends to some keys."""
    streams = SimulatedStreams(mode, seed)
    drafter = OddDrafter(
        "mixed", lambda seq, count: random.Random(len(seq.token_ids)).choices(range(320), k=count), 320
    )
    internals = speculating(drafter, Internals(works_ahead=True, cpu_split=RandomSplit(generator=random.Random(seed))))
    options = OFFLOAD | {"num_gpu_blocks": 2 + seed, "cpu_attention": "on", "speculation": "auto"}
    with CheckedLLM(reference, streams=streams, internals=internals, **options) as llm:
        serve_everything(llm)


@pytest.mark.slow
def test_two_ranks(reference: Reference, answers: dict[str, list[list[int]]]) -> None:
    options = OFFLOAD | {"num_gpu_blocks": 2, "speculation": "shadow", "tensor_parallel_size": 2}
    with LLM(
        str(reference.directory),
        device="cpu",
        dtype="float32",
        internals=speculating(drafter_of("mixed", PROMPTS, answers["greedy"])),
        **options,
    ) as llm:
        outputs = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
        assert [output["token_ids"] for output in outputs] == [answer[:12] for answer in answers["greedy"]]
        assert llm.stats()["num_accepted_guesses"] > 0


def test_end_tokens_and_stop_tokens_inside_a_chunk(reference: Reference, answers: dict[str, list[list[int]]]) -> None:
    """All guesses are right, and the answer ends at one of them."""
    answer = answers["greedy"][0]
    stop = next(token_id for token_id in answer[3:] if answer.index(token_id) >= 3)
    expected = answer[: answer.index(stop) + 1]
    options = ALL_GPU | {"speculation": "auto"}
    with CheckedLLM(
        reference, internals=speculating(drafter_of("right", PROMPTS, answers["greedy"])), **options
    ) as llm:
        params = replace(greedy(NUM_TOKENS), stop_token_ids=[stop])
        (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
        assert (output["token_ids"], output["finish_reason"]) == (expected, "stop")
        llm.assert_nothing_left()
        (again,) = llm.generate([PROMPTS[0] + answer[:5]], greedy(10), use_tqdm=False)
        assert again["token_ids"] == answer[5:15]


def test_tokens_that_are_guessed_and_rejected_are_never_found_by_a_prompt(
    reference: Reference, answers: dict[str, list[list[int]]]
) -> None:
    """The prefix cache holds what was verified only: a prompt that goes on with the guesses gets no hit beyond."""
    options = OFFLOAD | {"num_gpu_blocks": 3, "speculation": "auto"}
    with CheckedLLM(
        reference, internals=speculating(drafter_of("wrong", PROMPTS, answers["greedy"])), **options
    ) as llm:
        llm.answer_and_check(PROMPTS[2:3], max_tokens=NUM_TOKENS)
        prompt, answer = PROMPTS[2], answers["greedy"][2]
        wrong = [(token_id + 1) % 320 for token_id in answer]
        (right_again, wrong_one) = llm.answer_and_check([prompt + answer[:20], prompt + wrong[:20]], max_tokens=4)
        assert right_again["num_cached_tokens"] == BLOCK and wrong_one["num_cached_tokens"] == 0


def test_drafts_that_do_not_wait_for_copies_are_noticed(
    reference: Reference, answers: dict[str, list[list[int]]]
) -> None:
    """They write to slots that blocks may still be copied out of (E4)."""
    for seed in range(4):
        streams = SimulatedStreams("late", seed)
        internals = speculating(drafter_of("drafts", PROMPTS, answers["greedy"]))
        options = OFFLOAD | {"num_gpu_blocks": 2, "speculation": "resident"}
        with CheckedLLM(reference, streams=streams, internals=internals, **options) as llm:
            llm.runner.memory.begin_all_layers = lambda: None
            try:
                llm.answer_and_check(PROMPTS, max_tokens=NUM_TOKENS)
            except AssertionError:
                return
    pytest.fail("drafts need no wait")


@pytest.mark.parametrize("speculation", ["resident", "auto"])
def test_a_sequence_that_begins_to_miss_keys_does_not_draft_beside_pending_tokens(
    reference: Reference, speculation: str
) -> None:
    """Regression: the first sequence's new block takes a slot of the second one, which drafted in the same step. Drafts
    took the place of the first one's pending token.
    """
    internals = Internals(works_ahead=True, always_guesses=True)
    options = OFFLOAD | {"num_gpu_blocks": 3, "max_num_batched_tokens": BLOCK + 1, "speculation": speculation}
    first, second = prompts_of(BLOCK - 2, 2 * BLOCK + 1)
    with CheckedLLM(reference, internals=internals, **options) as llm:
        ids = [llm.add_request(first, greedy(12))]
        llm.step()
        ids.append(llm.add_request(second, greedy(6)))
        finished = llm.finish_all()
        for request_id, prompt in zip(ids, (first, second), strict=True):
            llm.check(request_id, prompt, finished[request_id])


@pytest.mark.parametrize("works_ahead", [False, True])
def test_text_of_several_tokens_a_step_arrives_whole_and_ends_at_a_stop_string(
    tmp_path: Path, works_ahead: bool
) -> None:
    """Each character is a token, and the model quotes a line of its prompt. The last piece ends inside a chunk."""
    passkey = "q7m2x9kd4tzb0wy6"
    prompt = build_haystack(3000, 0.4, passkey)
    params = SamplingParams(temperature=0, max_tokens=40, stop="wy")
    options: dict[str, Any] = {"enable_cpu_offload": True, "num_gpu_blocks": 3, "num_cpu_blocks": 20, "device": "cpu"}
    internals = Internals(always_guesses=True, works_ahead=works_ahead)
    with LLM(
        build_retrieval_model(tmp_path / "model"),
        max_model_len=3100,
        kvcache_block_size=256,
        speculation="prompt_lookup",
        internals=internals,
        **options,
    ) as llm:
        pieces = list(llm.stream(prompt, params))
        assert "".join(pieces) == passkey[: passkey.index("wy")] and max(map(len, pieces)) > 3
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output["text"] == "".join(pieces) and output["finish_reason"] == "stop"
        assert len(output["token_ids"]) == passkey.index("wy") + 2


def test_answers_are_passed_on_before_a_long_step_is_launched(
    reference: Reference, answers: dict[str, list[list[int]]]
) -> None:
    """Regression: where guesses were verified, a long step was launched in the turn that had committed the answers."""
    internals = speculating(drafter_of("right", PROMPTS, answers["greedy"]), Internals(works_ahead=True))
    options = ALL_GPU | {"speculation": "auto", "max_num_batched_tokens": 64, "max_step_ms": 100.0}
    with CheckedLLM(reference, internals=internals, **options) as llm:
        turn: list[str] = []
        commit, launch = llm.scheduler.commit, llm.engine.executor.launch

        def noted_commit(plan: StepPlan, *args: Any) -> list[Sequence]:
            turn.append("answers" if plan.has_samples else "no answers")
            return commit(plan, *args)

        def noted_launch(plan: StepPlan) -> Any:
            bound = llm.scheduler.sharing.bound
            turn.append("long launch" if bound is not None and bound.is_long_step else "launch")
            return launch(plan)

        llm.scheduler.commit, llm.engine.executor.launch = noted_commit, noted_launch  # type: ignore[method-assign]
        ids = [llm.add_request(PROMPTS[1], greedy(NUM_TOKENS))]
        for _ in range(3):
            llm.step()
        ids.append(llm.add_request(PROMPTS[0], greedy(2)))
        num_long = 0
        while not llm.is_finished():
            turn.clear()
            llm.step()
            num_long += "long launch" in turn
            assert turn[:2] != ["answers", "long launch"]
        assert num_long > 1


def test_a_request_whose_guesses_the_host_must_know_counts_as_one_that_drafts_nothing(tmp_path: Path) -> None:
    """Regression: its drafts were left out in the end, but the step before was committed first every time."""
    prompt = build_haystack(1000, 0.4, "q7m2x9kd4tzb0wy6")
    options: dict[str, Any] = {"enable_cpu_offload": True, "num_gpu_blocks": 2, "num_cpu_blocks": 20, "device": "cpu"}
    with LLM(
        build_retrieval_model(tmp_path / "model"),
        max_model_len=1100,
        kvcache_block_size=256,
        speculation="resident",
        internals=Internals(always_guesses=True, works_ahead=True),
        **options,
    ) as llm:
        answers = []
        for bad_words in (["never"], None):
            llm.add_request(prompt, replace(greedy(12), bad_words=bad_words))
            was_needed = False
            while not llm.is_finished():
                was_needed |= llm.scheduler.needs_tokens()
                answers += [output["token_ids"] for output in llm.step().finished.values()]
            assert was_needed == (llm.stats()["num_guesses"] > 0) == (bad_words is None)
        assert answers[0] == answers[1]
