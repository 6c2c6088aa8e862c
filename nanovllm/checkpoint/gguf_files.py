"""Finds a model in GGUF: a local file, the only model in a directory, or a file on the hub (GGUF_NAMES)."""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from nanovllm.checkpoint.gguf import GGUFModel, is_gguf, join, read_header, read_model, split_paths
from nanovllm.checkpoint.hub import hub_fault
from nanovllm.errors import CheckpointError

GGUF_NAMES = "FILE.gguf, owner/name/FILE.gguf on the hub, or owner/name:Q4_K_M for the file of this quantization"
_ON_HUB = re.compile(r"([^/:.~][^/:]*/[^/:]+)(?:/(.+\.gguf)|:([\w.-]+))", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[^/:]+/[^/:]+")
_DEFAULT_TAG = "Q4_K_M"  # for a hub name without a file, as in llama.cpp
_OTHER_PARTS = ("mmproj", "mtp-", "imatrix")  # beginnings of names: parts for images, draft heads, statistics


class GGUFSource(NamedTuple):
    """The files of one model, first to last, in a directory or in a repository of the hub."""

    names: tuple[str, ...]
    directory: Path | None = None
    repository: str = ""

    def header(self) -> GGUFModel:
        """Read the headers. On the hub only the headers are downloaded, of files that are not in the cache."""
        if self.directory is not None:
            return read_model(self.directory / self.names[0])
        return join([self._header_on_hub(name) for name in self.names])

    def download(self) -> Path:
        """Return the path of the first file. Raises CheckpointError if a file cannot be downloaded."""
        if self.directory is not None:
            return self.directory / self.names[0]
        from huggingface_hub import snapshot_download

        try:
            found = snapshot_download(self.repository, allow_patterns=list(self.names))
        except Exception as error:  # no network, or a gated repository; the error's text tells which
            raise CheckpointError(f"{self.repository} could not be downloaded: {hub_fault(error)}") from error
        return Path(found) / self.names[0]

    def _header_on_hub(self, name: str) -> GGUFModel:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

        cached = try_to_load_from_cache(self.repository, name)
        if isinstance(cached, str):
            with open(cached, "rb") as stream:
                return read_header(stream, Path(cached))
        url = hf_hub_url(self.repository, name)
        try:
            size = get_hf_file_metadata(url).size
        except Exception as error:
            raise CheckpointError(
                f"{self.repository}/{name} could not be read on the hub: {hub_fault(error)}"
            ) from error
        return read_header(cast(BinaryIO, _RemoteFile(url)), Path(self.repository) / name, size)


class _RemoteFile:
    """Reads a file on the hub from its beginning, each part with one request."""

    def __init__(self, url: str) -> None:
        self._url, self._position = url, 0

    def read(self, num_bytes: int) -> bytes:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        wanted = f"bytes={self._position}-{self._position + num_bytes - 1}"
        headers = build_hf_headers() | {"Range": wanted}
        try:
            with get_session().stream("GET", self._url, headers=headers) as response:
                if response.status_code == 200:  # the whole file would follow
                    raise ValueError("the server does not send parts of files")
                content = bytes(response.read())
                hf_raise_for_status(response)
        except Exception as error:
            raise CheckpointError(f"{self._url} could not be read: {error}") from error
        self._position += len(content)
        return content


def find_gguf(model: str) -> GGUFSource | None:
    """Return the GGUF files that `model` names, or None if the name is not of a model in GGUF.

    A directory with safetensors is not. Raises CheckpointError if the files do not exist or are ambiguous.
    """
    path, is_file, is_directory = Path(model), False, False
    with suppress(OSError, RuntimeError):  # the name is too long for a path, or has an unknown ~user
        path = path.expanduser()
        is_file, is_directory = path.is_file(), bool(model) and path.is_dir()
    if is_file and is_gguf(path):
        return GGUFSource(tuple(each.name for each in split_paths(path)), path.parent)
    if is_directory:
        models = local_models(path)
        if not models or any(path.glob("*.safetensors")):
            return None
        if len(models) > 1:
            raise CheckpointError(
                f"{path} has {len(models)} models in GGUF; give the path of one of them: {_first(models)}"
            )
        return GGUFSource(models[0], path)
    if match := _ON_HUB.fullmatch(model):
        return on_hub(match[1], file=match[2], tag=match[3])
    if is_gguf(path):
        raise CheckpointError(f"model {model!r} does not exist; a model in GGUF is {GGUF_NAMES}")
    return on_hub(model) if _PLAIN_NAME.fullmatch(model) and "gguf" in model.lower() else None


def local_models(directory: Path) -> list[tuple[str, ...]]:
    """Return the names of the files of each model in GGUF in a directory."""
    return _models(path.name for path in directory.glob("*"))


def on_hub(repository: str, file: str | None = None, tag: str | None = None) -> GGUFSource | None:
    """Return the files of a model in a repository, by name or by quantization, or None if it has safetensors instead.

    Raises CheckpointError if there is no such file, or if the repository cannot be listed.
    """
    models = _models(_listing(repository))
    if file is not None:
        found = [each for each in models if file in each]
    elif not models and tag is None:
        return None
    else:
        wanted = re.compile(rf"(?<![a-z0-9]){re.escape(tag or _DEFAULT_TAG)}(?![a-z0-9_])", re.IGNORECASE)
        found = [each for each in models if wanted.search(each[0])]
        if len(found) > 1:  # such as Q4_K_M and UD-Q4_K_M
            found = [each for each in found if "ud-" not in each[0].lower()] or found
    if len(found) != 1:
        problem = f"has {len(found)} files" if found else "has no file"
        raise CheckpointError(
            f"{repository} on the hub {problem} named {file or tag or _DEFAULT_TAG}; a model in GGUF is {GGUF_NAMES}, "
            f"and there are {_first(models) or 'no such files'}"
        )
    return GGUFSource(found[0], None, repository)


def _listing(repository: str) -> list[str]:
    """Return the names of a repository's files, or without a network, of the files in the cache."""
    from huggingface_hub import HfApi, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [each.rfilename for each in HfApi().model_info(repository).siblings or ()]
    except Exception as error:
        found: list[str] = []
        with suppress(CacheNotFound):
            cached = [each for each in scan_cache_dir().repos if each.repo_id == repository]
            newest = [max(each.revisions, key=lambda revision: revision.last_modified) for each in cached]
            found = [str(file.file_path.relative_to(each.snapshot_path)) for each in newest for file in each.files]
        if not any(is_gguf(Path(name)) for name in found):
            raise CheckpointError(f"model {repository!r} could not be found on the hub: {hub_fault(error)}") from error
        return found


def _models(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the files of each model, without files that are parts of other models."""
    paths = [Path(name) for name in names if is_gguf(Path(name))]
    paths = [path for path in paths if not path.name.lower().startswith(_OTHER_PARTS)]
    return sorted({tuple(str(each) for each in split_paths(path)) for path in paths})


def _first(models: list[tuple[str, ...]]) -> str:
    return ", ".join(names[0] for names in models[:12]) + (" and others" if len(models) > 12 else "")
