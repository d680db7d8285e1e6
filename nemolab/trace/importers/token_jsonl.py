"""A JSON line for each token, with the experts of all its layers; no weights, no phases.

    {"tok": 0, "layers": [[3, 17, 40, 41, 66, 90, 101, 127], [0, 5, ...], ...]}

tok counts tokens, from any number on, one by one. Known writers sort the experts of a layer by number, so that their
rank is lost: the trace says so. Every token is a step of its own, of decode.
"""

from __future__ import annotations

from array import array
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import Found, Overrides, all_decode, build_trace, shown
from nemolab.trace.importers.json_lines import check_ids, read_records, whole_number
from nemolab.trace.trace import Trace

NAME = "jsonl tok/layers"
LAYOUT = 'JSON lines {"tok": n, "layers": [[experts], ...]}, one a token'
KEYS = frozenset({"tok", "layers"})


def read(path: Path, overrides: Overrides) -> Trace:
    """Raises TraceError naming the line and what is wrong with it."""
    lines = _Lines()
    read_records(path, lines.take)
    if not lines.ids:
        raise TraceError(f"{path} holds no record: nothing was recorded")
    experts = np.frombuffer(lines.ids, np.int32).reshape(-1, *lines.shape)
    return build_trace(path, overrides, Found(NAME, path.stem), experts, **all_decode(len(experts), lines.first))


class _Lines:
    """ids of all tokens so far, as they stand in the file; shape is (layers, top_k) of the first."""

    def __init__(self):
        self.ids, self.first, self.last, self.shape = array("i"), 0, -1, (0, 0)

    def take(self, record: dict[str, Any], line: int) -> None:
        number, layers = whole_number(record, "tok"), record.get("layers")
        if not isinstance(layers, list) or not layers or not all(isinstance(layer, list) for layer in layers):
            raise TraceError(f"'layers' is {shown(layers)}; a list of lists of experts was expected")
        if not self.ids:
            self.first, self.last, self.shape = number, number - 1, (len(layers), len(layers[0]))
        if number != self.last + 1:
            raise TraceError(
                f"'tok' goes from {self.last} to {number}; each follows the one before: give every conversation a"
                " file of its own"
            )
        lengths = set(map(len, layers))
        if len(layers) != self.shape[0] or lengths != {self.shape[1]}:
            raise TraceError(
                f"has {len(layers)} layers of {shown(sorted(lengths))} experts; the lines before have {self.shape[0]}"
                f" of {self.shape[1]}"
            )
        self.ids.extend(check_ids("layers", list(chain.from_iterable(layers))))
        self.last = number
