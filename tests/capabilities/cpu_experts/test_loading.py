"""Experts in CPU memory have the values that the same experts have in the model's own tensors, from every format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from quantized_models import FORMATS, write_quantized
from tiers import tiered
from tiny_models import write_tiny_model
from torch import nn

from nanovllm.capabilities.cpu_experts.store import ExpertLayer
from nanovllm.checkpoint.gguf import read_model
from nanovllm.checkpoint.quantization import QUANTIZATIONS
from nanovllm.checkpoint.read_config import load_config
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.layers.linear import NamedShard, WeightShard
from nanovllm.layers.moe import Experts
from nanovllm.layers.packed_weight import PackedWeight, packed
from nanovllm.models.loader import build_model, load_weights
from nanovllm.plan.expert_formats import layer_bytes, layer_format

EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
REFUSED = ("fp8 small blocks", "gptq 8 order", "gptq_v2", "packed 4 order")  # small groups, or columns in another order
ALL_BLOCKS = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "F16",
    "BF16",
)


class StoredExperts(nn.Module):
    """The weights of `experts` in CPU memory, on the same rank."""

    def __init__(self, experts: Experts, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.formats, self.tp, self.device = experts.formats, experts.tp, torch.device(device)
        self.size, self.hidden_size = experts.size, experts.hidden_size
        formats = layer_format(
            self.formats,
            str(dtype).removeprefix("torch."),
            hidden_size=self.hidden_size,
            size=self.size,
            num_ranks=self.tp.size,
        )
        num_bytes = layer_bytes(formats, experts.num_experts)
        memory = torch.full((num_bytes + 64,), 0xFF, dtype=torch.uint8)
        start = -memory.data_ptr() % 64
        self.places = torch.arange(experts.num_experts).flip(0).int()
        self.layer = ExpertLayer(formats, self.places, memory[start : start + num_bytes])

    def weight_shards(self) -> Iterator[NamedShard]:
        size = self.size // self.tp.size
        own, all_of = slice(self.tp.rank * size, (self.tp.rank + 1) * size), slice(None)
        wide, tall = ((self.size, self.hidden_size), (own, all_of)), ((self.hidden_size, self.size), (all_of, own))
        parts = zip(self.layer.matrices, ("gate", "up", "down"), (wide, wide, tall), self.formats, strict=True)
        for matrix, name, (shape, index), format in parts:
            for expert, place in enumerate(self.places.tolist()):
                target = matrix.rows(place, self.device)
                yield NamedShard(0, f"{expert}.{name}_proj.weight", WeightShard(target, shape, index, format))

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values in the order in which `Experts` has them: gate and up of each expert, and down."""
        gate, up, down = ([matrix.values(place) for place in self.places.tolist()] for matrix in self.layer.matrices)
        return torch.cat([torch.cat(each) for each in zip(gate, up, strict=True)]), torch.cat(down)


def load(
    path: Path,
    tp: TPGroup,
    *,
    stores: bool,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    load_format: str = "auto",
    device: str = "cpu",
) -> Any:
    """Load a model, and return the experts of its layer."""
    config, files = load_config(str(path))
    directory = None if load_format == "dummy" else files
    arguments: dict[str, Any] = {"max_model_len": 64, "dtype": dtype, "device": device, "directory": directory}
    model = build_model(config.quantized(quantization, None, tp.size), tp, **arguments)
    mlp = model.model.layers[0].mlp
    if stores:
        mlp.experts = StoredExperts(mlp.experts, dtype, device)
    load_weights(model, files, load_format=load_format)
    return mlp.experts


def stored_types(path: Path, num_ranks: tuple[int, ...] = (1, 2), **options: Any) -> list[str]:
    """Compare the values on each rank, and return the types of gate, up and down on the last one."""
    dtype, names = options.get("dtype", torch.float32), [""]
    for size in num_ranks:
        for rank in range(size):
            stored, plain = (load(path, TPGroup(rank, size), stores=stores, **options) for stores in (True, False))
            for values, expected in zip(stored.values(), (plain.gate_up, plain.down), strict=True):
                assert torch.equal(values.to(dtype), expected) and expected.float().std() > 0.01
            names = [matrix.format.type.name for matrix in stored.layer.matrices]
    return names


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "num_layers": 1, "vocab_size": 64}
    directory = tmp_path_factory.mktemp("plain")
    return write_tiny_model(directory, "qwen3_moe", experts=EXPERTS, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_rounded_to_the_dtype(plain: Path, dtype: torch.dtype) -> None:
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    for load_format in ("auto", "dummy"):
        assert stored_types(plain, dtype=dtype, load_format=load_format) == [name] * 3


def test_experts_in_one_tensor_are_divided(tmp_path: Path) -> None:
    """Checkpoints of Qwen3.5 have gate and up of all experts in one tensor."""
    sizes = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 64}
    path = write_tiny_model(tmp_path, "qwen3_5_moe", experts={**EXPERTS, "moe_intermediate_size": 64}, **sizes)  # type: ignore[arg-type]
    assert stored_types(path) == ["F32"] * 3


@pytest.mark.parametrize(
    "name",
    tiered(
        (name for name in FORMATS if name not in REFUSED),
        ("fp8 blocks", "fp8 tensor", "float tensor", "packed 4", "packed 8 channel", "awq", "gptq dynamic"),
    ),
)
def test_quantized_checkpoints_keep_their_values(tmp_path: Path, plain: Path, name: str) -> None:
    path, _ = write_quantized(plain, tmp_path, name)
    names = stored_types(path)
    expected = ["INT8", "INT8", "INT4"] if name == "gptq dynamic" else ["INT8" if "8" in name else "INT4"] * 3
    if "fp4" in name:
        expected = ["F32"] * 3
    elif "fp8" in name or "float" in name:
        expected = ["E4M3"] * 3
    assert names == expected
    assert stored_types(path, (2,), load_format="dummy") == expected


@pytest.mark.parametrize("name", [name for name in REFUSED if "8" not in name])
def test_columns_in_another_order_are_refused(tmp_path: Path, plain: Path, name: str) -> None:
    path, _ = write_quantized(plain, tmp_path, name)
    with pytest.raises(CheckpointError, match=r"experts.0.gate_proj.* in .* has columns in another order \(desc_act\)"):
        load(path, TPGroup(), stores=True)


@pytest.mark.parametrize("quantization", tiered(QUANTIZATIONS, ("int4", "int8", "fp8")))
def test_quantized_at_loading(plain: Path, quantization: str) -> None:
    """Each of two ranks has 128 columns of down, half of a block of 256."""
    both = {"int4": ("Q4_K", "Q4_1"), "int5": ("Q5_K", "Q5_1"), "int6": ("Q6_K", "Q8_0"), "int8": ("Q8_0", "Q8_0")}
    of_rows, of_columns = both.get(quantization, ("E4M3", "E4M3"))
    expected = [of_rows, of_rows, of_columns]
    for load_format, dtype in (("auto", torch.float32), ("auto", torch.bfloat16), ("dummy", torch.bfloat16)):
        options: dict[str, Any] = {"dtype": dtype, "load_format": load_format}
        assert stored_types(plain, quantization=quantization, **options) == expected


@pytest.mark.parametrize(
    "name",
    tiered(
        (*ALL_BLOCKS, "Q4_K Q6_K Q8_0 Q5_K"), ("Q4_0", "Q5_1", "Q4_K", "IQ4_XS", "MXFP4", "BF16", "Q4_K Q6_K Q8_0 Q5_K")
    ),
)
def test_blocks_of_gguf_files_keep_their_values(tmp_path: Path, plain: Path, name: str) -> None:
    """Two ranks share the columns of down, 256. Half of a block of 256 is stored as values, as on a GPU."""
    path = write_gguf(tmp_path / "x.gguf", plain, types=name.split(), fused_experts=name == "Q5_1")
    in_file = [read_model(path).tensors.get(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up", "down")]
    types = [name if each is None else each.type.name for each in in_file]
    types = ["F32" if each in ("F16", "BF16") else each for each in types]
    assert stored_types(path, (1,)) == types
    if types[2] in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS"):
        types[2] = "F32"
    assert stored_types(path, (2,)) == types
    assert stored_types(path, (2,), load_format="dummy") == types


def test_blocks_with_values_that_are_not_finite_are_refused(tmp_path: Path, plain: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", plain, types=["Q8_0"])
    tensor = read_model(path).tensors["blk.0.ffn_up_exps.weight"]
    content = bytearray(path.read_bytes())
    end = tensor.offset + tensor.num_bytes  # the last block's scale
    content[end - 34 : end - 32] = torch.tensor([torch.inf], dtype=torch.float16).numpy().tobytes()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_up_exps.weight in .*x.gguf has values that are not finite"):
        load(path, TPGroup(), stores=True)


def values_on_gpu(weight: torch.nn.Parameter | PackedWeight) -> torch.Tensor:
    from nanovllm.kernels import packed_values

    if isinstance(weight, torch.nn.Parameter):
        return weight.float().cpu()
    return packed_values.unpack(packed(weight), 0, torch.empty(weight.shape, device=weight.codes.device)).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    "name", ["", *QUANTIZATIONS, "awq", "gptq dynamic", "fp8 blocks", "nvfp4 modelopt", *ALL_BLOCKS]
)
def test_values_are_those_of_experts_on_a_gpu(tmp_path: Path, plain: Path, name: str, load_format: str) -> None:
    """Also of random weights, so that engines with and without experts in CPU memory give the same tokens."""
    path, options = plain, {"dtype": torch.bfloat16, "load_format": load_format, "device": "cuda"}
    if name in FORMATS:
        path, _ = write_quantized(plain, tmp_path, name)
    elif name in ALL_BLOCKS:
        path = write_gguf(tmp_path / "x.gguf", plain, types=[name])
    elif name:
        options["quantization"] = name
    for tp in (TPGroup(), TPGroup(1, 2)):
        stored, resident = (load(path, tp, stores=stores, **options) for stores in (True, False))
        for values, weight in zip(stored.values(), (resident.gate_up, resident.down), strict=True):
            assert torch.equal(values, values_on_gpu(weight))
