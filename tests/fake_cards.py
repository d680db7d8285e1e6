"""Cards that are not there: a device whose memory a test tells, and which keeps book of what is asked of it."""

from collections.abc import Callable

import torch

from nemolab.engine.gpu.device import Card, StandIn, Usage

GIB, MIB = 2**30, 2**20


class FakeCard(StandIn):
    """A device with `.usage`, that keeps book of limits and of what was given back."""

    def __init__(self, reserved=GIB, beside=600 * MIB, used=None, total=8 * GIB):
        super().__init__()
        used = reserved + (beside or 0) if used is None else used
        self.usage = Usage(reserved, reserved, beside, used, total)
        self.limits, self.released, self.begun, self.kept_bytes, self.passes = [], 0, 0, 0, 0

    def change(self, **fields):
        self.usage = self.usage._replace(**fields)

    def set_limit(self, nbytes):
        self.limits.append(nbytes)

    def release(self):
        self.released += 1
        self.change(reserved_bytes=self.usage.reserved_bytes - self.kept_bytes)

    def enter(self, watched):
        self.begun += watched
        self.passes += 1

    def leave(self):
        self.passes -= 1

    def look(self):
        return self.usage


class TakenCard(FakeCard):
    """One of 8 GiB of which other programs leave so much."""

    def __init__(self, left):
        super().__init__(reserved=0, beside=600 * MIB, used=8 * GIB - left + 600 * MIB)
        self.name, self.total_bytes = "a card", 8 * GIB


def stand_in_for_limits(monkeypatch) -> tuple[list[float], Callable[[int], Card]]:
    """(the shares of its memory that a card was limited to, in order; what makes card `index`, of 8 GiB)."""
    fractions = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))

    def make_card(index: int) -> Card:
        card = object.__new__(Card)
        card.torch_device, card.total_bytes = torch.device("cuda", index), 8 * GIB
        return card

    return fractions, make_card
