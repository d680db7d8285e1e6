"""How much memory the engine may take, and the refusal, with numbers, when it is asked for more."""

from __future__ import annotations

from pathlib import Path

from nemolab.errors import EngineError

RESERVE_SHARE = 16  # a sixteenth of the machine stays free ...
RESERVE_LEAST_BYTES = 256 * 2**20  # ... and never less than this
DEFAULT_SHARE = 2  # without a budget the cache takes at most half of what is available


def total_and_available_bytes() -> tuple[int, int]:
    """Memory of the machine, or of the cgroup that confines this process, whichever is less."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit_bytes, used_bytes in _cgroup_limits():
        total = min(total, limit_bytes)
        available = min(available, max(0, limit_bytes - used_bytes))
    return total, available


def reserve_bytes(total_bytes: int) -> int:
    """What must stay free: filling memory to the brim gets a process killed without a word."""
    return max(total_bytes // RESERVE_SHARE, RESERVE_LEAST_BYTES)


def check_room(needed_bytes: int, what: str) -> None:
    """Raises EngineError when `what` takes more than may be had."""
    total, available = total_and_available_bytes()
    reserve = reserve_bytes(total)
    if needed_bytes > available - reserve:
        raise EngineError(
            f"{what} take {_gib(needed_bytes)}, but {_gib(available)} of {_gib(total)} are available "
            f"and {_gib(reserve)} must stay free"
        )


def cache_budget(block_bytes: int, blocks: int, top_k: int, ring: int, gib: float | None, slots: int | None) -> int:
    """Bytes for the expert cache: the budget asked for, checked, or a sensible one.

    block_bytes, blocks  of one expert; how many the store holds
    top_k                experts of a token in one layer: the least a cache must hold
    ring                 blocks the prompt ring takes beside the budget
    Raises EngineError with both numbers for a budget too small or too large.
    """
    if gib is not None and slots is not None:
        raise EngineError("give ram_cache_gib or ram_cache_slots, not both")
    total, available = total_and_available_bytes()
    reserve = reserve_bytes(total)
    everything = blocks * block_bytes
    room = max(0, available - reserve - ring * block_bytes)
    if gib is None and slots is None:
        return max(min(everything, (available - reserve) // DEFAULT_SHARE), top_k * block_bytes)
    if slots is not None:
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise EngineError(f"ram_cache_slots is {slots!r}; a whole number of blocks, 1 or more, is needed")
        wanted = slots * block_bytes
    else:
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 < gib < 2**33:
            raise EngineError(f"ram_cache_gib is {gib!r}; a positive number of GiB is needed")
        wanted = int(gib * 2**30)
    if wanted < top_k * block_bytes:
        raise EngineError(
            f"a cache of {wanted // block_bytes} slots ({_gib(wanted)}) cannot hold the {top_k} experts a token needs "
            f"in one layer; {top_k} slots ({_gib(top_k * block_bytes)}) are the least"
        )
    if wanted > room:
        raise EngineError(
            f"a cache of {_gib(wanted)} was asked for, but {_gib(available)} of {_gib(total)} are available, "
            f"{_gib(reserve)} must stay free and prompts need {_gib(ring * block_bytes)}: {_gib(room)} is the most here"
        )
    return wanted


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used) in bytes of the cgroups above this process; page cache that can be dropped counts as free."""
    found = []
    for limit, used, stat, droppable in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        for folder in _cgroup_folders():
            try:
                limit_bytes = int((folder / limit).read_text())
                used_bytes = int((folder / used).read_text())
                lines = dict(line.split() for line in (folder / stat).read_text().splitlines())
            except (OSError, ValueError):  # no such cgroup, or "max": no limit
                continue
            found.append((limit_bytes, used_bytes - int(lines.get(droppable, 0))))
    return found


def _cgroup_folders() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    folders = [root]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            inside = line.split(":", 2)[2].strip("/")
            while inside:
                folders.append(root / inside)
                inside = inside.rpartition("/")[0]
    except (OSError, IndexError):
        pass
    return folders


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
