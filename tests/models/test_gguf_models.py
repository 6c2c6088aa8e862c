"""Models in GGUF: the tokens are those of a checkpoint with the same values, which transformers confirms."""

from pathlib import Path

import pytest
from gguf_files import TYPES, write_gguf
from tiny_models import greedy_reference, write_tiny_model

from nanovllm import LLM, SamplingParams

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 26, 43]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answer(model: Path, **options: object) -> list[int]:
    with LLM(str(model), device="cpu", dtype="float32", skip_tokenizer_init=True, **options) as llm:
        return llm.generate([PROMPT], GREEDY)[0]["token_ids"]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_gguf_of_an_architecture_gives_the_tokens_of_transformers(architecture: str, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", architecture, num_layers=4, tied=architecture == "qwen3")
    file = write_gguf(tmp_path / "model.gguf", directory)
    assert answer(file) == greedy_reference(directory, PROMPT, GREEDY.max_tokens)


QUANTIZED = [name for name in TYPES if name != "F32"]


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
