"""All checks together."""

from dataclasses import dataclass
from pathlib import Path

from nemolab.doctor import gpu, resources, software, storage
from nemolab.doctor.check import Check, attempt
from nemolab.system.memory import Memory, read_memory
from nemolab.system.mounts import ROOT


@dataclass(frozen=True)
class Report:
    """What was found. `ok` unless a check failed; warnings do not count."""

    checks: list[Check]
    memory: Memory
    store: dict

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.status == "fail"]

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict:
        return {
            "checks": [check.to_dict() for check in self.checks],
            "ok": self.ok,
            "memory": self.memory.to_dict(),
            "store": self.store,
        }


def examine(store: str | Path | None = None, root: Path = ROOT) -> Report:
    """Look at everything; never fails. A trial file of 6 MB is written where stores lie, and removed.

    store  a store, or a folder to make one in; None: the cache folder
    root   the folder that /proc, /sys and /dev lie in
    """
    memory = read_memory(root)
    gpus, no_gpus = _one("gpu", gpu.find_gpus, root)
    gpus = gpus or gpu.Gpus([], None, [], "")
    place, no_place = _one("store folder", storage.find_place, store)
    checks = [
        *attempt("python", software.check_python),
        *attempt("nemolab", software.check_nemolab),
        *attempt("packages", software.check_packages),
        *attempt("data/tiny", software.check_data),
        *attempt("compiled kernels", software.check_kernel_cache),
        *attempt("stdout", software.check_words),
        *no_gpus,
        *attempt("gpu", gpu.check_gpu, gpus),
        *attempt("system", resources.check_system, root, gpus.present),
        *attempt("processor", resources.check_processor, root),
        *attempt("memory", resources.check_memory, memory),
        *attempt("locked memory", resources.check_memlock, root, gpus.present),
        *attempt("open files", resources.check_open_files, root),
        *no_place,
    ]
    if isinstance(place, Check):
        checks.append(place)
        place = None
    elif place is not None:
        checks += attempt("store folder", storage.check_folder, place)
        checks += attempt("file system", storage.check_file_system, place, root)
        checks += attempt("free space", storage.check_free, place)
        if not any(check.name == "store folder" and check.status == "fail" for check in checks):
            checks += attempt("direct I/O", storage.check_direct_io, place)
    return Report(checks, memory, place.to_dict() if place else {})


def _one(name: str, look, *arguments):
    """(what `look` returns, []), or (None, the check that says why it could not look)."""
    kept = []

    def keep():
        kept.append(look(*arguments))
        return []

    broken = attempt(name, keep)
    return (kept[0] if kept else None), broken
