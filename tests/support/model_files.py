"""Changes to the files of a checkpoint."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_quantization(directory: Path, **changes: Any) -> None:
    """Change settings of quantization_config."""
    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    edit_json(directory / "config.json", quantization_config=settings | changes)


def copy_with_template(model: Path, directory: Path, chat_template: str) -> Path:
    """Copy a model to a folder that does not exist yet, and give it this chat template."""
    copytree(model, directory)
    edit_json(directory / "tokenizer_config.json", chat_template=chat_template)
    return directory
