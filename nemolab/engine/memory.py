"""How much memory the engine may take, and the refusal, with numbers, when it is asked for more."""

from __future__ import annotations

from dataclasses import dataclass

from nemolab.engine.passes import show
from nemolab.engine.sizes import gib_bytes
from nemolab.errors import EngineError
from nemolab.system.memory import Memory, read_memory
from nemolab.units import show_bytes


@dataclass(frozen=True)
class CacheBudget:
    """What the expert cache may take, and what was known when that was decided.

    blocks       experts it can hold, no more than the store has
    size_bytes   of these blocks
    beside_bytes what comes on top: the dense weights and the two banks of prompt experts
    memory       as the system told it then
    """

    blocks: int
    size_bytes: int
    beside_bytes: int
    memory: Memory

    def line(self) -> str:
        """The answer in one line, for stderr."""
        return (
            f"cache: {self.blocks:,} blocks, {show_bytes(self.size_bytes)} of "
            f"{show_bytes(self.memory.available_bytes)} available (limit: {self.memory.tightest.name}), "
            f"{show_bytes(self.memory.reserve_bytes)} kept free"
        )

    def to_dict(self) -> dict:
        return {
            "blocks": self.blocks,
            "bytes": self.size_bytes,
            "beside_bytes": self.beside_bytes,
            "available_bytes": self.memory.available_bytes,
            "total_bytes": self.memory.total_bytes,
            "reserve_bytes": self.memory.reserve_bytes,
            "limit": self.memory.tightest.name,
        }


def check_room(needed_bytes: int, what: str) -> None:
    """Raises EngineError when `what` takes more than may be had."""
    memory = read_memory()
    if needed_bytes > memory.room_bytes:
        raise EngineError(f"{what} take {show_bytes(needed_bytes)}, but {_state(memory)}; {_advice(memory)}")


def plan_cache(
    block_bytes: int,
    blocks: int,
    top_k: int,
    *,
    ring: int = 0,
    dense_bytes: int = 0,
    gib: float | None = None,
    slots: int | None = None,
) -> CacheBudget:
    """The budget of the expert cache: the one asked for, checked, or a sensible one. Nothing is allocated.

    block_bytes, blocks  of one expert; how many the store holds
    top_k                experts of a token in one layer: the least a cache must hold
    ring                 blocks that prompts take beside the budget
    dense_bytes          of the weights that are not yet in memory and will be
    gib, slots           what was asked for; neither: all experts, or half of what may be taken
    Raises EngineError with the numbers for a budget too small or too large.
    """
    if gib is not None and slots is not None:
        raise EngineError("give ram_cache_gib or ram_cache_slots, not both")
    memory = read_memory()
    beside_bytes = ring * block_bytes + dense_bytes
    room = max(0, memory.room_bytes - beside_bytes)
    least = top_k * block_bytes
    wanted = _wanted_bytes(block_bytes, gib, slots)
    asked = wanted is not None
    if not asked:
        wanted = max(min(blocks * block_bytes, memory.default_cache_bytes, room), least)
    if wanted < least:
        raise EngineError(
            f"a cache of {wanted // block_bytes} slots ({show_bytes(wanted)}) cannot hold the {top_k} experts a token "
            f"needs in one layer; {top_k} slots ({show_bytes(least)}) are the least"
        )
    if wanted > room:
        what = "was asked for" if asked else "is the least that runs"
        if room >= least:
            advice = f"ask for no more than that ({room // block_bytes}slots), or {_advice(memory)}"
        else:
            advice = f"the least that runs is {show_bytes(least)}: {_advice(memory)}"
        raise EngineError(
            f"a cache of {show_bytes(wanted)} {what}, but {_state(memory)}, and dense weights and prompts need "
            f"{show_bytes(beside_bytes)}: {show_bytes(room)} is the most here; {advice}"
        )
    held = min(wanted // block_bytes, blocks)
    return CacheBudget(held, held * block_bytes, beside_bytes, memory)


def _wanted_bytes(block_bytes: int, gib: float | None, slots: int | None) -> int | None:
    if slots is not None:
        if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots < 2**63:
            raise EngineError(f"ram_cache_slots is {show(slots)}; a whole number of blocks, 1 or more, is needed")
        return slots * block_bytes
    return None if gib is None else gib_bytes("ram_cache_gib", gib, "a positive number of GiB is needed")


def _state(memory: Memory) -> str:
    return (
        f"{show_bytes(memory.available_bytes)} of {show_bytes(memory.total_bytes)} are available "
        f"(limit: {memory.tightest.name}) and {show_bytes(memory.reserve_bytes)} must stay free"
    )


def _advice(memory: Memory) -> str:
    """What to do about the tightest limit."""
    name = memory.tightest.name
    if name.startswith("cgroup"):
        return "raise that limit (docker --memory, systemd MemoryMax=)"
    if name.startswith("ulimit"):
        return f"raise that limit (`{name} unlimited`)"
    return "close other programs"
