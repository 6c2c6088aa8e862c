"""SparseMLP: a mixture of experts, each of which is a gated MLP. A router chooses some of them for each token.

Tensor parallelism splits every expert: each rank has some features of all experts, and the outputs are summed over the
ranks. Legend: T tokens, E experts, C experts chosen for each token.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.checkpoint.model_config import ExpertsConfig
from nanovllm.device.tp_group import TPGroup
from nanovllm.layers.linear import NamedShard, WeightShard, divide, new_parameter, silu_and_mul


class Router(nn.Module):
    """The probability of each expert is a softmax in fp32 of a linear layer, which is computed in fp32 as well."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.num_chosen, self.norms = config.num_experts_per_token, config.norm_topk_prob
        self.weight = new_parameter(config.num_experts, hidden_size, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden_size] -> the chosen experts, int64 [T, C], and their weights, fp32 [T, C]. Hot: once per layer."""
        probabilities = F.linear(x.float(), self.weight).softmax(dim=-1)
        weights, experts = probabilities.topk(self.num_chosen, dim=-1)
        return experts, weights / weights.sum(dim=-1, keepdim=True) if self.norms else weights

    def weight_shards(self) -> Iterator[NamedShard]:
        shape = tuple(self.weight.shape)
        yield NamedShard(0, "weight", WeightShard(self.weight, shape, (slice(None), slice(None))))


class Experts(nn.Module):
    """Sums what the chosen experts yield for a token, by their weights: [T, hidden_size] -> [T, hidden_size].

    Raises ConfigError if an expert's features are not divisible by the number of ranks.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp, self.size = tp, config.intermediate_size
        local = divide(config.intermediate_size, tp.size, "moe_intermediate_size")
        self.gate_up = new_parameter(config.num_experts, 2 * local, hidden_size, dtype=dtype)
        self.down = new_parameter(config.num_experts, hidden_size, local, dtype=dtype)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`experts` and `weights` [T, C] are the router's. Reads only the experts that are chosen, and so waits for the
        device.
        """
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in experts.unique().tolist():
            token, choice = (experts == expert).nonzero(as_tuple=True)
            hidden = F.linear(silu_and_mul(F.linear(x[token], self.gate_up[expert])), self.down[expert])
            out.index_add_(0, token, hidden.float() * weights[token, choice, None])
        return self.tp.all_reduce(out.to(x.dtype))

    def weight_shards(self) -> Iterator[NamedShard]:
        num_experts, hidden_size, local = self.down.shape
        own, all_of = slice(self.tp.rank * local, (self.tp.rank + 1) * local), slice(None)
        for expert in range(num_experts):
            for name, target in zip(("gate_proj", "up_proj"), self.gate_up[expert].split(local), strict=True):
                shard = WeightShard(target, (self.size, hidden_size), (own, all_of))
                yield NamedShard(0, f"{expert}.{name}.weight", shard)
            shard = WeightShard(self.down[expert], (hidden_size, self.size), (all_of, own))
            yield NamedShard(0, f"{expert}.down_proj.weight", shard)


class SparseMLP(nn.Module):
    """Its modules have the names that they have in the checkpoint."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Router(hidden_size, config)
        self.experts = Experts(hidden_size, config, tp, dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts(hidden, *self.gate(hidden))
