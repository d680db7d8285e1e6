"""What all importers end with: ids in place, what the file leaves open decided and noted, one checked `Trace`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nemolab.errors import TraceError
from nemolab.trace.trace import DECODE, Trace, TraceMeta, id_type

LARGEST_ID = 2**31 - 2  # one more experts than this must still be an int32
CHUNK_LOOKUPS = 1 << 20  # lookups looked at together, so that no check takes memory of a trace's size


@dataclass(frozen=True)
class Overrides:
    """What the caller says about a file, over what the file says or leaves open; None: not said.

    block_bytes   one size for all, or one for each MoE layer
    """

    n_experts: int | None = None
    block_bytes: int | Sequence[int] | None = None
    prefill_warms: bool | None = None


@dataclass
class Found:
    """What a file says about a trace besides its arrays; notes are sentences for whoever reads results."""

    source: str
    model: str
    n_experts: int | None = None
    block_bytes: tuple[int, ...] | None = None
    prefill_warms: bool = False
    conversations: list[str] = field(default_factory=lambda: ["0"])
    notes: list[str] = field(default_factory=list)
    facts: dict = field(default_factory=dict)


def all_decode(n_tokens: int, first_position: int = 0) -> dict[str, np.ndarray]:
    """The arrays over tokens of one conversation in which every token is a decode step of its own."""
    numbers = np.arange(n_tokens, dtype=np.int32)
    return {
        "phase": np.full(n_tokens, DECODE, np.uint8),
        "conversation": np.zeros(n_tokens, np.int32),
        "position": numbers + np.int32(first_position),
        "step": numbers,
    }


def build_trace(
    path: Path, overrides: Overrides, found: Found, experts: np.ndarray, **arrays: np.ndarray | None
) -> Trace:
    """A checked trace of experts (tokens, layers, top_k), integers of any type, and the arrays `Trace` names.

    Raises TraceError for ids out of range and for what the caller says that the file contradicts.
    """
    n_layers, top_k = experts.shape[1:]
    n_experts = _settle_experts(path, overrides, found, int(experts.max()))
    if top_k > n_experts:
        raise TraceError(f"{path}: each token chooses {top_k} of {n_experts} experts; no more than there are can be")
    twice = _count_twice(experts)
    if twice:
        found.notes.append(
            f"{twice:,} of {experts[..., 0].size:,} choices name an expert more than once; each counts as one lookup"
        )
    block_bytes = found.block_bytes
    if overrides.block_bytes is not None:
        block_bytes = settle_sizes(path, overrides.block_bytes, n_layers)
        if found.block_bytes not in (None, block_bytes):
            found.notes.append("block sizes are those given; the file has others")
    meta = TraceMeta(
        model=found.model,
        n_experts=n_experts,
        block_bytes=block_bytes,
        prefill_warms=found.prefill_warms if overrides.prefill_warms is None else overrides.prefill_warms,
        source=found.source,
        taken={"kind": "imported", "conversations": found.conversations, "notes": found.notes, **found.facts},
        ranked=_is_ranked(experts, arrays.get("weights")),
    )
    trace = Trace(meta=meta, experts=np.ascontiguousarray(experts, id_type(n_experts)), **arrays)
    try:
        trace.check()
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    return trace


def shown(value: object, most: int = 60) -> str:
    """A stranger's value in a message: nothing that steers a terminal, nothing endless."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, lists of thousands of levels
        return f"a {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def name_of(text: str) -> str:
    """A model's name from the path of its file: the last part, printable, of sensible length."""
    name = re.split(r"[/\\]", text.strip())[-1].removesuffix(".gguf")
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:100] or "not named"


def _settle_experts(path: Path, overrides: Overrides, found: Found, largest: int) -> int:
    if found.n_experts is not None:
        if overrides.n_experts is not None and overrides.n_experts != found.n_experts:
            raise TraceError(f"{path} is of a model of {found.n_experts} experts; {overrides.n_experts} were asked for")
        return found.n_experts
    if overrides.n_experts is None:
        found.notes.append(
            f"the file does not say how many experts a layer has: {largest + 1} are taken, the largest number + 1"
        )
        return largest + 1
    if largest >= overrides.n_experts:
        raise TraceError(f"{path} holds expert {largest}; a layer is said to have {overrides.n_experts}, from 0 up")
    return overrides.n_experts


def settle_sizes(path: Path, sizes: int | Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Bytes by layer from one number for all, or from one for each. Raises TraceError where they do not fit."""
    many = [sizes] * n_layers if isinstance(sizes, int) else list(sizes)
    if len(many) != n_layers or not all(isinstance(size, int | np.integer) and 0 < size < 2**63 for size in many):
        raise TraceError(
            f"{path} has {n_layers} MoE layers; block sizes {shown(sizes)} were given: one above 0 for all, or one for"
            " each is needed"
        )
    return tuple(map(int, many))


def _count_twice(experts: np.ndarray) -> int:
    """In how many choices (token, layer) an expert stands more than once."""
    rows = experts.reshape(-1, experts.shape[-1])
    count, step = 0, max(1, CHUNK_LOOKUPS // rows.shape[1])
    for first in range(0, len(rows), step):
        ordered = np.sort(rows[first : first + step], axis=1)
        count += int(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1).sum())
    return count


def _is_ranked(experts: np.ndarray, weights: np.ndarray | None) -> bool:
    """Numbers that rise in every choice were sorted by whoever wrote them, unless their weights fall as well."""
    rows = experts.reshape(-1, experts.shape[-1])
    step = max(1, CHUNK_LOOKUPS // rows.shape[1])
    for first in range(0, len(rows), step):
        if np.any(rows[first : first + step, 1:] < rows[first : first + step, :-1]):
            return True
    if rows.shape[1] == 1:
        return True
    return weights is not None and not np.any(weights[..., 1:] > weights[..., :-1])
