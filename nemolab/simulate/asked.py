"""What people ask a replay for, in words: budgets, policies, prefetch depths; checked all at once, before any work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from nemolab.errors import TraceError, UsageError
from nemolab.simulate.lookups import Lookups
from nemolab.simulate.replay import POLICY_NAMES
from nemolab.units import Budget, parse_budget, show_bytes

Value = TypeVar("Value")
ALL_POLICIES = "all"
MOST = 2**60  # bytes or slots: sums of them fit 64 bits


def read_budgets(words: str) -> list[Budget]:
    """`500MiB,2GiB,4854slots`: sizes as `nemolab.units.parse_budget` reads them, and `0slots` for no cache at all.

    Raises UsageError that names every word that is none, and sizes given twice.
    """
    return _read_list("budget", words, _read_budget)


def read_policies(words: str) -> list[str]:
    """`lru,belady`, or `all` for every policy there is. Raises UsageError naming unknown ones and repetitions."""
    if words.strip() == ALL_POLICIES:
        return list(POLICY_NAMES)
    return _read_list("policy", words, _read_policy)


def read_prefetches(words: str) -> list[int]:
    """`0,4`: how many guesses are read ahead. Raises UsageError naming every word that is no whole number from 0."""
    return _read_list("prefetch", words, _read_depth)


def show_budget(budget: Budget) -> str:
    """As a person would write it: `2.00 GiB`, `4,854 slots`."""
    return f"{budget.slots:,} slots" if budget.size_bytes is None else show_bytes(budget.size_bytes)


def check_answerable(lookups: Lookups, budgets: Sequence[Budget], prefetches: Iterable[int]) -> None:
    """Whether the trace knows what these budgets and prefetch depths need. Raises TraceError naming all that do not."""
    problems = []
    in_bytes = [show_budget(budget) for budget in budgets if budget.size_bytes is not None]
    if in_bytes and lookups.size_bytes is None:
        problems.append(
            f"budgets in bytes ({', '.join(in_bytes)}) need to know how large a block is, which this trace does not "
            "say: give budgets in slots, or the size of a block"
        )
    held = 0 if lookups.guesses is None else lookups.guesses.shape[1]
    too_deep = [depth for depth in prefetches if depth > held]
    if too_deep:
        has = f"{held} guesses for each layer" if held else "no guesses"
        problems.append(f"prefetch {', '.join(map(str, too_deep))}: the trace holds {has}")
    if problems:
        raise TraceError("; ".join(problems))


def _read_list(name: str, words: str, read: Callable[[str], Value]) -> list[Value]:
    found: list[Value] = []
    problems = []
    for word in words.split(","):
        if not word.strip():
            problems.append(f"an empty {name} in {words!r}")
            continue
        try:
            value = read(word.strip())
        except UsageError as problem:
            problems.append(str(problem))
            continue
        if value in found:
            problems.append(f"{name} {word.strip()} is given twice")
        found.append(value)
    if problems:
        raise UsageError("; ".join(problems))
    return found


def _read_budget(word: str) -> Budget:
    if re.fullmatch(r"0+\s*slots?", word, flags=re.IGNORECASE | re.ASCII):
        return Budget(slots=0)
    budget = parse_budget(word)
    if max(budget.size_bytes or 0, budget.slots or 0) > MOST:
        raise UsageError(f"{word!r} is beyond any machine: at most {show_bytes(MOST)} or {MOST:,} slots")
    return budget


def _read_policy(word: str) -> str:
    if word not in POLICY_NAMES:
        raise UsageError(f"unknown policy {word!r}; known are {', '.join(POLICY_NAMES)}, or {ALL_POLICIES}")
    return word


def _read_depth(word: str) -> int:
    if not re.fullmatch(r"\d{1,9}", word, flags=re.ASCII):
        raise UsageError(f"prefetch {word!r}: a whole number of guesses from 0 up is needed")
    return int(word)
