"""Models in GGUF: the tokens are those of a checkpoint with the same values, which transformers confirms."""

import argparse
import inspect
from pathlib import Path

import pytest
import torch
from dense_model import random_prompt
from gguf_files import TYPES, write_gguf
from smollm2 import GGUF_NAME, gguf_directory, write_model
from tiny_models import greedy_reference, reference_model, write_tiny_model

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.read_config import load_config
from nanovllm.device.tp_group import TPGroup
from nanovllm.models.loader import build_model, load_weights

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 26, 43]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


QUANTIZED = [name for name in TYPES if name != "F32"]


def answer(model: Path, **options: object) -> list[int]:
    with LLM(str(model), device="cpu", dtype="float32", skip_tokenizer_init=True, **options) as llm:
        return llm.generate([PROMPT], GREEDY)[0]["token_ids"]


@pytest.mark.parametrize(
    "architecture",
    ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_moe"],
)
def test_gguf_of_an_architecture_gives_the_tokens_of_transformers(architecture: str, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", architecture, num_layers=4, tied=architecture == "qwen3")
    file = write_gguf(tmp_path / "model.gguf", directory)
    assert answer(file) == greedy_reference(directory, PROMPT, GREEDY.max_tokens)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5_moe"])
def test_mixed_types_give_the_tokens_of_their_values(architecture: str, tmp_path: Path) -> None:
    recurrent = {"linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_value_head_dim": 32}
    recurrent |= {"linear_key_head_dim": 16}
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_layers": 4, "num_heads": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    experts["shared_expert_intermediate_size"] = 256
    directory = write_tiny_model(tmp_path / "model", architecture, **sizes, recurrent=recurrent, experts=experts)
    file = write_gguf(tmp_path / "model.gguf", directory, types=QUANTIZED, same_values=tmp_path / "same")
    expected = greedy_reference(tmp_path / "same", PROMPT, GREEDY.max_tokens)
    assert answer(file) == expected == answer(tmp_path / "same")


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_draft_head_and_stacked_experts_are_those_of_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    """Some files have gate and up of all experts in one tensor, and a draft head as one more block (nextn)."""
    with_mtp = architecture != "qwen3_moe"
    directory = write_tiny_model(tmp_path / "model", architecture, num_layers=4, with_mtp=with_mtp)
    loaded = []
    for model in (directory, write_gguf(tmp_path / "model.gguf", directory, fused_experts=True)):
        config, where = load_config(str(model))
        options = {"max_model_len": 64, "dtype": torch.float32, "device": "cpu", "with_mtp": with_mtp}
        loaded.append(build_model(config, TPGroup(), directory=where, **options))
        load_weights(loaded[-1], where)
    expected, found = (dict(each.named_parameters()) for each in loaded)
    assert found.keys() == expected.keys() and any("mtp" in name for name in found) == with_mtp
    for name, parameter in found.items():
        tolerance = 1e-6 if name.endswith("A_log") else 2e-7  # stored as -exp(A_log), and norms with 1 added
        assert torch.allclose(parameter, expected[name], rtol=tolerance, atol=tolerance), name


@pytest.mark.slow
def test_split_model_on_two_ranks_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Each rank reads its rows and columns of the blocks."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    directory = write_tiny_model(tmp_path / "model", "llama", **sizes)
    file = write_gguf(
        tmp_path / "m.gguf", directory, types=["Q4_0", "Q8_0"], same_values=tmp_path / "same", num_files=3
    )
    assert answer(file, tensor_parallel_size=2) == greedy_reference(tmp_path / "same", PROMPT, GREEDY.max_tokens)


def test_file_in_16_bits_can_be_quantized_while_loading(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3", hidden_size=128, dtype=torch.bfloat16)
    file = write_gguf(tmp_path / "m.gguf", directory, types=["BF16"])
    assert answer(file, quantization="int4") == answer(directory, quantization="int4")


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_gpu_and_cpu_give_the_same_tokens(architecture: str, tmp_path: Path) -> None:
    """In fp32, of types that differ within q, k and v, within experts, and in columns in another order; many rows, some
    and one. The GPU holds about the bytes of the file.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_layers": 4, "num_heads": 8, "head_dim": 64}
    recurrent = {"linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_value_head_dim": 64}
    recurrent |= {"linear_key_head_dim": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    if architecture == "qwen3_5_moe":
        experts["shared_expert_intermediate_size"] = 256
    directory = write_tiny_model(
        tmp_path / "model",
        architecture,
        **sizes,
        recurrent=recurrent,
        experts=experts,
        max_position_embeddings=2048,  # type: ignore[arg-type]
    )
    file = write_gguf(tmp_path / "model.gguf", directory, types=[name for name in QUANTIZED if "16" not in name])
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for device in ("cuda", "cpu"):
        with LLM(
            str(file), device=device, dtype="float32", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=4
        ) as llm:
            outputs = llm.generate([random_prompt(n, seed=n) for n in (700, 40, 3)], params)
            outputs += llm.generate([PROMPT], params)
            answers.append([output["token_ids"] for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_gpu_in_bf16_errs_as_a_checkpoint_with_the_same_values(architecture: str, tmp_path: Path) -> None:
    """Log-probabilities of prompts of many tokens and of few, against fp32."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_layers": 4, "num_heads": 8, "head_dim": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    directory = write_tiny_model(tmp_path / "model", architecture, **sizes, experts=experts)  # type: ignore[arg-type]
    types = [name for name in QUANTIZED if "16" not in name]
    file = write_gguf(tmp_path / "model.gguf", directory, types=types, same_values=tmp_path / "same")
    prompts, params = [random_prompt(n, seed=n) for n in (120, 12)], SamplingParams(max_tokens=1, prompt_logprobs=0)

    def logprobs(model: Path, device: str, dtype: str) -> torch.Tensor:
        with LLM(str(model), device=device, dtype=dtype, skip_tokenizer_init=True) as llm:
            outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
        given = zip(prompts, outputs, strict=True)
        return torch.tensor(
            [
                entry[token][0]
                for prompt, output in given
                for token, entry in zip(prompt[1:], output["prompt_logprobs"][1:], strict=True)
            ]
        )

    exact = logprobs(file, "cpu", "float32")
    error, plain = (
        (logprobs(model, "cuda", "bfloat16") - exact).square().mean().sqrt().item()
        for model in (file, tmp_path / "same")
    )
    assert error <= 2 * plain


# -- a real model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_model_has_the_log_probabilities_of_transformers(smollm2_tokenizer: Path, tmp_path: Path) -> None:
    """Of 4,000 tokens of real text, in fp32. transformers has the values that the package `gguf` computes."""
    file = gguf_directory() / GGUF_NAME
    with LLM(str(file), device="cpu", dtype="float32", max_model_len=2048) as llm:
        ids = llm.text.tokenizer.encode(inspect.getsource(argparse))[:4000]
        parts = [ids[:2000], ids[2000:]]
        outputs = llm.generate(parts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    model = reference_model(write_model(tmp_path / "model", smollm2_tokenizer, dtype="float32"))
    for part, output in zip(parts, outputs, strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([part])).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(part[1:])[:, None])[:, 0]
        found = [entry[token][0] for token, entry in zip(part[1:], output["prompt_logprobs"][1:], strict=True)]
        assert (torch.tensor(found) - expected).abs().max() <= 1e-4
