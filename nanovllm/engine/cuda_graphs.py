"""Decode steps as CUDA graphs: one replay instead of some hundred launches.

A graph is captured for each of a list of batch sizes; a step runs the smallest that fits, its last rows padded with
sequences that have no keys and store nothing. All graphs read the same static inputs (DecodeInputs) and share one
memory pool, so only one may be in use at a time: replays follow each other on the compute stream, and a step's logits
are read before the next replay overwrites them.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from tqdm import tqdm

from nanovllm.attention.base import PagedBatch, StepAttention
from nanovllm.models.decoder import CausalLM
from nanovllm.utils.memory import format_bytes

logger = logging.getLogger("nanovllm")

_TOKEN_ARRAYS = ("input_ids", "positions", "rope_lens", "slot_mapping")  # int64, one entry per sequence


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of the process: cuBLAS keeps a workspace of 32 MiB for every stream it has seen."""
    return torch.cuda.Stream(device)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32 ... and max_num_seqs itself."""
    sizes = [1, 2, 4, 8, *range(16, max_num_seqs + 1, 8), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


class DecodeInputs:
    """The static inputs of every decode graph, for up to `max_num_seqs` sequences of `max_model_len` tokens."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.max_model_len = max_model_len
        self.device = device
        self.sizes = graph_sizes(max_num_seqs)
        num_columns = -(-max_model_len // block_size)
        with torch.device(device):
            self._tokens = torch.zeros(len(_TOKEN_ARRAYS), max_num_seqs, dtype=torch.int64)
            self._context_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
            self._block_tables = torch.zeros(max_num_seqs, num_columns, dtype=torch.int32)
            self.cu_seqlens_q = torch.arange(max_num_seqs + 1, dtype=torch.int32)
        self._host_tables = np.zeros((max_num_seqs, num_columns), dtype=np.int32)  # what _block_tables holds

    def size_for(self, num_seqs: int) -> int:
        """The smallest graph size that holds so many sequences."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def tokens(self, size: int) -> dict[str, torch.Tensor]:
        """input_ids, positions, rope_lens and slot_mapping, int64 [size]."""
        return dict(zip(_TOKEN_ARRAYS, self._tokens[:, :size], strict=True))

    def batch(self, size: int) -> PagedBatch:
        """The paged keys of `size` sequences, one query each."""
        return PagedBatch(
            cu_seqlens_q=self.cu_seqlens_q[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._block_tables[:size],
            max_query_len=1,
            max_context_len=self.max_model_len,
            causal=True,
        )

    def fill(self, arrays: dict[str, np.ndarray], size: int, fill_pending: Callable[[torch.Tensor], None]) -> None:
        """Enqueue the copies of a decode step's arrays (inputs.build_arrays), padded to `size` sequences.

        `fill_pending` writes the token ids that are still on the device into the static input ids. Hot.
        """
        num_seqs = len(arrays["input_ids"])
        staging = torch.empty(len(_TOKEN_ARRAYS) + 1, size, dtype=torch.int64, pin_memory=True)
        rows = staging.numpy()
        rows[:, num_seqs:] = 0
        rows[_TOKEN_ARRAYS.index("slot_mapping"), num_seqs:] = -1
        for row, name in zip(rows, (*_TOKEN_ARRAYS, "context_lens"), strict=True):
            row[:num_seqs] = arrays[name]
        on_device = staging.to(self.device, non_blocking=True)
        self._tokens[:, :size].copy_(on_device[:-1])
        self._context_lens[:size].copy_(on_device[-1])
        fill_pending(self._tokens[_TOKEN_ARRAYS.index("input_ids")])
        self._copy_tables(arrays["block_tables"])

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


class DecodeGraphs:
    """Decode steps whose keys are all on the GPU. `make_attention(slot_mapping, batch)`: the paged attention."""

    def __init__(
        self,
        model: CausalLM,
        inputs: DecodeInputs,
        make_attention: Callable[[torch.Tensor, PagedBatch], StepAttention],
    ) -> None:
        self.model, self.inputs, self.make_attention = model, inputs, make_attention
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, torch.Tensor] = {}

    def capture(self, show_progress: bool) -> None:
        """Capture every size, the largest first, whose memory the others then share."""
        start_s, start_bytes = time.perf_counter(), torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        sizes = self.inputs.sizes[::-1]
        for size in tqdm(sizes, desc="Capturing decode graphs", unit="size", disable=not show_progress):
            self._forward(size)  # compiles what this size needs, outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(capture_stream(self.inputs.device)):
                # torch.cuda.graph would collect garbage and empty the cache for each: 1.7 s of a start with 67 sizes
                graph.capture_begin(pool=pool)
                self._logits[size] = self._forward(size)
                graph.capture_end()
            self._graphs[size] = graph
        seconds, num_bytes = time.perf_counter() - start_s, start_bytes - torch.cuda.mem_get_info()[0]
        logger.info("captured %d decode graphs in %.1f s, %s", len(sizes), seconds, format_bytes(num_bytes))

    def reset(self) -> None:
        """Destroy all graphs."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _forward(self, size: int) -> torch.Tensor:
        tokens = self.inputs.tokens(size)
        attention = self.make_attention(tokens["slot_mapping"], self.inputs.batch(size))
        return run_model(self.model, tokens, attention)

    def run(self, arrays: dict[str, np.ndarray], fill_pending: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Replay for a decode step. Returns logits [B, vocab_size], valid until the next replay. Hot."""
        num_seqs = len(arrays["input_ids"])
        size = self.inputs.size_for(num_seqs)
        self.inputs.fill(arrays, size, fill_pending)
        self._graphs[size].replay()
        return self._logits[size][:num_seqs]


def run_model(model: CausalLM, tokens: dict[str, torch.Tensor], attention: StepAttention) -> torch.Tensor:
    """Logits of every token."""
    rope_lens = tokens["rope_lens"] if model.needs_rope_lens else None
    return model.compute_logits(model(tokens["input_ids"], tokens["positions"], attention, rope_lens))
