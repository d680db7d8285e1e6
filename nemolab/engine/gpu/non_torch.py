"""What this process holds on a card beside torch's tensors: the driver's context, kernels, graphs, libraries' own.

The driver tells a process's memory where it can: outside of containers, not on Windows' driver model. Where it cannot,
ours is a difference: in use by everybody, less what others hold, less torch's own. What others hold was in use before
this process touched the card, and is looked at anew whenever no pass of ours is under way, so that programs which come
and go between passes are not taken for ours. While one is, ours cannot be told from others':

    more in use   is ours, until the difference falls again
    less in use   was ours as far as ours was more than plans give it (`expected_bytes`), and others' beyond that: what
                  we hold we mostly keep, and another program that ends must not hide it

What goes between passes is taken for others' as far as they held any, and for ours beyond that. So ours is rather too
much than too little; too little is counted at most of what no plan expected. Whoever reads the figure is told that it
is a difference (`source`), and a limit that follows from it is loosened when it falls.
"""

from __future__ import annotations

from functools import cache
from threading import RLock, get_ident

from nemolab.system.nvml import CardMeter

TOLD, DIFFERENCE, ASSUMED = "told by the driver", "by difference", "assumed"


class NonTorchMemory:
    """One card's account, for as long as the process lives, shared by all engines on it: any thread may call.

    meter    a CardMeter; None: nobody tells
    .expected_bytes  as much is ours for good once it was found; None: all
    .bytes   held beside torch, as last found; None: not known. .peak_bytes  the most that was found
    .source  how that is known: TOLD, DIFFERENCE or ASSUMED; .why_assumed  in words, where nobody tells
    """

    def __init__(self, meter: CardMeter | None, why_assumed: str = ""):
        self._meter, self.why_assumed = meter, why_assumed
        self.bytes, self.source, self._others_bytes = None, ASSUMED, 0
        self.expected_bytes: int | None = None
        self._lock, self._settled_bytes = RLock(), 0  # settled: what is ours whatever goes during a pass
        # By thread: what an interrupt leaves behind goes with the thread's next pass.
        self._passing: set[int] = set()
        # A container may show other processes under numbers of its own: then one of them can have ours.
        self._by_process = meter is not None and (meter.touched or meter.own_bytes() is None)
        if meter is not None and not meter.touched:
            self.bytes, self.source, self._others_bytes = 0, DIFFERENCE, meter.used_bytes()
        elif meter is not None:
            self.why_assumed = "this process used the card before, and the driver does not tell processes apart"
        self.peak_bytes = self.bytes or 0

    def expect(self, nbytes: int) -> None:
        """So much is planned for what is beside torch; of several plans, the most counts."""
        self.expected_bytes = max(self.expected_bytes or 0, nbytes)

    def enter(self, reserved_bytes: int | None = None) -> None:
        """A pass of this thread begins. reserved_bytes: torch's, to look who holds what now, unless another runs."""
        with self._lock:
            self._passing.discard(get_ident())
            if reserved_bytes is not None and not self._passing:
                self._begin(reserved_bytes)
            self._passing.add(get_ident())

    def leave(self) -> None:
        """It is over. What it took must have been looked at before (`look`), else it may be taken for others'."""
        self._passing.discard(get_ident())

    def look(self, reserved_bytes: int) -> int | None:
        """Look again: `.bytes`. Outside of passes what has come is others', during one it is ours."""
        with self._lock:
            if not self._passing:
                self._begin(reserved_bytes)
                return self.bytes
            used_bytes, own_bytes = self._ask(reserved_bytes)
            if own_bytes is not None:
                self._note(own_bytes - reserved_bytes, TOLD)
            elif used_bytes is not None and self.bytes is not None:
                non_torch_bytes = max(0, used_bytes - reserved_bytes)  # everybody's
                self._note(
                    max(non_torch_bytes - self._others_bytes, min(self._settled_bytes, non_torch_bytes)), DIFFERENCE
                )
                self._others_bytes = non_torch_bytes - self.bytes
            return self.bytes

    def _begin(self, reserved_bytes: int) -> None:
        """Nothing of ours is under way: what is in use beyond what was ours is others'."""
        used_bytes, own_bytes = self._ask(reserved_bytes)
        if own_bytes is not None:
            self._note(own_bytes - reserved_bytes, TOLD)
        if used_bytes is None or self.bytes is None:
            return
        non_torch_bytes = max(0, used_bytes - reserved_bytes)
        if own_bytes is None:
            self.bytes = min(self.bytes, non_torch_bytes)
        self._others_bytes = max(0, non_torch_bytes - self.bytes)
        self._settled_bytes = self.bytes if self.expected_bytes is None else min(self.bytes, self.expected_bytes)

    def _note(self, found_bytes: int, source: str) -> None:
        self.bytes, self.source = found_bytes, source
        self.peak_bytes = max(self.peak_bytes, found_bytes)

    def _ask(self, reserved_bytes: int) -> tuple[int | None, int | None]:
        """In use by everybody; by this process, where that is told and can be true (torch's is a part of it)."""
        if self._meter is None:
            return None, None
        try:
            used_bytes = self._meter.used_bytes()
            own_bytes = self._meter.own_bytes() if self._by_process else None
        except OSError as problem:  # it told before; a driver that was restarted does not
            self._meter, self.source, self.why_assumed = None, ASSUMED, f"the driver's library failed: {problem}"
            return None, None
        return used_bytes, own_bytes if own_bytes is not None and own_bytes >= reserved_bytes else None


@cache
def non_torch_memory_of(index: int) -> NonTorchMemory:
    """The account of a card. Asked for before a card is touched, it knows what others held then."""
    try:
        return NonTorchMemory(CardMeter(index))
    except OSError as problem:
        return NonTorchMemory(None, f"the driver's library does not tell: {problem}")
