"""A JSON line for each token, with the experts of all its layers; no weights, no phases.

    {"tok": 0, "layers": [[3, 17, 40, 41, 66, 90, 101, 127], [0, 5, ...], ...]}

tok counts tokens, from any number on, one by one. Known writers sort the experts of a layer by number, so that their
rank is lost: the trace says so. Every token is a step of its own, of decode.
"""

from __future__ import annotations

from array import array
from itertools import chain
from pathlib import Path

import numpy as np

from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import Found, Told, all_decode, build_trace, shown
from nemolab.trace.importers.json_lines import check_ids, read_lines, whole_number
from nemolab.trace.trace import Trace

NAME = "jsonl tok/layers"
LAYOUT = 'JSON lines {"tok": n, "layers": [[experts], ...]}, one a token'
KEYS = frozenset({"tok", "layers"})


def read(path: Path, told: Told) -> Trace:
    """Raises TraceError naming the line and what is wrong with it."""
    ids, first, token, shape = array("i"), 0, -1, (0, 0)
    for line, record in read_lines(path):
        where = f"{path}, line {line}"
        number = whole_number(where, record, "tok")
        layers = record.get("layers")
        if not isinstance(layers, list) or not layers or not all(isinstance(layer, list) for layer in layers):
            raise TraceError(f"{where}: 'layers' is {shown(layers)}; a list of lists of experts was expected")
        if not ids:
            first, token, shape = number, number - 1, (len(layers), len(layers[0]))
        if number != token + 1:
            verb = "jumps" if number > token else "falls" if number < token else "stays"
            raise TraceError(
                f"{where}: 'tok' {verb} from {token} to {number}; each follows the one before: give every conversation"
                " a file of its own"
            )
        if len(layers) != shape[0] or any(len(layer) != shape[1] for layer in layers):
            found = f"{len(layers)} layers of {sorted({len(layer) for layer in layers})[:4]} experts"
            raise TraceError(f"{where} has {found}; the lines before have {shape[0]} layers of {shape[1]}")
        ids.extend(check_ids(f"{where}: 'layers'", list(chain.from_iterable(layers))))
        token = number
    if not ids:
        raise TraceError(f"{path} holds no record: nothing was recorded")
    experts = np.frombuffer(ids, np.int32).reshape(-1, *shape)
    return build_trace(path, told, Found(NAME, path.stem), experts, **all_decode(len(experts), first))
