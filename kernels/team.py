"""A few threads that share one operator: each takes one part of the outputs, nobody shares a sum.

Parts never change the bits: an output's sum lies wholly within one part. So it is free to give small work to one
thread alone, which is what `run` does: waking a thread costs some 20 us on an idle machine and far more on a busy one,
and a MiB of weights takes 100 to 200.
The threads belong to the team and end with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

SMALL_BYTES = 2**20  # weights below this are one thread's work


class Team:
    """`threads` - 1 helpers and the caller. Use it from one thread at a time; close it, or use it in a `with` block."""

    def __init__(self, threads: int = 1):
        self.threads = max(1, threads)
        self._helpers = [_Helper(part) for part in range(1, self.threads)]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Let the helpers end. Closing twice is fine; a closed team works alone."""
        helpers, self._helpers, self.threads = self._helpers, [], 1
        for helper in helpers:
            helper.stop()

    def run(self, kernel: Callable, work_bytes: int, *args) -> None:
        """kernel(part, parts, *args) for every part; returns when all are done.

        work_bytes  weights the operator reads: below SMALL_BYTES the caller does it alone
        """
        if work_bytes < SMALL_BYTES or not self._helpers:
            kernel(0, 1, *args)
            return
        parts = self.threads
        for helper in self._helpers:
            helper.start(kernel, parts, args)
        failures = []
        try:
            kernel(0, parts, *args)
        finally:  # the arrays belong to the helpers until they are done
            for helper in self._helpers:
                failures.append(helper.wait())
        for failure in failures:
            if failure is not None:
                raise failure


class _Helper:
    """One thread that waits on a lock: the cheapest wake-up Python has."""

    def __init__(self, part: int):
        self._part = part
        self._job = None
        self._failure: BaseException | None = None
        self._go, self._done = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._done.acquire()
        self._thread = threading.Thread(target=self._serve, name=f"nemolab-compute-{part}", daemon=True)
        self._thread.start()

    def start(self, kernel: Callable, parts: int, args: tuple) -> None:
        self._job = (kernel, parts, args)
        self._go.release()

    def wait(self) -> BaseException | None:
        try:
            self._done.acquire()
        except BaseException:  # an interrupt: the helper still works on memory that the caller would reuse
            self._done.acquire()
            raise
        failure, self._failure = self._failure, None
        return failure

    def stop(self) -> None:
        self._go.release()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._go.acquire()
            if self._job is None:
                return
            try:
                kernel, parts, args = self._job
                kernel(self._part, parts, *args)
            except BaseException as failure:  # handed to the thread that waits
                self._failure = failure
            self._job = kernel = args = None  # keep nobody's arrays alive
            self._done.release()
