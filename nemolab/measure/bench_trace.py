"""What recording costs: decode with and without it, in turns in one run."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemolab.errors import UsageError
from nemolab.measure.versus import versus
from nemolab.progress import say

if TYPE_CHECKING:
    from nemolab.engine import Engine
    from nemolab.trace import Recorder

PROMPT_TOKENS = 32


def bench_trace(
    path: str | Path,
    tokens: int = 128,
    repeats: int = 15,
    threads: int | None = None,
    prefetch: int = 0,
    ram_cache_gib: float | None = None,
    ram_cache_slots: int | None = None,
) -> dict[str, Any]:
    """One token at a time, recorded and not. What is derived (guesses, counts) is timed apart, as after an answer.

    tokens    fed one by one a round, behind a prompt of 32
    ram_cache_gib, ram_cache_slots  room for experts, as `Engine` takes it; with all of them no read hides the cost
    returns   plain_ms, recorded_ms (medians a token), slowdown (recorded / plain), slowdowns (one a round), derive_ms
              (median a token, after the answer), bytes_per_token (of the arrays), rows
    """
    from nemolab.engine import Engine

    if repeats < 3:
        raise UsageError(f"{repeats} rounds give no median and no spread; take at least 3")
    cache = {"ram_cache_gib": ram_cache_gib, "ram_cache_slots": ram_cache_slots, "prefetch": prefetch}
    with Engine(path, threads=threads, **cache) as engine:
        say(engine.budget.line())
        turns = _Turns(engine, tokens)
        before = engine.stats()["decode"]["misses"]
        turns.plain()
        misses = engine.stats()["decode"]["misses"] - before
        timed = versus(turns.recorded, turns.plain, rounds=repeats, clock=turns.clock)
        settings = {
            "model": Path(path).name,
            "tokens": tokens,
            "prompt_tokens": PROMPT_TOKENS,
            "threads": engine.threads,
            "slots": engine.memory()["cache"]["blocks_now"],
            "prefetch": prefetch,
            "layout": engine.store.layout,
            "bytes_per_token": turns.trace_bytes() // tokens,
        }
    derive = [1e3 * second / tokens for second in turns.derive_s[-repeats:]]
    recorded, plain = ([1e3 * second / tokens for second in samples] for samples in (timed.first, timed.second))
    return {
        "plain_ms": statistics.median(plain),
        "recorded_ms": statistics.median(recorded),
        "derive_ms": statistics.median(derive),
        "slowdown": timed.ratio,
        "slowdowns": timed.ratios,
        "slowdown_low": min(timed.ratios),
        "slowdown_high": max(timed.ratios),
        "bytes_per_token": settings["bytes_per_token"],
        "first_round_misses": misses,
        "rows": [
            {"name": "trace.plain", "values": plain, "unit": "ms/token", "settings": settings},
            {"name": "trace.recorded", "values": recorded, "unit": "ms/token", "settings": settings},
            {"name": "trace.derive", "values": derive, "unit": "ms/token", "settings": settings},
            {"name": "trace.slowdown", "values": timed.ratios, "unit": "ratio", "settings": settings},
        ],
    }


class _Turns:
    """Both ways of one round. Each goes on from a copy of the state behind the prompt, so that all do the same work."""

    def __init__(self, engine: Engine, tokens: int):
        import torch

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(engine.config.vocab_size, (PROMPT_TOKENS + tokens,), generator=generator).tolist()
        self._engine, self._rest, self._state = engine, ids[PROMPT_TOKENS:], engine.new_state()
        self._recorder: Recorder | None = None
        self.derive_s: list[float] = []  # one a round that was recorded
        engine.last_logits(ids[:PROMPT_TOKENS], self._state)

    def plain(self) -> None:
        self._feed()

    def recorded(self) -> None:
        with self._engine.record(cold=False) as self._recorder:
            self._feed()
            started = time.perf_counter()
            self._recorder.flush()
            self.derive_s.append(time.perf_counter() - started)

    def clock(self) -> float:
        """Seconds, standing still while values are derived."""
        return time.perf_counter() - sum(self.derive_s)

    def trace_bytes(self) -> int:
        """Of the arrays of the last round that was recorded."""
        return sum(array.nbytes for array in self._recorder.trace().arrays.values())

    def _feed(self) -> None:
        now = self._state.copy()
        for token in self._rest:
            self._engine.step(token, now)
