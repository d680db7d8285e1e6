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

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nemolab.errors import EngineError
from nemolab.kernels.gpu.combine import Combine
from nemolab.kernels.gpu.expert_step import GROUPED, ROWS, BoundStep, ExpertStep
from nemolab.kernels.gpu.write_table import MOST, WriteTable
from nemolab.store.arena import Arena
from nemolab.store.direct_io import address
from nemolab.store.page_lock import CopyBatch, Driver, PageLock
from nemolab.units import whole_pages

STRATEGIES = ("whole", "grouped", "rows", "pull")
_WAVES = {"whole": (4, 11, 5, 2), "grouped": (4, 7, 7, 4), "rows": (4, 9, 6, 3)}  # of 22 experts
_UNKNOWN = -1
_HALF = 32  # launches that change the table in half a ring of changes
_CHOICE_TIMEOUT_S = 60.0
# Releases the interpreter for the threads that read from disk. time.sleep(0) does too, and takes 50 us.
_LOOKS = 64  # at a choice that is about to come, between letting others run: some 10 us
_let_others_run = ctypes.CDLL(None).sched_yield


class PinnedArray:
    """A small page-locked numpy array that the card reads and writes under `.address`."""

    def __init__(self, shape: tuple[int, ...], dtype, driver: Driver):
        self.nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        pages = whole_pages(self.nbytes)
        self._arena = Arena(1, pages)
        row = self._arena.rows[0]
        self._lock = PageLock(address(row), pages, pages, driver)
        problem = self._lock.grow(pages)
        if problem is not None:
            self._arena.close()
            raise EngineError(f"{self.nbytes} bytes shared with the card: {problem}")
        self.array = row[: self.nbytes].view(dtype).reshape(shape)
        self.address = address(row)

    def close(self) -> None:
        self._lock.close()
        self.array = None
        self._arena.close()


class ExpertTable:
    """Where each expert lies in page-locked memory, on the card and here; 0 for what is not there.

    .device  int64 [layers, experts], changed in the order of torch's current stream
    .host    int64 [layers, experts], what the card will have once it has done everything queued
    """

    def __init__(self, n_layers: int, n_experts: int, driver: Driver, device: str | torch.device = "cuda"):
        self.host = np.zeros((n_layers, n_experts), np.int64)
        self.device = torch.zeros(n_layers, n_experts, dtype=torch.int64, device=device)
        self._write = WriteTable(self.device)
        # Changes lie in a ring until the card has read them; an event a half of it says that it has.
        self._changes = PinnedArray((2 * _HALF, MOST, 2), np.int64, driver)
        self._read = (torch.cuda.Event(), torch.cuda.Event())
        self._turn = 0

    def set(self, layer: int, experts: np.ndarray | list[int], addresses: np.ndarray | list[int] | int) -> None:
        """Experts of a layer lie at these addresses from here on (0: nowhere)."""
        experts = np.atleast_1d(np.asarray(experts, np.int64))
        self.update(layer * self.host.shape[1] + experts, addresses)

    def update(self, blocks: np.ndarray | list[int], addresses: np.ndarray | list[int] | int) -> None:
        """The same for blocks (layer * n_experts + expert) of any layers, each named once: one launch for 128."""
        blocks = np.asarray(blocks, np.int64)
        addresses = np.broadcast_to(np.asarray(addresses, np.int64), blocks.shape)
        self.host.reshape(-1)[blocks] = addresses
        for first in range(0, len(blocks), MOST):
            piece = slice(first, first + MOST)
            turn, count = self._turn, len(blocks[piece])
            if turn % _HALF == 0:
                self._read[turn // _HALF].synchronize()
            self._changes.array[turn, :count, 0] = blocks[piece]
            self._changes.array[turn, :count, 1] = addresses[piece]
            self._write.launch(self._changes.address + 16 * MOST * turn, count)
            if turn % _HALF == _HALF - 1:
                self._read[turn // _HALF].record()
            self._turn = (turn + 1) % (2 * _HALF)

    def close(self) -> None:
        """Once the card is done. Closing twice is fine."""
        self._changes.close()


class Fetch(NamedTuple):
    """What a lookup answers: where the chosen blocks are, or will be.

    addresses  int64 [top_k] by rank, in page-locked memory
    missing    ranks whose blocks are still being read from disk
    wait       returns once they are there, and the table has been told
    """

    addresses: np.ndarray
    missing: Sequence[int] = ()
    wait: Callable[[], object] = lambda: None


class MoeStep:
    """The step of one model on one card, by one strategy.

    inter, width, block_bytes  of an expert; top_k; table  where experts lie
    scales_2                   float32 [layers, experts, 2] on the card
    waves                      experts of each wave of copies, by default a share of top_k
    .x, .out                   float32 [X]; .ids int32 [top_k], .weights float32 [top_k]: what a step reads and writes,
                               always the same buffers, so that it can be part of a CUDA graph
    For one thread, on torch's current stream. Raises EngineError for an unknown strategy or sizes that do not fit.
    """

    def __init__(
        self,
        strategy: str,
        inter: int,
        width: int,
        top_k: int,
        table: ExpertTable,
        scales_2: torch.Tensor,
        driver: Driver,
        waves: tuple[int, ...] | None = None,
    ):
        if strategy not in STRATEGIES:
            raise EngineError(f"unknown transfer strategy {strategy!r}; known: {', '.join(STRATEGIES)}")
        self.waves = list(waves or spread(_WAVES.get(strategy, (1,)), top_k))
        if sum(self.waves) != top_k or min(self.waves) < 1:
            raise EngineError(f"waves of {self.waves} experts do not add up to {top_k}")
        self.strategy, self.top_k, self.table = strategy, top_k, table
        self._scales_2, self._driver = scales_2, driver
        device = scales_2.device
        self.x, self.out = torch.zeros(2, width, device=device)
        self.ids = torch.zeros(top_k, dtype=torch.int32, device=device)
        self.weights = torch.zeros(top_k, device=device)
        self.step = ExpertStep(inter, width, top_k, device)
        self._combine = Combine(top_k, self.step.parts, width)
        self._bound: dict[tuple[int, int], BoundStep] = {}
        self._bound_sums: dict[int, Callable[[], None]] = {}
        n_layers, n_experts = table.host.shape
        self._seen = np.empty(n_experts, np.int64)
        self._choices = PinnedArray((n_layers, top_k), np.int32, driver)
        self._missing = PinnedArray((2, top_k), np.int64, driver)  # addresses by rank; ranks, as int32
        self._missing_there = torch.zeros(2, top_k, dtype=torch.int64, device=device)
        if strategy != "pull":
            half = inter * width * 9 // 16
            self._slot_bytes = 2 * half if strategy == "whole" else half
            stride = -(-self._slot_bytes // 512) * 512
            self._banks = torch.empty(2, top_k, stride, dtype=torch.uint8, device=device)
            at = self._banks.data_ptr() + stride * np.arange(2 * top_k, dtype=np.int64).reshape(2, top_k)
            self._slots, self._slots_there = at, torch.from_numpy(at).to(device)
            self._orders = PinnedArray((2, top_k), np.int32, driver)
            self._orders_there = torch.zeros(2, top_k, dtype=torch.int32, device=device)
            self._copies = torch.cuda.Stream(device)
            self._to, self._sources, stream = at.copy(), np.zeros(top_k, np.int64), self._copies.cuda_stream
            self._batches = [CopyBatch(driver, to, self._sources, self._slot_bytes, stream) for to in self._to]
            self._done = [torch.cuda.Event(), torch.cuda.Event()]
            self._copied = [torch.cuda.Event() for _ in range(len(self.waves) + 1)]
            self._turn = 0

    def run(self, layer: int, lookup: Callable[[list[int]], Fetch]) -> int:
        """`.out` = the weighted sum of the chosen experts of a layer; how many were missing when the step began.

        lookup  called once with the ids, in rank order
        """
        if self.strategy == "pull":
            self.start(layer)
            return self.finish(layer, lookup(self.choice(layer)))
        return self._copy_and_compute(layer, lookup)

    def choice(self, layer: int) -> list[int]:
        """Wait until the card has told a layer's choice: ids in rank order.

        Raises EngineError when it does not come: then the card has failed, and the next call of torch says how.
        """
        if not wait_for_ids(self._choices.array[layer]):
            raise EngineError(f"the card did not tell which experts layer {layer} chose; it may have failed")
        return self._choices.array[layer].tolist()

    # pull

    def start(self, layer: int) -> None:
        """Queue the kernel for all experts the table has, and the sum. A CUDA graph can hold it: see `expect`."""
        self.expect(layer)
        self._bind(layer, 0).launch(amount=ROWS, post=self._choice_address(layer))
        self._sum(layer)

    def expect(self, layer: int) -> None:
        """Before a layer's kernel is queued, or a graph with it is replayed: its choice is not known yet."""
        self._choices.array[layer] = _UNKNOWN
        self._seen[:] = self.table.host[layer]

    def finish(self, layer: int, fetch: Fetch) -> int:
        """Queue a second launch for the chosen experts that the first had to leave out, and the sum again.

        Returns how many there were; usually none, then there is nothing to queue.
        """
        ranks = np.flatnonzero(self._seen[self._choices.array[layer]] == 0)
        if len(ranks):
            self._missing.array[0] = fetch.addresses
            self._missing.array[1].view(np.int32)[: len(ranks)] = ranks
            self._driver.copy(self._missing_there.data_ptr(), self._missing.address, 16 * self.top_k, _stream())
            fetch.wait()
            self._bind(layer, 1).launch(amount=ROWS, count=len(ranks))
            self._sum(layer)
        return len(ranks)

    # whole, grouped, rows

    def _copy_and_compute(self, layer: int, lookup: Callable[[list[int]], Fetch]) -> int:
        self.expect(layer)
        self._driver.copy(self._choice_address(layer), self.ids.data_ptr(), 4 * self.top_k, _stream())
        # Everything that does not need the choice comes before it: from here to the first copy the bus is idle.
        bank, self._turn = self._turn, 1 - self._turn
        bound, batch, waves = self._bind(layer, bank), self._batches[bank], self.waves
        self._to[bank] = self._slots[bank]
        self._copies.wait_event(self._done[bank])
        addresses, missing, wait = lookup(self.choice(layer))
        if len(missing):
            # What is there crosses the bus while the disk is read: those ranks come first, in waves of their own.
            order = np.argsort(np.isin(np.arange(self.top_k), missing), kind="stable")
            self._orders.array[bank] = order
            there, bound = self._orders_there[bank], self._bind(layer, 2 + bank)
            self._driver.copy(there.data_ptr(), self._orders.address + 4 * self.top_k * bank, 4 * self.top_k, _stream())
            self._to[bank], addresses = self._slots[bank, order], addresses[order]
            waves = [*spread(tuple(self.waves), self.top_k - len(missing)), len(missing)]
        self._sources[:] = addresses
        amount, main, first = GROUPED if self.strategy == "grouped" else ROWS, torch.cuda.current_stream(), 0
        for number, count in enumerate(waves):
            if len(missing) and number == len(waves) - 1:
                wait()
            batch.run(first, count)
            self._copied[number].record(self._copies)
            main.wait_event(self._copied[number])
            bound.launch(amount=amount, first=first, count=count)
            first += count
        self._done[bank].record(main)
        self._sum(layer)
        return len(missing)

    def _bind(self, layer: int, which: int) -> BoundStep:
        """The kernel on the buffers of a layer: `pull`'s first and second launch; banks, in rank order or another."""
        bound = self._bound.get((layer, which))
        if bound is None:
            ranks = None
            there = (self.table.device[layer], self.ids)
            if self.strategy == "pull":
                up = down = there
                if which:
                    up = down = (self._missing_there[0], self.step.all_ranks)
                    ranks = self._missing_there[1].view(torch.int32)[: self.top_k]
            else:
                up = (self._slots_there[which % 2], self.step.all_ranks)
                down = up if self.strategy == "whole" else there
                ranks = self._orders_there[which % 2] if which >= 2 else None
            bound = self.step.bind(up, down, self.ids, self._scales_2[layer], self.x, ranks)
            self._bound[layer, which] = bound
        return bound

    def _sum(self, layer: int) -> None:
        launch = self._bound_sums.get(layer)
        if launch is None:
            tensors = (self.step.partial, self.weights, self.ids, self._scales_2[layer], self.out)
            launch = self._bound_sums[layer] = self._combine.bind(*tensors)
        launch()

    def _choice_address(self, layer: int) -> int:
        return self._choices.address + 4 * layer * self.top_k

    def close(self) -> None:
        """Wait for the card and give page-locked memory back."""
        torch.cuda.synchronize()
        self._choices.close()
        self._missing.close()
        if self.strategy != "pull":
            self._orders.close()


def wait_for_ids(told: np.ndarray, timeout_s: float = _CHOICE_TIMEOUT_S) -> bool:
    """Look at int32 [n] that somebody else writes until nothing is negative. False: it took too long."""
    view, looks, deadline = memoryview(told), 0, time.monotonic() + timeout_s
    # The first and the last word come first: looking at one takes a twentieth of what numpy takes for all.
    while view[0] < 0 or view[-1] < 0 or told.min() < 0:
        looks += 1
        if looks % _LOOKS == 0:
            _let_others_run()
            if time.monotonic() > deadline:
                return False
    return True


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def spread(waves: tuple[int, ...], top_k: int) -> list[int]:
    """Waves in the same proportions for another number of experts, none empty."""
    ends = np.cumsum(waves) * top_k // sum(waves)
    counts = np.diff(ends, prepend=0)
    return [int(count) for count in counts if count]
