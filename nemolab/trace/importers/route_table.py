"""All rows of a `route_trace v1` csv, each checked against the header: a chunk of the file at a time."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import shown
from nemolab.trace.importers.route_header import LINE_LIMIT_BYTES, REQUIRED, Header, line_kind
from nemolab.trace.importers.route_rows import COMMENT, DONE, FAULT, FULL, SKIP, WEIGHT, parse_rows
from nemolab.trace.trace import DECODE

OPTIONAL = ("expert_bytes", "dropped")
KINDS = {
    "turn": "i4", "phase": "u1", "step": "i4", "layer": "i2", "slot": "i4", "expert": "i4", "weight": "f4", "read": "?",
}  # fmt: skip
CHUNK_BYTES = 4 << 20


@dataclass
class Rows:
    """Columns of all rows, in the order of the file; starts says on which line runs of rows begin."""

    turn: np.ndarray
    phase: np.ndarray
    step: np.ndarray
    layer: np.ndarray
    slot: np.ndarray
    expert: np.ndarray
    weight: np.ndarray | None
    read: np.ndarray | None
    dropped: int
    starts: list[tuple[int, int]] = field(default_factory=list)

    def line(self, row: int) -> int:
        first_row, first_line = self.starts[bisect_right(self.starts, (row, 1 << 60)) - 1]
        return first_line + row - first_row

    def __len__(self) -> int:
        return len(self.turn)


def read_rows(path: Path, file: BinaryIO, header: Header) -> Rows:
    """All rows, checked one by one against the header."""
    wanted = [name for name in (*REQUIRED, *OPTIONAL) if name in header.columns]
    targets = [wanted.index(n) if n in wanted else WEIGHT if n == "weight" else SKIP for n in header.columns]
    columns, layer_bytes = np.array(targets, np.int64), np.array(list(header.layer_bytes_in_order), np.int64)
    parts: dict[str, list[np.ndarray]] = {name: [np.empty(0, kind)] for name, kind in KINDS.items()}
    starts, n_rows, line, dropped = [], 0, header.lines + 1, 0
    for text, is_last in _read_chunks(path, file):
        room = len(text) // (len(columns) + len(REQUIRED)) + 1
        buffer, at, status = np.frombuffer(text, np.uint8), 0, FULL
        integers, weights = np.empty((len(wanted), room), np.int64), np.empty(room)
        while status != DONE:
            count, at, status = parse_rows(buffer, at, len(text), columns, integers, weights)
            if count:
                starts.append((n_rows, line))
                table = dict(zip(wanted, integers[:, :count], strict=True))
                _check_rows(path, header, layer_bytes, table, line)
                if "expert_bytes" in table:
                    table["read"] = table["expert_bytes"] > 0
                if "weight" in header.columns:
                    table["weight"] = _narrow_weights(path, weights[:count], line)
                for name in KINDS.keys() & table.keys():
                    parts[name].append(table[name].astype(KINDS[name]))
                dropped += int(table["dropped"].sum()) if "dropped" in table else 0
                n_rows, line = n_rows + count, line + count
            if status in (COMMENT, FAULT):
                at, line = _skip_line(path, header, text, at, line, is_last), line + 1
    joined = {name: np.concatenate(part) if len(part) > 1 or name in REQUIRED else None for name, part in parts.items()}
    return Rows(**joined, dropped=dropped, starts=starts)


def _read_chunks(path: Path, file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """(some whole lines, whether they are the last): only what ends the file may lack its line end."""
    rest = b""
    while block := file.read(CHUNK_BYTES):
        text = rest + block
        end = text.rfind(b"\n") + 1
        if end:
            yield text[:end], False
        rest = text[end:]
        if len(rest) > LINE_LIMIT_BYTES:
            raise TraceError(f"{path} has a line of more than {LINE_LIMIT_BYTES:,} bytes; short rows were expected")
    yield rest, True


def _check_rows(path: Path, header: Header, layer_bytes: np.ndarray, table: dict[str, np.ndarray], line: int) -> None:
    """Every number within what the header allows: else these are another model's rows, or another's header."""
    most = {
        "turn": 2**31 - 1, "phase": DECODE, "step": 2**31 - 1, "layer": header.n_layer - 1,
        "slot": header.n_expert_used - 1, "expert": header.n_expert - 1, "dropped": 1,
    }  # fmt: skip
    for name, values in table.items():
        if name == "expert_bytes":
            continue
        if values.min() < 0 or values.max() > most[name]:
            row = int(np.flatnonzero((values < 0) | (values > most[name]))[0])
            hint = ": is this another model's header?" if name in ("layer", "slot", "expert") else ""
            raise TraceError(
                f"{path}, line {line + row}: {name} is {values[row]}; 0 to {most[name]} was expected{hint}"
            )
    if len(layer_bytes):
        expected = layer_bytes[table["layer"]]
        wrong = expected == 0
        if "expert_bytes" in table:
            wrong |= (table["expert_bytes"] != 0) & (table["expert_bytes"] != expected)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            found = f"expert_bytes {table['expert_bytes'][row]}" if expected[row] else "a choice"
            said = f"{expected[row]} for it" if expected[row] else "that it has no experts"
            raise TraceError(
                f"{path}, line {line + row}: layer {table['layer'][row]} has {found}; the header says {said}: is this"
                " another model's header?"
            )
    elif "expert_bytes" in table and table["expert_bytes"].min() < 0:
        row = int(np.flatnonzero(table["expert_bytes"] < 0)[0])
        raise TraceError(
            f"{path}, line {line + row}: expert_bytes is {table['expert_bytes'][row]}; 0 or more was expected"
        )


def _narrow_weights(path: Path, weights: np.ndarray, line: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        weights = weights.astype(np.float32)
    if np.isinf(weights).any():
        raise TraceError(
            f"{path}, line {line + int(np.flatnonzero(np.isinf(weights))[0])}: weight is too large a number"
        )
    return weights


def _skip_line(path: Path, header: Header, text: bytes, at: int, line: int, is_last: bool) -> int:
    """Where the next line begins, after one that is blank or a remark; any other is refused."""
    end = text.find(b"\n", at) + 1 or len(text)
    if line_kind(text, at):
        raise TraceError(f"{path}, line {line} begins a second header: split the files that were joined")
    if text[at:end].strip() and not text.startswith(b"#", at):
        _refuse_row(path, header, text[at:end], line, is_last)
    return end


def _refuse_row(path: Path, header: Header, text: bytes, line: int, is_last: bool) -> None:
    """Say in words why a line is no row."""
    row = text.rstrip(b"\r\n").decode("latin-1")
    fields, columns = row.split(","), header.columns
    where = f"{path}, line {line}"
    if len(fields) < len(columns):
        hint = "the file is cut off" if is_last else "this row was cut off"
        raise TraceError(f"{where} has {len(fields)} of {len(columns)} fields ({shown(row)}): {hint}")
    if len(fields) > len(columns):
        raise TraceError(f"{where} has {len(fields)} fields; the line of column names has {len(columns)}")
    for name, value in zip(columns, fields, strict=True):
        if name in (*REQUIRED, *OPTIONAL) and not re.fullmatch(r"-?\d{1,18}", value, re.ASCII):
            raise TraceError(f"{where}: {name} is {shown(value)}; a whole number was expected")
    raise TraceError(f"{where} is {shown(row)}: weight is not a number")
