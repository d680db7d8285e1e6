"""What floors are measured with: a bus's stretch of memory, and the CPU where it stands in a card's place."""

from types import SimpleNamespace

import pytest
import torch

from nemolab.engine.gpu.device import open_device
from nemolab.errors import EngineError, UsageError
from nemolab.measure import gpu_floors
from nemolab.measure.gpu_floors import CardBus, open_bus, own_read_gb_s


def test_where_no_card_is_the_cpus_memory_is_measured():
    device = open_device("twin")
    with open_bus(device) as bus:
        assert bus.copy_gb_s() > 0 and bus.in_place_gb_s() > 0
    assert len(own_read_gb_s(device, 3)) == 3


def test_a_stand_ins_rate_is_its_bytes_over_the_time(monkeypatch):
    monkeypatch.setattr(gpu_floors, "_wall_seconds", lambda call: (call(), 1e-3)[1])
    monkeypatch.setattr(gpu_floors, "STAND_IN_BYTES", 2**20)
    with open_bus(open_device("twin")) as bus:
        assert bus.copy_gb_s() == bus.in_place_gb_s() == pytest.approx(1.048576)
        assert torch.equal(bus._to, bus._from)


class Copies:
    """A driver that notes what it is told to copy."""

    def __init__(self):
        self.told = []

    def copy(self, to: int, place: int, nbytes: int, stream: int) -> None:
        self.told.append((place, nbytes))


@pytest.fixture
def no_card(monkeypatch):
    """In the place of a card: two multiprocessors, the CPU's memory; every piece of work takes 1 ms."""
    monkeypatch.setattr(gpu_floors, "need_card", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu_floors, "_event_seconds", lambda call: (call(), 1e-3)[1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(multi_processor_count=2))


@pytest.mark.parametrize(
    ("chunk_mib", "mib", "pieces", "piece_mib"),
    [(64, 512, 8, 48), (32, 512, 8, 32), (100, 512, 8, 48), (300, 512, 8, 48), (256, 600, 8, 48), (190, 512, 8, 48)]
    + [(400, 520, 8, 48), (90, 512, 6, 48)],
)
def test_a_bus_rate_is_the_bytes_it_copied_over_the_time(no_card, chunk_mib, mib, pieces, piece_mib):
    driver, begin, chunk = Copies(), 2**40, chunk_mib * 2**20
    bus = CardBus(driver, begin, mib * 2**20, chunk)
    assert bus.copy_gb_s() == pytest.approx(1e-6 * pieces * piece_mib * 2**20)
    assert bus.copied == {"pieces": pieces, "bytes": piece_mib * 2**20}
    assert len({place for place, _ in driver.told}) == len(driver.told) == pieces
    for place, nbytes in driver.told:
        first, last = place - begin, place - begin + nbytes - 1
        assert nbytes == piece_mib * 2**20 and 0 <= first and last < mib * 2**20
        assert first // chunk == last // chunk, "no copy crosses the border of a registration"


def test_what_is_read_in_place_is_one_half_and_the_other(no_card, monkeypatch):
    from nemolab.kernels.gpu import stream

    read = []
    monkeypatch.setattr(stream, "stream", lambda place, words, sums, num_warps: read.append((place, words)))
    bus = CardBus(Copies(), 2**40, 2**29, 2**26)
    assert [bus.in_place_gb_s() for _ in range(3)] == [pytest.approx(268.435456)] * 3
    assert read == [(2**40 + half * 2**28, 2**26) for half in (1, 0, 1)]


def test_a_bus_needs_a_card_and_enough_memory(monkeypatch):
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
