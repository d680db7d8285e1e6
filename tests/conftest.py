"""Shared by all tests: the shipped model, a cache folder of their own, and skips that can be made to fail."""

import mmap
import os
import shutil
import signal
import tempfile
import uuid
from pathlib import Path

import pytest
from triton_interpreter import run_in_child

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config):
    """Keep tests away from the user's cache and model, in this process and in those that tests start."""
    config.nemolab_cache = tempfile.mkdtemp(prefix="nemolab-tests-")
    os.environ["NEMOLAB_CACHE"] = config.nemolab_cache
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's idle threads would spin beside other programs
    # A shell's background job ignores Ctrl-C and hands that on; tests of interrupts need it, here and in children.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("NEMOLAB_HOME", "NEMOLAB_MODEL", "NEMOLAB_TRACE"):
        os.environ.pop(name, None)


def pytest_unconfigure(config):
    shutil.rmtree(config.nemolab_cache, ignore_errors=True)


def pytest_runtest_setup(item):
    """Skip what this machine lacks; fail instead where NEMOLAB_REQUIRE names it: NEMOLAB_REQUIRE=gpu,nvme."""
    required = {word.strip() for word in os.environ.get("NEMOLAB_REQUIRE", "").split(",")}
    for need, have in HAVE.items():
        if item.get_closest_marker(need) and not have():
            (pytest.fail if need in required else pytest.skip)(f"this machine has no {need}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Tests of kernels in Triton's interpreter run in a child."""
    return True if run_in_child(pyfuncitem) else None


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def has_direct_io() -> bool:
    """A real O_DIRECT read in the folder where tests write: opening alone proves nothing."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return False
        try:
            with mmap.mmap(-1, 4096) as page:
                return os.preadv(descriptor, [page], 0) == 4096
        except OSError:
            return False
        finally:
            os.close(descriptor)


HAVE = {"gpu": has_gpu, "nvme": has_direct_io}


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    """`data/tiny`, the trained checkpoint that ships."""
    return ROOT / "data" / "tiny"


@pytest.fixture(scope="session")
def texts_path() -> Path:
    """`data/texts`, the passages it has not seen."""
    return ROOT / "data" / "texts"


@pytest.fixture(scope="session")
def root_path() -> Path:
    """The clone."""
    return ROOT


@pytest.fixture
def real_cgroup():
    """A cgroup of 1 GiB with one of no limit in it, where this process may make them; removed after its processes."""
    from nemolab.system.cgroups import find_cgroups

    # Version 2 gives a controller only to the children of a cgroup that says so, and never below one with processes.
    own = next((cgroup for cgroup in reversed(find_cgroups("memory")) if _hands_memory_on(cgroup)), None)
    if own is None:
        pytest.skip("no cgroup here gives its children a memory limit")
    outer = own.folder / f"nemolab-test-{uuid.uuid4().hex[:8]}"
    inner = outer / "inner"
    limit = "memory.limit_in_bytes" if own.version == 1 else "memory.max"
    made = []
    try:
        for folder in (outer, inner):
            folder.mkdir()
            made.append(folder)
            if own.version == 2 and folder is outer:
                (folder / "cgroup.subtree_control").write_text("+memory")
        (outer / limit).write_text(str(2**30))
        yield inner, own.name.rstrip("/") + "/" + outer.name, limit
    except OSError as problem:
        pytest.skip(f"cannot make a cgroup in {own.folder} ({problem.strerror})")
    finally:
        for folder in reversed(made):
            folder.rmdir()


def _hands_memory_on(cgroup) -> bool:
    if cgroup.version == 1:
        return cgroup.exact
    try:
        return "memory" in (cgroup.folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
