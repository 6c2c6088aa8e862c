"""The interfaces of attention: which keys each query sees, partial results and their merge, backends, steps.

Legend: T packed query tokens, B sequences, H query heads, K kv heads, D head dim,
N blocks of a cache, P tokens per block, M columns of a block table.

A backend computes attention of packed queries over a *paged* cache and always returns the log-sum-exp with it, so
that attention over disjoint sets of keys can be merged exactly. The cache may be the all-GPU pool, the slots of the
offload ring, or the staging buffers: to a backend these are all `[N, P, K, D]` tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import torch

from nanovllm.layers.delta_net import HasLayerMemory
from nanovllm.layers.rotary_embedding import KVCells


class PartialAttention(NamedTuple):
    """Attention over some of the keys. A row that saw no key: out 0, lse -inf."""

    out_THD: torch.Tensor
    lse_HT: torch.Tensor  # fp32, natural log


@dataclass(frozen=True)
class HostTables:
    """The numbers of a PagedBatch on the host, for backends that loop over sequences (torch, cudnn)."""

    query_lens: Sequence[int]  # [B]
    context_lens: Sequence[int]  # [B]
    block_tables: Sequence[Sequence[int]]  # [B][ceil(context_len / P)] or longer


@dataclass(frozen=True)
class PagedBatch:
    """The keys that the packed queries attend to: keys 0..context_len-1 of each sequence, through its block table.

    With `causal`, the queries of a sequence are its last `query_len` keys (aligned at the bottom right): query i of
    n sees keys 0 .. context_len - n + i. Without `causal`, every query sees all `context_len` keys. A context_len of 0
    means the sequence sees no key here (out 0, lse -inf).

    With `window`, which needs `causal`, a query sees at most the last `window` of these keys, including its own key.

    A sequence may have no query. Inside a CUDA graph there may be more rows than queries; the results of rows that
    belong to no sequence are unspecified.
    """

    cu_seqlens_q: torch.Tensor  # [B + 1] int32, on the device
    context_lens: torch.Tensor  # [B] int32, on the device
    block_tables: torch.Tensor  # [B, M] int32, on the device; entries past the context are arbitrary but valid ids
    max_query_len: int
    max_context_len: int
    causal: bool
    host: HostTables | None = None  # None inside a CUDA graph, where sizes are not known on the host
    window: int | None = None
    _cuts: dict[tuple[int, int], "PagedBatch"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.window is None or (self.causal and self.window > 0), f"no mask has a window of {self.window} keys"

    @property
    def max_visible_keys(self) -> int:
        """The most keys that a query sees, for plans of the kernels' work."""
        return self.max_context_len if self.window is None else min(self.window, self.max_context_len)

    def has_one_query_each(self, q_THD: torch.Tensor) -> bool:
        """Return True if the packed queries are one of each sequence, in order. Hot: once per layer."""
        return self.max_query_len == 1 and len(q_THD) == len(self.context_lens)

    def sequences(self, first: int, last: int) -> "PagedBatch":
        """Return sequences first..last-1 as a separate batch, whose tensors except cu_seqlens_q are views. Needs
        `host`.

        The batches are cached, because every layer of a step asks for the same sequences.
        """
        if (first, last) not in self._cuts:
            self._cuts[first, last] = self._cut(first, last)
        return self._cuts[first, last]

    def _cut(self, first: int, last: int) -> "PagedBatch":
        assert self.host is not None, "sizes are not known on the host"
        rows = slice(first, last)
        host = HostTables(self.host.query_lens[rows], self.host.context_lens[rows], self.host.block_tables[rows])
        cu_seqlens_q = self.cu_seqlens_q[first : last + 1]
        return replace(
            self,
            cu_seqlens_q=cu_seqlens_q - cu_seqlens_q[0] if first else cu_seqlens_q,
            context_lens=self.context_lens[rows],
            block_tables=self.block_tables[rows],
            max_query_len=max(host.query_lens),
            max_context_len=max(host.context_lens),
            host=host,
        )


class AttentionBackend(ABC):
    """One way to run the kernels. Stateless except for tuning caches; selection.py chooses a backend at start-up."""

    name: ClassVar[str]
    runs_in_graphs: ClassVar[bool] = True  # False: `attend` reads PagedBatch.host, which a CUDA graph does not have

    @classmethod
    @abstractmethod
    def why_unavailable(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None if the backend can run here, else the reason, fit for an error message."""

    @abstractmethod
    def attend(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        v_cache_NPKD: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> PartialAttention:
        """Attend with the packed queries to the paged keys of `batch`, in the queries' dtype. Returns the LSE, too.

        `sinks_H`, contiguous, in fp32 or the queries' dtype: a logit for each query head, which `add_sinks` explains.
        """

    @abstractmethod
    def merge(self, parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
        """Merge two or three parts over disjoint keys, in fp32, into attention over all the keys, returned in `dtype`.

        The result may overwrite any of the parts. `merge_attention_outputs` has the formula.
        """

    def launch_kernels(
        self,
        q_THD: torch.Tensor,
        k_cache_NPKD: torch.Tensor,
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """Launch every Triton kernel that a chunk of any length may need in a layer of one kind. Within
        `kernels.launch.compile_only` this only starts to compile the kernels, so that no prompt waits for compilation
        later.

        The shapes, `window` and `sinks_H` are the layer's. `q_THD`: queries of the longest chunk. `k_cache_NPKD`: a
        layer's keys, at least one block. All values are arbitrary. Backends without such kernels do nothing.
        """
        return

    def build_plans(
        self,
        q_1HD: torch.Tensor,
        num_kv_heads: int,
        max_query_len: int,
        max_context_len: int,
        has_time: Callable[[], bool],
    ) -> None:
        """Build the plans that the library would otherwise build while prompts wait, from the longest chunks to the
        shortest.

        Plans that every long prompt needs are built in any case, and each other plan only if `has_time()`. `q_1HD`: a
        query, whose values are arbitrary. The lengths are in tokens. Backends whose library has no plans do nothing.
        """
        return

    def max_split_bytes(self, q_THD: torch.Tensor) -> int:
        """Return the most memory that a short chunk over a long history may take in addition to the memory of an equal
        chunk without history, for the heads and dtype of `q_THD`.
        """
        return 0


class WindowKeys(Protocol):
    """The keys of one layer with a window in a step. The layer takes `cells`, then calls `attend`."""

    @property
    def cells(self) -> KVCells:
        """The cells for the layer's new K and V."""
        ...

    def attend(self, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        """Attend with all tokens of the step to the keys in their windows. Returns [T, H, D]. Hot: once per layer.

        sinks_H: see StepAttention.attend.
        """
        ...


class StepAttention(HasLayerMemory, Protocol):
    """The attention of one step, an argument of `model(...)`. Layers call it in order.

    A layer that attends to all keys calls `cells`, then `attend`, with its index among the layers of this kind. Another
    layer calls `layer_memory` with its index among the layers of its kind: a recurrent layer gets LayerStates, a layer
    with a window gets WindowKeys.
    """

    def cells(self, layer: int) -> KVCells:
        """Return the cells for the layer's new K and V. They may be written once this returns. Hot: once per layer."""
        ...

    def attend(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        """Attend to all keys, including the new keys, which have been stored by now. Returns [T, H, D].

        `sinks_H`: the layer's sinks, which count once, however many parts the keys are in (see `add_sinks`).

        In the model's last layer q may hold only the rows whose results are used, [S, H, D]. Outside captures, q may be
        empty in any layer, and is then returned unchanged. Hot: once per layer.
        """
        ...


def add_sinks(part: PartialAttention, sinks_H: torch.Tensor) -> PartialAttention:
    """Let a logit of each query head join the softmax of `part`, whose `out` is overwritten.

    A sink has no value: it only takes weight from the keys (gpt-oss). With l = log of the sum of exp(score) and sink s,
    out is multiplied by exp(l) / (exp(l) + exp(s)) = sigmoid(l - s), and the new lse is log(exp(l) + exp(s)). A row
    that saw no key gets lse s and keeps out 0. Of several parts that are merged, exactly one has the sinks.
    """
    sinks_H1 = sinks_H.float().unsqueeze(1)
    weight_TH1 = torch.sigmoid(part.lse_HT - sinks_H1).t().unsqueeze(-1)
    return PartialAttention(part.out_THD.mul_(weight_TH1), torch.logaddexp(part.lse_HT, sinks_H1))


# -- exact merge by log-sum-exp ------------------------------------------------------------------------------------
# Kernels return a part in the model's dtype. Parts are merged in fp32, and only the last merge rounds to that dtype
# again: rounding after every merge would add up to six times the error of a single rounding after 122 parts.

PARTS_PER_MERGE = 3  # the running result and two parts: reading and writing it costs as much as four parts

Merge: TypeAlias = Callable[[Sequence[PartialAttention], torch.dtype], PartialAttention]  # AttentionBackend.merge


def merge_attention_outputs(
    o1_THD: torch.Tensor, lse1_HT: torch.Tensor, o2_THD: torch.Tensor, lse2_HT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union: `(out [T, H, D], lse [H, T]
    fp32)`.

    Computed in fp32 or better. `out` has the promoted dtype of o1 and o2, so a running result in fp32 stays fp32.

    With s = sum of exp(score) over a part's keys, lse = log s and out = (s1 o1 + s2 o2) / (s1 + s2): the second part
    weighs s2 / (s1 + s2) = sigmoid(lse2 - lse1). A part that saw no key (lse -inf, out 0) is the identity, bit for
    bit; two such parts stay empty.
    """
    no_key = float("-inf")
    log_ratio_HT = (lse2_HT - lse1_HT).masked_fill(lse2_HT == no_key, no_key)  # -inf - -inf would be NaN
    weight2_TH1 = torch.sigmoid(log_ratio_HT).t().unsqueeze(-1)
    dtype = torch.promote_types(o1_THD.dtype, o2_THD.dtype)
    compute_dtype = running_dtype(dtype)
    out_THD = torch.lerp(o1_THD.to(compute_dtype), o2_THD.to(compute_dtype), weight2_TH1.to(compute_dtype))
    return out_THD.to(dtype), torch.logaddexp(lse1_HT, lse2_HT)


def merge_parts(parts: Sequence[PartialAttention], dtype: torch.dtype) -> PartialAttention:
    """Implement `AttentionBackend.merge` in plain torch: the reference for the fused kernels."""
    (out_THD, lse_HT), *others = parts
    out_THD = out_THD.to(running_dtype(out_THD.dtype))
    for other in others:
        out_THD, lse_HT = merge_attention_outputs(out_THD, lse_HT, *other)
    return PartialAttention(out_THD.to(dtype), lse_HT)


def running_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts of `dtype` are merged: fp32, or fp64 for fp64 parts."""
    return torch.promote_types(dtype, torch.float32)


class RunningMerge:
    """Attention over the keys of `num_parts` parts, which are added one after another.

    Up to PARTS_PER_MERGE - 1 parts wait to be merged together. The last merge writes the parts' own dtype, so the
    number of parts must be known beforehand. Merging several parts at once gives the same result as merging them in
    turn. A single part is returned unchanged.

    The running result takes as much memory as two parts, and it is first written while the parts that it merges still
    exist. So with more than PARTS_PER_MERGE parts, the first merge takes only two.
    """

    def __init__(self, merge: Merge, num_parts: int) -> None:
        self._merge, self._num_left = merge, num_parts
        self._num_merged = PARTS_PER_MERGE if num_parts <= PARTS_PER_MERGE else 2  # parts that the next merge takes
        self._parts: list[PartialAttention] = []  # the running result, if any, and the parts that wait

    def add(self, part: PartialAttention) -> None:
        """Add a part, whose tensors a merge may overwrite. Hot: once per part."""
        assert self._num_left > 0, "more parts than announced"
        self._num_left -= 1
        self._parts.append(part)
        if self._num_left and len(self._parts) < self._num_merged:
            return
        if len(self._parts) > 1:
            dtype = part.out_THD.dtype
            self._parts = [self._merge(self._parts, running_dtype(dtype) if self._num_left else dtype)]
            self._num_merged = PARTS_PER_MERGE

    def result(self) -> PartialAttention:
        """Return the merged attention, in the dtype of the parts."""
        assert not self._num_left, f"{self._num_left} parts are missing"
        (result,) = self._parts
        return result
