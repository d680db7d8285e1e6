"""Where the experts that a layer chose are, or will be: asked of the cache, answered as addresses for the card."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from nemolab.engine.gpu.cache_memory import CacheMemory
from nemolab.engine.gpu.pinned import NotLocked, PinnedArray
from nemolab.errors import EngineError
from nemolab.store import ExpertCache

Made = TypeVar("Made")


class Fetch(NamedTuple):
    """What a lookup answers: where the chosen blocks are, or will be.

    addresses  int64 [top_k] by rank, in page-locked memory
    missing    ranks whose blocks are not there yet
    wait       returns once they are; to be called if any are missing
    """

    addresses: np.ndarray
    missing: Sequence[int] = ()
    wait: Callable[[], object] = lambda: None


class ExpertFetcher:
    """Fetches the experts that a layer chose, and says where the card can read them.

    Rows that the driver did not lock are copied by the CPU into a ring of page-locked memory with a place for each rank
    (the card is done with a layer's experts once the next layer's choice is known), taken when the first one turns up.
    keeper  its table is emptied, should locked memory have to be given back for the ring, and told anew
    """

    def __init__(self, cache: ExpertCache, memory: CacheMemory, keeper, device):
        self.cache, self.keeper, self._memory, self._device = cache, keeper, memory, device
        self._top_k = cache.store.config.top_k
        self._ring: PinnedArray | None = None

    def fetch(self, layer: int, experts: list[int]) -> Fetch:
        """Where the chosen experts of a layer are, or will be; by rank. Raises StoreError, EngineError."""
        memory = self._memory
        rows, missing, wait = self.cache.fetch(layer, experts)
        addresses = memory.addresses[rows]
        if max(rows) >= memory.seen_rows:
            for row in rows:
                memory.lock_row(row)
        if memory.is_late:
            memory.is_late = False
            self.cache.retell()
        if max(rows) < memory.seen_rows:
            return Fetch(addresses, missing, wait)
        ring = self._open_ring()
        hidden = [rank for rank, row in enumerate(rows) if row >= memory.seen_rows]
        sources = addresses[hidden].tolist()
        places = [ring.address + rank * memory.block_bytes for rank in hidden]
        addresses[hidden] = places

        def wait_and_copy() -> None:
            wait()
            for place, source in zip(places, sources, strict=True):
                ctypes.memmove(place, source, memory.block_bytes)

        return Fetch(addresses, sorted({*missing, *hidden}), wait_and_copy)

    def _open_ring(self) -> PinnedArray:
        if self._ring is None:
            shape, locker = (self._top_k, self._memory.block_bytes), self._device.locker
            what = f"the {self._top_k} experts of a layer"
            self._ring = self.make_locked(what, lambda: PinnedArray(shape, np.uint8, locker))
        return self._ring

    def make_locked(self, what: str, make: Callable[[], Made]) -> Made:
        """What `make` returns, which page-locks memory for `what`: where the cache has taken all, it gives some back.

        Between tokens, or once a layer's choice is known and before it is said where its experts lie, as in `fetch`:
        what the card reads by then is waited for, no graph is being captured, and whether it sees a row is asked again
        afterwards. Raises EngineError where that does not suffice.
        """
        while True:
            try:
                return make()
            except NotLocked as problem:
                # Alone: the error would hold what was made half. Where RAM is short, unlocking some of it frees none.
                refusal, may_help = str(problem), problem.by_driver
            given_bytes = 0
            if may_help:
                self._device.wait()
                self.keeper.table.clear()  # first: whatever comes in between, it names nothing that is unlocked
                try:
                    given_bytes = self._memory.give_back()
                finally:
                    self.cache.retell()
            if not given_bytes:
                raise EngineError(f"no memory is page-locked for {what}, and the card reaches no other: {refusal}")

    def start_over(self) -> None:
        """Let the card know anew what is where, from nothing. It must be done with all that was queued."""
        self.keeper.table.clear()
        self.cache.retell()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
