"""What floors are measured with: a bus's stretch of memory, and the CPU where it stands in a card's place."""

import pytest

from nemolab.engine.gpu.device import open_device
from nemolab.errors import EngineError, UsageError
from nemolab.measure import gpu_floors
from nemolab.measure.gpu_floors import CardBus, open_bus, own_read_gb_s


def test_where_no_card_is_the_cpus_memory_is_measured():
    device = open_device("twin")
    with open_bus(device) as bus:
        assert bus.copy_gb_s() > 0 and bus.in_place_gb_s() > 0
    assert len(own_read_gb_s(device, 3)) == 3


def test_a_bus_needs_a_card_and_enough_memory(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="needs a CUDA card"):
        CardBus(None, 0, 2**30, 2**26)
    monkeypatch.setattr(gpu_floors, "need_card", lambda: torch.device("cpu"))
    with pytest.raises(UsageError, match="536,870,912 bytes of page-locked memory, not on 4,096"):
        CardBus(None, 0, 4096, 2**26)


@pytest.mark.gpu
def test_a_bus_carries_and_leaves_nothing_locked():
    device = open_device("cuda")
    with open_bus(device) as bus:
        assert min(bus.copy_gb_s(), bus.in_place_gb_s()) > 0.5, "GB/s; a bus of one lane has as much"
        place = bus._address
    assert device.locker.unlock(place) is not None, "it was unlocked already"
