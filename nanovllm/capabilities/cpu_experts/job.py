"""ExpertJob: the experts of a step on the CPU, one layer at a time.

The threads that attend (cpu_attention/) run the job: `kernel.compute_experts(job, layer)` while the caller waits, or a
server (`kernel.serve_experts`) whenever the GPU has written x, the chosen experts and their weights.

Legend: T tokens, C chosen experts of a token, H hidden size, I features of an expert.
"""

import ctypes

import torch
import torch.nn.functional as F

from nanovllm.capabilities.cpu_experts.store import ExpertMatrix, ExpertStore
from nanovllm.layers.linear import act_and_mul

_SLICE = 32  # SLICE in source/formats.h
_ALIGNMENT = 64
_ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}  # Activation in source/experts.h
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # Dtype in cpu_attention/source/vectors.h

# Places in the memory that GPU and CPU share, int32 [EXCHANGE_SIZE]: Exchange in source/server.h, and kernels/
# expert_exchange.py. The GPU writes the layer and the number of tokens, and then raises ARRIVED by one. The server sets
# DONE to the same number when the output is complete. DONE is in another cache line, because the GPU polls it.
ARRIVED, LAYER, NUM_TOKENS, DONE, EXCHANGE_SIZE = 0, 1, 2, 16, 32


class CExpertJob(ctypes.Structure):
    """ExpertJob in source/experts.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in "layers x experts weights out scratch".split()),
        *((name, ctypes.c_int64) for name in "num_tokens num_chosen hidden_size size".split()),
        *((name, ctypes.c_int64) for name in "num_experts num_places dtype out_dtype activation".split()),
    ]


def scratch_bytes(num_tokens: int, num_chosen: int, hidden_size: int, size: int, num_experts: int) -> int:
    """Return the bytes of scratch memory of a job: the parts in the constructor of Mixture (source/experts.h)."""
    of_x, num_pairs = num_tokens * hidden_size, num_tokens * num_chosen
    hidden = num_pairs * size
    counts = [4 * of_x, 4 * of_x // _SLICE, 4 * of_x, 4 * hidden, 2 * hidden, 4 * hidden // _SLICE]
    counts += [2 * num_pairs * hidden_size, 4 * num_pairs * hidden_size // _SLICE]
    counts += [4 * num_pairs] * 4 + [4 * (num_experts + 1)]
    return sum(-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts) + _ALIGNMENT


class ExpertJob:
    """The sums over the chosen experts in CPU memory of weight * down(activation(gate(x)) * up(x)), in each layer.

    All layers share the tensors, which are contiguous and in CPU memory: `x` [T, H] in fp32, bf16 or fp16; `experts`
    int32 [T, C] and `weights` fp32 [T, C]; `out` [T, H] in the dtype of x or fp32. The first `num_tokens` rows of each
    are used, by default all. Experts that are not in CPU memory are skipped, and so are numbers outside the range of
    experts. Gate, up, activation and their product are rounded to the dtype of x, other sums are fp32. Any number of
    threads may run a job, but only one layer at a time.

    `scratch` is uint8 memory for intermediate results, whose content does not matter, or None for new memory. Jobs that
    never run concurrently may share their scratch.
    """

    def __init__(
        self,
        store: ExpertStore,
        *,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        scratch: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> None:
        """activation: as in ModelConfig."""
        self.activation = activation
        self.store, self.x, self.experts, self.weights, self.out = store, x, experts, weights, out
        self._check_tensors()
        layer, (num_tokens, num_chosen) = store.layers[0], experts.shape
        num_bytes = scratch_bytes(num_tokens, num_chosen, layer.hidden_size, layer.size, store.num_experts)
        self.scratch = torch.empty(num_bytes, dtype=torch.uint8) if scratch is None else scratch
        assert self.scratch.numel() >= num_bytes, "the scratch memory is too small"
        self.c_job = CExpertJob(
            layers=ctypes.addressof(store.c_layers),
            x=x.data_ptr(),
            experts=experts.data_ptr(),
            weights=weights.data_ptr(),
            out=out.data_ptr(),
            scratch=-(-self.scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT,
            num_tokens=num_tokens,
            num_chosen=num_chosen,
            hidden_size=layer.hidden_size,
            size=layer.size,
            num_experts=store.num_experts,
            num_places=max(layer.num_places for layer in store.layers),
            dtype=_DTYPE_CODES[x.dtype],
            out_dtype=_DTYPE_CODES[out.dtype],
            activation=_ACTIVATION_CODES[activation],
        )

    @classmethod
    def of_rows(
        cls,
        store: ExpertStore,
        num_rows: int,
        num_chosen: int,
        dtype: torch.dtype,
        *,
        is_pinned: bool,
        activation: str = "silu",
    ) -> "ExpertJob":
        """Make a job with new tensors for up to `num_rows` tokens. is_pinned: for a GPU."""

        def new(num_columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, num_columns, dtype=dtype, pin_memory=is_pinned)

        hidden_size = store.layers[0].hidden_size
        return cls(
            store,
            x=new(hidden_size, dtype),
            experts=new(num_chosen, torch.int32),
            weights=new(num_chosen, torch.float32),
            out=new(hidden_size, dtype),
            activation=activation,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.c_job.num_tokens)

    @num_tokens.setter
    def num_tokens(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.x), f"{num_tokens} tokens of {len(self.x)}"
        self.c_job.num_tokens = num_tokens

    def _check_tensors(self) -> None:
        tensors = (self.x, self.experts, self.weights, self.out)
        assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors), (
            "experts on the CPU take contiguous tensors in CPU memory"
        )
        assert self.x.shape == self.out.shape and self.x.shape[1] == self.store.layers[0].hidden_size, (
            "x or out is not [T, H]"
        )
        assert self.experts.shape == self.weights.shape and len(self.experts) == len(self.x), "not [T, C]"
        assert self.x.dtype in _DTYPE_CODES, f"x is in {self.x.dtype}"
        assert self.out.dtype in (self.x.dtype, torch.float32), f"out is in {self.out.dtype}"
        assert (self.experts.dtype, self.weights.dtype) == (torch.int32, torch.float32), "int32 experts, fp32 weights"

    def check(self, layer: int) -> None:
        assert 0 <= layer < len(self.store.layers), f"layer {layer} of {len(self.store.layers)}"

    def run_in_torch(self, layer: int) -> None:
        """Compute the chosen experts one after the other, from the values of their weights in fp32. The reference for
        the compiled kernels.
        """
        self.check(layer)
        weights_of, dtype, rows = self.store.layers[layer], self.x.dtype, slice(self.num_tokens)
        experts = self.experts[rows]
        is_expert = (experts >= 0) & (experts < self.store.num_experts)
        places = weights_of.places[experts.clamp(0, self.store.num_experts - 1).long()]
        places = places.masked_fill(~is_expert, -1)
        sums = torch.zeros(self.x[rows].shape)
        for place in places[places >= 0].unique().tolist():
            token, choice = (places == place).nonzero(as_tuple=True)
            x = self.x[token].float()
            gate, up = (_linear(x, matrix, place) for matrix in (weights_of.gate, weights_of.up))
            hidden = act_and_mul(torch.cat((gate, up), 1).to(dtype), self.activation).float()
            sums.index_add_(0, token, _linear(hidden, weights_of.down, place) * self.weights[token, choice, None])
        self.out[rows] = sums


def _linear(x: torch.Tensor, matrix: ExpertMatrix, place: int) -> torch.Tensor:
    return F.linear(x, matrix.values(place), None if matrix.biases is None else matrix.biases[place])
