"""The comments above the rows of a `route_trace v1` csv: which model, how large its layers' experts, which columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
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
SECOND = re.compile(rb"#\s*(route_trace|model=|layer=)")


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


def read_header(path: Path, file: BinaryIO) -> Header:
    model, layer_bytes, lines = None, {}, 0
    while True:
        line = file.readline(LINE_LIMIT_BYTES)
        lines += 1
        text = line.removeprefix(b"\xef\xbb\xbf").strip() if lines == 1 else line.strip()
        where = f"{path}, line {lines}"
        if len(line) == LINE_LIMIT_BYTES:
            raise TraceError(f"{where} has {LINE_LIMIT_BYTES:,} bytes or more; a short line was expected")
        if not line:
            raise TraceError(f"{path} ends within its header: no line names the columns, no rows follow")
        if lines == 1:
            version = re.fullmatch(rb"#\s*route_trace (\S+)", text)
            if version is None or version[1] != b"v1":
                raise TraceError(f"{where} is {shown(text.decode('latin-1'))}; '# route_trace v1' is known")
        elif re.match(rb"#\s*route_trace", text) or (model and re.match(rb"#\s*model=", text)):
            raise TraceError(f"{where} begins a second header: split the files that were joined")
        elif re.match(rb"#\s*model=", text):
            model = _MODEL.fullmatch(text)
            if model is None:
                raise TraceError(
                    f"{where} is {shown(text.decode('latin-1'), 200)}; '# model=... arch=... n_layer=.. n_expert=.."
                    " n_expert_used=..' was expected"
                )
        elif re.match(rb"#\s*layer=", text):
            layer = _LAYER.fullmatch(text)
            if layer is None:
                raise TraceError(
                    f"{where} is {shown(text.decode('latin-1'))}; '# layer=i expert_bytes=.. ...' was expected"
                )
            if int(layer[1]) in layer_bytes or len(layer_bytes) == MOST_LAYERS:
                raise TraceError(f"{where} names layer {int(layer[1])} a second time, or one of too many")
            layer_bytes[int(layer[1])] = int(layer[2])
        elif not text.startswith(b"#"):
            break
        elif lines > 2 * MOST_LAYERS:
            raise TraceError(f"{path} has {lines:,} lines of comments and no rows yet")
    if model is None:
        raise TraceError(
            f"{where}: no line '# model=... n_layer=.. n_expert=.. n_expert_used=..' stands above the rows"
        )
    n_layer, n_expert, n_expert_used = (int(model[group]) for group in (3, 4, 5))
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
    columns = text.decode("latin-1").split(",")
    missing = [name for name in REQUIRED if name not in columns]
    if missing or len(set(columns)) != len(columns) or len(columns) > MOST_COLUMNS:
        problem = f"has no {', '.join(missing)}" if missing else "names a column twice, or too many"
        raise TraceError(f"{where}, the line of column names, {problem}: {shown(text.decode('latin-1'), 200)}")
    return Header(
        name_of(model[1].decode("utf-8", "replace")), name_of(model[2].decode("utf-8", "replace")), n_layer, n_expert,
        n_expert_used, layer_bytes, columns, lines,
    )  # fmt: skip
