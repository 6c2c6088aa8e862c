"""The model's tokenizer, and the tokens that end an answer."""

from pathlib import Path
from typing import Any

from nanovllm.checkpoint.files import TOKENIZER_FILES, read_json
from nanovllm.checkpoint.model_config import ModelConfig
from nanovllm.errors import CheckpointError

# A directory that has any of these files has a tokenizer
_TOKENIZER_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(directory: Path | None) -> Any:
    """The model's tokenizer, or None for a preset and for a directory without one.

    Raises CheckpointError, which names the file, if the tokenizer cannot be read. Never runs code from the checkpoint.
    """
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()] if directory else []
    if not any(file.name in _TOKENIZER_MARKS for file in files):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # transformers passes on what its parsers raise, which does not name the file
        for file in files:
            if file.suffix == ".json":
                read_json(file)
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be read ({type(error).__name__}: {error}); download its files again: "
            f"{', '.join(file.name for file in files)}"
        ) from error


def end_token_ids(model_config: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of config.json and generation_config.json, and the tokenizer's eos token.

    The tokenizer's is needed because the configs of some chat models name only the base model's end token. vLLM uses it
    too.
    """
    token_ids = list(model_config.eos_token_ids)
    of_tokenizer = getattr(tokenizer, "eos_token_id", None)
    if of_tokenizer is not None and of_tokenizer < model_config.vocab_size and of_tokenizer not in token_ids:
        token_ids.append(of_tokenizer)
    return tuple(token_ids)
