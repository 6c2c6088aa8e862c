"""Steps as CUDA graphs: decode steps from token ids to sampled tokens, and steps with short chunks of prompts. A step
takes one copy and one replay.

A graph is captured for each of several sizes. A step replays the smallest graph that fits, and the remaining rows are
padding: sequences that have no keys and store nothing. All graphs read the same static inputs, leave their logits and
tokens in the same static buffers (GraphBuffers), and share one memory pool. So only one graph may be in use at a time:
replays follow each other on the compute stream, and a step's logits are read before the next replay overwrites them. A
graph must not keep private tensors alive, because graphs of other sizes could then not share its memory.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import takewhile
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from nanovllm.attention.base import StepAttention
from nanovllm.device.cuda import new_stream
from nanovllm.kernels.state_tensors import LayerStates
from nanovllm.layers.rotary_embedding import KVCells
from nanovllm.models.decoder import CausalLM
from nanovllm.plan.step_limits import MAX_GRAPH_CHUNKS, MixedSize
from nanovllm.plan.step_plan import StepPlan
from nanovllm.runner.graph_inputs import GraphBuffers, GraphShape
from nanovllm.runner.inputs import StepInputs
from nanovllm.runner.kv_memory import KVMemory, PagedAttention
from nanovllm.runner.seams import CpuRows
from nanovllm.utils import progress_bar


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for all captures on a device. cuBLAS keeps a 32 MiB workspace for every
    stream it has seen.
    """
    return new_stream(device)


@contextmanager
def capture(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the work that is enqueued inside on the current stream, which must not be the default stream. The capture
    also ends when an exception is raised inside.

    A stream that stays in capture mode makes every later call of the process fail, even `torch.cuda.synchronize`, and
    hides the original error. torch.cuda.graph also ends its captures, but before each it collects garbage and empties
    the allocator's cache, which takes 1.7 s of a start-up with 67 graphs.

    `pool` is a graph_pool_handle(). Only this thread must avoid calls that a capture does not allow. In CUDA's default
    mode, an allocation in another thread, for example in a step of another engine, would fail and also invalidate the
    capture.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield graph
        graph.capture_end()  # may also fail, if memory runs out or a call inside has invalidated the capture
    except BaseException:
        abandon(graph)
        raise


def abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture in which an exception was raised, and leave the process as if the capture had never begun."""
    try:
        graph.capture_end()
    except RuntimeError:  # a call that is not allowed in a capture has invalidated the capture
        _leave_capture_mode()
    with suppress(RuntimeError):
        graph.reset()


def _leave_capture_mode() -> None:
    """Make torch's random generators leave capture mode.

    After an invalidated capture they stay in capture mode until another capture succeeds.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    with suppress(RuntimeError):  # if there is no memory for a generator, an empty capture is enough
        torch.empty(1, device="cuda").zero_()
    graph.capture_end()
    graph.reset()


Size = TypeVar("Size", int, MixedSize)


class GraphKind(ABC, Generic[Size]):
    """The graphs of one kind of step, captured for several sizes. Owned by the runner, without a reference to the
    runner.
    """

    num_pools: ClassVar[int] = 1  # memory pools, each shared by all sizes

    def __init__(self, name: str, sizes: list[Size]) -> None:
        """`sizes`: ascending."""
        self.name = name
        self.sizes: list[Size] = sizes
        self._graphs: dict[Size, list[torch.cuda.CUDAGraph]] = {}  # by size, in the order of capture

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    def largest_sizes(self) -> Sequence[Size]:
        """Sizes of the graphs that can need the most memory."""
        return self.sizes[-1:]

    def capture(self, model: CausalLM, sizes: Sequence[Size], show_progress: bool) -> None:
        """Capture these sizes, the largest first, so that the other sizes can share its memory."""
        pools = [torch.cuda.graph_pool_handle() for _ in range(self.num_pools)]
        largest_first = sorted(sizes, reverse=True)
        for size in progress_bar(largest_first, desc=f"Capturing {self.name}", unit="size", is_wanted=show_progress):
            with model.skipping_inner_layers():  # inner layers launch no other kernels than the first and last
                self.launch_kernels(model, size)  # loads this size's kernels outside the capture
            torch.cuda.synchronize()
            with torch.cuda.stream(capture_stream(self.device)):
                self._capture_size(model, size, pools)

    def reset(self) -> None:
        """Destroy all graphs."""
        for graphs in self._graphs.values():
            for graph in graphs:
                graph.reset()
        self._graphs.clear()

    def _capture_size(self, model: CausalLM, size: Size, pools: list[Any]) -> None:
        """Capture the graphs of one size on the current stream. The graphs of all sizes share the memory `pools`."""
        with capture(pools[0]) as graph:
            self.launch_kernels(model, size)
        self._graphs[size] = [graph]

    @abstractmethod
    def launch_kernels(self, model: CausalLM, size: Size) -> None:
        """Launch the kernels in the graphs of a size one by one, without a graph."""


class StepGraphs(GraphKind[int]):
    """Graphs of decode steps. A size is a number of tokens, each of which is a row."""

    def __init__(
        self, name: str, sizes: list[int], max_query_len: int, buffers: GraphBuffers, memory: KVMemory
    ) -> None:
        """`max_query_len`: the most rows of a sequence; 1 for steps without draft tokens."""
        super().__init__(name, sizes)
        self.max_query_len, self.buffers, self.memory = max_query_len, buffers, memory

    @property
    def device(self) -> torch.device:
        return self.buffers.device

    def size_for(self, num_rows: int) -> int:
        """Return the smallest size that holds `num_rows` rows."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def paged(self, size: int) -> PagedAttention:
        """Return the attention of a graph over the keys that are on the GPU."""
        slot_mapping, query_len = self.buffers.tensors(GraphShape.decode(size)).slot_mapping, self.query_len(size)
        columns = self.buffers.companion_columns(size, query_len)
        return self.memory.paged_attention(slot_mapping, self.buffers.decode_batch(size, query_len), columns)

    def query_len(self, size: int) -> int:
        """Return the most rows of a sequence in the graph of a size. Up to 16 rows have a faster kernel."""
        return min(size, self.max_query_len)

    @abstractmethod
    def replay(self, inputs: StepInputs, cpu_rows: CpuRows | None = None) -> torch.Tensor:
        """Run a decode step. Returns its logits [T, vocab_size] and leaves its tokens in `buffers.sampled_ids`. Hot."""


class DecodeGraphs(StepGraphs):
    """Decode steps whose keys are all on the GPU: one graph for each size."""

    def launch_kernels(self, model: CausalLM, size: int) -> None:
        self.buffers.forward(model, size, self.paged(size))

    def replay(self, inputs: StepInputs, cpu_rows: CpuRows | None = None) -> torch.Tensor:
        assert not inputs.groups and cpu_rows is None, "a step whose keys are all on the GPU streams no groups"
        num_rows = len(inputs.input_ids)
        size = self.size_for(num_rows)
        self.buffers.fill_decode(inputs, size)
        self._graphs[size][0].replay()
        return self.buffers.logits(num_rows)


# -- answers concurrent with short chunks of prompts -------------------------------------------------------------


class _MixedAttention:
    """A StepAttention that delegates the rows to `rows` and all other tokens to `chunks`."""

    def __init__(self, rows: StepAttention, chunks: StepAttention, is_row: torch.Tensor) -> None:
        """`is_row`: bool [R], for the first tokens of the step."""
        self._rows, self._chunks, self._is_row_R11 = rows, chunks, is_row[:, None, None]

    def cells(self, layer: int) -> KVCells:
        return self._chunks.cells(layer)

    def layer_memory(self, layer: int) -> LayerStates:
        return self._chunks.layer_memory(layer)

    def attend(self, layer: int, q_THD: torch.Tensor, sinks_H: torch.Tensor | None = None) -> torch.Tensor:
        if len(q_THD) == 0:
            return q_THD
        out_THD = self._chunks.attend(layer, q_THD, sinks_H)
        first = slice(0, len(self._is_row_R11))
        rows_RHD = self._rows.attend(layer, q_THD[first], sinks_H)
        out_THD[first] = torch.where(self._is_row_R11, rows_RHD, out_THD[first])
        return out_THD


class MixedGraphs(GraphKind[MixedSize]):
    """Steps in which answers run concurrently with short chunks of prompts, from token ids to hidden states.

    Launched kernel by kernel, such a step costs the host 0.7 ms per layer, many times what the GPU needs for a short
    chunk. All keys of the step must be on the GPU, and all layers must attend to all keys. Logits and sampling follow
    outside of the graph, because only some of the tokens are sampled from.

    The tokens of a step are packed as usual, followed by padding. Sequences with a single token come first: they are
    the step's *rows*, and the decode kernel attends to them. The later sequences are the step's *chunks*, which the
    prefill kernel attends to. How many of the tokens are rows is read on the device:

        tokens     | row | row | chunk    | chunk  | padding |
        decode     |     R rows     |                           its results after the last row are discarded
        prefill                | up to C tokens    |
    """

    def __init__(self, buffers: GraphBuffers, memory: KVMemory, hidden_size: int) -> None:
        """`hidden_size`: of the hidden states."""
        super().__init__("mixed", buffers.mixed_sizes)
        self.buffers, self._memory = buffers, memory
        self._hidden = torch.zeros(self.sizes[-1].num_tokens, hidden_size, dtype=memory.dtype, device=buffers.device)

    @property
    def device(self) -> torch.device:
        return self.buffers.device

    @property
    def largest_sizes(self) -> list[MixedSize]:
        """Include shorter chunks: more programs share their keys, and leave results for all tokens of the step."""
        return [size for size in self.sizes if size.num_rows == self.sizes[-1].num_rows]

    # -- what the graphs capture -----------------------------------------------------------------------------------

    def launch_kernels(self, model: CausalLM, size: MixedSize) -> None:
        shape, num_rows, make_attention = GraphShape.mixed(size), size.num_rows, self._memory.paged_attention
        given, batch = self.buffers.tensors(shape), self.buffers.batch
        row, first_chunk = self.buffers.single_queries(num_rows), shape.first_chunk
        chunk_lens = given.context_lens[first_chunk:]
        attention = _MixedAttention(
            make_attention(given.slot_mapping, batch(row, given.context_lens[:num_rows], 1)),
            make_attention(
                given.slot_mapping, batch(given.cu_seqlens_q, chunk_lens, size.num_chunk_tokens, first_seq=first_chunk)
            ),
            is_row=row[:-1] < given.cu_seqlens_q[0],
        )
        self._hidden[: size.num_tokens].copy_(self.buffers.run_layers(model, shape, attention))

    # -- one step ------------------------------------------------------------------------------------------------

    def find_size(self, plan: StepPlan) -> MixedSize | None:
        """Return the smallest size that can run the step, or None. All keys of the step must be on the GPU."""
        num_rows = _num_rows(plan)
        if len(plan.sequences) - num_rows > MAX_GRAPH_CHUNKS:
            return None
        needed = num_rows, plan.num_tokens - num_rows
        return next((size for size in self.sizes if size[0] >= needed[0] and size[1] >= needed[1]), None)

    def replay(self, plan: StepPlan, inputs: StepInputs, size: MixedSize) -> torch.Tensor:
        """Run a step with the size that `find_size` found. Returns the hidden states of its tokens, [T, hidden_size],
        valid until the next replay. Hot.
        """
        num_rows = _num_rows(plan)
        chunk_ends = inputs.cu_seqlens_q[num_rows:]  # begins with the end of the rows
        cu_seqlens_q = np.full(MAX_GRAPH_CHUNKS + 1, plan.num_tokens, np.int32)  # chunks after the last have no queries
        cu_seqlens_q[: len(chunk_ends)] = chunk_ends
        self.buffers.fill(inputs, GraphShape.mixed(size), num_rows, cu_seqlens_q)
        self._graphs[size][0].replay()
        return self._hidden[: plan.num_tokens]


def _num_rows(plan: StepPlan) -> int:
    return sum(1 for _ in takewhile(lambda step: step.num_tokens == 1, plan.sequences))
