"""The header of a safetensors file, read and checked by ourselves.

A file is: 8 bytes little-endian length of the header, the header (JSON: name -> dtype, shape, two data offsets), the
data. Nothing is mapped and nothing is allocated on the word of the file: every number is checked against the file's
size first.
"""

import hashlib
import os
import re
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nemolab.checkpoint.json_files import parse_json_object
from nemolab.checkpoint.reading import read_range
from nemolab.errors import CheckpointError

# The reference library refuses longer headers as well; full Super has 2.7 MB in each of its 17 shards.
HEADER_LIMIT_BYTES = 100_000_000

DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_OTHER_FILES = {
    b"GGUF": "a GGUF file",
    b"\x93NUMPY": "a NumPy file",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
}

_METADATA_KEY = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one stored tensor lies: `nbytes` bytes at `offset_bytes` from the start of the file `shard`."""

    name: str  # canonical; equal to source_name until a Checkpoint renames it
    source_name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: `tensors` tile the data exactly. `sha256` is that of the header's JSON bytes."""

    path: Path
    file_bytes: int
    data_start_bytes: int
    sha256: str
    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]


def place_of(entry: TensorEntry) -> str:
    """How messages name a tensor: "layer 1, expert 5: NAME in FILE", the name as it is stored."""
    return f"{layer_of(entry.name)}{entry.source_name} in {entry.shard}"


def layer_of(name: str) -> str:
    """ "layer 1, expert 5: " for names that have them: what a reader looks for first."""
    layer = re.search(r"layers\.(\d+)\.", name)
    expert = re.search(r"\.experts\.(\d+)\.", name)
    where = ([f"layer {layer[1]}"] if layer else []) + ([f"expert {expert[1]}"] if expert else [])
    return ", ".join(where) + ": " if where else ""


def read_header(path: str | Path) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """The metadata and the tensors of one safetensors file, all checked. Raises CheckpointError."""
    header = load_header(path)
    return header.metadata, header.tensors


def load_header(path: str | Path) -> Header:
    """Like read_header, with the file's size and the header's hash. Raises CheckpointError naming file and tensor."""
    path = Path(path)
    file_bytes = regular_file_bytes(path)
    if file_bytes == 0:
        raise CheckpointError(f"{path} is empty (0 bytes): the download never began, fetch this file again")
    start = read_range(path, 0, min(file_bytes, 256)).tobytes()
    if len(start) < 8:
        raise CheckpointError(f"{path} has {file_bytes} bytes; a safetensors file has at least 8 and a header")
    (header_bytes,) = struct.unpack("<Q", start[:8])
    if header_bytes > file_bytes - 8 or header_bytes > HEADER_LIMIT_BYTES or start[8:9] != b"{":
        raise CheckpointError(f"{path} {_say_what_it_is(start, header_bytes, file_bytes)}")
    raw = read_range(path, 8, header_bytes).tobytes()
    parsed = parse_json_object(raw, f"{path}: the safetensors header")
    metadata = _check_metadata(parsed.pop(_METADATA_KEY, {}), path)
    data_start = 8 + header_bytes
    data_bytes = file_bytes - data_start
    tensors = {name: _check_entry(name, fields, path, data_start) for name, fields in parsed.items()}
    _check_tiling(tensors.values(), path, data_start, data_bytes)
    return Header(path, file_bytes, data_start, hashlib.sha256(raw).hexdigest(), metadata, tensors)


def regular_file_bytes(path: Path) -> int:
    """The size of a regular file (links followed); a pipe or device is refused before it is opened."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status.st_size


def _say_what_it_is(start: bytes, header_bytes: int, file_bytes: int) -> str:
    """In words: what a file that is no safetensors file most likely is, and what to do."""
    text = start.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer (a few lines of text), not the weights: fetch this file with `git lfs pull`"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page (HTML), not the weights: the download was answered by a page, fetch this file again"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "is a PyTorch pickle, not safetensors: pickles can run code and are not read"
    for magic, name in _OTHER_FILES.items():
        if start.startswith(magic):
            return f"is {name}, not safetensors"
    if not any(start):
        return "begins with zeros only: its room was set aside, but not downloaded; fetch this file again"
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start):
        return f"is a text file that begins {start[:40]!r}, not safetensors: fetch this file again"
    if header_bytes > HEADER_LIMIT_BYTES:
        return (
            f"says its header has {header_bytes:,} bytes; the limit is {HEADER_LIMIT_BYTES:,} and the file has"
            f" {file_bytes:,}: no safetensors file, or a damaged one"
        )
    if header_bytes > file_bytes - 8:
        return (
            f"says its header has {header_bytes:,} bytes, but the file has {file_bytes:,}: the download stopped"
            " early, fetch this file again"
        )
    return f"has no safetensors header: after the length field {start[8:16]!r} was found, '{{' was expected"


def _check_metadata(metadata: object, path: Path) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: {_METADATA_KEY} must be an object of strings")
    return metadata


def _check_entry(name: str, fields: object, path: Path, data_start: int) -> TensorEntry:
    """One entry on its own: fields known, dtype known, shape non-negative, shape x item size = its range."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        found = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise CheckpointError(f"{where} has the fields {found}; dtype, shape and data_offsets were expected")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where} has dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}")
    if not _are_counts(shape):
        raise CheckpointError(f"{where} has shape {_short(shape)}; a list of whole numbers >= 0 was expected")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{where} has data_offsets {_short(offsets)}; two numbers 0 <= start <= end were expected"
        )
    bits = DTYPE_BITS[dtype] * _count_elements(shape, where)
    begin, end = offsets
    if bits % 8 or bits // 8 != end - begin:
        raise CheckpointError(
            f"{where}: {dtype} {_short(shape)} takes {_short(bits // 8)} bytes, its data_offsets cover"
            f" {_short(end - begin)}"
        )
    return TensorEntry(name, name, dtype, tuple(shape), path.name, data_start + begin, end - begin)


def _are_counts(value: object) -> bool:
    # `type is int` and not isinstance: True is no number of rows.
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _count_elements(shape: list[int], where: str) -> int:
    """The product of a shape; refused once it passes 64 bits, so that no later product of it can overflow."""
    elements, empty = 1, False
    for extent in shape:
        empty = empty or extent == 0
        elements *= extent or 1
        if elements >= 1 << 63:
            raise CheckpointError(f"{where} has shape {_short(shape)}: its number of elements overflows 64 bits")
    return 0 if empty else elements


def _short(value: object) -> str:
    text = (
        f"{value:,}" if type(value) is int and abs(value) < 1 << 80 else f"{value!r}" if _printable(value) else "huge"
    )
    return text if len(text) <= 120 else text[:117] + "..."


def _printable(value: object) -> bool:
    """Python refuses to print integers of more than 4,300 digits; a message must not fail over one."""
    if type(value) is int:
        return abs(value) < 1 << 4096
    return all(_printable(item) for item in value) if isinstance(value, list) else True


def _check_tiling(tensors: Iterable[TensorEntry], path: Path, data_start: int, data_bytes: int) -> None:
    """The ranges must tile the data exactly: a hole hides bytes, an overlap reads one tensor as another."""
    place, previous = data_start, "the header"
    for entry in sorted(tensors, key=lambda entry: (entry.offset_bytes, entry.nbytes)):
        if entry.offset_bytes != place:
            kind = "a hole" if entry.offset_bytes > place else "an overlap"
            raise CheckpointError(
                f"{path}: {kind} of {_short(abs(entry.offset_bytes - place))} bytes between {previous!r} and"
                f" {entry.name!r}; the tensors of a file must follow one another"
            )
        place, previous = place + entry.nbytes, entry.name
    promised = place - data_start
    if promised > data_bytes:
        raise CheckpointError(
            f"{path} is cut off: its header promises {_short(promised)} bytes of data, {data_bytes:,} are there"
            f" ({_short(promised - data_bytes)} missing): fetch this file again"
        )
    if promised < data_bytes:
        raise CheckpointError(
            f"{path} has {data_bytes - promised:,} bytes after its last tensor {previous!r}; the tensors must fill the"
            " data"
        )
