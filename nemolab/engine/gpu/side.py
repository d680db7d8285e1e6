"""What an engine on a card has and one on the CPU has not: a device, a plan of its memory, a way for experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Real

from nemolab.engine.gpu.device import open_device
from nemolab.engine.gpu.guard import SPARE_BYTES, Guard
from nemolab.engine.gpu.kept import kept_bytes
from nemolab.engine.gpu.model import CardModel
from nemolab.engine.gpu.plan import CONTEXT_BYTES, CardPlan, host_dense_bytes, least_bytes, plan_card
from nemolab.engine.passes import show
from nemolab.engine.transfers import DEFAULT
from nemolab.engine.trials import Trials
from nemolab.errors import EngineError
from nemolab.progress import say
from nemolab.store import ExpertCache, Store
from nemolab.store.cache import RING
from nemolab.units import show_bytes

MOST_GIB = 2**20  # no card has as much
_PEAK = ("allocated_bytes", "reserved_bytes", "beside_bytes")


class CardSide:
    """A device, opened, with its memory planned and limited.

    .pass_tokens       longest stretch of a prompt that goes through the layers at once
    .host_bytes        it takes of RAM beside the cache: dense weights that stay there, and a page-locked ring for the
                       experts of a layer, should the driver not lock the cache itself
    Raises EngineError without a card, for trials that cannot be, and where the plan does not fit `vram_gib`.
    """

    def __init__(self, store: Store, device: str, transfer: str | None, vram_gib: float | None, trials: Trials):
        self.transfer = DEFAULT if transfer is None else transfer
        trials.check(device, self.transfer, store.config.reachable_experts)
        ring, self._trials = min(RING, store.n_experts), trials
        budget_bytes = _budget_bytes(vram_gib, lambda: least_bytes(store, ring, self.transfer))
        self.device, self._store = open_device(device), store
        total_bytes = self.device.total_bytes
        if budget_bytes is not None and total_bytes is not None and budget_bytes > total_bytes:
            raise EngineError(f"vram_gib is {vram_gib}; {self.device.name} has {total_bytes / 2**30:.1f} GiB")
        self.plan = self._make_plan(budget_bytes, ring)
        self.pass_tokens = self.plan.pass_tokens
        self.host_bytes = host_dense_bytes(store) + store.config.top_k * store.block_bytes
        self._model: CardModel | None = None
        self.guard = Guard(self.device, self.plan)

    def _make_plan(self, budget_bytes: int | None, ring: int) -> CardPlan:
        """Within the budget or, without one, within what is free; where less is free than planned, that is said."""
        usage, context_bytes, room_bytes = self.device.look(), CONTEXT_BYTES, None
        if usage is not None:
            found_bytes = usage.beside_bytes or 0  # before any kernel: the rest is still to come
            context_bytes = max(CONTEXT_BYTES, found_bytes + SPARE_BYTES)
            room_bytes = usage.free_bytes + usage.reserved_bytes - usage.allocated_bytes + found_bytes
        parts = (context_bytes, self.transfer, kept_bytes(self._trials, self.transfer, self._store))
        if budget_bytes is None:
            plan = plan_card(self._store, ring, room_bytes, *parts, f"{self.device.name} has room for")
            return replace(plan, budget_bytes=None)
        plan = plan_card(self._store, ring, budget_bytes, *parts)
        if room_bytes is not None and room_bytes < plan.total_bytes:
            say(
                f"card: {show_bytes(plan.total_bytes)} may be needed, but only {show_bytes(room_bytes)} of the "
                f"{show_bytes(usage.total_bytes)} of {self.device.name} are free: close other programs that use it"
            )
        return plan

    def make_model(self, cache: ExpertCache, team, prefetch: int) -> CardModel:
        parts = (self._store, cache, team, self.device, self.transfer, prefetch, self.guard, self._trials)
        parts += (self.plan.piece_tokens,)

        def make() -> CardModel:
            self._model = CardModel(*parts)  # before the guard looks: what it then refuses is to be closed, too
            return self._model

        return self.guard.load("this model", make)

    def memory(self) -> dict:
        """Bytes: the budget, what was planned by part, what was found by part, the peak; how much is page-locked.

        budget_bytes     all that the process may take of the card, or None
        limit_bytes      of it, torch's; less than planned once more was found beside torch
        planned          {dense, experts, state, prompt, kept, workspace, context, total}_bytes, and pass_tokens
        found            dense_bytes of weights; allocated_bytes of tensors, these included; reserved_bytes by torch;
                         beside_bytes, the driver's and libraries' (None: not known; `beside_is` says how it is known);
                         in_use_bytes by everybody; total_bytes there are
        peak             the same at its most: {allocated, reserved, beside, total}_bytes; total counts the planned
                         context where what is beside torch is not known
        kept             of a trial that keeps experts on the card: slots; experts copied, held, copied early
        prompt_copies    experts that prompts had copied to the card so far
        Without a card (device="twin") found and peak are empty but for the weights.
        """
        found, model = self.device.memory(), self._model
        peak = {name: found.pop(f"peak_{name}") for name in _PEAK if f"peak_{name}" in found}
        if peak:
            beside_bytes = peak["beside_bytes"]
            context_bytes = self.plan.context_bytes if beside_bytes is None else beside_bytes
            peak["total_bytes"] = peak["reserved_bytes"] + context_bytes
        return {
            "name": self.device.name,
            "budget_bytes": self.plan.budget_bytes,
            "limit_bytes": self.guard.limit_bytes,
            "planned": self.plan.to_dict(),
            "found": {"dense_bytes": model.nbytes if model else 0, **found},
            "peak": peak,
            "page_locked_bytes": model.memory.locked_bytes if model else 0,
            "kept": model.kept if model else {},
            "prompt_copies": model.prompt_copies if model else 0,
        }

    def close(self) -> None:
        """Before the cache's memory goes. Closing twice is fine, and closes what did not close the first time."""
        try:
            if self._model is not None:
                self._model.close()
                self._model = None  # what it holds goes back with the guard
        finally:
            try:
                self.guard.close()
            finally:
                self.device.close()


def _budget_bytes(gib: float | None, least_bytes: Callable[[], int]) -> int | None:
    if gib is None:
        return None
    if isinstance(gib, bool) or not isinstance(gib, Real) or not 0 < gib < MOST_GIB:
        least = show_bytes(least_bytes())
        raise EngineError(
            f"vram_gib is {show(gib)}; a positive number of GiB is needed, {least} or more for this model "
            f"and less than {MOST_GIB}"
        )
    return int(float(gib) * 2**30)
