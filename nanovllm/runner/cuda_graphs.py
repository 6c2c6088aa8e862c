"""Decode steps as CUDA graphs, from token ids to sampled tokens. A step takes one copy and one replay.

A graph is captured for each of several sizes, in tokens. A step replays the smallest one that fits, and the remaining
rows are padding: sequences that have no keys and store nothing. All graphs read the same static inputs, leave their
logits and tokens in the same static buffers (GraphBuffers), and share one memory pool. Only one of them may therefore
be in use at a time: replays follow each other on the compute stream, and a step's logits are read before the next
replay overwrites them. A graph must not keep tensors of its own alive, because other sizes could then not share its
memory.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from tqdm import tqdm

from nanovllm.attention.base import PagedBatch, StepAttention
from nanovllm.core.step_limits import MixedSize
from nanovllm.device.cuda import new_stream
from nanovllm.kvcache.transfer.cpu_attention import CpuRows
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.graph_inputs import GraphBuffers, GraphShape
from nanovllm.runner.inputs import StepInputs


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream for all captures on a device. cuBLAS keeps a 32 MiB workspace for every stream it has seen."""
    return new_stream(device)


@contextmanager
def capture(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the work that is enqueued inside on the current stream, which must not be the default stream. The capture
    ends whatever happens inside.

    A stream that is left in capture mode makes every later call of the process fail, even `torch.cuda.synchronize`, and
    hides the original error. torch.cuda.graph ends its captures too, but before each it collects garbage and empties
    the allocator's cache, which takes 1.7 s of a start-up with 67 graphs.

    `pool` is a graph_pool_handle(). Only this thread must avoid calls that a capture does not allow. In CUDA's default
    mode, an allocation in another thread, for example in a step of another engine, would fail and also invalidate the
    capture.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield graph
        graph.capture_end()  # may fail too, if memory runs out or a call inside has invalidated the capture
    except BaseException:
        abandon(graph)
        raise


def abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture in which an exception was raised, and leave the process as if the capture had never begun."""
    try:
        graph.capture_end()
    except RuntimeError:  # a call that is not allowed in a capture has invalidated it
        _leave_capture_mode()
    with suppress(RuntimeError):
        graph.reset()


def _leave_capture_mode() -> None:
    """Make torch's random generators leave capture mode.

    After an invalidated capture they stay in it until another capture succeeds.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    with suppress(RuntimeError):  # if there is no memory for this, an empty capture will do
        torch.empty(1, device="cuda").zero_()
    graph.capture_end()
    graph.reset()


Size = TypeVar("Size", int, MixedSize)
Attention = TypeVar("Attention", bound=StepAttention)
MakeAttention: TypeAlias = Callable[[torch.Tensor, PagedBatch], StepAttention]  # (slot_mapping, batch)


class GraphKind(ABC, Generic[Size]):
    """The graphs of one kind of step, captured for several sizes. Owned by the runner, to which it has no reference."""

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

    def capture(
        self, model: CausalLM, make_attention: MakeAttention, sizes: Sequence[Size], show_progress: bool
    ) -> None:
        """Capture these sizes, the largest first, so that the others can share its memory."""
        pools = [torch.cuda.graph_pool_handle() for _ in range(self.num_pools)]
        for size in tqdm(
            sorted(sizes, reverse=True), desc=f"Capturing {self.name}", unit="size", disable=not show_progress
        ):
            with model.skipping_inner_layers():  # they launch no other kernels
                self.launch_kernels(model, make_attention, size)  # loads this size's kernels outside the capture
            torch.cuda.synchronize()
            with torch.cuda.stream(capture_stream(self.device)):
                self._capture_size(model, make_attention, size, pools)

    def reset(self) -> None:
        """Destroy all graphs."""
        for graphs in self._graphs.values():
            for graph in graphs:
                graph.reset()
        self._graphs.clear()

    def _capture_size(self, model: CausalLM, make_attention: MakeAttention, size: Size, pools: list[Any]) -> None:
        """Capture the graphs of one size on the current stream. The graphs of all sizes share the memory `pools`."""
        with capture(pools[0]) as graph:
            self.launch_kernels(model, make_attention, size)
        self._graphs[size] = [graph]

    @abstractmethod
    def launch_kernels(self, model: CausalLM, make_attention: MakeAttention, size: Size) -> None:
        """Launch the kernels in the graphs of a size one by one, without a graph."""


class StepGraphs(GraphKind[int]):
    """Graphs of decode steps. A size is a number of tokens, each of which is a row."""

    def __init__(self, buffers: GraphBuffers, name: str, sizes: list[int], max_query_len: int) -> None:
        """`max_query_len`: the most rows of a sequence; 1 for steps without guesses."""
        super().__init__(name, sizes)
        self.buffers, self.max_query_len = buffers, max_query_len

    @property
    def device(self) -> torch.device:
        return self.buffers.device

    def size_for(self, num_rows: int) -> int:
        """The smallest size that holds `num_rows` rows."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def paged(self, make_attention: Callable[[torch.Tensor, PagedBatch], Attention], size: int) -> Attention:
        """The attention of a graph over the keys that are on the GPU."""
        slot_mapping = self.buffers.tensors(GraphShape.decode(size)).slot_mapping
        return make_attention(slot_mapping, self.buffers.decode_batch(size, self.max_query_len))

    @abstractmethod
    def replay(self, inputs: StepInputs, cpu_rows: CpuRows | None = None) -> torch.Tensor:
        """Run a decode step. Returns its logits [T, vocab_size] and leaves its tokens in `buffers.sampled_ids`. Hot."""


class DecodeGraphs(StepGraphs):
    """Decode steps whose keys are all on the GPU: one graph for each size."""

    def launch_kernels(self, model: CausalLM, make_attention: MakeAttention, size: int) -> None:
        self.buffers.forward(model, size, self.paged(make_attention, size))

    def replay(self, inputs: StepInputs, cpu_rows: CpuRows | None = None) -> torch.Tensor:
        assert not inputs.groups and cpu_rows is None, "a step whose keys are all on the GPU streams no groups"
        num_rows = len(inputs.input_ids)
        size = self.size_for(num_rows)
        self.buffers.fill_decode(inputs, size)
        self._graphs[size][0].replay()
        return self.buffers.logits(num_rows)
