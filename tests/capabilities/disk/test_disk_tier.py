"""DiskTier over the content model: each sequence sees its own tokens, and nothing is lost, with any disk."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from content_model import ContentError, ContentRunner, Simulation
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_kv
from odd_drafters import KINDS
from random_workloads import GRAIN, dense_manager, dense_operations, dense_schedule, dense_states, odd_drafter, play
from simulated_disk import SimulatedDisk
from tiers import examples

from nanovllm.capabilities.disk.disk_moves import PAUSE_S, DiskRates, least_load_tokens
from nanovllm.capabilities.disk.tier import STALL_S, DiskBoard, DiskTier
from nanovllm.capabilities.disk.worker import _folded, weights_identity
from nanovllm.capabilities.recurrent.places import RecurrentStates, Snapshots
from nanovllm.kvcache.block_manager import BlockManager, KVCacheManager
from nanovllm.plan.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams


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
        states = [dense_states(rng, schedule["max_num_seqs"], min_snapshots=2)] if has_states else []
        if hybrid:
            kv: KVCacheManager = dense_manager(rng, hybrid=True, companions=states)
        else:
            kv = BlockManager(rng.randint(8, 40), block_size, companions=states)
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
        finally:
            simulation.disk.board.close()
        num_loaded += simulation.disk.num_loaded
        num_states += simulation.disk.num_loaded_states
    return num_loaded, num_states


@settings(max_examples=examples(150))
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
    """Otherwise the test above would prove nothing."""
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
    """Without the versions of snapshots, states of other sequences are stored, and the model sees it."""
    take = Snapshots._take

    def take_unnoticed(snapshots: Snapshots) -> int:
        versions = snapshots.versions.copy()
        snapshot = take(snapshots)
        snapshots.versions[:] = versions
        return snapshot

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


class Everything:
    """A disk that has all extents."""

    def __contains__(self, key: object) -> bool:
        return True


class TwoRanks:
    """A tier over 40 blocks of two tokens, an extent each, whose ranks do as they are told; `now_s` is its clock."""

    def __init__(self, num_snapshots: int = 0, least_load_tokens: int = 0) -> None:
        self.now_s = 0.0
        self.board = DiskBoard(2, 40 + num_snapshots)
        self.kv = BlockManager(40, 2, companions=[RecurrentStates(4, num_snapshots)] if num_snapshots else [])
        self.tier = DiskTier(
            Everything(), self.kv, self.board, least_load_tokens=least_load_tokens, grain=2, clock=lambda: self.now_s
        )
        self.num_sequences = 0

    def sequence(self, num_tokens: int = 21) -> Sequence:
        self.num_sequences += 1
        return Sequence(self.num_sequences, [self.num_sequences] * num_tokens, SamplingParams(max_tokens=1), seed=0)

    def begin_load(self, seq: Sequence) -> list[bool]:
        """Returns for each extent of the load if it is a state."""
        assert self.tier.wait_for_load(seq)
        moves = self.tier.next_moves()
        assert moves is not None
        return [extent.is_state for extent in moves.loads]

    def end_load(self, number: int, num_loaded: int, missing: int = -1) -> None:
        """`missing`: an extent that the second rank lacks."""
        self.board.missing[:] = -1, missing
        self.board.num_loaded[:] = num_loaded
        self.board.ended_load[:] = number


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., TwoRanks]]:
    made: list[TwoRanks] = []

    def make(*args: int, **options: int) -> TwoRanks:
        made.append(TwoRanks(*args, **options))
        return made[-1]

    yield make
    for ranks in made:
        check_kv(ranks.kv, ranks.tier.holders)
        ranks.board.close()


@pytest.fixture
def ranks(make_ranks: Callable[..., TwoRanks]) -> TwoRanks:
    return make_ranks()


def test_stores_are_pending_until_the_slowest_rank_has_made_them(ranks: TwoRanks) -> None:
    seq = ranks.sequence()
    ranks.kv.admit(seq)
    ranks.kv.place(seq, 21)
    seq.num_computed_tokens = 21
    seq.status = SequenceStatus.RUNNING
    ranks.tier.store(seq)
    moves = ranks.tier.next_moves()
    assert moves is not None and len(moves.stores) == 10
    pending = [ranks.tier.num_pending]
    for num_stored in ((10, 0), (10, 9), (10, 10)):
        ranks.board.num_stored[:] = num_stored
        pending.append(ranks.tier.num_pending)
    assert pending == [10, 10, 1, 0]
    ranks.kv.free(seq)


def test_start_up_finds_the_length_from_which_loading_pays() -> None:
    """A prompt of 1,000 tokens takes 1 s, and of n tokens (n / 1000)^2 s; a token has 1 MB of K and V."""
    for byte_per_s, state_bytes, expected in (
        (0, 0, 0),  # nothing could be read
        (2e9, 0, 512),  # a token takes 0.5 ms: loading pays above 500 tokens
        (1e9, 0, 1024),
        (1e9, 10**9, 1792),  # n / 1000 + 1 s: above 1,618 tokens
        (1e8, 0, 8193),  # above 10,000 tokens, which no prompt has
    ):
        rates = DiskRates(1000, 1.0, byte_per_s)
        assert least_load_tokens(rates, lambda num_tokens: 7.0 * num_tokens**2, 10**6, state_bytes, 8192) == expected


def test_prompt_waits_for_the_disk_if_enough_of_it_is_there(make_ranks: Callable[..., TwoRanks]) -> None:
    """The last token of a prompt is computed."""
    for least_tokens, num_tokens, waits in ((0, 2, False), (0, 3, True), (20, 20, False), (20, 21, True)):
        ranks = make_ranks(least_load_tokens=least_tokens)
        assert ranks.tier.wait_for_load(ranks.sequence(num_tokens)) == waits, (least_tokens, num_tokens)


def test_load_that_makes_no_progress_is_cancelled_and_nothing_is_loaded_for_a_while(ranks: TwoRanks) -> None:
    first, second = ranks.sequence(), ranks.sequence(5)
    assert ranks.begin_load(first) == [False] * 10 and ranks.tier.wait_for_load(second)
    for i in range(1, 4):  # an extent arrives now and then
        ranks.now_s += STALL_S - 1
        ranks.board.num_loaded[:] = i, i + 1
        assert ranks.tier.next_moves() is None and ranks.tier.take_ready() == []
    ranks.board.num_loaded[1] = 10
    ranks.now_s += STALL_S + 1
    assert ranks.tier.next_moves() is None and ranks.tier.take_ready() == [first, second], "nor do others wait"
    assert ranks.board.cancelled_load[0] == 1 and ranks.tier.num_cancelled_loads == 1
    assert not ranks.tier.wait_for_load(ranks.sequence())
    assert ranks.kv.pool.num_free == 30, "the blocks of the load are still in use"
    ranks.end_load(1, num_loaded=3)
    ranks.tier.next_moves()
    assert ranks.kv.pool.num_free == 40 and ranks.kv.num_known_tokens(first) == 0
    ranks.now_s += PAUSE_S
    assert ranks.tier.wait_for_load(ranks.sequence())


def test_load_that_lacks_an_extent_is_followed_by_one_that_ends_before_it(ranks: TwoRanks) -> None:
    """Also if only one rank lacks it."""
    seq = ranks.sequence()
    assert ranks.begin_load(seq) == [False] * 10
    ranks.end_load(1, num_loaded=8, missing=6)
    moves = ranks.tier.next_moves()
    assert moves is not None and len(moves.loads) == 6
    assert ranks.tier.take_ready() == [] and ranks.kv.num_known_tokens(seq) == 0
    ranks.end_load(2, num_loaded=6)
    ranks.tier.next_moves()
    assert ranks.tier.take_ready() == [seq] and ranks.kv.num_known_tokens(seq) == 12
    assert ranks.tier.stats()["num_disk_hit_tokens"] == 12


@pytest.mark.parametrize(("missing", "loads"), [(10, [False] * 9 + [True]), (6, [False] * 6 + [True])])
def test_load_that_lacks_a_state_or_an_extent_is_followed_by_one_to_an_earlier_state(
    make_ranks: Callable[..., TwoRanks], missing: int, loads: list[bool]
) -> None:
    ranks = make_ranks(num_snapshots=3)
    seq = ranks.sequence()
    assert ranks.begin_load(seq) == [False] * 10 + [True]
    ranks.end_load(1, num_loaded=9, missing=missing)
    moves = ranks.tier.next_moves()
    assert moves is not None and [extent.is_state for extent in moves.loads] == loads
    check_kv(ranks.kv, ranks.tier.holders)
    ranks.end_load(2, num_loaded=len(loads))
    ranks.tier.next_moves()
    assert ranks.tier.take_ready() == [seq] and ranks.kv.num_known_tokens(seq) == 2 * sum(not each for each in loads)
    assert ranks.tier.stats()["num_disk_hit_states"] == 1


def test_prompt_that_lacks_blocks_is_not_overtaken_by_younger_ones(ranks: TwoRanks) -> None:
    old, seq, young = ranks.sequence(60), ranks.sequence(), ranks.sequence(5)
    ranks.kv.admit(old)
    assert ranks.tier.wait_for_load(seq)
    assert ranks.tier.next_moves() is None and not ranks.tier.holders
    assert ranks.tier.may_overtake(old) and not ranks.tier.may_overtake(young)
    ranks.kv.free(old)
    assert ranks.tier.next_moves() is not None
    assert ranks.tier.may_overtake(young), "the blocks that it was to leave are taken"
