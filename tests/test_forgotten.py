"""What nobody closes, as in a notebook that opens an engine again under the same name, goes when it is forgotten.

So does what an interrupted closing left, or it is closed the next time.
"""

import contextlib
import ctypes
import gc
import os
import time
import weakref

import pytest
import torch
from blocks import interrupt_after
from fake_cards import stand_in_for_limits
from synthetic import one_thread, write_checkpoint

from nemolab.engine import Engine, engine, turns
from nemolab.engine.arguments import find_store
from nemolab.engine.gpu import cache_memory, model, pinned, side
from nemolab.engine.gpu.device import StandIn
from nemolab.store import files, page_lock

IDS = list(range(40, 52))


class Book:
    """A driver that keeps book of what is page-locked, and whether that is still mapped as it is unlocked."""

    copy_batch = None

    def __init__(self):
        self.locked, self.wrong = {}, []

    def lock(self, address, nbytes):
        if address in self.locked:
            return "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
        self.locked[address] = nbytes

    def unlock(self, address):
        if self.locked.pop(address, None) is None:
            return "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"
        if not is_mapped(address):
            self.wrong.append(address)

    def copy(self, to, source, nbytes, stream):
        ctypes.memmove(to, source, nbytes)


def is_mapped(address):
    with open("/proc/self/maps") as maps:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(first <= address < last for first, last in ranges)


class CardWithBook(StandIn):
    total_bytes = 8 * 2**30

    def __init__(self):
        super().__init__()
        self.locker, self.limit_bytes = Book(), None

    def set_limit(self, nbytes):
        self.limit_bytes = nbytes


@pytest.fixture
def card(monkeypatch):
    card = CardWithBook()
    monkeypatch.setattr(side, "open_device", lambda name: card)
    return card


@pytest.fixture(scope="module")
def small_path(tmp_path_factory):
    sizes = {"pattern": "ME*E", "experts": 6, "inter": 32, "latent": 32, "hidden": 32, "top_k": 2}
    return write_checkpoint(tmp_path_factory.mktemp("small") / "model", **sizes)


def use(opened):
    state = opened.new_state()
    return torch.stack([opened.last_logits(IDS, state), *(opened.step(token, state) for token in (60, 61))])


def count_open(name):
    """Descriptors of this process on files of that name."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
    return found.count(name)


def wait_until(holds):
    """A reader's thread may look at its last task for a moment longer than anybody waits for that."""
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert holds()


@pytest.mark.parametrize("settings", [{}, {"device": "twin", "vram_gib": 4}], ids=["cpu", "card"])
@one_thread
def test_an_engine_that_is_forgotten_leaves_no_file_and_nothing_page_locked(small_path, card, settings):
    before = count_open(files.EXPERTS)
    opened = Engine(small_path, **settings)
    use(opened)
    reader = weakref.ref(opened._cache.reader)
    assert count_open(files.EXPERTS) == before + 1 and bool(card.locker.locked) == ("device" in settings)
    del opened
    wait_until(lambda: gc.collect() >= 0 and reader() is None)
    assert count_open(files.EXPERTS) == before
    assert card.locker.locked == {} and card.locker.wrong == []


@one_thread
def test_memory_of_the_cache_stays_until_it_is_unlocked(small_path, card):
    opened = Engine(small_path, device="twin", vram_gib=4)
    use(opened)
    address = int(opened._model.memory.addresses[0])
    opened._cache.close()
    assert is_mapped(address)
    opened.close()
    assert not is_mapped(address) and card.locker.locked == {} and card.locker.wrong == []


@one_thread
def test_an_interrupt_wherever_it_comes_in_closing_leaves_nothing_once_it_is_closed_again(small_path, card):
    store, lines, cut_off = find_store(small_path, None, "neuron"), 0, True
    while cut_off:
        opened = Engine(None, store=store, device="twin", vram_gib=4, ram_cache_slots=4)
        assert opened._model.memory.lock_row(0)
        cut_off = False
        try:
            with interrupt_after(lines, engine, turns, side, model, cache_memory, pinned, page_lock):
                opened.close()
        except KeyboardInterrupt:
            cut_off = True
        opened.close()
        assert card.locker.locked == {} and card.locker.wrong == [], lines
        assert card.limit_bytes is None
        lines += 3  # all of them take half a minute
    assert lines > 100


def test_a_limit_ends_with_a_card_that_is_forgotten(monkeypatch):
    """torch keeps it for the process: whoever opens an engine again, without closing the first, is not held to it."""
    fractions, make_card = stand_in_for_limits(monkeypatch)

    def limit(nbytes):
        card = make_card(0)
        card.set_limit(nbytes)
        return card

    first, second = limit(2**31), limit(2**32)
    assert fractions == [0.25, 0.25]
    del first
    assert fractions == [0.25, 0.25, 0.5]
    second.set_limit(2**30)
    second.set_limit(None)
    del second
    assert fractions == [0.25, 0.25, 0.5, 0.125, 1.0]


@one_thread
def test_what_a_card_may_be_at_stays_where_waiting_for_it_is_interrupted(small_path, card, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    with Engine(small_path, device="twin", vram_gib=4, prefetch=2) as opened:
        parts = opened._model._parts
        guesses, locked = parts.guesses, dict(card.locker.locked)
        with monkeypatch.context() as waiting:
            waiting.setattr(card, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                parts.guess(1)
        gc.collect()
        assert parts.guesses is guesses and card.locker.locked.items() >= locked.items()
        use(opened)
