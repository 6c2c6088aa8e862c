"""Shadow: one rank's copy of full KV blocks in 3 or 4 bits, to which drafts attend (shadow_spec.py).

The format in plain torch is the reference for the kernels (kernels/shadow.py, which defines how codes are packed), and
is used on a CPU.

Legend: L layers, N blocks or pages, P tokens of each, K kv heads, D head dim, W int32 words of a page in one head, S
sinks, T tokens of a sink, 2 its K and V.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention
from nanovllm.capabilities.shadow.pages import PageFill, ShadowFills
from nanovllm.device import kernel_target
from nanovllm.plan.shadow_spec import KEY_BITS, KEY_GROUP, SINK_TOKENS, SLICE_TOKENS, ShadowSpec
from nanovllm.plan.step_plan import StepPlan, StreamedGroup, find_payload
from nanovllm.runner.inputs import Array, pad_tables, to_device
from nanovllm.runner.seams import CompanionMemory, GroupHook

_MAX_HALF = 65504.0


def _quantized(x: torch.Tensor, dim: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize fp32 numbers that share scales along `dim`. Returns codes, and scales and offsets in fp16."""
    lowest, highest = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = ((highest - lowest) / (2**bits - 1)).clamp(max=_MAX_HALF / 2**bits).half()
    offset = (lowest - scale.float() * 2**bits).clamp(-_MAX_HALF, _MAX_HALF).half()
    inverse = 1.0 / torch.where(scale == 0, 1.0, scale.float())
    codes = ((x - offset.float()) * inverse + (0.5 - 2**bits)).clamp(0, 2**bits - 1).int()
    return codes, scale, offset


def _packed_keys(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [.., P, D] -> words, flat."""
    slices = codes.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 16 // KEY_BITS, SLICE_TOKENS))
    return (slices << _places(KEY_BITS)[:, None, None]).sum((-4, -1), dtype=torch.int32).flatten(-3)


def _packed_values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    slices = codes.unflatten(-2, (-1, 16 // bits, SLICE_TOKENS // 2, 2))
    words = (slices << _places(bits)[:, None, :, None]).sum((-4, -2), dtype=torch.int32)
    return words.transpose(-1, -2).flatten(-3)


def _unpacked_keys(words: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Unpack words, flat -> codes [.., P, D]."""
    slices = words.unflatten(-1, (-1, 1, SLICE_TOKENS, head_dim // 2, 1))
    codes = slices >> _places(KEY_BITS)[:, None, None] & 2**KEY_BITS - 1
    return codes.flatten(-2).flatten(-4, -2)


def _unpacked_values(words: torch.Tensor, bits: int, head_dim: int) -> torch.Tensor:
    slices = words.unflatten(-1, (-1, 1, head_dim, SLICE_TOKENS // 2)).transpose(-1, -2).unsqueeze(-2)
    return (slices >> _places(bits)[:, None, :, None] & 2**bits - 1).flatten(-5, -2)


def _places(bits: int) -> torch.Tensor:
    """The bit at which the code of slice s and half h begins in its word: [s, h]."""
    return torch.arange(0, 16, bits)[:, None] + torch.tensor([0, 16])


def _value_groups(v: torch.Tensor, spec: ShadowSpec) -> torch.Tensor:
    """[.., D] -> [.., groups, channels of a group]; the last channel is repeated where channels are missing."""
    missing = spec.num_value_groups * spec.value_group - spec.head_dim
    padding = v[..., -1:].expand(*v.shape[:-1], missing)
    return torch.cat([v, padding], -1).unflatten(-1, (-1, spec.value_group))


def quantize_page(k_PKD: torch.Tensor, v_PKD: torch.Tensor, spec: ShadowSpec) -> torch.Tensor:
    """Compute the page of a block in one layer: int32 [K, W]."""
    k, v = (x.float().transpose(0, 1) for x in (k_PKD, v_PKD))
    k_codes, k_scale, k_offset = _quantized(k.unflatten(1, (-1, KEY_GROUP)), 2, KEY_BITS)
    v_codes, v_scale, v_offset = _quantized(_value_groups(v, spec), 3, spec.value_bits)
    v_codes = v_codes.flatten(2)[..., : spec.head_dim]
    k_scales = [x.flatten(1).view(torch.int32) for x in (k_scale, k_offset)]
    v_scales = [x.squeeze(3).transpose(1, 2).flatten(1).view(torch.int32) for x in (v_scale, v_offset)]
    k_words, v_words = _packed_keys(k_codes.flatten(1, 2)), _packed_values(v_codes, spec.value_bits)
    return torch.cat([k_words, v_words, *k_scales, *v_scales], 1)


def dequantize_page(page_KW: torch.Tensor, spec: ShadowSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a page in one layer, each fp32 [P, K, D]."""
    sizes = [spec.key_words, spec.value_words, *2 * [spec.key_scale_words], *2 * [spec.value_scale_words]]
    k_words, v_words, k_scale, k_offset, v_scale, v_offset = page_KW.split(sizes, 1)
    k = _unpacked_keys(k_words, spec.head_dim) + 2**KEY_BITS
    v = _unpacked_values(v_words, spec.value_bits, spec.head_dim) + 2**spec.value_bits
    k_scale, k_offset = (
        x.contiguous().view(torch.float16).float().unflatten(1, (-1, 1, spec.head_dim)) for x in (k_scale, k_offset)
    )
    v_scale, v_offset = (
        x.contiguous().view(torch.float16).float().unflatten(1, (-1, spec.page_size)).transpose(1, 2).unsqueeze(3)
        for x in (v_scale, v_offset)
    )
    k = (k.unflatten(1, (-1, KEY_GROUP)) * k_scale + k_offset).flatten(1, 2)
    v = (_value_groups(v, spec) * v_scale + v_offset).flatten(2)[..., : spec.head_dim]
    return k.transpose(0, 1), v.transpose(0, 1)


class ShadowMoves(NamedTuple):
    """Fills as arrays, on the host or the device."""

    pages: Array  # int32 [fills, 2]: block and page
    sinks: Array | None  # int64 [fills of sinks, 2]: block and sink


class Shadow(CompanionMemory):
    def __init__(self, spec: ShadowSpec, num_pages: int, device: torch.device) -> None:
        self.spec, self.device = spec, device
        shape = (spec.num_layers, num_pages, spec.num_kv_heads, spec.head_words)
        self.pages_LNKW = torch.zeros(shape, dtype=torch.int32, device=device)
        sinks_shape = (spec.num_layers, spec.num_sinks(num_pages), 2, SINK_TOKENS, spec.num_kv_heads, spec.head_dim)
        self.sinks_LS2TKD = torch.zeros(sinks_shape, dtype=torch.float16, device=device)
        self._unpacked: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by layer and page, on a CPU
        self._num_sms = kernel_target.target_of(device).num_sms

    def begin_step(self, plan: StepPlan, cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._unpacked.clear()  # the drafts of a step read the same pages
        fills = find_payload(plan.moves.payloads, ShadowFills)
        if fills is not None and fills.resident:
            self.fill(fills.resident, *cache)

    def group_hook(self, plan: StepPlan) -> GroupHook | None:
        """Return a hook that fills pages from the streamed groups."""
        fills = find_payload(plan.moves.payloads, ShadowFills)
        if fills is None or not fills.streamed:
            return None
        by_block = {fill.block_id: fill for fill in fills.streamed}
        moves = [self._group_moves(group, by_block) for group in plan.moves.streamed]

        def fill(layer: int, number: int, k_NPKD: torch.Tensor, v_NPKD: torch.Tensor) -> None:
            if (of_group := moves[number]) is not None:
                self._fill(of_group, k_NPKD[None], v_NPKD[None], slice(layer, layer + 1))

        return fill

    def fill(self, fills: Sequence[PageFill], k_LNPKD: torch.Tensor, v_LNPKD: torch.Tensor) -> None:
        """Fill pages and sinks in all layers from blocks on the GPU."""
        self._fill(self._moves(fills), k_LNPKD, v_LNPKD, slice(None))

    def _group_moves(self, group: StreamedGroup, fills: Mapping[int, PageFill]) -> ShadowMoves | None:
        """Return the fills from a group, whose blocks are numbered, or None. `fills`: by cpu_block_id."""
        found = [fills[id_]._replace(block_id=number) for number, id_ in enumerate(group.cpu_block_ids) if id_ in fills]
        return self._moves(found) if found else None

    def _moves(self, fills: Sequence[PageFill]) -> ShadowMoves:
        pages = np.array([(fill.block_id, fill.page) for fill in fills], np.int32)
        sinks = [(fill.block_id, fill.sink) for fill in fills if fill.sink >= 0]
        return to_device(ShadowMoves(pages, np.array(sinks, np.int64) if sinks else None), self.device)

    def launch_kernels(
        self,
        q_THD: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        max_context_len: int,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """Launch every kernel on one block and one page, on a GPU."""
        from nanovllm.kernels.shadow import attend

        zeros, memory = (
            torch.zeros(1, 2, dtype=torch.int32, device=self.device),
            (self.pages_LNKW[0], self.sinks_LS2TKD[0]),
        )
        self._fill(ShadowMoves(zeros, zeros.long()), *cache, slice(None))
        for longest in (self.spec.page_size, max_context_len):  # without splits, and with splits
            attend(q_THD[:1], *memory, self.spec, zeros[0, :1], zeros, longest, 1.0, self._num_sms)

    def _fill(self, moves: ShadowMoves, k: torch.Tensor, v: torch.Tensor, layers: slice) -> None:
        """`k` and `v`: blocks of these layers, [L, N, P, K, D]."""
        if moves.sinks is not None:
            blocks, sinks = moves.sinks.unbind(1)
            first = torch.stack((k[:, blocks, :SINK_TOKENS], v[:, blocks, :SINK_TOKENS]), 2).float()
            self.sinks_LS2TKD[layers][:, sinks] = first.clamp(-_MAX_HALF, _MAX_HALF).half()
        pages_LNKW = self.pages_LNKW[layers]
        if pages_LNKW.is_cuda:
            from nanovllm.kernels.shadow import quantize

            quantize(k, v, pages_LNKW, self.spec, moves.pages)
            return
        for block, page in moves.pages.tolist():
            for layer, pages_NKW in enumerate(pages_LNKW):
                pages_NKW[page] = quantize_page(k[layer, block], v[layer, block], self.spec)

    def attend(
        self, layer: int, q_BHD: torch.Tensor, batch: PagedBatch, scale: float, backend: AttentionBackend
    ) -> PartialAttention:
        """Attend, one query per sequence, to the keys of the sequence's pages. A row of the batch's block table begins
        with the sequence's sink or -1; its pages follow. Hot: once per layer of a draft.
        """
        pages_NKW, sinks_S2TKD = self.pages_LNKW[layer], self.sinks_LS2TKD[layer]
        if pages_NKW.is_cuda:
            from nanovllm.kernels.shadow import attend

            # A graph knows only the longest possible context; most contexts are much shorter
            longest = batch.max_context_len if batch.host is not None else batch.max_context_len // 4
            lens, tables = batch.context_lens, batch.block_tables
            memory = pages_NKW, sinks_S2TKD
            return PartialAttention(*attend(q_BHD, *memory, self.spec, lens, tables, longest, scale, self._num_sms))
        assert batch.host is not None, "sizes are not known on the host"
        tables_of_pages = [table[1:] for table in batch.host.block_tables]
        used = sorted({0, *chain.from_iterable(tables_of_pages)})
        for page in used:
            if (layer, page) not in self._unpacked:
                self._unpacked[layer, page] = dequantize_page(pages_NKW[page], self.spec)
        cache = [self._unpacked[layer, page] for page in used]
        k, v = (torch.stack(values).to(q_BHD.dtype) for values in zip(*cache, strict=True))
        own_tables = [[used.index(page) for page in table] for table in tables_of_pages]
        for (sink, *_), table in zip(batch.host.block_tables, own_tables, strict=True):
            if sink >= 0 and table:
                for values, first in zip((k, v), sinks_S2TKD[sink], strict=True):
                    values[table[0], :SINK_TOKENS] = first[: self.spec.page_size]
        given = replace(
            batch,
            block_tables=torch.from_numpy(pad_tables(own_tables, batch.block_tables.shape[1])),
            host=replace(batch.host, block_tables=own_tables),
        )
        return backend.attend(q_BHD, k, v, given, scale)
