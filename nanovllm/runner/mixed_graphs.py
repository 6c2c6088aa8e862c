"""Steps with prompts as CUDA graphs in pieces, each from the attention of one layer to that of the next.

Launched kernel by kernel, a step costs the host 0.7 ms a layer, which for a short prompt is many times what the GPU
needs. Attention stays outside of the graphs, because its kernels depend on the lengths of the sequences, and because
with offload the host starts copies around it.

    piece 0 | attention | piece 1 | attention | ... | piece L    "|": query and result are in static buffers

The number of tokens is padded to the next of a few sizes. Rows of padding store nothing, and what they compute is not
read. As in streamed_graphs.py, attention makes the cuts when the pieces are captured.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

from nanovllm.attention.base import StepAttention
from nanovllm.layers.kv_cells import KVCells
from nanovllm.models.decoder import CausalLM
from nanovllm.runner.cuda_graphs import GraphKind, MakeAttention
from nanovllm.runner.graph_capture import capture
from nanovllm.runner.inputs import StepTensors
from nanovllm.runner.kv_memory import KVMemory

NO_CELL = -1


class _StaticAttention:
    """A StepAttention that leaves the query in a static buffer, and takes the result from another."""

    def __init__(self, graphs: "MixedGraphs", size: int) -> None:
        self._graphs, self._size = graphs, size

    def cells(self, layer: int) -> KVCells:
        k_cache, v_cache = self._graphs.memory.cache
        return KVCells(k_cache[layer], v_cache[layer], self._graphs.slot_mapping[: self._size])

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        self._graphs.q_THD[: self._size].copy_(q_THD)
        return self._graphs.out_THD[: self._size]


class _Cutter(_StaticAttention):
    """Also ends a captured piece where attention would run, and begins the next. The first begins with the context."""

    def __init__(self, graphs: "MixedGraphs", size: int, pool: Any) -> None:
        super().__init__(graphs, size)
        self.pieces: list[torch.cuda.CUDAGraph] = []
        self._pool = pool
        self._capture: AbstractContextManager[torch.cuda.CUDAGraph]

    def __enter__(self) -> "_Cutter":
        self._begin_piece()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._capture.__exit__(*exc_info)

    def _begin_piece(self) -> None:
        self._capture = capture(self._pool)
        self.pieces.append(self._capture.__enter__())

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        out_THD = super().attend(layer, q_THD)
        self._capture.__exit__(None, None, None)
        self._begin_piece()
        return out_THD


class MixedGraphs(GraphKind):
    """Any step of up to `sizes[-1]` tokens, from token ids to the hidden states of all of them."""

    def __init__(self, memory: KVMemory, model: CausalLM, num_heads: int, sizes: list[int]) -> None:
        """`num_heads`: query heads of this rank."""
        super().__init__("mixed", sizes)
        self.memory = memory
        k_cache, _ = memory.cache
        largest, config = sizes[-1], model.config
        self.ids, self.positions, self.rope_lens, self.slot_mapping = (
            torch.zeros(largest, dtype=torch.int64, device=k_cache.device) for _ in range(4)
        )
        self.slot_mapping.fill_(NO_CELL)
        self.q_THD = k_cache.new_zeros(largest, num_heads, config.head_dim)
        self.out_THD = torch.zeros_like(self.q_THD)
        self.hidden = k_cache.new_zeros(largest, config.hidden_size)

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def _forward(self, model: CausalLM, size: int, attention: StepAttention) -> None:
        rope_lens = self.rope_lens[:size] if model.needs_rope_lens else None
        self.hidden[:size].copy_(model(self.ids[:size], self.positions[:size], attention, rope_lens))

    def launch_kernels(self, model: CausalLM, make_attention: MakeAttention, size: int) -> None:
        """Without attention, whose kernels the steps themselves launch."""
        self._forward(model, size, _StaticAttention(self, size))

    def _capture_size(self, model: CausalLM, make_attention: MakeAttention, size: int, pools: list[Any]) -> None:
        with _Cutter(self, size, pools[0]) as cutter:
            self._forward(model, size, cutter)
        self._graphs[size] = cutter.pieces

    def replay(self, tensors: StepTensors, attention: StepAttention) -> torch.Tensor:
        """Run a step. Returns the hidden states of its tokens, [T, hidden_size], valid until the next replay. Hot."""
        num_tokens = len(tensors.input_ids)
        size = self.size_for(num_tokens)
        self.ids[:num_tokens].copy_(tensors.input_ids)
        self.positions[:num_tokens].copy_(tensors.positions)
        self.rope_lens[:num_tokens].copy_(tensors.rope_lens)
        self.slot_mapping[:num_tokens].copy_(tensors.slot_mapping)
        self.slot_mapping[num_tokens:size].fill_(NO_CELL)
        q_THD, out_THD = self.q_THD[:num_tokens], self.out_THD[:num_tokens]
        *pieces, last_piece = self._graphs[size]
        for layer, piece in enumerate(pieces):
            attention.cells(layer)  # may wait for copies, which the piece must not overtake
            piece.replay()
            out_THD.copy_(attention.attend(layer, q_THD))
        last_piece.replay()
        return self.hidden[:num_tokens]
