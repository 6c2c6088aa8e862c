"""Shadow: one rank's copy of full KV blocks in 2 to 4 bits, to which drafts attend (shadow_spec.py).

The format in plain torch is the reference for the kernels (kernels/shadow.py, which defines how codes are packed), and
is used on a CPU.

Legend: L layers, N blocks or pages, P tokens of each, K kv heads, D head dim, W int32 words of a page in one head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from nanovllm.attention.base import AttentionBackend, PagedBatch, PartialAttention
from nanovllm.capabilities.shadow.pages import PageFill, ShadowFills
from nanovllm.device import kernel_target
from nanovllm.plan.shadow_spec import KEY_GROUP, SLICE_TOKENS, ShadowSpec
from nanovllm.plan.step_plan import StepPlan, StreamedGroup, find_payload
from nanovllm.runner.inputs import pad_tables, to_device
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


def _packed_keys(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [.., P, D] -> words, flat."""
    slices = codes.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 16 // bits, SLICE_TOKENS))
    return (slices << _places(bits)[:, None, None]).sum((-4, -1), dtype=torch.int32).flatten(-3)


def _packed_values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    slices = codes.unflatten(-2, (-1, 16 // bits, SLICE_TOKENS // 2, 2))
    words = (slices << _places(bits)[:, None, :, None]).sum((-4, -2), dtype=torch.int32)
    return words.transpose(-1, -2).flatten(-3)


def _unpacked_keys(words: torch.Tensor, bits: int, head_dim: int) -> torch.Tensor:
    """Unpack words, flat -> codes [.., P, D]."""
    slices = words.unflatten(-1, (-1, 1, SLICE_TOKENS, head_dim // 2, 1))
    codes = slices >> _places(bits)[:, None, None] & 2**bits - 1
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
    k_codes, k_scale, k_offset = _quantized(k.unflatten(1, (-1, KEY_GROUP)), 2, spec.key_bits)
    v_codes, v_scale, v_offset = _quantized(_value_groups(v, spec), 3, spec.value_bits)
    v_codes = v_codes.flatten(2)[..., : spec.head_dim]
    k_scales = [x.flatten(1).view(torch.int32) for x in (k_scale, k_offset)]
    v_scales = [x.squeeze(3).transpose(1, 2).flatten(1).view(torch.int32) for x in (v_scale, v_offset)]
    k_words, v_words = _packed_keys(k_codes.flatten(1, 2), spec.key_bits), _packed_values(v_codes, spec.value_bits)
    return torch.cat([k_words, v_words, *k_scales, *v_scales], 1)


def dequantize_page(page_KW: torch.Tensor, spec: ShadowSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a page in one layer, each fp32 [P, K, D]."""
    sizes = [spec.key_words, spec.value_words, *2 * [spec.key_scale_words], *2 * [spec.value_scale_words]]
    k_words, v_words, k_scale, k_offset, v_scale, v_offset = page_KW.split(sizes, 1)
    k = _unpacked_keys(k_words, spec.key_bits, spec.head_dim) + 2**spec.key_bits
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


class Shadow(CompanionMemory):
    def __init__(self, spec: ShadowSpec, num_pages: int, device: torch.device) -> None:
        self.spec, self.device = spec, device
        shape = (spec.num_layers, num_pages, spec.num_kv_heads, spec.head_words)
        self.pages_LNKW = torch.zeros(shape, dtype=torch.int32, device=device)
        self._num_sms = kernel_target.target_of(device).num_sms

    def begin_step(self, plan: StepPlan, cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        fills = find_payload(plan.moves.payloads, ShadowFills)
        if fills is not None and fills.resident:
            self.fill(fills.resident, *cache)

    def group_hook(self, plan: StepPlan) -> GroupHook | None:
        """Return a hook that fills pages from the streamed groups."""
        fills = find_payload(plan.moves.payloads, ShadowFills)
        if fills is None or not fills.streamed:
            return None
        pages = dict(fills.streamed)
        moves = [self._moves(group, pages) for group in plan.moves.streamed]

        def fill(layer: int, number: int, k_NPKD: torch.Tensor, v_NPKD: torch.Tensor) -> None:
            if (of_group := moves[number]) is not None:
                self._fill(of_group, k_NPKD[None], v_NPKD[None], self.pages_LNKW[layer : layer + 1])

        return fill

    def fill(self, fills: Sequence[PageFill], k_LNPKD: torch.Tensor, v_LNPKD: torch.Tensor) -> None:
        """Fill pages in all layers from blocks on the GPU."""
        moves = torch.as_tensor(to_device(np.array(fills, np.int32), self.device))
        self._fill(moves, k_LNPKD, v_LNPKD, self.pages_LNKW)

    def _moves(self, group: StreamedGroup, pages: Mapping[int, int]) -> torch.Tensor | None:
        """Return the fills from a group: int32 [pages, 2], the block and the page of each. `pages`: by cpu_block_id."""
        pairs = [(number, pages[id_]) for number, id_ in enumerate(group.cpu_block_ids) if id_ in pages]
        return torch.as_tensor(to_device(np.array(pairs, np.int32), self.device)) if pairs else None

    def launch_kernels(
        self, q_1HD: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], max_context_len: int
    ) -> None:
        """Launch every kernel on one block and one page, on a GPU."""
        from nanovllm.kernels.shadow import attend

        zeros = torch.zeros(1, 2, dtype=torch.int32, device=self.device)
        self._fill(zeros, *cache, self.pages_LNKW)
        for longest in (self.spec.page_size, max_context_len):  # without splits, and with splits
            attend(q_1HD, self.pages_LNKW[0], self.spec, zeros[0, :1], zeros, longest, 1.0, self._num_sms)

    def _fill(self, moves: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages_LNKW: torch.Tensor) -> None:
        if pages_LNKW.is_cuda:
            from nanovllm.kernels.shadow import quantize

            quantize(k, v, pages_LNKW, self.spec, moves)
            return
        for block, page in moves.tolist():
            for layer, pages_NKW in enumerate(pages_LNKW):
                pages_NKW[page] = quantize_page(k[layer, block], v[layer, block], self.spec)

    def attend(
        self, layer: int, q_BHD: torch.Tensor, batch: PagedBatch, scale: float, backend: AttentionBackend
    ) -> PartialAttention:
        """Attend, one query per sequence, to the keys of the sequence's pages. Hot: once per layer of a draft."""
        pages_NKW = self.pages_LNKW[layer]
        if pages_NKW.is_cuda:
            from nanovllm.kernels.shadow import attend

            # A graph knows only the longest possible context; most contexts are much shorter
            longest = batch.max_context_len if batch.host is not None else batch.max_context_len // 4
            lens, tables = batch.context_lens, batch.block_tables
            return PartialAttention(*attend(q_BHD, pages_NKW, self.spec, lens, tables, longest, scale, self._num_sms))
        assert batch.host is not None, "sizes are not known on the host"
        used = sorted({0, *chain.from_iterable(batch.host.block_tables)})
        cache = [dequantize_page(pages_NKW[page], self.spec) for page in used]
        k, v = (torch.stack(values).to(q_BHD.dtype) for values in zip(*cache, strict=True))
        own_tables = [[used.index(page) for page in table] for table in batch.host.block_tables]
        given = replace(
            batch,
            block_tables=torch.from_numpy(pad_tables(own_tables, batch.block_tables.shape[1])),
            host=replace(batch.host, block_tables=own_tables),
        )
        return backend.attend(q_BHD, k, v, given, scale)
