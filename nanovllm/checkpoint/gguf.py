"""Reads GGUF files: metadata, and the places of the tensors.

A file has, little-endian and without gaps: the magic number, the version, the numbers of tensors and of metadata
entries, the entries, and for each tensor its name, shape, type and offset. Then follow the tensors' data, from a
multiple of `general.alignment` on. A model may be divided into several files, `NAME-00001-of-00003.gguf`.

Nothing in a file is trusted: every length is compared with the bytes that are left before anything is read or
allocated, and every tensor has to be inside its file. Importing this module loads no torch.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np

from nanovllm.errors import CheckpointError

SUFFIX = ".gguf"
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_MAGIC, _VERSION = b"GGUF", 3
_CHUNK_BYTES = 2**20  # read at a time; on the hub each chunk is a request
_MAX_HEADER_BYTES = 2**28  # the header of a model with a vocabulary of 250,000 tokens has 11 MB
_MAX_DIMENSIONS, _MAX_SIZE = 4, 2**48
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 2**16
_MAX_FILES = 1000


class BlockType(NamedTuple):
    """A type of tensors: `num_values` values of a row are stored together in `num_bytes` bytes."""

    name: str
    num_values: int
    num_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.num_values > 1


TYPES = {
    type_id: BlockType(*each)
    for type_id, each in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        20: ("IQ4_NL", 32, 18),
        23: ("IQ4_XS", 256, 136),
        30: ("BF16", 1, 2),
        39: ("MXFP4", 32, 17),
    }.items()
}
OTHER_TYPES = {  # named in refusals
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
_NUMBERS = {  # type of a metadata value -> its little-endian dtype
    number: np.dtype(code)
    for number, code in {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}.items()
} | {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}
_STRING, _ARRAY = 8, 9


class GGUFTensor(NamedTuple):
    """A tensor's place. Its rows, along the last dimension, consist of whole blocks and follow each other."""

    name: str
    shape: tuple[int, ...]  # as in torch; in the file the order is reversed
    type: BlockType
    path: Path
    offset: int  # in the file

    @property
    def where(self) -> str:
        return f"{self.name} in {self.path}"

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.num_values * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GGUFModel(NamedTuple):
    """The metadata and the tensors of all files of a model."""

    path: Path  # the first file
    metadata: Mapping[str, Any]  # arrays of numbers are numpy arrays
    tensors: Mapping[str, GGUFTensor]


def is_gguf(path: Path | None) -> TypeGuard[Path]:
    return path is not None and path.suffix.lower() == SUFFIX


def split_paths(path: Path) -> list[Path]:
    """Return the files of the model that `path` is part of, first to last. The files may not exist."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    name, _, total = match.groups()
    num_files = int(total)
    if not 1 <= num_files <= _MAX_FILES:
        raise CheckpointError(f"{path} is named as part of {num_files} files; at most {_MAX_FILES} are supported")
    return [path.with_name(f"{name}-{i:05d}-of-{total}{path.suffix}") for i in range(1, num_files + 1)]


def read_model(path: Path) -> GGUFModel:
    """Read the headers of all files of a model. path: any of the files.

    Raises CheckpointError, which names the file, if a file is missing, damaged, or of an unsupported version or type.
    """
    paths = split_paths(path)
    if missing := [each.name for each in paths if not each.is_file()]:
        raise CheckpointError(
            f"{path.parent} lacks {', '.join(missing[:5])} of the {len(paths)} files of a model; download the missing "
            "files to the same directory"
        )
    stats = [each.stat() for each in paths]
    return _read_once(tuple(paths), tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))


@lru_cache(maxsize=1)  # a start reads the config, the tokenizer and the tensors of one model
def _read_once(paths: tuple[Path, ...], _versions: tuple[tuple[int, int], ...]) -> GGUFModel:
    headers = []
    for path in paths:
        try:
            with path.open("rb") as stream:
                headers.append(read_header(stream, path))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    return join(headers)


def join(headers: list[GGUFModel]) -> GGUFModel:
    """Return the model that consists of these files, of which the first has the metadata."""
    first, tensors = headers[0], dict[str, GGUFTensor]()
    said = first.metadata.get("split.count", 1)
    if not isinstance(said, int) or said not in (len(headers), 0):
        raise CheckpointError(
            f"{first.path} is one of {said} files (split.count), but its name says {len(headers)}; give the files the "
            "names that they had when they were downloaded"
        )
    for i, header in enumerate(headers):
        number = header.metadata.get("split.no", i)
        if len(headers) > 1 and not (isinstance(number, int) and number == i):
            place = number + 1 if isinstance(number, int) else number
            raise CheckpointError(
                f"{header.path} says that it is file {place} of its model (split.no); give the files the names that "
                "they had when they were downloaded"
            )
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{tensor.where} is also in {tensors[name].path}; keep the files of one download")
            tensors[name] = tensor
    return GGUFModel(first.path, first.metadata, tensors)


def read_header(stream: BinaryIO, path: Path, num_bytes: int | None = None) -> GGUFModel:
    """Read the header of one file. num_bytes: the size of the file, or None to ask the stream.

    Raises CheckpointError, which names the file, if the header is damaged or a tensor is outside the file.
    """
    if num_bytes is None:
        num_bytes = stream.seek(0, 2)
        stream.seek(0)
    reader = _Reader(stream, path, num_bytes)
    reader.check_version()
    num_tensors, num_entries = reader.number("<q"), reader.number("<q")
    reader.check_count(num_tensors, 24, "tensors")
    reader.check_count(num_entries, 13, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.string()
        if key in metadata:
            raise reader.damaged(f"the metadata entry {key!r} occurs twice")
        metadata[key] = reader.value(reader.number("<I"), key)
    infos = [reader.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    is_power = isinstance(alignment, int) and 8 <= alignment <= _MAX_ALIGNMENT and not alignment & (alignment - 1)
    if not is_power:
        raise reader.damaged(f"general.alignment={alignment!r} is not a power of two from 8 to {_MAX_ALIGNMENT}")
    start, tensors = -(-reader.position // alignment) * alignment, dict[str, GGUFTensor]()
    for name, shape, block_type, offset in infos:
        tensor = GGUFTensor(name, shape, block_type, path, start + offset)
        if offset % alignment:
            raise reader.damaged(f"{name} begins at {offset}, which is not a multiple of {alignment}")
        if tensor.offset + tensor.num_bytes > num_bytes:
            raise CheckpointError(
                f"{path} is truncated: {name} ends at byte {tensor.offset + tensor.num_bytes}, but the file has "
                f"{num_bytes} bytes; download it again"
            )
        if name in tensors:
            raise reader.damaged(f"the tensor {name!r} occurs twice")
        tensors[name] = tensor
    return GGUFModel(path, metadata, tensors)


class _Reader:
    """Reads the values of a header in order, and never more bytes than the file has."""

    def __init__(self, stream: BinaryIO, path: Path, num_bytes: int) -> None:
        self._stream, self._path, self._end = stream, path, min(num_bytes, _MAX_HEADER_BYTES)
        self._file_bytes = num_bytes
        self._buffer = bytearray()
        self.position = 0

    def damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {problem}; download it again")

    def check_version(self) -> None:
        found = bytes(self._take(min(8, self._file_bytes)))
        if not found.startswith(_MAGIC) or len(found) < 8:
            raise CheckpointError(f"{self._path} is not a GGUF file: it begins with {found!r}; download it again")
        (version,) = struct.unpack("<I", found[4:])
        if version != _VERSION:
            kind = f"version {version}"
            if version >> 16:
                kind = f"big-endian version {struct.unpack('>I', found[4:])[0]}"
            raise CheckpointError(
                f"{self._path} is a GGUF file of {kind}, and little-endian version {_VERSION} is supported; download "
                "a file from after October 2023, or convert the model again with llama.cpp"
            )

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Raise CheckpointError if the rest of the header cannot hold `count` entries of at least `least_bytes`."""
        if not 0 <= count <= (self._end - self.position) // least_bytes:
            raise self._too_long(f"{count} {what}")

    def _too_long(self, what: str) -> CheckpointError:
        if self._end < self._file_bytes:
            return CheckpointError(
                f"{self._path} has a header of more than {_MAX_HEADER_BYTES >> 20} MiB, the supported size: {what}; "
                "download it again"
            )
        return CheckpointError(
            f"{self._path} is truncated or damaged: its header has {what}, but the file has {self._file_bytes} bytes; "
            "download it again"
        )

    def _take(self, num_bytes: int) -> memoryview:
        """Return the next bytes. The view is valid until the next call."""
        start, self.position = self.position, self.position + num_bytes
        if self.position > self._end:
            raise self._too_long(f"values up to byte {self.position}")
        while len(self._buffer) < self.position:
            wanted = min(max(_CHUNK_BYTES, self.position - len(self._buffer)), self._end - len(self._buffer))
            if not (read := self._stream.read(wanted)):
                raise self._too_long(f"values up to byte {self.position}")
            self._buffer += read
        return memoryview(bytes(self._buffer[start : self.position]))

    def number(self, code: str) -> Any:
        (number,) = struct.unpack(code, self._take(struct.calcsize(code)))
        return number

    def string(self) -> str:
        num_bytes = self.number("<Q")
        try:
            return str(self._take(num_bytes), "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"a text up to byte {self.position} is not UTF-8 ({error.reason})") from error

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise self.damaged(f"the metadata entry {key!r} has the unknown type {kind}")
        return _plain(np.frombuffer(self._take(_NUMBERS[kind].itemsize), _NUMBERS[kind])[0])

    def _array(self, key: str) -> Any:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            self.check_count(count, 8, f"texts in the array {key}")
            return [self.string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise self.damaged(f"the metadata entry {key!r} is an array of the unsupported type {kind}")
        self.check_count(count, _NUMBERS[kind].itemsize, f"numbers in the array {key}")
        return np.frombuffer(self._take(count * _NUMBERS[kind].itemsize), _NUMBERS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """Return a tensor's name, shape, type, and offset after the beginning of the data."""
        name, num_dimensions = self.string(), self.number("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self.damaged(f"{name} has {num_dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self.number("<Q") for _ in range(num_dimensions))[::-1]
        type_id, offset = self.number("<I"), self.number("<Q")
        if type_id not in TYPES:
            known = ", ".join(each.name for each in TYPES.values())
            raise CheckpointError(
                f"{name} in {self._path} has the type {OTHER_TYPES.get(type_id, type_id)}, which is not supported; "
                f"use a file whose tensors have the types {known}, such as Q4_K_M or Q8_0"
            )
        block_type = TYPES[type_id]
        if not all(0 < size < _MAX_SIZE for size in shape) or prod(shape) >= _MAX_SIZE:
            raise self.damaged(f"{name} has the shape {list(shape)}")
        if shape[-1] % block_type.num_values:
            raise self.damaged(
                f"{name} has {shape[-1]} columns in {block_type.name}, not a multiple of {block_type.num_values}"
            )
        return name, shape, block_type, offset


def _plain(number: Any) -> Any:
    """Return a metadata number as a Python number. A float has the fewest digits that denote the stored float32."""
    return float(str(number)) if isinstance(number, np.float32) else number.item()
