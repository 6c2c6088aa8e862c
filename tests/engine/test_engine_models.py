"""Every architecture and rope type through the whole engine: the logits and greedy tokens of transformers."""

from itertools import product
from pathlib import Path

import pytest
from checked_engine import CheckedLLM, Reference, cache_options, greedy
from dense_model import random_prompt
from tiny_models import ARCHITECTURES, ROPES, greedy_reference, write_tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK = 256
PROMPTS = [random_prompt(length, seed=length) for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 5)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("architecture", "rope", "tied"),
    [
        *((architecture, "default", i % 2 == 1) for i, architecture in enumerate(ARCHITECTURES)),
        *(("qwen3", rope, True) for rope in ROPES if rope != "default"),
        *(
            pytest.param(architecture, rope, False, marks=pytest.mark.slow)
            for architecture, rope in product(ARCHITECTURES, ROPES)
        ),
    ],
)
def test_engine_model_matches_transformers(
    tmp_path: Path, architecture: str, rope: str, tied: bool, device: str
) -> None:
    """All-resident and streamed; the prompts together, in chunks that split blocks. test_models has every rope of every
    architecture without an engine.
    """
    reference = Reference(write_tiny_model(tmp_path, architecture, rope=rope, tied=tied, max_position_embeddings=1024))
    for num_gpu_blocks in (None, 3):
        with CheckedLLM(reference, device=device, **cache_options(num_gpu_blocks)) as llm:
            outputs = llm.answer_and_check(PROMPTS)
            assert len({tuple(output["token_ids"]) for output in outputs}) > 1, "this model cannot tell prompts apart"
            llm.assert_nothing_left()


@pytest.mark.parametrize("head_dim", [80, 192])
def test_engine_head_dim_not_a_power_of_two_matches_transformers(tmp_path: Path, head_dim: int) -> None:
    """On a GPU: test_gpu_head_dims."""
    reference = Reference(write_tiny_model(tmp_path, head_dim=head_dim, max_position_embeddings=1024))
    with CheckedLLM(reference, **cache_options(3)) as llm:
        llm.answer_and_check(PROMPTS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_gpu_blocks", [None, 2])
def test_engine_dynamic_rope_past_the_original_length_generates_as_transformers(
    tmp_path: Path, num_gpu_blocks: int | None, device: str
) -> None:
    """Frequencies follow the length: of the prompt for its tokens, of the text so far for each generated one. Prompts
    that begin the same way and differ in length must not share keys.
    """
    rope = {**ROPES["dynamic"], "factor": 4.0}
    directory = write_tiny_model(tmp_path, rope=rope, max_position_embeddings=300)
    document = random_prompt(3 * BLOCK, seed=1)
    with CheckedLLM(Reference(directory), device=device, **cache_options(num_gpu_blocks)) as llm:
        for length in (290, 3 * BLOCK, 3 * BLOCK - 7, 3 * BLOCK):  # the first grows past the original 300
            request_id = llm.add_request(document[:length], greedy(20))
            output = llm.finish_all()[request_id]
            assert output["token_ids"] == greedy_reference(directory, document[:length], 20)
        assert output["num_cached_tokens"] == 2 * BLOCK  # the same prompt again does share
