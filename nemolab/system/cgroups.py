"""The cgroups that confine this process: its own and every one above it, in both versions and in mixtures of them.

A limit may stand at any level, and the tightest one counts. Where a cgroup lies in the file system takes two files:
/proc/self/cgroup says which one it is, /proc/self/mountinfo where its hierarchy is mounted and from which folder on.
"""

import os
from pathlib import Path
from typing import NamedTuple

from nemolab.system.mounts import ROOT, Mount, below, read_mounts

_SEARCH_FOLDERS = 4096  # looked at, at most, for a cgroup whose path this process is not told


class Cgroup(NamedTuple):
    """A folder of a cgroup hierarchy.

    folder   where its files are
    name     its path as this process is told it: "/", "/system.slice/x.service"
    top      the name of the highest of its hierarchy that is mounted
    version  1 or 2
    exact    False where the process's own cgroup could not be found, and this is the nearest above it
    """

    folder: Path
    name: str
    top: str
    version: int
    exact: bool


def find_cgroups(controller: str, root: Path = ROOT) -> list[Cgroup]:
    """Cgroups of a controller ("memory", "cpu") that confine this process, each hierarchy from the inside out.

    Both versions are looked at: version 2 can be mounted without the controller, then its files are simply not there.
    """
    mounts = read_mounts(root)
    found = []
    for version, inside in _own_paths(controller, root):
        for mount in _hierarchies(version, controller, mounts, root):
            chain = _chain(mount, inside, version, root)
            found += [cgroup for cgroup in chain if cgroup.folder not in {other.folder for other in found}]
    return found


def cpu_quota_cores(root: Path = ROOT) -> tuple[float, str] | None:
    """The tightest CPU quota in cores and the name of the cgroup that sets it; None without one."""
    found = []
    for cgroup in find_cgroups("cpu", root):
        try:
            if cgroup.version == 2:
                quota, period = (cgroup.folder / "cpu.max").read_text().split()
            else:
                quota = (cgroup.folder / "cpu.cfs_quota_us").read_text()
                period = (cgroup.folder / "cpu.cfs_period_us").read_text()
            if int(quota) > 0 and int(period) > 0:
                found.append((int(quota) / int(period), cgroup.name))
        except (OSError, ValueError):  # no such file, or "max": no quota
            continue
    return min(found, default=None)


def _own_paths(controller: str, root: Path) -> list[tuple[int, str]]:
    """(version, path) of this process's cgroups for a controller."""
    try:
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return [(1, "/"), (2, "/")]  # nothing told: the tops of the hierarchies are looked at
    found = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if number == "0" and not controllers:
            found.append((2, path))
        elif controller in controllers.split(","):
            found.append((1, path))
    return found


def _hierarchies(version: int, controller: str, mounts: list[Mount], root: Path) -> list[Mount]:
    if version == 2:
        found = [mount for mount in mounts if mount.fs_type == "cgroup2"]
        usual = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
    else:
        found = [mount for mount in mounts if mount.fs_type == "cgroup" and controller in mount.options]
        usual = (f"sys/fs/cgroup/{controller}",)
    if found or mounts:
        return found
    return [Mount("/", f"/{place}", "", "", frozenset()) for place in usual if (root / place).is_dir()]


def _chain(mount: Mount, inside: str, version: int, root: Path) -> list[Cgroup]:
    """From the process's cgroup up to the top of what is mounted."""
    top = root / mount.point.lstrip("/")
    path = below(mount.root, inside)
    exact = path is not None and (top / path).is_dir()
    if not exact:
        # Inside a cgroup namespace, or after a move out of it, the path leads upwards, past what can be seen.
        path = _search(top, root)
        exact = path is not None
        path = path or ""
    above = "" if ".." in mount.root else mount.root.rstrip("/")
    chain = []
    while True:
        name = f"{above}/{path}".rstrip("/") or "/"
        chain.append(Cgroup(top / path, name, above or "/", version, exact))
        if not path:
            return chain
        path = path.rpartition("/")[0]


def _search(top: Path, root: Path) -> str | None:
    """The cgroup below `top` that lists this process, by looking into each."""
    try:
        own = (root / "proc/self/stat").read_text().split()[0]
    except (OSError, IndexError):
        return None
    for number, (folder, _, files) in enumerate(os.walk(top)):
        if number >= _SEARCH_FOLDERS:
            break
        if "cgroup.procs" not in files:
            continue
        try:
            if own in (Path(folder) / "cgroup.procs").read_text().split():
                return below(str(top), folder)
        except OSError:
            continue
    return None
