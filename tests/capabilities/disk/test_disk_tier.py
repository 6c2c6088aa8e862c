"""DiskTier over the content model: whatever the disk does, each sequence sees its own tokens, and nothing is lost."""

import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from content_model import ContentError, ContentRunner, Simulation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integrity import check_kv
from odd_drafters import KINDS
from random_workloads import GRAIN, dense_manager, dense_operations, dense_schedule, dense_states, odd_drafter, play
from simulated_disk import SimulatedDisk
from tiers import examples

from nanovllm.capabilities.disk.disk_moves import DiskMoves, Extent
from nanovllm.capabilities.disk.tier import RATE_S, DiskBoard, DiskTier
from nanovllm.capabilities.disk.worker import DiskWorker, _folded, weights_identity
from nanovllm.capabilities.recurrent.places import RecurrentStates, Snapshots
from nanovllm.kvcache.block_manager import BlockManager, KVCacheManager
from nanovllm.plan.sequence import Sequence
from nanovllm.plan.step_plan import StepPlan
from nanovllm.sampling_params import SamplingParams

QUICK = [HealthCheck.too_slow, HealthCheck.large_base_example]


def make_disk(
    rng: random.Random,
    extents: dict[bytes, Any],
    kv: KVCacheManager,
    runner: ContentRunner,
    checks_versions: bool = True,
) -> SimulatedDisk:
    is_hybrid = not isinstance(kv, BlockManager)
    grain = GRAIN if is_hybrid else rng.choice([size for size in (1, 2, 4) if kv.block_size % size == 0])
    memory = runner.cpu if is_hybrid else runner.gpu
    return SimulatedDisk(kv, memory, grain, rng, extents, runner.snapshots, checks_versions)


def play_on_disk(
    seed: int, hybrid: bool, drafter: str = "", has_states: bool = False, checks_versions: bool = True
) -> tuple[int, int]:
    """Several engines, one after the other, on one disk. Returns how many extents and states were loaded."""
    rng = random.Random(seed)
    extents: dict[bytes, Any] = {}
    num_loaded, num_states, block_size = 0, 0, rng.randint(1, 6)
    for _ in range(3):
        schedule = dense_schedule(rng)
        states = dense_states(rng, schedule["max_num_seqs"], min_snapshots=2) if has_states else None
        if hybrid:
            kv: KVCacheManager = dense_manager(rng, hybrid=True, states=states)
        else:
            kv = BlockManager(rng.randint(8, 40), block_size, states=states)
        kv.pool.enable_prefix_caching = True
        simulation = Simulation(
            kv,
            **schedule,
            make_disk=partial(make_disk, rng, extents, checks_versions=checks_versions),
            make_drafter=odd_drafter(drafter, seed) if drafter else None,
        )
        assert simulation.disk is not None
        try:
            play(simulation, dense_operations(rng))
            for extent in simulation.disk.tier.last_moves().stores:
                simulation.disk.keep(extent)
        finally:
            simulation.disk.board.close()
        num_loaded += simulation.disk.num_loaded
        num_states += simulation.disk.num_loaded_states
    return num_loaded, num_states


@settings(max_examples=examples(150), deadline=None, suppress_health_check=QUICK)
@given(
    seed=st.integers(0, 2**32),
    hybrid=st.booleans(),
    drafter=st.sampled_from(["", "", *KINDS]),
    has_states=st.booleans(),
)
def test_disk_changes_no_token_and_loses_nothing(seed: int, hybrid: bool, drafter: str, has_states: bool) -> None:
    play_on_disk(seed, hybrid, drafter, has_states)


@pytest.mark.parametrize(
    ("hybrid", "has_states"),
    [
        (False, False),
        (True, True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((True, False), (False, True))),
    ],
)
def test_workloads_load_from_disk(hybrid: bool, has_states: bool) -> None:
    """Else the test above would prove nothing."""
    loaded = [play_on_disk(seed, hybrid, has_states=has_states) for seed in range(6)]
    assert sum(num_extents > 0 for num_extents, _ in loaded) >= 3
    assert sum(num_states > 0 for _, num_states in loaded) >= 3 * has_states


@pytest.mark.parametrize(("hybrid", "has_states"), [(False, True), (True, False)])
def test_store_of_a_block_that_was_given_away_is_noticed(hybrid: bool, has_states: bool) -> None:
    """Without the versions of blocks, extents hold the tokens of other sequences, and the model sees it."""
    with pytest.raises(ContentError):
        for seed in range(34, 234):  # the first one shows it
            play_on_disk(seed, hybrid, has_states=has_states, checks_versions=False)


@pytest.mark.parametrize("hybrid", [False, True])
def test_store_of_a_snapshot_that_was_given_away_is_noticed(hybrid: bool) -> None:
    """Likewise without the versions of snapshots."""
    take = Snapshots._take

    def take_unnoticed(snapshots: Snapshots) -> int:
        snapshots.versions = None
        return take(snapshots)

    with mock.patch.object(Snapshots, "_take", take_unnoticed), pytest.raises(ContentError):
        for seed in range(200):
            play_on_disk(seed, hybrid, has_states=True)


def test_identity_of_weights_tells_every_change() -> None:
    """Both the checksum of what is in CPU memory and the sums that a GPU computes."""
    torch.manual_seed(0)
    for size in (0, 1, 3, 5, 1000):
        data = torch.randint(256, (size,), dtype=torch.uint8)
        before = _folded(data)
        assert torch.equal(before, _folded(data.clone()))
        for i in {0, size // 2, size - 1} if size else ():
            data[i] ^= 1
            assert not torch.equal(before, _folded(data)), f"byte {i} of {size}"
            data[i] ^= 1
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    before_all = weights_identity(model)
    for change in (lambda: model[1].bias[-1].add_(1), lambda: model[0].weight.t_()):
        with torch.no_grad():
            change()
        assert weights_identity(model) != before_all


class FixedTimes:
    """A token of a prompt takes a second to compute."""

    def step_ended(self, plan: StepPlan, seconds: float | None) -> None:
        raise NotImplementedError

    def prompt_s(self, num_tokens: int, position: int) -> float | None:
        return float(num_tokens)


class Everything:
    """A disk that has all extents."""

    def __contains__(self, key: object) -> bool:
        return True


class Rates:
    """A tier over 40 blocks of two tokens, an extent each, of 100 bytes; `now_s` is its clock. States have 1,000."""

    def __init__(self, num_snapshots: int = 0) -> None:
        self.now_s = 0.0
        self.board = DiskBoard(2, 40 + num_snapshots)
        self.kv = BlockManager(40, 2, states=RecurrentStates(4, num_snapshots) if num_snapshots else None)
        self.tier = DiskTier(
            Everything(),
            self.kv,
            self.board,
            extent_bytes=100,
            state_bytes=1000 if num_snapshots else 0,
            times=FixedTimes(),
            stores_prompts=True,
            grain=2,
            clock=lambda: self.now_s,
        )
        self.num_sequences = 0

    def sequence(self, num_tokens: int = 21) -> Sequence:
        self.num_sequences += 1
        return Sequence(self.num_sequences, [self.num_sequences] * num_tokens, SamplingParams(max_tokens=1), seed=0)

    def post(self, load_number: int, num_loaded: int, byte_per_s: float, *, has_ended: bool = False) -> None:
        for rank in range(2):
            self.board.post_progress(rank, load_number, num_loaded, byte_per_s * (1 + rank))
            if has_ended:
                self.board.post_end(rank, load_number)


@pytest.fixture
def rates() -> Iterator[Rates]:
    rates = Rates()
    yield rates
    rates.board.close()


@pytest.fixture
def state_rates() -> Iterator[Rates]:
    rates = Rates(num_snapshots=3)
    yield rates
    rates.board.close()


def test_stores_are_pending_until_the_slowest_rank_has_made_them(rates: Rates) -> None:
    """The other ranks hear of the last stores when rank 0 may have made its own."""
    pending = []
    for rank, num_extents, number in ((0, 0, 1), (1, 3, 1), (1, 0, 1), (0, 0, 2), (1, 2, 2), (1, 0, 2)):
        rates.board.post_pending(rank, num_extents)
        rates.board.post_moves(rank, number)
        pending.append(rates.board.num_pending(number))
    assert pending == [1, 3, 0, 1, 2, 0]


def test_prompt_waits_for_the_disk_if_that_is_faster_than_computing(rates: Rates) -> None:
    """Twenty tokens are ten extents: 1,000 bytes, against 20 s of computing. The slower rank counts."""
    for byte_per_s, waits in ((51, True), (49, False)):
        rates.post(0, 0, byte_per_s)
        assert rates.tier.wait_for_load(rates.sequence()) == waits
    assert not rates.tier.wait_for_load(rates.sequence(num_tokens=2)), "the last token of a prompt is computed"


def test_rate_of_a_slow_load_is_not_believed_for_ever(rates: Rates) -> None:
    rates.post(0, 0, 1)
    assert not rates.tier.wait_for_load(rates.sequence())
    rates.now_s += RATE_S + 1
    assert rates.tier.wait_for_load(rates.sequence())


def test_load_that_becomes_slow_is_cancelled_and_keeps_what_it_has_read(rates: Rates) -> None:
    seq = rates.sequence()
    assert rates.tier.wait_for_load(seq)
    moves = rates.tier.next_moves()
    assert moves is not None and len(moves.loads) == 10
    rates.post(1, 3, 1000)
    rates.now_s = 3.0
    assert rates.tier.next_moves() is None and rates.tier.take_ready() == []
    rates.now_s = 30.0
    assert rates.tier.next_moves() is None and rates.tier.take_ready() == [seq]
    assert rates.board.is_cancelled(1) and rates.tier.num_cancelled_loads == 1
    assert not rates.tier.wait_for_load(rates.sequence()), "the blocks of the load are still in use"
    assert rates.kv.pool.num_free == 30
    rates.post(1, 4, 0.5, has_ended=True)
    rates.tier.next_moves()
    assert rates.kv.pool.num_free == 40
    assert rates.kv.num_known_tokens(seq) == 8


def test_one_rank_that_has_read_less_makes_the_hit_shorter(rates: Rates) -> None:
    seq = rates.sequence()
    assert rates.tier.wait_for_load(seq)
    rates.tier.next_moves()
    rates.post(1, 10, 1000, has_ended=True)
    rates.board.post_progress(1, 1, 6, 1000)
    rates.tier.next_moves()
    assert rates.tier.take_ready() == [seq] and rates.kv.num_known_tokens(seq) == 12


def test_state_counts_in_the_time_of_a_load(state_rates: Rates) -> None:
    """Ten extents and a state are 2,000 bytes, against 20 s of computing."""
    for byte_per_s, waits in ((101, True), (99, False)):
        state_rates.post(0, 0, byte_per_s)
        assert state_rates.tier.wait_for_load(state_rates.sequence()) == waits


def test_state_that_a_rank_lacks_is_followed_by_an_earlier_one(state_rates: Rates) -> None:
    rates, seq = state_rates, state_rates.sequence()
    assert rates.tier.wait_for_load(seq)
    moves = rates.tier.next_moves()
    assert moves is not None and [extent.is_state for extent in moves.loads] == [False] * 10 + [True]
    rates.post(1, 11, 1000, has_ended=True)
    rates.board.post_progress(1, 1, 10, 1000)
    moves = rates.tier.next_moves()
    assert rates.kv.num_known_tokens(seq) == 0 and rates.tier.take_ready() == []
    assert moves is not None and [extent.is_state for extent in moves.loads] == [True], "the keys are in memory"
    check_kv(rates.kv, rates.tier.holders)
    rates.post(2, 1, 1000, has_ended=True)
    rates.tier.next_moves()
    assert rates.tier.take_ready() == [seq] and rates.kv.num_known_tokens(seq) == 18
    assert rates.tier.stats()["num_disk_hit_states"] == 1
    check_kv(rates.kv, [])


def test_load_that_lacks_an_extent_is_followed_by_one_that_ends_before_it(state_rates: Rates) -> None:
    rates, seq = state_rates, state_rates.sequence()
    rates.tier.wait_for_load(seq)
    rates.tier.next_moves()
    rates.post(1, 7, 1000, has_ended=True)
    moves = rates.tier.next_moves()
    assert moves is not None and len(moves.loads) == 1
    rates.post(2, 1, 1000, has_ended=True)
    rates.tier.next_moves()
    assert rates.tier.take_ready() == [seq] and rates.kv.num_known_tokens(seq) == 14


def test_load_with_a_state_is_given_up_if_computing_all_of_it_is_faster(state_rates: Rates) -> None:
    """Without the state at its end, what has been read is of no use."""
    rates, seq = state_rates, state_rates.sequence()
    rates.tier.wait_for_load(seq)
    rates.tier.next_moves()
    rates.post(1, 2, 1000)
    for now_s, waits in ((13.0, True), (14.0, False)):  # what is left takes 9 times a sixth of that
        rates.now_s = now_s
        rates.tier.next_moves()
        assert (rates.tier.take_ready() == []) == waits
    rates.post(1, 11, 1000, has_ended=True)
    rates.tier.next_moves()
    assert rates.kv.num_known_tokens(seq) == 20, "but what arrives all the same counts"
    check_kv(rates.kv, [])


def test_prompt_that_lacks_blocks_is_not_overtaken_by_younger_ones(rates: Rates) -> None:
    old, seq, young = rates.sequence(60), rates.sequence(), rates.sequence(5)
    rates.kv.admit(old)
    assert rates.tier.wait_for_load(seq)
    assert rates.tier.next_moves() is None and not rates.tier.holders
    assert rates.tier.may_overtake(old) and not rates.tier.may_overtake(young)
    rates.kv.free(old)
    assert rates.tier.next_moves() is not None
    assert rates.tier.may_overtake(young), "its blocks are its own now"


class EmptyStore:
    """Notes what is read and written."""

    is_paused = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __contains__(self, key: object) -> bool:
        return False

    def sample(self, num_extents: int) -> list[Path]:
        return []

    def read(self, *args: object) -> bool:
        self.calls.append("read")
        return True

    def write(self, *args: object) -> bool:
        self.calls.append("written")
        return True

    def refresh(self) -> None: ...

    def close(self) -> None: ...


def test_worker_touches_nothing_before_the_device_has_done_what_it_was_given(rates: Rates) -> None:
    """The edges E13 and E14. On a CPU everything is done at once, so engines cannot tell."""
    store, is_over = EmptyStore(), threading.Event()
    nothing = dict.fromkeys(("payload", "buffer", "copy_in", "close"), lambda *args: None)
    pool = SimpleNamespace(fence=list, is_over=lambda fence: is_over.is_set(), num_bytes=lambda extent: 1, **nothing)
    worker = DiskWorker(store, pool, rates.board, rank=0)  # type: ignore[arg-type]
    extent = Extent(b"key", b"", b"", 0.0, block_id=0, start=0, version=0)
    worker.submit(DiskMoves(1, stores=[extent], loads=[extent], load_number=1))
    time.sleep(0.05)
    assert store.calls == []
    is_over.set()
    while len(store.calls) < 2:
        time.sleep(0.001)
    worker.close()
    assert sorted(store.calls) == ["read", "written"]
