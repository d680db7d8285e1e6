"""How much memory this process may still take, and who says so.

The kernel ends a process that takes more, without a word. So the least of all answers counts: what the machine has
available, what each cgroup above this process leaves, and `ulimit`. Swap is not counted: experts in swap are
slower than experts on disk.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from nemolab.system.cgroups import Cgroup, find_cgroups
from nemolab.system.limits import read_rlimits
from nemolab.system.mounts import ROOT
from nemolab.units import show_bytes

RESERVE_SHARE = 16  # a sixteenth of the memory stays free ...
RESERVE_LEAST_BYTES = 256 * 2**20  # ... and at least this, but of a small machine no more than a quarter
DEFAULT_SHARE = 2  # a cache that nobody sized takes at most half of what may be taken
NO_LIMIT_BYTES = 2**60  # version 1 writes "no limit" as the largest number of whole pages

# Files of a cgroup: limits, use, and the line of memory.stat with the page cache that can be dropped at once.
_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "inactive_file")),
    2: (("memory.max", "memory.high"), "memory.current", ("inactive_file",)),
}
_ABOVE = "hierarchical_memory_limit"


@dataclass(frozen=True)
class Limit:
    """One answer to how much memory there is.

    name        who says so: "MemAvailable", "cgroup /a/b memory.max", "ulimit -v"
    used_bytes  without what the kernel can take back at once
    """

    name: str
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Memory:
    """All answers, the machine's first.

    notes  what could not be read, in words
    """

    limits: tuple[Limit, ...]
    notes: tuple[str, ...] = ()

    @property
    def tightest(self) -> Limit:
        """The one that leaves least."""
        return min(self.limits, key=lambda limit: limit.available_bytes)

    @property
    def total_bytes(self) -> int:
        return min(limit.limit_bytes for limit in self.limits)

    @property
    def available_bytes(self) -> int:
        return self.tightest.available_bytes

    @property
    def reserve_bytes(self) -> int:
        """What must stay free: filling memory to the brim gets a process killed."""
        return max(self.total_bytes // RESERVE_SHARE, min(RESERVE_LEAST_BYTES, self.total_bytes // 4))

    @property
    def room_bytes(self) -> int:
        """What may be taken."""
        return max(0, self.available_bytes - self.reserve_bytes)

    @property
    def default_cache_bytes(self) -> int:
        """What a cache takes at most when nobody says how much."""
        return self.room_bytes // DEFAULT_SHARE

    def line(self) -> str:
        """In words: what is available of what, by whose limit, and what stays free."""
        return (
            f"{show_bytes(self.available_bytes)} of {show_bytes(self.total_bytes)} available "
            f"(limit: {self.tightest.name}), {show_bytes(self.reserve_bytes)} kept free"
        )

    def to_dict(self) -> dict:
        return {
            "total_bytes": self.total_bytes,
            "available_bytes": self.available_bytes,
            "reserve_bytes": self.reserve_bytes,
            "room_bytes": self.room_bytes,
            "default_cache_bytes": self.default_cache_bytes,
            "tightest": self.tightest.name,
            "limits": [
                {"name": limit.name, "limit_bytes": limit.limit_bytes, "available_bytes": limit.available_bytes}
                for limit in self.limits
            ],
            "notes": list(self.notes),
        }


def read_memory(root: Path = ROOT) -> Memory:
    """Ask everyone. Never fails: what cannot be read is left out and noted."""
    notes: list[str] = []
    limits = [_machine(root, notes)]
    for cgroup in find_cgroups("memory", root):
        limits += _cgroup_limits(cgroup, root, notes)
    limits += _ulimits(root)
    return Memory(tuple(limits), tuple(notes))


def read_rss_bytes(root: Path = ROOT) -> tuple[int, int]:
    """(now, peak since the process began or since `reset_peak_rss`) resident memory of this process."""
    fields = _fields(root / "proc/self/status")
    return fields.get("VmRSS", 0), fields.get("VmHWM", 0)


def reset_peak_rss() -> bool:
    """Start a new peak of resident memory for this process; False where the kernel does not allow it."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _machine(root: Path, notes: list[str]) -> Limit:
    fields = _fields(root / "proc/meminfo")
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    if total and available is None and "MemFree" in fields:  # kernels before 3.14
        available = fields["MemFree"] + fields.get("Inactive(file)", 0)
    if total and available is not None:
        return Limit("MemAvailable", total, max(0, total - available))
    notes.append("/proc/meminfo does not tell the memory; pages as the C library counts them are taken")
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    return Limit("free pages", total, total - free)


def _cgroup_limits(cgroup: Cgroup, root: Path, notes: list[str]) -> list[Limit]:
    names, current, droppable = _FILES[cgroup.version]
    limits = {}
    for name in names:
        limit_bytes = _read_limit(cgroup.folder / name, f"cgroup {cgroup.name} {name}", notes)
        if limit_bytes is not None:
            limits[name] = limit_bytes
    stat = _fields(cgroup.folder / "memory.stat")
    # Version 1 also tells the least of all limits above, those out of sight included. At the top of what is seen, that
    # is the only word of them; below it, the levels in between are read themselves.
    if cgroup.name == cgroup.top and stat.get(_ABOVE, NO_LIMIT_BYTES) < min(limits.values(), default=NO_LIMIT_BYTES):
        limits[_ABOVE] = stat[_ABOVE]
    if not limits:
        return []
    used = _read_number(cgroup.folder / current)
    if used is None:
        used = read_rss_bytes(root)[0]
        notes.append(f"cgroup {cgroup.name}: {current} cannot be read; only this process is counted as its use")
    else:
        used -= next((stat[name] for name in droppable if name in stat), 0)
    if not cgroup.exact:
        notes.append(f"the cgroup of this process is out of sight; {cgroup.name} is the nearest that can be read")
    return [Limit(f"cgroup {cgroup.name} {name}", limit, max(0, used)) for name, limit in limits.items()]


def _read_limit(path: Path, name: str, notes: list[str]) -> int | None:
    """Bytes, or None for no limit. A file that is there and says nothing sensible is noted."""
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:  # the top of a hierarchy has none, nor has one without the controller
        return None
    except OSError as problem:
        notes.append(f"{name} cannot be read ({problem.strerror})")
        return None
    if text == "max":
        return None
    try:
        limit_bytes = int(text)
    except ValueError:
        notes.append(f"{name} holds {text[:40]!r}; a number of bytes or 'max' was expected")
        return None
    return limit_bytes if 0 <= limit_bytes < NO_LIMIT_BYTES else None


def _ulimits(root: Path) -> list[Limit]:
    """Limits on the address space of this very process."""
    limits = read_rlimits(root)
    fields = _fields(root / "proc/self/status")
    found = []
    for name, flag, used in (("Max address space", "-v", "VmSize"), ("Max data size", "-d", "VmData")):
        limit = limits.get(name)
        if limit is not None and limit.soft is not None:
            found.append(Limit(f"ulimit {flag}", limit.soft, fields.get(used, 0)))
    return found


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """Lines such as `MemTotal:  123 kB` (in bytes then) or `inactive_file 5`; other lines are passed over."""
    found = {}
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal() and len(words[1]) < 30:
            found[words[0].rstrip(":")] = int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return found
