"""A trace as one safetensors file: the arrays under their names, everything else as JSON in its header.

The JSON stands under `nemolab.trace`: `format_version`, `tokens`, `layers`, `top_k`, the fields of TraceMeta, and
`sha256` over all of these and over the name, type, shape and bytes of every array. So a header swapped with another
trace's, a byte changed and a file cut off are all refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from nemolab.checkpoint.json_files import parse_json_object
from nemolab.checkpoint.reading import read_range, read_range_into
from nemolab.checkpoint.safetensors_header import Header, TensorEntry, load_header
from nemolab.errors import CheckpointError, StoreError, TraceError
from nemolab.store.files import sync_folder
from nemolab.store.tensor_file import Outgoing, write_tensor_file
from nemolab.trace.trace import ARRAYS, META_FIELDS, REQUIRED, Trace, TraceMeta

KEY = "nemolab.trace"  # where the JSON stands among the header's metadata
FORMAT_VERSION = 1
_COUNTS = ("tokens", "layers", "top_k")
_FACTS = {"format_version", *_COUNTS, *META_FIELDS, "sha256"}
_TYPES = {"U8": np.dtype(np.uint8), "I16": np.dtype("<i2"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4")}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def write_trace(path: str | Path, trace: Trace) -> int:
    """Write a checked trace; its name appears only when all of it is on disk. Returns the file's bytes.

    Raises TraceError for a trace that is not sound, and where the file cannot be written.
    """
    path = Path(path)
    trace.check()
    arrays = {name: np.ascontiguousarray(array) for name, array in trace.arrays.items()}
    facts: dict[str, Any] = {"format_version": FORMAT_VERSION}
    facts |= dict(zip(_COUNTS, trace.experts.shape, strict=True))
    facts |= {name: getattr(trace.meta, name) for name in META_FIELDS}
    facts = json.loads(json.dumps(facts))  # as a reader will see them: tuples are lists, keys are texts
    facts["sha256"] = _digest(facts, arrays)
    outgoing = [
        Outgoing(name, _NAMES[array.dtype], array.shape, array.nbytes, lambda array=array: [_as_bytes(array)])
        for name, array in arrays.items()
    ]
    try:
        written = write_tensor_file(path, outgoing, {KEY: json.dumps(facts, ensure_ascii=False)})
        sync_folder(path.parent)
    except StoreError as problem:
        raise TraceError(str(problem)) from problem
    return written.nbytes


def read_trace(path: str | Path) -> Trace:
    """Read and check a file of `write_trace`. Raises TraceError naming file and field, found and expected.

    Nothing is allocated before the sizes in the header agree with one another and with the file.
    """
    path = Path(path)
    try:
        header = load_header(path)
        facts = _read_facts(header)
        arrays = {}
        for name, entry in _check_entries(header, facts).items():
            arrays[name] = np.empty(entry.shape, _TYPES[entry.dtype])
            read_range_into(path, entry.offset_bytes, arrays[name])
    except CheckpointError as problem:
        raise TraceError(str(problem)) from problem
    found = _digest(facts, arrays)
    if facts["sha256"] != found:
        raise TraceError(
            f"{path}: its sha256 is said to be {str(facts['sha256'])[:80]!r}, what it holds has {found!r}: bytes were "
            "changed, or this header belongs to another trace"
        )
    sizes = facts["block_bytes"]
    meta = {name: facts[name] for name in META_FIELDS} | {"block_bytes": tuple(sizes) if sizes is not None else None}
    trace = Trace(TraceMeta(**meta), **arrays)
    try:
        trace.check()
    except TraceError as problem:
        raise TraceError(f"{path}: {problem}") from None
    return trace


def check_target(path: str | Path) -> None:
    """Whether a trace can be written there, before anything long runs.

    Raises TraceError where the folder is missing or may not be written to, and where the name is that of something else
    than a trace: it would be lost.
    """
    path = Path(path)
    folder = path.parent
    if not folder.is_dir():
        raise TraceError(f"{path}: {folder} is no folder; make it first, or write the trace elsewhere")
    if path.is_dir():
        raise TraceError(f"{path} is a folder; a file name for the trace was expected")
    if (path.exists() or path.is_symlink()) and not is_trace(path):
        raise TraceError(f"{path} exists and is no trace; choose another name or remove it first")
    if not os.access(folder, os.W_OK):
        raise TraceError(f"{path}: {folder} may not be written to")


def is_trace(path: str | Path) -> bool:
    """Whether a file begins as one of `write_trace`; it may still be damaged."""
    path = Path(path)
    try:
        if not path.is_file():  # a pipe would be waited for
            return False
        start = read_range(path, 0, min(path.stat().st_size, 4096)).tobytes()
    except (OSError, CheckpointError):
        return False
    # Our header begins with the metadata; JSON of other writers may hold the key further on.
    return start[8:9] == b"{" and f'"{KEY}"'.encode() in start[8:]


def _read_facts(header: Header) -> dict[str, Any]:
    text = header.metadata.get(KEY)
    if text is None:
        names = ", ".join(sorted(header.tensors)[:3]) or "no tensor"
        raise TraceError(f"{header.path}: no {KEY!r} in its header (it holds {names}): this is no trace of nemolab")
    where = f"{header.path}: {KEY}"
    facts = parse_json_object(text.encode("utf-8", "surrogatepass"), where)
    version = facts.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise TraceError(f"{where}: format_version is {version!r}; this nemolab reads {FORMAT_VERSION}")
    if set(facts) != _FACTS:
        missing, unknown = sorted(_FACTS - set(facts)), sorted(set(facts) - _FACTS)
        raise TraceError(f"{where}: fields missing: {missing or 'none'}, unknown: {unknown or 'none'}")
    for name in _COUNTS:
        if type(facts[name]) is not int or facts[name] < 1:
            raise TraceError(
                f"{where}: {name} is {facts[name]!r}; 1 or more was expected: an empty trace tells nothing"
            )
    if facts["block_bytes"] is not None and not isinstance(facts["block_bytes"], list):
        raise TraceError(f"{where}: block_bytes is {facts['block_bytes']!r}; a list of sizes or null was expected")
    return facts


def _check_entries(header: Header, facts: dict[str, Any]) -> dict[str, TensorEntry]:
    """Names, types and shapes, before any of it is read."""
    entries = header.tensors
    for name in REQUIRED:
        if name not in entries:
            raise TraceError(f"{header.path}: {name!r} is missing; it holds {', '.join(sorted(entries)) or 'nothing'}")
    for name in entries.keys() - ARRAYS.keys():
        raise TraceError(f"{header.path}: {name!r} is no array of a trace; known are {', '.join(ARRAYS)}")
    found = {name: entries[name] for name in ARRAYS if name in entries}
    for name, entry in found.items():
        types, axes = ARRAYS[name]
        if _TYPES.get(entry.dtype) not in types:
            wanted = " or ".join(_NAMES[dtype] for dtype in types)
            raise TraceError(f"{header.path}: {name} is {entry.dtype}; {wanted} was expected")
        shape = tuple(facts.get(axis, axis) for axis in axes)
        if len(entry.shape) != len(shape) or any(
            size not in (stored, "n") for size, stored in zip(shape, entry.shape, strict=True)
        ):
            raise TraceError(
                f"{header.path}: {name} has shape {entry.shape}; {shape} was expected for {facts['tokens']} tokens, "
                f"{facts['layers']} layers, top-{facts['top_k']}"
            )
    return found


def _digest(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    """sha256 of the facts (but for the digest itself) and of every array with its name, type and shape."""
    said = {name: value for name, value in facts.items() if name != "sha256"}
    found = hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())
    for name in ARRAYS:
        if name in arrays:
            found.update(json.dumps([name, _NAMES[arrays[name].dtype], arrays[name].shape]).encode())
            found.update(_as_bytes(arrays[name]))
    return found.hexdigest()


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
