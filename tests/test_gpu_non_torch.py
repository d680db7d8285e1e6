"""Who holds a card's memory: as the driver's library tells it, and what is this process's beside torch."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from nemolab.engine.gpu import device, non_torch
from nemolab.engine.gpu.device import Card
from nemolab.engine.gpu.non_torch import ASSUMED, DIFFERENCE, TOLD, NonTorchMemory, non_torch_memory_of
from nemolab.system.nvml import CardMeter

GIB, MIB = 2**30, 2**20


class FakeDriver:
    """CUDA's and NVML's libraries in one, for one card: `.processes` {pid: bytes}, `.used` by everybody."""

    def __init__(self, used=GIB, processes=None, touched=0):
        self.used, self.processes, self.touched, self.status = used, processes or {}, touched, 0

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, index):
        return 0 if index == 0 else 101

    def cuDeviceGetUuid_v2(self, raw, device):
        ctypes.memmove(raw, bytes(range(16)), 16)
        return 0

    def cuDevicePrimaryCtxGetState(self, device, flags, active):
        active._obj.value = self.touched
        return 0

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        return 0 if name == b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f" else 6

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.used = self.used
        return self.status

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, found):
        if found is None:
            count._obj.value = len(self.processes)
            return 7 if self.processes else 0
        for entry, (pid, used) in zip(found, self.processes.items(), strict=False):
            entry.pid, entry.used = pid, used
        count._obj.value = len(self.processes)
        return 0


def meter(driver):
    return CardMeter(0, cuda=driver, nvml=driver)


def test_a_meter_tells_everybodys_memory_and_this_processs():
    driver = FakeDriver(5 * GIB, {1: GIB, os.getpid(): 3 * GIB})
    assert (meter(driver).used_bytes(), meter(driver).own_bytes()) == (5 * GIB, 3 * GIB)
    assert not meter(driver).touched and meter(FakeDriver(touched=1)).touched


@pytest.mark.parametrize("told", [0, 2**64 - 1])
def test_a_process_that_the_driver_does_not_tell_is_not_taken_for_empty(told):
    assert meter(FakeDriver(processes={os.getpid(): told})).own_bytes() is None
    assert meter(FakeDriver()).own_bytes() is None


def test_a_meter_says_which_call_failed():
    driver = FakeDriver()
    driver.status = 3
    with pytest.raises(OSError, match="nvmlDeviceGetMemoryInfo failed with status 3"):
        meter(driver)
    with pytest.raises(OSError, match="cuDeviceGet failed with status 101"):
        CardMeter(1, cuda=FakeDriver(), nvml=FakeDriver())


def test_without_the_drivers_word_what_is_beside_is_a_difference():
    driver = FakeDriver(used=GIB)  # others' GiB
    beside = NonTorchMemory(meter(driver))
    driver.used = GIB + 500 * MIB + 100 * MIB
    assert a_pass(beside, reserved_bytes=100 * MIB) == 500 * MIB and beside.source == DIFFERENCE
    driver.used += 2 * GIB  # another program begins, between two passes
    assert beside.look(100 * MIB) == 500 * MIB
    assert a_pass(beside, driver, 50 * MIB, 100 * MIB) == 550 * MIB == beside.peak_bytes
    driver.used -= 2 * GIB  # it ends
    assert a_pass(beside, driver, 0, 100 * MIB) == 550 * MIB == beside.peak_bytes


def a_pass(beside, driver=None, grows=0, reserved_bytes=0):
    """What is found at its end. At its beginning nobody looks where no driver is given."""
    beside.enter(reserved_bytes if driver else None)
    if driver:
        driver.used += grows
    found = beside.look(reserved_bytes)
    beside.leave()
    return found


def test_another_program_that_ends_during_a_pass_does_not_hide_what_is_ours():
    driver = FakeDriver(used=2 * GIB)
    beside = NonTorchMemory(meter(driver))
    driver.used += 900 * MIB
    assert a_pass(beside) == 900 * MIB
    assert a_pass(beside, driver, -2 * GIB) == 900 * MIB, "all of theirs went"
    assert [a_pass(beside, driver, grows) for grows in (0, 10 * MIB, 0)] == [900 * MIB, 910 * MIB, 910 * MIB]
    beside.enter(0)
    driver.used += GIB  # theirs again
    assert beside.look(0) == 910 * MIB + GIB
    driver.used -= GIB
    assert beside.look(0) == 910 * MIB, "what has come during this pass may go during it"
    driver.used += 10 * MIB
    assert beside.look(0) == 920 * MIB
    beside.leave()
    driver.used += 2 * GIB
    beside.enter(0)
    driver.used -= 2 * GIB
    assert beside.look(0) == 920 * MIB
    driver.used += 10 * MIB
    assert beside.look(0) == 930 * MIB, "theirs are gone, and what comes then is ours"
    beside.leave()


def test_no_more_than_a_plan_expects_is_ours_whatever_goes():
    """Others come and go by a GiB, one half during a pass and the other half not, while they hold two for good."""
    driver = FakeDriver(used=2 * GIB)
    beside = NonTorchMemory(meter(driver))
    beside.expect(768 * MIB)
    beside.expect(600 * MIB)
    driver.used += 700 * MIB
    assert a_pass(beside) == 700 * MIB
    for _ in range(9):
        assert a_pass(beside, driver, GIB) in (700 * MIB + GIB, 768 * MIB + GIB)
        assert a_pass(beside, driver, -GIB) == 768 * MIB
    assert beside.expected_bytes == 768 * MIB


def test_what_another_program_takes_during_a_pass_is_ours_until_it_goes():
    driver = FakeDriver(used=0)
    beside = NonTorchMemory(meter(driver))
    driver.used = 500 * MIB + 2 * GIB  # ours, and another program's
    assert a_pass(beside) == 500 * MIB + 2 * GIB
    driver.used = 500 * MIB
    assert beside.look(0) == 500 * MIB == a_pass(beside, driver)


def test_what_one_engine_takes_while_another_begins_a_pass_is_not_others():
    """Two threads, an engine each, on one card."""
    driver = FakeDriver(used=GIB)
    beside = NonTorchMemory(meter(driver))
    beside.enter(0)
    driver.used += 500 * MIB  # ours: the first engine compiles
    with ThreadPoolExecutor(1) as other:
        assert other.submit(a_pass, beside, driver, 30 * MIB).result() == 530 * MIB
    assert beside.look(0) == 530 * MIB
    beside.leave()
    driver.used += GIB  # nobody's pass is under way
    assert a_pass(beside, driver) == 530 * MIB


def test_a_pass_that_an_interrupt_left_open_ends_with_the_next_of_its_thread():
    driver = FakeDriver(used=0)
    beside = NonTorchMemory(meter(driver))
    beside.enter(0)
    driver.used += GIB
    assert a_pass(beside, driver) == 0


def test_the_drivers_word_is_taken_where_it_can_be_true():
    driver = FakeDriver(used=GIB)
    beside = NonTorchMemory(meter(driver))
    driver.processes[os.getpid()] = 700 * MIB
    driver.used = 9 * GIB
    assert beside.look(200 * MIB) == 500 * MIB and beside.source == TOLD
    foreign = NonTorchMemory(meter(FakeDriver(used=GIB, processes={os.getpid(): GIB})))  # before we touched the card
    assert foreign.look(0) == a_pass(foreign) == 0 and foreign.source == DIFFERENCE
    small = NonTorchMemory(meter(FakeDriver(GIB, {os.getpid(): 5 * MIB}, touched=1)))  # less than torch alone holds
    assert small.look(10 * MIB) is None and small.source == ASSUMED and "used the card before" in small.why_assumed


def test_a_driver_that_stops_telling_is_no_error():
    driver = FakeDriver()
    beside = NonTorchMemory(meter(driver))
    driver.used += 500 * MIB
    assert a_pass(beside) == 500 * MIB
    driver.status = 15
    assert (
        beside.look(0) == a_pass(beside) == 500 * MIB and beside.source == ASSUMED and "status 15" in beside.why_assumed
    )


@pytest.fixture
def fake_torch(monkeypatch):
    """torch and the driver, for one card of 8 GiB: others hold 5, a context takes 400 MiB. `.reserved` by torch."""
    driver, held = FakeDriver(used=5 * GIB), SimpleNamespace(reserved=0, resets=0)
    monkeypatch.setattr(non_torch, "CardMeter", lambda index: meter(driver))

    def make_context(index):
        driver.used += 0 if driver.touched else 400 * MIB
        driver.touched = 1

    def reset(index):
        held.resets += 1

    monkeypatch.setattr(device, "Driver", make_context)
    for name, answer in {
        "is_available": lambda: True, "device_count": lambda: 1, "is_initialized": lambda: False,
        "set_device": lambda index: None, "reset_peak_memory_stats": reset,
        "get_device_properties": lambda index: SimpleNamespace(name="a card", total_memory=8 * GIB),
        "mem_get_info": lambda index: (8 * GIB - driver.used, 8 * GIB),
        "memory_reserved": lambda index: held.reserved, "memory_allocated": lambda index: held.reserved,
        "max_memory_reserved": lambda index: held.reserved, "max_memory_allocated": lambda index: held.reserved,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, answer)
    non_torch_memory_of.cache_clear()
    yield driver, held
    non_torch_memory_of.cache_clear()


def test_what_others_held_before_the_first_engine_of_a_process_is_not_ours(fake_torch):
    """torch has not begun then. A second engine looks again."""
    driver, held = fake_torch
    first = Card(0)
    assert (first.look().non_torch_bytes, first.look().source) == (400 * MIB, DIFFERENCE)
    first.enter(watched=True)
    held.reserved = 100 * MIB
    driver.used += 200 * MIB
    assert first.look().non_torch_bytes == 500 * MIB
    first.leave()
    driver.used += GIB  # another program, between two engines
    assert Card(0).look().non_torch_bytes == 500 * MIB


def test_an_engine_does_not_forget_the_peak_of_another_that_is_open(fake_torch):
    held = fake_torch[1]
    first, second = Card(0), Card(0)
    assert held.resets == 1
    for card in (first, second, second):
        card.close()
    third = Card(0)
    assert held.resets == 2
    third.close()


def test_a_driver_that_stops_telling_is_named_as_the_reason(fake_torch):
    driver = fake_torch[0]
    card = Card(0)
    driver.status = 15
    memory = card.memory()
    assert memory["non_torch_bytes"] == memory["peak_non_torch_bytes"] == 400 * MIB and card.look().source == ASSUMED
    assert memory["opened_bytes"] == 400 * MIB
    assert memory["non_torch_is"].startswith("assumed as last found: the driver's library failed: ")
    card.close()
