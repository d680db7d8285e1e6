"""A decode batch on its way, and who is told which block lies where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nemolab.store.counts import Counts
from nemolab.store.reader import Pending


class Watcher(Protocol):
    """Told which blocks lie whole in which rows of a cache's arena. Blocks are layer * n_experts + expert.

    What was said of a block last holds: the same may be said twice, and a block leave that never came.
    """

    def came(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """They are whole, and stay until they are said to have left."""

    def left(self, blocks: Sequence[int]) -> None:
        """Their rows may be written to once this returns."""


class Fetched(NamedTuple):
    """A decode batch as `ExpertCache.fetch` answers.

    rows     of `.arena`, in the order asked for
    missing  ranks whose blocks are not there yet; the other rows may be read at once
    wait     returns when all are there. Raises StoreError where one cannot be read, or the fetch was given up
    """

    rows: list[int]
    missing: list[int]
    wait: Callable[[], None]


@dataclass(slots=True, eq=False)
class OnItsWay:
    """A fetch until it was waited for.

    hits    how many there were; counts  where they are counted
    misses  blocks that `pending` reads; late  blocks still being read ahead
    end     what `wait` calls: all is there on return
    """

    counts: Counts
    hits: int
    misses: Sequence[int]
    late: list[int]
    pending: Pending
    end: Callable[[OnItsWay], None]
    arrived: bool = False

    def wait(self) -> None:
        self.end(self)


def nothing_to_wait_for() -> None: ...
