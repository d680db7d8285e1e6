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

from collections.abc import Callable, Sequence

import numpy as np
import torch

from nemolab.engine.gpu.expert_fetch import Fetch
from nemolab.engine.gpu.pinned import UNKNOWN, PinnedArray, wait_for_ids
from nemolab.engine.gpu.table import ExpertTable
from nemolab.engine.transfers import COPYING, TRANSFERS
from nemolab.errors import EngineError
from nemolab.kernels.gpu.expert_step import GROUPED, ROWS
from nemolab.store.layout import BlockLayout
from nemolab.store.page_lock import CopyBatch

# Experts in each wave, of 22. A first wave that is small starts the kernel early, a last one that is small leaves
# little to compute once the bus is done; `nemolab bench moe-step` times them, notebooks/LOG.md has what was found.
_WAVES = {"whole": (4, 11, 5, 2), "grouped": (4, 7, 7, 4), "rows": (4, 9, 6, 3)}
_ALIGNED = 512  # bytes a slot begins at a multiple of


def slots_bytes(strategy: str, inter: int, width: int, top_k: int) -> int:
    """Of the card's memory that a strategy takes for slots: two banks of whole blocks, of their ups, or nothing."""
    return 2 * top_k * _stride(strategy, inter, width)


def _stride(strategy: str, inter: int, width: int) -> int:
    return -(-_copied_bytes(strategy, inter, width) // _ALIGNED) * _ALIGNED


def _copied_bytes(strategy: str, inter: int, width: int) -> int:
    """Of a block."""
    form = BlockLayout("neuron", inter, width)
    if strategy not in COPYING:
        return 0
    return form.payload_bytes if strategy == "whole" else form.up_bytes


class MoeStep:
    """The step of one model on one card, by one strategy.

    inter, width        of an expert; top_k; table  where experts lie
    scales_2            float32 [layers, experts, 2] on the card
    device, operators   as of `engine.gpu.device` and `engine.gpu.operators`
    waves               experts of each wave of copies, by default a share of top_k
    slots               that copies go to, by default two banks of top_k
    .x, .out            float32 [X]; .ids int32 [top_k], .weights float32 [top_k]: what a step reads and writes, always
                        the same buffers, so that it can be part of a CUDA graph
    A layer is `expect`, `tell` once ids are queued, `start` once x is too, `choice`, `finish`; `tell` and `start` queue
    the same every time and may lie in a CUDA graph. `run` is all of them.
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
        device,
        operators,
        waves: tuple[int, ...] | None = None,
        slots: int | None = None,
    ):
        if strategy not in TRANSFERS:
            raise EngineError(f"unknown transfer strategy {strategy!r}; known: {', '.join(TRANSFERS)}")
        self.waves = list(waves or spread(_WAVES.get(strategy, (1,)), top_k))
        if sum(self.waves) != top_k or min(self.waves) < 1:
            raise EngineError(f"waves of {self.waves} experts do not add up to {top_k}")
        self.strategy, self.top_k, self.table = strategy, top_k, table
        self._scales_2, self._device = scales_2, device
        there = device.torch_device
        self.x, self.out = torch.zeros(2, width, device=there)
        self.ids = torch.zeros(top_k, dtype=torch.int32, device=there)
        self.weights = torch.zeros(top_k, device=there)
        self.step = operators.ExpertStep(inter, width, top_k, there)
        self._combine = operators.Combine(top_k, self.step.parts, width)
        self._bound: dict[tuple[int, int, bool], object] = {}
        self._bound_sums: dict[int, Callable[[], None]] = {}
        n_layers, n_experts = table.host.shape
        self._seen = np.empty(n_experts, np.int64)
        self._choices = PinnedArray((n_layers, top_k), np.int32, device.locker)
        # By bank, of a layer with experts that the table does not have: addresses by rank; ranks in order, as int32.
        self._told = PinnedArray((2, 2, top_k), np.int64, device.locker)
        self._told_there = torch.zeros(2, 2, top_k, dtype=torch.int64, device=there)
        self._turn, self._rank_order = 0, np.arange(top_k)
        if slots is not None and slots < 2 * top_k:
            raise EngineError(f"{slots} slots on the card; two banks of {top_k} are needed at least")
        if strategy in COPYING:
            stride = _stride(strategy, inter, width)
            self._banks = torch.empty(slots or 2 * top_k, stride, dtype=torch.uint8, device=there)
            at = self._banks.data_ptr() + stride * np.arange(2 * top_k, dtype=np.int64).reshape(2, top_k)
            self._slots, self._slots_there = at, torch.from_numpy(at.copy()).to(there)
            self._copies = device.new_stream()
            self._to, self._sources = at.copy(), np.zeros(top_k, np.int64)
            self._copied_bytes, stream = _copied_bytes(strategy, inter, width), self._copies.cuda_stream
            self._batches = [CopyBatch(device.locker, to, self._sources, self._copied_bytes, stream) for to in self._to]
            self._done = [device.new_event(), device.new_event()]
            self._copied = [device.new_event() for _ in range(len(self.waves) + 1)]

    def run(self, layer: int, lookup: Callable[[list[int]], Fetch]) -> int:
        """`.out` = the weighted sum of the chosen experts of a layer; how many came late.

        lookup  called once with the ids, in rank order
        """
        self.expect(layer)
        self.tell(layer)
        self.start(layer)
        return self.finish(layer, lookup(self.choice(layer)))

    def expect(self, layer: int) -> None:
        """Before a layer's work is queued, or a graph with it is replayed: its choice is not known yet.

        Everything that does not need the choice comes before it: from there to the first copy the bus is idle.
        """
        self._choices.array[layer] = UNKNOWN
        self._turn = 1 - self._turn
        self.table.send(layer)
        self._seen[:] = self.table.host[layer]  # as the card has it: the table changes while this layer is computed
        if self.strategy != "pull":
            self._to[self._turn] = self._slots[self._turn]
            self._copies.wait_event(self._done[self._turn])

    def tell(self, layer: int) -> None:
        """Queue the way of `.ids` to the CPU, where no kernel does that by itself."""
        if self.strategy != "pull":
            self._device.copy(self._choice_address(layer), self.ids.data_ptr(), 4 * self.top_k)

    def start(self, layer: int) -> None:
        """Queue the kernel for all experts the table has, and the sum, where nothing is copied."""
        if self.strategy == "pull":
            self._bind(layer, 0).launch(amount=ROWS, post=self._choice_address(layer))
            self._sum(layer)

    def choice(self, layer: int) -> list[int]:
        """Wait until the card has told a layer's choice: ids in rank order.

        Raises EngineError when it does not come, or what torch says of a card that has failed.
        """
        if not wait_for_ids(self._choices.array[layer], self._device.main_stream().query):
            raise EngineError(f"the card did not tell which experts layer {layer} chose; it may have failed")
        return self._choices.array[layer].tolist()

    def finish(self, layer: int, fetch: Fetch) -> int:
        """Queue what was not there when the layer's work was queued, and the sum. How many experts that were.

        With `pull` usually none: then there is nothing to queue.
        """
        if self.strategy == "pull":
            return self._add_late(layer, fetch)
        return self._copy_and_compute(layer, fetch)

    def _add_late(self, layer: int, fetch: Fetch) -> int:
        """A second launch for the experts that the first had to leave out."""
        late = self._not_sent(layer, fetch.missing)
        if late:
            self._tell_places(fetch.addresses, late)
            if fetch.missing:
                fetch.wait()
            self._bind(layer, self._turn, places=True).launch(amount=ROWS, count=len(late))
            self._sum(layer)
        return len(late)

    def _copy_and_compute(self, layer: int, fetch: Fetch) -> int:
        addresses, missing, wait = fetch
        bank, waves, order = self._turn, self.waves, self._rank_order
        if missing:
            # What is there crosses the bus while the disk is read: those ranks come first, in waves of their own.
            order = np.argsort(np.isin(order, missing), kind="stable")
            self._to[bank] = self._slots[bank, order]
            waves = [*spread(tuple(self.waves), self.top_k - len(missing)), len(missing)]

        def bind():
            late = missing if self.strategy == "whole" else self._not_sent(layer, missing)
            if late:
                self._tell_places(addresses, order)
            return self._bind(layer, bank, places=bool(late)), len(late)

        self._sources[:] = addresses[order]
        late = self._run_waves(waves, bind, wait if missing else None)
        self._sum(layer)
        return late

    def _run_waves(self, waves: Sequence[int], bind: Callable, wait: Callable | None, held: int = 0) -> int:
        """Queue copies and kernels of a layer's experts, wave by wave, each kernel behind the copies of its wave.

        waves  experts of each; held  come before them: of these nothing is copied
        bind   answers the kernel to launch, and how many experts come late, which is returned: it is asked once the
               first copies are queued, since until then the bus is idle
        wait   comes before the last wave, whose blocks are being read, or None
        """
        amount, main = GROUPED if self.strategy == "grouped" else ROWS, self._device.main_stream()
        bound, first = None, held
        if held:
            bound, late = bind()
            bound.launch(amount=amount, first=0, count=held)
        for number, count in enumerate(waves):
            if wait and number == len(waves) - 1:
                wait()
            self._batches[self._turn].run(first, count)
            if bound is None:
                bound, late = bind()
            self._copied[number].record(self._copies)
            main.wait_event(self._copied[number])
            bound.launch(amount=amount, first=first, count=count)
            first += count
        self._done[self._turn].record(main)
        return late

    def _not_sent(self, layer: int, missing: Sequence[int]) -> list[int]:
        """Ranks of a layer's choice that the card's table does not name, and those that are missing."""
        late = np.flatnonzero(self._seen[self._choices.array[layer]] == 0).tolist()
        return sorted({*late, *missing}) if missing else late

    def _tell_places(self, addresses: np.ndarray, ranks: Sequence[int]) -> None:
        """Queue the way of addresses, and of ranks in the order they are computed in, to the card: of this bank."""
        bank = self._turn
        told = self._told.array[bank]
        told[0] = addresses
        told[1].view(np.int32)[: len(ranks)] = ranks
        size = 16 * self.top_k
        self._device.copy(self._told_there[bank].data_ptr(), self._told.address + size * bank, size)

    def _bind(self, layer: int, bank: int, places: bool = False):
        """The kernel on a layer's buffers, with a bank of slots where the strategy has any.

        places  experts lie where `_tell_places` said, in the order it said; else where the table says, by rank
        """
        bound = self._bound.get((layer, bank, places))
        if bound is None:
            ranks, down = None, (self.table.device[layer], self.ids)
            if places:
                down = (self._told_there[bank, 0], self.step.all_ranks)
                ranks = self._told_there[bank, 1].view(torch.int32)[: self.top_k]
            up = (self._slots_there[bank], self.step.all_ranks) if self.strategy in COPYING else down
            down = up if self.strategy == "whole" else down
            bound = self.step.bind(up, down, self.ids, self._scales_2[layer], self.x, ranks)
            self._bound[layer, bank, places] = bound
        return bound

    def _sum(self, layer: int) -> None:
        launch = self._bound_sums.get(layer)
        if launch is None:
            tensors = (self.step.partial, self.weights, self.ids, self._scales_2[layer], self.out)
            launch = self._bound_sums[layer] = self._combine.bind(*tensors)
        launch()

    def _choice_address(self, layer: int) -> int:
        return self._choices.address + 4 * layer * self.top_k

    def start_over(self) -> None:
        """After a token that broke off, once the card is done with it: here no step needs what one before it left."""

    def close(self) -> None:
        """Wait for the card and give page-locked memory back. Closing twice is fine."""
        self._device.wait()
        self._choices.close()
        self._told.close()


def spread(waves: tuple[int, ...], top_k: int) -> list[int]:
    """Waves in the same proportions for another number of experts, none empty."""
    ends = np.cumsum(waves) * top_k // sum(waves)
    counts = np.diff(ends, prepend=0)
    return [int(count) for count in counts if count]
