"""What the machine is: the fields without which two timings cannot be compared."""

import functools
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "numpy", "numba")


@functools.cache
def machine() -> dict[str, Any]:
    """CPU, cores this process may use, memory in GiB, GPU or null, kernel, Python and the packages that compute."""
    import psutil

    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu_name(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def one_line(facts: dict[str, Any] | None = None) -> str:
    """The machine as one line above a table."""
    facts = facts or machine()
    gpu = facts["gpu"] or "no GPU"
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, {gpu}"


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Processor, cores and card are alike; programs on it may differ, and the memory that is left to us."""
    return all(one[field] == other[field] for field in ("cpu", "cores", "gpu"))


def same_card(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Processor and card are of one kind: enough for what the bus between them bounds, however many cores there are."""
    return all(one[field] == other[field] for field in ("cpu", "gpu"))


def versions() -> dict[str, str]:
    """Python, nemolab and the packages that compute: the last cell of a notebook."""
    from nemolab import __version__

    return {"python": platform.python_version(), "nemolab": __version__, **{name: _version(name) for name in PACKAGES}}


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model"):
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on: fewer than the machine has inside a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_name() -> str | None:
    """The first NVIDIA card's name, null without one. Asks the driver's tool: importing torch would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return names[0].strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
