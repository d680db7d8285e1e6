"""Machines that are not there: /proc and /sys trees that a test writes and `nemolab.system` reads."""

from pathlib import Path

GIB = 2**30
V1_NO_LIMIT = 9223372036854771712  # 2^63 - 1 in whole pages, as the kernel writes it


class FakeMachine:
    """A root folder with 32 GiB, 24 of them available, no cgroup, no limit, process 4242.

    .root  what the functions of `nemolab.system` take as `root`
    """

    def __init__(self, root: Path, total_gib: float = 32, available_gib: float = 24):
        self.root = root
        kib = {"MemTotal": total_gib, "MemFree": 1, "MemAvailable": available_gib}
        self.write("proc/meminfo", "".join(f"{name}: {int(gib * 2**20)} kB\n" for name, gib in kib.items()))
        self.write("proc/self/stat", "4242 (python) S 1")
        self.write("proc/self/status", "Name:\tpython\nVmSize:\t 4194304 kB\nVmRSS:\t 524288 kB\nVmHWM:\t 1048576 kB\n")
        self.write("proc/self/limits", limits_text())
        self.write("proc/sys/kernel/osrelease", "6.8.0-generic\n")
        self.mounts = ["20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"]
        self._tell_mounts()

    def write(self, name: str, text: str | int) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
        return path

    def mount(self, point: str, fs_type: str, root: str = "/", options: str = "rw") -> None:
        escaped = point.replace(" ", "\\040")
        self.mounts.append(f"{21 + len(self.mounts)} 20 0:9 {root} {escaped} rw,nosuid - {fs_type} none {options}")
        self._tell_mounts()

    def v2(self, path: str = "/", point: str = "/sys/fs/cgroup", root: str = "/") -> None:
        """A cgroup2 hierarchy, and this process in it."""
        self.mount(point, "cgroup2", root)
        self._join(f"0::{path}\n")

    def v1(self, path: str, point: str = "/sys/fs/cgroup/memory", root: str = "/", controller: str = "memory") -> None:
        """A version 1 hierarchy, and this process in it."""
        self.mount(point, "cgroup", root, f"rw,{controller}")
        self._join(f"4:{controller}:{path}\n")

    def limit_v2(self, folder: str, current: int | None = 0, stat: str = "", **limits) -> None:
        """Files of a cgroup: limit_v2("a/b", max=5, high="max", current=3)."""
        where = f"sys/fs/cgroup/{folder}".rstrip("/")
        for name, value in limits.items():
            self.write(f"{where}/memory.{name}", value)
        if current is not None:
            self.write(f"{where}/memory.current", current)
        self.write(f"{where}/memory.stat", stat)

    def limit_v1(self, folder: str, limit: int | str, usage: int = 0, stat: str = "") -> None:
        where = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
        self.write(f"{where}/memory.limit_in_bytes", limit)
        self.write(f"{where}/memory.usage_in_bytes", usage)
        self.write(f"{where}/memory.stat", stat)

    def _join(self, line: str) -> None:
        path = self.root / "proc/self/cgroup"
        self.write("proc/self/cgroup", (path.read_text() if path.exists() else "") + line)

    def _tell_mounts(self) -> None:
        self.write("proc/self/mountinfo", "\n".join(self.mounts) + "\n")


def limits_text(address_space="unlimited", data="unlimited", locked="8388608", files="1024") -> str:
    """/proc/self/limits; each value is the soft limit, the hard one of open files is 524288."""
    return (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max data size             {data:<20} unlimited            bytes     \n"
        f"Max open files            {files:<20} 524288               files     \n"
        f"Max locked memory         {locked:<20} {locked:<20} bytes     \n"
        f"Max address space         {address_space:<20} unlimited            bytes     \n"
    )
