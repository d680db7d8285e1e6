"""Which file system a path lies on, from /proc/self/mountinfo (format: proc_pid_mountinfo(5))."""

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
_ESCAPE = re.compile(r"\\([0-7]{3})")  # blanks and backslashes in paths are written as octal bytes


class Mount(NamedTuple):
    """One mounted file system.

    root     the folder of the file system that is seen at `point`
    fs_type  as the kernel names it: ext4, xfs, tmpfs, cgroup2 ...
    options  of the mount and of the file system itself, together
    """

    root: str
    point: str
    fs_type: str
    source: str
    options: frozenset[str]


def read_mounts(root: Path = ROOT) -> list[Mount]:
    """All mounts this process sees, in the order they were made; empty where the kernel does not tell."""
    try:
        text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [mount for line in text.splitlines() if (mount := _parse(line))]


def find_mount(path: Path, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that holds an absolute path without links. Of several at one point the last hides the others."""
    found = None
    for mount in mounts:
        if path.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def below(folder: str, path: str) -> str | None:
    """`path` as seen from `folder`, "" for the folder itself, None where it lies elsewhere."""
    try:
        inside = PurePosixPath(path).relative_to(folder)
    except ValueError:
        return None
    return None if ".." in inside.parts else "/".join(inside.parts)


def _parse(line: str) -> Mount | None:
    mount, separator, system = line.partition(" - ")
    here, there = mount.split(" "), system.split(" ")
    if not separator or len(here) < 6 or len(there) < 2:
        return None
    options = {*here[5].split(","), *(there[2].split(",") if len(there) > 2 else ())}
    return Mount(_plain(here[3]), _plain(here[4]), there[0], _plain(there[1]), frozenset(options))


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)


def free_bytes(folder: Path) -> int:
    """What may still be written to the disk a folder lies on, by others than root."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
