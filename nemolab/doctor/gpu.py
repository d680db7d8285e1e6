"""The graphics card: whether there is one, what drives it, and whether torch was built for it."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nemolab.doctor.check import Check
from nemolab.doctor.software import torch_build
from nemolab.units import show_bytes

LEAST_CAPABILITY = 8.0  # sm_80: what the kernels are compiled for at the least
TOOL_SECONDS = 15  # without a process that keeps the driver loaded, nvidia-smi takes seconds
TORCH_SECONDS = 60
_QUERY = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
_PIP = (
    "pip install torch -c constraints.txt, without --index-url .../cpu; conda's torch beside pip's is the other cause"
)


class Gpus(NamedTuple):
    """cards  "name, memory in MiB, driver" of each, as nvidia-smi says; signs  what else speaks of an NVIDIA card;
    capabilities  CUDA's number of each card's generation, where nvidia-smi tells it"""

    cards: list[str]
    driver_cuda: str | None
    signs: list[str]
    problem: str
    capabilities: tuple[float, ...] = ()

    @property
    def present(self) -> bool:
        return bool(self.cards or self.signs)


def find_gpus(root: Path) -> Gpus:
    """Ask nvidia-smi; without it look for what the driver leaves in /proc and /dev."""
    signs = [f"/{name}" for name in ("proc/driver/nvidia/version", "dev/nvidia0", "dev/dxg") if (root / name).exists()]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Gpus([], None, signs, "nvidia-smi is not on the PATH" if signs else "")
    try:
        cards = _run([tool, *_QUERY], TOOL_SECONDS)
        cuda = re.search(r"CUDA Version:\s*(\d+\.\d+)", _run([tool], TOOL_SECONDS))
    except (OSError, subprocess.SubprocessError) as problem:
        return Gpus([], None, signs, f"nvidia-smi fails: {_words(problem)}")
    return Gpus([line for line in cards.splitlines() if line.strip()], cuda and cuda[1], signs, "", _generations(tool))


def check_gpu(gpus: Gpus) -> Iterator[Check]:
    """The card itself, then torch beside it. Without a card: one line, and nothing to complain about."""
    if gpus.cards:
        driver = f"; driver for CUDA up to {gpus.driver_cuda}" if gpus.driver_cuda else ""
        yield Check("gpu", "ok", "; ".join(_card(line) for line in gpus.cards) + driver)
    elif gpus.signs:
        found = f"signs of an NVIDIA card ({', '.join(gpus.signs)}), but {gpus.problem or 'nvidia-smi names none'}"
        yield Check("gpu", "warn", found, "a card that answers", "install the driver's tools, or repair the driver")
    elif gpus.problem:
        yield Check("gpu", "warn", gpus.problem, "a card that answers", "repair or remove the driver")
    else:
        yield Check("gpu", "info", "no NVIDIA card: the engine runs on the CPU")
    build = torch_build()
    if build is not None:
        yield check_torch_build(*build, gpus)
    if gpus.cards:
        if gpus.capabilities:
            yield check_generation(gpus.capabilities)
        yield check_card_memory(_card_memory())


def check_generation(capabilities: tuple[float, ...]) -> Check:
    """A card older than the kernels' instructions is said."""
    found, expected = ", ".join(f"{number:.1f}" for number in capabilities), f"{LEAST_CAPABILITY:.1f} or newer"
    if max(capabilities) < LEAST_CAPABILITY:
        advice = "the kernels for cards do not run on it; device='cpu' does"
        return Check("card's generation", "warn", f"compute capability {found}", expected, advice)
    return Check("card's generation", "ok", f"compute capability {found}", expected)


def check_card_memory(told: str) -> Check:
    """Whether the driver says what is in use on the first card: a budget (vram_gib) is kept by that."""
    used, _, total = told.partition(" of ")
    if not (used.isdecimal() and total.isdecimal()):
        advice = (
            "what a process takes beside torch is then not measured but planned for; libnvidia-ml.so.1 comes with the "
            "driver, in a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
        return Check("card's memory", "warn", f"the driver does not tell what is in use ({told})", "it is told", advice)
    return Check("card's memory", "ok", f"{show_bytes(int(used))} of {show_bytes(int(total))} in use now")


def check_torch_build(version: str, cuda: str | None, gpus: Gpus) -> Check:
    """A CPU build beside a card, a driver too old for the build, and a card torch cannot use are said."""
    name, found = "torch's build", f"{version}, {f'CUDA {cuda}' if cuda else 'CPU only'}"
    if not gpus.present:
        return Check(name, "ok", found)
    if cuda is None:
        advice = f"this torch cannot use the card: {_PIP}"
        return Check(name, "warn", f"{found}, beside a GPU", "a build with CUDA", advice)
    if gpus.driver_cuda and int(cuda.split(".")[0]) > int(gpus.driver_cuda.split(".")[0]):
        advice = f"update the driver, or install a torch built for CUDA {gpus.driver_cuda.split('.')[0]}"
        return Check(name, "warn", found, f"CUDA {gpus.driver_cuda} or older, as the driver takes it", advice)
    works = _torch_sees_it()
    if works == "True":
        return Check(name, "ok", f"{found}; torch sees the card")
    advice = "compare driver and build, and look for CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all"
    return Check(name, "warn", f"{found}; torch does not see the card ({works})", "a card that torch sees", advice)


def _card_memory() -> str:
    """Bytes "used of total" on the first card, or what was said instead. In a process of its own, too."""
    code = "from nemolab.system.nvml import CardMeter; m = CardMeter(0); print(m.used_bytes(), 'of', m.total_bytes())"
    try:
        return _run([sys.executable, "-W", "ignore", "-c", code], TOOL_SECONDS).strip()
    except subprocess.CalledProcessError as problem:
        return ((problem.stderr or "").strip().splitlines() or [_words(problem)])[-1]
    except (OSError, subprocess.SubprocessError) as problem:
        return _words(problem)


def _generations(tool: str) -> tuple[float, ...]:
    """Of each card; empty where an older tool does not know the question."""
    try:
        told = _run([tool, "--query-gpu=compute_cap", "--format=csv,noheader"], TOOL_SECONDS)
        return tuple(float(line) for line in told.splitlines() if line.strip())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def _torch_sees_it() -> str:
    """In a process of its own: a broken driver can hang or crash whoever asks."""
    code = "import torch; print(torch.cuda.is_available())"
    try:
        return _run([sys.executable, "-W", "ignore", "-c", code], TORCH_SECONDS).strip()
    except (OSError, subprocess.SubprocessError) as problem:
        return _words(problem)


def _run(command: list[str], seconds: float) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds, check=True, stdin=subprocess.DEVNULL
    ).stdout


def _card(line: str) -> str:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 3:
        return line.strip()
    memory = f"{int(fields[1]) / 1024:.1f} GiB" if fields[1].isdecimal() else f"memory {fields[1]}"
    return f"{fields[0]}, {memory}, driver {fields[2]}"


def _words(problem: Exception) -> str:
    if isinstance(problem, subprocess.TimeoutExpired):
        return f"no answer within {problem.timeout:.0f} s"
    if isinstance(problem, subprocess.CalledProcessError):
        said = " ".join((problem.stdout or problem.stderr or "").split())[:120]
        return f"exit code {problem.returncode}{f', {said}' if said else ''}"
    return str(problem)
