"""The layers of Gemma 3 and 4. Unlike in other decoders, the outputs of attention and of the MLP are normed before they
are added to the residual, so one kernel norms, adds and norms again. In a mixture of experts, each token also passes
through a dense MLP.

The decoder makes the parts that Gemma shares with other models, and passes them to the constructors.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from nanovllm.attention.base import StepAttention
from nanovllm.checkpoint.model_config import MAX_MLP_TOKENS
from nanovllm.layers.layernorm import RMSNorm, norm_add_norm, rms_norm
from nanovllm.layers.linear import NamedShard, WeightShard
from nanovllm.layers.moe import ExpertSum, Router
from nanovllm.layers.packed_weight import new_parameter


class GemmaRouter(nn.Module):
    """Routes tokens to experts by their normed hidden states. Each expert has a factor. The modules have the
    checkpoint's names.
    """

    def __init__(self, hidden_size: int, eps: float, proj: Router) -> None:
        super().__init__()
        self.proj, self.eps = proj, eps
        self.scale = new_parameter(hidden_size, dtype=torch.float32)
        self.per_expert_scale = new_parameter(proj.num_experts, dtype=torch.float32)
        self._logit_factor = hidden_size**-0.5

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden_size] -> the chosen experts, int64 [T, C], and their weights, fp32 [T, C]. Hot: once per layer."""
        normed = rms_norm(hidden, self.scale, self.eps)
        experts, weights, _ = self.proj(normed, self._logit_factor, self.per_expert_scale)
        return experts, weights

    def weight_shards(self) -> Iterator[NamedShard]:
        for name in ("scale", "per_expert_scale"):
            yield _vector_shard(name, getattr(self, name))


class GemmaLayer(nn.Module):
    """A layer, whose modules have the checkpoint's names.

    norm: makes a norm of hidden states. experts: an ExpertSum, or None in a layer without experts. scalar: an
    uninitialised parameter [1] that multiplies the output, or None.
    """

    def __init__(
        self,
        norm: Callable[[], RMSNorm],
        self_attn: Any,
        mlp: nn.Module,
        router: GemmaRouter | None,
        experts: nn.Module | None,
        scalar: nn.Parameter | None,
    ) -> None:
        super().__init__()
        self.has_window: bool = self_attn.has_window
        self.linear_attn = None
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.router, self.experts = router, experts
        if experts is not None:
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()
            self.pre_feedforward_layernorm_2 = norm()
        self.layer_scalar = scalar

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: torch.Tensor,
        attn: StepAttention,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, None]:
        """Return the output of the layer, which is complete: no residual is left to add."""
        assert residual is None, "the last layer has added its residual"
        normed, _ = self.input_layernorm(hidden)
        attended = self.self_attn(normed, cos_sin, attn, rows)
        hidden = hidden if rows is None else hidden[rows]
        normed, hidden = _add(self.post_attention_layernorm, attended, hidden, before=self.pre_feedforward_layernorm)
        parts = zip(normed.split(MAX_MLP_TOKENS), hidden.split(MAX_MLP_TOKENS), strict=True)
        outputs = [self._feed_forward(*part) for part in parts]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _add(self.post_feedforward_layernorm, out, hidden, scalar=self.layer_scalar)[1], None

    def _feed_forward(self, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP for `normed`, plus the output of the experts for `hidden` if there are any."""
        if self.experts is None or self.router is None:
            return cast(torch.Tensor, self.mlp(normed))
        of_experts, _ = self.pre_feedforward_layernorm_2(hidden)
        finish = cast(ExpertSum, self.experts).begin(of_experts, *self.router(hidden))
        dense, _ = self.post_feedforward_layernorm_1(self.mlp(normed))
        return _add(self.post_feedforward_layernorm_2, finish(), dense)[1]

    def skip(self, hidden: torch.Tensor, attn: StepAttention) -> None:
        """Let attention consume the blocks that are streamed for this layer."""
        self.self_attn.skip(hidden, attn)

    def weight_shards(self) -> Iterator[NamedShard]:
        if self.layer_scalar is not None:
            yield _vector_shard("layer_scalar", self.layer_scalar)


def _add(
    norm: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor,
    *,
    before: RMSNorm | None = None,
    scalar: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the norm `before` of the sum, the sum) of the residual and the norm of x, multiplied by the scalar."""
    weight = None if before is None else before.weight
    return norm_add_norm(x, residual, norm.weight, norm.eps, scalar=scalar, next_weight=weight)


def _vector_shard(name: str, target: torch.Tensor) -> NamedShard:
    return NamedShard(0, name, WeightShard(target, tuple(target.shape), (slice(None),)))
