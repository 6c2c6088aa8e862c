"""A model's files: their places, the files that are read, and the files that are downloaded from the hub.

A model is a local directory, a hub name, a preset, or a file in GGUF (gguf_files.py). A preset is only a config.json.
The weights of a directory are the first existing item of this list:

1. the files that model.safetensors.index.json names
2. model.safetensors
3. model-00001-of-0000N.safetensors to model-0000N-of-0000N.safetensors
4. a single safetensors file of any other name
5. without any safetensors, the only model in GGUF, which also has the config and the tokenizer

Other safetensors files, such as adapters, consolidated.safetensors and files in subdirectories, are never read. An
index may name only files in the index's directory, so a checkpoint cannot make the engine read other files. Symbolic
links in the directory are followed: the hub's cache consists of symbolic links, and the owner of a local directory has
made its links.

`CONFIG_FILES` and `TOKENIZER_FILES` are downloaded from the hub. The weights, by rule 1 or 2, are downloaded only for
an engine that reads them; a GGUF file is downloaded whole, except for plans, which read its header on the hub. Code in
a checkpoint is never downloaded or run. Importing this module loads neither torch nor transformers.
"""

import json
import re
from pathlib import Path
from typing import Any

from nanovllm.checkpoint.gguf import is_gguf, read_model
from nanovllm.checkpoint.gguf_files import GGUF_NAMES, find_gguf, on_hub
from nanovllm.checkpoint.hub import hub_fault
from nanovllm.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 10**8  # the library's limit
CONFIG_FILES = ("config.json", "generation_config.json", INDEX_FILE)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", "chat_template.jinja"),
)
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# A directory that has any of these files has a tokenizer
_TOKENIZER_MARKS = (*VOCABULARY_FILES, "tokenizer_config.json")
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def presets() -> dict[str, Path]:
    """Return preset name -> path of config.json, in the installed package or else in the repository."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "presets", package.parent / "benchmarks" / "configs"):
        paths = sorted(folder.glob("*.json"))
        if paths:
            return {path.stem: path for path in paths}
    return {}


def find_model(model: str, fetched: tuple[str, ...] = CONFIG_FILES + TOKENIZER_FILES) -> tuple[Path, Path | None]:
    """Return the path of config.json and the model's directory, or None instead of the directory for a preset. For a
    model in GGUF, return the path of its first file twice.

    fetched: the files to download for a hub name; by default all but the weights. Raises CheckpointError if the model
    is not found.
    """
    if (gguf := find_gguf(model)) is not None:
        path = gguf.download()
        return path, path
    directory = _local_directory(model)
    if directory is None:
        _refuse_file(model)
        known = presets()
        if model in known:
            return known[model], None
        remedy = (
            f"give a directory with config.json, a preset ({', '.join(known)}), a hub name (owner/name), or a model in "
            f"GGUF ({GGUF_NAMES})"
        )
        if not model or model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise CheckpointError(f"model directory {model!r} does not exist; {remedy}")
        try:
            directory = _download(model, fetched)
        except Exception as error:  # no network, an unknown name or a gated repository; the error's text tells which
            fault = hub_fault(error)
            others = "" if "/" in model and fault != str(error) else f"; {remedy}"  # no preset's name has a slash
            raise CheckpointError(
                f"model {model!r} is not a directory and could not be downloaded{others}: {fault}"
            ) from error
        if not (directory / "config.json").is_file() and (gguf := on_hub(model)) is not None:
            path = gguf.download()
            return path, path
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"no config.json in {directory}; give the directory that save_pretrained or a download wrote"
        )
    return directory / "config.json", directory


def _refuse_file(model: str) -> None:
    """Raise CheckpointError for a model that is the name of a file instead of a directory."""
    try:
        path = Path(model).expanduser()
        is_file = path.is_file()
    except (OSError, RuntimeError):  # as in _local_directory
        return
    if is_file:
        of_model = path.suffix in (".safetensors", ".json", ".bin", ".pt", ".pth")
        remedy = f"its directory, {str(path.parent)!r}" if of_model else "the directory of a model, or a file in GGUF"
        raise CheckpointError(f"model {model!r} is a file; give {remedy}")


def has_tokenizer(directory: Path | None) -> bool:
    """Return True if the directory or GGUF file that `find_model` returned has a tokenizer. A preset has none."""
    if is_gguf(directory):
        return "tokenizer.ggml.model" in read_model(directory).metadata
    return directory is not None and any((directory / name).is_file() for name in _TOKENIZER_MARKS)


def check_tokenizer(model: str, remedy: str, *, needs_template: bool = False) -> None:
    """Raise CheckpointError for a model without a tokenizer, before any part of the model is loaded.

    remedy: the alternative to adding a tokenizer. needs_template: the tokenizer must have a chat template, too.
    """
    _, directory = find_model(model)
    if not has_tokenizer(directory):
        where = f"{directory} has none of {', '.join(_TOKENIZER_MARKS)}" if directory else "a preset has none"
        where = f"{directory} has no tokenizer.ggml.model" if is_gguf(directory) else where
        raise CheckpointError(
            f"model {model!r} has no tokenizer, so it can neither read nor write text: {where}; add the files of the "
            f"model's tokenizer to its directory, or {remedy}"
        )
    assert directory is not None, "a preset has no tokenizer"
    if needs_template and not has_default_template(_stored_template(directory)):
        raise CheckpointError(
            f"model {model!r} has no chat template: {_template_places(directory)}; use a model that is made for "
            "chats, or answer plain prompts with generate"
        )


def _template_places(directory: Path) -> str:
    if is_gguf(directory):
        return f"{directory} has no tokenizer.chat_template"
    return (
        f"{directory} has no text in chat_template.jinja, and neither a text nor a list with one named default as "
        "chat_template in tokenizer_config.json"
    )


def _stored_template(directory: Path) -> Any:
    """Return the chat template. As in transformers, chat_template.jinja replaces tokenizer_config.json's template."""
    if is_gguf(directory):
        return read_model(directory).metadata.get("tokenizer.chat_template")
    path, settings = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_json(settings).get("chat_template") if settings.is_file() else None
    if not isinstance(template, list):
        return template
    return {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}


def has_default_template(template: Any) -> bool:
    """Return True for a chat template, or for several named templates that include one for chats without tools."""
    template = template.get("default") if isinstance(template, dict) else template
    return isinstance(template, str) and bool(template.strip())


def fetch_weights(model: str, directory: Path | None, load_format: str = "auto") -> None:
    """Make sure that all files of `weight_files` exist. For a hub name, missing files are downloaded. A file in GGUF
    has been downloaded by `find_model`.

    directory: as returned by `find_model`. Raises CheckpointError, as `weight_files` does.
    """
    if is_gguf(directory):
        if load_format == "safetensors":
            raise CheckpointError(f"load_format='safetensors', but {directory} is in GGUF; leave load_format out")
        return
    if directory is not None and _local_directory(model) is None:
        index = directory / INDEX_FILE
        names = _indexed_names(index) if index.is_file() else [SINGLE_FILE]
        if not all((directory / name).is_file() for name in names):  # a file appears only once it is complete
            try:
                _download(model, names, revision=directory.name)  # a snapshot's directory is named after its commit
            except Exception as error:
                raise CheckpointError(
                    f"the weights of model {model!r} could not be downloaded: {hub_fault(error)}"
                ) from error
    weight_files(directory)


def weight_files(directory: Path | None) -> list[Path]:
    """Return the safetensors files to read. Raises CheckpointError, with the remedy, for missing or ambiguous files."""
    if directory is None:
        raise CheckpointError("a preset has no weights; give a model directory, or load_format='dummy'")
    index = directory / INDEX_FILE
    if index.is_file():
        files = [directory / name for name in _indexed_names(index)]
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(
                f"{index} names files that do not exist: {', '.join(missing)}; download them again, or delete the "
                f"index if {SINGLE_FILE} holds the weights"
            )
        return files
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    found = [file for file in sorted(directory.glob("*.safetensors")) if file.is_file()]
    if not found:
        raise CheckpointError(
            f"no safetensors file in {directory}; convert other formats with transformers' save_pretrained, "
            "or use load_format='dummy' for random weights"
        )
    shards = [file for file in found if _SHARD.fullmatch(file.name)]
    if shards:
        return _complete_shards(shards)
    if len(found) > 1:
        raise CheckpointError(
            f"{directory} has {len(found)} safetensors files ({', '.join(file.name for file in found[:5])}) and no "
            f"{INDEX_FILE} that says which are the weights; add the index, or keep one file and name it {SINGLE_FILE}"
        )
    return found


def stored_names(model: str, directory: Path | None) -> list[str] | None:
    """Return the names of the tensors in the weights, or None if the hub does not answer or the files are malformed. If
    the weights are a single file on the hub that is not downloaded yet, only the file's header is downloaded.

    directory: as returned by `find_model`.
    """
    try:
        if directory is not None and (directory / INDEX_FILE).is_file():
            return list(read_json(directory / INDEX_FILE)["weight_map"].keys())
        if directory is not None and _local_directory(model) is None and not any(directory.glob("*.safetensors")):
            return _names_on_hub(model, directory.name)
        return [name for file in weight_files(directory) for name in _names_in(file)]
    except (ValueError, KeyError, AttributeError, OSError, RecursionError):  # the loader reports the error
        return None


def _names_on_hub(model: str, revision: str) -> list[str] | None:
    from huggingface_hub import parse_safetensors_file_metadata

    try:
        return list(parse_safetensors_file_metadata(model, SINGLE_FILE, revision=revision).tensors)
    except Exception:  # no network, or no such file
        return None


def _names_in(file: Path) -> list[str]:
    """Return the entries of the header of a safetensors file: the file's tensors, and perhaps "__metadata__"."""
    with file.open("rb") as stream:
        num_bytes = int.from_bytes(stream.read(8), "little")
        if num_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {num_bytes} bytes")
        return list(json.loads(stream.read(num_bytes)).keys())


def _complete_shards(shards: list[Path]) -> list[Path]:
    """Return `shards` after checking that they are numbered from 1 to the total without gaps."""
    total = shards[0].stem.rsplit("-", 1)[1]
    expected = [f"model-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
    names = [shard.name for shard in shards]
    if names != expected:
        wrong = sorted(set(expected) ^ set(names))
        raise CheckpointError(
            f"{shards[0].parent} has no {INDEX_FILE}, and its shards are not the complete set of {total}: see "
            f"{', '.join(wrong[:5])}; download the model again"
        )
    return shards


def _indexed_names(index: Path) -> list[str]:
    try:
        names = set(read_json(index)["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}; download it again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {name!r}, which is not a safetensors file in the same directory; weights are read from "
                "the model's directory only: move the file there and correct the index"
            )
    if not names:
        raise CheckpointError(f"{index} names no files; download it again")
    return sorted(names)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file. Raises CheckpointError, with the file's path, if there is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} instead of a JSON object; download it again")
    return content


def _local_directory(model: str) -> Path | None:
    """Return the directory `model`, or None if there is none. An empty name does not mean the current directory."""
    try:
        directory = Path(model).expanduser()
        return directory if model and directory.is_dir() else None
    except (OSError, RuntimeError):  # the name is too long for a path, or has an unknown ~user
        return None


def _download(model: str, names: tuple[str, ...] | list[str], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=list(names)))
