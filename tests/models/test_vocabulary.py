"""The output head quantized while it is loaded: its values, its groups, tied tables, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import load_model, random_prompt, run_logits
from gguf_files import write_gguf
from head_values import EMBEDDING, HEAD, write_values
from model_files import edit_quantization
from quantized_models import FORMATS, write_quantized
from safetensors.torch import load_file, save_file
from thread_ranks import run_ranks
from tiny_models import greedy_reference, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.quantization import HEAD_QUANTIZATIONS
from nanovllm.checkpoint.read_config import load_config
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.models.quantized_weights import head_format, quantize

PROMPT = random_prompt(40)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
INT8 = HEAD_QUANTIZATIONS["int8"]
VOCAB_SIZE = 321  # which two ranks do not divide


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with the values of the quantized head."""
    parent = tmp_path_factory.mktemp("models")
    plain = write_tiny_model(parent / "plain", tied=request.param, hidden_size=128, vocab_size=VOCAB_SIZE)
    return plain, write_values(plain, parent / "values")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_head_has_the_values_of_the_rounded_weights(models: tuple[Path, Path], dtype: torch.dtype) -> None:
    plain, values = models
    expected = run_logits(load_model(values, dtype=dtype), PROMPT)
    model = load_model(plain, quantize_head="int8", dtype=dtype)
    assert torch.equal(run_logits(model, PROMPT), expected)
    assert not torch.equal(run_logits(load_model(plain, dtype=dtype), PROMPT), expected)
    embedding = load_file(plain / "model.safetensors")[EMBEDDING]
    assert torch.equal(model.model.embed_tokens.weight, embedding.to(dtype))


def test_quantized_head_of_two_ranks_has_the_values_of_one(models: tuple[Path, Path]) -> None:
    plain, values = models
    expected = run_logits(load_model(values), PROMPT)
    for logits in run_ranks(2, lambda tp: run_logits(load_model(plain, tp, quantize_head="int8"), PROMPT)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_random_weights_of_tied_tables_have_the_head_of_the_embedding(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path, tied=True, hidden_size=128)
    model = load_model(plain, load_format="dummy", quantize_head="int8")
    assert isinstance(model.lm_head.weight, torch.Tensor)
    quantize(model.model.embed_tokens.weight, INT8).copy_values(expected := torch.empty_like(model.lm_head.weight))
    assert torch.equal(model.lm_head.weight, expected)
    tables = load_model(plain, load_format="dummy").model.embed_tokens.weight
    assert torch.equal(model.model.embed_tokens.weight, tables)


@pytest.mark.parametrize("embedding_on_cpu", [True, False, "auto"])
def test_engine_gives_the_tokens_of_transformers_with_the_values_of_the_head(
    models: tuple[Path, Path], embedding_on_cpu: bool | str
) -> None:
    """Log-probabilities of prompts are those of the same head. On a CPU the place of the embedding changes nothing."""
    plain, values = models
    expected, outputs = greedy_reference(values, PROMPT, 12), []
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, logprobs=2)
    for path, options in ((plain, {"quantize_head": "int8", "embedding_on_cpu": embedding_on_cpu}), (values, {})):
        with LLM(str(path), device="cpu", dtype="float32", skip_tokenizer_init=True, **options) as llm:
            assert llm.generate([PROMPT], GREEDY)[0]["token_ids"] == expected
            outputs.append(llm.generate([PROMPT], scored)[0])
            assert not llm.model_config.embedding_on_cpu
    assert outputs[0]["prompt_logprobs"] == outputs[1]["prompt_logprobs"]
    assert outputs[0]["logprobs"] == outputs[1]["logprobs"]


@pytest.mark.parametrize("tied", [False, True])
def test_draft_head_uses_the_quantized_head(tmp_path: Path, tied: bool) -> None:
    """It drafts with the embedding and the output head of the model."""
    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 128, "with_mtp": True, "tied": tied}
    plain = write_tiny_model(tmp_path / "plain", "qwen3_5", **sizes)
    values = write_values(plain, tmp_path / "values")
    models = [load_model(plain, quantize_head="int8", with_mtp=True), load_model(values, with_mtp=True)]
    assert torch.equal(*(run_logits(model, PROMPT) for model in models))
    expected = greedy_reference(values, PROMPT, 12)
    options: dict[str, Any] = {"speculation": "mtp", "quantize_head": "int8", "dtype": "float32"}
    with LLM(str(plain), device="cpu", skip_tokenizer_init=True, **options) as llm:
        assert llm.generate([PROMPT], GREEDY)[0]["token_ids"] == expected


class _Head:
    """Stands for a stored tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape, self.num_read = values, tuple(values.shape), 0

    def read(self, *index: slice) -> torch.Tensor:
        self.num_read += len(self.values[index])
        return self.values[index]


def test_groups_are_halved_if_that_lowers_the_error_enough() -> None:
    values = torch.randn(5000, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for every, size in ((None, 64), (64, 32)):  # an outlier in every second half of a group
        head: Any = _Head(values.clone())
        if every is not None:
            head.values[:, ::every] *= 30
        assert head_format(head, INT8).block == (1, size)
        assert head.num_read <= 17 * 64
    small: Any = _Head(values[:3, :96])
    assert head_format(small, INT8).block[1] in (32, 64)


def test_head_with_outliers_is_loaded_in_groups_of_32(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path, hidden_size=128)
    tensors = load_file(plain / "model.safetensors")
    tensors[HEAD][:, ::64] *= 30
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    model, expected = load_model(plain, quantize_head="int8"), torch.empty_like(tensors[HEAD])
    assert model.lm_head.quantization is not None and model.lm_head.quantization.block == (1, 32)
    quantize(tensors[HEAD], model.lm_head.quantization).copy_values(expected)
    assert isinstance(model.lm_head.weight, torch.Tensor) and torch.equal(model.lm_head.weight, expected)


@pytest.mark.parametrize("name", ["gptq", "fp8 blocks"])
def test_head_that_is_quantized_already_is_refused(tmp_path: Path, name: str) -> None:
    plain = write_tiny_model(tmp_path / "plain", "qwen3")
    path, _ = write_quantized(plain, tmp_path, name)
    tensors = load_file(path / "model.safetensors")
    load_model(path, quantize_head="int8")  # the layers are quantized, and the head is not
    parts, _ = FORMATS[name][1]("lm_head", tensors.pop(HEAD))
    tensors |= {f"lm_head.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_quantization(path, lm_head=True)
    with pytest.raises(ConfigError, match=r"quantize_head is for .* 16 or 32 bits, and lm_head\.\w+ .* already; leave"):
        load_model(path, quantize_head="int8")


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_head_in_a_quantized_type_is_refused_before_loading(tmp_path: Path, tied: bool) -> None:
    plain = write_tiny_model(tmp_path / "plain", "llama", hidden_size=128, tied=tied)
    config, _ = load_config(str(write_gguf(tmp_path / "q.gguf", plain, types=["Q8_0"])))
    with pytest.raises(ConfigError, match=r"quantize_head='int8' is for .* this GGUF file has the head in Q8_0; leave"):
        config.quantized(None, "int8")
    file = write_gguf(tmp_path / "f.gguf", plain, types=["F32"])
    values = write_values(plain, tmp_path / "values")
    assert torch.equal(
        run_logits(load_model(file, quantize_head="int8"), PROMPT), run_logits(load_model(values), PROMPT)
    )


def test_tied_model_with_another_head_stays_refused(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path, tied=True, hidden_size=128)
    tensors = load_file(plain / "model.safetensors")
    for change, is_refused in ((0.0, False), (1.0, True)):
        changed = tensors | {HEAD: tensors[EMBEDDING] + change}
        save_file(changed, plain / "model.safetensors", metadata={"format": "pt"})
        if not is_refused:
            load_model(plain, quantize_head="int8")
            continue
        with pytest.raises(CheckpointError, match=r"unknown to the model: lm_head\.weight; it is not the embedding"):
            load_model(plain, quantize_head="int8")
