"""DiskTier over the content model: whatever the disk does, each sequence sees its own tokens, and nothing is lost."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from content_model import ContentError, ContentRunner, Simulation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_drafters import KINDS
from random_workloads import GRAIN, dense_manager, dense_operations, dense_schedule, odd_drafter, play
from simulated_disk import SimulatedDisk
from tiers import examples

from nanovllm.kvcache.policy.block_manager import BlockManager, KVCacheManager
from nanovllm.kvcache.transfer.disk_worker import _folded, weights_identity

QUICK = [HealthCheck.too_slow, HealthCheck.large_base_example]


def make_disk(
    rng: random.Random,
    extents: dict[bytes, np.ndarray],
    kv: KVCacheManager,
    runner: ContentRunner,
    checks_versions: bool = True,
) -> SimulatedDisk:
    is_hybrid = not isinstance(kv, BlockManager)
    grain = GRAIN if is_hybrid else rng.choice([size for size in (1, 2, 4) if kv.block_size % size == 0])
    return SimulatedDisk(kv, runner.cpu if is_hybrid else runner.gpu, grain, rng, extents, checks_versions)


def play_on_disk(seed: int, hybrid: bool, drafter: str = "", checks_versions: bool = True) -> int:
    """Several engines, one after the other, on one disk. Returns how many extents were loaded."""
    rng = random.Random(seed)
    extents: dict[bytes, np.ndarray] = {}
    num_loaded, block_size = 0, rng.randint(1, 6)
    for _ in range(3):
        kv = BlockManager(rng.randint(8, 40), block_size) if not hybrid else dense_manager(rng, hybrid=True)
        kv.pool.enable_prefix_caching = True
        simulation = Simulation(
            kv,
            **dense_schedule(rng),
            make_disk=partial(make_disk, rng, extents, checks_versions=checks_versions),
            make_drafter=odd_drafter(drafter, seed) if drafter else None,
        )
        assert simulation.disk is not None
        try:
            play(simulation, dense_operations(rng))
            for extent in simulation.disk.tier.last_moves().stores:
                extents[extent.key] = simulation.disk._cells(extent).copy()
        finally:
            simulation.disk.board.close()
        num_loaded += simulation.disk.num_loaded
    return num_loaded


@settings(max_examples=examples(300), deadline=None, suppress_health_check=QUICK)
@given(seed=st.integers(0, 2**32), hybrid=st.booleans(), drafter=st.sampled_from(["", "", *KINDS]))
def test_disk_changes_no_token_and_loses_nothing(seed: int, hybrid: bool, drafter: str) -> None:
    play_on_disk(seed, hybrid, drafter)


@pytest.mark.parametrize("hybrid", [False, True])
def test_workloads_load_from_disk(hybrid: bool) -> None:
    """Else the test above would prove nothing."""
    assert sum(play_on_disk(seed, hybrid) > 0 for seed in range(20)) >= 10


@pytest.mark.parametrize("hybrid", [False, True])
def test_store_of_a_block_that_was_given_away_is_noticed(hybrid: bool) -> None:
    """Without the versions of blocks, extents hold the tokens of other sequences, and the model sees it."""
    with pytest.raises(ContentError):
        for seed in range(200):
            play_on_disk(seed, hybrid, checks_versions=False)


def test_identity_of_weights_tells_every_change() -> None:
    """Both the checksum of what is in CPU memory and the sums that a GPU computes."""
    torch.manual_seed(0)
    for size in (0, 1, 3, 4, 5, 1000):
        data = torch.randint(256, (size,), dtype=torch.uint8)
        before = _folded(data)
        assert torch.equal(before, _folded(data.clone()))
        for i in range(size):
            data[i] ^= 1
            assert not torch.equal(before, _folded(data)), f"byte {i} of {size}"
            data[i] ^= 1
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    before_all = weights_identity(model)
    for change in (lambda: model[1].bias[-1].add_(1), lambda: model[0].weight.t_()):
        with torch.no_grad():
            change()
        assert weights_identity(model) != before_all
