"""States of recurrent layers in the policy: which are kept, where hits end, and what every step starts from."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from content_model import Simulation, companion_of, head_of, page_copies, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_drafters import KINDS
from random_workloads import odd_drafter, play_dense
from tiers import examples

from nanovllm.capabilities.draft_head.pages import HeadStep, PageCopies, PageCopy
from nanovllm.capabilities.recurrent.places import RecurrentStates, SnapshotSave, StateStep
from nanovllm.kvcache.block_manager import BlockManager
from nanovllm.kvcache.block_pool import Block, PrefixIndex, PrefixMatch
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.kvcache.snapshots import Snapshots
from nanovllm.plan.step_plan import SequenceStep, StepPlan

DOCUMENT = [1 + i % 5 for i in range(40)]


def simulation(num_slots: int = 4, num_snapshots: int = 20, snapshot_tokens: int = 100, **options: Any) -> Simulation:
    """Blocks of 4 tokens, all on the GPU."""
    states = RecurrentStates(num_slots, num_snapshots, snapshot_tokens=snapshot_tokens)
    return Simulation(BlockManager(60, 4, companions=[states]), **({"max_num_seqs": num_slots - 1} | options))


def hit(sim: Simulation, prompt: list[int]) -> int | None:
    """Answer a prompt. Returns the number of tokens that were reused."""
    seq = sim.add(prompt, 2)
    sim.run()
    return seq.num_hit_tokens


def saved_at(sim: Simulation) -> list[int]:
    """After how many tokens of their sequences states were saved, in all steps."""
    steps = (step for plan in sim.plans for step in plan.sequences)
    return [step.position + save.num_tokens for step in steps for save in state_of(step).saves]  # type: ignore[union-attr]


def test_a_prompt_leaves_its_state_at_the_last_grain_before_its_last_token() -> None:
    sim = simulation()
    for length, expected in ((9, [8]), (8, [4]), (13, [12]), (3, [])):
        sim.plans.clear()
        assert hit(sim, [length, *DOCUMENT[: length - 1]]) == 0
        assert saved_at(sim) == expected
        assert hit(sim, [length, *DOCUMENT[: length - 1]]) == (expected or [0])[0]


def test_a_state_is_left_where_prompts_part() -> None:
    """The second prompt matches 20 tokens, but the first one's state is behind them. The third one finds a state."""
    sim = simulation()
    hits = [hit(sim, DOCUMENT[:20] + [6] * 9 + [last]) for last in (1, 1)]
    assert hits == [0, 28]
    assert [hit(sim, DOCUMENT[:20] + [0, last] * 6) for last in (1, 2, 3)] == [0, 20, 20]


def test_long_prompts_leave_states_on_their_way_also_in_one_step() -> None:
    for num_batched_tokens in (64, 7):
        sim = simulation(num_slots=5, snapshot_tokens=10, max_num_batched_tokens=num_batched_tokens, max_num_seqs=1)
        assert hit(sim, DOCUMENT[:39]) == 0
        assert saved_at(sim) == [12, 24, 36]  # multiples of three blocks, which are 10 tokens or more
        assert hit(sim, [*DOCUMENT[:30], 0, 0, 0, 0]) == 24


@pytest.mark.parametrize("chunked_prefill", [True, False])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("num_slots", "ends"), [(6, [31]), (4, [24, 31]), (3, [16, 28, 31]), (2, [8, 16, 24, 28, 31])])
def test_a_chunk_ends_where_there_is_no_slot_for_one_more_state(
    num_slots: int, ends: list[int], hybrid: bool, chunked_prefill: bool
) -> None:
    """Regression: the first ones were left out, so a prompt that parted there was computed from its beginning."""
    states = RecurrentStates(num_slots, 20, snapshot_tokens=8)
    kv = (
        HybridKVCacheManager(60, 20, 4, 2, grain=4, companions=[states])
        if hybrid
        else BlockManager(60, 4, companions=[states])
    )
    sim = Simulation(kv, max_num_seqs=1, max_num_batched_tokens=64, chunked_prefill=chunked_prefill)
    sim.add(DOCUMENT[:31], 1)
    sim.run()
    steps = [step for plan in sim.plans for step in plan.sequences]
    assert [step.position + step.num_tokens for step in steps] == ends
    assert saved_at(sim) == [8, 16, 24, 28]


def test_of_chunks_that_share_too_few_slots_the_last_states_are_kept() -> None:
    sim = simulation(num_slots=4, snapshot_tokens=8, max_num_batched_tokens=64)
    for last in (1, 2):
        sim.add([last, *DOCUMENT[:30]])
    sim.step()  # the first chunk has been placed when the second sequence takes a slot
    assert [step.num_tokens for step in sim.plans[0].sequences] == [16, 24]  # the second sequence's is launched first
    assert saved_at(sim) == [8, 16, 24]


def test_the_least_recently_used_snapshot_goes_first() -> None:
    sim = simulation(num_snapshots=2)
    first, second, third = ([last, *DOCUMENT[:8]] for last in (1, 2, 3))
    assert [hit(sim, prompt) for prompt in (first, second, first, third, first, second)] == [0, 0, 8, 0, 8, 0]


def test_a_snapshot_goes_with_the_blocks_of_its_prefix() -> None:
    states = RecurrentStates(4, 20)
    sim = Simulation(BlockManager(6, 4, companions=[states], watermark=0), max_num_seqs=3)
    assert hit(sim, [1, *DOCUMENT[:8]]) == 0 and len(states.snapshots) == 1
    assert hit(sim, [2, *DOCUMENT[:20]]) == 0  # takes all blocks
    assert len(states.snapshots) == 1
    assert hit(sim, [1, *DOCUMENT[:8]]) == 0


def test_without_a_prefix_cache_no_state_is_kept() -> None:
    states = RecurrentStates(4, 0)
    sim = Simulation(BlockManager(60, 4, enable_prefix_caching=False, companions=[states]), max_num_seqs=3)
    assert [hit(sim, DOCUMENT[:20]) for _ in range(2)] == [0, 0] and saved_at(sim) == []


def test_a_sequence_that_needs_every_block_computes_what_it_could_only_copy() -> None:
    """With offload: a block whose first tokens match must be given up, and with it the state behind these tokens. The
    last state before them still counts.
    """
    kv = HybridKVCacheManager(3, 3, 8, 1, grain=4, companions=[RecurrentStates(4, 20, snapshot_tokens=8)])
    sim = Simulation(kv, max_num_seqs=1)
    assert hit(sim, DOCUMENT[:14]) == 0  # states after 8 and 12 tokens
    seq = sim.add([*DOCUMENT[:13], 0, *DOCUMENT[:9]], 1)  # three blocks: 12 tokens match, four of them in a block
    sim.run()
    assert seq.num_hit_tokens == 8


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("drafter", ["", "right"])
def test_a_preempted_sequence_goes_on_where_it_was(hybrid: bool, drafter: str, depth: int) -> None:
    """Also if guesses of its last step have proved right, which its state does not cover yet."""
    states = RecurrentStates(6, 20)
    kv = (
        HybridKVCacheManager(20, 8, 4, 2, grain=2, companions=[states])
        if hybrid
        else BlockManager(20, 4, companions=[states])
    )
    sim = Simulation(kv, max_num_seqs=3, depth=depth, make_drafter=odd_drafter(drafter, 0) if drafter else None)
    sequences = [sim.add([last, *DOCUMENT[:8]], 10) for last in (1, 2)]
    for _ in range(3):
        sim.step()
    sim.preempt_next()
    sim.run()
    assert sim.scheduler.num_preemptions == 1
    rows = [step for plan in sim.plans for step in plan.sequences if step.seq_id == sequences[1].seq_id]
    assert states.num_loads == 1 and sum(step.num_tokens - step.num_guesses for step in rows) <= 9 + 10
    positions = [position for step in rows for position in range(step.position, step.position + step.num_tokens)]
    assert drafter or len(set(positions)) == len(positions)


def test_a_preempted_sequence_whose_last_block_is_gone_goes_back_to_the_last_snapshot() -> None:
    states = RecurrentStates(4, 20)
    sim = Simulation(BlockManager(9, 4, companions=[states], watermark=0), max_num_seqs=3)
    for last in (1, 2):
        sim.add([last, *DOCUMENT[:8]], 20)
    sim.run()
    rows = [step for plan in sim.plans for step in plan.sequences if step.seq_id == 1]
    assert sim.scheduler.num_preemptions > 0 and sum(step.position in (0, 8) for step in rows) > 1


def test_a_state_that_is_loaded_from_disk_is_not_overwritten_by_one_that_was_to_be_kept() -> None:
    """Regression: a sequence was preempted and aborted before a step could run, and its snapshot given to a load. The
    next step then copied the sequence's state over what had been loaded.
    """
    sim = simulation(num_snapshots=2)
    seq = sim.add(DOCUMENT[:9], 9)
    sim.step()
    states = companion_of(sim.kv, RecurrentStates)
    sim.kv.preempt(seq)
    sim.kv.free(seq)
    held = states.snapshots.hold()
    flushes = states.plan_step([], lambda block: None)
    assert flushes is None or held not in {flush.snapshot for flush in flushes.flushes}


# -- random workloads, and faults that must be noticed ---------------------------------------------------------------


@settings(max_examples=examples(300))
@given(
    seed=st.integers(0, 2**32),
    hybrid=st.booleans(),
    with_cpu=st.booleans(),
    drafter=st.sampled_from(["", "", *KINDS, "resident", "shadow"]),
)
def test_every_step_starts_from_the_states_of_its_sequences(
    seed: int, hybrid: bool, with_cpu: bool, drafter: str
) -> None:
    play_dense(seed, hybrid=hybrid, with_cpu=with_cpu, drafter=drafter, has_states=True)


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 2**32),
    hybrid=st.booleans(),
    with_cpu=st.booleans(),
    drafter=st.sampled_from([*KINDS, "mtp", "mtp", "mtp"]),
)
def test_the_draft_head_finds_the_tokens_of_each_sequence(
    seed: int, hybrid: bool, with_cpu: bool, drafter: str
) -> None:
    play_dense(seed, hybrid=hybrid, with_cpu=with_cpu, drafter=drafter, has_states=True, has_head=True)


@pytest.mark.parametrize(("seed", "hybrid", "drafter"), [(3285, False, "drafts"), (3492, True, "outside")])
def test_a_preempted_sequence_uses_what_another_one_has_computed_meanwhile(
    seed: int, hybrid: bool, drafter: str
) -> None:
    """Regression: it went on with fewer of its own blocks than it had counted on when it was admitted."""
    play_dense(seed, hybrid=hybrid, with_cpu=seed % 3 == 0, drafter=drafter, has_states=True)


def change_states(**changes: Callable[[StateStep], Any]) -> Callable[[StepPlan], StepPlan]:
    """Change fields of each state's step."""

    def changed(step: SequenceStep) -> SequenceStep:
        state = state_of(step)
        assert state is not None
        return step.with_payload(state._replace(**{name: change(state) for name, change in changes.items()}))

    return lambda plan: replace(plan, sequences=tuple(map(changed, plan.sequences)))


def one_token_later(state: StateStep) -> tuple[SnapshotSave, ...]:
    """Saves within the step, of another state."""
    return tuple(save._replace(num_tokens=save.num_tokens + (save.slot != state.target)) for save in state.saves)


def change_head(change: Callable[[HeadStep], HeadStep]) -> Callable[[StepPlan], StepPlan]:
    def changed(step: SequenceStep) -> SequenceStep:
        head = head_of(step)
        assert head is not None
        return step.with_payload(change(head))

    return lambda plan: replace(plan, sequences=tuple(map(changed, plan.sequences)))


def change_copies(change: Callable[[tuple[PageCopy, ...]], Iterable[PageCopy]]) -> Callable[[StepPlan], StepPlan]:
    def changed(plan: StepPlan) -> StepPlan:
        others = [payload for payload in plan.moves.payloads if not isinstance(payload, PageCopies)]
        payloads = (*others, PageCopies(tuple(change(page_copies(plan)))))
        return replace(plan, moves=replace(plan.moves, payloads=payloads))

    return changed


HEAD_FAULTS = {
    "copy lost": change_copies(lambda copies: copies[1:]),
    "copies in another order": change_copies(lambda copies: copies[::-1]),
    "copy short": change_copies(lambda copies: (c._replace(num_tokens=c.num_tokens - 1) for c in copies)),
    "next token of a prompt forgotten": change_head(lambda head: head._replace(next_token=-1)),
    "pages swapped": change_head(lambda head: head._replace(pages=head.pages[::-1])),
    "right guesses not counted": change_states(num_replayed=lambda state: 0),
}


@pytest.mark.parametrize("fault", HEAD_FAULTS)
def test_content_model_faulty_draft_head_is_noticed(fault: str) -> None:
    for seed in range(38, 118):  # the first one shows all of them
        try:
            play_dense(seed, hybrid=True, drafter="mtp", has_states=True, has_head=True, change_plan=HEAD_FAULTS[fault])
        except (AssertionError, KeyError):
            return
    pytest.fail("not noticed")


STATE_FAULTS = {
    "load lost": change_states(load=lambda state: -1),
    "saves lost": change_states(saves=lambda state: ()),
    "saved one token later": change_states(saves=one_token_later),
    "right guesses not replayed": change_states(num_replayed=lambda state: 0),
    "state begun anew": change_states(source=lambda state: -1),
    "old state kept": change_states(source=lambda state: state.target),
}


@pytest.mark.parametrize("fault", STATE_FAULTS)
def test_content_model_faulty_state_is_noticed(fault: str) -> None:
    for seed in range(80):
        try:
            play_dense(seed, hybrid=True, drafter="random", has_states=True, change_plan=STATE_FAULTS[fault])
        except (AssertionError, KeyError):
            return
    pytest.fail("not noticed")


def match_anywhere(index: PrefixIndex, blocks: list[Block], num_tokens: int) -> PrefixMatch:
    """A hit that ends where blocks end."""
    full, num_partial = divmod(num_tokens, index.block_size)
    partial = blocks[full].block_id if num_partial else None
    return PrefixMatch(tuple([block.block_id for block in blocks[:full]]), partial, num_partial, None, num_tokens)


STATE_MANAGER_FAULTS = {
    "hits end anywhere": mock.patch.object(PrefixIndex, "_last_with_snapshot", match_anywhere),
    "snapshots outlive their prefixes": mock.patch.object(Snapshots, "forget", lambda snapshots, prefix_id: None),
    "searches outlive snapshots": mock.patch.object(PrefixIndex, "_version", 0),
    "slots never come back": mock.patch.object(RecurrentStates, "begin_step", lambda states: None),
}


@pytest.mark.parametrize("fault", STATE_MANAGER_FAULTS)
def test_content_model_faulty_policy_of_states_is_noticed(fault: str) -> None:
    with STATE_MANAGER_FAULTS[fault]:
        for seed in range(120):
            try:
                play_dense(seed, hybrid=True, has_states=True)
            except (AssertionError, KeyError, IndexError):
                return
    pytest.fail("not noticed")
