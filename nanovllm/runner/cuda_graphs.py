"""Decode steps as CUDA graphs, from the token ids to the sampled tokens: one copy and one replay a step.

A graph is captured for each of a list of batch sizes; a step runs the smallest that fits, its last rows padded with
sequences that have no keys and store nothing. All graphs read the same static inputs and leave their logits and tokens
in the same static buffers (DecodeInputs), and share one memory pool, so only one may be in use at a time: replays
follow each other on the compute stream, and a step's logits are read before the next replay overwrites them. A graph
must keep no tensor of its own alive, since the other sizes could then not share its memory.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from tqdm import tqdm

from nanovllm.attention.base import PagedBatch, StepAttention
from nanovllm.core.step_limits import graph_sizes
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.layers.sampler import sample
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.graph_capture import capture, capture_stream
from nanovllm.runner.inputs import SAMPLING_ARRAYS

_ARRAYS = {  # of a step, one entry per sequence
    "input_ids": torch.int64,
    "token_source": torch.int64,
    "positions": torch.int64,
    "rope_lens": torch.int64,
    "slot_mapping": torch.int64,
    "context_lens": torch.int32,
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "sample_position": torch.int64,
}


def _even(num_entries: int) -> int:
    """Round up to an even count so that every array is 16-byte aligned; Triton recompiles a kernel when a pointer's
    alignment changes.
    """
    return num_entries + num_entries % 2


class DecodeInputs:
    """What every decode graph reads, for up to `max_num_seqs` sequences of `max_model_len` tokens, and what it leaves.

    `sampled` int64 [max_num_seqs] are the tokens of the last step, by their row in it. They lie before the step's
    own input ids, so that one index, `token_source`, finds an id that the host knows or one that it does not know yet.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        padded_vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`padded_vocab_size`: entries in a row of logits (ParallelLMHead), the first `vocab_size` of which count;
        `dtype`: that of the logits.
        """
        self.vocab_size = vocab_size
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.device = device
        self.sizes = graph_sizes(max_num_seqs)
        num_columns = -(-max_model_len // block_size)
        with torch.device(device):
            self._static = torch.zeros(_even(max_num_seqs) * (1 + len(_ARRAYS)), dtype=torch.int64)
            self._block_tables = torch.zeros(max_num_seqs, num_columns, dtype=torch.int32)
            self.cu_seqlens_q = torch.arange(max_num_seqs + 1, dtype=torch.int32)
            self._logits = torch.zeros(max_num_seqs, padded_vocab_size, dtype=dtype)
        self.sampled = self._static[:max_num_seqs]
        self._first_row = _even(max_num_seqs)  # where the step's arrays begin
        self._host_tables = np.zeros((max_num_seqs, num_columns), dtype=np.int32)  # what _block_tables holds

    def size_for(self, num_seqs: int) -> int:
        """The smallest graph size that holds so many sequences."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def _rows(self, size: int) -> torch.Tensor:
        """The step's arrays at one size, int64 [arrays, _even(size)]; those of 4 bytes fill half."""
        return self._static[self._first_row :][: len(_ARRAYS) * _even(size)].view(len(_ARRAYS), -1)

    def arrays(self, size: int) -> dict[str, torch.Tensor]:
        """The static arrays at one size, each [size]."""
        rows = zip(_ARRAYS.items(), self._rows(size), strict=True)
        return {name: row.view(dtype)[:size] for (name, dtype), row in rows}

    def input_ids(self, size: int) -> torch.Tensor:
        """The tokens of the step [size], those that the last step sampled among them.

        Where the last step found no valid token (sampler.INVALID_TOKEN) the model runs on token 0: the host is about to
        end that request, and the others must not notice.
        """
        return self._static.index_select(0, self.arrays(size)["token_source"]).clamp_(min=0)

    def sampling(self, size: int) -> SamplingTensors:
        """How the rows of the step are sampled."""
        arrays = self.arrays(size)
        return SamplingTensors(*(arrays[name] for name in SAMPLING_ARRAYS))

    def batch(self, size: int) -> PagedBatch:
        """The paged keys of `size` sequences, one query each."""
        return PagedBatch(
            cu_seqlens_q=self.cu_seqlens_q[: size + 1],
            context_lens=self.arrays(size)["context_lens"],
            block_tables=self._block_tables[:size],
            max_query_len=1,
            max_context_len=self.max_model_len,
            causal=True,
        )

    def run(self, model: CausalLM, size: int, attention: StepAttention) -> None:
        """What the graphs of `size` capture: leaves logits in `logits(...)` and the tokens in `sampled`."""
        arrays = self.arrays(size)
        rope_lens = arrays["rope_lens"] if model.needs_rope_lens else None
        hidden = model(self.input_ids(size), arrays["positions"], attention, rope_lens)
        logits = model.compute_logits(hidden, out=self._logits[:size])
        sample(logits, self.sampling(size), self.sampled[:size])

    def logits(self, num_seqs: int) -> torch.Tensor:
        """What the last replay left for its first sequences, [num_seqs, vocab_size]."""
        return self._logits[:num_seqs, : self.vocab_size]

    def fill(self, arrays: dict[str, np.ndarray], size: int) -> None:
        """Enqueue the copy of a decode step's arrays (inputs.build_arrays), padded to `size` sequences. Hot."""
        num_seqs = len(arrays["input_ids"])
        token_source = self._first_row + np.arange(num_seqs)
        token_source[arrays["pending_tokens"]] = arrays["pending_rows"]
        staging = torch.zeros(len(_ARRAYS), _even(size), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        for name, row in zip(_ARRAYS, staging.numpy(), strict=True):
            values = token_source if name == "token_source" else arrays[name]
            row.view(values.dtype)[:num_seqs] = values
            if name == "slot_mapping":
                row[num_seqs:] = -1
        self._rows(size).copy_(staging, non_blocking=True)
        self._copy_tables(arrays["block_tables"])

    def _copy_tables(self, tables: np.ndarray) -> None:
        """Bring the block tables up to date; most steps change none. Columns past a context are never read."""
        num_seqs, num_columns = tables.shape
        known = self._host_tables[:num_seqs, :num_columns]
        if np.array_equal(known, tables):
            return
        known[:] = tables
        pin_memory = self.device.type == "cuda"
        staging = torch.empty(num_seqs, self._host_tables.shape[1], dtype=torch.int32, pin_memory=pin_memory)
        staging.numpy()[:] = self._host_tables[:num_seqs]
        self._block_tables[:num_seqs].copy_(staging, non_blocking=True)


MakeAttention: TypeAlias = Callable[[torch.Tensor, PagedBatch], StepAttention]  # (slot_mapping, batch) -> the paged one


class DecodeGraphs:
    """Decode steps whose keys are all on the GPU. Keeps nothing of its runner: the two would hold each other."""

    name: ClassVar[str] = "resident"

    def __init__(self, inputs: DecodeInputs) -> None:
        self.inputs = inputs
        self.sizes = inputs.sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(
        self, model: CausalLM, make_attention: MakeAttention, sizes: Sequence[int], show_progress: bool
    ) -> None:
        """Capture these sizes, the largest first, whose memory the others then share."""
        pool = torch.cuda.graph_pool_handle()
        for size in tqdm(
            sorted(sizes, reverse=True), desc="Capturing decode graphs", unit="size", disable=not show_progress
        ):
            self.run_eager(model, make_attention, size)  # loads the kernels that this size needs, outside the capture
            torch.cuda.synchronize()
            with torch.cuda.stream(capture_stream(self.inputs.device)), capture(pool) as graph:
                self.run_eager(model, make_attention, size)
            self._graphs[size] = graph

    def reset(self) -> None:
        """Destroy all graphs."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def run_eager(self, model: CausalLM, make_attention: MakeAttention, size: int) -> None:
        """Launch what the graph of a size holds, kernel by kernel."""
        attention = make_attention(self.inputs.arrays(size)["slot_mapping"], self.inputs.batch(size))
        self.inputs.run(model, size, attention)

    def run(self, arrays: dict[str, np.ndarray]) -> torch.Tensor:
        """Replay for a decode step; its tokens are in `inputs.sampled`. Returns logits [B, vocab_size]. Hot."""
        num_seqs = len(arrays["input_ids"])
        size = self.inputs.size_for(num_seqs)
        self.inputs.fill(arrays, size)
        self._graphs[size].replay()
        return self.inputs.logits(num_seqs)
