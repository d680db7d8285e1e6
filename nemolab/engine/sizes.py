"""Sizes in GiB as a caller gives them: numbers of Python or numpy."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from nemolab.engine.passes import show
from nemolab.errors import EngineError

MOST_GIB = 2**20  # no machine and no card has as much


def gib_bytes(name: str, gib: Any, needed: str | Callable[[], str], *, or_none: bool = False) -> int:
    """Whole bytes of so many GiB, above 0 (or_none: or 0) and below MOST_GIB.

    name  of the setting; needed  in words, what would do
    Raises EngineError with all of these for anything else: True, words, NaN and infinity included.
    """
    number = isinstance(gib, Real) and not isinstance(gib, bool)
    if not number or not (0 < gib < MOST_GIB or (or_none and gib == 0)):
        raise EngineError(f"{name} is {show(gib)}; {needed if isinstance(needed, str) else needed()}")
    return int(float(gib) * 2**30)
