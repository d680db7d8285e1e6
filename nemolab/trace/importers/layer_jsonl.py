"""A JSON line for each token and layer, with weights; no phases.

    {"layer_idx": 0, "token_idx": 0, "selected_ids": [49, 19, 58], "gate_weights": [0.5, 0.3, 0.2]}

Lines may come token by token or layer by layer; within a layer token_idx counts up one by one, from the same number in
all layers. layer_idx may leave layers without experts out: those there are, are counted from 0 in order. gate_weights
may be missing, from all lines. Every token is a step of its own, of decode.
"""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import Found, Told, all_decode, build_trace, shown
from nemolab.trace.importers.json_lines import check_ids, read_lines, whole_number
from nemolab.trace.trace import Trace

NAME = "jsonl layer_idx/token_idx"
LAYOUT = 'JSON lines {"layer_idx", "token_idx", "selected_ids", "gate_weights"}, one a token and layer'
KEYS = frozenset({"layer_idx", "token_idx", "selected_ids"})


def read(path: Path, told: Told) -> Trace:
    """Raises TraceError naming the line and what is wrong with it."""
    lines, layers, tokens, ids, weights = array("q"), array("i"), array("i"), array("i"), array("d")
    top_k, weighted = 0, False
    for line, record in read_lines(path):
        where = f"{path}, line {line}"
        layers.append(whole_number(where, record, "layer_idx"))
        tokens.append(whole_number(where, record, "token_idx"))
        chosen = check_ids(f"{where}: 'selected_ids'", record.get("selected_ids"))
        gate = record.get("gate_weights")
        if not lines:
            top_k, weighted = len(chosen), gate is not None
        if len(chosen) != top_k:
            raise TraceError(f"{where} has {len(chosen)} experts; the lines before have {top_k}")
        if (gate is not None) != weighted:
            raise TraceError(f"{where} {'lacks' if weighted else 'has'} 'gate_weights', unlike the lines before")
        if weighted:
            weights.extend(_check_weights(where, gate, top_k))
        lines.append(line)
        ids.extend(chosen)
    if not lines:
        raise TraceError(f"{path} holds no record: nothing was recorded")
    order, numbers, first = _order(path, *(np.frombuffer(part, part.typecode) for part in (lines, layers, tokens)))

    def place(values: array) -> np.ndarray:
        by_layer = np.frombuffer(values, values.typecode).reshape(-1, top_k)[order].reshape(len(numbers), -1, top_k)
        return by_layer.transpose(1, 0, 2)

    experts = place(ids)
    found = Found(NAME, path.stem)
    if numbers.tolist() != list(range(len(numbers))):
        found.notes.append(f"layers {shown(numbers.tolist())} are counted from 0 in order")
    gates = np.ascontiguousarray(place(weights), np.float32) if weighted else None
    return build_trace(path, told, found, experts, weights=gates, **all_decode(len(experts), first))


def _check_weights(where: str, gate: Any, top_k: int) -> list[float]:
    if not isinstance(gate, list) or len(gate) != top_k:
        raise TraceError(f"{where}: 'gate_weights' is {shown(gate)}; {top_k} numbers were expected")
    for value in gate:
        if type(value) not in (int, float) or not -3e38 < value < 3e38 or not math.isfinite(value):
            raise TraceError(
                f"{where}: 'gate_weights' holds {shown(value)}; numbers that float32 can hold were expected"
            )
    return gate


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
