"""Decode steps as CUDA graphs: one replay instead of some hundred launches.

A graph is captured for each of a list of batch sizes; a step runs the smallest that fits, its last rows padded with
sequences that have no keys and store nothing. All graphs read the same static inputs and share one memory pool, so
only one may be in use at a time: replays follow each other on the compute stream, and a step's logits are read before
the next replay overwrites them.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

from nanovllm.attention.base import PagedBatch, StepAttention
from nanovllm.models.decoder import CausalLM
from nanovllm.utils.memory import format_bytes

logger = logging.getLogger("nanovllm")

_TOKEN_ARRAYS = ("input_ids", "positions", "rope_lens", "slot_mapping")  # int64, one entry per sequence


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32 ... and max_num_seqs itself."""
    sizes = [1, 2, 4, 8, *range(16, max_num_seqs + 1, 8), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


class DecodeGraphs:
    """`make_attention(slot_mapping, batch)` makes the paged attention over the cache the graphs read."""

    def __init__(
        self,
        model: CausalLM,
        make_attention: Callable[[torch.Tensor, PagedBatch], StepAttention],
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.model, self.make_attention = model, make_attention
        self.sizes = graph_sizes(max_num_seqs)
        self.max_model_len = max_model_len
        num_columns = -(-max_model_len // block_size)
        with torch.device(device):
            self._tokens = torch.zeros(len(_TOKEN_ARRAYS), max_num_seqs, dtype=torch.int64)
            self._context_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
            self._block_tables = torch.zeros(max_num_seqs, num_columns, dtype=torch.int32)
            self._cu_seqlens_q = torch.arange(max_num_seqs + 1, dtype=torch.int32)
        self._host_tables = np.zeros((max_num_seqs, num_columns), dtype=np.int32)  # what _block_tables holds
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}

    def capture(self, show_progress: bool) -> None:
        """Capture every size, the largest first, whose memory the others then share."""
        start_s, start_bytes = time.perf_counter(), torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        for size in tqdm(self.sizes[::-1], desc="Capturing decode graphs", unit="size", disable=not show_progress):
            self._forward(size)  # compiles and tunes what this size needs, outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._logits[size] = self._forward(size)
            self._graphs[size] = graph
        seconds, num_bytes = time.perf_counter() - start_s, start_bytes - torch.cuda.mem_get_info()[0]
        logger.info("captured %d decode graphs in %.1f s, %s", len(self.sizes), seconds, format_bytes(num_bytes))

    def _forward(self, size: int) -> torch.Tensor:
        input_ids, positions, rope_lens, slot_mapping = (row[:size] for row in self._tokens)
        batch = PagedBatch(
            cu_seqlens_q=self._cu_seqlens_q[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._block_tables[:size],
            max_query_len=1,
            max_context_len=self.max_model_len,
            causal=True,
        )
        attention = self.make_attention(slot_mapping, batch)
        hidden = self.model(input_ids, positions, attention, rope_lens if self.model.needs_rope_lens else None)
        return self.model.compute_logits(hidden)

    def run(self, arrays: dict[str, np.ndarray], fill_pending: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Replay for the decode step described by inputs.build_arrays. Returns logits [B, vocab_size], valid until
        the next replay. `fill_pending` writes the ids still on the device into the static input ids. Hot.
        """
        num_seqs = len(arrays["input_ids"])
        size = self.sizes[bisect_left(self.sizes, num_seqs)]
        staging = torch.empty(len(_TOKEN_ARRAYS) + 1, size, dtype=torch.int64, pin_memory=True)
        rows = staging.numpy()
        rows[:, num_seqs:] = 0
        rows[_TOKEN_ARRAYS.index("slot_mapping"), num_seqs:] = -1
        for row, name in zip(rows, (*_TOKEN_ARRAYS, "context_lens"), strict=True):
            row[:num_seqs] = arrays[name]
        inputs = staging.to(self._tokens.device, non_blocking=True)
        self._tokens[:, :size].copy_(inputs[:-1])
        self._context_lens[:size].copy_(inputs[-1])
        fill_pending(self._tokens[0])
        self._copy_tables(arrays["block_tables"])
        self._graphs[size].replay()
        return self._logits[size][:num_seqs]

    def _copy_tables(self, tables: np.ndarray) -> None:
        """Bring the block tables up to date; most steps change none. Columns past a context are never read."""
        num_seqs, num_columns = tables.shape
        known = self._host_tables[:num_seqs, :num_columns]
        if np.array_equal(known, tables):
            return
        known[:] = tables
        staging = torch.empty(num_seqs, self._host_tables.shape[1], dtype=torch.int32, pin_memory=True)
        staging.numpy()[:] = self._host_tables[:num_seqs]
        self._block_tables[:num_seqs].copy_(staging, non_blocking=True)
