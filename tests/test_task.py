"""Work for one thread of several."""

import threading
import time

from nemolab.store.task import Task


class Gated(Task):
    """Begun, it waits at a gate."""

    __slots__ = ("begun", "gate")

    def __init__(self):
        super().__init__()
        self.begun, self.gate = threading.Event(), threading.Event()

    def work(self):
        self.begun.set()
        self.gate.wait(60)


def test_all_threads_that_wait_for_a_task_go_on_when_it_ends():
    task = Gated()
    at_work = threading.Thread(target=task.run, daemon=True)
    at_work.start()
    assert task.begun.wait(20)
    waiting = [threading.Thread(target=task.wait, daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    time.sleep(0.2)  # so that they wait; one that has not got there yet finds the task over
    task.gate.set()
    for thread in (at_work, *waiting):
        thread.join(20)
        assert not thread.is_alive()
