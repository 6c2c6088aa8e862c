"""SparseMLP: a mixture of experts, each of which is a gated MLP. A router chooses some of them for each token.

Tensor parallelism splits every expert: each rank has some features of all experts, and the outputs are summed over the
ranks. Legend: T tokens, E experts, C experts chosen for each token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.model_config import ExpertsConfig
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.config import Config
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import ConfigError
from nanovllm.layers.linear import (
    NamedShard,
    StackedWeight,
    Weight,
    WeightShard,
    act_and_mul,
    divide,
    new_weight,
    packed_format,
    stack_weights,
    sum_over_ranks,
    weight_rows,
)
from nanovllm.layers.packed_weight import PackedWeight, new_parameter, packed

MAX_ROUTER_ROWS = 4  # tokens up to which our kernel computes the router's logits
MAX_SINGLE_PAIRS = 32  # number of (token, expert) pairs up to which every pair reads its expert separately


class Router(nn.Module):
    """Routes tokens to experts: the softmax, in fp32, of a linear layer with fp32 results.

    The weight of a shared expert is the sigmoid of one more feature of the linear layer.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.num_chosen, self.norms = config.num_experts_per_token, config.norm_topk_prob
        num_features = config.num_experts + bool(config.shared_size)
        assert not (config.has_bias and config.shared_size), "no gate of a shared expert has a bias"
        self.weight = new_parameter(num_features, hidden_size, dtype=dtype)
        self.bias = new_parameter(num_features, dtype=dtype) if config.has_bias else None

    def forward(
        self, x: torch.Tensor, logit_factor: float = 1.0, expert_factors: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, hidden_size] -> the chosen experts, int64 [T, C], their weights, fp32 [T, C], and the weight of the
        shared expert, fp32 [T, 1], or [T, 0] if there is none. Hot: once per layer.

        logit_factor: a positive factor of the logits. expert_factors [E]: factors of the weights.
        """
        logits, shared = self._linear(x).tensor_split((self.num_experts,), dim=-1)
        if x.is_cuda:
            from nanovllm.kernels.fused import choose_experts

            return *choose_experts(logits, self.num_chosen, self.norms, logit_factor, expert_factors), shared.sigmoid()
        weights, experts = (logits * logit_factor).softmax(dim=-1).topk(self.num_chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True) if self.norms else weights
        return experts, weights if expert_factors is None else weights * expert_factors[experts], shared.sigmoid()

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> fp32 [T, features]: products of 16-bit numbers are exact in fp32, and are
        summed in fp32.
        """
        is_few = len(x) <= MAX_ROUTER_ROWS and self.weight.shape[1] % 8 == 0
        if x.is_cuda and x.dtype != torch.float32 and is_few:
            from nanovllm.kernels.small_linear import small_linear

            return small_linear(x, self.weight, self.bias, dtype=torch.float32)
        return self.product_of_many(x)

    def product_of_many(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `_linear` for many tokens without our kernels. Start-up calls it to make cuBLAS load its kernels."""
        if not x.is_cuda or x.dtype == torch.float32:
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        product = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return product if self.bias is None else product.add_(self.bias)

    def weight_shards(self) -> Iterator[NamedShard]:
        for layer, part in enumerate(self.weight.tensor_split((self.num_experts,))):
            if len(part):
                yield NamedShard(layer, "weight", WeightShard(part, tuple(part.shape), (slice(None), slice(None))))
        if self.bias is not None:
            yield NamedShard(0, "bias", WeightShard(self.bias, (self.num_experts,), (slice(None),)))


class ExpertSum(Protocol):
    """Computes the experts of a layer: a module, Experts or the one of a CpuExpertLayers."""

    def begin(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin the weighted sum of the chosen experts' outputs for x [T, hidden_size].

        `experts` and `weights` [T, C] come from the router. Returns a function that finishes, and returns the sum over
        all ranks. Hot: once per layer.
        """
        ...


class CpuExpertLayers(Protocol):
    """Layers whose experts are in CPU memory (capabilities/cpu_experts). The model owns them; start-up starts them."""

    max_rows: int  # most tokens of a step that needs no call of the host within it, and can be a CUDA graph
    cells: torch.Tensor | None  # int64 [T], negative for rows of padding in a graph; None if there is no padding

    def layer(self, name: str) -> nn.Module:
        """Return the module with the experts of a sparse MLP, an ExpertSum. name: of the MLP in the checkpoint."""
        ...

    kernel: Any  # the CpuKernel with the threads that compute, once started

    def start(self, config: Config) -> None:
        """Start to compute. Called once the weights are loaded, by all ranks together."""

    def stats(self) -> dict[str, Any]:
        """Counters for LLM.stats()."""
        ...

    def close(self) -> None:
        """End the threads and release the memory."""


class ExpertBiases(NamedTuple):
    """The biases of experts, of this rank's features. Only rank 0 has biases of down, so that the sum over ranks counts
    them once.
    """

    gate_up: torch.Tensor  # [E, 2, features]
    down: torch.Tensor | None  # [E, hidden_size]

    def select(self, experts: torch.Tensor) -> "ExpertBiases":
        """Return the biases of some experts, int [S]. Hot: once per layer."""
        down = None if self.down is None else self.down.index_select(0, experts)
        return ExpertBiases(self.gate_up.index_select(0, experts), down)


class Experts(nn.Module):
    """Weighted sum of the chosen experts' outputs for each token: [T, hidden_size] -> [T, hidden_size].

    Raises ConfigError if an expert's features are not divisible by the number of ranks, or on a GPU by 16.
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        tp: TPGroup,
        dtype: torch.dtype,
        formats: Sequence[Quantization | None] = (None, None, None),
    ) -> None:
        """`formats`: of gate, up and down, None if they are not quantized."""
        super().__init__()
        # products with experts take 16-bit activations
        self.formats = [format and replace(format, has_fp8_activations=False) for format in formats]
        self.tp, self.activation = tp, config.activation
        self.size, self.num_experts, self.hidden_size = config.intermediate_size, config.num_experts, hidden_size
        self.local_size = divide(config.intermediate_size, tp.size, "moe_intermediate_size")
        if torch.get_default_device().type == "cuda" and (hidden_size % 16 or self.local_size % 16):
            raise ConfigError(
                f"an expert has {hidden_size} and {self.local_size} features on each rank, which must be multiples of "
                "16 on a GPU; use fewer ranks, or device='cpu'"
            )
        # The rows of all experts form one weight, or two if gate and up have different formats. Each expert's columns
        # would have another order
        gate, up, down = self.formats
        self.gate_up: Weight  # in the order of the experts, or gates of all experts and then ups
        if packed_format(gate, hidden_size) == packed_format(up, hidden_size):
            sizes = [self.local_size] * 2 * self.num_experts
            self.gate_up = new_weight(sizes, hidden_size, dtype=dtype, quantization=gate, sorts_columns=False)
        else:
            sizes = [self.local_size * self.num_experts] * 2
            self.gate_up = stack_weights(sizes, hidden_size, dtype=dtype, formats=(gate, up))
        self.down = new_weight(
            [hidden_size] * self.num_experts,
            self.local_size,
            dtype=dtype,
            quantization=down,
            num_ranks=tp.size,
            sorts_columns=False,
        )
        self.has_bias = config.has_bias
        if config.has_bias:
            self.gate_up_bias = new_parameter(self.num_experts, 2, self.local_size, dtype=dtype)
            self.down_bias = new_parameter(self.num_experts, hidden_size, dtype=dtype) if tp.rank == 0 else None

    def begin(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: self(x, experts, weights)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`experts` and `weights` [T, C] come from the router. Only the chosen experts are read."""
        return sum_over_ranks(self.sums(x, experts, weights, self.biases), self.tp)

    @property
    def biases(self) -> ExpertBiases | None:
        return ExpertBiases(self.gate_up_bias, self.down_bias) if self.has_bias else None

    def sums(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, biases: ExpertBiases | None = None
    ) -> torch.Tensor:
        """Return this rank's part of the sums. biases: the module's own, or for streamed experts the layer's."""
        return (self._sum_of_products if x.is_cuda else self._sum_by_expert)(x, experts, weights, biases)

    @property
    def weights(self) -> list[nn.Parameter | PackedWeight]:
        """The weights that have gate, up and down. Gate and up may have the same."""
        gate_up = self.gate_up.weights if isinstance(self.gate_up, StackedWeight) else (self.gate_up, self.gate_up)
        assert not isinstance(self.down, StackedWeight), "downs have one format"
        return [*gate_up, self.down]

    def _sum_by_expert(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, biases: ExpertBiases | None = None
    ) -> torch.Tensor:
        """Compute the chosen experts one after the other, on a CPU."""
        assert isinstance(self.gate_up, nn.Parameter) and isinstance(self.down, nn.Parameter), "not on a CPU"
        gate_up, down = (each.unflatten(0, (self.num_experts, -1)) for each in (self.gate_up, self.down))
        gate_up_bias, down_bias = (None, None) if biases is None else (biases.gate_up.flatten(1), biases.down)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in experts.unique().tolist():
            token, choice = (experts == expert).nonzero(as_tuple=True)
            both = F.linear(x[token], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
            hidden = act_and_mul(both, self.activation)
            hidden = F.linear(hidden, down[expert], None if down_bias is None else down_bias[expert])
            out.index_add_(0, token, hidden.float() * weights[token, choice, None])
        return out.to(x.dtype)

    def _sum_of_products(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, biases: ExpertBiases | None = None
    ) -> torch.Tensor:
        """Multiply on a GPU. Few pairs each read their expert; with many, the pairs of an expert share the read."""
        from nanovllm.kernels import packed_linear as kernels

        chosen: dict[str, Any] = {"experts": experts, "num_experts": self.num_experts}
        if experts.numel() > MAX_SINGLE_PAIRS:
            chosen = {"routing": kernels.route(experts, self.num_experts, weight=packed(self.weights[0]))}
        gate_up_bias, down_bias = (None, None) if biases is None else biases
        if isinstance(self.gate_up, StackedWeight):
            gates_and_ups = x.new_empty(experts.numel(), 2 * self.local_size)
            for i, (weight, out) in enumerate(zip(self.gate_up.weights, gates_and_ups.chunk(2, dim=-1), strict=True)):
                bias = None if gate_up_bias is None else gate_up_bias[:, i].contiguous()
                kernels.products(x, packed(weight), bias, out=out, **chosen)
            hidden = act_and_mul(gates_and_ups, self.activation)
        else:
            gated: dict[str, Any] = {"gated": True, "activation": self.activation}
            hidden = kernels.products(x, packed(self.gate_up), gate_up_bias, **gated, **chosen)
        down = packed(self.down)
        if experts.numel() <= MAX_SINGLE_PAIRS and kernels.can_sum_experts(hidden, down, experts):
            return kernels.sum_of_experts(hidden, down, experts, self.num_experts, weights, down_bias)
        out = kernels.products(hidden, down, down_bias, factors=weights.flatten(), **chosen)
        return out.view(*experts.shape, self.hidden_size).sum(1)  # torch sums in fp32

    def weight_shards(self) -> Iterator[NamedShard]:
        local, hidden_size = self.local_size, self.hidden_size
        own, all_of = slice(self.tp.rank * local, (self.tp.rank + 1) * local), slice(None)
        for expert in range(self.num_experts):
            for part, name in enumerate(("gate_proj", "up_proj")):
                is_stacked = isinstance(self.gate_up, StackedWeight)
                start = (part * self.num_experts + expert if is_stacked else 2 * expert + part) * local
                target = weight_rows(self.gate_up, start, start + local)
                shard = WeightShard(target, (self.size, hidden_size), (own, all_of), self.formats[part])
                yield NamedShard(0, f"{expert}.{name}.weight", shard)
                if self.has_bias:
                    bias = self.gate_up_bias[expert, part]
                    yield NamedShard(0, f"{expert}.{name}.bias", WeightShard(bias, (self.size,), (own,)))
            target = weight_rows(self.down, expert * hidden_size, (expert + 1) * hidden_size)
            shard = WeightShard(target, (hidden_size, self.size), (all_of, own), self.formats[2])
            yield NamedShard(0, f"{expert}.down_proj.weight", shard)
            if self.has_bias:  # the other ranks list the tensor but read nothing from it
                bias = torch.empty(0) if self.down_bias is None else self.down_bias[expert]
                shard = WeightShard(bias, (hidden_size,), (slice(0, len(bias)),))
                yield NamedShard(0, f"{expert}.down_proj.bias", shard)


class SparseMLP(nn.Module):
    """A mixture of experts, whose modules have the names that they have in the checkpoint.

    Some models have an expert that every token uses, `shared_expert`, which is a separate dense MLP. If a CPU computes
    the other experts, the GPU computes this one meanwhile.
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertsConfig,
        dtype: torch.dtype,
        experts: nn.Module,
        shared_expert: nn.Module | None = None,
    ) -> None:
        """`experts`: an ExpertSum."""
        super().__init__()
        self.gate = Router(hidden_size, config, dtype)
        self.experts = experts
        self.shared_expert = shared_expert

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        experts, weights, shared_weight = self.gate(hidden)
        finish = cast(ExpertSum, self.experts).begin(hidden, experts, weights)
        if self.shared_expert is None:
            return finish()
        shared = self.shared_expert(hidden)
        out = finish()
        return torch.addcmul(out, shared_weight.to(out.dtype), shared)
