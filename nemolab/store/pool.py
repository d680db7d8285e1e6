"""Threads that run small tasks, handed over cheaply.

Not `concurrent.futures`: futures and their locks cost the thread that submits several times what a bare queue does, and
the few reads of every layer of every token add up.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable

from nemolab.errors import StoreError

Work = Callable[[], None]


class Pool:
    """`threads` at most, started as tasks come. Tasks begin in the order they were submitted.

    What a task raises is nobody's: who submits it must learn of failures by the task itself.
    """

    def __init__(self, threads: int, name: str):
        self._most, self._name = threads, name
        self._tasks: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock, self._closed = threading.Lock(), False
        # Whoever forgets to close it, or leaves the interpreter, must not wait for threads that wait for tasks.
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: Work) -> None:
        """Raises StoreError for a task that nobody would do: the pool is closed, or not one thread can be started."""
        with self._lock:
            if self._closed:
                raise StoreError(f"no task for {self._name} any more: its threads have ended")
            if len(self._threads) < self._most:
                self._start_one()
            self._tasks.put(task)

    def _start_one(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        try:
            self._threads.append(thread)
            thread.start()
        except BaseException as problem:
            if thread.ident is None and thread in self._threads:  # so it keeps no place
                self._threads.remove(thread)
            if not isinstance(problem, Exception):  # an interrupt
                raise
            if not self._threads:
                raise StoreError(f"no thread for {self._name} ({problem})") from problem

    def close(self) -> None:
        """Let every task that was submitted come to its end, then the threads. Closing twice is fine."""
        with self._lock:  # no task comes behind the end mark
            self._closed = True
        self._tasks.put(None)
        for thread in self._threads:
            if thread.ident is not None:  # an interrupt may have come before it was started
                thread.join()


def _work(tasks: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        with contextlib.suppress(BaseException):
            task()
        del task  # or it would live on until the next one comes
    tasks.put(None)  # the one end mark is for all
