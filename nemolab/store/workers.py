"""Several threads at one list of jobs, stopped by the first failure or an interrupt."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TypeVar

Job = TypeVar("Job")

_TICK_S = 0.1


def work_through(
    jobs: Iterable[Job],
    prepare: Callable[[], Callable[[Job], None]],
    workers: int,
    on_tick: Callable[[], None] = lambda: None,
) -> None:
    """Do every job once. Returns, or raises the first failure, only when no thread is at work any more.

    prepare  called once in each thread; returns what does one job there (with that thread's own buffers)
    on_tick  called from this thread about ten times a second
    """
    waiting_jobs = iter(list(jobs))
    stop = threading.Event()

    def work() -> None:
        do = prepare()
        for job in waiting_jobs:  # next() on it is atomic: each job is taken once
            if stop.is_set():
                return
            do(job)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="nemolab-repack")
    try:
        waiting = {pool.submit(work) for _ in range(workers)}
        while waiting:
            done, waiting = wait_for(waiting, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
            for finished in done:
                finished.result()
            on_tick()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
