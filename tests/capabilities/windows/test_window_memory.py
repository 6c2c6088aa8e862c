"""Rings of keys on a CPU: every query attends to its window, for any chunks, rejected draft tokens, saves and loads.

The expected attention is computed from all keys that a sequence ever had.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.capabilities.recurrent.places import SnapshotSave, StateFlush, StateFlushes, StateStep
from nanovllm.capabilities.windows.memory import WindowMemory
from nanovllm.plan.kv_spec import WindowSpec
from nanovllm.plan.step_plan import KVMoves, SequenceStep, StepPlan
from nanovllm.runner.seams import CompanionColumns

NUM_SLOTS, NUM_SNAPSHOTS, NUM_LAYERS, NUM_HEADS = 4, 3, 2, 4
CPU = torch.device("cpu")
# Windows of one token, of a page, and around; and pages that are larger than the window
SIZES = [(1, 4, 0), (4, 4, 2), (5, 4, 3), (7, 2, 1), (13, 4, 0), (3, 16, 5), (40, 8, 4)]


def make_memory(window: int, page_tokens: int, max_guesses: int) -> WindowMemory:
    spec = WindowSpec(
        num_layers=NUM_LAYERS,
        window=window,
        num_kv_heads=2,
        head_dim=8,
        scale=0.3,
        itemsize=4,
        page_tokens=page_tokens,
        max_guesses=max_guesses,
    )
    return WindowMemory(spec, TorchBackend(), torch.float32, CPU, NUM_SLOTS, NUM_SNAPSHOTS)


@dataclass
class Known:
    """A sequence, and K and V of its tokens in all layers, [layers, 2, tokens, kv heads, head dim]."""

    slot: int
    kv: torch.Tensor = field(default_factory=lambda: torch.zeros(NUM_LAYERS, 2, 0, 2, 8))

    @property
    def num_tokens(self) -> int:
        return self.kv.shape[2]


def step_of(seq: Known, num_tokens: int, load: int, saves: tuple[SnapshotSave, ...]) -> SequenceStep:
    state = StateStep(seq.slot if seq.num_tokens else -1, seq.slot, load=load, saves=saves)
    ids = np.zeros(num_tokens, np.int64)
    return SequenceStep(0, ids, seq.num_tokens, seq.num_tokens, (), 0, None, payloads=(state,))


def expected(q: torch.Tensor, kv: torch.Tensor, window: int, scale: float, sinks: torch.Tensor) -> torch.Tensor:
    """Attend with the last tokens to their windows, with sinks. q [T, H, D], kv [2, tokens, K, D]."""
    k, v = (each.repeat_interleave(NUM_HEADS // 2, dim=1) for each in kv)
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    with_sinks = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hts,shd->thd", with_sinks.softmax(-1)[..., :-1], v)


def run(
    memory: WindowMemory,
    rows: list[tuple[Known, int, int, tuple[SnapshotSave, ...]]],
    flushes: tuple[StateFlush, ...] = (),
) -> None:
    """Run a step of sequences, each with new tokens, a snapshot to load or -1, and saves; and check its attention."""
    steps = tuple(step_of(*row) for row in rows)
    plan = StepPlan(steps, KVMoves(payloads=(StateFlushes(flushes),) if flushes else ()))
    memory.begin_step(plan, (torch.zeros(0), torch.zeros(0)))
    lens = [num_tokens for _, num_tokens, _, _ in rows]
    columns = tuple(map(torch.as_tensor, memory.columns(plan)))
    cu_seqlens = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    layer_memory = memory.layer_memory(CompanionColumns(columns, cu_seqlens, max(lens), plan))
    new = [torch.randn(NUM_LAYERS, 2, num_tokens, 2, 8) for num_tokens in lens]
    for (seq, *_), kv in zip(rows, new, strict=True):
        seq.kv = torch.cat((seq.kv, kv), dim=2)
    for layer in range(NUM_LAYERS):
        q, sinks = torch.randn(sum(lens), NUM_HEADS, 8), torch.randn(NUM_HEADS)
        keys = layer_memory(layer)
        k_cells, v_cells, slot_mapping = keys.cells
        packed = torch.cat([kv[layer] for kv in new], dim=1)
        for cells, values in ((k_cells, packed[0]), (v_cells, packed[1])):
            cells.flatten(0, 1)[slot_mapping] = values
        out = keys.attend(q, sinks)
        for (seq, *_), queries, got in zip(rows, q.split(lens), out.split(lens), strict=True):
            wanted = expected(queries, seq.kv[layer], memory.spec.window, memory.spec.scale, sinks)
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)
    memory.end_step()


@pytest.mark.parametrize(("window", "page_tokens", "max_guesses"), SIZES)
def test_queries_attend_to_their_windows_in_random_steps(window: int, page_tokens: int, max_guesses: int) -> None:
    """Sequences run one token, a few, or long chunks in one step, and draft tokens are rejected after it. Snapshots are
    saved at the end of chunks and within them, and loaded by other sequences. A preempted sequence is flushed.
    """
    rng, memory = random.Random(window), make_memory(window, page_tokens, max_guesses)
    torch.manual_seed(window)
    seqs, saved = [Known(slot) for slot in (0, 1, 3)], dict[int, Known]()  # by snapshot
    for _ in range(25):
        rows = []
        for seq in rng.sample(seqs, rng.randint(1, 3)):
            load, can_save = -1, set(range(NUM_SNAPSHOTS)) - set(saved)
            if seq.num_tokens == 0 and saved and rng.random() < 0.7:
                load = rng.choice(list(saved))
                seq.kv = saved[load].kv
            num_tokens = rng.choice([1, 1, 2, 1 + max_guesses, rng.randint(1, 60), rng.randint(60, 150)])
            saves = []
            while can_save and rng.random() < 0.4:
                at = rng.randint(1, num_tokens)
                saves.append(SnapshotSave(at, seq.slot if at == num_tokens else -1, can_save.pop()))
            rows.append((seq, num_tokens, load, tuple(saves)))
            # Other rows of the step must not load what it saves
            for save in saves:
                saved[save.snapshot] = Known(0)
        run(memory, rows)
        for seq, num_tokens, _, saves in rows:
            start = seq.num_tokens - num_tokens
            for save in saves:
                saved[save.snapshot] = Known(0, seq.kv[:, :, : start + save.num_tokens])
            if num_tokens <= 1 + max_guesses:  # it may have ended with draft tokens
                seq.kv = seq.kv[:, :, : start + rng.randint(1, num_tokens)]
        for seq in seqs:
            if rng.random() < 0.1:
                seq.kv = seq.kv[:, :, :0]
        if saved and rng.random() < 0.3:
            saved.pop(rng.choice(list(saved)))


def test_a_flushed_sequence_goes_on_in_another_slot() -> None:
    memory, seq, other = make_memory(9, 4, 2), Known(1), Known(1)
    run(memory, [(seq, 33, -1, ())])
    run(memory, [(other, 40, -1, ())], flushes=(StateFlush(1, 0),))  # takes the slot in the step that flushes it
    seq.slot = 2
    run(memory, [(other, 1, -1, ()), (seq, 3, 0, ())])


def test_long_chunks_that_do_not_fit_the_workspace_together_attend_in_turn() -> None:
    memory = make_memory(200, 4, 0)
    seqs = [Known(slot) for slot in (0, 1, 2, 3)]
    for seq in seqs:
        run(memory, [(seq, 300, -1, ())])
    run(memory, [(seq, 20 + i, -1, ()) for i, seq in enumerate(seqs)])
    run(memory, [(seq, 1, -1, ()) for seq in seqs])


def test_the_ring_is_as_large_as_needed_and_no_larger() -> None:
    for window, page_tokens, max_guesses in [(128, 128, 7), (1024, 128, 7), (512, 128, 15), (1, 16, 0), (113, 16, 15)]:
        spec = make_memory(window, page_tokens, max_guesses).spec
        assert spec.max_short_tokens >= max(1 + max_guesses, 16)
        assert spec.ring_tokens - page_tokens < window - 1 + max(1 + max_guesses, 16)
        assert spec.state_bytes == NUM_LAYERS * spec.ring_tokens * 2 * 2 * 8 * 4
