"""CpuExperts: a layer whose experts are in CPU memory. RankExperts: what all such layers of a rank share.

Steps with few rows are computed by the CPU. The GPU hands over the rows and waits for the results
(kernels/expert_exchange.py), without a call of the host, so that such steps are CUDA graphs as usual. Meanwhile the GPU
may read and compute some of the experts itself (link.py), if that is measured to be faster. For steps with many rows
the experts are streamed to the GPU (staging.py). Without a GPU the CPU computes all rows.

Edges between the GPU's stream and the CPU's threads:
  E17  rows in CPU memory -> computed   compute -> cpu  exchange[ARRIVED]
  E18  computed -> received             cpu -> compute  exchange[DONE]
No other edge is needed: compute receives the results of a layer (E18) before it sends the next layer's rows.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from nanovllm.capabilities.cpu_attention.job import CpuKernel, ExpertServer
from nanovllm.capabilities.cpu_attention.kernels import choose_kernel
from nanovllm.capabilities.cpu_attention.threads import attention_cpus
from nanovllm.capabilities.cpu_experts.job import ARRIVED, EXCHANGE_SIZE, ExpertJob
from nanovllm.capabilities.cpu_experts.link import ExpertLink
from nanovllm.capabilities.cpu_experts.staging import ExpertStaging
from nanovllm.capabilities.cpu_experts.store import ExpertLayer, ExpertStore, store_bytes
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.checkpoint.model_layout import Linear, model_layout
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.config import Config
from nanovllm.device.cuda import pinned_view
from nanovllm.device.devices import memory_node
from nanovllm.device.pinned_memory import HostBuffer
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.linear import NamedShard, WeightShard, sum_over_ranks
from nanovllm.layers.moe import ExpertBiases, Experts
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.offload.streams import make_streams
from nanovllm.plan.expert_formats import LINK_SHARES as SHARES
from nanovllm.plan.expert_formats import layer_format
from nanovllm.plan.step_limits import MAX_CPU_EXPERT_ROWS

_NUM_TIMED_CALLS, _NUM_TIMED_JOBS = 5, 40
_FASTEST_LINK = 60e9  # bytes/s
_LEAST_LINK_GAIN = 1.2  # in bytes read by both sides in the same time; kernels of the GPU take some of it

logger = logging.getLogger("nanovllm")


class RankExperts:
    """The experts of a rank in CPU memory, the threads that compute them, and the buffers that they are streamed to."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device,
        with_mtp: bool,
        max_rows: int | None = None,
        link_share: int | None = None,
    ) -> None:
        """Allocate the memory, pinned if the model is on a GPU. with_mtp: also for the draft head. max_rows: tokens of
        a step up to which the CPU computes its experts, or None to measure what is faster. link_share: of a step's
        experts that the GPU reads over the link then, in 256ths, or None to measure what is faster.
        """
        assert config.experts is not None, "only mixtures have experts"
        self.config, self.experts, self.tp, self.dtype, self.device = config, config.experts, tp, dtype, device
        self.is_gpu = device.type == "cuda"
        self._linears = model_layout(config).linears()
        # Of the sparse MLPs, such as model.layers.0.mlp, in the order of the store
        self.names = [
            name.removesuffix(".experts.gate_up")
            for name, linear in self._linears.items()
            if linear.on_cpu and name.endswith(".gate_up") and (with_mtp or not name.startswith("mtp."))
        ]
        sizes = {"hidden_size": config.hidden_size, "size": self.experts.intermediate_size, "num_ranks": tp.size}
        given: dict[str, Any] = sizes | {"has_bias": self.experts.has_bias}
        stored = [layer_format(self.formats(name), str(dtype).removeprefix("torch."), **given) for name in self.names]
        places = [torch.arange(self.experts.num_experts, dtype=torch.int32)] * len(stored)
        self._buffer = HostBuffer(store_bytes(stored, places), device if self.is_gpu else None)
        self.store = ExpertStore(stored, places, self._buffer.tensor)
        self.max_rows = max_rows or MAX_CPU_EXPERT_ROWS
        self._given_rows, self._given_share = max_rows, link_share
        self.cells: torch.Tensor | None = None  # int64 [T], negative for rows of padding; None if there is no padding
        self.kernel: CpuKernel | None = None
        self.link: ExpertLink | None = None
        self._num_computed = 0
        self._server: ExpertServer | None = None

    def formats(self, name: str) -> list[Quantization | None]:
        """Return the checkpoint's formats of gate, up and down of a sparse MLP."""
        parts: list[Linear] = [self._linears[f"{name}.experts.{part}"] for part in ("gate_up", "down")]
        return [each for part in parts for each in part.formats(self.config)]

    def layer(self, name: str) -> "CpuExperts":
        """Return the module with the experts of a sparse MLP."""
        return CpuExperts(self, self.names.index(name), self.formats(name))

    # -- start-up --------------------------------------------------------------------------------------------------

    def start(self, config: Config) -> None:
        """Start the threads and, with a GPU, allocate the buffers there. All ranks call together."""
        num_threads, tp, rarely = config.cpu_attention_threads, self.tp, not config.enable_cpu_offload
        cpus = attention_cpus(num_threads, tp.rank, tp.size, memory_node(self.device), launches_rarely=rarely)
        kernel = self.kernel = choose_kernel(cpus.cpus, is_pinned=cpus.is_pinned, stays_awake=self.is_gpu)
        if tp.rank == 0:
            logger.info("experts on the CPU: %s kernel, %d threads", kernel.name, kernel.num_threads)
        self.job = ExpertJob.of_rows(
            self.store,
            MAX_CPU_EXPERT_ROWS,
            self.experts.num_experts_per_token,
            self.dtype,
            is_pinned=self.is_gpu,
            activation=self.experts.activation,
        )
        if not self.is_gpu:
            return
        from nanovllm.kernels.expert_exchange import ExchangedRows

        job, exchange = self.job, torch.zeros(EXCHANGE_SIZE, dtype=torch.int32).pin_memory()
        self._exchange = exchange
        self._rows = ExchangedRows(
            x=pinned_view(job.x, self.device),
            experts=pinned_view(job.experts, self.device),
            weights=pinned_view(job.weights, self.device),
            out=pinned_view(job.out, self.device),
            exchange=pinned_view(exchange, self.device),
            counts=torch.zeros(2, dtype=torch.int32, device=self.device),
        )
        assert len(self.biases) == len(self.store.layers), "the biases are on the GPU before memory is measured"
        self.staging = ExpertStaging(self.store.layers, self._gpu_experts, make_streams(self.device))
        if self._given_rows is None:
            self.max_rows = self._rows_that_the_cpu_computes_faster()
        share = self._given_share
        if share is None:
            share = 0 if config.enable_cpu_offload else self._share_of_the_link()  # KV needs the link
        if share * self.experts.num_experts_per_token >= SHARES:
            self.link = ExpertLink(self.store.layers, self._gpu_experts, self.staging.streams, share)
            if tp.rank == 0:
                logger.info("experts in steps with few tokens: the GPU reads %d%% of them", 100 * share // SHARES)
        self.staging.num_fetched = 0
        self._server = kernel.serve_experts(job, exchange)

    def _gpu_experts(self, layer: int, num_experts: int | None = None) -> Experts:
        """Allocate a layer's weights on the GPU, by default for all experts, without biases."""
        with self.device:
            formats = self.formats(self.names[layer])
            sizes = replace(self.experts, num_experts=num_experts or self.experts.num_experts, has_bias=False)
            experts = Experts(self.config.hidden_size, sizes, self.tp, self.dtype, formats)
        for weight, matrix in zip(experts.weights, self.store.layers[layer].matrices, strict=True):
            if isinstance(weight, PackedWeight) and weight.scale_dtype is None and matrix.scale_dtype is not None:
                weight.choose_scales(matrix.scale_dtype, f"{self.names[layer]}.experts")
        return experts

    @cached_property
    def biases(self) -> list[ExpertBiases | None]:
        """The biases of each layer, on the model's device. On a GPU they stay there, because they are small."""
        return [self._biases_of(layer) for layer in self.store.layers]

    def _biases_of(self, layer: ExpertLayer) -> ExpertBiases | None:
        gate, up, down = (matrix.biases for matrix in layer.matrices)
        if gate is None or up is None or down is None:
            return None
        gate_up = torch.stack((gate, up), dim=1).to(self.device, self.dtype)
        return ExpertBiases(gate_up, down.to(self.device, self.dtype) if self.tp.rank == 0 else None)

    def _rows_that_the_cpu_computes_faster(self) -> int:
        """Return the number of tokens, a power of two, up to which the CPU computes a layer in less time than the GPU
        needs to receive its experts. The smallest of all ranks.
        """
        streamed_s = _median_s(lambda: self.staging.fetch_again(0))
        job, kernel, num_experts, num_rows = self.job, self._threads, self.experts.num_experts, 1
        chances = torch.rand(len(job.x), num_experts, generator=torch.Generator().manual_seed(0))
        job.experts.copy_(chances.topk(job.experts.shape[1]).indices)
        while 2 * num_rows <= len(job.x):
            job.num_tokens = 2 * num_rows
            if _median_s(lambda: kernel.compute_experts(job, 0)) > streamed_s:
                break
            num_rows *= 2
        return int(self.tp.all_gather(torch.tensor([num_rows], device=self.device)).amin())

    def _share_of_the_link(self) -> int:
        """Return the share of the experts, in SHARES, that the GPU reads over the link faster than the CPU's threads
        would compute them, while both do their part. 0 if the CPU alone is about as fast.
        """
        job, streams, num_layers = self.job, self.staging.streams, len(self.store.layers)
        chances = torch.rand(_NUM_TIMED_JOBS, 1, self.experts.num_experts, generator=torch.Generator().manual_seed(1))
        choices, job.num_tokens = chances.topk(job.experts.shape[1]).indices.int(), 1

        def compute() -> float:
            start_s = perf_counter()
            for number, chosen in enumerate(choices):
                job.experts[:1] = chosen
                self._threads.compute_experts(job, number % num_layers)
            return perf_counter() - start_s

        compute()
        alone_s = median(compute() for _ in range(3))
        memory = self.store.layers[0].memory
        copy = torch.empty(memory.shape, dtype=torch.uint8, device=self.device)
        streams.h2d.copy(copy, memory)
        streams.synchronize()
        start, end = streams.timing_event(), streams.timing_event()
        num_copies = 2 + int(1.5 * alone_s * _FASTEST_LINK / memory.nbytes)  # more than the CPU needs
        streams.h2d.record(start)
        for _ in range(num_copies):
            streams.h2d.copy(copy, memory)
        streams.h2d.record(end)
        together_s = compute()
        streams.synchronize()
        copied_s = streams.seconds(start, end)
        assert copied_s is not None, "the copies have ended"
        job_bytes = memory.nbytes / self.experts.num_experts * choices.numel()
        alone, together, link = job_bytes / alone_s, job_bytes / together_s, num_copies * memory.nbytes / copied_s
        if together + link < _LEAST_LINK_GAIN * alone:
            return 0
        return round(SHARES * link / (link + together))

    @property
    def _threads(self) -> CpuKernel:
        assert self.kernel is not None, "the experts have been started"
        return self.kernel

    def stats(self) -> dict[str, Any]:
        return {
            "max_cpu_expert_rows": self.max_rows,
            # The GPU's count wraps around in int32
            "num_cpu_computed_layers": int(self._exchange[ARRIVED]) % 2**32 if self.is_gpu else self._num_computed,
            "expert_link_share": self.link.share / SHARES if self.link is not None else 0.0,
            "num_streamed_expert_layers": self.staging.num_fetched if self.is_gpu else 0,
        }

    def close(self) -> None:
        """End the threads and release the memory. The GPU has finished."""
        try:
            if self._server is not None:
                self._server.close()
        finally:
            if self.kernel is not None:
                self.kernel.close()
            self._buffer.close()

    # -- one step ------------------------------------------------------------------------------------------------

    def begin(
        self, layer: int, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Begin to compute a layer of the store. Returns a function that returns the sums [T, H]. Hot: per layer."""
        if not len(x):
            return lambda: x
        if not self.is_gpu:
            return partial(self._compute, layer, x, experts, weights)
        if len(x) > self.max_rows:
            return partial(self._stream, layer, x, experts, weights)
        from nanovllm.kernels import expert_exchange as kernels

        if self.link is None:
            kernels.send(self._rows, layer, x, experts, weights, self.cells)
            return partial(kernels.receive, self._rows, x)

        def send(on_cpu: torch.Tensor) -> None:
            kernels.send(self._rows, layer, x, on_cpu, weights)

        own = self.link.begin(layer, x, experts, weights, self.cells, send, self.biases[layer])
        return lambda: own + kernels.receive(self._rows, x)

    def _stream(self, layer: int, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sums = self.staging.experts(layer).sums(x, experts, weights, self.biases[layer])
        self.staging.multiplied(layer)
        return sums

    def _compute(self, layer: int, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        job, out = self.job, torch.empty_like(x)
        for start in range(0, len(x), len(job.x)):
            rows = slice(start, start + len(job.x))
            job.num_tokens = len(x[rows])
            own = slice(job.num_tokens)
            job.x[own], job.experts[own], job.weights[own] = x[rows], experts[rows], weights[rows]
            self._threads.compute_experts(job, layer)
            self._num_computed += 1
            out[rows] = job.out[own]
        return out


class CpuExperts(nn.Module):
    """The experts of a layer that are in CPU memory: an ExpertSum (layers/moe.py)."""

    def __init__(self, rank: RankExperts, layer: int, formats: Sequence[Quantization | None]) -> None:
        """layer: in the store. formats: of gate, up and down in the checkpoint."""
        super().__init__()
        self.rank, self.layer, self.formats = rank, layer, formats
        self.kind = rank.store.layers[layer].formats  # layers of other kinds launch other kernels
        self.register_buffer("memory", rank.store.layers[layer].memory)  # so that the model's state has these weights

    def begin(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        finish = self.rank.begin(self.layer, x, experts, weights)
        return lambda: sum_over_ranks(finish(), self.rank.tp)

    def weight_shards(self) -> Iterator[NamedShard]:
        rank, stored = self.rank, self.rank.store.layers[self.layer]
        size, hidden_size, local = rank.experts.intermediate_size, rank.config.hidden_size, stored.size
        own, all_of = slice(rank.tp.rank * local, (rank.tp.rank + 1) * local), slice(None)
        parts = (
            ("gate_proj", stored.gate, (size, hidden_size), (own, all_of)),
            ("up_proj", stored.up, (size, hidden_size), (own, all_of)),
            ("down_proj", stored.down, (hidden_size, size), (all_of, own)),
        )
        for expert in range(rank.experts.num_experts):
            for (name, matrix, shape, index), quantization in zip(parts, self.formats, strict=True):
                shard = WeightShard(matrix.rows(expert, rank.device), shape, index, quantization)
                yield NamedShard(0, f"{expert}.{name}.weight", shard)
                if matrix.biases is not None:
                    is_counted = matrix is not stored.down or rank.tp.rank == 0
                    rows, bias = (index[0], matrix.biases[expert]) if is_counted else (slice(0, 0), torch.empty(0))
                    yield NamedShard(0, f"{expert}.{name}.bias", WeightShard(bias, shape[:1], (rows,)))


def _median_s(call: Callable[[], None]) -> float:
    """Return the median time of some calls, after one that may be slow."""
    times = []
    for _ in range(1 + _NUM_TIMED_CALLS):
        start_s = perf_counter()
        call()
        times.append(perf_counter() - start_s)
    return median(times[1:])
