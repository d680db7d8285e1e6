"""A JSON line for each token and layer, with weights; no phases.

    {"layer_idx": 0, "token_idx": 0, "selected_ids": [49, 19, 58], "gate_weights": [0.5, 0.3, 0.2]}

Lines may come token by token or layer by layer; within a layer token_idx counts up one by one, from the same number in
all layers. layer_idx may leave layers without experts out: those there are, are counted from 0 in order. gate_weights
may be missing, from all lines. Every token is a step of its own, of decode.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import Found, Overrides, all_decode, build_trace, shown
from nemolab.trace.importers.json_lines import check_ids, read_records, whole_number
from nemolab.trace.trace import Trace

NAME = "jsonl layer_idx/token_idx"
LAYOUT = 'JSON lines {"layer_idx", "token_idx", "selected_ids", "gate_weights"}, one a token and layer'
KEYS = frozenset({"layer_idx", "token_idx", "selected_ids"})
LARGEST = 3e38  # float32 ends just above


def read(path: Path, overrides: Overrides) -> Trace:
    """Raises TraceError naming the line and what is wrong with it."""
    lines = _Lines()
    read_records(path, lines.take)
    if not lines.ids:
        raise TraceError(f"{path} holds no record: nothing was recorded")
    order, numbers, first = _order(
        path, *(np.frombuffer(part, np.int32) for part in (lines.line, lines.layer, lines.token))
    )

    def place(values: array) -> np.ndarray:
        by_layer = np.frombuffer(values, values.typecode).reshape(-1, lines.top_k)[order]
        return np.ascontiguousarray(by_layer.reshape(len(numbers), -1, lines.top_k).transpose(1, 0, 2))

    found = Found(NAME, path.stem)
    if numbers.tolist() != list(range(len(numbers))):
        found.notes.append(f"layers {shown(numbers.tolist())} are counted from 0 in order")
    experts, weights = place(lines.ids), place(lines.weights) if lines.weights else None
    return build_trace(path, overrides, found, experts, weights=weights, **all_decode(len(experts), first))


class _Lines:
    """All records so far, one after another, and the lines they stand on."""

    def __init__(self):
        self.line, self.layer, self.token, self.ids = (array("i") for _ in range(4))
        self.weights, self.top_k = array("f"), 0

    def take(self, record: dict[str, Any], line: int) -> None:
        layer, token = whole_number(record, "layer_idx"), whole_number(record, "token_idx")
        ids, weights = check_ids("selected_ids", record.get("selected_ids")), record.get("gate_weights")
        if not self.ids:
            self.top_k = len(ids)
        elif (weights is not None) != bool(self.weights):
            raise TraceError(f"{'lacks' if weights is None else 'has'} 'gate_weights', unlike the lines before")
        if len(ids) != self.top_k:
            raise TraceError(f"has {len(ids)} experts; the lines before have {self.top_k}")
        if weights is not None:
            if not isinstance(weights, list) or len(weights) != self.top_k:
                raise TraceError(f"'gate_weights' is {shown(weights)}; {self.top_k} numbers were expected")
            if not set(map(type, weights)) <= {int, float} or min(weights) < -LARGEST or max(weights) > LARGEST:
                raise TraceError(f"'gate_weights' is {shown(weights)}; numbers that a float32 can hold were expected")
            self.weights.extend(weights)
        self.line.append(line)
        self.layer.append(layer)
        self.token.append(token)
        self.ids.extend(ids)


def _order(path: Path, lines: np.ndarray, layers: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Records layer by layer; the layers' numbers; the first token. In every layer tokens must count up one by one."""
    order = np.argsort(layers, kind="stable")
    numbers, counts = np.unique(layers, return_counts=True)
    first = int(tokens[0])
    n_tokens = int(tokens.max()) - first + 1
    same = np.diff(layers[order]) == 0
    gaps = np.flatnonzero(same & (np.diff(tokens[order].astype(np.int64)) != 1))
    if len(gaps):
        before, record = order[gaps[0]], order[gaps[0] + 1]
        raise TraceError(
            f"{path}, line {lines[record]}: 'token_idx' goes from {tokens[before]} to {tokens[record]} in layer"
            f" {layers[record]}; each follows the one before: give every conversation a file of its own"
        )
    begins = tokens[order][np.flatnonzero(np.append(True, ~same))]
    wrong = np.flatnonzero((begins != first) | (counts != n_tokens))
    if len(wrong):
        at = wrong[0]
        raise TraceError(
            f"{path}: layer {numbers[at]} has {counts[at]} tokens from {begins[at]} on; {n_tokens} from {first} on were"
            " expected: records are missing, or the file is cut off"
        )
    return order, numbers, first
