"""The formats of experts in CPU memory: how a checkpoint's formats are stored, and the memory that they take.

Importing this module loads no torch.

Legend: N output features, K input features, P experts of a layer that are in CPU memory.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nanovllm.checkpoint.gguf import TYPES, BlockType
from nanovllm.checkpoint.quantization import Quantization
from nanovllm.errors import ConfigError

ROW_MULTIPLE = 32  # HIDDEN_ROWS in source/experts.h
SLICE = 32  # SLICE in source/formats.h: columns whose codes are read together
ALIGNMENT = 64  # of a matrix's parts
STAGED_PIECE_BYTES = 2**25  # scales, or blocks of GGUF files, that a GPU receives and then arranges at a time
LINK_SHARES = 256  # shares of a step's experts that a GPU reads by itself are multiples of 1 / LINK_SHARES
MAX_LINK_SLOTS, _LINK_SLOT_BYTES = 24, 2**26
_WORD_BYTES = 64  # bytes of a block of INT4, INT8 or E4M3

INT4, INT8, E4M3 = (
    BlockType("INT4", 128, _WORD_BYTES),
    BlockType("INT8", 64, _WORD_BYTES),
    BlockType("E4M3", 64, _WORD_BYTES),
)
# Columns that may share a scale. Larger groups are stored as several groups with the same scale
GROUP_SIZES = {INT4: (32, 64, 128), INT8: (32, 64), E4M3: (64, 128)}
TYPE_CODES = {block_type: number for number, block_type in TYPES.items()} | {INT4: 100, INT8: 101, E4M3: 102}
WEIGHT_TYPES = {block_type.name: block_type for block_type in TYPE_CODES}
_FLOAT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class MatrixFormat:
    """The shape and type of a weight [N, K] of an expert. Raises ConfigError for what the kernels cannot read."""

    type: BlockType
    num_rows: int
    num_columns: int
    group_size: int = 0  # columns that share a scale, see `stored_group`; 0 if the scales are in the blocks
    has_zeros: bool = False  # False if all zeros are the middle of the codes
    has_bias: bool = False

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ConfigError(
                f"an expert's weight in {self.type.name} has {self.num_rows} rows and {self.num_columns} columns, "
                f"{problem} in CPU memory; keep all experts on the GPU, or use fewer ranks"
            )

    def _problem(self) -> str | None:
        columns = math.lcm(self.type.num_values, SLICE)
        if self.num_rows <= 0 or self.num_rows % ROW_MULTIPLE:
            return f"whose rows must be a multiple of {ROW_MULTIPLE}"
        if self.num_columns <= 0 or self.num_columns % columns:
            return f"whose columns must be a multiple of {columns}"
        if self.is_grouped and self.group_size not in GROUP_SIZES[self.type]:
            sizes = ", ".join(map(str, GROUP_SIZES[self.type]))
            return f"in groups that can be stored as groups of {self.group_size}, which must be {sizes} columns wide"
        return None

    @property
    def is_grouped(self) -> bool:
        return self.type in (INT4, INT8, E4M3)

    @property
    def is_of_blocks(self) -> bool:
        """Return True for GGUF's quantized types."""
        return self.type.is_quantized and not self.is_grouped

    @property
    def row_bytes(self) -> int:
        return self.num_columns // self.type.num_values * self.type.num_bytes

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return self.num_columns // self.group_size if self.is_grouped else 0

    @property
    def part_bytes(self) -> tuple[int, int, int]:
        """Bytes of an expert's codes, scales and zeros."""
        num_groups = self.num_rows * self.num_groups
        codes, zeros = self.num_rows * self.row_bytes, 2 * num_groups * self.has_zeros
        return codes, 4 * num_groups, zeros

    @property
    def bias_bytes(self) -> int:
        """Bytes of an expert's biases."""
        return 4 * self.num_rows * self.has_bias

    def num_bytes(self, num_places: int) -> int:
        """Bytes of the memory for `num_places` experts."""
        return sum(aligned(num_places * part) for part in (*self.part_bytes, self.bias_bytes))


def stored_group(block_type: BlockType, num_columns: int, group_size: int) -> int:
    """Return the group size in CPU memory of a weight with groups of `group_size` columns, or 0 for whole rows, in the
    checkpoint. If the kernels can read no such groups, the result is none of GROUP_SIZES.
    """
    return math.gcd(group_size, num_columns, max(GROUP_SIZES[block_type]))


class LayerFormat(NamedTuple):
    """The formats of the experts of a layer: gate and up [I, H], down [H, I]."""

    gate: MatrixFormat
    up: MatrixFormat
    down: MatrixFormat

    def check(self) -> None:
        shapes = [(each.num_rows, each.num_columns) for each in self]
        assert shapes[0] == shapes[1] == shapes[2][::-1], f"gate, up and down do not fit each other: {shapes}"


def layer_bytes(formats: LayerFormat, num_places: int) -> int:
    """Return the bytes of CPU memory for `num_places` experts of a layer."""
    return sum(each.num_bytes(num_places) for each in formats)


def num_link_slots(layer_sizes: Iterable[int], num_experts: int) -> int:
    """Return the most experts of a layer that a GPU reads by itself in a step with few tokens, in layers whose experts
    have these sizes.
    """
    return max(1, min(MAX_LINK_SLOTS, num_experts, _LINK_SLOT_BYTES * num_experts // max(layer_sizes)))


def layer_format(
    formats: Sequence[Quantization | None],
    dtype: str,
    *,
    hidden_size: int,
    size: int,
    num_ranks: int,
    has_bias: bool = False,
) -> LayerFormat:
    """Return how the experts of a layer are stored on one of `num_ranks` ranks, which share the features of each
    expert. Raises ConfigError for what the kernels cannot read.

    formats: of gate, up and down, None for a weight that is not quantized. dtype: of the model, such as "bfloat16".
    size: the features of an expert, on all ranks.
    """
    local_size = size // num_ranks
    gate, up, down = formats
    of_layer = LayerFormat(
        _matrix_format(gate, dtype, local_size, hidden_size),
        _matrix_format(up, dtype, local_size, hidden_size),
        _matrix_format(down, dtype, hidden_size, local_size, num_ranks),
    )
    return LayerFormat(*(replace(each, has_bias=has_bias) for each in of_layer))


def _matrix_format(
    given: Quantization | None, dtype: str, num_rows: int, num_columns: int, num_ranks: int = 1
) -> MatrixFormat:
    """num_ranks: the number of ranks that share the columns. A weight is stored in the model's dtype wherever a GPU
    would unpack it.
    """
    if given is None or not given.stays_packed(num_columns, num_ranks):
        block_type = WEIGHT_TYPES[_FLOAT_TYPES[dtype]]
    elif given.block_type is not None:
        block_type = WEIGHT_TYPES[given.block_type]
    else:
        block_type = E4M3 if given.is_float else INT4 if given.bits == 4 else INT8
    group_size, has_zeros = 0, False
    if given is not None and block_type in GROUP_SIZES:
        group_size, has_zeros = stored_group(block_type, num_columns, given.block[1]), given.has_zeros
    return MatrixFormat(
        type=block_type, num_rows=num_rows, num_columns=num_columns, group_size=group_size, has_zeros=has_zeros
    )
