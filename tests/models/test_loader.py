"""Loading safetensors on one rank and on several, dummy weights, and an error for every kind of wrong file."""

import json
import sys
from pathlib import Path

import pytest
import torch
from dense_model import load_model, random_prompt, run_logits
from gguf_files import write_gguf
from model_files import edit_json
from safetensors.torch import load_file, save_file
from thread_ranks import run_ranks
from tiny_models import reference_model, write_tiny_model

from nanovllm import LLM
from nanovllm.checkpoint.read_config import load_config
from nanovllm.device.tp_group import TPGroup
from nanovllm.errors import CheckpointError
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import build_model, load_weights

PROMPT = random_prompt(30)


def dummy_model(directory: Path, tp: TPGroup, seed: int = 0) -> CausalLM:
    config, _ = load_config(str(directory))
    model = build_model(config, tp, max_model_len=128, dtype=torch.float32, device="cpu")
    load_weights(model, None, load_format="dummy", seed=seed)
    return model


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Set a tensor of the checkpoint, or with None remove it."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_give_the_logits_of_one(tmp_path: Path, architecture: str, tied: bool) -> None:
    write_tiny_model(tmp_path, architecture, tied=tied, bias=True, vocab_size=321)
    expected = run_logits(load_model(tmp_path), PROMPT)
    for logits in run_ranks(2, lambda tp: run_logits(load_model(tmp_path, tp), PROMPT)):
        assert logits.shape == (len(PROMPT), 321)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_sharded_checkpoint_equals_single_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "single")
    write_tiny_model(tmp_path / "sharded", sharded=True)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    single, sharded = (run_logits(load_model(tmp_path / name), PROMPT) for name in ("single", "sharded"))
    assert torch.equal(single, sharded)


def test_checkpoint_dtype_is_converted_to_the_models(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, dtype=torch.bfloat16)
    model = load_model(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert torch.equal(model.model.norm.weight, expected.float())


def test_tied_head_and_rotary_buffers_in_the_file_are_ignored(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tied=True)
    expected = run_logits(load_model(tmp_path), PROMPT)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(
        tmp_path, **{"lm_head.weight": embedding, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    )
    assert torch.equal(run_logits(load_model(tmp_path), PROMPT), expected)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_tied_model_whose_matrix_is_stored_as_its_head_loads(tmp_path: Path, architecture: str) -> None:
    """Regression: it was refused for a missing embedding, but transformers loads it."""
    write_tiny_model(tmp_path, architecture, tied=True, sharded=architecture == "qwen3")
    expected = run_logits(load_model(tmp_path), PROMPT)
    for file in tmp_path.glob("*.safetensors"):
        renamed = {name.replace("model.embed_tokens", "lm_head"): each for name, each in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    for index in tmp_path.glob("*.index.json"):
        index.write_text(index.read_text().replace("model.embed_tokens", "lm_head"))
    assert torch.equal(run_logits(load_model(tmp_path), PROMPT), expected)
    transformers_logits = reference_model(tmp_path)(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(expected, transformers_logits, rtol=1e-4, atol=1e-4)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"misses weights: model\.embed_tokens\.weight"):
        load_model(tmp_path)


def test_tensors_in_fp8_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Regression: a norm raised ValueError, and a head beside tied embeddings RuntimeError."""
    write_tiny_model(tmp_path, tied=True)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})
    tensors = load_file(tmp_path / "model.safetensors")
    for name, stored, message in (
        ("lm_head", "model.embed_tokens", r"unknown to the model: lm_head\.weight; it is not the embedding"),
        ("model.norm", "model.norm", r"model\.norm\.weight in .* has dtype F8_E4M3, but .*quant_method='fp8'"),
    ):
        changed = {f"{name}.weight": tensors[f"{stored}.weight"].to(torch.float8_e4m3fn)}
        save_file(tensors | changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_tied_head_that_is_not_the_embedding_is_refused(tmp_path: Path, architecture: str) -> None:
    """Regression: it was ignored. transformers uses it: fine-tuned models may have one that was trained by itself."""
    write_tiny_model(tmp_path, architecture, tied=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    other = embedding.clone()
    other[-1, -1] += 1
    for head in (other, embedding[:300].clone(), torch.zeros(0)):
        edit_tensors(tmp_path, **{"lm_head.weight": head})
        with pytest.raises(
            CheckpointError, match=r"unknown to the model: lm_head\.weight; .*'tie_word_embeddings': Fal"
        ):
            load_model(tmp_path)


def test_wrong_weight_raises_with_its_name(tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path) / "model.safetensors"
    good = file.read_bytes()
    norm = "model.norm.weight"
    for name, tensor, message in (
        (
            "model.layers.1.self_attn.k_proj.weight",
            None,
            r"misses weights: model\.layers\.1\.self_attn\.k_proj\.weight;",
        ),
        ("model.layers.0.mlp.experts.weight", torch.ones(3), r"unknown to the model: model\.layers\.0\.mlp\.experts\."),
        (norm, torch.ones(65), r"norm\.weight in .* has shape \[65\], but config\.json asks for \[64\]"),
        (norm, torch.ones(64, dtype=torch.int8), r"model\.norm\.weight .*I8, but config\.json has no quant"),
    ):
        file.write_bytes(good)
        edit_tensors(tmp_path, **{name: tensor})
        for size in (1, 2):
            with pytest.raises(CheckpointError, match=message):
                run_ranks(size, lambda tp: load_model(tmp_path, tp))
    for num_bytes in (0, 4, 1000, 100_000):
        file.write_bytes(good[:num_bytes])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
            load_model(tmp_path)


def test_no_weights_raise_with_the_remedy(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match=r"no safetensors file in .*save_pretrained"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match="preset has no weights"):
        load_weights(load_model(write_tiny_model(tmp_path / "other")), None)


def test_load_format_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", write_tiny_model(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"load_format='safetensors', but .*x.gguf is in GGUF"):
        LLM(str(path), device="cpu", load_format="safetensors")


def test_index_broken_or_naming_a_missing_file_raises(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, sharded=True)
    index = tmp_path / "model.safetensors.index.json"
    next(tmp_path.glob("model-00002*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"files that do not exist: .*model-00002"):
        load_model(tmp_path)
    for text in ("{", "[]", json.dumps({"weight_map": None})):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json is not an index"):
            load_model(tmp_path)


def test_dummy_same_seed_same_model_for_any_ranks(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, vocab_size=9001)  # more rows than are drawn at a time
    expected = run_logits(dummy_model(tmp_path, TPGroup()), PROMPT)
    assert torch.equal(run_logits(dummy_model(tmp_path, TPGroup()), PROMPT), expected)
    assert not torch.equal(run_logits(dummy_model(tmp_path, TPGroup(), seed=1), PROMPT), expected)
    assert 0.1 < expected.std() < 10
    for logits in run_ranks(2, lambda tp: run_logits(dummy_model(tmp_path, tp), PROMPT)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_progress_bar_counts_every_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    config, path = load_config(str(write_tiny_model(tmp_path, "llama")))
    model = build_model(config, TPGroup(), max_model_len=128, dtype=torch.float32, device="cpu")
    load_weights(model, path, show_progress=True)
    assert "Loading weights: 100%" in capsys.readouterr().err
