"""Experts in CPU memory with random weights, jobs for them, and what the jobs should write, computed in fp64."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import gelu, linear, silu

from nanovllm.capabilities.cpu_experts.job import ExpertJob
from nanovllm.capabilities.cpu_experts.store import ExpertMatrix, ExpertStore, store_bytes
from nanovllm.layers.packed_weight import QuantizedWeight
from nanovllm.plan.expert_formats import (
    E4M3,
    INT4,
    INT8,
    WEIGHT_TYPES,
    LayerFormat,
    MatrixFormat,
    stored_group,
)

_CPU = torch.device("cpu")
FLOATS = ("F32", "F16", "BF16")
# Bytes of each type's block at which fp16 numbers begin
_HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
_HALVES |= {"Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}
_LARGEST = {"Q6_K": 32 * 127, "IQ4_XS": 32 * 127, "Q4_K": 63 * 15, "Q5_K": 63 * 31, "Q4_0": 8, "Q4_1": 15, "Q5_0": 16}
_LARGEST |= {"Q5_1": 31, "Q8_0": 128, "IQ4_NL": 127}


def matrix_format(
    name: str,
    num_rows: int,
    num_columns: int,
    group_size: int = 64,  # in the checkpoint
    has_zeros: bool = False,
    has_bias: bool = False,
) -> MatrixFormat:
    block_type = WEIGHT_TYPES[name]
    if block_type not in (INT4, INT8, E4M3):
        return MatrixFormat(type=block_type, num_rows=num_rows, num_columns=num_columns, has_bias=has_bias)
    return MatrixFormat(
        type=block_type,
        num_rows=num_rows,
        num_columns=num_columns,
        group_size=stored_group(block_type, num_columns, group_size),
        has_zeros=has_zeros and block_type != E4M3,
        has_bias=has_bias,
    )


def random_quantized(given: MatrixFormat, generator: torch.Generator) -> QuantizedWeight:
    """Codes of all kinds, with scales that make values of about 1 / sqrt(K)."""
    shape, size = (given.num_rows, given.num_columns), given.num_columns**-0.5
    groups = torch.arange(given.num_columns) // given.group_size
    scales = torch.rand(given.num_rows, given.num_groups, generator=generator) + 0.5
    if given.type == E4M3:
        codes = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x01  # not NaN
        return QuantizedWeight(codes.view(torch.float8_e4m3fn), scales * size / 100, None, groups)
    most = 16 if given.type == INT4 else 256
    zeros = torch.full(scales.shape, most // 2, dtype=torch.int16)
    if given.has_zeros:
        zeros = torch.randint(most + 1, scales.shape, generator=generator).to(torch.int16)
    codes = torch.randint(most, shape, generator=generator).to(torch.uint8)
    return QuantizedWeight(codes, (scales * size * 4 / most).to(torch.float16), zeros, groups)


def random_blocks(given: MatrixFormat, generator: torch.Generator) -> torch.Tensor:
    """Random bytes, with scales that make values of at most about 4 / sqrt(K)."""
    name, num_blocks = given.type.name, given.num_columns // given.type.num_values
    blocks = torch.randint(256, (given.num_rows, num_blocks, given.type.num_bytes), generator=generator).to(torch.uint8)
    size = 4 * given.num_columns**-0.5
    for at in _HALVES.get(name, ()):
        halves = (torch.rand(blocks.shape[:2], generator=generator) - 0.3) * size / _LARGEST[name]
        blocks[..., at : at + 2] = halves.half()[..., None].view(torch.uint8)
    if name == "MXFP4":
        blocks[..., 0] = torch.randint(118, 124, blocks.shape[:2], generator=generator).to(torch.uint8)
        blocks[0, 0, 0], blocks[0, -1, 0] = 0, 1  # subnormal scales
    return blocks.flatten(1)


def fill(matrix: ExpertMatrix, generator: torch.Generator) -> torch.Tensor:
    """Store random weights in every place, and random biases, some of them beyond the limit of clamped gates. Returns
    the values of the weights, fp64 [P, N, K], by the code that loads models.
    """
    given, values = matrix.format, []
    if matrix.biases is not None:
        matrix.biases.copy_((torch.randn(matrix.biases.shape, generator=generator) * 5).bfloat16())
    for place in range(matrix.num_places):
        if given.is_grouped:
            quantized = random_quantized(given, generator)
            for first, rows in ((0, slice(0, 32)), (32, slice(32, None))):  # as two shards
                matrix.store_quantized(place, first, quantized.part(rows, slice(None)), "a test")
            target = torch.empty(given.num_rows, given.num_columns, dtype=torch.float64)
            codes = quantized.codes.double()
            if quantized.zeros is not None:
                codes -= quantized.zeros[:, quantized.groups]
            target.copy_(codes * quantized.scales.double()[:, quantized.groups])
        elif given.type.name in FLOATS:
            target = torch.randn(given.num_rows, given.num_columns, generator=generator) * given.num_columns**-0.5
            matrix.rows(place, _CPU).copy_(target)
            target = matrix.values(place).double()
        else:
            matrix.rows(place, _CPU).copy_(random_blocks(given, generator))
            target = matrix.values(place).double()
        values.append(target)
    return torch.stack(values) if values else torch.zeros(0, given.num_rows, given.num_columns, dtype=torch.float64)


@dataclass
class Case:
    """A job with random weights, tokens and routes, and scratch memory and output that are NaN."""

    gate: str = "BF16"  # the name of a type, and so are the next two; None: the type of gate
    up: str | None = None
    down: str | None = None
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None
    num_tokens: int = 3
    num_chosen: int = 2
    hidden_size: int = 256
    size: int = 256
    num_experts: int = 6
    absent: Sequence[int] = (1,)  # experts that are not in CPU memory
    num_layers: int = 1
    seed: int = 0
    activation: str = "silu"
    grouped: dict[str, object] = field(default_factory=dict)  # arguments of matrix_format
    memory: torch.Tensor | None = None  # of the weights, otherwise new memory
    job: ExpertJob = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        h, i = self.hidden_size, self.size
        shapes = ((self.gate, i, h), (self.up or self.gate, i, h), (self.down or self.gate, h, i))
        formats = LayerFormat(*(matrix_format(*shape, **self.grouped) for shape in shapes))  # type: ignore[arg-type]
        places = torch.full((self.num_experts,), -1, dtype=torch.int32)
        present = [expert for expert in range(self.num_experts) if expert not in self.absent]
        order = torch.randperm(len(present), generator=generator)
        places[present] = order.int()
        layers = [formats] * self.num_layers, [places] * self.num_layers
        memory = torch.empty(store_bytes(*layers), dtype=torch.uint8) if self.memory is None else self.memory
        self.store = ExpertStore(*layers, memory)
        self.values = [
            [fill(matrix, generator) for matrix in (layer.gate, layer.up, layer.down)] for layer in self.store.layers
        ]
        x = torch.randn(self.num_tokens, h, generator=generator).to(self.dtype)
        experts = torch.stack(
            [torch.randperm(self.num_experts, generator=generator)[: self.num_chosen] for _ in range(self.num_tokens)]
        ).int()
        out = torch.full((self.num_tokens, h), torch.nan, dtype=self.out_dtype or self.dtype)
        weights = torch.rand(experts.shape, generator=generator)
        self.job = ExpertJob(self.store, x=x, experts=experts, weights=weights, out=out, activation=self.activation)
        self.forget()

    def forget(self) -> None:
        self.job.out.fill_(torch.nan)
        self.job.scratch.fill_(0xFF)  # NaN in every float type

    def expected(self, layer: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The output in fp64; or as torch computes it in `dtype`."""
        job, places = self.job, self.store.layers[layer].places
        biases = [each.biases for each in self.store.layers[layer].matrices]
        out = torch.zeros(job.x.shape, dtype=torch.float64)
        gates, ups, downs = (values.to(dtype) for values in self.values[layer])
        for token in range(self.num_tokens):
            for choice, expert in enumerate(job.experts[token].tolist()):
                place = int(places[expert]) if 0 <= expert < self.num_experts else -1
                if place >= 0:
                    x = job.x[token].to(dtype)
                    of_expert = [None if each is None else each[place].to(dtype) for each in biases]
                    gate, up = linear(x, gates[place], of_expert[0]), linear(x, ups[place], of_expert[1])
                    if self.activation == "clamped_swiglu":
                        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                        hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                    else:
                        is_silu = self.activation == "silu"
                        hidden = (silu(gate) if is_silu else gelu(gate, approximate="tanh")) * up
                    out[token] += job.weights[token, choice] * linear(hidden, downs[place], of_expert[2]).double()
        return out

    def check(self, layer: int = 0) -> None:
        """The error against fp64 is at most twice that of torch in the dtype of x, and two units more."""
        expected, out = self.expected(layer), self.job.out.double()
        units = 2 * torch.finfo(self.job.out.dtype).eps * expected.abs().max()
        allowed = 2 * (self.expected(layer, self.dtype) - expected).abs().max() + units
        error = (out - expected).abs().max()
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
