"""The lookups of a trace as a cache sees them: batch after batch, each key once.

A key is a block: layer * n_experts + expert, layers being MoE layers in order. A batch is all lookups of one layer at
one step; a step is one token of decode, or a whole prompt pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from nemolab.errors import TraceError
from nemolab.jit import jit
from nemolab.trace import DECODE, PREFILL
from nemolab.trace.trace import check_range, check_steps

if TYPE_CHECKING:
    from nemolab.trace import Trace


@dataclass(frozen=True)
class Lookups:
    """Everything a replay needs, and nothing of how it was recorded.

    keys           int32 [lookups]: each once a batch, in the order of last occurrence
    starts         int64 [batches + 1]: batch b is keys[starts[b]:starts[b + 1]]
    layer          int32 [batches]; step int64 [batches], never falling; phase uint8 [batches], PREFILL or DECODE
    conversation   int32 [batches]; a change of it is where a cold cache begins anew
    tokens         int32 [batches]: tokens that the layer saw at this step
    guesses        int32 [batches, n]: keys guessed for the batch in time to be prefetched, by rank, -1: none; or None
    size_bytes     int64 [n_keys]: bytes of each block; None where unknown
    n_layers, n_experts, top_k   of the model; top_k is the most experts of a token in a layer
    prefill_warms  prompt passes go through the cache like decode; else they leave no trace in it
    """

    keys: np.ndarray
    starts: np.ndarray
    layer: np.ndarray
    step: np.ndarray
    phase: np.ndarray
    conversation: np.ndarray
    tokens: np.ndarray
    guesses: np.ndarray | None
    size_bytes: np.ndarray | None
    n_layers: int
    n_experts: int
    top_k: int
    prefill_warms: bool = False

    @property
    def n_keys(self) -> int:
        return self.n_layers * self.n_experts

    @property
    def n_batches(self) -> int:
        return len(self.layer)

    @property
    def block_bytes(self) -> int | None:
        """The size of every block, or None where they differ or are unknown."""
        if self.size_bytes is None or not len(self.size_bytes) or np.any(self.size_bytes != self.size_bytes[0]):
            return None
        return int(self.size_bytes[0])

    @property
    def passing(self) -> np.ndarray:
        """bool [batches]: prompt passes that leave no trace in the cache."""
        return np.zeros(self.n_batches, bool) if self.prefill_warms else self.phase == PREFILL

    def count_tokens(self, phase: int | None = None) -> int:
        """Tokens of a phase, or of both: of each step, those that the layer with the most saw."""
        if not self.n_batches:
            return 0
        firsts = np.flatnonzero(np.diff(self.step, prepend=self.step[0] - 1))
        tokens = np.maximum.reduceat(self.tokens, firsts)
        return int(tokens.sum() if phase is None else tokens[self.phase[firsts] == phase].sum())

    def between(self, first: int, last: int) -> Lookups:
        """Batches first to last - 1, as a sequence of their own."""
        low, high = self.starts[first], self.starts[last]
        return self._cut(slice(first, last), self.keys[low:high], self.starts[first : last + 1] - low)

    def take(self, batches: np.ndarray) -> tuple[Lookups, np.ndarray]:
        """These batches in this order, and where their lookups stand here."""
        counts = np.diff(self.starts)[batches]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        places = np.repeat(self.starts[batches] - starts[:-1], counts) + np.arange(starts[-1])
        return self._cut(batches, self.keys[places], starts), places

    def _cut(self, chosen, keys: np.ndarray, starts: np.ndarray) -> Lookups:
        by_batch = {name: getattr(self, name)[chosen] for name in ("layer", "step", "phase", "conversation", "tokens")}
        guesses = None if self.guesses is None else self.guesses[chosen]
        return replace(self, keys=keys, starts=starts, guesses=guesses, **by_batch)


def from_routing(
    experts: np.ndarray,
    *,
    n_experts: int,
    phase: np.ndarray | None = None,
    conversation: np.ndarray | None = None,
    step: np.ndarray | None = None,
    guesses: np.ndarray | None = None,
    layer_bytes: int | Sequence[int] | None = None,
    prefill_warms: bool = False,
) -> Lookups:
    """The lookups of a recorded routing.

    experts       ids (tokens, layers, top_k) in rank order, rows as they were computed; -1 where a layer saw no token
    phase         (tokens,) PREFILL or DECODE; all decode by default
    conversation  (tokens,); one by default
    step          (tokens,) never falling: tokens of one step pass a layer together. By default a token of decode is a
                  step and so is each unbroken run of prefill in a conversation
    guesses       ids (tokens, layers, n) guessed *for* that layer, by rank, -1 for none; used where a step is one token
    layer_bytes   bytes of a block, by layer or one for all; None where unknown
    Raises TraceError for shapes that disagree, ids out of range, steps that fall, sizes that are not above 0.
    """
    experts = np.asarray(experts)
    if experts.ndim != 3 or not np.issubdtype(experts.dtype, np.integer):
        raise TraceError(
            f"experts of shape {experts.shape} and type {experts.dtype}; (tokens, layers, top_k) integers are needed"
        )
    n_tokens, n_layers, top_k = experts.shape
    phase = _by_token("phase", phase, n_tokens, DECODE)
    conversation = _by_token("conversation", conversation, n_tokens, 0)
    step = _find_steps(phase, conversation) if step is None else _by_token("step", step, n_tokens, 0)
    _check_ids("experts", experts, n_experts)
    check_range("phase", phase, PREFILL, DECODE, f"phases {PREFILL} (prefill) and {DECODE} (decode)")
    check_steps(step, phase, conversation)

    step_number = _number(step)
    batch_of = step_number[:, None] * n_layers + np.arange(n_layers)
    keys, lookup_batch = _list_lookups(experts, batch_of, n_experts)
    # Where no token of a step reached a layer there is no batch: its number is left out.
    numbers, firsts = np.unique(lookup_batch, return_index=True)
    layer = numbers % n_layers
    first_token = np.searchsorted(step_number, numbers // n_layers)
    return Lookups(
        keys=keys,
        starts=np.append(firsts, len(keys)).astype(np.int64),
        layer=layer.astype(np.int32),
        step=step[first_token],
        phase=phase[first_token].astype(np.uint8),
        conversation=conversation[first_token].astype(np.int32),
        tokens=np.bincount(batch_of[(experts >= 0).any(axis=2)])[numbers].astype(np.int32),
        guesses=_arrange_guesses(guesses, experts.shape, n_experts, first_token, layer, _stand_alone(step)),
        size_bytes=_spread_sizes(layer_bytes, n_layers, n_experts),
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=top_k,
        prefill_warms=prefill_warms,
    )


def from_trace(trace: Trace, *, prefill_warms: bool | None = None) -> Lookups:
    """The lookups of a recorded or imported trace, and the guesses made one layer ahead.

    prefill_warms  whether prompt passes go through the cache; None: as the trace says it was where it was taken
    """
    return from_routing(
        trace.experts,
        n_experts=trace.meta.n_experts,
        phase=trace.phase,
        conversation=trace.conversation,
        step=trace.step,
        guesses=trace.guesses,
        layer_bytes=trace.meta.block_bytes,
        prefill_warms=trace.meta.prefill_warms if prefill_warms is None else prefill_warms,
    )


def _check_ids(name: str, ids: np.ndarray, n_experts: int) -> None:
    """Compiled code looks no more."""
    check_range(name, ids, -1, n_experts - 1, f"ids from 0 to {n_experts - 1}, or -1 for none,")


def _list_lookups(experts: np.ndarray, batch_of: np.ndarray, n_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Key and batch of every lookup, batch after batch; of equal keys in a batch only the last.

    batch_of  int64 (tokens, layers): number of the batch in which a token's experts of a layer are looked up
    """
    n_layers, top_k = experts.shape[1:]
    rows = batch_of.reshape(-1)
    keys = (experts + (np.arange(n_layers, dtype=np.int64) * n_experts)[:, None]).reshape(-1, top_k)
    present = (experts >= 0).reshape(-1, top_k)
    if np.any(np.diff(batch_of[:, 0]) == 0):
        # Tokens of one step stand token by token: a stable sort puts them layer by layer and keeps tokens and ranks.
        order = np.argsort(rows, kind="stable")
        rows, keys, present = rows[order], keys[order], present[order]
    keys, batch = keys[present].astype(np.int32), np.broadcast_to(rows[:, None], present.shape)[present]
    kept = np.ones(len(keys), bool)
    _keep_last(keys, batch, kept, np.full(n_layers * n_experts, -1, np.int64))
    return keys[kept], batch[kept]


def _by_token(name: str, values, n_tokens: int, default: int) -> np.ndarray:
    values = np.full(n_tokens, default) if values is None else np.asarray(values)
    if values.shape != (n_tokens,):
        raise TraceError(f"{name} of shape {values.shape}; one value for each of {n_tokens} tokens is needed")
    return values.astype(np.int64)


def _find_steps(phase: np.ndarray, conversation: np.ndarray) -> np.ndarray:
    """A token of decode is a step, and so is an unbroken run of prefill in a conversation."""
    if not len(phase):
        return np.zeros(0, np.int64)
    begins = (phase == DECODE) | (np.diff(phase, prepend=phase[0]) != 0) | (np.diff(conversation, prepend=-1) != 0)
    begins[0] = True
    return np.cumsum(begins) - 1


def _stand_alone(step: np.ndarray) -> np.ndarray:
    """bool (tokens,): steps of one token."""
    change = np.diff(step) != 0
    return np.concatenate([[True], change]) & np.concatenate([change, [True]])


def _number(step: np.ndarray) -> np.ndarray:
    """0, 1, 2 ... for steps of any numbers."""
    return np.cumsum(np.diff(step, prepend=step[:1]) != 0)


def _spread_sizes(layer_bytes, n_layers: int, n_experts: int) -> np.ndarray | None:
    if layer_bytes is None:
        return None
    sizes = np.asarray(layer_bytes, np.int64)
    if sizes.shape not in ((), (n_layers,)) or np.any(sizes <= 0):
        raise TraceError(
            f"block sizes of shape {sizes.shape}, smallest {sizes.min(initial=0)}; {n_layers} above 0 are needed"
        )
    return np.repeat(np.broadcast_to(sizes, n_layers), n_experts)


def _arrange_guesses(guesses, shape, n_experts: int, token, layer, alone) -> np.ndarray | None:
    """Guesses as keys by batch; none where a step is several tokens. token, layer: of each batch; alone: by token."""
    if guesses is None:
        return None
    guesses = np.asarray(guesses)
    if guesses.ndim != 3 or guesses.shape[:2] != shape[:2]:
        raise TraceError(
            f"guesses of shape {guesses.shape}; ({shape[0]}, {shape[1]}, n) are needed beside experts {shape}"
        )
    _check_ids("guesses", guesses, n_experts)
    chosen = guesses[token, layer].astype(np.int64)
    keys = np.where(chosen < 0, -1, chosen + (layer * n_experts)[:, None])
    keys[~alone[token]] = -1
    return np.ascontiguousarray(keys, np.int32)


@jit
def _keep_last(keys, batch, kept, seen):
    """Of equal keys in a batch, keep the last. seen: int64 [n_keys], -1 to begin with."""
    for at in range(len(keys) - 1, -1, -1):
        if seen[keys[at]] == batch[at]:
            kept[at] = False
        seen[keys[at]] = batch[at]
