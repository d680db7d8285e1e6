"""Who may use an engine: one thread at a time, in any order, until it is closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nemolab.errors import EngineError


class Turns:
    """The lock of an engine, and whether it is closed.

    All of it raises EngineError within a turn of the same thread, as in a signal handler: waiting would never end.
    """

    def __init__(self):
        self._lock = threading.RLock()  # this kind knows whose it is
        self._closed = False

    def check(self) -> None:
        """Raises EngineError once the engine is closed, or is about to be."""
        if self._closed:
            raise EngineError("this engine is closed")

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for one's turn with an engine that is open, then too."""
        self.check()
        with self.take_last():
            self.check()
            yield

    @contextmanager
    def take_last(self) -> Iterator[None]:
        """The same whether it is open or closed: for what is to be put away."""
        # What `threading.Condition` asks of a lock, too.
        if self._lock._is_owned():
            raise EngineError("this engine is amid a pass of this very thread; an exception breaks the pass off")
        with self._lock:
            yield

    @contextmanager
    def close(self) -> Iterator[None]:
        """Nobody begins from here on; wait until nobody is at it."""
        self._closed = True
        with self.take_last():
            yield
