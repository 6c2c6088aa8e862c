from typing import Any

import pytest
from transformers import AutoTokenizer

from nanovllm.models.retrieval_model import save_tokenizer


@pytest.fixture(scope="session")
def demo_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of the built-in model: token = byte, then two more."""
    directory = tmp_path_factory.mktemp("demo")
    save_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)
