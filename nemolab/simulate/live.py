"""Live against replay: the misses that an engine recorded, and those of the same cache replayed from the same trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nemolab.errors import TraceError, UsageError
from nemolab.simulate.lookups import Lookups, from_trace
from nemolab.simulate.replay import replay
from nemolab.trace import PHASES

if TYPE_CHECKING:
    from nemolab.trace import Trace


@dataclass(frozen=True)
class LiveCheck:
    """Misses batch by batch. A batch is all lookups of one layer at one step.

    settings   policy, slots or budget_bytes, prefetch: as the engine was set
    lookups    what was replayed
    live, replayed   int64 [batches]: misses of each; live is -1 where none were recorded
    """

    settings: dict[str, Any]
    lookups: Lookups
    live: np.ndarray
    replayed: np.ndarray

    @property
    def compared(self) -> int:
        """Batches for which both are known."""
        return int(np.count_nonzero(self.live >= 0))

    @property
    def differing(self) -> np.ndarray:
        """Numbers of the batches that differ."""
        return np.flatnonzero((self.live >= 0) & (self.live != self.replayed))

    @property
    def equal(self) -> bool:
        return not len(self.differing)

    def describe(self, batch: int) -> dict[str, Any]:
        """One batch: where it is, and both counts."""
        lookups = self.lookups
        return {
            "conversation": int(lookups.conversation[batch]),
            "step": int(lookups.step[batch]),
            "layer": int(lookups.layer[batch]),
            "phase": PHASES[lookups.phase[batch]],
            "live": int(self.live[batch]),
            "replay": int(self.replayed[batch]),
        }

    def to_dict(self, most: int = 10) -> dict[str, Any]:
        """As JSON: sums, and the first `most` batches that differ."""
        known = self.live >= 0
        return {
            "settings": self.settings,
            "equal": self.equal,
            "batches": self.compared,
            "live_misses": int(self.live[known].sum()),
            "replay_misses": int(self.replayed[known].sum()),
            "batches_differing": len(self.differing),
            "first_differences": [self.describe(batch) for batch in self.differing[:most].tolist()],
        }


def check_live(trace: Trace) -> LiveCheck:
    """Replay a trace under the cache it was recorded with, and hold the misses of every batch against the engine's.

    The engine carries its cache from one conversation to the next, so the replay does.
    Raises TraceError for a trace without live misses, or that does not say which cache made them.
    """
    if trace.live_misses is None or not (trace.live_misses >= 0).any():
        raise TraceError(
            f"this trace ({trace.meta.source}) holds no live misses to compare with; `nemolab trace` records them"
        )
    settings = _read_settings(trace.meta.taken.get("cache"))
    lookups = from_trace(trace)
    try:
        result = replay(lookups, cold=False, **settings)
    except UsageError as problem:
        raise TraceError(f"the cache that this trace was recorded with cannot be replayed: {problem}") from None
    return LiveCheck(settings, lookups, _arrange_live(trace, lookups), result.misses_by_batch())


def _read_settings(cache: Any) -> dict[str, Any]:
    """What `replay` needs of the recorded settings: slots before bytes, as the engine counts whole blocks."""
    if not isinstance(cache, dict):
        raise TraceError("the trace does not say which cache its live misses are of (taken: cache)")
    if cache.get("start", "empty") != "empty":
        raise TraceError(
            f"taken: cache: start is {cache['start']!r}: what the cache held before the recording is not in the trace, "
            "so its misses cannot be replayed; record with a fresh engine, as `nemolab trace` does"
        )
    if cache.get("failed_steps"):
        raise TraceError(
            f"taken: cache: failed_steps is {cache['failed_steps']!r}: what a step looked up before it failed is not "
            "in the trace, so its misses cannot be replayed; record again"
        )
    if cache.get("slots_at_end", cache.get("slots")) != cache.get("slots"):
        raise TraceError(
            f"taken: cache: slots is {cache.get('slots')!r}, slots_at_end {cache['slots_at_end']!r}: memory ran short "
            "and the cache stayed smaller, so its misses cannot be replayed; record with a smaller cache"
        )
    found = {"policy": cache.get("policy"), "prefetch": cache.get("prefetch", 0)}
    if not isinstance(found["policy"], str):
        raise TraceError(f"taken: cache: policy is {found['policy']!r}; the name of a policy was expected")
    unit = "slots" if cache.get("slots") is not None else "budget_bytes"
    found[unit] = cache.get(unit)
    for name in ("prefetch", unit):
        if type(found[name]) is not int or found[name] < 0:
            raise TraceError(f"taken: cache: {name} is {found[name]!r}; a whole number from 0 up was expected")
    return found


def _arrange_live(trace: Trace, lookups: Lookups) -> np.ndarray:
    """Live misses by batch: they stand on the last row of each step."""
    step = np.asarray(trace.step)
    last_rows = np.searchsorted(step, lookups.step, side="right") - 1
    return trace.live_misses[last_rows, lookups.layer].astype(np.int64)
