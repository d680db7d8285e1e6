"""What an engine did by phase: tokens and seconds of its own, counts of its cache."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Clock:
    """Tokens fed and seconds spent in one phase."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Clocks:
    prefill: Clock = field(default_factory=Clock)
    decode: Clock = field(default_factory=Clock)


def join_stats(clocks: Clocks, counts: dict[str, dict], nothing: dict) -> dict[str, dict]:
    """By phase: tokens, seconds, tok_s and the cache's counts (`nothing` where it has none)."""
    return {
        name: _phase(clock.tokens, clock.seconds, counts.get(name, nothing)) for name, clock in vars(clocks).items()
    }


def subtract_stats(before: dict[str, dict], after: dict[str, dict]) -> dict[str, dict]:
    """What was added between two answers of `join_stats`."""
    out = {}
    for name, now in after.items():
        added = {field: now[field] - before[name][field] for field in now if field != "tok_s"}
        out[name] = _phase(added.pop("tokens"), added.pop("seconds"), added)
    return out


def _phase(tokens: int, seconds: float, counts: dict) -> dict:
    rate = tokens / seconds if seconds > 0 else 0.0
    return {"tokens": tokens, "seconds": seconds, "tok_s": rate, **counts}
