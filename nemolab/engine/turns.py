"""Who may use an engine: one thread at a time, in any order, until it is closed."""

from __future__ import annotations

import threading

from nemolab.errors import EngineError


class Turns:
    """The lock of an engine, and whether it is closed.

    What hands out the lock raises EngineError within a turn of the same thread, as in a signal handler: waiting would
    never end. It is the lock itself, for a `with`: no interrupt comes between taking it and having to give it back, as
    one may in a function of ours that does both.
    """

    def __init__(self):
        self._lock = threading.RLock()  # this kind knows whose it is
        self._closed = False

    def check(self) -> None:
        """Raises EngineError once the engine is closed, or is about to be. To be asked again in one's turn."""
        if self._closed:
            raise EngineError("this engine is closed")

    def take(self) -> threading.RLock:
        """The lock of an engine that is open."""
        self.check()
        return self.take_last()

    def take_last(self) -> threading.RLock:
        """The lock, open or closed: for what is to be put away."""
        # What `threading.Condition` asks of a lock, too.
        if self._lock._is_owned():
            raise EngineError("this engine is amid a pass of this very thread; an exception breaks the pass off")
        return self._lock

    def close(self) -> threading.RLock:
        """The lock; nobody begins from here on."""
        self._closed = True
        return self.take_last()
