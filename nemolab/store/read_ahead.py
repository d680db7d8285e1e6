"""Blocks on their way from disk before anyone asks for them, each into memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from nemolab.progress import say
from nemolab.store.reader import BlockReader
from nemolab.store.task import Task


class _Flight(Task):
    """One read."""

    __slots__ = ("_reader", "block", "buffer", "owner")

    def __init__(self, reader: BlockReader, block: int, buffer: np.ndarray, owner):
        super().__init__()
        self._reader, self.block, self.buffer, self.owner = reader, block, buffer, owner

    @property
    def landed(self) -> bool:
        """The block is there, whole."""
        return self.ended and self.failure is None

    def work(self) -> None:
        self._reader.read_into(self.block, self.buffer)


class ReadAhead:
    """The blocks read ahead and not asked for yet, landed or not, by key.

    Each read belongs to an `owner`, which is handed back when the read is over: whoever counts what became of it.
    """

    def __init__(self, reader: BlockReader):
        self._reader = reader
        self._flights: dict[int, _Flight] = {}
        self._warned = False

    def __len__(self) -> int:
        return len(self._flights)

    def __bool__(self) -> bool:
        return bool(self._flights)

    def __iter__(self) -> Iterator[int]:
        return iter(self._flights)

    def __contains__(self, key: int) -> bool:
        return key in self._flights

    def start(self, jobs: Iterable[tuple[int, np.ndarray]], owner) -> None:
        """Begin to read (block, buffer) pairs on the reader's threads, and return at once. Keys are block numbers."""
        for block, buffer in jobs:
            flight = self._flights[block] = _Flight(self._reader, block, buffer, owner)
            self._reader.submit(flight.run)

    def find_late(self, keys: Iterable[int]) -> list[int]:
        """Those of these that are still under way, or came to nothing."""
        return [key for key in keys if not self._flights[key].landed]

    def land(self, keys: Iterable[int]) -> None:
        """These are asked for: wait for them. One that failed is read again; StoreError where that fails too."""
        for key in keys:
            flight = self._flights[key]
            flight.wait()
            if flight.failure is not None:
                self._warn_once(flight)
                flight.work()
                flight.failure = None

    def hand_over(self, keys: Iterable[int]) -> None:
        """These, landed, are the cache's."""
        for key in keys:
            del self._flights[key]

    def drop(self, keys: Iterable[int]) -> list:
        """These left unused: their memory is nobody's once the reads under way have ended. The owners of those it held,
        and whether their block had arrived."""
        dropped = []
        for key in keys:
            flight = self._flights.get(key)
            if flight is not None:
                flight.wait()
                if flight.failure is not None:
                    self._warn_once(flight)
                dropped.append((flight.owner, flight.landed))
                del self._flights[key]
        return dropped

    def call_off(self) -> list:
        """Let nothing be under way any more. As `drop`, of all."""
        flights = self._flights
        for flight in flights.values():
            flight.call_off()
        for flight in flights.values():
            flight.wait()
        self._flights = {}
        return [(flight.owner, flight.landed) for flight in flights.values()]

    def settle(self) -> list:
        """Wait until nothing is under way. The owners of reads that came to nothing."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.wait()
        return [flight.owner for flight in flights if flight.failure is not None]

    def _warn_once(self, flight: _Flight) -> None:
        if not self._warned and isinstance(flight.failure, Exception):
            self._warned = True
            say(f"cache: a block could not be read ahead ({flight.failure}); it is read again when asked for")
