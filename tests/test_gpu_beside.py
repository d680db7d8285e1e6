"""Who holds a card's memory: as the driver's library tells it, and what is this process's beside torch."""

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch

from nemolab.engine.gpu import beside as beside_module
from nemolab.engine.gpu import device
from nemolab.engine.gpu.beside import ASSUMED, DIFFERENCE, TOLD, Beside, beside_of
from nemolab.engine.gpu.device import Card
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
    beside = Beside(meter(driver))
    driver.used = GIB + 500 * MIB + 100 * MIB
    assert beside.end(reserved_bytes=100 * MIB) == 500 * MIB and beside.source == DIFFERENCE
    driver.used += 2 * GIB  # another program begins, between two passes
    beside.begin(100 * MIB)
    driver.used += 50 * MIB  # ours, in a pass
    assert beside.end(100 * MIB) == 550 * MIB == beside.peak_bytes
    beside.begin(100 * MIB)
    driver.used -= 2 * GIB  # it ends
    assert beside.end(100 * MIB) == 0 and beside.peak_bytes == 550 * MIB


def test_what_another_program_takes_during_a_pass_is_ours_until_it_goes():
    driver = FakeDriver(used=0)
    beside = Beside(meter(driver))
    driver.used = 500 * MIB + 2 * GIB  # ours, and another program's
    assert beside.end(reserved_bytes=0) == 500 * MIB + 2 * GIB
    driver.used = 500 * MIB
    beside.begin(0)
    assert beside.end(0) == 500 * MIB


def test_the_drivers_word_is_taken_where_it_can_be_true():
    driver = FakeDriver(used=GIB)
    beside = Beside(meter(driver))
    driver.processes[os.getpid()] = 700 * MIB
    driver.used = 9 * GIB
    assert beside.end(200 * MIB) == 500 * MIB and beside.source == TOLD
    foreign = Beside(meter(FakeDriver(used=GIB, processes={os.getpid(): GIB})))  # before we touched the card
    foreign.begin(0)
    assert foreign.end(0) == 0 and foreign.source == DIFFERENCE
    small = Beside(meter(FakeDriver(GIB, {os.getpid(): 5 * MIB}, touched=1)))  # less than torch alone holds
    assert small.end(10 * MIB) is None and small.source == ASSUMED and "used the card before" in small.why_assumed


def test_a_driver_that_stops_telling_is_no_error():
    driver = FakeDriver()
    beside = Beside(meter(driver))
    driver.status = 15
    beside.begin(0)
    assert beside.end(0) == 0 and beside.source == ASSUMED and "status 15" in beside.why_assumed


def test_what_others_held_before_the_first_engine_of_a_process_is_not_ours(monkeypatch):
    """torch has not begun then. A second engine looks again."""
    driver, reserved = FakeDriver(used=5 * GIB), [0]
    monkeypatch.setattr(beside_module, "CardMeter", lambda index: meter(driver))
    monkeypatch.setattr(device, "Driver", lambda index: None)
    for name, answer in {
        "is_available": lambda: True, "device_count": lambda: 1, "is_initialized": lambda: False,
        "set_device": lambda index: None, "reset_peak_memory_stats": lambda index: None,
        "get_device_properties": lambda index: SimpleNamespace(name="a card", total_memory=8 * GIB),
        "mem_get_info": lambda index: (8 * GIB - driver.used, 8 * GIB),
        "memory_reserved": lambda index: reserved[0], "memory_allocated": lambda index: reserved[0],
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, answer)
    beside_of.cache_clear()
    try:
        first = Card(0)
        reserved[0] = 100 * MIB
        driver.used += 600 * MIB
        assert first.look().beside_bytes == 500 * MIB and not first.look().told
        driver.used += GIB  # another program, between two engines
        assert Card(0).look().beside_bytes == 500 * MIB
    finally:
        beside_of.cache_clear()
