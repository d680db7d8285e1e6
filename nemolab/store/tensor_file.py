"""Write a safetensors file as a stream: nothing larger than a chunk is ever held."""

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemolab.checkpoint.safetensors_header import DTYPE_BITS
from nemolab.errors import StoreError
from nemolab.store.files import crc32, finished_file


@dataclass(frozen=True)
class Outgoing:
    """One tensor to write: its header fields, and its bytes as uint8 chunks when their turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterable[np.ndarray]]


@dataclass(frozen=True)
class Written:
    """A finished file: its size and crc32, and the crc32 of each tensor's bytes."""

    nbytes: int
    crc32: int
    tensors: dict[str, int]


def write_tensor_file(path: Path, tensors: Iterable[Outgoing], metadata: dict[str, str] | None = None) -> Written:
    """Write `tensors` to `path`, wide dtypes first so that each lies on a multiple of its item size.

    metadata  beside "format" in the header
    Raises StoreError when the disk is full or a tensor's chunks are not the bytes it promised.
    """
    ordered = in_file_order(tensors)
    head = file_head(ordered, metadata)
    sums = {}
    with finished_file(path) as file:
        file.write(head)
        total_crc, written_bytes = crc32(head), len(head)
        for tensor in ordered:
            own_crc, own_bytes = 0, 0
            for chunk in tensor.chunks():
                file.write(chunk)
                own_crc, total_crc = crc32(chunk, own_crc), crc32(chunk, total_crc)
                own_bytes += chunk.nbytes
            if own_bytes != tensor.nbytes:
                raise StoreError(f"{path}: {tensor.name}: {own_bytes} bytes came, {tensor.nbytes} were promised")
            sums[tensor.name] = own_crc
            written_bytes += own_bytes
    return Written(written_bytes, total_crc, sums)


def in_file_order(tensors: Iterable[Any]) -> list[Any]:
    """Wide dtypes first, so that each tensor lies on a multiple of its item size; else in the order given."""
    return sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])


def file_head(tensors: Iterable[Any], metadata: dict[str, str] | None = None) -> bytes:
    """What stands before the data of tensors (with name, dtype, shape, nbytes) that follow one another.

    Length field and JSON, padded with spaces so that the data begins on a multiple of 8.
    """
    place, entries = 0, {"__metadata__": {"format": "pt", **(metadata or {})}}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
