"""Start-up of the cache on disk. Each public function of this module runs on every rank (Runner.apply)."""

import time
import weakref
from pathlib import Path

import torch

from nanovllm.capabilities.disk.disk_moves import DISK_GRAIN_TOKENS, DiskRates, DiskSetup
from nanovllm.capabilities.disk.store import DiskStore
from nanovllm.capabilities.disk.tier import DiskBoard
from nanovllm.capabilities.disk.worker import DiskWorker, KVPool, weights_identity
from nanovllm.runner.measure import prompt_step
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.seams import RankStore
from nanovllm.utils import __version__

TIMED_PROMPT_TOKENS = 4096  # length of the prompt that is timed to compare computing with reading from disk


class UnopenedStore(RankStore):
    """The rank's store until the cache is opened. Holds the hash of the rank's weights.

    Hashing the weights takes GPU memory, so it must be done before the KV cache takes all free memory.
    """

    def __init__(self, weights: str) -> None:
        self.weights = weights


def identify_weights(runner: ModelRunner) -> None:
    """Hash the rank's weights. Called before the KV cache is allocated."""
    runner.store = UnopenedStore(weights_identity(runner.model))


def open_disk(setup: DiskSetup, runner: ModelRunner) -> DiskStore:
    """Open the cache for the extents of this rank's weights and layout.

    Returns the store, which contains the keys of the extents that this rank has found. Raises ConfigError if the cache
    cannot be opened.
    """
    spec, memory, tp = runner.spec, runner.memory, runner.tp
    assert isinstance(runner.store, UnopenedStore), "identify_weights comes first"
    with runner.phases("KV on disk"):
        identity = {
            "version": __version__,
            "config": repr(runner.model_config),
            "weights": runner.store.weights,
            "dtype": str(runner.dtype),
            "rank": f"{tp.rank} of {tp.size}",
            "layout": [2, spec.num_layers, DISK_GRAIN_TOKENS, spec.num_kv_heads, spec.head_dim],
            "states": [list(part.shape[1:]) for part in memory.stored_parts],
        }
        pool = KVPool(spec, *memory.whole_cache, memory.streams, snapshots=memory.stored_parts, device=memory.device)
        board = DiskBoard(tp.size, setup.num_places, setup.board)
        store = DiskStore(Path(setup.path), setup.limit_bytes, pool.least_bytes, identity, setup.model)
        worker = runner.store = DiskWorker(store, pool, board, tp.rank)
        # The threads refer to the KV cache. Without the finalizer, both would outlive an engine that is dropped
        weakref.finalize(runner, worker.abandon).atexit = False
    return store


def measure_disk(runner: ModelRunner) -> DiskRates:
    """Measure the rates of computing a prompt and of reading extents, each on the slowest rank."""
    assert isinstance(runner.store, DiskWorker), "open_disk comes first"
    num_tokens = min(TIMED_PROMPT_TOKENS, runner.config.max_num_batched_tokens, runner.max_model_len)
    with runner.phases("KV on disk"):
        for _ in range(2):  # the first step may be slow
            start_s = time.perf_counter()
            runner.launch(prompt_step(num_tokens, runner.spec.block_size)).token_ids()
        prompt_s = time.perf_counter() - start_s
        own = torch.tensor([-prompt_s, runner.store.measure()], dtype=torch.float64, device=runner.device)
        prompt_s, byte_per_s = runner.tp.all_gather(own).view(runner.tp.size, 2).amin(0).tolist()
    return DiskRates(num_tokens, -prompt_s, byte_per_s)
