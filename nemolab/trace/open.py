"""Open a routing trace of any known form, told apart by what the file holds, never by its name."""

from __future__ import annotations

import stat
import struct
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nemolab.errors import TraceError
from nemolab.trace.file import is_trace, read_trace
from nemolab.trace.importers import layer_jsonl, route_trace, routed_npz, token_jsonl
from nemolab.trace.importers.arrange import Overrides, settle_sizes, shown
from nemolab.trace.importers.json_lines import LINE_LIMIT_BYTES, parse_line
from nemolab.trace.importers.route_header import line_kind
from nemolab.trace.trace import Trace

IMPORTERS = (route_trace, token_jsonl, layer_jsonl, routed_npz)
OURS = "a trace of nemolab (`nemolab trace`, one safetensors file)"
_OTHERS = (
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"),
    (b"\xfd7zXZ", "an xz archive: unpack it first"),
    (b"BZh", "a bzip2 archive: unpack it first"),
    (b"\x93NUMPY", "a single NumPy array: save it with np.savez(path, routed_experts=ids)"),
    (b"\xff\xfe", "text in UTF-16: save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16: save it as UTF-8"),
    (b"\x80", "a Python pickle: it can run code and is not read"),
    (b"GGUF", "a GGUF file: a model, no trace"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PAR1", "a Parquet file"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"),
    (b"turn,phase,step", "the rows of a route_trace without the comments above them: its '#' lines are needed"),
)


def open_trace(
    path: str | Path,
    *,
    n_experts: int | None = None,
    block_bytes: int | Sequence[int] | None = None,
    prefill_warms: bool | None = None,
) -> Trace:
    """A checked trace from a file of any known form.

    n_experts      for forms that do not say how many experts a layer has (they take the largest number + 1); where the
                   file says so, they must agree
    block_bytes    bytes of an expert's block, one for all or one for each MoE layer, instead of what the file says
    prefill_warms  whether prompt passes went through the cache, instead of what the form says
    Raises TraceError: a file that cannot be read, is of no known form, or is not what its form promises.
    """
    path, overrides = Path(path), Overrides(n_experts, block_bytes, prefill_warms)
    try:
        importer = recognise(path)
        if importer is None:
            return _apply(path, overrides, read_trace(path))
        return importer.read(path, overrides)
    except OSError as problem:
        raise TraceError(f"{path} cannot be read: {problem.strerror or problem}") from None


def recognise(path: Path):
    """The importer of a file, or None for a trace of ours. Raises TraceError for a file of no known form."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise TraceError(f"{path} is not a file; a routing trace was expected")
    with path.open("rb") as file:
        start = file.read(4096)
        if not start:
            raise TraceError(f"{path} is empty: nothing was recorded, or it never arrived")
        if start.startswith(b"PK\x03\x04") or start.startswith(b"PK\x05\x06"):
            return routed_npz
        text = start.removeprefix(BOM_UTF8).lstrip()
        if line_kind(text) == b"route_trace":
            return route_trace
        if text.startswith(b"{"):
            file.seek(0)
            line = b""
            while not line.removeprefix(BOM_UTF8).strip():
                line = file.readline(LINE_LIMIT_BYTES + 1)
            return _recognise_record(path, line.removeprefix(BOM_UTF8))
    if _is_safetensors(start, path.stat().st_size):
        if is_trace(path):
            return None
        raise TraceError(
            f"{path} is a safetensors file without a trace in it, perhaps a shard of a checkpoint: `nemolab trace`"
            f" makes a trace of a checkpoint. {_known()}"
        )
    what = next((name for magic, name in _OTHERS if text.startswith(magic)), None)
    raise TraceError(
        f"{path} is {what or 'of no form that is known here'}; it begins {shown(start[:40], 100)}. {_known()}"
    )


def _recognise_record(path: Path, line: bytes):
    """By the names in the first object of a file of JSON lines."""
    try:
        keys = set(parse_line(line))
    except TraceError as error:
        raise TraceError(f"{path}, line 1 {error}. {_known()}") from None
    for importer in (token_jsonl, layer_jsonl):
        if keys >= importer.KEYS:
            return importer
    for importer in (token_jsonl, layer_jsonl):
        if keys & importer.KEYS:
            missing = ", ".join(sorted(importer.KEYS - keys))
            raise TraceError(f"{path}, line 1 has {shown(sorted(keys), 200)} but no {missing}. {_known()}")
    raise TraceError(f"{path} holds JSON with {shown(sorted(keys), 200)}, no known form. {_known()}")


def _is_safetensors(start: bytes, file_bytes: int) -> bool:
    return len(start) > 8 and start[8:9] == b"{" and struct.unpack("<Q", start[:8])[0] <= file_bytes - 8


def _apply(path: Path, overrides: Overrides, trace: Trace) -> Trace:
    """What the caller says, over what a trace of ours says."""
    meta = trace.meta
    if overrides.n_experts not in (None, meta.n_experts):
        raise TraceError(f"{path} is of a model of {meta.n_experts} experts; {overrides.n_experts} were asked for")
    if overrides.block_bytes is not None:
        meta = replace(meta, block_bytes=settle_sizes(path, overrides.block_bytes, trace.n_layers))
    if overrides.prefill_warms is not None:
        meta = replace(meta, prefill_warms=overrides.prefill_warms)
    return replace(trace, meta=meta)


def _known() -> str:
    return "Known: " + "; ".join([OURS, *(importer.LAYOUT for importer in IMPORTERS)])
