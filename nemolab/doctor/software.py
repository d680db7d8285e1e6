"""Python, nemolab itself, the packages it needs, and where compiled kernels and words go."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from nemolab import __version__, paths
from nemolab.doctor.check import Check
from nemolab.errors import NemolabError

PYTHONS = ((3, 11), (3, 14))  # the first and the last that are tested; environment.yml and Makefile say the same
KEY_PACKAGES = ("torch", "transformers", "safetensors", "numba")  # a check each; the others share one
OPTIONAL = {  # what is lost without them; all others are needed
    "isal": "checksums are computed more slowly",
    "matplotlib": "no figures",
    **dict.fromkeys(("jupyterlab", "nbclient", "nbconvert", "nbformat", "ipykernel", "pandas"), "no notebooks"),
}
INSTALL = "in a clone: pip install -c constraints.txt -e . (or `make .venv`)"


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    first, last = (".".join(map(str, pair)) for pair in PYTHONS)
    found = f"{platform.python_version()} ({sys.executable or 'no path'})"
    expected = f"{first} to {last}"
    if version < PYTHONS[0]:
        return Check("python", "fail", found, expected, f"make an environment with Python {last}")
    if version > PYTHONS[1]:
        advice = f"newer than what is tested; if something fails, make an environment with Python {last}"
        return Check("python", "warn", found, expected, advice)
    return Check("python", "ok", found, expected)


def check_nemolab() -> Check:
    """Version and the folder it is imported from: another copy than one thinks is a common surprise."""
    folder = Path(__file__).resolve().parent.parent
    found = f"{__version__} from {folder}"
    try:
        installed = importlib.metadata.version("nemolab")
    except importlib.metadata.PackageNotFoundError:
        return Check("nemolab", "warn", f"{found}, not installed", "an installed package", INSTALL)
    if installed != __version__:
        advice = f"two copies, or an old installation; {INSTALL}"
        return Check("nemolab", "warn", f"{found}, but {installed} is installed", __version__, advice)
    return Check("nemolab", "ok", found)


def check_data() -> Check:
    """The shipped model, which most verbs take when none is named."""
    try:
        return Check("data/tiny", "ok", str(paths.tiny_folder()))
    except NemolabError as problem:
        advice = "start inside a clone of nemolab, or set NEMOLAB_HOME to one; or name a checkpoint at each call"
        return Check("data/tiny", "warn", str(problem), "the shipped model", advice)


def check_packages() -> Iterator[Check]:
    """What is installed against what pyproject.toml allows, and beside what constraints.txt says is tested."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    tested = _read_pins()
    rest: dict[str, list[str]] = {"missing": [], "not allowed": []}
    requirements = [Requirement(text) for text in _read_requirements()]
    requirements = [requirement for requirement in requirements if requirement.marker is None]
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        check = _check_package(requirement, tested.get(name))
        if name in KEY_PACKAGES:
            yield check
        elif check.status == "fail":
            rest["missing"].append(requirement.name)
        elif check.status == "warn":
            rest["not allowed"].append(f"{check.name} {check.found} (allowed: {check.expected})")
    others = len(requirements) - len(KEY_PACKAGES)
    if rest["missing"]:
        lost = {OPTIONAL.get(canonicalize_name(name)) for name in rest["missing"]}
        status = "fail" if None in lost else "warn"
        without = "" if None in lost else f" ({'; '.join(sorted(lost))})"
        yield Check("other packages", status, f"missing: {', '.join(rest['missing'])}{without}", "installed", INSTALL)
    elif rest["not allowed"]:
        yield Check("other packages", "warn", "; ".join(rest["not allowed"]), "allowed versions", INSTALL)
    else:
        yield Check("other packages", "ok", f"{others} more are installed")


def _check_package(requirement, tested: str | None) -> Check:
    expected = str(requirement.specifier) or "any version"
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Check(requirement.name, "fail", "not installed", expected, INSTALL)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(requirement.name, "warn", version, expected, INSTALL)
    note = "" if tested is None else " (tested)" if version.partition("+")[0] == tested else f" (tested is {tested})"
    return Check(requirement.name, "ok", version + note, expected)


def _read_requirements() -> list[str]:
    """Of the clone we are imported from, else of the installed package."""
    try:
        text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return importlib.metadata.requires("nemolab") or []
    return tomllib.loads(text)["project"]["dependencies"]


def _read_pins() -> dict[str, str]:
    """Tested versions by name; empty without a clone."""
    try:
        text = (paths.home() / "constraints.txt").read_text(encoding="utf-8")
    except (NemolabError, OSError):
        return {}
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", text.lower(), re.MULTILINE))


def torch_build() -> tuple[str, str | None] | None:
    """(version, CUDA version or None for a CPU build) of torch, read and not imported; None where there is none."""
    spec = importlib.util.find_spec("torch")
    for place in spec.submodule_search_locations or () if spec else ():
        try:
            text = (Path(place) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
        cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
        if version:
            return version[1], cuda[1] if cuda else None
    return None


def check_kernel_cache() -> Check:
    """Where compiled kernels are kept (`nemolab.jit`): beside their sources, else in the user's cache folder."""
    name, expected = "compiled kernels", "a folder that can be written"
    named = os.environ.get("NUMBA_CACHE_DIR", "")
    sources = Path(__file__).resolve().parent.parent
    folders = [Path(named)] if named else [sources / "__pycache__", *_user_cache()]
    for folder in folders:
        if is_writable(folder):
            return Check(name, "ok", f"kept in {folder if named else paths.shown(folder)}", expected)
    found = f"cannot be kept in {' nor in '.join(str(folder) for folder in folders)}"
    advice = "kernels are compiled anew in each process; set NUMBA_CACHE_DIR to a folder that can be written"
    return Check(name, "warn", found, expected, advice)


def _user_cache() -> list[Path]:
    """numba's folder for a user; none where the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [] if base.startswith("~") else [Path(base) / "numba"]


def is_writable(folder: Path) -> bool:
    """Whether a folder can be written, or made."""
    for place in (folder, *folder.parents):
        if place.exists():
            return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return False


def check_words() -> Check:
    """Whether the terminal or file behind stdout takes letters outside ASCII: answers of a model have them."""
    encoding = getattr(sys.__stdout__, "encoding", None) or "none (closed)"
    if encoding.lower().replace("-", "").replace("_", "") == "utf8" or encoding.startswith("none"):
        return Check("stdout", "ok", encoding)
    advice = "letters it lacks are shown as '?'; set LANG=C.UTF-8 or PYTHONUTF8=1"
    return Check("stdout", "warn", encoding, "utf-8", advice)
