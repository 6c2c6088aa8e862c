"""Reads the tensors of a GGUF file with the package `gguf`."""

import struct
from typing import Any

import gguf


class TensorReader(gguf.GGUFReader):
    """Reads tensors and single values, but no arrays such as vocabularies, whose entries would take 3 to 15 s."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            field: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
            return field
        data = memoryview(self.data)
        item_type, length = struct.unpack_from("<IQ", data, orig_offs)
        end = orig_offs + 12
        if item_type == gguf.GGUFValueType.STRING:
            for _ in range(length):
                end += 8 + struct.unpack_from("<Q", data, end)[0]
        else:
            end += length * self.gguf_scalar_to_np[gguf.GGUFValueType(item_type)]().itemsize
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]
