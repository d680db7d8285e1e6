"""Two trials for the transfers that copy: slots on the card that keep what was copied, and copies on a guess.

In place of two banks used in turn, slots are a cache: what a token's expert needs copied may lie there still, from the
last token that used it or from a guess made one layer early, and then it is not copied again. The least recently used
leaves. A slot is written only when the kernels that read it are done: those of a layer are once the next layer's choice
is known, and the slots of the layer under way are the most recently used, so they are not the ones that leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nemolab.engine.gpu.expert_fetch import Fetch
from nemolab.engine.gpu.moe_step import MoeStep, slots_bytes, spread
from nemolab.engine.gpu.pinned import PinnedArray
from nemolab.engine.trials import Trials

_HELD, _COPIED, _MISSING = range(3)  # in this order experts are computed: what is there, what crosses the bus, the disk


class KeptSlots:
    """Which of a number of slots holds which block; a block is any number."""

    def __init__(self, count: int):
        self._free, self._slot_of = list(range(count))[::-1], {}  # the least recently used block first

    def __contains__(self, block: int) -> bool:
        return block in self._slot_of

    def take(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Slots for blocks, and which of these (by their places) do not hold theirs yet: they are to be filled now."""
        slot_of, lacking = self._slot_of, []
        for block in blocks:  # first all that are there, so that none of them leaves for another
            if block in slot_of:
                slot_of[block] = slot_of.pop(block)
        for place, block in enumerate(blocks):
            if block not in slot_of:
                slot_of[block] = self._free.pop() if self._free else slot_of.pop(next(iter(slot_of)))
                lacking.append(place)
        return [slot_of[block] for block in blocks], lacking

    def clear(self) -> None:
        self._free += self._slot_of.values()
        self._slot_of.clear()


class KeepingStep(MoeStep):
    """A MoeStep whose slots keep what was copied.

    slots  how many, twice top_k or more
    .copied, .held  experts that were copied for a choice, and that were there already, so far
    .early, .early_used  experts that were copied on a guess, and those of them that were chosen then
    """

    def __init__(self, strategy: str, inter: int, width: int, top_k: int, table, scales_2, device, operators, *, slots):
        super().__init__(strategy, inter, width, top_k, table, scales_2, device, operators, slots=slots)
        self._kept = KeptSlots(slots)
        self._slot_at = self._banks.data_ptr() + self._banks.stride(0) * np.arange(slots, dtype=np.int64)
        self._ups = PinnedArray((2, top_k), np.int64, device.locker)  # by bank: the slots of a layer's experts by rank
        self._early_done = device.new_event()
        # Blocks whose copies may be under way: those nobody waits for yet, and those that the layer before waited for.
        self._early_blocks, self._settling = set(), set()
        self.copied = self.held = self.early = self.early_used = 0

    @property
    def counts(self) -> dict[str, int]:
        """Slots, and what happened so far, in experts."""
        counted = {name: getattr(self, name) for name in ("copied", "held", "early", "early_used")}
        return {"slots": len(self._slot_at)} | counted

    def _copy_and_compute(self, layer: int, fetch: Fetch) -> int:
        addresses, missing, wait = fetch
        bank, first_block, top_k = self._turn, layer * self.table.host.shape[1], self.top_k
        chosen = (first_block + self._choices.array[layer]).tolist()
        slots, lacking = self._kept.take(chosen)
        kinds = np.full(top_k, _HELD)
        kinds[lacking] = _COPIED
        kinds[list(missing)] = _MISSING  # its slot may hold what is copied of it, but not what is read in place
        order = np.argsort(kinds, kind="stable")
        held, copied, late = np.bincount(kinds, minlength=3).tolist()
        self.held, self.copied = self.held + held, self.copied + copied + late
        self._ups.array[bank] = self._slot_at[slots]
        self._device.copy(self._slots_there[bank].data_ptr(), self._ups.address + 8 * top_k * bank, 8 * top_k)
        self._to[bank], self._sources[:] = self._ups.array[bank, order], addresses[order]
        if self._early_blocks:
            self._device.main_stream().wait_event(self._early_done)
            self.early_used += sum(chosen[place] in self._early_blocks for place in np.flatnonzero(kinds == _HELD))
        self._early_blocks, self._settling = set(), self._early_blocks
        waves = [*spread(tuple(self.waves), copied), *([late] if late else [])]

        def bind():
            self._tell_places(addresses, order)
            return self._bind(layer, bank, places=True), late

        self._run_waves(waves, bind, wait if late else None, held)
        self._sum(layer)
        return late

    def look_ahead(self, layer: int, experts: Sequence[int], find: Callable[[int], int]) -> None:
        """Begin to copy experts that a layer may choose, as far as they are cached and not on the card.

        To be called between the layer before and that one. find  says where a block is in page-locked memory, or 0
        """
        first_block = layer * self.table.host.shape[1]
        sources = {first_block + expert: find(first_block + expert) for expert in experts}
        blocks = [block for block, source in sources.items() if source]
        slots, lacking = self._kept.take(blocks)
        for place in lacking:
            to = int(self._slot_at[slots[place]])
            self._device.copy(to, sources[blocks[place]], self._copied_bytes, self._copies)
            self._early_blocks.add(blocks[place])
        self.early += len(lacking)
        if lacking:
            self._early_done.record(self._copies)

    def let_go(self, blocks: Sequence[int]) -> None:
        """These blocks' memory is about to be used for others: no copy may be reading it any more."""
        if not (self._early_blocks | self._settling).isdisjoint(blocks):
            self._early_done.synchronize()

    def start_over(self) -> None:
        self._kept.clear()
        self._early_blocks, self._settling = set(), set()

    def close(self) -> None:
        super().close()
        self._ups.close()


class CopyWatcher:
    """Stands before a `TableKeeper` and lets copies on a guess end before the memory they read is used for others."""

    def __init__(self, keeper, step: KeepingStep):
        self._keeper, self._step = keeper, step
        self.came = keeper.came

    def left(self, blocks: list[int]) -> None:
        self._step.let_go(blocks)
        self._keeper.left(blocks)


def make_step(trials: Trials, strategy: str, store, table, scales_2, device, operators) -> MoeStep:
    """The step of a model: the plain one, unless a trial has it keep something."""
    parts = (strategy, *store.expert_shape, store.config.top_k, table, scales_2, device, operators)
    return KeepingStep(*parts, slots=_count_slots(trials, strategy, store)) if trials.keeps else MoeStep(*parts)


def kept_bytes(trials: Trials, strategy: str, store) -> int:
    """Of the card's memory that a trial takes beside the slots that a step has anyway."""
    if not trials.keeps:
        return 0
    return (_count_slots(trials, strategy, store) - 2 * store.config.top_k) * _slot_bytes(strategy, store)


def _count_slots(trials: Trials, strategy: str, store) -> int:
    """Those that a step has anyway and as many as the trial's GiB hold, or its guesses take."""
    return 2 * store.config.top_k + max(trials.speculate, trials.kept_bytes // _slot_bytes(strategy, store))


def _slot_bytes(strategy: str, store) -> int:
    return slots_bytes(strategy, *store.expert_shape, 1) // 2
