"""MixedGraphs without a GPU: threads run the model between two layers' attention, as the captured pieces do."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checked_engine import CheckedLLM, Reference, cache_options
from offload_workload import BLOCK, prompts_of
from tiny_models import write_tiny_model

from nanovllm.core.step_limits import mixed_graph_sizes
from nanovllm.runner.mixed_graphs import MixedGraphs, _StaticAttention

PROMPTS = prompts_of(1, 17, BLOCK - 1, BLOCK, 2 * BLOCK + 5, 5 * BLOCK + 1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(write_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192))


class PausingAttention(_StaticAttention):
    """Lets the model's thread wait where a piece ends."""

    def __init__(self, graphs: MixedGraphs, size: int) -> None:
        super().__init__(graphs, size)
        self.begin_piece, self.end_piece = threading.Semaphore(0), threading.Semaphore(0)

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        out_THD = super().attend(layer, q_THD)
        self.end_piece.release()
        self.begin_piece.acquire()
        return out_THD


class Pieces:
    """In place of the graphs of one size, of a model with `num_layers` layers. Each piece is replayed by `replay`."""

    def __init__(self, graphs: MixedGraphs, model: Any, size: int, num_layers: int) -> None:
        self._graphs, self._model, self._size, self._num_left = graphs, model, size, 0
        self._num_pieces = num_layers + 1

    def __iter__(self) -> Iterator["Pieces"]:
        return iter([self] * self._num_pieces)

    def replay(self) -> None:
        if self._num_left == 0:
            self._num_left = self._num_pieces
            self._attention = PausingAttention(self._graphs, self._size)
            self._thread = threading.Thread(target=self._run)
            self._thread.start()
        else:
            self._attention.begin_piece.release()
        self._num_left -= 1
        if self._num_left:
            self._attention.end_piece.acquire()
        else:
            self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        self._graphs._forward(self._model, self._size, self._attention)


class MixedLLM(CheckedLLM):
    """An engine on a CPU whose steps of up to `max_tokens` tokens run in pieces."""

    def __init__(self, reference: Reference, max_tokens: int, **options: Any) -> None:
        super().__init__(reference, **options)
        runner = self.runner
        self.mixed = MixedGraphs(runner.memory, runner.model, runner.num_heads, mixed_graph_sizes(max_tokens))
        num_layers = runner.spec.num_layers
        self.mixed._graphs = {
            size: Pieces(self.mixed, runner.model, size, num_layers)  # type: ignore[misc]
            for size in self.mixed.sizes
        }
        self.num_replays = 0
        runner.steps.graphs = SimpleNamespace(
            find=lambda plan: None,
            find_mixed=self._find_mixed,
            inputs=SimpleNamespace(sampled_ids=torch.zeros(1000, dtype=torch.int64)),
            reset=lambda: None,
        )

    def _find_mixed(self, plan: Any) -> MixedGraphs | None:
        if plan.num_tokens > self.mixed.sizes[-1]:
            return None
        self.num_replays += 1
        return self.mixed


@pytest.mark.parametrize("max_tokens", [64, 2000], ids=["long steps without", "all steps in pieces"])
@pytest.mark.parametrize("num_gpu_blocks", [None, 24, 3], ids=["all-GPU", "resident", "streamed"])
def test_steps_in_pieces_give_the_logits_of_transformers(
    reference: Reference, num_gpu_blocks: int | None, max_tokens: int
) -> None:
    with MixedLLM(reference, max_tokens, **cache_options(num_gpu_blocks)) as llm:
        llm.answer_and_check(PROMPTS, max_tokens=6)
        assert llm.num_replays >= 5
        assert max_tokens < 300 or llm.num_replays == len(llm.plans)
        llm.assert_nothing_left()


def test_rows_of_padding_store_nothing(reference: Reference) -> None:
    """After a longer step has left its cells in the buffer."""
    with MixedLLM(reference, 512, **cache_options(None)) as llm:
        llm.answer_and_check(prompts_of(200), max_tokens=2)
        before = [cache.clone() for cache in llm.runner.memory.cache]
        llm.plans.clear()
        llm.answer_and_check(prompts_of(20), max_tokens=1)
        written = {block for plan in llm.plans for step in plan.sequences for block in step.block_table}
        for old, new in zip(before, llm.runner.memory.cache, strict=True):
            for block in set(range(new.shape[1])) - written:
                assert torch.equal(old[:, block].nan_to_num(), new[:, block].nan_to_num())
