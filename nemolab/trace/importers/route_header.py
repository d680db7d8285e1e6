"""The comments above the rows of a `route_trace v1` csv: which model, how large its layers' experts, which columns."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import name_of, shown

REQUIRED = ("turn", "phase", "step", "layer", "slot", "expert")
LINE_LIMIT_BYTES = 1 << 16
MOST_LAYERS = 1 << 14
MOST_COLUMNS = 1000

_MODEL = re.compile(rb"#\s*model=(.*) arch=(\S*) n_layer=(\d{1,18}) n_expert=(\d{1,18}) n_expert_used=(\d{1,18})( .*)?")
_LAYER = re.compile(rb"#\s*layer=(\d{1,18}) expert_bytes=(\d{1,18})( .*)?")
_VERSION = re.compile(rb"#\s*route_trace (\S+)")
_KIND = re.compile(rb"#\s*(route_trace\b|model=|layer=)")


@dataclass
class Header:
    """The comments above the rows, checked on their own; layer_bytes is empty where the file has no such lines."""

    model: str
    arch: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    layer_bytes: dict[int, int]
    columns: list[str]
    lines: int

    @property
    def layer_bytes_in_order(self) -> list[int]:
        return [self.layer_bytes[layer] for layer in sorted(self.layer_bytes)]


def line_kind(text: bytes, at: int = 0) -> bytes | None:
    """Which line of a header begins there: route_trace, model= or layer=; None for remarks and rows."""
    found = _KIND.match(text, at)
    return found[1] if found else None


def read_header(path: Path, file: BinaryIO) -> Header:
    """Leaves the file at its first row. Raises TraceError naming the line and what was expected of it."""
    said, lines = _Said(), 0
    while True:
        line = file.readline(LINE_LIMIT_BYTES)
        lines += 1
        where = f"{path}, line {lines}"
        if len(line) == LINE_LIMIT_BYTES:
            raise TraceError(f"{where} has {LINE_LIMIT_BYTES:,} bytes or more; a short line was expected")
        if not line:
            raise TraceError(f"{path} ends within its header: no line names the columns, no rows follow")
        if lines == 1:
            _check_version(line.removeprefix(BOM_UTF8).strip(), where)
        elif line.strip().startswith(b"#"):
            if lines > 2 * MOST_LAYERS:
                raise TraceError(f"{path} has {lines:,} lines of comments and no rows yet")
            said.take(line.strip(), where)
        else:
            break
    if said.model is None:
        raise TraceError(
            f"{where}: no line '# model=... n_layer=.. n_expert=.. n_expert_used=..' stands above the rows"
        )
    columns = _read_columns(line.strip(), where)
    n_layer, n_expert, n_expert_used = (int(said.model[group]) for group in (3, 4, 5))
    _check_sizes(path, n_layer, n_expert, n_expert_used, said.layer_bytes)
    model, arch = (name_of(said.model[group].decode("utf-8", "replace")) for group in (1, 2))
    return Header(model, arch, n_layer, n_expert, n_expert_used, said.layer_bytes, columns, lines)


@dataclass
class _Said:
    """What the comments have said so far; model is the match of their line."""

    model: re.Match | None = None
    layer_bytes: dict[int, int] = field(default_factory=dict)

    def take(self, text: bytes, where: str) -> None:
        kind = line_kind(text)
        if kind == b"route_trace" or (kind == b"model=" and self.model):
            raise TraceError(f"{where} begins a second header: split the files that were joined")
        if kind == b"model=":
            self.model = _MODEL.fullmatch(text)
            if self.model is None:
                raise TraceError(
                    f"{where} is {shown(text.decode('latin-1'), 200)}; '# model=... arch=... n_layer=.. n_expert=.."
                    " n_expert_used=..' was expected"
                )
        elif kind == b"layer=":
            layer = _LAYER.fullmatch(text)
            if layer is None:
                raise TraceError(
                    f"{where} is {shown(text.decode('latin-1'))}; '# layer=i expert_bytes=.. ...' was expected"
                )
            if int(layer[1]) in self.layer_bytes or len(self.layer_bytes) == MOST_LAYERS:
                raise TraceError(f"{where} names layer {int(layer[1])} a second time, or one of too many")
            self.layer_bytes[int(layer[1])] = int(layer[2])


def _check_version(text: bytes, where: str) -> None:
    version = _VERSION.fullmatch(text)
    if version is None or version[1] != b"v1":
        raise TraceError(f"{where} is {shown(text.decode('latin-1'))}; '# route_trace v1' is known")


def _check_sizes(path: Path, n_layer: int, n_expert: int, n_expert_used: int, layer_bytes: dict[int, int]) -> None:
    if not (1 <= n_layer <= MOST_LAYERS and 1 <= n_expert_used <= n_expert < 2**31):
        raise TraceError(
            f"{path}: a model of n_layer={n_layer} n_expert={n_expert} n_expert_used={n_expert_used} cannot be;"
            f" 1 to {MOST_LAYERS} layers and no more experts used than there are were expected"
        )
    if layer_bytes and sorted(layer_bytes) != list(range(n_layer)):
        missing = sorted(set(range(n_layer)) ^ set(layer_bytes))[0]
        raise TraceError(
            f"{path}: the header gives sizes for {len(layer_bytes)} layers and says n_layer={n_layer}; look at layer"
            f" {missing}"
        )


def _read_columns(text: bytes, where: str) -> list[str]:
    columns = text.decode("latin-1").split(",")
    missing = [name for name in REQUIRED if name not in columns]
    if missing or len(set(columns)) != len(columns) or len(columns) > MOST_COLUMNS:
        problem = f"has no {', '.join(missing)}" if missing else "names a column twice, or too many"
        raise TraceError(f"{where}, the line of column names, {problem}: {shown(text.decode('latin-1'), 200)}")
    return columns
