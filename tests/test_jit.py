"""Compiled code is kept on disk, never outlives an edit, and no cache folder is ever a condition for running."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

import nemolab.jit as module
from nemolab.jit import unowned

NEMOLAB = Path(module.__file__).parent
KERNELS, POLICIES, SIMULATE = NEMOLAB.parent / "kernels", NEMOLAB / "policy", NEMOLAB / "simulate"

PROGRAM = """
import sys
import numpy as np
sys.path[:0] = [sys.argv[1]]
import mine.one as one
print(one.answer(np.float32(1)), len(one.answer.stats.cache_hits))
"""


@pytest.fixture
def package(tmp_path):
    """A package of two kernels of its own beside a copy of jit.py: `answer` calls `helper` from another file."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(module.__file__, folder / "jit.py")
    (folder / "__init__.py").write_text("")
    (folder / "two.py").write_text("from mine.jit import jit\n\n@jit\ndef helper(x):\n    return x + 1\n")
    (folder / "one.py").write_text(
        "from mine.jit import jit\nfrom mine.two import helper\n\n@jit\ndef answer(x):\n    return helper(x) * 2\n"
    )
    return folder


def run(package, **environment):
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(package.parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    value, hits = done.stdout.split()
    return float(value), int(hits) > 0


def test_the_second_process_loads_what_the_first_compiled(package, tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert run(package, **cache) == (4.0, False)
    assert run(package, **cache) == (4.0, True)


def test_an_edit_in_another_kernel_s_file_is_not_missed(package, tmp_path):
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    run(package, **cache)
    text = (package / "two.py").read_text()
    (package / "two.py").write_text(text.replace("x + 1", "x + 5"))
    assert run(package, **cache) == (12.0, False)


@pytest.mark.parametrize("harm", ["half", "gone"])
def test_an_index_that_cannot_be_read_is_made_again(package, tmp_path, harm):
    """Cut off by a kill, or naming a class that a newer version no longer has."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    run(package, **cache)
    for index in (tmp_path / "cache").rglob("*.nbi"):
        version = pickle.dumps(numba.__version__, protocol=-1)
        assert index.read_bytes().startswith(version)
        index.write_bytes(index.read_bytes()[:-5] if harm == "half" else version + b"cmine.one\nGone\n.")
    assert run(package, **cache) == (4.0, False)
    assert run(package, **cache) == (4.0, True)


def test_without_any_folder_to_write_kernels_are_compiled_in_each_process(package, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    nowhere = str(tmp_path / "file" / "below")
    (package / "__pycache__").write_text("in the way")
    env = {"NUMBA_CACHE_DIR": nowhere, "HOME": nowhere, "XDG_CACHE_HOME": nowhere, "PYTHONDONTWRITEBYTECODE": "1"}
    assert run(package, **env) == (4.0, False)


def test_a_folder_that_fills_up_is_no_reason_to_fail(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    @module.jit
    def twice(x):
        return x * 2

    monkeypatch.setattr(module.caching.FunctionCache, "_save_overload", full)
    assert twice(3.0) == 6.0


def test_all_compiled_code_goes_through_jit():
    """numba's own decorators would miss the cache rule and the settings."""
    for path in [path for folder in (KERNELS, POLICIES, SIMULATE) for path in folder.glob("*.py")]:
        text = path.read_text()
        assert "njit" not in text, path.name
        assert "fastmath" not in text and "prange" not in text, path.name


def test_no_sum_is_left_to_the_order_of_arrival():
    """index_add_, scatter_add_ and atomics add in whatever order they please."""
    for folder in (KERNELS, NEMOLAB / "engine"):
        for path in folder.glob("*.py"):
            code = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
            for name in ("index_add_(", "scatter_add_(", "index_put_(", "atomic"):
                assert name not in code, (path.name, name)


def test_unowned_arrays_are_the_same_memory_and_leave_counts_alone():
    """Nested in tuples too; the caller's references are what they were."""

    @numba.njit
    def fill(parts):
        inner, last = unowned(parts)
        for at in range(len(last)):
            last[at] += inner[0][at] + inner[1]
        return last.sum()

    first, last = np.arange(5), np.zeros(5, np.int64)
    before = sys.getrefcount(first), sys.getrefcount(last)
    for _ in range(3):
        fill(((first, 7), last))
    assert last.tolist() == [3 * (at + 7) for at in range(5)]
    assert (sys.getrefcount(first), sys.getrefcount(last)) == before


def find_shared_names(modules):
    """Names that several compiled functions of these modules go by: the linker finds functions by module and name."""
    functions = {
        id(value): (value.py_func.__module__, value.py_func.__qualname__)
        for found in modules
        for value in vars(found).values()
        if isinstance(value, numba.core.registry.CPUDispatcher)
    }
    names = list(functions.values())
    return sorted({name for name in names if names.count(name) > 1 or "<locals>" in name[1]})


def test_compiled_functions_have_names_of_their_own():
    import importlib

    files = [*KERNELS.glob("*.py"), *POLICIES.glob("*.py"), *SIMULATE.glob("*.py")]
    rooms = {KERNELS: "nemolab.kernels", POLICIES: "nemolab.policy", SIMULATE: "nemolab.simulate"}
    modules = [
        importlib.import_module(f"{rooms[file.parent]}.{file.stem}") for file in files if file.stem != "__init__"
    ]
    assert find_shared_names(modules) == []


def test_a_shared_name_is_found():
    from types import SimpleNamespace

    def make(number):
        def same(x):
            return x + number

        return numba.njit(same)

    (found,) = find_shared_names([SimpleNamespace(one=make(1), two=make(2))])
    assert found[1].endswith("make.<locals>.same")
