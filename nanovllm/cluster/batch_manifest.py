"""_job.json in the output folder: what the job is, so that only the same job is resumed there."""

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanovllm.errors import ConfigError

NAME = "_job.json"  # what reads a folder of Parquet files leaves names with an underscore out
# Options of the engine that its answers depend on; the others decide where they are computed and how fast
ANSWER_OPTIONS = ("dtype", "load_format", "hf_overrides", "generation_config", "seed", "max_model_len")


def open_output(output: Path, manifest: Mapping[str, Any]) -> None:
    """Make the folder of a new job, or check that it is the folder of this one. Raises ConfigError if it is neither."""
    path = output / NAME
    if path.is_file():
        _check_same(path, manifest)
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output {str(output)!r} is not empty and has no {NAME}; give a new or an empty folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{NAME}.new")
        scratch.write_text(json.dumps(manifest, indent=2) + "\n")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"output {str(output)!r} cannot be written: {error.strerror}; give another folder") from error


@contextmanager
def held_alone(output: Path) -> Iterator[None]:
    """Keep other commands out of the folder, as long as this process lives. Raises ConfigError if one is in it."""
    with (output / NAME).open() as manifest:
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"output {str(output)!r} is in use by another command; wait for its end") from error
        except OSError:
            pass  # its file system has no locks
        yield


def _check_same(path: Path, manifest: Mapping[str, Any]) -> None:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); give a new folder") from error
    now = json.loads(json.dumps(manifest))
    if different := [key for key in (now | found) if now.get(key) != found.get(key)]:
        changes = "; ".join(f"{key} was {_shown(found.get(key))}, now {_shown(now.get(key))}" for key in different)
        raise ConfigError(
            f"{path.parent} holds the parts of another job: {changes}. Repeat the same command to resume that job, or "
            "give another output folder"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
