"""Small page-locked memory that the card reads and writes while the CPU looks at it, and waiting for what it tells."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable

import numpy as np

from nemolab.errors import EngineError
from nemolab.store.arena import Arena
from nemolab.store.direct_io import address
from nemolab.store.page_lock import Locker, PageLock
from nemolab.units import show_bytes, whole_pages

UNKNOWN = -1  # in the place of an id that the card has not told yet
_TIMEOUT_S = 60.0
_ASK_EVERY_S = 0.05  # whether the card is still at it: a call of the driver
# Releases the interpreter for the threads that read from disk. time.sleep(0) does too, and takes 50 us.
_LOOKS = 64  # at a choice that is about to come, between letting others run: some 10 us
_let_others_run = ctypes.CDLL(None).sched_yield


class NotLocked(EngineError):
    """Memory that was not page-locked. .by_driver  as of `store.page_lock.NotLockable`"""

    def __init__(self, message: str, by_driver: bool):
        super().__init__(message)
        self.by_driver = by_driver


class PinnedArray:
    """A page-locked numpy array, zeros at first, that the card reads and writes under `.address`.

    Forgotten instead of closed, as by a constructor that fails, it is unlocked all the same.
    Raises NotLocked where the driver does not lock it.
    """

    def __init__(self, shape: tuple[int, ...], dtype, locker: Locker):
        self.nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        pages = whole_pages(max(1, self.nbytes))
        arena = Arena(1, pages)
        row = arena.rows[0]
        lock = PageLock(address(row), pages, pages, locker)
        self._parts = lock, arena
        self._forgotten = weakref.finalize(self, _unlock, lock, arena)  # first: an interrupt must not leave it locked
        self._forgotten.atexit = False  # by then the driver may be gone, and with the process all of it goes
        problem = lock.grow(pages)
        if problem is not None:
            self.close()  # what was locked of it, too
            advice = "raise the limit of locked memory (ulimit -l)" if problem.by_driver else "free some of it"
            # Raised as it is made: a name for it here would hold this frame, and with it all that was locked before.
            raise NotLocked(
                f"{show_bytes(self.nbytes)} that card and CPU share: {problem}; {advice}, or use device='cpu'",
                problem.by_driver,
            )
        self.array = row[: self.nbytes].view(dtype).reshape(shape)
        self.address = address(row)

    def close(self) -> None:
        """Once nothing on the card uses it. Closing twice is fine."""
        self.array = None
        _unlock(*self._parts)
        self._forgotten.detach()  # not before: what an interrupt leaves locked is unlocked the next time


def _unlock(lock: PageLock, arena: Arena) -> None:
    lock.close()
    arena.close()


def wait_for_ids(ids: np.ndarray, is_done: Callable[[], bool], timeout_s: float = _TIMEOUT_S) -> bool:
    """Look at int32 [n] that the card writes until nothing is negative. False: it will not tell them any more.

    is_done  whether the card is through with what it was to tell them in; raises what has failed there
    """
    view, looks, now = memoryview(ids), 0, time.monotonic()
    deadline, ask_at = now + timeout_s, now + _ASK_EVERY_S
    # The first and the last word come first: looking at one takes far less than numpy takes for all.
    while view[0] < 0 or view[-1] < 0 or ids.min() < 0:
        looks += 1
        if looks % _LOOKS == 0:
            _let_others_run()
            now = time.monotonic()
            if now > deadline or (now > ask_at and is_done()):
                return bool(ids.min() >= 0)  # they may have come since, above all where this process stood still
            ask_at = now + _ASK_EVERY_S if now > ask_at else ask_at
    return True
