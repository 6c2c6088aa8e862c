"""The gated delta net's kernels and its plain torch form against the recurrence in fp64, token by token."""

import math
from typing import Any

import pytest
import torch
from dense_model import state_rows
from interpreter import INTERPRETED, needs_triton, on_device
from tiers import RUNS_ALL

from nanovllm.kernels.state_tensors import DeltaWeights, LayerStates, StateRows, StateSave
from nanovllm.layers import delta_net as layer

pytestmark = needs_triton
NUM_SLOTS, MAX_GUESSES, WIDTH = 7, 4, 3
SIZES = [(1, 2, 16, 16), (2, 6, 32, 16)]
if not INTERPRETED:
    SIZES = [(1, 2, 16, 16), (2, 6, 64, 128), (4, 8, 128, 128), (16, 32, 128, 128)]  # the last: Qwen3.5-9B
# Allowed beside twice the error of plain torch, relative to the numbers
ROUNDING = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 2e-3}
# Key heads, value heads, key and value head dim. The interpreter cannot multiply matrices in bf16
CASES = [(sizes, dtype) for sizes in SIZES for dtype in (torch.float32, torch.bfloat16)]
if INTERPRETED:
    CASES = [(SIZES[0], torch.float32), (SIZES[1], torch.float32), (SIZES[1], torch.float16)]
in_cases = pytest.mark.parametrize(("sizes", "dtype"), CASES, ids=str)


class Case:
    """Random inputs, weights and states of a layer."""

    def __init__(self, sizes: tuple[int, ...], rows: StateRows, dtype: torch.dtype, device: str) -> None:
        key_heads, heads, key_dim, value_dim = self.sizes = sizes
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)

        channels = 2 * key_heads * key_dim + heads * value_dim
        num_tokens = int(rows.cu_seqlens[-1])
        self.rows = rows
        # As a layer gives them: views of one product, with an odd offset for the gates
        self.qkv, self.z = randn(num_tokens, channels + heads * value_dim).split((channels, heads * value_dim), dim=1)
        self.ba = randn(num_tokens, 2 * heads, scale=2.0)
        self.weights = DeltaWeights(
            randn(WIDTH + 1, channels, scale=0.5),
            randn(heads, dtype=torch.float32) - 1,
            randn(heads, dtype=torch.float32),
            randn(value_dim, scale=0.2) + 1,
            1e-6,
            key_heads,
            key_dim,
        )
        # Slots of all layers are together, so that slots are apart
        self.conv = randn(NUM_SLOTS, 2, WIDTH, channels)
        self.matrix = randn(NUM_SLOTS, 2, heads, key_dim, value_dim, scale=0.3, dtype=torch.float32)
        self.pending = randn(NUM_SLOTS, 2, MAX_GUESSES, channels + 2 * heads)

    def states(self) -> LayerStates:
        """New copies."""
        conv, matrix, pending = (each.clone()[:, 1] for each in (self.conv, self.matrix, self.pending))
        return LayerStates(conv, matrix, pending, self.rows)

    def run(self, function: Any, states: LayerStates) -> torch.Tensor:
        out: torch.Tensor = function(self.qkv, self.z, self.ba, states, self.weights)
        return out

    def expected(self) -> tuple[torch.Tensor, LayerStates]:
        """Outputs [T, H * V] and states after the step in fp64, one token after the other."""
        key_heads, heads, key_dim, value_dim = self.sizes
        weights, host, old, new = self.weights, self.rows.host, self.states(), self.states()
        assert host is not None
        wide = [each.double() for each in new[:3]]
        inputs, outs, end = torch.cat((self.qkv, self.ba), 1), [], 0
        for row, num_new in enumerate(host.num_tokens):
            start, end = end, end + num_new
            source, target, num_replayed = host.source_slots[row], host.target_slots[row], host.num_replayed[row]
            num_guesses, slot = host.num_guesses[row], max(source, 0)
            tokens = torch.cat((old.pending_NGI[slot, :num_replayed], inputs[start:end])).double()
            window, matrix = old.conv_NWC[slot].double(), old.matrix_NHKV[slot].double()
            if source < 0:
                window, matrix = window * 0, matrix * 0
            keep = {num_replayed + save.num_tokens: [save.slot] for save in host.saves if save.row == row}
            keep.setdefault(len(tokens) - num_guesses, []).append(target)
            for i in range(len(tokens) + 1):
                for kept in keep.get(i, []):
                    wide[0][kept], wide[1][kept] = window, matrix
                if i == len(tokens):
                    break
                qkv, b, a = tokens[i].split((self.qkv.shape[1], heads, heads))
                seen = torch.cat((window, qkv[None]))
                window = seen[1:]
                mixed = torch.nn.functional.silu((seen * weights.conv_XC.double()).sum(0))
                q, k, v = mixed.split((key_heads * key_dim, key_heads * key_dim, heads * value_dim))
                q, k = (x.view(key_heads, -1).repeat_interleave(heads // key_heads, 0) for x in (q, k))
                q, k = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
                g = -weights.decay_log_H.double().exp() * torch.nn.functional.softplus(a + weights.dt_bias_H.double())
                matrix = matrix * g.exp()[:, None, None]
                error = v.view(heads, -1) - torch.einsum("hkv,hk->hv", matrix, k)
                matrix = matrix + k[:, :, None] * (b.sigmoid()[:, None] * error)[:, None, :]
                if i >= num_replayed:
                    out = torch.einsum("hkv,hk->hv", matrix, q) * key_dim**-0.5
                    z = self.z[start + i - num_replayed].double()
                    normed = out / (out.square().mean(1, keepdim=True) + 1e-6).sqrt() * weights.norm_V.double()
                    outs.append(normed.flatten() * torch.nn.functional.silu(z))
            wide[2][target, :num_guesses] = inputs[end - num_guesses : end].double()
        out = torch.stack(outs) if outs else self.z.double()
        return out, LayerStates(*wide, self.rows)


def check(case: Case, function: Any, slots: tuple[int, ...]) -> None:
    """Compare outputs and states in `slots` with fp64; all other slots but 0 are as they were."""
    states, before = case.states(), case.states()
    out = case.run(function, states)
    expected, kept = case.expected()
    dtype = case.qkv.dtype
    reference = case.states()
    plain = case.run(layer.delta_net, reference)
    for got, exact, torch_has in (
        (out, expected, plain),
        *((states[i][slot], kept[i][slot], reference[i][slot]) for i in (0, 1) for slot in slots),
    ):
        assert got.isfinite().all()
        if got.numel():
            error, theirs = ((each.double() - exact).square().mean().sqrt() for each in (got, torch_has))
            scale = exact.square().mean().sqrt()
            assert error <= 2 * theirs + ROUNDING[dtype] * scale, (error, theirs, scale)
    for slot in range(1, NUM_SLOTS):
        if slot not in slots:
            assert all(torch.equal(now[slot], old[slot]) for now, old in zip(states[:3], before[:3], strict=True)), slot
    for i in slots:
        assert torch.equal(states.pending_NGI[i], kept.pending_NGI[i].to(dtype))


@on_device
@in_cases
def test_few_tokens_with_replays_and_guesses(device: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """A state is replaced where it is or goes to another slot. A row without tokens only moves or replays it."""
    from nanovllm.kernels.delta_net import delta_net

    numbers = ([1, 3, 0, 5, 1, 0], [1, -1, 2, 3, 4, -1], [1, 2 + 3, 2, 3, 6, 0], [0, 0, 0, 4, 2, 0], [0, 2, 0, 4, 0, 0])
    rows = state_rows(*numbers, device=device)
    case = Case(sizes, rows, dtype, device)
    check(case, delta_net, (1, 2, 3, 5, 6))
    captured = case.states()._replace(rows=rows._replace(host=None))
    eager = case.states()
    assert torch.equal(case.run(delta_net, captured), case.run(delta_net, eager))
    assert torch.equal(captured.matrix_NHKV[1:], eager.matrix_NHKV[1:])


@on_device
@in_cases
def test_chunks_of_several_lengths_with_saves(device: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Tiles of 64 or 32 tokens: shorter, exactly as long, one more; cut by saves; after replays; with guesses."""
    from nanovllm.kernels.delta_net import delta_net

    saves = [StateSave(0, 1, 4), StateSave(0, 64, 5)]
    two_steps = (
        ([129, 1, 64], [-1, 2, 3], [1, 2, 3], [0, 3, 2], [0, 0, 0]),
        ([70, 33, 2], [1, -1, 3], [1, 2, 6], [1, 0, 4], [0, 4, 1]),
    )
    one_step = ([65, 1, 64], [-1, 2, 3], [1, 2, 6], [0, 3, 2], [0, 0, 4])
    for numbers in two_steps if RUNS_ALL else [one_step]:
        rows = state_rows(*numbers, saves=saves, device=device)
        check(Case(sizes, rows, dtype, device), delta_net, (*numbers[2], 4, 5))


@pytest.mark.slow
@on_device
def test_similar_keys_are_solved_exactly(device: str) -> None:
    """Tokens that all write to the same place: the triangular matrix is as far from 1 as it can be."""
    from nanovllm.kernels.delta_net import delta_net

    rows = state_rows([64], [-1], [1], [0], [0], [StateSave(0, 32, 2)], device=device)
    case = Case((1, 1, 16, 16), rows, torch.float32, device)
    case.qkv[:] = case.qkv[:1] + 0.01 * case.qkv
    case.ba[:, 0], case.ba[:, 1] = 6.0, -8.0  # beta near 1, no decay
    check(case, delta_net, (1, 2))


@on_device
def test_gate_of_attention(device: str) -> None:
    from nanovllm.kernels.fused import sigmoid_and_mul

    for dtype, size in ((torch.float32, 80), (torch.bfloat16, 1500)):
        gates, x = torch.randn(3, 2 * size + 2).to(dtype).to(device)[:, 2 + size :], torch.randn(3, size).to(dtype)
        x = x.to(device)
        expected = x * gates.sigmoid()
        eps = torch.finfo(dtype).eps
        assert (sigmoid_and_mul(gates, x) - expected).abs().max() <= 2 * eps * max(1.0, math.ceil(expected.abs().max()))
