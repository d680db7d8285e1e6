"""What this process holds on a card beside torch's tensors: the driver's context, kernels, graphs, libraries' own.

The driver tells a process's memory where it can: outside of containers, not on Windows' driver model. Where it cannot,
ours is a difference: in use by everybody, less what others hold, less torch's own. What others hold was in use before
this process touched the card, and is looked at anew whenever nothing of ours is under way (`begin`), so that programs
which come and go between passes are not taken for ours. What another program takes while a pass of ours runs cannot be
told from ours: it is counted in until the difference falls again. What goes between passes is taken for others' as far
as they held any, and for ours beyond that: so ours is rather too much than too little. Whoever reads the figure is told
that it is a difference (`source`), and a limit that follows from it is loosened when it falls.
"""

from __future__ import annotations

from functools import cache

from nemolab.system.nvml import CardMeter

TOLD, DIFFERENCE, ASSUMED = "told by the driver", "by difference", "assumed"


class Beside:
    """One card's account, for as long as the process lives.

    meter    a CardMeter; None: nobody tells
    .bytes   held beside torch, as last found; None: not known. .peak_bytes  the most that was found
    .source  how that is known: TOLD, DIFFERENCE or ASSUMED; .why_assumed  in words, where nobody tells
    """

    def __init__(self, meter: CardMeter | None, why_assumed: str = ""):
        self._meter, self.why_assumed = meter, why_assumed
        self.bytes, self.source, self._others_bytes = None, ASSUMED, 0
        # A container may show other processes under numbers of its own: then one of them can have ours.
        self._by_process = meter is not None and (meter.touched or meter.own_bytes() is None)
        if meter is not None and not meter.touched:
            self.bytes, self.source, self._others_bytes = 0, DIFFERENCE, meter.used_bytes()
        elif meter is not None:
            self.why_assumed = "this process used the card before, and the driver does not tell processes apart"
        self.peak_bytes = self.bytes or 0

    def begin(self, reserved_bytes: int) -> None:
        """Nothing of ours is under way: what is in use beyond what was ours is others'. reserved_bytes: torch's."""
        used_bytes, own_bytes = self._ask(reserved_bytes)
        if own_bytes is not None:
            self._note(own_bytes - reserved_bytes, TOLD)
        if used_bytes is not None and self.bytes is not None:
            self._others_bytes = max(0, used_bytes - reserved_bytes - self.bytes)

    def end(self, reserved_bytes: int) -> int | None:
        """Look again, after something that may have taken memory: `.bytes`."""
        used_bytes, own_bytes = self._ask(reserved_bytes)
        if own_bytes is not None:
            self._note(own_bytes - reserved_bytes, TOLD)
        elif used_bytes is not None and self.bytes is not None:
            self._note(max(0, used_bytes - self._others_bytes - reserved_bytes), DIFFERENCE)
        return self.bytes

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
def beside_of(index: int) -> Beside:
    """The account of a card. Asked for before a card is touched, it knows what others held then."""
    try:
        return Beside(CardMeter(index))
    except OSError as problem:
        return Beside(None, f"the driver's library does not tell: {problem}")
