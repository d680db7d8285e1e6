"""BigMoeOnEdge's `route_trace v1`: a csv of every choice, with the facts of the model in comments above it.

    # route_trace v1
    # model=PATH arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=6
    # layer=0 expert_bytes=3059712 dense_bytes=11953152             one line for each layer; 0 bytes: it has no experts
    turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
    0,0,0,0,0,49,0.221297,0,3059712,0

phase 0 is prefill, 1 decode; step is the position in the context, over both (an answer that counts anew from 0 is taken
to follow its prompt); slot is the rank. weight may be `nan`: not known. residency 0 is a miss, 1 a hit, 2 a first hit
on a block read ahead. expert_bytes is what this row read: in a prompt only the first row that asks for an expert reads
it. dropped marks choices that the engine left out (a miss of little weight): they are kept here, since the router made
them. Columns are found by name: those after `expert` may be missing, and others may follow.

One turn is one conversation. Its prompt went through the layers in one pass and left its experts in the cache. Of the
prompt the last layer has only the last token, since the others' output there is never used; -1 stands for the others.
Where `expert_bytes` is there, `live_misses` counts the rows that read something.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import Found, Overrides, build_trace
from nemolab.trace.importers.route_header import Header, read_header
from nemolab.trace.importers.route_table import Rows, read_rows
from nemolab.trace.trace import DECODE, PREFILL, Trace, id_type

NAME = "route_trace v1"
LAYOUT = "csv of BigMoeOnEdge: '# route_trace v1', '# model=...', then turn,phase,step,layer,slot,expert,..."


def read(path: Path, overrides: Overrides) -> Trace:
    """Raises TraceError naming the line and what is wrong with it."""
    with path.open("rb") as file:
        header = read_header(path, file)
        rows = read_rows(path, file, header)
    if not len(rows):
        raise TraceError(f"{path} has a header and no rows: nothing was recorded")
    layers = _find_layers(path, header, rows)
    runs = _find_runs(path, header, rows, len(layers))
    token = _number_tokens(path, rows, runs)
    experts, cells = _place(path, header, rows, layers, token)
    _check_complete(path, layers, experts, runs)

    turn = np.cumsum(np.diff(runs.turn, prepend=runs.turn[0]) != 0)
    phase = np.repeat(runs.phase, runs.n_tokens)
    within = np.arange(len(experts)) - np.repeat(runs.first_token, runs.n_tokens)
    begins = (phase == DECODE) | (within == 0)
    step = (np.cumsum(begins) - 1).astype(np.int32)
    arrays = {
        "phase": phase,
        "conversation": np.repeat(turn, runs.n_tokens).astype(np.int32),
        "position": (within + np.repeat(runs.position, runs.n_tokens)).astype(np.int32),
        "step": step,
        "live_misses": None if rows.read is None else _count_reads(rows.read, cells, experts.shape, step),
    }
    found = Found(NAME, header.model, header.n_expert, prefill_warms=True)
    found.conversations = [f"turn {number}" for number in np.unique(runs.turn).tolist()]
    found.facts["arch"] = header.arch
    if header.layer_bytes:
        found.block_bytes = tuple(header.layer_bytes[layer] for layer in layers.tolist())
    if len(layers) < header.n_layer:
        found.notes.append(f"{len(layers)} of {header.n_layer} layers have experts; they are counted from 0 in order")
    if rows.dropped:
        found.notes.append(f"the engine left out {rows.dropped:,} of {len(rows):,} choices; all are replayed")
    if rows.weight is not None and np.isnan(rows.weight).any():
        found.notes.append("weights are left out: some are not known")
    elif rows.weight is not None:
        arrays["weights"] = np.zeros(experts.shape, np.float32)
        arrays["weights"].reshape(-1)[cells] = rows.weight
    return build_trace(path, overrides, found, experts, **arrays)


@dataclass(frozen=True)
class _Runs:
    """The prompt of a turn is a run of tokens and so is its answer. By run: its first row in the file, turn and phase,
    its first step in the file, its first token in the trace, how many it has, and the first one's position."""

    first_row: np.ndarray
    turn: np.ndarray
    phase: np.ndarray
    first_step: np.ndarray
    first_token: np.ndarray
    n_tokens: np.ndarray
    position: np.ndarray


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


def _find_runs(path: Path, header: Header, rows: Rows, n_layers: int) -> _Runs:
    """Checked before anything of the size that their steps claim is made."""
    changes = (np.diff(rows.turn) != 0) | (np.diff(rows.phase) != 0)
    bounds = np.flatnonzero(np.append(True, changes))
    turn, phase = rows.turn[bounds].astype(np.int64), rows.phase[bounds]
    wrong = np.flatnonzero((np.diff(turn) < 0) | ((np.diff(turn) == 0) & (phase[1:] == PREFILL))) + 1
    if len(wrong):
        row, run = int(bounds[wrong[0]]), int(wrong[0])
        problem = (
            f"turn falls from {turn[run - 1]} to {turn[run]}" if turn[run] < turn[run - 1] else "prefill after decode"
        )
        raise TraceError(f"{path}, line {rows.line(row)}: {problem}; a turn is a prompt and then its answer")
    first_step = np.minimum.reduceat(rows.step, bounds).astype(np.int64)
    n_tokens = np.maximum.reduceat(rows.step, bounds) - first_step + 1
    position = first_step.copy()
    for run in (np.flatnonzero(np.diff(turn) == 0) + 1).tolist():
        follows = int(first_step[run - 1] + n_tokens[run - 1])
        if first_step[run] not in (0, follows):
            raise TraceError(
                f"{path}, line {rows.line(int(bounds[run]))}: after a prompt up to step {follows - 1} the answer begins"
                f" at {first_step[run]}; {follows} was expected, or 0 where answers count anew"
            )
        position[run] = follows
    # A prompt lacks at most its last layer, one of two or more: at least half of all places are filled.
    places = int(n_tokens.sum()) * n_layers * header.n_expert_used
    if places > 2 * len(rows):
        _refuse_jump(path, rows, bounds)
        raise TraceError(
            f"{path} has {len(rows):,} rows; {int(n_tokens.sum()):,} tokens with top-{header.n_expert_used} in"
            f" {n_layers} layers would have {places:,}: rows are missing, or this is another model's header"
        )
    return _Runs(bounds, turn, phase, first_step, np.cumsum(n_tokens) - n_tokens, n_tokens, position)


def _number_tokens(path: Path, rows: Rows, runs: _Runs) -> np.ndarray:
    """The token of each row; no token is without rows, and within a layer they never fall."""
    token = rows.step + np.repeat(runs.first_token - runs.first_step, np.diff(runs.first_row, append=len(rows)))
    if np.bincount(token, minlength=int(runs.n_tokens.sum())).min() == 0:
        _refuse_jump(path, rows, runs.first_row)
    by_layer = np.argsort(rows.layer, kind="stable")
    falls = np.flatnonzero((np.diff(token[by_layer]) < 0) & (np.diff(rows.layer[by_layer]) == 0))
    if len(falls):
        before, row = by_layer[falls[0]], by_layer[falls[0] + 1]
        raise TraceError(
            f"{path}, line {rows.line(int(row))}: step falls from {rows.step[before]} to {rows.step[row]} within layer"
            f" {rows.layer[row]}; steps of a layer never fall"
        )
    return token


def _refuse_jump(path: Path, rows: Rows, first_rows: np.ndarray) -> None:
    """Raises TraceError naming the first step that is missing, if one is."""
    for first, last in zip(first_rows, np.append(first_rows[1:], len(rows)), strict=True):
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


def _check_complete(path: Path, layers: np.ndarray, experts: np.ndarray, runs: _Runs) -> None:
    """Every token has every rank of every layer, but for the last layer of a prompt, which may have its end alone."""
    top_k = experts.shape[2]
    ranks = (experts >= 0).sum(axis=2)
    for run in np.flatnonzero((runs.phase == PREFILL) & (runs.n_tokens > 1)).tolist():
        first, end = int(runs.first_token[run]), int(runs.first_token[run] + runs.n_tokens[run] - 1)
        if not ranks[first:end, -1].any():
            ranks[first:end, -1] = top_k
    wrong = np.argwhere(ranks != top_k)
    if len(wrong):
        token, layer = wrong[0].tolist()
        run = int(np.searchsorted(runs.first_token, token, side="right")) - 1
        step = token - int(runs.first_token[run]) + int(runs.first_step[run])
        hint = "the file is cut off" if token == len(experts) - 1 else "rows are missing"
        raise TraceError(
            f"{path}: turn {runs.turn[run]}, step {step}, layer {layers[layer]} has {ranks[token, layer]} of {top_k}"
            f" ranks: {hint}, or this is another model's header"
        )


def _count_reads(read: np.ndarray, cells: np.ndarray, shape: tuple[int, int, int], step: np.ndarray) -> np.ndarray:
    """live_misses: rows that read something, of each step and layer, on the step's last token; -1 on the others."""
    n_tokens, n_layers, top_k = shape
    token, layer = np.divmod(cells[read] // top_k, n_layers)
    live = np.full((n_tokens, n_layers), -1, np.int32)
    counts = np.bincount(step[token] * n_layers + layer, minlength=(int(step[-1]) + 1) * n_layers)
    live[np.diff(step, append=step[-1] + 1) != 0] = counts.reshape(-1, n_layers)
    return live
