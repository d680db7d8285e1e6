"""What was tried and is off: each changes when work is done, never a bit of an answer, and is there to be measured.

Others found that these do not help (the shared expert first, copies on a guess, the prompt's experts kept), or take
more of a card's memory than they had (recent experts kept there). Here they can be tried on any machine, and so can
going without what does help (CUDA graphs):

    Engine(path, device="cuda", transfer="rows", vram_gib=8, trials=Trials(kept_gib=0.5, speculate=4))
"""

from __future__ import annotations

from dataclasses import dataclass

from nemolab.engine.sizes import gib_bytes
from nemolab.engine.transfers import COPYING
from nemolab.errors import EngineError


@dataclass(frozen=True)
class Trials:
    """All off by default.

    shared_first   decode: the shared expert is computed before the router decides, not while the choice travels
    prompt_enters  a prompt's experts enter the RAM cache (else they pass by and leave it as it is)
    kept_gib       decode, transfers that copy: so much more of the card's memory keeps what was copied last, and what
                   is still there is not copied again. If that is fewer experts than a token uses in all layers,
                   nothing is ever found again
    speculate      decode, transfers that copy: so many of the experts guessed for the next MoE layer, as far as they
                   are cached, are copied to the card one layer early
    no_graphs      decode: every kernel is queued by itself, each token; else segments of them are CUDA graphs
    Raises EngineError for what is no such value.
    """

    shared_first: bool = False
    prompt_enters: bool = False
    kept_gib: float = 0.0
    speculate: int = 0
    no_graphs: bool = False

    def __post_init__(self):
        for name in ("shared_first", "prompt_enters", "no_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise EngineError(f"trials: {name} is {getattr(self, name)!r}; True or False is needed")
        count = self.speculate
        gib_bytes("trials: kept_gib", self.kept_gib, "a number of GiB is needed, 0 for none", or_none=True)
        object.__setattr__(self, "kept_gib", float(self.kept_gib))  # as rows of measurements can hold it
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise EngineError(f"trials: speculate is {count!r}; a whole number of guesses is needed, 0 for none")

    @property
    def kept_bytes(self) -> int:
        return int(self.kept_gib * 2**30)

    @property
    def keeps(self) -> bool:
        """Something copied outlives the layer it was copied for."""
        return bool(self.kept_bytes or self.speculate)

    def check(self, device: str, transfer: str | None, reachable: int) -> None:
        """Can these be tried so? reachable: experts that a token can reach in a layer. Raises EngineError."""
        on_cards = [name for name in ("shared_first", "kept_gib", "speculate", "no_graphs") if getattr(self, name)]
        if device == "cpu" and on_cards:
            raise EngineError(f"trials: {on_cards[0]} is set, but the device is 'cpu'; it is for device='cuda'")
        if self.keeps and transfer not in COPYING:
            name = "kept_gib" if self.kept_bytes else "speculate"
            raise EngineError(
                f"trials: {name} is for transfers that copy ({', '.join(COPYING)}); 'pull' reads in place, and what "
                "it reads would have to cross the bus once more to stay on the card"
            )
        if self.speculate > reachable:
            raise EngineError(
                f"trials: speculate is {self.speculate}; a token can reach {reachable} experts in a layer, no more"
            )


NO_TRIALS = Trials()
