"""What an engine on a card has and one on the CPU has not: a device, a plan of its memory, a way for experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nemolab.engine.gpu.device import open_device
from nemolab.engine.gpu.guard import Guard
from nemolab.engine.gpu.kept import kept_bytes
from nemolab.engine.gpu.model import CardModel
from nemolab.engine.gpu.plan import CardPlan, context_bytes, host_dense_bytes, least_bytes, plan_card
from nemolab.engine.sizes import MOST_GIB, gib_bytes
from nemolab.engine.transfers import DEFAULT
from nemolab.engine.trials import Trials
from nemolab.errors import EngineError
from nemolab.progress import say
from nemolab.store import ExpertCache, Store
from nemolab.store.cache import RING
from nemolab.units import show_bytes

# A card called one of 8 GB has 8 GiB less what its maker and driver keep, up to a sixteenth for error correction: what
# is asked for beyond the card by no more than this is taken for the whole card.
BEYOND_PERCENT = 8
_PEAK = ("allocated_bytes", "reserved_bytes", "non_torch_bytes")


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
        try:
            self.plan = self._make_plan(self._within_card(budget_bytes, ring), ring)
        except BaseException:
            self.device.close()
            raise
        self.pass_tokens = self.plan.pass_tokens
        self.host_bytes = host_dense_bytes(store) + store.config.top_k * store.block_bytes
        self._model: CardModel | None = None
        self.guard = Guard(self.device, self.plan)

    def _within_card(self, budget_bytes: int | None, ring: int) -> int | None:
        """The budget or, where it is a little more than the card has, all of the card, which is said."""
        total_bytes, name = self.device.total_bytes, self.device.name
        if budget_bytes is None or total_bytes is None or budget_bytes <= total_bytes:
            return budget_bytes
        asked, total = show_bytes(budget_bytes), show_bytes(total_bytes)
        if budget_bytes * 100 > total_bytes * (100 + BEYOND_PERCENT):
            least = show_bytes(least_bytes(self._store, ring, self.transfer))
            raise EngineError(
                f"vram_gib asks for {asked}; {name} has {total}, and about {least} or more of them is needed for this "
                "model: ask for no more than there is"
            )
        say(f"card: vram_gib asks for {asked}, {name} has {total}: that is the budget now")
        return total_bytes

    def _make_plan(self, budget_bytes: int | None, ring: int) -> CardPlan:
        """Within the budget and, where that can be, within what is free; where less is free than planned, that is said.

        Others may let go of what they hold: then the budget counts, as it does where what is free does not suffice.
        """
        usage, room_bytes, found_bytes = self.device.look(), None, None
        if usage is not None:
            found_bytes = usage.non_torch_bytes  # before any kernel: the rest is still to come
            room_bytes = usage.free_bytes + usage.reserved_bytes - usage.allocated_bytes + (found_bytes or 0)
        kept = kept_bytes(self._trials, self.transfer, self._store)
        parts = (context_bytes(found_bytes), self.transfer, kept)
        if budget_bytes is None:
            plan = plan_card(self._store, ring, room_bytes, *parts, f"{self.device.name} has room for")
            return replace(plan, budget_bytes=None)
        plan = plan_card(self._store, ring, budget_bytes, *parts)
        if room_bytes is None or room_bytes >= plan.total_bytes:
            return plan
        free = f"only {show_bytes(room_bytes)} of the {show_bytes(usage.total_bytes)} of {self.device.name} are free"
        wanted, advice = show_bytes(plan.total_bytes), "close other programs that use it"
        try:
            shorter = replace(plan_card(self._store, ring, room_bytes, *parts), budget_bytes=budget_bytes)
        except EngineError:
            say(f"card: {wanted} may be needed, but {free}: {advice}")
            return plan
        say(
            f"card: prompts go in passes of {shorter.pass_tokens} tokens, in pieces of {shorter.piece_tokens}, since "
            f"{free}; for {plan.pass_tokens} in {plan.piece_tokens} at once {wanted} may be needed: {advice}"
        )
        return shorter

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
        planned          {dense, experts, state, prompt, kept, workspace, context, total}_bytes, with prompts in passes
                         of pass_tokens, in pieces of piece_tokens
        found            dense_bytes of weights; allocated_bytes of tensors, these included; reserved_bytes by torch;
                         non_torch_bytes, the driver's and libraries' (None: not known; `non_torch_is` says how);
                         opened_bytes of them when the card was opened; in_use_bytes by everybody; total_bytes there are
        peak             the same at its most: {allocated, reserved, non_torch, total}_bytes; total counts the planned
                         context where what is beside torch is not known
        kept             of a trial that keeps experts on the card: slots; experts copied, held, copied early
        prompt_copies    experts that prompts had copied to the card so far
        Without a card (device="twin") found and peak are empty but for the weights.
        """
        found, model = self.device.memory(), self._model
        peak = {name: found.pop(f"peak_{name}") for name in _PEAK if f"peak_{name}" in found}
        if peak:
            non_torch_bytes = peak["non_torch_bytes"]
            context_bytes = self.plan.context_bytes if non_torch_bytes is None else non_torch_bytes
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
    def needed() -> str:
        least = show_bytes(least_bytes())
        return f"a positive number of GiB is needed, {least} or more for this model and less than {MOST_GIB}"

    return None if gib is None else gib_bytes("vram_gib", gib, needed)
