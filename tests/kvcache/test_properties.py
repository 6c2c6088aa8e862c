"""Random workloads over scheduler and managers: each sequence sees its own tokens, all end, nothing is lost."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import pytest
import xxhash
from content_model import ContentError, Simulation
from cpu_splits import RandomSplit, splitter
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import FIRST_ID, leftovers
from odd_drafters import KINDS
from random_workloads import GRAIN, LONG_CHUNK_BLOCKS, Abort, Add, Operation, Preempt, Steps, play, play_dense
from tiers import examples

from nanovllm.capabilities.shadow.pages import DraftKeys, ShadowFills
from nanovllm.kvcache.block_manager import BlockManager, KVCacheManager
from nanovllm.kvcache.block_pool import Block, PrefixIndex
from nanovllm.kvcache.hybrid_manager import HybridKVCacheManager
from nanovllm.kvcache.step_slots import HybridBlock, StepSlots
from nanovllm.plan.sequence import Sequence, TokenIds
from nanovllm.plan.step_plan import SequenceStep, StepPlan
from nanovllm.schedule.scheduler import Scheduler
from nanovllm.utils.arithmetic import ceil_div

T = TypeVar("T")


def any_of(values: Iterable[T]) -> st.SearchStrategy[T]:
    """Each as often as the others, where st.integers prefers small numbers and bounds."""
    return st.sampled_from(list(values))


ADDS = st.builds(
    Add,
    document=any_of([0, 0, 0, 1, 2]),
    num_shared_tokens=any_of([0, 3, 5, 12, 16, 20, 21, 22, 31, 40]),
    suffix=st.lists(any_of(range(7)), max_size=4).map(tuple),
    max_tokens=any_of([1, 2, 3, 5, 9, 14]),
    ignore_eos=any_of([True, True, False]),
)
STEPS = st.builds(Steps, any_of([1, 2, 3, 5]))
OPERATIONS: st.SearchStrategy[list[Operation]] = st.lists(
    st.one_of(ADDS, ADDS, ADDS, STEPS, STEPS, STEPS, st.builds(Abort, any_of(range(16))), st.builds(Preempt)),
    min_size=12,
    max_size=40,
)
SCHEDULES = st.fixed_dictionaries(
    {
        "depth": any_of([0, 1]),
        "max_num_seqs": any_of([1, 2, 3, 8]),
        "max_num_batched_tokens": any_of([1, 2, 3, 5, 8, 13, 64]),
        "chunked_prefill": any_of([True, False]),
    }
)
ALL_GPU = st.builds(
    BlockManager,
    num_blocks=any_of(range(4, 40)),
    block_size=any_of([1, 2, 3, 4, 5]),
    enable_prefix_caching=any_of([True, True, False]),
)
HYBRID = st.builds(
    HybridKVCacheManager,
    num_cpu_blocks=any_of(range(8, 60)),
    num_gpu_blocks=any_of(range(2, 8)),
    block_size=any_of([GRAIN, 2 * GRAIN, 3 * GRAIN]),
    group_blocks=any_of([1, 2, 3]),
    enable_prefix_caching=any_of([True, True, True, False]),
    cpu_split=(st.none() | st.builds(RandomSplit, generator=st.randoms(use_true_random=False))).map(splitter),
    grain=st.just(GRAIN),
    long_chunk_blocks=st.just(LONG_CHUNK_BLOCKS),
    progress_tokens=any_of([1, 4, 30]),
)


@settings(max_examples=examples(150))
@given(kv=ALL_GPU, schedule=SCHEDULES, operations=OPERATIONS)
def test_block_manager_random_workload_every_sequence_sees_its_tokens(
    kv: KVCacheManager, schedule: dict[str, Any], operations: list[Operation]
) -> None:
    play(Simulation(kv, **schedule), operations)


@settings(max_examples=examples(250))
@given(kv=HYBRID, schedule=SCHEDULES, operations=OPERATIONS)
def test_hybrid_manager_random_workload_every_sequence_sees_its_tokens(
    kv: HybridKVCacheManager, schedule: dict[str, Any], operations: list[Operation]
) -> None:
    simulation = Simulation(kv, **schedule)
    play(simulation, operations)
    num_blocks = sum(ceil_div(seq.max_kv_tokens, kv.block_size) for seq in simulation.sequences)
    if num_blocks <= len(kv.blocks) and not any(isinstance(operation, Preempt) for operation in operations):
        assert simulation.scheduler.num_preemptions == 0, "with enough blocks there is always room for who runs"


# -- longer and denser workloads than hypothesis makes by itself; they shrink badly, but a seed repeats them ---------


@settings(max_examples=examples(200))
@given(seed=st.integers(0, 2**32))
def test_block_manager_dense_workload_every_sequence_sees_its_tokens(seed: int) -> None:
    play_dense(seed, hybrid=False)


@settings(max_examples=examples(350))
@given(seed=st.integers(0, 2**32), with_cpu=st.booleans())
def test_hybrid_manager_dense_workload_every_sequence_sees_its_tokens(seed: int, with_cpu: bool) -> None:
    play_dense(seed, hybrid=True, with_cpu=with_cpu)


@settings(max_examples=examples(250))
@given(
    seed=st.integers(0, 2**32),
    hybrid=st.booleans(),
    with_cpu=st.booleans(),
    drafter=any_of([*KINDS, "resident", "shadow", "shadow"]),
)
def test_guesses_of_any_kind_change_no_token_and_lose_nothing(
    seed: int, hybrid: bool, with_cpu: bool, drafter: str
) -> None:
    play_dense(seed, hybrid=hybrid, with_cpu=with_cpu, drafter=drafter)


@settings(max_examples=examples(250))
@given(
    seed=st.integers(0, 2**32),
    hybrid=st.booleans(),
    drafter=any_of(["", *KINDS, "resident", "shadow", "mtp", "prompt_lookup"]),
    has_states=st.booleans(),
    depth=st.integers(0, 1),
)
def test_nothing_is_remembered_of_requests_that_have_ended(
    seed: int, hybrid: bool, drafter: str, has_states: bool, depth: int
) -> None:
    """Regression: guesses of a request were remembered for ever if it ended in a step that had dropped them."""
    has_head = drafter == "mtp"
    options = {"has_states": has_states or has_head, "has_head": has_head, "depth": depth, "first_id": FIRST_ID}
    simulation = play_dense(seed, hybrid=hybrid, drafter=drafter, **options)
    assert leftovers(simulation.scheduler) == []


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32), hybrid=st.booleans(), num_hashes=any_of([1, 3]))
def test_hashes_that_collide_change_no_token_and_lose_nothing(seed: int, hybrid: bool, num_hashes: int) -> None:
    play_dense(seed, hybrid=hybrid, hash_bytes=lambda data: xxhash.xxh64_intdigest(data) % num_hashes)


@settings(max_examples=examples(200))
@given(seed=st.integers(0, 2**32), hybrid=st.booleans(), drafter=any_of(["", *KINDS]))
def test_steps_bounded_by_any_times_change_no_token_and_lose_nothing(seed: int, hybrid: bool, drafter: str) -> None:
    play_dense(seed, hybrid=hybrid, drafter=drafter, bounded=True)


@pytest.mark.parametrize(("seed", "bounded"), [(747373, False), (572380197229, True), (431024148716, True)])
def test_prompts_that_lack_blocks_do_not_hold_up_who_holds_them(seed: int, bounded: bool) -> None:
    """Regressions: a preempted sequence waited behind a prompt that lacked its blocks, or was held back as a long one
    for short ones that lacked them. Then none could run.
    """
    play_dense(seed, hybrid=True, with_cpu=seed == 431024148716, bounded=bounded)


# -- the model can tell: whatever is taken from a plan or broken in a manager is noticed ------------------------------


def without_first(name: str) -> Callable[[StepPlan], StepPlan]:
    """Leave out the first move of a kind."""
    return lambda plan: replace(plan, moves=replace(plan.moves, **{name: getattr(plan.moves, name)[1:]}))


def shorten_first_offload(plan: StepPlan) -> StepPlan:
    offloads = list(plan.moves.offloads)
    if offloads:
        offloads[0] = offloads[0]._replace(end=offloads[0].end - 1)
    return replace(plan, moves=replace(plan.moves, offloads=tuple(offloads)))


def hide_streamed_block(plan: StepPlan) -> StepPlan:
    groups = tuple(group._replace(tables=tuple(table[1:] for table in group.tables)) for group in plan.moves.streamed)
    return replace(plan, moves=replace(plan.moves, streamed=groups))


def hide_cpu_span(plan: StepPlan) -> StepPlan:
    spans = tuple(row[1:] for row in plan.moves.cpu_spans)
    return replace(plan, moves=replace(plan.moves, cpu_spans=spans))


def forget_cut(plan: StepPlan) -> StepPlan:
    """What the CPU attends to is streamed as well."""
    groups = tuple(group._replace(num_cut_tokens=0) for group in plan.moves.streamed)
    return replace(plan, moves=replace(plan.moves, streamed=groups))


def swap_blocks(plan: StepPlan) -> StepPlan:
    def swapped(table: tuple[int, ...]) -> tuple[int, ...]:
        return (table[-1], *table[1:-1], table[0]) if len(table) > 1 else table

    return replace(plan, sequences=tuple(s._replace(block_table=swapped(s.block_table)) for s in plan.sequences))


def take_pending_row_before(plan: StepPlan) -> StepPlan:
    steps = [step._replace(previous_row=step.previous_row - (step.previous_row > 0)) for step in plan.sequences]
    return replace(plan, sequences=tuple(steps))


PLAN_FAULTS: dict[str, Callable[[StepPlan], StepPlan]] = {
    "flush lost": without_first("flushes"),
    "load lost": without_first("loads"),
    "copy lost": without_first("copies"),
    "offload lost": without_first("offloads"),
    "offload one token short": shorten_first_offload,
    "streamed block not attended": hide_streamed_block,
    "span of the CPU not attended": hide_cpu_span,
    "cut of a group forgotten": forget_cut,
    "blocks of a table swapped": swap_blocks,
    "pending token of another sequence": take_pending_row_before,
}


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_content_model_faulty_plan_is_noticed(fault: str) -> None:
    """By the model alone: the misses are counted elsewhere."""
    with mock.patch.object(Simulation, "_check_fewest_misses"):
        for seed in range(40):
            try:
                play_dense(seed, hybrid=True, with_cpu=seed % 2 == 1, change_plan=PLAN_FAULTS[fault])
            except ContentError:
                return
    pytest.fail("not noticed")


@pytest.mark.parametrize(("seed", "hybrid"), [(4, True), (5, True), (8, True), (10, False), (43, True), (54, True)])
def test_pages_are_those_of_their_blocks(seed: int, hybrid: bool) -> None:
    """Blocks that another sequence computes, loads or fills in the same step: a page must wait for their keys."""
    play_dense(seed, hybrid=hybrid, with_cpu=seed % 2 == 1, drafter="shadow")


def change_fills(change: Callable[[ShadowFills], ShadowFills]) -> Callable[[StepPlan], StepPlan]:
    def changed(plan: StepPlan) -> StepPlan:
        payloads = (change(each) if isinstance(each, ShadowFills) else each for each in plan.moves.payloads)
        return replace(plan, moves=replace(plan.moves, payloads=tuple(payloads)))

    return changed


def swap_page(plan: StepPlan) -> StepPlan:
    """A page is missing, another one is read twice."""

    def swapped(step: SequenceStep) -> SequenceStep:
        keys = step.payload(DraftKeys)
        if keys is None or len(keys.pages) < 2:
            return step
        _, second, *others = keys.pages
        return step.with_payload(keys._replace(pages=(second, second, *others)))

    return replace(plan, sequences=tuple(map(swapped, plan.sequences)))


SHADOW_FAULTS = {
    "page fill lost": change_fills(lambda fills: fills._replace(resident=fills.resident[1:])),
    "pages of streamed blocks not filled": change_fills(lambda fills: fills._replace(streamed=())),
    "page read twice": swap_page,
}


@pytest.mark.parametrize("fault", SHADOW_FAULTS)
def test_content_model_faulty_shadow_is_noticed(fault: str) -> None:
    for seed in range(80):
        try:
            play_dense(seed, hybrid=True, drafter="shadow", change_plan=SHADOW_FAULTS[fault])
        except (ContentError, KeyError):
            return
    pytest.fail("not noticed")


def unchained_hash(index: PrefixIndex, seq: Sequence, grain_idx: int) -> int:
    """A hash of the grain's own tokens only."""
    return hash(tuple(seq.token_ids[grain_idx * index.grain : (grain_idx + 1) * index.grain])) & (2**63 - 1)


def register_one_grain_more(index: PrefixIndex, seq: Sequence, blocks: list[Block], end: int) -> None:
    REGISTER(index, seq, blocks, min(end + index.grain, len(seq.block_table) * index.block_size))


def find_by_tokens_alone(
    index: PrefixIndex, grain_hash: int, parent_id: int, token_ids: TokenIds, start: int = 0
) -> Block | None:
    """Behind any prefix."""
    blocks = [index._newest[prefix_id] for prefix_id in index._prefix_ids.get(grain_hash, ())]
    return next((block for block in blocks if block.token_ids[start : start + len(token_ids)] == token_ids), None)


def remove_all_holders(index: PrefixIndex, prefix_id: int, grain_hash: int, block: Block) -> None:
    if index._newest.pop(prefix_id, None) is not None:
        index._forget_id(prefix_id, grain_hash)
    index._older.pop(prefix_id, None)


REGISTER = PrefixIndex.register
MANAGER_FAULTS = {
    "prefix not compared": mock.patch.multiple(PrefixIndex, grain_hash=unchained_hash, _find=find_by_tokens_alone),
    "tokens registered that are not computed": mock.patch.object(PrefixIndex, "register", register_one_grain_more),
    "grain forgotten with its newest holder": mock.patch.object(PrefixIndex, "_remove_holder", remove_all_holders),
    "slot given up without a flush": mock.patch.object(HybridBlock, "is_dirty", False),
    "slot given up that the step has placed": mock.patch.object(StepSlots, "pin", lambda slots, block: None),
    "slot given up that holds the newest tokens": mock.patch.object(
        HybridBlock, "is_pinned", property(lambda block: block.pinned_in_step)
    ),
    "tables kept while blocks lose their slots": mock.patch.object(
        StepSlots, "residency", property(lambda slots: 0, lambda slots, value: None), create=True
    ),
}


@pytest.mark.parametrize("fault", MANAGER_FAULTS)
def test_content_model_faulty_manager_is_noticed(fault: str) -> None:
    with MANAGER_FAULTS[fault], mock.patch.object(Simulation, "_check_fewest_misses"):
        for seed in range(40):
            try:
                play_dense(seed, hybrid=True)
            except (AssertionError, KeyError):
                return
    pytest.fail("not noticed")


def count_guesses(manager: HybridKVCacheManager, seq: Sequence, num_tokens: int, num_guesses: int = 0) -> None:
    PLACE(manager, seq, num_tokens, 0)


def forget_that_guesses_were_written(slots: StepSlots, block: HybridBlock, num_tokens: int) -> None:
    pass


PLACE = HybridKVCacheManager.place
SPECULATION_FAULTS = {
    "guesses counted before they are verified": mock.patch.object(HybridKVCacheManager, "place", count_guesses),
    "right guesses not kept": mock.patch.object(StepSlots, "record_accepted", forget_that_guesses_were_written),
    "next step planned before guesses are verified": mock.patch.object(Scheduler, "needs_tokens", lambda self: False),
}


@pytest.mark.parametrize("fault", SPECULATION_FAULTS)
def test_content_model_faulty_speculation_is_noticed(fault: str) -> None:
    with SPECULATION_FAULTS[fault], mock.patch.object(Simulation, "_check_fewest_misses"):
        for seed in range(40):
            try:
                play_dense(seed, hybrid=True, drafter="random", depth=1)
            except AssertionError:
                return
    pytest.fail("not noticed")
