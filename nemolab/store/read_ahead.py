"""Blocks on their way from disk before anyone asks for them, each into memory of its own.

A read is noted first, then begun by the thread that claims it, and ends. So an interrupt between any two steps leaves
no thread writing into memory that nobody knows to be in use.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np

from nemolab.errors import StoreError
from nemolab.progress import say
from nemolab.store.reader import BlockReader


class _Flight:
    """One read. Whoever claims it reads it, or lets it be; `ended` says that this is over."""

    __slots__ = ("_claim", "block", "buffer", "ended", "failure", "owner", "reader")

    def __init__(self, reader: BlockReader, block: int, buffer: np.ndarray, owner):
        self.reader, self.block, self.buffer, self.owner = reader, block, buffer, owner
        self.failure: BaseException | None = None
        self._claim: dict[str, int] = {}
        self.ended = threading.Event()

    @property
    def landed(self) -> bool:
        """The block is there, whole."""
        return self.failure is None and self.ended.is_set()

    def fly(self) -> None:
        """Read, unless somebody else does."""
        if self._may_begin():
            try:
                self.reader.read_into(self.block, self.buffer)
            except BaseException as failure:  # told to whoever asks for the block
                self.failure = failure
                if not isinstance(failure, Exception):  # an interrupt, in the thread that came to help
                    raise
            finally:
                self.ended.set()

    def wait(self) -> None:
        """Help, or wait until the read has ended, well or not."""
        self.fly()
        try:
            self.ended.wait()
        except BaseException:  # an interrupt must not leave a thread writing into memory about to be used again
            self.ended.wait()
            raise

    def call_off(self) -> None:
        """Let nobody begin it any more."""
        if self._may_begin():
            self.failure = StoreError("the read was called off")
            self.ended.set()

    def _may_begin(self) -> bool:
        # One step that no interrupt can cut in two, and that a thread may take again: what it claimed and, interrupted,
        # did not end is still its own.
        mine = self._claim.setdefault("by", threading.get_ident()) == threading.get_ident()
        return mine and not self.ended.is_set()


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
            self._reader.submit(flight.fly)

    def count_late(self, keys: Iterable[int]) -> int:
        """How many of these are still under way, or came to nothing."""
        return sum(not self._flights[key].landed for key in keys)

    def take(self, keys: Iterable[int]) -> None:
        """These are asked for: wait for them. One that failed is read again; StoreError where that fails too."""
        for key in keys:
            flight = self._flights[key]
            flight.wait()
            if flight.failure is not None:
                self._warn_once(flight)
                self._reader.read_into(flight.block, flight.buffer)
                flight.failure = None
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
