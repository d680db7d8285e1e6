"""BigMoeOnEdge's `route_trace v1`: a csv of every choice, with the facts of the model in comments above it.

    # route_trace v1
    # model=PATH arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=6
    # layer=0 expert_bytes=3059712 dense_bytes=11953152             one line for each layer; 0 bytes: it has no experts
    turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
    0,0,0,0,0,49,0.221297,0,3059712,0

phase 0 is prefill, 1 decode; step is the position in the context, over both; slot is the rank. weight may be `nan`:
not known. residency 0 is a miss, 1 a hit, 2 a first hit on a block read ahead. expert_bytes is what this row read: in a
prompt only the first row that asks for an expert reads it. dropped marks choices that the engine left out (a miss of
little weight): they are kept here, since the router made them. Columns are found by name: those after `expert` may be
missing, and others may follow.

One turn is one conversation. Its prompt went through the layers in one pass and left its experts in the cache. Of the
prompt the last layer has only the last token, since the others' output there is never used; -1 stands for the others.
Where `expert_bytes` is there, `live_misses` counts the rows that read something.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import Found, Told, build_trace
from nemolab.trace.importers.route_header import Header, read_header
from nemolab.trace.importers.route_table import Rows, read_rows
from nemolab.trace.trace import DECODE, PREFILL, Trace, id_type

NAME = "route_trace v1"
LAYOUT = "csv of BigMoeOnEdge: '# route_trace v1', '# model=...', then turn,phase,step,layer,slot,expert,..."


def read(path: Path, told: Told) -> Trace:
    """Raises TraceError naming the line and what is wrong with it."""
    with path.open("rb") as file:
        header = read_header(path, file)
        rows = read_rows(path, file, header)
    if not len(rows):
        raise TraceError(f"{path} has a header and no rows: nothing was recorded")
    layers = _find_layers(path, header, rows)
    token, turns = _number_tokens(path, header, rows, layers)
    experts, cells = _place(path, header, rows, layers, token)
    phase = _find_phases(path, rows, token, turns)
    _check_complete(path, header, layers, experts, phase, turns)

    n_tokens = len(experts)
    conversation = np.repeat(np.arange(len(turns.first_token), dtype=np.int32), turns.n_tokens)
    position = np.arange(n_tokens) - turns.first_token[conversation] + turns.first_step[conversation]
    begins = (phase == DECODE) | (np.diff(phase, prepend=DECODE) != 0) | (np.diff(conversation, prepend=-1) != 0)
    step = (np.cumsum(begins) - 1).astype(np.int32)
    found = Found(NAME, header.model, header.n_expert, prefill_warms=True)
    found.conversations = [f"turn {number}" for number in turns.number.tolist()]
    found.facts["arch"] = header.arch
    if header.layer_bytes:
        found.block_bytes = tuple(header.layer_bytes[layer] for layer in layers.tolist())
    if len(layers) < header.n_layer:
        found.notes.append(f"{len(layers)} of {header.n_layer} layers have experts; they are counted from 0 in order")
    if rows.dropped:
        found.notes.append(f"the engine left out {rows.dropped:,} of {len(rows):,} choices; all are replayed")
    weights = None
    if rows.weight is not None and np.isnan(rows.weight).any():
        found.notes.append("weights are left out: some are not known")
    elif rows.weight is not None:
        weights = np.zeros(experts.shape, np.float32)
        weights.reshape(-1)[cells] = rows.weight
    live_misses = None if rows.read is None else _count_reads(rows.read, cells, experts.shape, step)
    return build_trace(
        path, told, found, experts, phase=phase, conversation=conversation, position=position.astype(np.int32),
        step=step, weights=weights, live_misses=live_misses,
    )  # fmt: skip


@dataclass(frozen=True)
class _Turns:
    """By turn, int64 each: its number in the file, its first step, its first token in the trace, how many it has."""

    number: np.ndarray
    first_step: np.ndarray
    first_token: np.ndarray
    n_tokens: np.ndarray


def _find_layers(path: Path, header: Header, rows: Rows) -> np.ndarray:
    """Numbers of the layers that have rows, in order; the header's others must have no experts."""
    layers = np.flatnonzero(np.bincount(rows.layer, minlength=header.n_layer))
    last = header.n_layer - 1  # where the header has no sizes, this much is known: the last layer is never without
    expected = [layer for layer in range(header.n_layer) if header.layer_bytes.get(layer, layer == last)]
    missing = sorted(set(expected) - set(layers.tolist()))
    if missing:
        raise TraceError(
            f"{path} has no row of layer {missing[0]}, and the header tells of experts there: the file is cut off, or"
            " this is another model's header"
        )
    return layers


def _number_tokens(path: Path, header: Header, rows: Rows, layers: np.ndarray) -> tuple[np.ndarray, _Turns]:
    """The token of each row, and the turns; all checked before anything of the size they claim is made."""
    falls = np.flatnonzero(np.diff(rows.turn) < 0)
    if len(falls):
        row = int(falls[0]) + 1
        raise TraceError(f"{path}, line {rows.line(row)}: turn falls from {rows.turn[row - 1]} to {rows.turn[row]}")
    bounds = np.flatnonzero(np.diff(rows.turn, prepend=-1))
    first_step = np.minimum.reduceat(rows.step, bounds).astype(np.int64)
    n_tokens = np.maximum.reduceat(rows.step, bounds) - first_step + 1
    turns = _Turns(rows.turn[bounds].astype(np.int64), first_step, np.cumsum(n_tokens) - n_tokens, n_tokens)
    # A prompt lacks at most its last layer, one of two or more: at least half of all places are filled.
    places = int(n_tokens.sum()) * len(layers) * header.n_expert_used
    if places > 2 * len(rows):
        _refuse_jump(path, rows, bounds)
        raise TraceError(
            f"{path} has {len(rows):,} rows; {int(n_tokens.sum()):,} tokens with top-{header.n_expert_used} in"
            f" {len(layers)} layers would have {places:,}: rows are missing, or this is another model's header"
        )
    turn = np.repeat(np.arange(len(bounds)), np.diff(bounds, append=len(rows)))
    token = turns.first_token[turn] + rows.step - first_step[turn]
    if np.bincount(token, minlength=int(n_tokens.sum())).min() == 0:
        _refuse_jump(path, rows, bounds)
    by_layer = np.argsort(rows.layer, kind="stable")
    falls = np.flatnonzero((np.diff(token[by_layer]) < 0) & (np.diff(rows.layer[by_layer]) == 0))
    if len(falls):
        before, row = by_layer[falls[0]], by_layer[falls[0] + 1]
        raise TraceError(
            f"{path}, line {rows.line(int(row))}: step falls from {rows.step[before]} to {rows.step[row]} within layer"
            f" {rows.layer[row]}; steps of a layer never fall"
        )
    return token, turns


def _refuse_jump(path: Path, rows: Rows, bounds: np.ndarray) -> None:
    """Raises TraceError naming the first step that is missing, if one is."""
    for first, last in zip(bounds, np.append(bounds[1:], len(rows)), strict=True):
        steps = np.unique(rows.step[first:last])
        jumps = np.flatnonzero(np.diff(steps) > 1)
        if len(jumps):
            before, after = steps[jumps[0]], steps[jumps[0] + 1]
            line = rows.line(int(first + np.flatnonzero(rows.step[first:last] == after)[0]))
            raise TraceError(
                f"{path}, line {line}: step jumps from {before} to {after} in turn {rows.turn[first]}; each follows the"
                " one before"
            )


def _place(path: Path, header: Header, rows: Rows, layers: np.ndarray, token: np.ndarray):
    """experts (tokens, layers, top_k), -1 where there is no row; and the place of each row in it, flat."""
    number = np.zeros(header.n_layer, np.int64)
    number[layers] = np.arange(len(layers))
    cells = (token * len(layers) + number[rows.layer]) * header.n_expert_used + rows.slot
    shape = int(token.max()) + 1, len(layers), header.n_expert_used
    experts = np.full(shape, -1, id_type(header.n_expert))
    experts.reshape(-1)[cells] = rows.expert
    if np.count_nonzero(experts >= 0) != len(rows):
        order = np.argsort(cells, kind="stable")
        row = int(order[np.flatnonzero(np.diff(cells[order]) == 0)[0] + 1])
        raise TraceError(
            f"{path}, line {rows.line(row)}: turn {rows.turn[row]}, step {rows.step[row]}, layer {rows.layer[row]},"
            f" slot {rows.slot[row]} was there before; each may stand once: were two runs joined?"
        )
    return experts, cells


def _find_phases(path: Path, rows: Rows, token: np.ndarray, turns: _Turns) -> np.ndarray:
    """Phase of each token: that of all its rows, and no prompt after an answer within a turn."""
    phase = np.empty(int(turns.n_tokens.sum()), np.uint8)
    phase[token] = rows.phase
    mixed = np.flatnonzero(phase[token] != rows.phase)
    back = np.flatnonzero(np.diff(phase.astype(np.int8)) < 0) + 1
    back = back[~np.isin(back, turns.first_token)]
    if len(mixed) or len(back):
        row = int(mixed[0] if len(mixed) else np.flatnonzero(token == back[0])[0])
        problem = "stands in both phases" if len(mixed) else "is prefill after decode"
        raise TraceError(f"{path}, line {rows.line(row)}: step {rows.step[row]} of turn {rows.turn[row]} {problem}")
    return phase


def _check_complete(path: Path, header: Header, layers: np.ndarray, experts, phase: np.ndarray, turns: _Turns) -> None:
    """Every token has every rank of every layer, but for the last layer of a prompt, which may have its end alone."""
    top_k = header.n_expert_used
    ranks = (experts >= 0).sum(axis=2)
    n_prompt = np.add.reduceat(phase == PREFILL, turns.first_token)
    for first, count in zip(turns.first_token.tolist(), n_prompt.tolist(), strict=True):
        end = first + count - 1
        if count > 1 and not ranks[first:end, -1].any():
            ranks[first:end, -1] = top_k
    wrong = np.argwhere(ranks != top_k)
    if len(wrong):
        token, layer = wrong[0].tolist()
        turn = int(np.searchsorted(turns.first_token, token, side="right")) - 1
        step = token - int(turns.first_token[turn]) + int(turns.first_step[turn])
        hint = "the file is cut off" if token == len(experts) - 1 else "rows are missing"
        raise TraceError(
            f"{path}: turn {turns.number[turn]}, step {step}, layer {layers[layer]} has {ranks[token, layer]} of"
            f" {top_k} ranks: {hint}, or this is another model's header"
        )


def _count_reads(read: np.ndarray, cells: np.ndarray, shape: tuple[int, int, int], step: np.ndarray) -> np.ndarray:
    """live_misses: rows that read something, of each step and layer, on the step's last token; -1 on the others."""
    n_tokens, n_layers, top_k = shape
    token, layer = np.divmod(cells[read] // top_k, n_layers)
    live = np.full((n_tokens, n_layers), -1, np.int32)
    counts = np.bincount(step[token] * n_layers + layer, minlength=(int(step[-1]) + 1) * n_layers)
    live[np.diff(step, append=step[-1] + 1) != 0] = counts.reshape(-1, n_layers)
    return live
