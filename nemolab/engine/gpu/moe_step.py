"""The routed experts of one token on a card, by one of four ways for their bytes to reach the arithmetic.

    whole     blocks are copied into slots on the card
    grouped   up is copied; down is read in place, groups of 16 neurons with an active one
    rows      up is copied; down is read in place, a group's scales once and only its active neurons' rows
    pull      nothing is copied: both are read in place, and the card looks up by itself where they lie

All four run the same compiled kernel (`nemolab.kernels.gpu.expert_step`) on the same partition of the sums, so their
outputs are equal to the bit. In place means: in page-locked memory of the host, over the bus, as the kernel runs.

Copies run on a stream of their own, in waves: the kernel for a wave's ranks starts as soon as its copies have ended,
while the next wave's are under way. Slots are two banks used in turn; a bank is not written before the kernels that
read it last have ended. With `pull` the kernel needs no word from the CPU: it reads what the table has, and tells the
CPU the choice through page-locked memory; what was missing is read from disk into the cache meanwhile, and a second
launch adds it.

A block may be evicted, or its row read into, once the card is done with the layer that used it. The next layer's choice
comes after that on the same stream, so whoever has been told it (`choice`) knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from nemolab.errors import EngineError
from nemolab.kernels.gpu.combine import combine
from nemolab.kernels.gpu.expert_step import GROUPED, ROWS, ExpertStep
from nemolab.store.arena import Arena
from nemolab.store.direct_io import address
from nemolab.store.page_lock import Driver, PageLock
from nemolab.units import PAGE_BYTES

STRATEGIES = ("whole", "grouped", "rows", "pull")
_WAVES = {"whole": (12, 7, 3), "grouped": (8, 7, 7), "rows": (12, 7, 3)}  # experts of 22 copied before a kernel starts
_UNKNOWN = -1
_CHOICE_TIMEOUT_S = 60.0


class PinnedArray:
    """A small page-locked numpy array that the card reads and writes under `.address`."""

    def __init__(self, shape: tuple[int, ...], dtype, driver: Driver):
        self.nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        pages = -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES
        self._arena = Arena(1, pages)
        row = self._arena.rows[0]
        self._lock = PageLock(address(row), pages, pages, driver)
        problem = self._lock.grow(pages)
        if problem is not None:
            raise EngineError(f"{self.nbytes} bytes shared with the card: {problem}")
        self.array = row[: self.nbytes].view(dtype).reshape(shape)
        self.address = address(row)

    def close(self) -> None:
        self._lock.close()
        self.array = None
        self._arena.close()


class ExpertTable:
    """Where each expert lies in page-locked memory, on the card and here; 0 for what is not there.

    .device  int64 [layers, experts], changed in the order of the current stream
    .host    int64 [layers, experts], what the card will have once it has done everything queued
    """

    def __init__(self, n_layers: int, n_experts: int, driver: Driver, device: str | torch.device = "cuda"):
        self._driver = driver
        self._pinned = PinnedArray((n_layers, n_experts), np.int64, driver)
        self.host = self._pinned.array
        self.host[:] = 0
        self.device = torch.zeros(n_layers, n_experts, dtype=torch.int64, device=device)
        self._row_bytes = 8 * n_experts

    def set(self, layer: int, experts: np.ndarray | list[int], addresses: np.ndarray | list[int] | int) -> None:
        """Experts of a layer lie at these addresses from here on (0: nowhere)."""
        self.host[layer, experts] = addresses
        self.send(layer)

    def send(self, layer: int) -> None:
        """Queue the copy of a layer's row to the card."""
        self._driver.copy(
            self.device.data_ptr() + layer * self._row_bytes,
            self._pinned.address + layer * self._row_bytes,
            self._row_bytes,
            torch.cuda.current_stream().cuda_stream,
        )

    def close(self) -> None:
        self.host = None
        self._pinned.close()


class MoeStep:
    """The step of one model on one card, by one strategy.

    inter, width, block_bytes  of an expert; top_k; table  where experts lie
    waves                      ranks of each wave of copies, by default a share of top_k
    scales_2                   float32 [layers, experts, 2] on the card
    For one thread, on torch's current stream. Raises EngineError for an unknown strategy or sizes that do not fit.
    """

    def __init__(
        self,
        strategy: str,
        inter: int,
        width: int,
        block_bytes: int,
        top_k: int,
        table: ExpertTable,
        scales_2: torch.Tensor,
        driver: Driver,
        waves: tuple[int, ...] | None = None,
    ):
        if strategy not in STRATEGIES:
            raise EngineError(f"unknown transfer strategy {strategy!r}; known: {', '.join(STRATEGIES)}")
        self.strategy, self.top_k, self.table, self.scales_2 = strategy, top_k, table, scales_2
        device = scales_2.device
        self._driver = driver
        self.step = ExpertStep(inter, width, top_k, device)
        n_layers = table.device.shape[0]
        self._choices = PinnedArray((n_layers, top_k), np.int32, driver)
        self._seen = np.empty(table.host.shape[1], np.int64)
        self._missing = PinnedArray((3, top_k), np.int64, driver)  # addresses, then ranks in one row, sent together
        self._missing_table = torch.zeros(3, top_k, dtype=torch.int64, device=device)
        if strategy != "pull":
            payload = inter * width * 9 // 8
            self._slot_bytes = payload if strategy == "whole" else payload // 2
            stride = -(-self._slot_bytes // 512) * 512
            self._banks = torch.empty(2, top_k, stride, dtype=torch.uint8, device=device)
            first = self._banks.data_ptr()
            at = first + stride * np.arange(2 * top_k, dtype=np.int64).reshape(2, top_k)
            self._slots, self._slot_table = at, torch.from_numpy(at).to(device)
            self._copies = torch.cuda.Stream(device)
            self._done = [torch.cuda.Event(), torch.cuda.Event()]
            self._waves = list(waves or spread(_WAVES[strategy], top_k))
            self._copied = [torch.cuda.Event() for _ in self._waves]
            self._turn = 0
            if sum(self._waves) != top_k or min(self._waves) < 1:
                raise EngineError(f"waves of {self._waves} experts do not add up to {top_k}")

    def run(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        lookup: Callable[[list[int]], np.ndarray],
    ) -> None:
        """out = the weighted sum of the chosen experts of a layer.

        x, out float32 [X]; ids int32 [top_k]; weights float32 [top_k], all on the card
        lookup   called once with the ids, in rank order; answers with the addresses of their blocks (int64 [top_k]),
                 all of them read and page-locked, and has told the table
        """
        if self.strategy == "pull":
            self.start(layer, x, ids)
            self.finish(layer, x, ids, lookup(self.choice(layer)))
        else:
            chosen = ids.tolist()
            self._copy_and_compute(layer, x, ids, lookup(chosen))
        combine(self.step.partial, weights, ids, self.scales_2[layer], out)

    # pull

    def start(self, layer: int, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Queue the kernel for all experts the table has. May be captured in a CUDA graph: see `expect`."""
        self.expect(layer)
        here = (self.table.device[layer], ids)
        post = self._choices.address + 4 * layer * self.top_k
        self.step.launch(here, here, ids, self.scales_2[layer], x, amount=ROWS, post=post)

    def expect(self, layer: int) -> None:
        """Before a layer's kernel is queued, or a graph with it is replayed: its choice is not known yet."""
        self._choices.array[layer] = _UNKNOWN
        self._seen[:] = self.table.host[layer]

    def choice(self, layer: int) -> list[int]:
        """Wait until the card has told a layer's choice: ids in rank order.

        Raises EngineError when it does not come: then the card has failed, and the next call of torch says how.
        """
        told = self._choices.array[layer]
        deadline = time.monotonic() + _CHOICE_TIMEOUT_S
        while told.min() < 0:
            if time.monotonic() > deadline:
                raise EngineError(f"the card did not tell which experts layer {layer} chose; it may have failed")
        return told.tolist()

    def finish(self, layer: int, x: torch.Tensor, ids: torch.Tensor, addresses: np.ndarray) -> int:
        """Queue a second launch for the chosen experts that the first had to leave out; how many there were.

        addresses  int64 [top_k] of all chosen blocks, by rank
        """
        ranks = np.flatnonzero(self._seen[self._choices.array[layer]] == 0)
        if len(ranks):
            rows = self._missing.array
            rows[0] = addresses
            rows[1].view(np.int32)[: len(ranks)] = ranks
            stream = torch.cuda.current_stream().cuda_stream
            self._driver.copy(self._missing_table.data_ptr(), self._missing.address, self._missing.nbytes, stream)
            here = (self._missing_table[0], self.step.all_ranks)
            listed = self._missing_table[1].view(torch.int32)[: len(ranks)]
            self.step.launch(here, here, ids, self.scales_2[layer], x, amount=ROWS, ranks=listed)
        return len(ranks)

    # whole, grouped, rows

    def _copy_and_compute(self, layer: int, x: torch.Tensor, ids: torch.Tensor, addresses: np.ndarray) -> None:
        bank, self._turn = self._turn, 1 - self._turn
        slots, stream = self._slots[bank].tolist(), self._copies.cuda_stream
        sources = addresses.tolist()
        here = (self._slot_table[bank], self.step.all_ranks)
        there = here if self.strategy == "whole" else (self.table.device[layer], ids)
        amount = GROUPED if self.strategy == "grouped" else ROWS
        self._copies.wait_event(self._done[bank])
        copy, size = self._driver.copy, self._slot_bytes
        main, first = torch.cuda.current_stream(), 0
        for count, copied in zip(self._waves, self._copied, strict=True):
            for rank in range(first, first + count):
                copy(slots[rank], sources[rank], size, stream)
            copied.record(self._copies)
            main.wait_event(copied)
            self.step.launch(here, there, ids, self.scales_2[layer], x, amount=amount, first=first, count=count)
            first += count
        self._done[bank].record(main)

    def close(self) -> None:
        """Wait for the card and give page-locked memory back."""
        torch.cuda.synchronize()
        self._choices.close()
        self._missing.close()


def spread(waves: tuple[int, ...], top_k: int) -> list[int]:
    """Waves in the same proportions for another number of experts, none empty."""
    ends = np.cumsum(waves) * top_k // sum(waves)
    counts = np.diff(ends, prepend=0)
    return [int(count) for count in counts if count]
