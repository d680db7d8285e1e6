"""Routing traces of others, to be spoiled, and how they are refused."""

import json
from pathlib import Path

import pytest
from foreign_traces import draw_routing, layer_lines, npy, route_csv, token_lines, zip_of

from nemolab.errors import TraceError
from nemolab.trace import open_trace

EXPERTS, WEIGHTS = draw_routing()
CSV = route_csv(EXPERTS, WEIGHTS)
TOKENS = token_lines(EXPERTS)
LAYERS = layer_lines(EXPERTS, WEIGHTS)
ROWS = CSV.splitlines()
LAST = len(ROWS) - 1
HONEST = {"descr": "<i2", "fortran_order": False, "shape": (7, 3, 2)}
DATA = EXPERTS.astype("<i2").tobytes()


def refuse_at(path: Path, content: bytes | str, pattern: str, **overrides) -> str:
    """Opens the content, which must be refused with a message that names the file and what `pattern` finds."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TraceError, match=pattern) as caught:
        open_trace(path, **overrides)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message and len(message) < 1500 and message.isprintable()
    return message


def change_row(number, column, value):
    """CSV with one field of one row changed; rows count from 0."""
    lines = list(ROWS)
    fields = lines[6 + number].split(",")
    fields[column] = value
    lines[6 + number] = ",".join(fields)
    return "\n".join(lines) + "\n"


def line_of(text, number, change):
    lines = text.splitlines()
    record = json.loads(lines[number])
    change(record)
    lines[number] = json.dumps(record)
    return "\n".join(lines) + "\n"


def set_to(key, value):
    return lambda record: record.update({key: value})


def set_id(value):
    return lambda record: record["layers"][1].__setitem__(0, value)


def set_record(number, key, value):
    return line_of(LAYERS, number, set_to(key, value))


def packed(header, data=DATA, **options):
    return zip_of("routed_experts.npy", npy(header, data, **options))
