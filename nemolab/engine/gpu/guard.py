"""The budget of a card's memory, and passes over the layers under it: watched before, meanwhile and after.

torch is limited, the rest is watched. torch keeps to a limit by itself: an allocation beyond it fails. What the process
takes beside torch (the driver, kernels, graphs) has none, so it is measured: around prompts, tokens 1, 2, 4
and so on behind them, when kernels were compiled and graphs made, and every WATCHED_TOKENS. Then torch gets what the
budget leaves. Between two looks the process may be above its budget by what was taken beside torch meanwhile.

A figure that the driver tells of this process only tightens torch's limit: what was taken once may be taken again. One
that is a difference may count in what another program took meanwhile, so the limit follows it both ways.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from nemolab.engine.gpu.device import Usage
from nemolab.engine.gpu.non_torch import ASSUMED, DIFFERENCE, TOLD
from nemolab.engine.gpu.plan import SPARE_BYTES, CardPlan
from nemolab.errors import EngineError, StoreError
from nemolab.units import show_bytes

WATCHED_TOKENS = 256  # of an answer, from one look to the next at most
_KNOWN = {
    TOLD: "",
    DIFFERENCE: " (a difference: what another program took during a pass is counted, too)",
    ASSUMED: " (assumed: the driver does not tell)",
}
Result = TypeVar("Result")


class Guard:
    """Keeps a process within `plan.budget_bytes` (None: no limit) of a card, and says what is wrong where it cannot.

    Memory that does not suffice is an error of ours, and what a pass had taken is given back.
    .limit_bytes  what torch may take now, or None
    """

    def __init__(self, device, plan: CardPlan):
        self._device, self._plan, self.limit_bytes = device, plan, None
        self._steps = 0  # tokens since the last prompt
        device.expect(plan.context_bytes)
        self._limit()

    def run(self, tokens: int, what: str, compute: Callable[[], Result]) -> Result:
        """What `compute` returns: a pass of so many tokens (0: work on its own), in words `what`.

        Raises EngineError where memory ends and, before anything is computed, where the process holds more than the
        budget already.
        """
        self._steps = 0 if tokens != 1 else self._steps + 1
        watched = self.limit_bytes is not None and _is_watched(self._steps)
        advice = "a shorter conversation needs less" if tokens == 1 else "fewer tokens at once need less"
        with self._passing(watched):
            if watched:
                self._check_held()
            result = self._compute(what, compute, advice)
            if watched:
                self._limit()
        return result

    def load(self, what: str, compute: Callable[[], Result]) -> Result:
        """The same for what is to stay on the card."""
        with self._passing(watched=False):
            result = self._compute(what, compute, "allow more")
            try:
                self._limit()
                self._check_held()
            except BaseException:
                del result  # whoever keeps the error would keep it, too
                raise
        return result

    def take(self, what: str, compute: Callable[[], Result]) -> Result:
        """The same for a little more, in whatever thread: only where memory ends, that is told in the same words."""
        with self._passing(watched=False):
            return self._compute(what, compute, "let go of other conversations, or allow more")

    def close(self) -> None:
        """No limit any more, and what torch keeps of freed memory goes back. Closing twice is fine."""
        if self.limit_bytes is None:
            self._device.release()
        else:
            self._device.set_limit(None)
            self.limit_bytes = None  # not before: should that fail, the next call tries again

    @contextmanager
    def _passing(self, watched: bool) -> Iterator[None]:
        """Nobody takes what this process holds for others' meanwhile; watched: who held what before is looked at."""
        try:
            self._device.enter(watched)
            yield
        except BaseException:
            if watched:
                # What it took is ours where it fails, too; the card may have failed with it.
                with suppress(Exception):
                    self._device.look()
            raise
        finally:
            self._device.leave()

    def _compute(self, what: str, compute: Callable[[], Result], advice: str) -> Result:
        try:
            return compute()
        # torch.OutOfMemoryError is a RuntimeError; the driver's own word for kernels is another, and that for copies,
        # CUDA_ERROR_OUT_OF_MEMORY, comes as a StoreError.
        except (RuntimeError, StoreError) as problem:
            if "out of memory" not in str(problem).lower().replace("_", " "):
                raise
            said = ". ".join(str(problem).split(". ")[:2]).removesuffix(".")
            held = self._explain(advice)
            # Whoever keeps the error (a notebook does) would keep every tensor of the frames it came through.
            traceback.clear_frames(problem.__traceback__)
        self._device.release()
        raise EngineError(f"the card's memory does not suffice for {what}: {said}{held}")

    def _limit(self) -> None:
        """Give torch what the budget leaves beside everything else, as planned or, where that is more, as found."""
        if self._plan.budget_bytes is None:
            return
        usage, non_torch_bytes = self._device.look(), self._plan.context_bytes
        if usage is not None and usage.non_torch_bytes is not None:
            non_torch_bytes = max(non_torch_bytes, usage.non_torch_bytes + SPARE_BYTES)
        limit_bytes = max(0, self._plan.budget_bytes - non_torch_bytes)
        loosened = usage is not None and usage.source != TOLD and limit_bytes != self.limit_bytes
        if self.limit_bytes is None or limit_bytes < self.limit_bytes or loosened:
            self.limit_bytes = limit_bytes
            self._device.set_limit(limit_bytes)

    def _check_held(self) -> None:
        if self.limit_bytes is None or not self._is_over(self._device.look()):
            return
        self._device.release()  # torch keeps what was freed; that can go
        usage = self._device.look()
        if self._is_over(usage):
            torch_holds, beside = show_bytes(usage.reserved_bytes), show_bytes(self._non_torch(usage))
            raise EngineError(
                f"this process holds {show_bytes(self._ours(usage))} of the card's memory ({torch_holds} by torch, "
                f"{beside} beside it{_KNOWN[usage.source]}), more than the "
                f"{show_bytes(self._plan.budget_bytes)} that vram_gib allows: let go of other conversations and "
                "tensors, or allow more"
            )

    def _is_over(self, usage: Usage | None) -> bool:
        return usage is not None and self._ours(usage) > self._plan.budget_bytes

    def _ours(self, usage: Usage) -> int:
        return usage.reserved_bytes + self._non_torch(usage)

    def _non_torch(self, usage: Usage) -> int:
        return self._plan.context_bytes if usage.non_torch_bytes is None else usage.non_torch_bytes

    def _explain(self, advice: str) -> str:
        """Who holds what, and whether it was the budget that ended or the card."""
        usage = self._device.look()
        if usage is None:
            return ""
        torch_holds, beside = show_bytes(usage.reserved_bytes), show_bytes(self._non_torch(usage))
        ours = f"; torch holds {torch_holds}, {beside} are taken beside it{_KNOWN[usage.source]}"
        others_bytes = max(0, usage.used_bytes - self._ours(usage))
        card = (
            f"; other programs hold {show_bytes(others_bytes)} of the card's {show_bytes(usage.total_bytes)}, "
            f"{show_bytes(usage.free_bytes)} are free"
        )
        if self.limit_bytes is None:
            return f"{ours}{card}"
        budget = show_bytes(self._plan.budget_bytes)
        if usage.free_bytes < self.limit_bytes - usage.reserved_bytes:
            return f"{ours}, of {budget} that vram_gib allows{card}: it is the card that is full, not the budget"
        return f"{ours}, of {budget} that vram_gib allows; {advice}"


def _is_watched(steps: int) -> bool:
    """0, a power of two (taking 1 away clears its only bit), or the next of so many."""
    return steps & (steps - 1) == 0 or steps % WATCHED_TOKENS == 0
