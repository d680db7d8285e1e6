"""Memory and every limit on it, the processor, open files, and the kind of system this is."""

import os
from collections.abc import Iterator
from pathlib import Path

from nemolab.doctor.check import Check
from nemolab.measure.machine import cpu_name, usable_cores
from nemolab.system.cgroups import cpu_quota_cores
from nemolab.system.limits import container, is_wsl, read_rlimits
from nemolab.system.memory import Memory
from nemolab.units import show_bytes

LEAST_ROOM_BYTES = 2**30  # interpreter, torch and a small model take about so much
LEAST_FILES = 256  # a large checkpoint has dozens of shards, and a repack keeps what it has opened
# What the kernels' vector code is compiled to; without them it runs, slower.
WANTED_FLAGS = {"x86_64": ("avx2", "f16c"), "aarch64": ("asimd",)}
MEMLOCK_ADVICE = (
    "for a card the cache is page-locked by its driver, which may keep to this limit: then experts take a slower way. "
    "Raise it with `ulimit -l unlimited`, "
    "in docker with --ulimit memlock=-1, under systemd with LimitMEMLOCK=infinity, for a user in "
    "/etc/security/limits.conf (memlock)"
)


def check_memory(memory: Memory) -> Iterator[Check]:
    """What may be taken, who limits it, and what a cache would take by itself."""
    tightest = memory.tightest
    expected = f"{show_bytes(LEAST_ROOM_BYTES)} or more besides what is kept free"
    if memory.room_bytes < LEAST_ROOM_BYTES:
        advice = "close other programs" if len(memory.limits) == 1 else f"raise or leave the limit of {tightest.name}"
        yield Check("memory", "warn", memory.line(), expected, advice)
    else:
        yield Check("memory", "ok", memory.line(), expected)
    others = [limit for limit in memory.limits[1:] if limit is not tightest]
    if others:
        words = [f"{limit.name} {show_bytes(limit.limit_bytes)}" for limit in others]
        yield Check("other limits", "info", "; ".join(words))
    for note in memory.notes:
        yield Check(
            "memory limits", "warn", note, "", "this limit is not known here; the kernel keeps to it all the same"
        )
    yield Check(
        "cache budget",
        "info",
        f"at most {show_bytes(memory.default_cache_bytes)} by default, {show_bytes(memory.room_bytes)} on request",
    )


def check_memlock(root: Path, gpu_present: bool) -> Check:
    """How much memory may be locked: a fact where there is no card, since nothing here locks any then."""
    limit = read_rlimits(root).get("Max locked memory")
    if limit is None:
        return Check("locked memory", "info", "no limit is told")
    if limit.soft is None:
        return Check("locked memory", "ok", "unlimited", "unlimited")
    found = f"{show_bytes(limit.soft)} at most (ulimit -l)"
    if limit.hard != limit.soft:
        found += f", up to {'no limit' if limit.hard is None else show_bytes(limit.hard)} may be asked for"
    if not gpu_present:
        return Check("locked memory", "info", f"{found}; nothing is locked without a card")
    return Check("locked memory", "warn", found, "unlimited, for a GPU", MEMLOCK_ADVICE)


def check_open_files(root: Path) -> Check:
    limit = read_rlimits(root).get("Max open files")
    if limit is None or limit.soft is None:
        return Check("open files", "ok", "no limit" if limit else "no limit is told")
    found, expected = f"{limit.soft:,} at most (ulimit -n)", f"{LEAST_FILES} or more"
    if limit.soft < LEAST_FILES:
        return Check("open files", "warn", found, expected, f"raise it with `ulimit -n {4 * LEAST_FILES}`")
    return Check("open files", "ok", found, expected)


def check_processor(root: Path) -> Iterator[Check]:
    """Cores this process may use, and the vector instructions that the kernels are compiled to."""
    cores, quota = usable_cores(), cpu_quota_cores(root)
    found = f"{cpu_name()}, {cores} of {os.cpu_count()} cores usable"
    if quota is not None and quota[0] < cores:
        advice = "threads beyond the quota only wait; start with that many (--threads, OMP_NUM_THREADS), or raise it"
        words = f"{found}, but only {quota[0]:.2f} cores' time (cgroup {quota[1]})"
        yield Check("processor", "warn", words, "a quota of all usable cores", advice)
    else:
        yield Check("processor", "ok", found)
    machine = os.uname().machine
    wanted, flags = WANTED_FLAGS.get(machine), _processor_flags(root)
    if wanted is None or not flags:
        yield Check("vector instructions", "info", f"{machine}: not known", ", ".join(wanted or ()))
        return
    has = [flag for flag in ("avx2", "f16c", "avx512f", "asimd") if flag in flags]
    missing = [flag for flag in wanted if flag not in flags]
    advice = (
        f"without {' and '.join(missing)} the kernels run, but slower; a virtual machine can pass its host's CPU on"
    )
    yield Check(
        "vector instructions",
        "warn" if missing else "ok",
        ", ".join(has) or "none of those that matter",
        ", ".join(wanted),
        advice if missing else "",
    )


def check_system(root: Path, gpu_present: bool) -> Iterator[Check]:
    """Kernel, container, and Linux inside Windows, with what that means for a card where there is one."""
    kernel = os.uname()
    kind = container(root)
    where = f", in a {kind} container" if kind else ""
    if is_wsl(root):
        advice = (
            "how much memory Linux has stands in .wslconfig (memory=); keep stores on the Linux disk, not below /mnt/c"
        )
        if gpu_present:
            advice += (
                "; pinned memory is reported to end at half a GB to one GB here, whatever `ulimit -l` says: the cache "
                "beyond it stays pageable, and experts there take a slower way to the card"
            )
        yield Check("system", "warn", f"{kernel.sysname} {kernel.release}: WSL{where}", "Linux by itself", advice)
    else:
        yield Check(
            "system", "ok" if kernel.sysname == "Linux" else "warn", f"{kernel.sysname} {kernel.release}{where}"
        )


def _processor_flags(root: Path) -> set[str]:
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()
