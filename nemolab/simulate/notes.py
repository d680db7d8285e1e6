"""What must be read beside a hit rate: phase, cold or carried, unit, and every budget that is not what it seems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nemolab.simulate.asked import show_budget
from nemolab.simulate.floor import lru_floor, token_cycle, warn_below_floor
from nemolab.simulate.independence import looks_independent
from nemolab.simulate.lookups import Lookups
from nemolab.simulate.summary import is_synthetic
from nemolab.trace import DECODE, PREFILL
from nemolab.units import Budget, show_bytes

if TYPE_CHECKING:
    from nemolab.trace import Trace


def list_notes(
    trace: Trace,
    lookups: Lookups,
    budgets: Sequence[Budget],
    policies: Sequence[str],
    prefetches: Sequence[int],
    *,
    cold: bool,
    memory_bytes: int | None = None,
) -> list[str]:
    """All of them, in the order in which they matter. memory_bytes: what this machine has, where it is known."""
    notes = [
        *_about_trace(trace),
        _about_start(lookups, cold),
        *_about_phases(lookups),
        *_about_sizes(lookups, budgets),
        *(note for budget in budgets for note in _about_budget(lookups, budget, memory_bytes)),
        *_about_policies(lookups, policies),
    ]
    if any(prefetches):
        notes.append(
            "prefetch reads the next layer's first guesses while a layer computes; reads = misses + prefetch reads; "
            "how many are late depends on the disk: it is counted only where it is said how many are not"
        )
    return notes


def _about_trace(trace: Trace) -> list[str]:
    notes = []
    if is_synthetic(trace):
        kind = trace.meta.taken.get("kind")
        notes.append(f"synthetic trace ({kind}): drawn by rules, not routed by a model; its hit rates are no model's")
    if not trace.meta.ranked:
        notes.append(
            "the experts of a token are not in rank order in this file: ties in recency follow the file's order"
        )
    own = trace.meta.taken.get("notes", ())
    notes += [note for note in own if isinstance(note, str) and note.isprintable()]  # of a file, so of a stranger
    if not is_synthetic(trace) and (note := looks_independent(trace)):
        notes.append(note)
    return notes


def _about_start(lookups: Lookups, cold: bool) -> str:
    count = len(np.unique(lookups.conversation))
    if count == 1:
        return "one conversation, and the cache is empty when it begins (cold)"
    if cold:
        return f"cold: the cache is emptied at the start of each of {count} conversations"
    return f"carried: {count} conversations, each begins with what the one before left in the cache"


def _about_phases(lookups: Lookups) -> list[str]:
    has_prefill, has_decode = ((lookups.phase == phase).any() for phase in (PREFILL, DECODE))
    if not has_prefill:
        return ["all tokens are decode: this trace has no prompts, or does not tell them apart"]
    through = (
        "prompt passes go through the cache like decode (prefill warms it)"
        if lookups.prefill_warms
        else "prompt passes use what is cached and leave nothing behind (prefill aside)"
    )
    if has_decode:
        return [through]
    nothing = "" if lookups.prefill_warms else ", so nothing ever enters the cache and nothing hits"
    return [f"no token of decode is in this trace; {through}{nothing}"]


def _about_sizes(lookups: Lookups, budgets: Sequence[Budget]) -> list[str]:
    if lookups.size_bytes is None:
        return ["the trace does not say how large its blocks are: no bytes are given"]
    if lookups.block_bytes is not None:
        return []
    least, most = (show_bytes(int(size)) for size in (lookups.size_bytes.min(), lookups.size_bytes.max()))
    notes = [
        f"blocks differ in size ({least} to {most}): a budget in bytes has no one number of slots, nor the reverse"
    ]
    if any(budget.slots for budget in budgets):
        notes.append("budgets in slots count every block as one, whatever its size")
    return notes


def _about_budget(lookups: Lookups, budget: Budget, memory_bytes: int | None) -> list[str]:
    size_bytes = budget.size_bytes
    if size_bytes is None and lookups.block_bytes is not None:
        size_bytes = budget.slots * lookups.block_bytes
    notes = []
    warning = warn_below_floor(lookups, budget_bytes=budget.size_bytes, slots=budget.slots)
    if warning:
        notes.append(f"{show_budget(budget)}: {warning}")
    elif _is_on_cliff(lookups, budget):
        notes.append(
            f"{show_budget(budget)}: on the cliff, above the floor but within one token's cycle: a few blocks more or "
            "less change everything here"
        )
    if _is_less_than_batch(lookups, budget):
        notes.append(
            f"{show_budget(budget)}: less than the {lookups.top_k} blocks that a token needs in one layer; an engine "
            "refuses such a cache"
        )
    if _holds_all(lookups, budget):
        notes.append(f"{show_budget(budget)}: holds all {lookups.n_keys:,} blocks; only first lookups miss")
    if size_bytes is not None and memory_bytes is not None and size_bytes > memory_bytes:
        notes.append(
            f"{show_budget(budget)}: more than this machine's memory ({show_bytes(memory_bytes)}); an engine here "
            "would refuse it, a replay does not"
        )
    return notes


def _is_on_cliff(lookups: Lookups, budget: Budget) -> bool:
    place = 0 if budget.size_bytes is None else 1
    size = budget.slots if budget.size_bytes is None else budget.size_bytes
    floor, cycle = lru_floor(lookups)[place], token_cycle(lookups)[place]
    return floor is not None and 0 < floor < size < cycle


def _is_less_than_batch(lookups: Lookups, budget: Budget) -> bool:
    if budget.size_bytes is None:
        return budget.slots < lookups.top_k
    return budget.size_bytes < lookups.top_k * int(lookups.size_bytes.max(initial=0))


def _holds_all(lookups: Lookups, budget: Budget) -> bool:
    if budget.size_bytes is None:
        return budget.slots >= lookups.n_keys
    return budget.size_bytes >= int(lookups.size_bytes.sum())


def _about_policies(lookups: Lookups, policies: Sequence[str]) -> list[str]:
    notes = []
    forms = [
        text
        for name, text in (
            ("belady", "belady must insert every miss, as an engine must"),
            ("belady-bypass", "belady-bypass may let a miss pass by, which bounds every policy"),
        )
        if name in policies
    ]
    if forms:
        notes.append(
            "; ".join(forms) + " (optimal for equal blocks looked up one by one; elsewhere the usual yardstick)"
        )
    if "static" in policies:
        notes.append("static keeps the hottest blocks of this very trace: it bounds what a fixed set could do")
    return notes
