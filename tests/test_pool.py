"""Threads that run small tasks."""

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
