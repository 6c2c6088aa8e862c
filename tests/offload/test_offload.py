"""The offload path end to end: the same logits and tokens as transformers, whatever is where and however it is cut."""

from typing import Any

import pytest
from checked_engine import OFFLOAD, WORKS_AHEAD, CheckedLLM, Reference, cache_options, greedy, small_staging
from dense_model import random_prompt
from integrity import check_scheduler
from offload_workload import BLOCK, MIXED, QUESTIONS, prompts_of, serve_everything
from simulated_streams import MODES, Mode, SimulatedStreams

from nanovllm.config import BLOCK_SIZE_STEP
from nanovllm.engine.setup import Internals

SLOW = pytest.mark.slow
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_gpu_blocks", [None, 2, 3, *(pytest.param(n, marks=SLOW) for n in (4, 8))])
def test_lengths_around_block_edges_are_exact(reference: Reference, device: str, num_gpu_blocks: int | None) -> None:
    lengths = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK + 1, 3 * BLOCK, 5 * BLOCK - 1, 5 * BLOCK + 1)
    with CheckedLLM(reference, device=device, **cache_options(num_gpu_blocks)) as llm:
        for prompt in prompts_of(*lengths):
            llm.answer_and_check([prompt])
        llm.assert_nothing_left()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("max_num_batched_tokens", "chunked_prefill"),
    [
        *((100, True), (300, False), (513, True), (4096, False)),
        *(pytest.param(*case, marks=SLOW) for case in ((100, False), (300, True), (513, False), (4096, True))),
    ],
)
@pytest.mark.parametrize("num_gpu_blocks", [None, 4])
def test_chunks_and_schedules_are_exact(
    reference: Reference, device: str, chunked_prefill: bool, max_num_batched_tokens: int, num_gpu_blocks: int | None
) -> None:
    options = cache_options(num_gpu_blocks)
    options |= {"max_num_batched_tokens": max_num_batched_tokens, "chunked_prefill": chunked_prefill}
    with CheckedLLM(reference, device=device, **options) as llm:
        llm.answer_and_check(MIXED)
        has_mixed_step = any(
            len({step.position < step.num_prompt_tokens for step in plan.sequences}) > 1 for plan in llm.plans
        )
        if max_num_batched_tokens < 1000:  # else all prompts may be in one step
            assert has_mixed_step == chunked_prefill
        llm.assert_nothing_left()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_gpu_blocks", [None, 2, *(pytest.param(n, marks=SLOW) for n in (3, 8))])
def test_long_and_short_together_one_step_ahead_are_exact(
    reference: Reference, device: str, num_gpu_blocks: int | None
) -> None:
    with CheckedLLM(reference, device=device, internals=WORKS_AHEAD, **cache_options(num_gpu_blocks)) as llm:
        llm.answer_and_check(MIXED, max_tokens=9)
        assert any(step.previous_row >= 0 for plan in llm.plans for step in plan.sequences)
        llm.assert_nothing_left()


@pytest.mark.alone  # on a GPU it takes the default share of the memory
@pytest.mark.parametrize("device", DEVICES)
def test_default_offload_runs_many_short_requests_at_once_and_a_long_one(reference: Reference, device: str) -> None:
    """Regression: slots of 4096 tokens and a pool of two sequences let four of these run at once."""
    with CheckedLLM(reference, device=device, enable_cpu_offload=True, max_num_batched_tokens=4000) as llm:
        llm.answer_and_check([*prompts_of(*range(20, 60)), *prompts_of(6 * BLOCK + 9)], max_tokens=4)
        assert max(len(plan.sequences) for plan in llm.plans) == 41
        assert not any(plan.moves.streamed or plan.moves.loads for plan in llm.plans)
        llm.assert_nothing_left()


# -- prefix cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("between", ["together", "nothing", "another prompt"])
@pytest.mark.parametrize("block_size", [BLOCK, 4 * BLOCK])
def test_second_question_about_a_long_document_reuses_its_kv(
    reference: Reference, device: str, block_size: int, between: str
) -> None:
    """Five grains hit: with the large block one is whole and one partial, copied from a slot or loaded."""
    options = OFFLOAD | {"kvcache_block_size": block_size, "num_gpu_blocks": 2, "max_num_batched_tokens": 5000}
    with CheckedLLM(reference, device=device, **options) as llm:
        if between == "together":
            first, second = llm.answer_and_check(QUESTIONS)
        else:
            (first,) = llm.answer_and_check(QUESTIONS[:1])
            if between == "another prompt":
                llm.answer_and_check(prompts_of(3 * BLOCK + 5))
            llm.plans.clear()
            (second,) = llm.answer_and_check(QUESTIONS[1:])
            assert llm.num_computed_tokens == len(QUESTIONS[1]) - 5 * BLOCK + 5
        assert (first["num_cached_tokens"], second["num_cached_tokens"]) == (0, 5 * BLOCK)
        llm.assert_nothing_left()


# -- preemption and abort --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_ahead", [False, True])
@pytest.mark.parametrize("block_size", [BLOCK, 2 * BLOCK])
def test_preempted_with_offload_computes_at_most_a_grain_again(
    reference: Reference, device: str, block_size: int, one_ahead: bool
) -> None:
    options = OFFLOAD | {"kvcache_block_size": block_size, "num_gpu_blocks": 4}
    internals = WORKS_AHEAD if one_ahead else Internals()
    with CheckedLLM(reference, device=device, internals=internals, **options) as llm:

        def preempt_often(num_step: int) -> None:
            check_scheduler(llm.scheduler)
            if num_step % 3 == 1:
                llm.preempt_next()

        llm.answer_and_check(MIXED, max_tokens=12, before_step=preempt_often)
        num_preemptions = llm.stats()["num_preemptions"]
        assert num_preemptions >= 5
        num_again = llm.num_computed_tokens - sum(len(prompt) + 11 for prompt in MIXED)
        assert num_again < num_preemptions * BLOCK_SIZE_STEP
        llm.assert_nothing_left()


@pytest.mark.parametrize("device", DEVICES)
def test_all_gpu_pool_runs_out_preempted_is_exact(reference: Reference, device: str) -> None:
    prompts = prompts_of(2 * BLOCK - 3, 2 * BLOCK - 2, 2 * BLOCK - 1)
    with CheckedLLM(reference, device=device, num_kvcache_blocks=7, max_num_batched_tokens=2000) as llm:
        llm.answer_and_check(prompts, max_tokens=12)
        assert llm.stats()["num_preemptions"] >= 1
        llm.assert_nothing_left()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_gpu_blocks", "num_steps"),
    [
        *((None, 1), (None, 9), (3, 4), (3, 13)),
        *(pytest.param(*case, marks=SLOW) for case in ((None, 4), (None, 13), (3, 1), (3, 9))),
    ],
)
def test_abort_in_the_middle_leaves_the_others_exact(
    reference: Reference, device: str, num_gpu_blocks: int | None, num_steps: int
) -> None:
    with CheckedLLM(reference, device=device, **cache_options(num_gpu_blocks)) as llm:
        ids = [llm.add_request(prompt, greedy(20)) for prompt in MIXED]
        finished = {}
        for _ in range(num_steps):
            finished |= llm.step().finished
        assert llm.abort(ids[3]) and not llm.abort(ids[3])
        finished |= llm.finish_all()
        assert finished[ids[3]]["finish_reason"] == "abort"
        for i in (0, 1, 2, 4):
            llm.check(ids[i], MIXED[i], finished[ids[i]])
        llm.assert_nothing_left()
        llm.answer_and_check([MIXED[3]])  # what the aborted one left in the cache is right


# -- staging and streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("group_tokens", [BLOCK, 2 * BLOCK])
def test_small_staging_that_wraps_is_exact(
    reference: Reference, device: str, group_tokens: int, num_groups: int
) -> None:
    staging = small_staging(group_tokens, num_groups)
    with CheckedLLM(reference, device=device, internals=staging, **cache_options(2)) as llm:
        llm.answer_and_check(prompts_of(6 * BLOCK + 9))
        longest = max(len(plan.moves.streamed) for plan in llm.plans)
        assert longest * llm.runner.spec.num_layers > num_groups, "staging did not wrap in a step"


@pytest.mark.parametrize(
    ("num_gpu_blocks", "block_size"),
    [
        *((2, BLOCK), (3, 2 * BLOCK)),
        *(pytest.param(*case, marks=SLOW) for case in [(5, BLOCK), (2, 2 * BLOCK), (3, BLOCK), (5, 2 * BLOCK)]),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_simulated_streams_are_exact_and_without_a_race(
    reference: Reference, mode: Mode, num_gpu_blocks: int, block_size: int
) -> None:
    streams = SimulatedStreams(mode, seed=num_gpu_blocks + block_size)
    options = OFFLOAD | {"kvcache_block_size": block_size, "num_gpu_blocks": num_gpu_blocks}
    staging = small_staging(2 * block_size, 2)
    with CheckedLLM(reference, streams=streams, internals=staging, **options) as llm:
        serve_everything(llm)


@pytest.mark.parametrize("mode", MODES)
def test_slot_copied_from_and_then_loaded_over_has_no_race(reference: Reference, mode: Mode) -> None:
    """Regression: a copy's source that no table of the step named was loaded over while the copy might still run.

    Classic: a prompt that begins like a running sequence is run without it, so its slot is only a copy's source.
    """
    streams = SimulatedStreams(mode)
    options = OFFLOAD | {"kvcache_block_size": 2 * BLOCK, "num_gpu_blocks": 3, "max_num_batched_tokens": 4000}
    long, source = prompts_of(4 * BLOCK + 10, BLOCK + 40)
    with CheckedLLM(reference, streams=streams, chunked_prefill=False, **options) as llm:
        long_id, source_id = llm.add_request(long, greedy(12)), llm.add_request(source, greedy(12))
        for _ in range(4):
            llm.step()
        prompt = source[:BLOCK] + random_prompt(9, seed=9)
        request_id = llm.add_request(prompt, greedy(3))
        llm.step()
        assert llm.plans[-1].moves.copies and len(llm.plans[-1].sequences) == 1
        source_slot = llm.plans[-1].moves.copies[0].src_slot
        llm.abort(source_id)
        llm.step()
        assert source_slot in {load.ring_slot for load in llm.plans[-1].moves.loads}
        finished = llm.finish_all()
        llm.check(long_id, long, finished[long_id])
        llm.check(request_id, prompt, finished[request_id])


@pytest.mark.gpu
@pytest.mark.parametrize("num_gpu_blocks", [2, 3, 8])
def test_bf16_with_offload_is_as_near_to_fp32_as_all_resident(reference: Reference, num_gpu_blocks: int) -> None:
    prompts = prompts_of(5 * BLOCK + 1, 3 * BLOCK, 40)
    expected = [reference.logits(prompt, 1)[0] for prompt in prompts]
    errors = []
    for num_slots in (None, num_gpu_blocks):
        options = cache_options(num_slots) | {"dtype": "bfloat16"}
        with CheckedLLM(reference, device="cuda", **options) as llm:
            ids = [llm.add_request(prompt, greedy(1)) for prompt in prompts]
            llm.finish_all()
            errors.append([(llm.logits[i][0] - row).abs().max().item() for i, row in zip(ids, expected, strict=True)])
    for resident, offloaded in zip(*errors, strict=True):
        assert offloaded <= 2 * resident


# -- the tests can tell ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", ["CPU block", "slot"])
def test_altered_block_changes_the_answer(reference: Reference, device: str, place: str) -> None:
    """The prompt's second block, in CPU memory (from where it is streamed) or in its slot."""
    prompt = prompts_of(4 * BLOCK + 20)[0]
    num_gpu_blocks = 2 if place == "CPU block" else 8
    with CheckedLLM(reference, device=device, **cache_options(num_gpu_blocks)) as llm:
        offload = llm.runner.offload
        assert offload is not None
        request_id = llm.add_request(prompt, greedy(16))
        while not llm.logits[request_id]:
            llm.step()
        block_id = llm.scheduler.sequences[request_id].block_table[1]
        if place == "CPU block":
            offload.streams.synchronize()
            caches: list[Any] = [offload.k_cache_cpu[:, block_id], offload.v_cache_cpu[:, block_id]]
        else:
            slot = llm.scheduler.kv.blocks[block_id].ring_slot  # type: ignore[attr-defined]
            caches = [offload.k_cache_gpu[:, slot], offload.v_cache_gpu[:, slot]]
        for cache in caches:
            cache.neg_()
        output = llm.finish_all()[request_id]
        with pytest.raises(AssertionError, match="is answered wrongly"):
            llm.check(request_id, prompt, output)
