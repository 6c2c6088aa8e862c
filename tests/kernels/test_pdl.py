"""Programmatic dependent launch changes the time of a chain of kernels, never a bit of its results.

Decode layers, from the residual to the next, run with PDL and without, on inputs that change from run to run: a kernel
that read or overwrote something too early would sooner or later see the values of the run before.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.device import kernel_target
from nanovllm.kernels import decode, fused, launch, merge, packed_linear, sampler, small_linear
from nanovllm.kernels.packed_values import Packed
from nanovllm.kernels.sampling_tensors import SamplingTensors

NUM_LAYERS = 6
HIDDEN, INTERMEDIATE, VOCAB = 1024, 3072, 5000
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
NUM_EXPERTS, NUM_CHOSEN, EXPERT_SIZE = 16, 4, 512
PAGE, NUM_PAGES = 256, 12


class Chain:
    """Layers of random weights with static inputs and outputs."""

    def __init__(self, num_seqs: int, num_splits: int) -> None:
        def new(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device="cuda") / shape[-1] ** 0.5).bfloat16()

        generator = torch.Generator("cuda").manual_seed(0)
        self.num_splits = num_splits
        sizes = {
            "qkv": ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN),
            "o": (HIDDEN, NUM_HEADS * HEAD_DIM),
            "gate_up": (2 * INTERMEDIATE, HIDDEN),
            "down": (HIDDEN, INTERMEDIATE),
            "router": (NUM_EXPERTS, HIDDEN),
            "experts_gate_up": (NUM_EXPERTS * 2 * EXPERT_SIZE, HIDDEN),
            "experts_down": (NUM_EXPERTS * HIDDEN, EXPERT_SIZE),
            "bias": (HIDDEN,),
            "norm": (HIDDEN,),
            "head_norm": (HEAD_DIM,),
        }
        self.layers = [{name: new(*size) for name, size in sizes.items()} for _ in range(NUM_LAYERS)]
        for layer in self.layers:
            layer["norm"] *= HIDDEN**0.5  # or what experts compute would be lost beside the biases
        self.head = new(VOCAB, HIDDEN)
        self.x, self.cos_sin = new(num_seqs, HIDDEN), torch.zeros(num_seqs, HEAD_DIM, device="cuda")
        self.caches = torch.zeros(NUM_LAYERS, 2, NUM_PAGES * num_seqs, PAGE, NUM_KV_HEADS, HEAD_DIM, device="cuda")
        self.caches = self.caches.bfloat16()
        pages = torch.randperm(NUM_PAGES * num_seqs, generator=generator, device="cuda")
        self.tables = pages.int().view(num_seqs, NUM_PAGES)
        self.context_lens = torch.zeros(num_seqs, dtype=torch.int32, device="cuda")
        self.slot_mapping = torch.zeros(num_seqs, dtype=torch.int64, device="cuda")
        row = torch.arange(num_seqs, device="cuda")
        self.sampling = SamplingTensors(  # greedy and unfiltered rows among them
            temperature=row / num_seqs,
            top_k=row % 3 * 10,
            top_p=1 - row % 2 / 5,
            min_p=row % 5 / 100,
            seed=self.slot_mapping,
            position=self.slot_mapping,
        )
        self.tokens = torch.zeros(num_seqs, dtype=torch.int64, device="cuda")
        self.hidden = torch.zeros(num_seqs, HIDDEN, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()  # weights are at rest, as PDL asks

    def set_inputs(self, run: int) -> None:
        """Enqueue the inputs of a run, copies and kernels."""
        num_seqs = len(self.x)
        generator = torch.Generator("cuda").manual_seed(run)
        self.context_lens.copy_(torch.randint(1, 1 + NUM_PAGES * PAGE, (num_seqs,), generator=generator, device="cuda"))
        last = self.context_lens.long() - 1
        page = self.tables.gather(1, (last // PAGE)[:, None])[:, 0].long()
        self.slot_mapping.copy_(page * PAGE + last % PAGE)
        self.slot_mapping[run % num_seqs :].sub_(1 << 40 if run % 5 == 0 else 0)  # stores nothing, in some runs
        angles = torch.rand(num_seqs, HEAD_DIM // 2, generator=generator, device="cuda") * 6
        self.cos_sin.copy_(torch.cat((angles.cos(), angles.sin()), -1))
        self.x.normal_(generator=generator)

    def run(self) -> None:
        """As the models do, and a merge with a second part as in streamed attention; no kernels but ours."""
        x, residual = self.x, self.x
        for layer, (k_cache, v_cache) in zip(self.layers, self.caches, strict=True):
            x, residual = fused.add_rms_norm(x, residual, layer["norm"], 1e-6)
            heads = small_linear.small_linear(x, layer["qkv"], None).view(len(x), -1, HEAD_DIM)
            q, k, v = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], 1)
            norms = layer["head_norm"], layer["head_norm"], 1e-6
            q = fused.norm_rotate_store(q, k, v, *norms, self.cos_sin, k_cache, v_cache, self.slot_mapping)
            paged = k_cache, v_cache, self.context_lens, self.tables
            out, lse = decode.paged_decode(q, *paged, HEAD_DIM**-0.5, self.num_splits)
            parts = (out, lse), decode.paged_decode(q, *paged, 0.2, 1)
            merge.merge_into(out, lse, parts)
            x = small_linear.small_linear(out.flatten(1), layer["o"], layer["bias"])
            x = fused.rms_norm(x, layer["norm"], 1e-6)
            x = small_linear.small_linear(small_linear.small_gate_up(x, layer["gate_up"], None), layer["down"], None)
            x = fused.rms_norm(x, layer["norm"], 1e-6)
            experts, weights = fused.choose_experts(
                small_linear.small_linear(x, layer["router"], None, dtype=torch.float32), NUM_CHOSEN, True
            )
            chosen = Packed(layer["experts_gate_up"]), Packed(layer["experts_down"])
            hidden = packed_linear.products(x, chosen[0], gated=True, experts=experts, num_experts=NUM_EXPERTS)
            x = packed_linear.sum_of_experts(hidden, chosen[1], experts, NUM_EXPERTS, weights)
            x = fused.rms_norm(x, layer["norm"], 1e-6)
            both = small_linear.small_linear(x, layer["gate_up"], None)
            x = small_linear.small_linear(fused.act_and_mul(both), layer["down"], layer["bias"])
        x, residual = fused.add_rms_norm(x, residual, self.layers[0]["norm"], 1e-6)
        logits = small_linear.small_linear(x, self.head, None)
        tokens = sampler.sample_tokens(logits, self.sampling)
        self.tokens.copy_(tokens)
        self.hidden.copy_(residual)


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], contextlib.AbstractContextManager[None]]:
    """A context in which PDL is on or off."""

    @contextlib.contextmanager
    def use(is_on: bool) -> Iterator[None]:
        with monkeypatch.context() as patch:
            if not is_on:
                patch.setattr(launch, "is_supported", lambda _: False)
            yield

    return use


def capture(chain: Chain) -> torch.cuda.CUDAGraph:
    chain.set_inputs(0)
    chain.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    return graph


def assert_same(chains: tuple[Chain, Chain]) -> None:
    with_pdl, without = chains
    assert torch.equal(with_pdl.tokens, without.tokens)
    assert torch.equal(with_pdl.hidden, without.hidden) and without.hidden.isfinite().all()
    assert torch.equal(with_pdl.caches, without.caches)


def test_pdl_is_off_on_cpu() -> None:
    assert launch.pdl_options(torch.device("cpu")) == {"PDL": False}


@pytest.mark.gpu
def test_pdl_is_on_from_hopper_on() -> None:
    is_on = kernel_target.target_of(torch.device("cuda")).capability >= (9, 0)
    assert launch.pdl_options(torch.device("cuda")) == ({"PDL": True, "launch_pdl": True} if is_on else {"PDL": False})


@pytest.mark.gpu
@pytest.mark.parametrize(("num_seqs", "num_splits"), [(1, 33), (4, 7), (1, 1)])
def test_graph_with_pdl_equals_graph_without(switch, num_seqs: int, num_splits: int) -> None:
    """200 replays, the inputs changed before each; the caches carry what every one of them stored."""
    chains = Chain(num_seqs, num_splits), Chain(num_seqs, num_splits)
    graphs = []
    for chain, is_on in zip(chains, (True, False), strict=True):
        with switch(is_on):
            graphs.append(capture(chain))
        chain.caches.zero_()
    tokens = []
    for run in range(200):
        for chain, graph in zip(chains, graphs, strict=True):
            chain.set_inputs(run)
            graph.replay()
        tokens.append(chains[0].tokens.clone())
        assert torch.equal(chains[0].hidden, chains[1].hidden), f"replay {run}"
    assert_same(chains)
    assert torch.stack(tokens).unique().numel() > 20, "the inputs make no difference"


@pytest.mark.gpu
def test_replays_without_a_pause_equal_those_without_pdl(switch) -> None:
    """Replays enqueued at once, what each computes copied aside in between: successive graphs stay in order."""
    results = []
    for is_on in (True, False):
        with switch(is_on):
            chain = Chain(2, 9)
            graph = capture(chain)
        chain.caches.zero_()
        seen = torch.zeros(100, 2, HIDDEN, dtype=torch.bfloat16, device="cuda")
        chain.set_inputs(1)
        for run in range(len(seen)):
            graph.replay()
            seen[run].copy_(chain.hidden)
            chain.x.copy_(chain.hidden)  # what the next replay starts from
            chain.x.mul_(0.1)
            graph.replay()
        results.append(seen)
    assert torch.equal(*results) and results[0].isfinite().all()


@pytest.mark.gpu
def test_edges_across_streams_hold_with_pdl(switch) -> None:
    """Inputs written late on another stream, and overwritten there as soon as the chain's event allows."""
    chains = Chain(2, 9), Chain(2, 9)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for chain, is_on in zip(chains, (True, False), strict=True):
        with switch(is_on):
            chain.set_inputs(0)
            chain.run()
            chain.caches.zero_()
            side.wait_stream(main)
            for run in range(1, 30):
                with torch.cuda.stream(side):
                    torch.cuda._sleep(2_000_000)  # about 1 ms
                    chain.set_inputs(run)
                main.wait_stream(side)  # edge: inputs written -> read
                chain.run()
                side.wait_stream(main)  # edge: inputs read -> overwritten
                with torch.cuda.stream(side):
                    for inputs in (chain.x, chain.cos_sin, chain.context_lens, chain.slot_mapping):
                        inputs.zero_()
            torch.cuda.synchronize()
    assert_same(chains)
