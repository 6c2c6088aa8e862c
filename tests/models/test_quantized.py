"""Quantized checkpoints have the values that their formats describe, on one rank and on several."""

import json
import shutil
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import load_model, random_prompt, run_logits
from model_files import edit_quantization
from quantized_models import FORMATS, GPTQ, SKIPPED, gptq, write_quantized
from rounded_weights import round_weights, rounded
from safetensors.torch import load_file, save_file
from thread_ranks import run_ranks
from tiers import RUNS_ALL, tiered
from tiny_models import EXPERTS, reference_model, write_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.quantization import QUANTIZATIONS, can_multiply_fp8
from nanovllm.checkpoint.quantization_config import parse_quantization
from nanovllm.checkpoint.read_config import load_config
from nanovllm.device.tp_group import TPGroup
from nanovllm.engine.setup import prepare
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.layers.packed_weight import rounded_to_fp8
from nanovllm.models.loader import build_model

PROMPT = random_prompt(40)
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 8, "num_kv_heads": 4}
    return write_tiny_model(directory, "qwen2", max_position_embeddings=1024, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    tiered(
        FORMATS,
        (
            "fp8 blocks",
            "float channel",
            "packed 4 zeros",
            "packed 4 order",
            "awq dynamic",
            "gptq dynamic",
            "auto-round",
        ),
    ),
)
def test_logits_are_those_of_transformers_with_the_values(tmp_path: Path, plain: Path, name: str) -> None:
    quantized, values = write_quantized(plain, tmp_path, name)
    with torch.no_grad():
        expected = reference_model(values)(torch.tensor([PROMPT])).logits[0]
        unquantized = reference_model(plain)(torch.tensor([PROMPT])).logits[0]
    assert (expected - unquantized).abs().max() > 0.01, "this test cannot tell quantized weights from others"
    logits = run_logits(load_model(quantized), PROMPT)
    assert (logits - expected).abs().max() < 1e-4
    assert torch.equal(logits, run_logits(load_model(values), PROMPT)), "the values are not exactly these"
    for size in (2, 4) if RUNS_ALL else (4,):
        of_ranks = [
            run_ranks(size, lambda tp, path=path: run_logits(load_model(path, tp), PROMPT))
            for path in (quantized, values)
        ]
        for of_rank, of_values in zip(*of_ranks, strict=True):
            assert torch.equal(of_rank, of_values)


@pytest.mark.parametrize("name", ["fp8 small blocks", "awq"])
def test_experts_are_quantized_too(tmp_path: Path, name: str) -> None:
    plain = write_tiny_model(tmp_path / "plain", "qwen3_moe")
    quantized, values = write_quantized(plain, tmp_path, name)
    logits, expected, unquantized = (run_logits(load_model(path), PROMPT) for path in (quantized, values, plain))
    assert torch.equal(logits, expected) and not torch.equal(logits, unquantized)
    first, second = run_ranks(2, lambda tp: run_logits(load_model(quantized, tp), PROMPT))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


ONLY_ON_CPU = ("fp8 small blocks",)
ON_GPU = [name for name in FORMATS if name not in ONLY_ON_CPU]


@pytest.mark.parametrize(
    ("name", "device"),
    [("fp8 blocks", "cpu"), ("packed 4", "cpu"), ("gptq 8 order", "cpu")]
    + [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ON_GPU],
)
def test_engine_gives_the_tokens_of_the_values(tmp_path: Path, plain: Path, name: str, device: str) -> None:
    """Several prompts and one, so that a GPU multiplies the packed weights by many rows, by some and by one."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [random_prompt(n, seed=n) for n in (700, 40, 3)]
    answers = []
    for path in write_quantized(plain, tmp_path, name):
        with LLM(str(path), device=device, dtype="float32", max_model_len=1024, num_kvcache_blocks=16) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False) + llm.generate([PROMPT], params, use_tqdm=False)
            answers.append([output["token_ids"] for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONLY_ON_CPU)
def test_formats_that_a_gpu_cannot_keep_packed_are_refused_by_name(tmp_path: Path, plain: Path, name: str) -> None:
    quantized, _ = write_quantized(plain, tmp_path, name)
    with pytest.raises((ConfigError, CheckpointError), match=r"groups of 8; .*device='cpu'"):
        LLM(str(quantized), device="cuda", num_kvcache_blocks=4)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_fp4_of_compressed_tensors_has_the_values_that_the_library_computes(
    kind: str, tmp_path: Path, plain: Path
) -> None:
    library = pytest.importorskip(f"compressed_tensors.compressors.{kind}.base")  # needs Python 3.11
    quantization = pytest.importorskip("compressed_tensors.quantization")
    quantized, _ = write_quantized(plain, tmp_path, f"{kind} compressed")
    size = {"nvfp4": 16, "mxfp4": 32}[kind]
    scale_dtype = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8}[kind]
    strategy = {"nvfp4": "tensor_group", "mxfp4": "group"}[kind]
    args = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy=strategy, group_size=size, symmetric=True, scale_dtype=scale_dtype
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(0)
    parts = {
        "weight_packed": torch.randint(0, 256, (128, 64), generator=generator, dtype=torch.uint8),
        "weight_scale": torch.rand(128, 128 // 16, generator=generator).add(0.1).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([7.0]),
    }
    if kind == "mxfp4":
        parts["weight_scale"] = torch.randint(120, 128, (128, 4), generator=generator, dtype=torch.uint8)
        del parts["weight_global_scale"]
    compressor = getattr(library, f"{kind.upper()}PackedCompressor")
    expected = compressor.decompress(dict(parts), scheme)["weight"].float()
    file = quantized / "model.safetensors"
    save_file(load_file(file) | {f"{Q_PROJ}.{name}": tensor for name, tensor in parts.items()}, file)
    got = load_model(quantized).model.layers[0].self_attn.qkv_proj.weight[:128]
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-6)  # the library multiplies in bf16
    assert expected.abs().max() > 0.1


def test_layers_with_other_settings_have_them() -> None:
    """Settings of some layers, as each tool writes them. The planner and a model on a GPU go by it."""
    packed = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    group = {"targets": ["Linear"], "weights": packed, "format": "pack-quantized"}
    other = {"targets": ["re:.*down_proj", "model.layers.0.mlp.up_proj"], "weights": packed | {"num_bits": 8}}
    other |= {"format": "pack-quantized"}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    auto_round = gptq | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    compressed, awq = {"quant_method": "compressed-tensors"}, gptq | {"quant_method": "awq"}
    names = ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj")
    for given, expected in (
        (compressed | {"config_groups": {"a": group, "b": other}}, (8, 8, 4)),
        (compressed | {"config_groups": {"b": other}}, (8, 8, None)),
        (compressed | {"config_groups": {"a": group, "b": other}, "ignore": [names[0]]}, (None, 8, 4)),
        (
            gptq | {"dynamic": {r"+:.*\.down_proj": {"bits": 8}, r".*\.1\..*": {"bits": 8}, "-:.*up_proj": {}}},
            (8, None, 8),
        ),
        (awq | {"dynamic": {r"-:.*up_proj": None, r"+:.*q_proj": {"group_size": 64}}}, (4, None, 4)),
        (awq | {"modules_to_not_convert": ["down_proj"], "dynamic": {r"-:.*up_proj": {}}}, (None, None, 4)),
        (auto_round | {"extra_config": {names[0]: {"bits": 16}, ".*self_attn.*": {"bits": 8}}}, (None, 4, 8)),
        (
            auto_round | {"extra_config": {f"model.language_{names[1].replace('model.', 'model.', 1)}": {"bits": 8}}},
            (4, 8, 4),
        ),
    ):
        quantization = parse_quantization(given)
        assert quantization is not None
        found = [quantization.format_of(name) for name in names]
        assert [each.bits if each else None for each in found] == list(expected), given
    awq_with_groups = parse_quantization(awq | {"dynamic": {r"+:.*q_proj": {"group_size": 64}}})
    assert awq_with_groups is not None and awq_with_groups.format_of(names[2]).block == (1, 64)  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"bits=8 is not supported; supported are 4"):
        parse_quantization(awq | {"dynamic": {r".*q_proj": {"bits": 8}}})
    without_layout = {name: value for name, value in auto_round.items() if name != "packing_format"}
    for is_symmetric, method in ((True, "gptq"), (False, "awq")):
        quantization = parse_quantization(without_layout | {"sym": is_symmetric})
        assert quantization is not None and quantization.method == method


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("offload", [{}, {"enable_cpu_offload": True, "num_gpu_blocks": 3, "kvcache_block_size": 256}])
def test_gpu_and_cpu_give_the_same_tokens_when_weights_are_quantized_while_loading(
    tmp_path: Path, architecture: str, quantization: str, offload: dict[str, Any]
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "max_position_embeddings": 2048}
    experts = EXPERTS | {"moe_intermediate_size": 128}
    plain = write_tiny_model(tmp_path, architecture, experts=experts, **sizes)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for device in ("cuda", "cpu"):
        with LLM(str(plain), device=device, quantization=quantization, dtype="float32", **offload) as llm:
            outputs = llm.generate([random_prompt(n, seed=n) for n in (1300, 40, 3)], params, use_tqdm=False)
            answers.append([output["token_ids"] for output in outputs])
    assert answers[0] == answers[1]


def test_checkpoint_of_compressed_tensors_has_the_values_that_the_library_computes(tmp_path: Path, plain: Path) -> None:
    """Its own quantization of a tensor, packed and unpacked by itself."""
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")  # needs Python 3.11
    quantization = pytest.importorskip("compressed_tensors.quantization")
    quantized, _ = write_quantized(plain, tmp_path, "packed 4 zeros")
    args = quantization.QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=False)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    low, high = weight.reshape(128, 4, 32).amin(-1), weight.reshape(128, 4, 32).amax(-1)
    scale, zero = quantization.utils.calculate_qparams(low, high, args)
    parts = library.PackedQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme
    )
    expected = library.PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"]
    file = quantized / "model.safetensors"
    save_file(load_file(file) | {f"{Q_PROJ}.{name}": tensor.contiguous() for name, tensor in parts.items()}, file)
    got = load_model(quantized).model.layers[0].self_attn.qkv_proj.weight[:128]
    torch.testing.assert_close(got, expected.float(), rtol=1e-6, atol=1e-6)
    assert (expected - weight).abs().max() < 0.5


@pytest.mark.parametrize(
    ("name", "architecture"),
    tiered(
        product(QUANTIZATIONS, ("qwen3", "qwen3_moe")),
        [("int4", "qwen3_moe"), *((name, "qwen3") for name in QUANTIZATIONS)],
    ),
)
def test_quantizing_while_loading_gives_the_values_of_the_rounded_weights(
    tmp_path: Path, name: str, architecture: str
) -> None:
    """Logits of a checkpoint that holds these values. Two ranks have half of the columns of some layers, in blocks of
    another type if whole ones do not fit.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_heads": 4}
    plain = write_tiny_model(tmp_path / "plain", architecture, **sizes)  # type: ignore[arg-type]
    values, stored = shutil.copytree(plain, tmp_path / "values"), load_config(str(plain))[0]
    tensors, expected = load_file(plain / "model.safetensors"), []
    for num_ranks in (1, 2):
        save_file(round_weights(tensors, stored.quantized(name, None, num_ranks)), values / "model.safetensors")
        expected.append(run_logits(load_model(values), PROMPT))
    assert torch.equal(run_logits(load_model(plain, quantization=name), PROMPT), expected[0])
    assert (run_logits(load_model(plain), PROMPT) - expected[0]).abs().max() > 0.01
    for logits in run_ranks(2, lambda tp: run_logits(load_model(plain, tp, quantization=name), PROMPT)):
        torch.testing.assert_close(logits, expected[1], rtol=1e-4, atol=1e-4)


def quantize_rows(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    scales = args[0].abs().amax(-1, keepdim=True) / 448
    return (args[0] / scales).to(torch.float8_e4m3fn).float() * scales, *args[1:]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_fp8_dynamic_quantizes_many_rows_on_a_cpu_and_not_the_rows_of_experts(
    tmp_path: Path, architecture: str
) -> None:
    """The reference is a model of the rounded weights, each of whose linear layers is given quantized rows."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_heads": 4}
    plain = write_tiny_model(tmp_path, architecture, max_position_embeddings=256, **sizes)  # type: ignore[arg-type]
    for num_tokens, is_quantized in ((64, False), (65, True)):
        prompt = random_prompt(num_tokens)
        of_weights, reference = (load_model(plain, quantization="fp8") for _ in range(2))
        for module in reference.modules():
            formats = getattr(module, "formats", [getattr(module, "quantization", None)])
            if is_quantized and hasattr(module, "rounds_rows") and any(formats):
                module.register_forward_pre_hook(quantize_rows)
        logits, expected, weights_alone = (
            run_logits(model, prompt)
            for model in (load_model(plain, quantization="fp8_dynamic"), reference, of_weights)
        )
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, weights_alone) != is_quantized
        assert (expected - weights_alone).abs().max() > 0.01 or not is_quantized, "this test cannot tell rounded rows"
    # The columns of a rank share the scale of a row, so that two ranks have other errors than one, of the same size
    first, second = run_ranks(2, lambda tp: run_logits(load_model(plain, tp, quantization="fp8_dynamic"), prompt))
    assert torch.equal(first, second)
    error, of_one = ((each - weights_alone).square().mean().sqrt() for each in (first, logits))
    assert 0.5 * of_one < error < 2 * of_one


def test_errors_of_products_are_as_documented() -> None:
    """docs/usage.md has the root mean square of the differences, relative to the product, for normal numbers."""
    x, weight = torch.randn(256, 2048), torch.randn(512, 2048)
    exact = x.double() @ weight.double().t()
    text = (Path(__file__).parents[2] / "docs" / "usage.md").read_text(encoding="utf-8")
    for name, quantization in QUANTIZATIONS.items():
        values = rounded(weight, quantization.for_columns(2048))
        rows = rounded_to_fp8(x) if quantization.has_fp8_activations else x
        error = (rows.double() @ values.double().t() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        (line,) = (line for line in text.splitlines() if line.startswith(f'| `"{name}"` |'))
        assert float(line.rstrip(" |").rpartition("|")[2]) == pytest.approx(error.item(), rel=0.03)


def test_random_weights_of_a_quantized_model_are_the_same_for_any_number_of_ranks(tmp_path: Path) -> None:
    """Each of two ranks has whole blocks of 256 columns."""
    plain = write_tiny_model(tmp_path, hidden_size=256, intermediate_size=512, head_dim=128, num_heads=4)
    model = load_model(plain, quantization="int4", load_format="dummy")
    expected = run_logits(model, PROMPT)
    assert len(model.model.layers[0].mlp.down_proj.weight[0, :32].unique()) <= 16
    for logits in run_ranks(
        2, lambda tp: run_logits(load_model(plain, tp, quantization="int4", load_format="dummy"), PROMPT)
    ):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path, plain: Path) -> None:
    quantized, _ = write_quantized(plain, tmp_path, "awq")
    with pytest.raises(ConfigError, match=r"quantization='fp8' is for checkpoints that are not quantized, .*'awq'"):
        LLM(str(quantized), device="cpu", quantization="fp8")


def test_format_of_a_checkpoint_may_be_named_as_in_vllm(tmp_path: Path, plain: Path) -> None:
    for name, names, others in (("awq", ("awq", "awq_marlin"), ("gptq", "gguf")), ("fp8 tensor", ("fp8",), ("awq",))):
        (tmp_path / name).mkdir()
        quantized, _ = write_quantized(plain, tmp_path / name, name)
        expected = prepare(quantized, {"device": "cpu"}).model_config
        for each in names:
            assert prepare(quantized, {"device": "cpu", "quantization": each}).model_config == expected
        for each in others:
            with pytest.raises(ConfigError, match=f"quantization='{each}' is for checkpoints with quant_method="):
                prepare(quantized, {"device": "cpu", "quantization": each})


def test_layers_that_config_json_leaves_unquantized() -> None:
    """The planner and a model on a GPU go by it.

    Regression: Qwen's own GPTQ checkpoints of Qwen3.5 were refused, because they name layers without settings.
    """
    packed = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": packed, "format": "pack-quantized"}}
    o_proj, gate, down = (
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.11.mlp.down_proj",
    )
    layer_1 = [o_proj, gate]
    for given, expected in (
        ({"quant_method": "fp8", "modules_to_not_convert": None}, []),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]}, [gate]),
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.language_model.layers.1.mlp", "proj"]}, [gate]),
        ({"quant_method": "fp8", "modules_to_not_convert": [r"re:model\.language_model\.layers\.1\.mlp"]}, [gate]),
        ({"quant_method": "awq", "bits": 4, "q_group_size": 128, "modules_to_not_convert": ["self_attn"]}, [o_proj]),
        (
            {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:.*down_proj", gate]},
            [gate, down],
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["model.layers.1."]}, layer_1),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {r"-:model\.layers\.1\.": {}}}, layer_1),
        # Regression: AutoFP8's name for the list was not read
        ({"quant_method": "fp8", "ignored_layers": ["lm_head", "model.layers.1.mlp"]}, [gate]),
    ):
        quantization = parse_quantization(given)
        assert quantization is not None
        assert [name for name in (o_proj, gate, down) if quantization.format_of(name) is None] == expected, given
    for wrong in (["re:["], "lm_head", [1]):
        with pytest.raises(CheckpointError, match=r"quantization_config.modules_to_not_convert.*correct config.json"):
            parse_quantization({"quant_method": "fp8", "modules_to_not_convert": wrong})


def test_wildcards_of_modelopt_may_begin_a_name() -> None:
    """Bug: every name was compiled as a regular expression, so "*gate" of a real config.json was refused."""
    given = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate*"]}
    found = parse_quantization(given | {"exclude_modules": ["*self_attn*"]})
    assert found is not None
    for layer in ("lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj"):
        assert found.format_of(layer) is None
    assert found.format_of("model.layers.0.mlp.up_proj") is not None
    assert parse_quantization({"quant_method": "fp8", "ignored_layers": ["*(gate"]}) is not None
    with pytest.raises(CheckpointError, match=r"ignore has 're:\*gate', which is not a regular expression"):
        parse_quantization(given | {"ignore": ["re:*gate"]})


def test_quantized_experts_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    """Regression: the message asked to download the model again, because of a scale that has another name."""
    plain = write_tiny_model(tmp_path / "plain", "qwen3_moe")
    quantized, _ = write_quantized(plain, tmp_path, "fp8 tensor")
    file, experts = quantized / "model.safetensors", "model.layers.0.mlp.experts"
    tensors = {key: value for key, value in load_file(file).items() if not key.startswith(experts)}
    tensors |= {f"{experts}.gate_up_proj": torch.zeros(8, 64, 64).to(torch.float8_e4m3fn)}
    save_file(tensors | {f"{experts}.gate_up_proj_scale_inv": torch.ones(8)}, file)
    with pytest.raises(CheckpointError, match=r"gate_up_proj in .* F8_E4M3, .* use a checkpoint with tensors for each"):
        load_model(quantized)


def test_experts_of_which_one_is_not_quantized_have_their_values(tmp_path: Path) -> None:
    """Regression: on a GPU they were packed, and the weight as it is had no place."""
    plain = write_tiny_model(tmp_path / "plain", "qwen3_moe")
    quantized, _ = write_quantized(plain, tmp_path, "awq")
    file, name = quantized / "model.safetensors", "model.layers.0.mlp.experts.3.down_proj"
    tensors = {key: value for key, value in load_file(file).items() if not key.startswith(f"{name}.")}
    save_file(tensors | {f"{name}.weight": load_file(plain / "model.safetensors")[f"{name}.weight"]}, file)
    model = load_model(quantized)
    formats = [[format is None for format in layer.mlp.experts.formats] for layer in model.model.layers]
    assert formats == [[False, False, True], [False, False, False]]


def test_wrong_tensors_are_refused_by_name(tmp_path: Path, plain: Path) -> None:
    for i, (name, part, change, message) in enumerate(
        (
            ("fp8 blocks", "weight_scale_inv", lambda x: x[:0], r"weight_scale_inv .*\[0, 1\].* asks for \[1, 1\]"),
            ("fp8 blocks", "weight_scale_inv", lambda x: x * torch.nan, "weight_scale_inv in .* not finite"),
            ("fp8 blocks", "weight_scale_inv", lambda x: None, r"q_proj\.weight in .* has no weight_scale, which"),
            ("float channel", "weight_scale", lambda x: x / 0, "weight_scale in .* not finite"),
            ("packed 4", "weight_packed", lambda x: x[:, :3], r"weight_packed .*\[128, 3\] .*asks for \[128, 16\]"),
            ("packed 4", "weight_packed", lambda x: x.long(), "weight_packed .* dtype I64, .* I32"),
            ("packed 4", "weight_scale", lambda x: x[:, :2], r"weight_scale .*\[128, 2\] .*asks for \[128, 4\]"),
            ("packed 4 zeros", "weight_zero_point", lambda x: None, "has no weight_zero_point, which"),
            ("awq", "qzeros", lambda x: x[:, :1], r"qzeros .*\[4, 1\] .*asks for \[4, 16\]"),
            ("awq", "scales", lambda x: x.t().contiguous(), r"scales .*\[128, 4\] .*asks for \[4, 128\]"),
            ("gptq", "qweight", lambda x: x[:5], r"qweight .*\[5, 128\] .*asks for \[16, 128\]"),
            ("gptq", "g_idx", lambda x: x + 1, r"g_idx .* groups 1 to 4, but there are 4"),
            # Regression: with desc_act, columns whose order is not stored were read in that of the file
            ("gptq 8 order", "g_idx", lambda x: None, "qweight in .* has no g_idx, which"),
            (
                "gptq",
                "qweight",
                lambda x: None,
                r"misses weights: model\.layers\.0\.self_attn\.q_proj\.weight; the files have .*q_proj\.g_idx",
            ),
        )
    ):
        (tmp_path / str(i)).mkdir()
        quantized, _ = write_quantized(plain, tmp_path / str(i), name)
        tensors = load_file(quantized / "model.safetensors")
        changed = change(tensors.pop(f"{Q_PROJ}.{part}"))  # type: ignore[no-untyped-call]
        if changed is not None:
            tensors[f"{Q_PROJ}.{part}"] = changed.contiguous()
        save_file(tensors, quantized / "model.safetensors")
        for num_ranks in (1, 2):
            with pytest.raises(CheckpointError, match=message):
                run_ranks(num_ranks, lambda tp, path=quantized: load_model(path, tp))


class Allocations(TorchDispatchMode):
    """Records the size of the largest tensor that an operation yields outside the meta device."""

    largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta:
            self.largest_bytes = max(self.largest_bytes, out.nbytes)
        return out


def test_tensors_of_a_wrong_shape_are_refused_before_memory_is_allocated(tmp_path: Path, plain: Path) -> None:
    """Regression: a missing tensor was reported once all others had been loaded, minutes later; then, once the GPU had
    memory for all of them.
    """
    last = "model.layers.1.self_attn.v_proj"
    for name, part in (
        ("plain", "weight"),
        ("packed 4", "weight_scale"),
        ("gptq", "qzeros"),
        ("awq", "qweight"),
        ("fp8 blocks", "weight"),
    ):
        (tmp_path / name).mkdir()
        path = plain if name == "plain" else write_quantized(plain, tmp_path / name, name)[0]
        config, _ = load_config(str(path))
        good = load_file(path / "model.safetensors")
        stored = good.pop(f"{last}.{part}")
        for changed, is_good in (({}, False), ({part: stored[:-1].contiguous()}, False), ({part: stored}, True)):
            directory = tmp_path / f"changed {name}"
            directory.mkdir(exist_ok=True)
            save_file(good | {f"{last}.{part}": each for part, each in changed.items()}, directory / "one.safetensors")
            with Allocations() as allocations, nullcontext() if is_good else pytest.raises(CheckpointError, match=last):
                build_model(config, TPGroup(), max_model_len=64, dtype=torch.float32, device="cpu", directory=directory)
            assert (allocations.largest_bytes > 1000) == is_good, name


def test_zeros_that_config_json_denies_are_refused(tmp_path: Path, plain: Path) -> None:
    """Regression: they were ignored, and the weights had other values. Old files have zeros of 0."""
    quantized, values = write_quantized(plain, tmp_path, "packed 4 zeros")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = True
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_zero_point in .* is not 0, but .* symmetric=true"):
        load_model(quantized)
    (tmp_path / "channel").mkdir()
    quantized, values = write_quantized(plain, tmp_path / "channel", "float channel")
    file = quantized / "model.safetensors"
    save_file(load_file(file) | {f"{Q_PROJ}.weight_zero_point": torch.zeros(128, 1).to(torch.float8_e4m3fn)}, file)
    assert torch.equal(run_logits(load_model(quantized), PROMPT), run_logits(load_model(values), PROMPT))


def test_quantized_files_without_quantization_config_are_refused_by_what_they_have(tmp_path: Path, plain: Path) -> None:
    for name, message in (
        ("packed 4", r"q_proj\.weight, .* the files have .*q_proj\.weight_packed, .* check quantization_config"),
        ("awq", r"q_proj\.weight, .* the files have .*q_proj\.qweight, .* check quantization_config"),
        ("fp8 tensor", r"q_proj\.weight in .* has dtype F8_E4M3, but config\.json has no quantization_config"),
    ):
        (tmp_path / name).mkdir()
        quantized, _ = write_quantized(plain, tmp_path / name, name)
        shutil.copy(plain / "config.json", quantized)
        with pytest.raises(CheckpointError, match=message):
            load_model(quantized)


@pytest.mark.parametrize("name", ["fp8 blocks", "packed 4 zeros", "awq", "gptq"])
def test_a_quantized_head_is_replaced_by_its_values(tmp_path: Path, name: str) -> None:
    """Regression: with lm_head=true a GPTQ checkpoint was refused, but the same worked in all other formats."""
    plain = write_tiny_model(tmp_path / "plain", "qwen3")
    paths = write_quantized(plain, tmp_path, name)
    quantized, values = (load_file(path / "model.safetensors") for path in paths)
    parts, values["lm_head.weight"] = FORMATS[name][1]("lm_head", quantized.pop("lm_head.weight"))
    quantized |= {f"lm_head.{part}": tensor.contiguous() for part, tensor in parts.items()}
    for path, tensors in zip(paths, (quantized, values), strict=True):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_quantization(paths[0], lm_head=True)
    expected = run_logits(load_model(paths[1]), PROMPT)
    assert torch.equal(run_logits(load_model(paths[0]), PROMPT), expected)
    for logits in run_ranks(2, lambda tp: run_logits(load_model(paths[0], tp), PROMPT)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_zeros_of_a_symmetric_awq_checkpoint_are_read(tmp_path: Path, plain: Path) -> None:
    """Regression: zero_point=false was refused, but GPTQModel writes it by default, and stores all zeros as 8."""
    quantized, values = write_quantized(plain, tmp_path, "awq")
    edit_quantization(quantized, zero_point=False)
    assert torch.equal(run_logits(load_model(quantized), PROMPT), run_logits(load_model(values), PROMPT))


def test_symmetric_zeros_of_gptq_are_the_middle_whatever_the_name_of_the_format(tmp_path: Path, plain: Path) -> None:
    """Regression: files with sym=true and zeros of 8 under the old format's name, which stores 7, were read as 9."""
    for bits in (4, 8):
        for offset in (0, 1):
            for name, sym in (("gptq", True), ("gptq_v2", True), ("gptq", None)):
                directory = tmp_path / f"{bits} {offset} {name} {sym}"
                directory.mkdir()
                settings = GPTQ | {"bits": bits, "desc_act": False, "checkpoint_format": name, "sym": sym}
                FORMATS["symmetric"] = settings, gptq(bits, offset, has_order=False, is_symmetric=True)
                try:
                    quantized, values = write_quantized(plain, directory, "symmetric")
                finally:
                    del FORMATS["symmetric"]
                assert torch.equal(run_logits(load_model(quantized), PROMPT), run_logits(load_model(values), PROMPT))


def test_zeros_that_symmetric_settings_deny_are_refused(tmp_path: Path, plain: Path) -> None:
    quantized, _ = write_quantized(plain, tmp_path, "gptq")
    edit_quantization(quantized, sym=True)
    message = r"q_proj\.qzeros in .* has zeros from 3 to 15, but .* sym=true, .* all are 8 or all are 7"
    with pytest.raises(CheckpointError, match=message):
        load_model(quantized)


def test_old_name_of_quantization_config_is_read(tmp_path: Path, plain: Path) -> None:
    """Regression: checkpoints of 2024 that have `compression_config` were refused for missing weights."""
    quantized, values = write_quantized(plain, tmp_path, "packed 4")
    config = json.loads((quantized / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (quantized / "config.json").write_text(json.dumps(config))
    assert torch.equal(run_logits(load_model(quantized), PROMPT), run_logits(load_model(values), PROMPT))


def test_order_of_columns_is_read_wherever_it_is_stored(tmp_path: Path, plain: Path) -> None:
    """Regression: it was ignored unless config.json had actorder="group". -1 throughout stands for no order."""
    quantized, values = write_quantized(plain, tmp_path, "packed 4")
    file = quantized / "model.safetensors"
    tensors, expected = load_file(file), run_logits(load_model(values), PROMPT)
    for order, is_same in ((torch.full((128,), -1), True), (torch.arange(128).flip(0) // 32, False)):
        save_file(tensors | {f"{Q_PROJ}.weight_g_idx": order.int()}, file)
        assert torch.equal(run_logits(load_model(quantized), PROMPT), expected) == is_same


def test_groups_that_do_not_divide_a_weight_are_refused(tmp_path: Path, plain: Path) -> None:
    quantized, _ = write_quantized(plain, tmp_path, "gptq")
    edit_quantization(quantized, group_size=48)
    with pytest.raises(CheckpointError, match=r"q_proj\.qweight in .* 128 columns, which groups of 48 do not divide"):
        load_model(quantized)


def test_what_a_quantized_checkpoint_may_have_besides(tmp_path: Path, plain: Path) -> None:
    """Scales of activations and of a quantized KV cache are not used. Other tensors are unknown."""
    quantized, values = write_quantized(plain, tmp_path, "float channel")
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    attention = "model.layers.0.self_attn"
    others = (f"{Q_PROJ}.input_scale", f"{attention}.k_scale", f"{attention}.v_scale")
    save_file(tensors | {name: torch.ones(1) for name in others}, file)
    assert torch.equal(run_logits(load_model(quantized), PROMPT), run_logits(load_model(values), PROMPT))
    no_bias = {f"{SKIPPED}.bias": torch.zeros(128)}  # which a model of this architecture has not
    save_file(tensors | no_bias, file)
    assert torch.equal(run_logits(load_model(quantized), PROMPT), run_logits(load_model(values), PROMPT))
    for name in (f"{Q_PROJ}.weight_packed", f"{SKIPPED}.weight_scale", f"{SKIPPED}.bias"):
        save_file(tensors | {name: torch.ones(1)}, file)
        with pytest.raises(CheckpointError, match=f"unknown to the model: {name}"):
            load_model(quantized)


def test_formats_that_are_not_supported_are_refused_by_name() -> None:
    def group(**changes: Any) -> dict[str, Any]:
        weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | changes}},
        }

    auto_round = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    gptq, awq = {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4, "group_size": 128}
    cases: tuple[tuple[Any, str], ...] = (
        ("int4", "quantization_config='int4' must be an object"),
        ({}, ""),
        ({"bits": 4}, "quant_method=None is not supported; supported are 'fp8'"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\] must be two positive"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "must be two positive"),
        (gptq | {"bits": 3, "group_size": 32}, "bits=3 is not supported; supported are 4, 8"),
        (gptq, "group_size=None must be a number of columns"),
        (gptq | {"group_size": 0}, "group_size=0 must be"),
        (gptq | {"group_size": 32, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (gptq | {"group_size": 32, "dynamic": {"-:x": {}, "+:y": {"bits": 3}}}, "bits=3 is not supported"),
        (gptq | {"group_size": 32, "dynamic": {"+:y": 8}}, "dynamic={.*use a checkpoint without"),
        (gptq | {"group_size": 32, "dynamic": {"+:y[": {"bits": 8}}}, "dynamic has 're:y\\[', which is not a regular"),
        (gptq | {"group_size": 32, "dynamic": ["-:x"]}, r"dynamic=\['-:x'\]"),
        (gptq | {"group_size": 32, "format": "marlin"}, "checkpoint_format='marlin'"),
        (gptq | {"group_size": 32, "is_marlin_format": True}, "is_marlin_format=True"),
        (awq | {"version": "gemv"}, "version='gemv' is not supported; supported are 'gemm'"),
        (awq | {"format": "gemv_fast"}, "format='gemv_fast' is not supported; supported are 'gemm'"),
        (awq | {"zero_point": "asymmetric"}, "zero_point='asymmetric' is not supported; supported are True, False"),
        (awq | {"bits": 8}, "bits=8"),
        (group(num_bits=2), r"config_groups\.group_0\.weights\.num_bits=2"),
        (group(type="float"), r"weights\.type='float'"),
        (group(strategy="tensor_group"), r"strategy='tensor_group' .*supported are 'group', 'channel'"),
        (group(group_size=-2), r"weights\.group_size=-2 must be"),
        (group() | {"format": "mxfp6-pack-quantized"}, "format='mxfp6-pack-quantized'"),
        (group() | {"format": "nvfp4-pack-quantized"}, r"weights\.type='int' is not supported; supported are 'float'"),
        (group(type="float") | {"format": "nvfp4-pack-quantized"}, r"group_size=32 is not supported; supported are 16"),
        (group() | {"config_groups": {}}, r"config_groups={} must be an object with groups"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "quant_algo='FP8' is not supported; supported are 'NVFP4', 'W4A16_NVFP4'",
        ),
        (auto_round | {"bits": 2}, "bits=2"),
        (auto_round | {"packing_format": "auto_round:llm_compressor"}, "packing_format='auto_round:llm_compressor'"),
        (auto_round | {"extra_config": {"x": 16}}, "extra_config={'x': 16}"),
        (auto_round | {"extra_config": {"x": {"bits": 3}}}, "bits=3"),
        (auto_round | {"data_type": "mx_fp"}, "data_type='mx_fp'"),
        (group() | {"sparsity_config": {"format": "sparse-24"}}, r"sparsity_config\.format='sparse-24'"),
        (group() | {"sparsity_config": ["x"]}, r"sparsity_config\.format=\['x'\]"),
        (group() | {"format": "mixed-precision"}, r"config_groups\.group_0\.format=None"),
        (group() | {"transform_config": {"r3": {}}}, "transform_config="),
        ({"quant_method": ["fp8"]}, r"quant_method=\['fp8'\]"),
        (gptq | {"bits": 4.0, "group_size": 32}, r"bits=4\.0"),
    )
    for given, message in cases:
        if not message:
            assert parse_quantization(given) is None
            continue
        with pytest.raises(CheckpointError, match=message):
            parse_quantization(given)
    for key, value in (("targets", []), ("input_activations", {"num_bits": 8})):
        wrong = group()
        wrong["config_groups"]["group_0"][key] = value
        with pytest.raises(CheckpointError, match=f"group_0.{key}="):
            parse_quantization(wrong)
    # As compressed-tensors reads it. Regression: true counted as no order, so a GPU found out while it loaded
    for order, has_order in (("group", True), ("GROUP", True), (True, True), (False, False), ("weight", False)):
        assert parse_quantization(group(actorder=order)).has_order == has_order  # type: ignore[union-attr]


def test_settings_of_gptq_are_read_as_its_tools_write_them() -> None:
    """Regression: zeros were taken for those of gptq if config.json calls the layout `format`, and checkpoints such as
    Qwen3.5-27B-GPTQ-Int4 were refused because of keys of `dynamic` that change nothing.
    """
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    for given, expected in (
        ({}, True),
        ({"format": "gptq"}, True),
        ({"format": "gptq_v2"}, False),
        ({"checkpoint_format": "gptq_v2", "format": "gptq_v2"}, False),
    ):
        quantization = parse_quantization(gptq | given)
        assert quantization is not None and quantization.stores_less_one == expected, given
    dynamic: dict[str, Any] = {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}}
    quantization = parse_quantization(gptq | {"dynamic": dynamic})
    assert quantization is not None
    names = ("self_attn.q_proj", "linear_attn.out_proj", "mlp.experts.0.down_proj")
    assert [quantization.format_of(f"model.layers.1.{name}") is None for name in names] == [True, True, False]


def test_activations_are_quantized_if_the_checkpoint_asks_for_scales_found_at_each_product() -> None:
    token = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    group = token | {"strategy": "group", "group_size": 128}

    def of_library(strategy: str, activations: Any) -> dict[str, Any]:
        weights = {"type": "float", "num_bits": 8, "strategy": strategy, "block_structure": [128, 128]}
        settings = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": settings},
        }

    for given, expected in (
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, True),
        ({"quant_method": "fp8"}, True),  # the default of the format
        ({"quant_method": "fp8", "activation_scheme": "static"}, False),
        (of_library("channel", token), True),
        (of_library("tensor", token), True),
        (of_library("block", group), True),
        (of_library("block", token), False),
        (of_library("channel", group), False),
        (of_library("channel", token | {"dynamic": False}), False),
        (of_library("tensor", token | {"strategy": "tensor"}), False),
        (of_library("channel", token | {"type": "int"}), False),
        (of_library("channel", None), False),
    ):
        quantization = parse_quantization(given)
        assert quantization is not None and quantization.has_fp8_activations == expected, given
    assert [name for name, each in QUANTIZATIONS.items() if each.has_fp8_activations] == ["fp8_dynamic"]


def quantize_input(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    groups = args[0].unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=2**-100) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2), *args[1:]


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", ["fp8 blocks", "fp8_dynamic"])
def test_engine_errs_by_what_activations_in_fp8_imply(tmp_path: Path, name: str, enforce_eager: bool) -> None:
    """The log-probabilities of a prompt differ from those of the values in fp32 about as much as on a CPU where each
    linear layer is given quantized rows. In 16 bits they would differ by a fifth of that.
    """
    capability, is_online = torch.cuda.get_device_capability(), name in QUANTIZATIONS
    if capability != (9, 0) and not (is_online and can_multiply_fp8(capability)):
        pytest.skip("this GPU does not multiply such codes")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 1024}
    plain = write_tiny_model(tmp_path / "plain", "qwen3", **sizes)  # type: ignore[arg-type]
    quantized = plain if is_online else write_quantized(plain, tmp_path, name)[0]
    prompt = random_prompt(701)
    of_prompt = []
    for hook in (None, quantize_input if not is_online else quantize_rows):
        model = load_model(quantized, max_model_len=1024, quantization="fp8" if is_online else None)
        for module in model.modules():
            if hook is not None and getattr(module, "quantization", None) is not None:
                module.register_forward_pre_hook(hook)
        logprobs = run_logits(model, prompt).log_softmax(-1)
        of_prompt.append(logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    exact, expected = of_prompt
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=0)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 1024, "enforce_eager": enforce_eager}
    options |= {"quantization": name} if is_online else {}
    with LLM(str(quantized), device="cuda", num_kvcache_blocks=128, **options) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        many = llm.generate([random_prompt(n) for n in range(3, 103)], params, use_tqdm=False)
    assert all(len(each["token_ids"]) == 20 for each in many)  # also steps of more than 64 sequences
    found = zip(output["prompt_logprobs"][1:], prompt[1:], strict=True)
    got = torch.tensor([of_token[token_id].logprob for of_token, token_id in found])
    error, of_format = ((each - exact).square().mean().sqrt() for each in (got, expected))
    assert 0.5 * of_format < error < 2 * of_format
