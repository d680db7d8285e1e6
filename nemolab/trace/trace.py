"""A routing trace: which experts every token was sent to, and what else was known about it at the time.

A row is a token fed in; the layer axis counts MoE layers only, in order. -1 stands for "none": a layer that saw no such
token, a guess that was not made, a count that is not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nemolab.errors import TraceError

if TYPE_CHECKING:
    import pandas

PREFILL, DECODE = 0, 1
PHASES = ("prefill", "decode")  # names of the numbers above
LARGEST_INT16 = 2**15 - 1
MOST_BLOCKS = 1 << 24  # of a model: a replay counts all of them, whatever a file claims; the largest known has 82,432

IDS = (np.dtype(np.int16), np.dtype(np.int32))
_INT32 = (np.dtype(np.int32),)
_LOOKUPS, _GUESSES, _TOKENS, _BATCHES = (
    ("tokens", "layers", "top_k"),
    ("tokens", "layers", "n"),
    ("tokens",),
    ("tokens", "layers"),
)

# Name -> (types it may have, its axes), in the order of a file's digest.
ARRAYS: dict[str, tuple[tuple[np.dtype, ...], tuple[str, ...]]] = {
    "experts": (IDS, _LOOKUPS),
    "phase": ((np.dtype(np.uint8),), _TOKENS),
    "conversation": (_INT32, _TOKENS),
    "position": (_INT32, _TOKENS),
    "step": (_INT32, _TOKENS),
    "weights": ((np.dtype(np.float32),), _LOOKUPS),
    "guesses": (IDS, _GUESSES),
    "guesses_2": (IDS, _GUESSES),
    "guesses_3": (IDS, _GUESSES),
    "active_neurons": (IDS, _LOOKUPS),
    "active_groups": (IDS, _LOOKUPS),
    "token_ids": (_INT32, _TOKENS),
    "live_misses": (_INT32, _BATCHES),
}
REQUIRED = ("experts", "phase", "conversation", "position", "step")
GUESSES = {1: "guesses", 2: "guesses_2", 3: "guesses_3"}  # MoE layers ahead -> array

# What TraceMeta.taken may hold, as JSON. Every entry may be missing: then it is not known.
TAKEN = {
    "kind": "chat, text, iid, sticky or imported; of a trace fed again, that of the first",
    "conversations": "names, by number",
    "cache": "policy, slots (blocks), budget_bytes, prefetch (guesses), start (empty, or as it was), slots_at_end, "
    "failed_steps: of the cache behind live_misses",
    "stats": "what that cache counted, by phase",
    "answers": "how many the model gave",
    "max_tokens": "of each answer, or of each text",
    "think": "whether it reasoned before it answered",
    "temperature": "of sampling",
    "top_p": "of sampling",
    "seed": "of the first answer's sampling, the next has one more; or of synthetic draws",
    "version": "of nemolab",
    "fed_again": "true: the tokens of another trace, fed once more",
    "notes": "sentences for whoever reads results; of a file of others, a stranger's",
    "arch": "the architecture that a route_trace names",
    "zipf": "of iid draws",
    "spread": "of sticky draws",
    "again": "of sticky draws",
}


@dataclass(frozen=True)
class TraceMeta:
    """What holds for a whole trace.

    model          a name for people; fingerprint says exactly which files (None: not known)
    n_experts      routed experts in each MoE layer
    block_bytes    size of an expert's block by MoE layer; None where unknown
    prefill_warms  prompt passes went through the cache like decode; else they left no trace in it
    source         the form it came in: "nemolab", "route_trace v1" ...
    taken          how it was taken, as JSON: entries of TAKEN
    ranked         the experts of a token are in rank order (choice key descending, ties to the lowest id)
    """

    model: str
    n_experts: int
    fingerprint: str | None = None
    block_bytes: tuple[int, ...] | None = None
    prefill_warms: bool = False
    source: str = "nemolab"
    taken: dict[str, Any] = field(default_factory=dict)
    ranked: bool = True


META_FIELDS = tuple(known.name for known in fields(TraceMeta))


@dataclass(frozen=True, eq=False)
class Trace:
    """Arrays over tokens, and what holds for all of them. `check` says whether they are what they promise.

    experts         int16 (tokens, layers, top_k) in rank order; int32 where ids need it
    phase           uint8 (tokens,): PREFILL or DECODE
    conversation    int32 (tokens,), from 0: which of meta.taken["conversations"]
    position        int32 (tokens,): place in its conversation, rising
    step            int32 (tokens,), never falling: tokens that went through the layers together; one for each prompt
                    pass and for each token of decode
    weights         float32 (tokens, layers, top_k): what an expert's output was multiplied by
    guesses         int16 (tokens, layers, n): made *for* this layer by its router on the MoE input of the layer before,
                    by rank; -1 for the first layer. guesses_2 and guesses_3: made two and three MoE layers before
    active_neurons  int16 (tokens, layers, top_k): neurons that ReLU^2 left above zero; active_groups: groups of 16 with
                    one of them
    token_ids       int32 (tokens,): what was fed
    live_misses     int32 (tokens, layers): blocks that the recording engine read on demand for this layer at this step,
                    on the last row of the step, else -1
    All but the first five may be None: not recorded.
    """

    meta: TraceMeta
    experts: np.ndarray
    phase: np.ndarray
    conversation: np.ndarray
    position: np.ndarray
    step: np.ndarray
    weights: np.ndarray | None = None
    guesses: np.ndarray | None = None
    guesses_2: np.ndarray | None = None
    guesses_3: np.ndarray | None = None
    active_neurons: np.ndarray | None = None
    active_groups: np.ndarray | None = None
    token_ids: np.ndarray | None = None
    live_misses: np.ndarray | None = None

    @property
    def n_tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def n_layers(self) -> int:
        return self.experts.shape[1]

    @property
    def top_k(self) -> int:
        return self.experts.shape[2]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Name -> array, of all that were recorded, in the order above."""
        found = {name: getattr(self, name) for name in ARRAYS}
        return {name: array for name, array in found.items() if array is not None}

    def __repr__(self) -> str:
        return (
            f"Trace of {self.meta.model}: {self.n_tokens:,} tokens x {self.n_layers} MoE layers x top-{self.top_k} of "
            f"{self.meta.n_experts}, {len(np.unique(self.conversation))} conversation(s), "
            f"with {', '.join(list(self.arrays)[len(REQUIRED) :]) or 'experts alone'}"
        )

    def select(self, *, conversation: int | Iterable[int] | None = None, phase: int | str | None = None) -> Trace:
        """The tokens of one conversation or several, of one phase ("prefill", "decode" or its number), or of both.

        Unless they are those from the beginning on, the cache that is noted in meta.taken no longer began empty.
        Raises TraceError where none are left.
        """
        chosen = np.ones(self.n_tokens, bool)
        if conversation is not None:
            chosen &= np.isin(self.conversation, np.atleast_1d(np.asarray(conversation, np.int64)))
        if phase is not None:
            chosen &= self.phase == _phase_number(phase)
        if not chosen.any():
            raise TraceError(f"no token of conversation {conversation} and phase {phase} is in this trace")
        meta = self.meta
        if isinstance(meta.taken.get("cache"), dict) and not chosen[: np.count_nonzero(chosen)].all():
            meta = replace(meta, taken={**meta.taken, "cache": {**meta.taken["cache"], "start": "as it was"}})
        return replace(self, meta=meta, **{name: array[chosen] for name, array in self.arrays.items()})

    def frame(self) -> pandas.DataFrame:
        """One row for each lookup: token, layer, rank, expert, weight, active_neurons, active_groups, phase,
        conversation, position, step.

        `phase` is "prefill" or "decode"; what was not recorded has no column.
        """
        import pandas as pd

        token, layer, rank = np.nonzero(self.experts >= 0)
        at = (token, layer, rank)
        columns: dict[str, Any] = {"token": token, "layer": layer, "rank": rank, "expert": self.experts[at]}
        for name, column in (("weights", "weight"), ("active_neurons",) * 2, ("active_groups",) * 2):
            if getattr(self, name) is not None:
                columns[column] = getattr(self, name)[at]
        columns["phase"] = pd.Categorical.from_codes(self.phase[token], PHASES)
        for name in ("conversation", "position", "step"):
            columns[name] = getattr(self, name)[token]
        return pd.DataFrame(columns)

    def check(self) -> None:
        """Raises TraceError naming the field, what was found and what was expected."""
        _check_meta(self.meta)
        _check_forms(self)
        _check_values(self)

    def check_model(self, fingerprint: str | None, n_layers: int, n_experts: int, top_k: int) -> None:
        """Raises TraceError unless this is a trace of that model. A fingerprint that is None on either side is not held
        against the other."""
        found = (self.n_layers, self.meta.n_experts, self.top_k)
        if found != (n_layers, n_experts, top_k):
            raise TraceError(
                f"this is a trace of another model: {self.meta.model!r} has {found[0]} MoE layers of {found[1]} "
                f"experts, top-{found[2]}; {n_layers} of {n_experts}, top-{top_k} were expected"
            )
        if None not in (fingerprint, self.meta.fingerprint) and fingerprint != self.meta.fingerprint:
            raise TraceError(
                f"this is a trace of another model: its fingerprint is {self.meta.fingerprint!r}, {fingerprint!r} was "
                f"expected (both have {n_layers} MoE layers of {n_experts} experts, top-{top_k})"
            )


def id_type(n_experts: int) -> np.dtype:
    """int16, or int32 where ids do not fit it."""
    return IDS[n_experts - 1 > LARGEST_INT16]


def _phase_number(phase: int | str) -> int:
    if phase in PHASES:
        return PHASES.index(phase)
    if phase in (PREFILL, DECODE):
        return int(phase)
    raise TraceError(f"phase {phase!r}; {PREFILL} or {PHASES[0]!r}, {DECODE} or {PHASES[1]!r} were expected")


def _check_meta(meta: TraceMeta) -> None:
    kinds = {"model": str, "n_experts": int, "prefill_warms": bool, "source": str, "taken": dict, "ranked": bool}
    for name, kind in kinds.items():
        value = getattr(meta, name)
        if type(value) is not kind:  # a bool would pass for an int
            raise TraceError(f"{name} is {value!r}; a {kind.__name__} was expected")
    if meta.fingerprint is not None and not isinstance(meta.fingerprint, str):
        raise TraceError(f"fingerprint is {meta.fingerprint!r}; a text or None was expected")
    if not 1 <= meta.n_experts < 2**31:
        raise TraceError(f"n_experts is {meta.n_experts}; 1 or more were expected")
    sizes = meta.block_bytes
    if sizes is not None and not (
        isinstance(sizes, tuple) and all(type(size) is int and 0 < size < 2**63 for size in sizes)
    ):
        raise TraceError(f"block_bytes is {str(sizes)[:80]}; a tuple of whole numbers above 0, or None, was expected")
    try:
        json.dumps(meta.taken, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise TraceError(f"taken cannot be written as JSON: {problem}") from None


def _check_forms(trace: Trace) -> None:
    """Types and shapes, all against those of `experts`."""
    if not isinstance(trace.experts, np.ndarray) or trace.experts.ndim != 3:
        raise TraceError(f"experts has shape {np.shape(trace.experts)}; (tokens, layers, top_k) was expected")
    sizes = dict(zip(_LOOKUPS, trace.experts.shape, strict=True))
    if not all(sizes.values()):
        raise TraceError(f"experts has shape {trace.experts.shape}: a trace without a single record tells nothing")
    if sizes["layers"] * trace.meta.n_experts > MOST_BLOCKS:
        raise TraceError(
            f"{sizes['layers']:,} layers of {trace.meta.n_experts:,} experts (n_experts) are more than {MOST_BLOCKS:,} "
            "blocks, the limit"
        )
    for name, (types, axes) in ARRAYS.items():
        array = getattr(trace, name)
        if array is None and name not in REQUIRED:
            continue
        if not isinstance(array, np.ndarray) or array.dtype not in types:
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise TraceError(f"{name} is {found}; {' or '.join(map(str, types))} was expected")
        wanted = tuple(sizes.get(axis, axis) for axis in axes)
        if array.ndim != len(axes) or any(
            isinstance(size, int) and size != found for size, found in zip(wanted, array.shape, strict=True)
        ):
            raise TraceError(
                f"{name} has shape {array.shape}; {wanted} was expected beside experts {trace.experts.shape}"
            )
    if trace.meta.block_bytes is not None and len(trace.meta.block_bytes) != trace.n_layers:
        raise TraceError(f"block_bytes names {len(trace.meta.block_bytes)} layers; experts has {trace.n_layers}")


def _check_values(trace: Trace) -> None:
    n_experts = trace.meta.n_experts
    check_range("experts", trace.experts, -1, n_experts - 1, f"ids from 0 to {n_experts - 1}, or -1 for none,")
    if trace.experts.max() < 0:
        raise TraceError("experts holds no expert at all: a trace without a single lookup tells nothing")
    check_range("phase", trace.phase, PREFILL, DECODE, f"phases {PREFILL} (prefill) and {DECODE} (decode)")
    for name in ("conversation", "position", "step", "token_ids"):
        if getattr(trace, name) is not None:
            check_range(name, getattr(trace, name), 0, 2**31 - 1, "numbers from 0 to 2^31 - 1")
    check_steps(trace.step, trace.phase, trace.conversation)
    _check_positions(trace)
    for ahead, name in GUESSES.items():
        guesses = getattr(trace, name)
        if guesses is None:
            continue
        check_range(name, guesses, -1, n_experts - 1, f"ids from 0 to {n_experts - 1}, or -1 for none,")
        if np.any(guesses[:, :ahead] >= 0):
            raise TraceError(
                f"{name} holds guesses for layer {ahead - 1}; no layer is {ahead} before it: -1 was expected"
            )
    if trace.weights is not None and not np.isfinite(trace.weights).all():
        token, layer, rank = np.argwhere(~np.isfinite(trace.weights))[0].tolist()
        raise TraceError(
            f"weights holds {trace.weights[token, layer, rank]} at token {token}, layer {layer}, rank {rank}"
        )
    for name in ("active_neurons", "active_groups"):
        if getattr(trace, name) is not None:
            check_range(name, getattr(trace, name), -1, 2**31 - 1, "counts from 0 up, or -1 for unknown,")
    if trace.live_misses is not None:
        check_range("live_misses", trace.live_misses, -1, 2**31 - 1, "counts from 0 up, or -1 for none,")
        inner = np.append(np.diff(trace.step) == 0, False)
        if np.any(trace.live_misses[inner] >= 0):
            token = int(np.flatnonzero(inner & (trace.live_misses >= 0).any(axis=1))[0])
            raise TraceError(f"live_misses has counts at token {token}, which is not the last of its step")


def check_steps(step: np.ndarray, phase: np.ndarray, conversation: np.ndarray) -> None:
    """Raises TraceError unless steps are in order, each of one phase and one conversation. All (tokens,)."""
    step, phase, conversation = (np.asarray(values, np.int64) for values in (step, phase, conversation))
    falls = np.flatnonzero(np.diff(step) < 0)
    if len(falls):
        token = int(falls[0]) + 1
        raise TraceError(f"step falls from {step[token - 1]} to {step[token]} at token {token}; it must never fall")
    mixed = np.flatnonzero((np.diff(step) == 0) & ((np.diff(phase) != 0) | (np.diff(conversation) != 0)))
    if len(mixed):
        raise TraceError(f"step {step[mixed[0]]} mixes phases or conversations; it must have one of each")


def _check_positions(trace: Trace) -> None:
    """Positions rise within a conversation."""
    position, conversation = trace.position.astype(np.int64), trace.conversation
    order = np.argsort(conversation, kind="stable")
    same = np.diff(conversation[order]) == 0
    stuck = np.flatnonzero(same & (np.diff(position[order]) <= 0))
    if len(stuck):
        before, token = order[stuck[0]], order[stuck[0] + 1]
        raise TraceError(
            f"position goes from {position[before]} to {position[token]} at token {token} of conversation "
            f"{conversation[token]}; it must rise: are these several conversations under one number?"
        )


def check_range(name: str, values: np.ndarray, low: int, high: int, expected: str) -> None:
    """Raises TraceError unless all values are from low to high; `expected` says so in words."""
    if not values.size:
        return
    found = int(values.min()), int(values.max())
    if found[0] < low or found[1] > high:
        shown = f"{found[0]}" if found[0] == found[1] else f"{found[0]} to {found[1]}"
        raise TraceError(f"{name} holds {shown}; {expected} were expected")
