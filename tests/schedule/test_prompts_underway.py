"""Prompts that begin with the same tokens compute these once, also if they arrive while these are being computed."""

import random
from itertools import product
from typing import Any

import pytest
from content_model import Simulation
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples, tiered

from nanovllm.capabilities.recurrent.places import RecurrentStates
from nanovllm.kvcache.block_manager import BlockManager, KVCacheManager
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.plan.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.schedule.step_bound import ChunkTimes, StepBound

GRAIN = 4
KINDS = [(cache, recurrent) for cache in ("all GPU", "offload", "large blocks") for recurrent in (False, True)]


def manager(cache: str, recurrent: bool, *, num_save_slots: int = 2, num_snapshots: int = 100) -> KVCacheManager:
    states = [RecurrentStates(1 + 8 + num_save_slots, num_snapshots, snapshot_tokens=32)] if recurrent else []
    if cache == "all GPU":
        return BlockManager(800, GRAIN, companions=states)
    block_size = GRAIN if cache == "offload" else 4 * GRAIN
    return HybridKVCacheManager(3200 // block_size, 800 // block_size, block_size, 2, grain=GRAIN, companions=states)


def simulate(cache: str = "all GPU", recurrent: bool = True, **options: Any) -> Simulation:
    kv_options = {name: options.pop(name) for name in ("num_save_slots", "num_snapshots") if name in options}
    return Simulation(manager(cache, recurrent, **kv_options), **options)


def document(number: int, num_tokens: int) -> list[int]:
    return [1 + number + i * i % 1009 for i in range(num_tokens)]


def num_computed(sim: Simulation) -> int:
    """Prompt tokens computed in all steps."""
    steps = (step for plan in sim.plans for step in plan.sequences)
    return sum(min(step.num_tokens, max(0, step.num_prompt_tokens - step.position)) for step in steps)


def least(prompts: list[list[int]]) -> int:
    """Prompt tokens if each grain that several prompts begin with is computed once, but for the last of a prompt."""
    grains, num_rest = set(), 0
    for prompt in prompts:
        ends = range(GRAIN, len(prompt), GRAIN)
        grains.update(tuple(prompt[:end]) for end in ends)
        num_rest += len(prompt) - len(ends) * GRAIN
    return len(grains) * GRAIN + num_rest


@pytest.mark.parametrize(("cache", "recurrent"), KINDS)
@pytest.mark.parametrize(("chunked_prefill", "depth"), tiered(product((True, False), (0, 1)), [(True, 1), (False, 0)]))
def test_answers_and_questions_compute_what_they_share_once(
    cache: str, recurrent: bool, chunked_prefill: bool, depth: int
) -> None:
    """Regression: with recurrent layers, n answers computed the prompt n times if it fit into one step."""
    doc = document(0, 103)
    questions = [doc + document(3 * i, 5 + i) for i in range(6)]
    tree = [doc[:61] + document(i // 2, 30) + document(7 * i, 9) for i in range(6)]
    for prompts in ([doc] * 6, questions, tree, [doc[: 20 * i + 3] for i in range(6)]):
        for budget in (1000, 64, 13):
            sim = simulate(
                cache, recurrent, chunked_prefill=chunked_prefill, max_num_batched_tokens=budget, depth=depth
            )
            for prompt in prompts:
                sim.add(prompt, max_tokens=2)
            sim.run()
            assert num_computed(sim) == least(prompts)


@pytest.mark.parametrize(("cache", "recurrent"), KINDS)
@pytest.mark.parametrize("chunked_prefill", [True, False])
def test_questions_that_arrive_while_the_document_is_computed_wait_for_it(
    cache: str, recurrent: bool, chunked_prefill: bool
) -> None:
    """Regression: they had less to compute than the document's prompt, so they went first and computed the rest of the
    document themselves, and so did the prompt after them.
    """
    doc = document(0, 400)
    for late in ([doc[:380], doc], [doc[:210]], [doc[:90], doc[:300], document(5, 50)]):
        sim = simulate(cache, recurrent, chunked_prefill=chunked_prefill)
        prompts = [[*doc, 1, 2, 3], *([*beginning, *document(9 * i, 9)] for i, beginning in enumerate(late))]
        sim.add(prompts[0])
        for _ in range(2):
            sim.step()
        for prompt in prompts[1:]:
            sim.add(prompt)
        sim.run()
        assert num_computed(sim) <= least(prompts) + 32 * recurrent  # what was computed has a state every 32 tokens


@settings(max_examples=examples(200))
@given(seed=st.integers(0, 2**32))
def test_random_trees_of_prompts_compute_each_grain_once(seed: int) -> None:
    rng = random.Random(seed)
    cache, recurrent = rng.choice(KINDS)
    prompts: list[list[int]] = []
    for i in range(rng.randint(2, 8)):
        parent = rng.choice([[], *prompts])
        prompts.append([*parent[: rng.randint(0, len(parent))], *document(31 * i, rng.randint(1, 60))])
    sim = simulate(
        cache, recurrent, chunked_prefill=False, depth=rng.randint(0, 1), num_save_slots=12, max_num_batched_tokens=1000
    )
    for prompt in prompts:
        sim.add(prompt, rng.randint(1, 3))
    sim.run()
    assert num_computed(sim) <= least(prompts)


def started(sim: Simulation, *sequences: Sequence) -> list[bool]:
    sim.step()
    return [seq.num_hit_tokens is not None for seq in sequences]


def test_a_prompt_waits_only_for_one_of_the_same_salt() -> None:
    sim = simulate(max_num_batched_tokens=1000)
    for i, salt in enumerate((5, 5, 6)):
        sim.scheduler.add(Sequence(i, document(0, 50), SamplingParams(max_tokens=3), seed=0, hash_salt=salt))
    plan = sim.scheduler.schedule()
    assert plan is not None and [step.seq_id for step in plan.sequences] == [0, 2]


def test_a_prompt_whose_tokens_are_all_scored_does_not_wait_but_leads() -> None:
    sim = simulate(max_num_batched_tokens=1000)
    assert started(sim, sim.add(document(0, 50)), sim.add(document(0, 50), prompt_logprobs=1)) == [True, True]
    follower = [sim.add(document(9, 50), prompt_logprobs=1), sim.add(document(9, 50))][1]
    assert started(sim, follower) == [False]
    sim.run()
    assert follower.num_hit_tokens == 48


@pytest.mark.parametrize("chunked_prefill", [True, False])
@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_leader_that_ends_leaves_nobody_waiting(end: str, chunked_prefill: bool) -> None:
    sim = simulate(max_num_batched_tokens=20, chunked_prefill=chunked_prefill)
    other = sim.add(document(3, 10), max_tokens=60)
    sim.step()
    leader, follower = (sim.add(document(0, 200)) for _ in range(2))
    sim.step()
    assert started(sim, leader, follower) == [True, False]
    if end == "abort":
        sim.abort(leader)
        assert started(sim, follower) == [True]
    else:
        sim.preempt_next()
    sim.run()
    assert other.finish_reason == follower.finish_reason == "length"


@pytest.mark.parametrize("options", [{"num_snapshots": 0}, {"num_save_slots": 0, "max_num_seqs": 8}])
def test_without_room_for_states_prompts_run_at_once(options: dict[str, int]) -> None:
    sim = simulate(max_num_batched_tokens=1000, **options)
    # With two more, all state slots are taken
    fillers = [sim.add(document(50 * i, 3), max_tokens=20) for i in range(6)]
    sim.step()
    pair = [sim.add(document(0, 50)) for _ in range(2)]
    if options.get("num_snapshots") == 0:
        assert started(sim, *pair) == [True, True]
    sim.run()
    assert all(seq.finish_reason == "length" for seq in fillers + pair)


def test_one_sequence_at_a_time_shares_too() -> None:
    sim = simulate(max_num_seqs=1, max_num_batched_tokens=1000)
    for _ in range(4):
        sim.add(document(0, 50))
    sim.run()
    assert num_computed(sim) == 50 + 3 * 2


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_short_follower_of_a_long_leader_loses_at_most_one_step(recurrent: bool) -> None:
    """The leader gets the follower's turn, before prompts that are smaller than the leader is."""
    sim = simulate(recurrent=recurrent, max_num_batched_tokens=64)
    leader = sim.add(document(0, 600))
    sim.step()
    others = [sim.add(document(20 + i, 100)) for i in range(4)]
    follower = sim.add([*document(0, 100), 5])  # of which 64 tokens are computed
    sim.step()
    sim.step()
    assert follower.num_hit_tokens == 100 and leader.num_computed_tokens < 200
    assert not all(seq.num_hit_tokens is not None for seq in others)
    sim.run()


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_follower_is_short_once_its_leader_has_computed_what_they_share(recurrent: bool) -> None:
    """Regression: it counted as long as it was when it arrived until the leader's whole prompt had been computed."""
    sim = simulate(recurrent=recurrent, max_num_batched_tokens=64)
    leader = sim.add([*document(0, 300), *document(40, 900)])
    follower = sim.add([*document(0, 300), 5])
    while leader.num_computed_tokens < 200:
        sim.step()
    others = [sim.add(document(20 + i, 250)) for i in range(3)]
    while follower.num_hit_tokens is None:
        sim.step()
    assert follower.num_hit_tokens == 300
    assert sum(seq.num_hit_tokens is None for seq in others) >= 2
    sim.run()


class HeldBound(StepBound):
    """No step runs chunks of long prompts."""

    runs_long_prompts = False  # type: ignore[assignment]


def test_a_follower_runs_if_its_leader_does_not() -> None:
    sim = simulate(max_num_batched_tokens=64, step_bound=StepBound(ChunkTimes(token_keys=1), max_step_s=1.0))
    leader = sim.add(document(0, 300))
    sim.step()
    sim.scheduler.sharing.bound = HeldBound(ChunkTimes(token_keys=1), max_step_s=1.0)
    question = sim.add(document(0, 70))
    question.num_queued_tokens = 6  # short
    assert started(sim, question) == [True]
    sim.scheduler.sharing.bound = None
    sim.run()
    assert leader.finish_reason == "length"


def test_nothing_is_remembered_of_prompts_that_have_ended() -> None:
    sim = simulate(max_num_batched_tokens=30)
    requests = [sim.add(document(i % 2, 90)) for i in range(5)]
    sim.step()
    sim.abort(requests[0])
    sim.run()
    underway = sim.scheduler._underway
    assert not (underway._prompts or underway._by_hash or underway._chunks)
