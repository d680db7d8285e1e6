"""Work for one thread of several: noted first, begun by the thread that claims it, then over.

So an interrupt between any two steps leaves no thread at work that nobody knows of.
"""

from __future__ import annotations

import threading
from typing import Any

from nemolab.errors import StoreError


class Task:
    """One piece of work, `work` of a kind of task. Whoever claims it does it, or lets it be.

    .ended    this is over, well or not
    .failure  what it failed with, or that it was called off
    """

    __slots__ = ("_notes", "ended", "failure")

    def __init__(self):
        self._notes: dict[str, Any] = {}  # by: the thread that claimed it; waker: wakes all that wait
        self.ended = False
        self.failure: BaseException | None = None

    def work(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        """Do it, unless somebody else does."""
        if self._may_begin():
            try:
                self.work()
            except BaseException as failure:  # told to whoever needs the result
                self.failure = failure
                if not isinstance(failure, Exception):  # an interrupt, in the thread that came to help
                    raise
            finally:
                self._end()

    def wait(self) -> None:
        """Help, or wait until it is over."""
        if not self.ended:
            self.run()
        if self.ended:
            return
        # An event is dear, and most work is over before anyone waits. The order matters: the thread at work says that
        # it has ended, then looks for somebody to wake.
        waker = self._notes.setdefault("waker", threading.Event())  # one for all that wait
        if not self.ended:
            try:
                waker.wait()
            except BaseException:  # an interrupt must not leave a thread writing into memory about to be used again
                waker.wait()
                raise

    def call_off(self) -> None:
        """Let nobody begin it any more."""
        if self._may_begin():
            self.failure = StoreError("the read was called off")
            self._end()

    def _end(self) -> None:
        self.ended = True
        waker = self._notes.get("waker")
        if waker is not None:
            waker.set()

    def _may_begin(self) -> bool:
        # One step that no interrupt can cut in two, and that a thread may take again: what it claimed and, interrupted,
        # did not end is still its own.
        mine = self._notes.setdefault("by", threading.get_ident()) == threading.get_ident()
        return mine and not self.ended
