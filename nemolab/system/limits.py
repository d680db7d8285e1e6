"""Limits that are no cgroup's: those of `ulimit`, and those of the kind of system this is (WSL, a container)."""

import resource
from pathlib import Path
from typing import NamedTuple

from nemolab.system.mounts import ROOT

# As /proc/self/limits names them -> the same for the resource module.
_NAMES = {
    "Max address space": resource.RLIMIT_AS,
    "Max data size": resource.RLIMIT_DATA,
    "Max locked memory": getattr(resource, "RLIMIT_MEMLOCK", None),
    "Max open files": resource.RLIMIT_NOFILE,
}


class Rlimit(NamedTuple):
    """A limit of `ulimit`; None is no limit. The soft one holds, up to the hard one anyone may raise it."""

    soft: int | None
    hard: int | None


def read_rlimits(root: Path = ROOT) -> dict[str, Rlimit]:
    """Limits by their names in /proc/self/limits; bytes or numbers of files. What is not told is left out."""
    found = {}
    try:
        lines = (root / "proc/self/limits").read_text().splitlines()
    except OSError:
        return _ask_rlimits() if root == ROOT else found
    for line in lines:
        for name in _NAMES:
            if line.startswith(name + " "):
                try:
                    soft, hard = (None if word == "unlimited" else int(word) for word in line[len(name) :].split()[:2])
                except ValueError:
                    continue
                found[name] = Rlimit(soft, hard)
    return found


def _ask_rlimits() -> dict[str, Rlimit]:
    pairs = {name: resource.getrlimit(number) for name, number in _NAMES.items() if number is not None}
    return {
        name: Rlimit(*(None if value == resource.RLIM_INFINITY else value for value in pair))
        for name, pair in pairs.items()
    }


def is_wsl(root: Path = ROOT) -> bool:
    """Whether this is Linux inside Windows, where the driver caps pinned memory whatever the limits here say."""
    try:
        return "microsoft" in (root / "proc/sys/kernel/osrelease").read_text().lower()
    except OSError:
        return False


def container(root: Path = ROOT) -> str | None:
    """The kind of container this process runs in, None without one (or in one that does not show)."""
    for place, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / place).exists():
            return kind
    try:
        text = (root / "proc/self/cgroup").read_text(errors="replace")
    except OSError:
        return None
    for word, kind in (("kubepods", "kubernetes"), ("docker", "docker"), ("libpod", "podman"), ("lxc", "lxc")):
        if word in text:
            return kind
    return None
