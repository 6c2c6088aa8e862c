"""The built-in model of `--model demo`: a retrieval model that needs no download, with a byte tokenizer."""

from pathlib import Path

from nanovllm.errors import CheckpointError

DEMO_MODEL = "demo"


def model_path(name: str) -> str:
    """Return `name`, or for DEMO_MODEL the directory of the built-in model, which is written if it does not exist.

    An existing directory with the name DEMO_MODEL takes precedence. Raises CheckpointError if the built-in model cannot
    be written.
    """
    if name != DEMO_MODEL or Path(name).is_dir():
        return name
    from nanovllm.models.retrieval_model import build_retrieval_model  # loads torch

    try:
        return str(build_retrieval_model())
    except OSError as error:
        raise CheckpointError(
            f"the built-in model cannot be written ({error}); set XDG_CACHE_HOME to a directory"
        ) from error
