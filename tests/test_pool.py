"""Threads that run small tasks."""

import contextlib
import queue
import subprocess
import sys
import threading

import pytest

from nemolab.errors import StoreError
from nemolab.store.pool import Pool


def test_every_task_submitted_runs_before_closing_ends_and_then_the_threads_do():
    before, done, gate = threading.active_count(), [], threading.Event()
    pool = Pool(3, "few")
    pool.submit(gate.wait)
    for number in range(20):
        pool.submit(lambda number=number: done.append(number))
    threading.Timer(0.05, gate.set).start()
    pool.close()
    pool.close()
    assert sorted(done) == list(range(20))
    gate.wait()
    assert all(not thread.is_alive() for thread in pool._threads) and len(pool._threads) == 3
    assert threading.active_count() <= before + 1, "the timer's own may be ending"


def test_a_closed_pool_takes_no_task_and_leaves_no_thread_to_one_that_came_meanwhile():
    pool, refused, started = Pool(100, "racing"), [], threading.Event()

    def race():
        with pytest.raises(StoreError, match="no task for racing any more"):
            while True:
                pool.submit(started.set)
        refused.append(True)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert started.wait(20)
    pool.close()
    for thread in threads:
        thread.join(20)
    assert len(refused) == 4
    for thread in pool._threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_task_that_raises_takes_no_thread_with_it():
    pool, done = Pool(1, "one"), threading.Event()
    for failure in (ValueError, KeyboardInterrupt, SystemExit):
        pool.submit(lambda failure=failure: (_ for _ in ()).throw(failure))
    pool.submit(done.set)
    assert done.wait(20)
    pool.close()


def test_tasks_begin_in_the_order_in_which_they_were_submitted():
    pool, done = Pool(1, "one"), []
    for number in range(50):
        pool.submit(lambda number=number: done.append(number))
    pool.close()
    assert done == list(range(50))


def test_threads_of_a_pool_that_nobody_closed_end_with_it_and_with_the_interpreter():
    pool = Pool(2, "forgotten")
    for _ in range(2):
        pool.submit(lambda: None)
    threads = pool._threads
    del pool
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    code = "from nemolab.store.pool import Pool; pool = Pool(4, 'left'); pool.submit(lambda: print('ran', flush=True))"
    code += "; import time; time.sleep(0.2)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ran\n", "")


class InterruptedQueue(queue.SimpleQueue):
    """An interrupt comes in place of the main thread's end mark number `marks_left`."""

    marks_left = 0

    def put(self, task):
        if task is None and threading.current_thread() is threading.main_thread():
            self.marks_left -= 1
            if self.marks_left == 0:
                raise KeyboardInterrupt
        super().put(task)


@pytest.mark.parametrize("nth", [1, 2])
def test_an_interrupt_while_it_closes_lets_a_second_close_end(monkeypatch, nth):
    monkeypatch.setattr(queue, "SimpleQueue", InterruptedQueue)
    pool = Pool(3, "cut")
    pool._tasks.marks_left = nth
    together = threading.Barrier(3, timeout=20)
    for _ in range(3):
        pool.submit(together.wait)
    with contextlib.suppress(KeyboardInterrupt):
        pool.close()
    pool._tasks.marks_left = 0
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive() and not any(thread.is_alive() for thread in pool._threads)


def refuse_to_start(monkeypatch, *, after):
    """Threads cannot be had any more once `after` have been started. Returns a switch: .clear() lets them come."""
    refusing, real, left = threading.Event(), threading.Thread.start, [after]
    refusing.set()

    def start(thread):
        if refusing.is_set() and left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return refusing


def test_where_no_further_thread_starts_those_that_live_do_the_tasks(monkeypatch):
    pool, done = Pool(4, "few"), []
    refusing = refuse_to_start(monkeypatch, after=1)
    for number in range(20):
        pool.submit(lambda number=number: done.append(number))
    assert len(pool._threads) == 1
    refusing.clear()
    pool.submit(lambda: done.append(20))
    assert len(pool._threads) == 2, "and more are started once they can be"
    pool.close()
    assert sorted(done) == list(range(21))


def test_a_task_that_no_thread_would_do_is_refused_and_not_done_later(monkeypatch):
    pool, done = Pool(1, "none"), []
    refusing = refuse_to_start(monkeypatch, after=0)
    with pytest.raises(StoreError, match=r"no thread for none \(can't start new thread\)"):
        pool.submit(lambda: done.append("refused"))
    assert pool._threads == []
    refusing.clear()
    pool.submit(lambda: done.append("taken"))
    pool.close()
    assert done == ["taken"]


def test_a_thread_whose_start_was_interrupted_takes_no_place(monkeypatch):
    pool, done, real = Pool(1, "one"), threading.Event(), threading.Thread.start

    def interrupt(thread):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(lambda: None)
    monkeypatch.setattr(threading.Thread, "start", real)
    pool.submit(done.set)
    assert done.wait(20)
    pool.close()
