"""What an engine on a card has and one on the CPU has not: a device, a plan of its memory, a way for experts."""

from __future__ import annotations

from nemolab.engine.gpu.device import open_device
from nemolab.engine.gpu.experts import TRANSFERS
from nemolab.engine.gpu.model import CardModel
from nemolab.engine.gpu.plan import host_dense_bytes, plan_card
from nemolab.errors import EngineError
from nemolab.store import ExpertCache, Store
from nemolab.store.cache import RING


class CardSide:
    """A device, opened, with its memory planned and limited.

    .pass_tokens       longest stretch of a prompt that goes through the layers at once
    .dense_bytes       of dense weights that stay in RAM
    Raises EngineError without a card, for unknown settings, and where the plan does not fit `vram_gib`.
    """

    def __init__(self, store: Store, device: str, transfer: str | None, vram_gib: float | None):
        self.transfer = "pull" if transfer is None else transfer
        if self.transfer not in TRANSFERS:
            raise EngineError(f"transfer is {transfer!r}; known are {', '.join(TRANSFERS)}")
        budget_bytes = _budget_bytes(vram_gib)
        self.device, self._store = open_device(device), store
        total_bytes = self.device.total_bytes
        if budget_bytes is not None and total_bytes is not None and budget_bytes > total_bytes:
            raise EngineError(f"vram_gib is {vram_gib}; {self.device.name} has {total_bytes / 2**30:.1f} GiB")
        self.plan = plan_card(store, min(RING, store.n_experts), budget_bytes or total_bytes)
        self.pass_tokens, self.dense_bytes = self.plan.pass_tokens, host_dense_bytes(store)
        self._model: CardModel | None = None
        self._limited = budget_bytes is not None
        if self._limited:
            self.device.set_limit(self.plan.limit_bytes)

    def make_model(self, cache: ExpertCache, team, prefetch: int) -> CardModel:
        self._model = CardModel(self._store, cache, team, self.device, self.transfer, prefetch)
        return self._model

    def memory(self) -> dict:
        """Bytes on the card, planned and found; and how much of the cache is page-locked."""
        locked_bytes = self._model.memory.locked_bytes if self._model else 0
        return {**self.plan.to_dict(), **self.device.memory(), "page_locked_bytes": locked_bytes}

    def close(self) -> None:
        """Before the cache's memory goes. Closing twice is fine."""
        model, self._model = self._model, None
        if model is not None:
            model.close()
            del model
        if self._limited:
            self._limited = False
            self.device.set_limit(None)


def _budget_bytes(gib: float | None) -> int | None:
    if gib is None:
        return None
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 < gib < 2**20:
        raise EngineError(f"vram_gib is {gib!r}; a positive number of GiB is needed")
    return int(gib * 2**30)
