"""What recording costs: decode with and without it, in turns in one run."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from nemolab.errors import UsageError
from nemolab.measure.versus import versus
from nemolab.progress import say

PROMPT_TOKENS = 32


def bench_trace(
    path: str | Path,
    tokens: int = 128,
    repeats: int = 15,
    threads: int | None = None,
    slots: int | None = None,
    prefetch: int = 0,
) -> dict[str, Any]:
    """One token at a time, recorded and not; the derived values of all tokens are made within the time.

    tokens    fed one by one a round, behind a prompt of 32
    slots     blocks in RAM; None: all, so that no read hides what recording costs
    returns   plain_ms, recorded_ms (medians a token), overhead (recorded / plain), overheads (one a round),
              bytes_per_token (of the arrays), rows
    """
    import torch

    from nemolab.engine import Engine

    if repeats < 3:
        raise UsageError(f"{repeats} rounds give no median and no spread; take at least 3")
    with Engine(path, threads=threads, ram_cache_slots=slots, prefetch=prefetch) as engine:
        say(engine.budget.line())
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(engine.config.vocab_size, (PROMPT_TOKENS + tokens,), generator=generator)
        prompt, rest = ids[:PROMPT_TOKENS].tolist(), ids[PROMPT_TOKENS:].tolist()
        state = engine.new_state()
        engine.last_logits(prompt, state)

        # Both go on from a copy of the state behind the prompt, so that every round does the same work.
        def run_plain():
            now = state.copy()
            for token in rest:
                engine.step(token, now)

        def run_recorded():
            now = state.copy()
            with engine.record(cold=False) as recorder:
                for token in rest:
                    engine.step(token, now)
                recorder.flush()
            kept.append(recorder)
            del kept[:-1]

        kept: list = []
        before = engine.stats()["decode"]["misses"]
        run_plain()
        misses = engine.stats()["decode"]["misses"] - before
        timed = versus(run_recorded, run_plain, rounds=repeats)
        arrays = kept[0].trace().arrays
        settings = {
            "model": Path(path).name,
            "tokens": tokens,
            "prompt_tokens": PROMPT_TOKENS,
            "threads": engine.threads,
            "slots": engine.memory()["cache"]["blocks_now"],
            "prefetch": prefetch,
            "layout": engine.store.layout,
            "bytes_per_token": sum(array.nbytes for array in arrays.values()) // tokens,
        }
    recorded, plain = ([1e3 * second / tokens for second in samples] for samples in (timed.first, timed.second))
    return {
        "plain_ms": statistics.median(plain),
        "recorded_ms": statistics.median(recorded),
        "overhead": timed.ratio,
        "overheads": timed.ratios,
        "overhead_low": min(timed.ratios),
        "overhead_high": max(timed.ratios),
        "bytes_per_token": settings["bytes_per_token"],
        "first_round_misses": misses,
        "rows": [
            {"name": "trace.plain", "values": plain, "unit": "ms/token", "settings": settings},
            {"name": "trace.recorded", "values": recorded, "unit": "ms/token", "settings": settings},
            {"name": "trace.overhead", "values": timed.ratios, "unit": "ratio", "settings": settings},
        ],
    }
