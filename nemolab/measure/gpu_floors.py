"""How work on a card is timed, and how fast bytes reach it: the floors of the run that needs them.

Bytes come over the bus, copied from page-locked memory or read there in place, or from the card's own memory. What a
floor is measured with does nothing else: a plain copy, a kernel that only adds up what it reads.
GB are 10^9 bytes. Where twins on the CPU run in a card's place, its memory does too (`open_bus`): such figures show
that a benchmark works, and say nothing about a card.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from nemolab.errors import EngineError, UsageError

BUFFER_BYTES = 2**30  # read by a floor: well above any card's cache
WARM_S = 0.1  # of work before anything counts: an idle card takes a while to raise its clocks
STREAM_BYTES = 256 * 2**20  # read in place for a sample, from one half of a stretch of memory and the other in turn
COPY_BYTES = 48 * 2**20  # of one copy
COPIES = 8
STAND_IN_BYTES = 4 * 2**20  # of the CPU's memory in the place of all these


def need_card() -> torch.device:
    """The current CUDA device. Raises EngineError where there is none."""
    from nemolab.engine.gpu.device import check_device

    try:
        check_device("cuda")
    except EngineError as problem:
        raise EngineError(f"this benchmark needs a CUDA card; {problem}") from None
    return torch.device("cuda", torch.cuda.current_device())


def time_graph(calls: Sequence[Callable[[], object]], repeats: int = 9, warm_s: float = WARM_S) -> list[float]:
    """Seconds a call, a sample a replay: all calls, one after another, as one CUDA graph.

    Many short launches are timed without the time Python takes to make them. Give calls on different buffers, together
    well above the card's cache, and no call finds its own bytes there.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()  # compiles what has to be compiled
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return [seconds / len(calls) for seconds in time_events(graph.replay, repeats, warm_s)]


def time_events(call: Callable[[], object], repeats: int = 9, warm_s: float = WARM_S) -> list[float]:
    """Seconds of each call between two events on the card, after warm_s seconds of the same work."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    started = time.perf_counter()
    while True:
        call()
        torch.cuda.synchronize()
        if time.perf_counter() - started >= warm_s:
            break
    call()  # not waited for: the card is busy when the first mark comes, as at all others
    for before, after in marks:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in marks]


def device_read_gb_s(repeats: int = 9, buffer_bytes: int = BUFFER_BYTES) -> list[float]:
    """GB/s of a kernel that reads the card's own memory and adds it up, nothing else."""
    from nemolab.kernels.gpu.stream import stream

    device = need_card()
    buffer = torch.randint(-100, 100, (buffer_bytes // 16 * 4,), dtype=torch.int32, device=device)
    programs = 32 * torch.cuda.get_device_properties(device).multi_processor_count
    sums = torch.empty(programs, dtype=torch.int32, device=device)
    seconds = time_events(lambda: stream(buffer.data_ptr(), buffer.numel(), sums), repeats)
    return [buffer.nbytes / second / 1e9 for second in seconds]


class Bus(Protocol):
    """Between the memory of the host and a card: a sample a call, in GB/s."""

    def copy_gb_s(self) -> float: ...

    def in_place_gb_s(self) -> float: ...


class CardBus:
    """The bus of the current card, measured on a stretch of page-locked memory.

    address, nbytes  of the stretch, 2 * STREAM_BYTES or more
    chunk_bytes      of one registration, whose border no copy may cross
    .copied          what a sample of copies moves: so many "pieces" of so many "bytes"
    """

    def __init__(self, driver, address: int, nbytes: int, chunk_bytes: int):
        card = need_card()
        if nbytes < 2 * STREAM_BYTES:
            raise UsageError(
                f"a bus is measured on {2 * STREAM_BYTES:,} bytes of page-locked memory, not on {nbytes:,}"
            )
        self._driver, self._address = driver, address
        self._copy_bytes = min(COPY_BYTES, chunk_bytes)
        in_chunk, ends = chunk_bytes // self._copy_bytes, nbytes - self._copy_bytes
        starts = (number // in_chunk * chunk_bytes + number % in_chunk * self._copy_bytes for number in range(COPIES))
        self._places = [address + start for start in starts if start <= ends]
        self.copied = {"pieces": len(self._places), "bytes": self._copy_bytes}
        self._copied_to = torch.empty(self._copy_bytes, dtype=torch.uint8, device=card)
        programs = 4 * torch.cuda.get_device_properties(card).multi_processor_count
        self._sums = torch.empty(programs, dtype=torch.int32, device=card)
        self._turn = 0

    def copy_gb_s(self) -> float:
        """A plain copy from page-locked memory to the card."""
        stream = torch.cuda.current_stream().cuda_stream

        def copies():
            for place in self._places:
                self._driver.copy(self._copied_to.data_ptr(), place, self._copy_bytes, stream)

        return len(self._places) * self._copy_bytes / _event_seconds(copies) / 1e9

    def in_place_gb_s(self) -> float:
        """A kernel that adds up what it reads in page-locked memory, the first and the second half of it in turn."""
        from nemolab.kernels.gpu.stream import stream

        self._turn += 1
        place = self._address + self._turn % 2 * STREAM_BYTES
        read = _event_seconds(lambda: stream(place, STREAM_BYTES // 4, self._sums, num_warps=8))
        return STREAM_BYTES / read / 1e9


class StandInBus:
    """Where the CPU stands in a card's place: copies within its memory, and torch's sum of it."""

    def __init__(self):
        self._from, self._to = torch.ones(2, STAND_IN_BYTES // 4, dtype=torch.int32)

    def copy_gb_s(self) -> float:
        return STAND_IN_BYTES / _wall_seconds(lambda: self._to.copy_(self._from)) / 1e9

    def in_place_gb_s(self) -> float:
        return STAND_IN_BYTES / _wall_seconds(self._from.sum) / 1e9


@contextmanager
def open_bus(device) -> Iterator[Bus]:
    """The bus of a device of `engine.gpu.device`, with page-locked memory of its own while the block runs.

    Raises EngineError where the driver does not lock it.
    """
    from nemolab.store.arena import Arena
    from nemolab.store.direct_io import address
    from nemolab.store.page_lock import CHUNK_BYTES, PageLock

    if device.torch_device.type != "cuda":
        yield StandInBus()
        return
    arena = Arena(2 * STREAM_BYTES // CHUNK_BYTES, CHUNK_BYTES)
    lock = PageLock(address(arena.rows), arena.reserved_bytes, CHUNK_BYTES, device.locker)
    try:
        arena.rows[:] = 1  # written, so that it lies in memory of its own instead of in the one page of zeros
        problem = lock.grow(arena.reserved_bytes)
        if problem is not None:
            raise EngineError(f"{arena.reserved_bytes} bytes to measure the bus with: {problem}")
        yield CardBus(device.locker, address(arena.rows), arena.reserved_bytes, lock.chunk_bytes)
    finally:
        device.wait()  # nothing may be reading it any more
        lock.close()
        arena.close()


def own_read_gb_s(device, repeats: int) -> list[float]:
    """`device_read_gb_s` of a device of `engine.gpu.device`, or of the CPU's memory in its place."""
    if device.torch_device.type == "cuda":
        return device_read_gb_s(repeats)
    bus = StandInBus()
    return [bus.in_place_gb_s() for _ in range(repeats)]


def _event_seconds(call: Callable[[], object]) -> float:
    """Of queued work, between two events on the card; once before, not counted."""
    call()
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    return 1e-3 * begun.elapsed_time(ended)


def _wall_seconds(call: Callable[[], object]) -> float:
    call()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
