"""`routed_experts` in a NumPy archive, as serving engines return it: integers [sequence, layer, k], the ranks last.

    np.savez(path, routed_experts=ids)

A row of the first axis is a token. Other arrays in the archive are left alone; nothing in it is ever unpickled. Every
token is a step of its own, of decode. The archive and the array's own header are believed only where they agree, before
anything of the size they claim is made.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import LARGEST_ID, Found, Overrides, all_decode, build_trace, shown
from nemolab.trace.trace import LARGEST_INT16, Trace

NAME = "npz routed_experts"
LAYOUT = "NumPy archive (.npz) with integers routed_experts[sequence, layer, k]"
MEMBER = "routed_experts.npy"
# Ids of 512 experts, top 22, as int64 shrink to a seventh; what shrinks to a hundredth is no routing.
MOST_SHRINKING, SMALL_BYTES = 100, 1 << 20
MOST_BYTES = 16 << 30
HEADER_LIMIT_BYTES = 1 << 16
CHUNK_BYTES = 8 << 20

_PROBLEMS = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, NotImplementedError, KeyError,
    struct.error, OverflowError, IndexError,
)  # fmt: skip


def read(path: Path, overrides: Overrides) -> Trace:
    """Raises TraceError naming what is wrong with the archive or the array."""
    try:
        with zipfile.ZipFile(path) as archive:
            info = _find_member(path, archive)
            with archive.open(info) as member:
                descr, fortran, shape = _read_npy_header(path, member, info.file_size)
                ids = _read_ids(path, member, np.dtype(descr), prod(shape))
            others = sorted(set(archive.namelist()) - {MEMBER})
    except TraceError:
        raise
    except _PROBLEMS as problem:  # whatever the library says of an archive that is damaged
        raise TraceError(f"{path} is no whole NumPy archive: {shown(str(problem), 120)}") from None
    experts = ids.reshape(shape[::-1]).T if fortran else ids.reshape(shape)
    found = Found(NAME, path.stem)
    if others:
        found.notes.append(f"other arrays of the archive were left alone: {shown(others, 200)}")
    return build_trace(path, overrides, found, experts, **all_decode(len(experts)))


def _find_member(path: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    names = archive.namelist()
    if names.count(MEMBER) != 1:
        if any(name.endswith("data.pkl") for name in names):
            raise TraceError(f"{path} is a PyTorch archive: it can run code and is not read; {LAYOUT} was expected")
        problem = "twice" if MEMBER in names else f"not, but {shown(sorted(names)[:5], 200)}"
        raise TraceError(f"{path} is an archive that holds 'routed_experts' {problem}; {LAYOUT} was expected")
    info = archive.getinfo(MEMBER)
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TraceError(f"{path}: 'routed_experts' is encrypted, or packed in a way NumPy does not use")
    if info.compress_size > path.stat().st_size:
        raise TraceError(f"{path}: 'routed_experts' is said to take more bytes than the file has")
    if info.file_size > MOST_BYTES or info.file_size > max(SMALL_BYTES, MOST_SHRINKING * info.compress_size):
        raise TraceError(
            f"{path}: 'routed_experts' would unpack from {info.compress_size:,} to {info.file_size:,} bytes; routing"
            f" does not shrink to 1/{MOST_SHRINKING}, and {MOST_BYTES >> 30} GiB are the limit"
        )
    return info


def _read_npy_header(path: Path, member: BinaryIO, file_bytes: int) -> tuple[str, bool, tuple[int, ...]]:
    """(type, column order, shape), three axes of integers, together exactly as large as the archive says."""
    where = f"{path}: 'routed_experts'"
    start = _read_exactly(member, 8)
    if start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3):
        raise TraceError(f"{where} begins {start!r}; a NumPy array was expected")
    length_bytes = 2 if start[6] == 1 else 4
    length = int.from_bytes(_read_exactly(member, length_bytes), "little")
    if length > HEADER_LIMIT_BYTES:
        raise TraceError(f"{where} has a header of {length:,} bytes; {HEADER_LIMIT_BYTES:,} are the limit")
    # Patterns instead of NumPy's reader, which evaluates the header as Python.
    text = _read_exactly(member, length).decode("latin-1")
    descr = re.search(r"'descr':\s*'([<>|=]?[a-zA-Z]\d{0,3})'", text)
    order = re.search(r"'fortran_order':\s*(True|False)", text)
    shape = re.search(r"'shape':\s*\(([\d, ]*)\)", text)
    if re.search(r"'descr':\s*('\|O|\[)", text):
        raise TraceError(f"{where} holds Python objects or records, which are not unpickled; integers were expected")
    if not (descr and order and shape):
        raise TraceError(f"{where} has the header {shown(text.strip(), 120)}; type, order and shape were expected")
    if not re.fullmatch(r"[<>|=]?[iu][1248]", descr[1]):
        raise TraceError(f"{where} is of type {shown(descr[1])}; integers were expected")
    extents = tuple(int(extent) for extent in re.findall(r"\d{1,18}", shape[1]))
    if len(extents) != 3 or shape[1].count(",") not in (2, 3) or 0 in extents:
        raise TraceError(f"{where} has shape ({shown(shape[1])}); (tokens, layers, top_k), each above 0, was expected")
    promised = prod(extents) * np.dtype(descr[1]).itemsize + 8 + length_bytes + length
    if promised != file_bytes:
        raise TraceError(
            f"{where}: {descr[1]} {extents} takes {promised:,} bytes with its header; the archive holds {file_bytes:,}"
        )
    return descr[1], order[1] == "True", extents


def _read_ids(path: Path, member: BinaryIO, dtype: np.dtype, count: int) -> np.ndarray:
    """All ids in the order of the file, as narrow integers: checked and narrowed a chunk at a time."""
    ids = np.empty(count, np.int16)
    for first in range(0, count, CHUNK_BYTES // dtype.itemsize):
        last = min(count, first + CHUNK_BYTES // dtype.itemsize)
        chunk = np.frombuffer(_read_exactly(member, (last - first) * dtype.itemsize), dtype)
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high > LARGEST_ID:
            raise TraceError(
                f"{path}: 'routed_experts' holds {low if low < 0 else high}; experts are numbers from 0 up"
            )
        if high > LARGEST_INT16 and ids.dtype == np.int16:
            ids = ids.astype(np.int32)
        ids[first:last] = chunk
    if member.read(1):
        raise TraceError(f"{path}: 'routed_experts' goes on after its end")
    return ids


def _read_exactly(member: BinaryIO, n_bytes: int) -> bytes:
    found = member.read(n_bytes)
    if len(found) != n_bytes:
        raise EOFError("'routed_experts' ends early: the file is cut off")
    return found
