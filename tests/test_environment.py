"""One environment, told three times: pyproject.toml, constraints.txt and environment.yml stay in step."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for text in (*PROJECT["dependencies"], *(text for extra in extras for text in extra))]


def read_pins(text: str) -> dict[str, str]:
    """Name to exact version; anything but `name==version` lines, comments and blanks is refused."""
    pins = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            found = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;*]+)", line)
            assert found, f"constraints.txt: {line!r} is no exact pin"
            assert canonicalize_name(found[1]) not in pins, f"constraints.txt: {found[1]} is pinned twice"
            pins[canonicalize_name(found[1])] = found[2]
    return pins


PINS = read_pins((ROOT / "constraints.txt").read_text())


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_within_what_pyproject_allows(requirement):
    pin = PINS.get(canonicalize_name(requirement.name))
    assert pin, f"{requirement.name} is not in constraints.txt"
    assert requirement.specifier.contains(pin), f"{requirement.name}=={pin} is outside {requirement.specifier}"


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_the_tested_versions_are_the_pinned_ones(requirement):
    assert version(requirement.name) == PINS[canonicalize_name(requirement.name)], "these tests ran on other versions"


def test_a_loose_pin_is_refused_so_the_check_can_fail():
    for text in ("torch>=2.14", "torch==2.14.*", "torch", "torch==2.14.1\nTorch==2.14.2"):
        with pytest.raises(AssertionError):
            read_pins(text)


def test_torch_comes_with_the_triton_it_wants():
    assert PINS["torch"] == "2.14.1"
    wanted = {r.name: r for r in map(Requirement, torch_requirements())}["triton"]
    assert wanted.specifier.contains(PINS["triton"])


def torch_requirements() -> list[str]:
    from importlib.metadata import requires

    return requires("torch")


def test_conda_gives_python_and_pip_only_and_pip_the_rest_from_the_constraints():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    names = {re.match(r"[a-z0-9._-]+", text)[0]: text for text in conda}
    assert set(names) == {"python", "pip"}, "conda packages beside pip's would be a second source of versions"
    assert pip == {"pip": ["-c constraints.txt", "-e .[test]"]}
    assert environment["name"] == PROJECT["name"] and environment["channels"] == ["conda-forge", "nodefaults"]
    allowed, required = SpecifierSet(names["python"].removeprefix("python")), SpecifierSet(PROJECT["requires-python"])
    for python in PYTHONS:
        assert allowed.contains(python) and required.contains(python)
    assert not allowed.contains("3.10") and not required.contains("3.10") and not allowed.contains("3.15")


def find_other_torches(environment: dict) -> list[str]:
    """What would bring a second torch, or CUDA libraries beside pip's: mixed channels end in a CPU build unnoticed."""
    entries = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    channels = [channel for channel in environment["channels"] if re.search(r"pytorch|nvidia|intel", channel)]
    packages = [entry for entry in entries if re.match(r"(.*::)?(py)?torch|cuda|cudatoolkit|cudnn|nccl|mkl", entry)]
    indexes = [line for entry in environment["dependencies"] if isinstance(entry, dict) for line in entry["pip"]]
    return channels + packages + [line for line in indexes if "index-url" in line or "find-links" in line]


def test_no_channel_mixes_another_torch_in():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert find_other_torches(environment) == []
    assert find_other_torches({**environment, "channels": ["pytorch", "nvidia", "conda-forge"]}) == [
        "pytorch",
        "nvidia",
    ]
    for entry in ("pytorch=2.14", "conda-forge::pytorch", "cudatoolkit", {"pip": ["--extra-index-url https://x/cpu"]}):
        spoilt = {**environment, "dependencies": [*environment["dependencies"], entry]}
        assert len(find_other_torches(spoilt)) == 1, entry


def test_make_installs_what_environment_yml_installs():
    text = (ROOT / "Makefile").read_text()
    assert "-c constraints.txt -e '.[test]'" in text
    assert "(3, 11) <= sys.version_info[:2] <= (3, 14)" in text
    assert re.search(r"^\$\(STAMP\): pyproject.toml constraints.txt$", text, re.M), "a changed pin reinstalls"


def test_every_room_is_packaged():
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for folder in ("nemolab", "kernels")
        for path in (ROOT / folder).rglob("__init__.py")
        if "__pycache__" not in path.parts
    }
    found = {f"nemolab.{name}" if name.startswith("kernels") else name for name in found}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == {"nemolab.kernels": "kernels"}
    assert not (ROOT / "nemolab" / "kernels").exists(), "there is one folder of kernels"


def run_python(code: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_kernels_exist_only_inside_nemolab(tmp_path):
    """The public package `kernels` must stay importable, and must not be ours."""
    code = (
        "import importlib.util, nemolab.kernels; "
        "spec = importlib.util.find_spec('kernels'); "
        "print(nemolab.kernels.__path__[0]); print(spec and spec.origin)"
    )
    ours, public = run_python(code, tmp_path).splitlines()
    assert Path(ours) == ROOT / "kernels"
    assert public == "None" or Path(public).parent != ROOT / "kernels"


def test_a_wheel_has_the_kernels_inside_nemolab_and_no_top_level_kernels(tmp_path):
    """Asks setuptools what it would put where, without building."""
    code = (
        "import sys; sys.argv = ['setup.py']\n"
        "from setuptools.config.pyprojecttoml import apply_configuration\n"
        "from setuptools.dist import Distribution\n"
        "dist = apply_configuration(Distribution({'script_name': 'setup.py'}), 'pyproject.toml')\n"
        "build = dist.get_command_obj('build_py'); build.ensure_finalized()\n"
        "for package, module, file in build.find_all_modules(): print(package, module, file)"
    )
    modules = [line.split() for line in run_python(code, ROOT).splitlines()]
    packages = {package for package, _, _ in modules}
    assert {package.partition(".")[0] for package in packages} == {"nemolab"}
    files = {(package, module): file for package, module, file in modules}
    assert files["nemolab.kernels", "__init__"] == os.path.join("kernels", "__init__.py")
    assert files["nemolab.kernels.gpu", "__init__"] == os.path.join("kernels", "gpu", "__init__.py")
    assert ("nemolab", "cli") in files and ("nemolab.checkpoint", "__init__") in files


def test_importing_nemolab_does_no_heavy_work(tmp_path):
    code = (
        "import sys, nemolab, nemolab.cli, nemolab.checkpoint, nemolab.store, nemolab.plan; "
        "print([name for name in ('torch', 'transformers', 'numba', 'matplotlib', 'pandas') if name in sys.modules])"
    )
    assert run_python(code, tmp_path) == "[]"


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "make test" in script.read_text()
