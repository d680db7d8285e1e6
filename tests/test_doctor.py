"""The doctor on machines of many kinds: each check can say ok, each can complain, and none can end the examination."""

import importlib.metadata
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from machines import GIB, FakeMachine, limits_text
from packaging.specifiers import SpecifierSet
from synthetic import write_checkpoint

from nemolab.cli import main
from nemolab.doctor import Check, examine, gpu, resources, software, storage
from nemolab.doctor.check import STATUSES, attempt
from nemolab.store import direct_io, repack
from nemolab.system.memory import read_memory

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def machine(tmp_path) -> FakeMachine:
    machine = FakeMachine(tmp_path / "machine")
    machine.write("proc/cpuinfo", "processor : 0\nflags : fpu avx2 f16c avx512f\n")
    return machine


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Put an nvidia-smi of our own first on the PATH."""

    def install(card: str = "NVIDIA GeForce RTX 4060, 8188, 580.65", cuda: str = "13.0", code: int = 0) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(
            f'#!/bin/sh\n[ {code} = 0 ] || {{ echo "no devices were found"; exit {code}; }}\n'
            f'case "$1" in --query*) echo "{card}";; *) echo "| Driver 580.65   CUDA Version: {cuda}  |";; esac\n'
        )
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")

    return install


def by_name(checks) -> dict[str, Check]:
    return {check.name: check for check in checks}


# --- the GPU and torch's build


def check_gpu(machine, monkeypatch, build) -> dict[str, Check]:
    monkeypatch.setattr(gpu, "torch_build", lambda: build)
    return by_name(gpu.check_gpu(gpu.find_gpus(machine.root)))


def test_a_cpu_build_beside_a_gpu_is_warned_of(machine, monkeypatch, nvidia_smi):
    nvidia_smi()
    found = check_gpu(machine, monkeypatch, ("2.14.1+cpu", None))
    assert found["gpu"].status == "ok"
    assert found["gpu"].found == "NVIDIA GeForce RTX 4060, 8.0 GiB, driver 580.65; driver for CUDA up to 13.0"
    build = found["torch's build"]
    assert build.status == "warn" and "2.14.1+cpu" in build.found and "beside a GPU" in build.found
    assert "cannot use the card" in build.advice and "pip install torch" in build.advice


@pytest.mark.parametrize(
    ("capabilities", "status"), [((7.5,), "warn"), ((8.0,), "ok"), ((12.0, 7.0), "ok")], ids=["sm_75", "sm_80", "two"]
)
def test_a_card_older_than_the_kernels_is_warned_of(capabilities, status):
    check = gpu.check_generation(capabilities)
    assert check.status == status and f"{capabilities[0]}" in check.found


def test_a_card_tells_its_generation_where_the_tool_knows_the_question(machine, nvidia_smi, tmp_path):
    nvidia_smi()
    assert gpu.find_gpus(machine.root).capabilities == ()
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.write_text(tool.read_text().replace("--query*)", "*compute_cap) echo 8.9; echo 12.0;; --query*)"))
    assert gpu.find_gpus(machine.root).capabilities == (8.9, 12.0)


def test_a_card_whose_memory_the_driver_does_not_tell_is_warned_of():
    check = gpu.check_card_memory(f"{2**30} of {8 * 2**30}")
    assert check.status == "ok" and check.found == "1.00 GiB of 8.00 GiB in use now"
    check = gpu.check_card_memory("OSError: libnvidia-ml.so.1: cannot open shared object file")
    assert check.status == "warn" and "libnvidia-ml" in check.found and "compute,utility" in check.advice
    if not torch.cuda.is_available():
        assert "OSError" in gpu._card_memory()


@pytest.mark.parametrize("sign", ["proc/driver/nvidia/version", "dev/nvidia0", "dev/dxg"])
def test_a_gpu_without_its_tool_is_seen_by_its_signs(machine, monkeypatch, no_gpu, sign):
    machine.write(sign, "")
    found = check_gpu(machine, monkeypatch, ("2.14.1+cpu", None))
    assert found["gpu"].status == "warn" and f"/{sign}" in found["gpu"].found
    assert found["torch's build"].status == "warn"


def test_without_a_gpu_a_cpu_build_is_fine(machine, monkeypatch, no_gpu):
    found = check_gpu(machine, monkeypatch, ("2.14.1+cpu", None))
    assert found["gpu"].status == "info" and found["torch's build"].status == "ok"


def test_a_driver_too_old_for_the_build_is_warned_of(machine, monkeypatch, nvidia_smi):
    nvidia_smi(cuda="12.4")
    build = check_gpu(machine, monkeypatch, ("2.14.1+cu130", "13.0"))["torch's build"]
    assert build.status == "warn" and "12.4" in build.expected and "update the driver" in build.advice


@pytest.mark.parametrize(("answer", "status"), [("True", "ok"), ("False", "warn"), ("exit code -11", "warn")])
def test_a_card_that_torch_does_not_see_is_warned_of(machine, monkeypatch, nvidia_smi, answer, status):
    nvidia_smi()
    monkeypatch.setattr(gpu, "_torch_sees_it", lambda: answer)
    assert check_gpu(machine, monkeypatch, ("2.14.1+cu130", "13.0"))["torch's build"].status == status


@pytest.mark.parametrize("code", [1, 9])
def test_a_tool_that_fails_is_said_with_its_own_words(machine, monkeypatch, nvidia_smi, code):
    nvidia_smi(code=code)
    found = check_gpu(machine, monkeypatch, None)
    assert found["gpu"].status == "warn" and f"exit code {code}, no devices were found" in found["gpu"].found


def test_a_tool_that_hangs_is_given_up(machine, monkeypatch, nvidia_smi, tmp_path):
    nvidia_smi()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(gpu, "TOOL_SECONDS", 0.2)
    assert "no answer within" in check_gpu(machine, monkeypatch, None)["gpu"].found


def test_odd_words_of_the_tool_are_passed_on(machine, monkeypatch, nvidia_smi):
    nvidia_smi(card="NVIDIA GH200, [N/A], 580")
    assert "memory [N/A]" in check_gpu(machine, monkeypatch, None)["gpu"].found
    nvidia_smi(card="something else")
    assert check_gpu(machine, monkeypatch, None)["gpu"].found.startswith("something else")


def test_torch_s_build_is_read_and_not_imported(tmp_path, monkeypatch):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert software.torch_build() is None
    (folder / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.14.1+cpu'\ncuda: Optional[str] = None\n"
    )
    assert software.torch_build() == ("2.14.1+cpu", None)
    (folder / "version.py").write_text("__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    assert software.torch_build() == ("2.14.1+cu130", "13.0")


def test_torch_s_build_of_this_environment():
    version, _ = software.torch_build()
    assert version.partition("+")[0] == importlib.metadata.version("torch").partition("+")[0]


# --- software


def test_the_pythons_are_those_of_the_environment():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    allowed = SpecifierSet(environment["dependencies"][0].removeprefix("python"))
    (first, last), (major, minor) = software.PYTHONS, software.PYTHONS[1]
    for version in (first, last):
        assert allowed.contains(".".join(map(str, version)))
    assert not allowed.contains(f"{major}.{minor + 1}") and not allowed.contains(f"{first[0]}.{first[1] - 1}")


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 14), "ok"), ((3, 15), "warn")]
)
def test_python_outside_the_tested_range(version, status):
    assert software.check_python(version).status == status


def test_packages_are_ok_here_and_tested():
    found = by_name(software.check_packages())
    assert list(found) == [*software.KEY_PACKAGES, "other packages"]
    assert all(check.status == "ok" for check in found.values()), found
    assert all("tested" in found[name].found for name in ("torch", "transformers", "numba", "safetensors"))


def test_packages_that_are_missing_or_not_allowed_are_named(monkeypatch):
    real = importlib.metadata.version
    changed = {"torch": "2.9.0+cpu", "transformers": "5.30.1", "pandas": None, "numba": None}

    def version(name):
        if changed.get(name, "") is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return changed.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = by_name(software.check_packages())
    assert (found["torch"].status, found["torch"].found) == ("warn", "2.9.0+cpu")
    assert ">=2.11" in found["torch"].expected and "constraints.txt" in found["torch"].advice
    assert found["transformers"].status == "ok" and "(tested is 5.24.0)" in found["transformers"].found
    assert found["numba"].status == "fail" and found["numba"].found == "not installed"
    others = found["other packages"]
    assert others.status == "warn" and others.found == "missing: pandas (no notebooks)"
    changed["jinja2"] = None
    others = by_name(software.check_packages())["other packages"]
    assert others.status == "fail" and "jinja2" in others.found


def test_a_copy_that_is_not_installed_or_is_another_is_warned_of(monkeypatch):
    assert software.check_nemolab().status == "ok"
    monkeypatch.setattr(software, "__version__", "9.9")
    assert software.check_nemolab().status == "warn"

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "not installed" in software.check_nemolab().found


def test_missing_data_is_warned_of(monkeypatch, tmp_path):
    assert software.check_data().status == "ok"
    monkeypatch.setenv("NEMOLAB_HOME", str(tmp_path))
    check = software.check_data()
    assert check.status == "warn" and "NEMOLAB_HOME" in check.found and check.advice


def test_kernels_that_cannot_be_kept_are_warned_of(monkeypatch, tmp_path):
    assert software.check_kernel_cache().status == "ok"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "x"))
    check = software.check_kernel_cache()
    assert check.status == "warn" and "NUMBA_CACHE_DIR" in check.advice


@pytest.mark.parametrize(("encoding", "status"), [("utf-8", "ok"), ("UTF8", "ok"), ("ascii", "warn"), (None, "ok")])
def test_an_output_without_all_letters_is_warned_of(monkeypatch, encoding, status):
    monkeypatch.setattr(sys, "__stdout__", encoding and type("Stream", (), {"encoding": encoding}))
    assert software.check_words().status == status


# --- file systems and direct I/O


@pytest.mark.parametrize("name", ["zfs", "btrfs", "overlay", "tmpfs", "nfs4", "fuse.sshfs", "9p", "drvfs", "fuseblk"])
def test_file_systems_where_direct_may_be_emulated_are_warned_of(machine, tmp_path, name):
    machine.mount(os.path.realpath(tmp_path), name)
    place = storage.find_place(tmp_path)
    check = storage.check_file_system(place, machine.root)
    assert check.status == "warn" and check.found.startswith(f"{name} on ") and "emulated" in check.advice
    assert place.to_dict()["file_system"] == name


@pytest.mark.parametrize("name", ["ext4", "xfs"])
def test_plain_file_systems_are_not_warned_of(machine, tmp_path, name):
    machine.mount(os.path.realpath(tmp_path), name)
    check = storage.check_file_system(storage.find_place(tmp_path), machine.root)
    assert (check.status, check.advice) == ("ok", "")


def test_unknown_file_systems_and_silent_kernels_are_only_said(machine, tmp_path):
    machine.mount(os.path.realpath(tmp_path), "newfs")
    assert storage.check_file_system(storage.find_place(tmp_path), machine.root).status == "info"
    (machine.root / "proc/self/mountinfo").unlink()
    assert storage.check_file_system(storage.find_place(tmp_path), machine.root).status == "info"


def try_direct(folder) -> tuple[storage.Place, dict[str, Check]]:
    place = storage.find_place(Path(folder))
    before = set(os.listdir(place.existing))
    found = by_name(storage.check_direct_io(place))
    assert set(os.listdir(place.existing)) == before, "the trial file is gone"
    return place, found


@pytest.mark.nvme
def test_direct_io_is_verified_by_a_real_write_and_read(tmp_path):
    place, found = try_direct(tmp_path / "not" / "there")
    assert found["direct I/O"].status == "ok" and place.mode == "direct" and "aligned read" in place.reason
    assert found["alignment"].status in ("ok", "info")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_memory_is_reported_as_buffered():
    place, found = try_direct("/dev/shm")
    assert found["direct I/O"].status == "warn" and found["direct I/O"].found.startswith("buffered")
    assert place.mode == "buffered" and place.reason


def test_an_open_that_drops_the_flag_is_reported_as_buffered(tmp_path, monkeypatch):
    real = os.open
    flag = getattr(os, "O_DIRECT", 0)
    monkeypatch.setattr(direct_io.os, "open", lambda path, flags, *mode: real(path, flags & ~flag, *mode))
    place, found = try_direct(tmp_path)
    assert found["direct I/O"].status == "warn" and place.mode == "buffered" and "O_DIRECT" in place.reason


def test_a_direct_write_that_fails_is_reported_as_buffered(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(direct_io, "open_direct", lambda path, flags: (os.open(path, flags), ""))
    monkeypatch.setattr(storage.os, "pwritev", fail)
    place, found = try_direct(tmp_path)
    assert place.mode == "buffered" and "No space left on device" in found["direct I/O"].found


@pytest.mark.parametrize(
    ("alignment", "status"),
    [((512, 512), "ok"), ((4096, 16384), "ok"), ((4096, 32768), "warn"), ((0, 0), "info"), (None, "info")],
)
def test_an_alignment_that_blocks_do_not_have_is_warned_of(alignment, status):
    wants = alignment and direct_io.Alignment(*alignment)
    assert storage._check_alignment(wants).status == status


def test_a_store_that_lies_there_is_read_and_not_written(tmp_path):
    model = write_checkpoint(tmp_path / "m", pattern="M*E", hidden=32, latent=32, inter=32, experts=4)
    repack(model, tmp_path / "store")
    place, found = try_direct(tmp_path / "store")
    assert place.mode in ("direct", "buffered") and "experts.bin" in found["direct I/O"].found
    assert "holds a store" in storage.check_folder(place).found
    (tmp_path / "store" / "manifest.json").write_text("{")
    place, found = try_direct(tmp_path / "store")
    assert found["direct I/O"].status == "warn" and place.mode is None and "manifest.json" in place.reason


def test_folders_where_no_store_can_be_made_fail(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    check = storage.check_folder(storage.find_place(file))
    assert check.status == "fail" and "is a file" in check.found
    folder = tmp_path / "folder"
    folder.mkdir()
    assert storage.check_folder(storage.find_place(folder)).status == "ok"
    assert list(folder.iterdir()) == []

    check = storage.find_place("x" * 300)
    assert check.status == "fail" and "cannot be looked at (File name too long)" in check.found

    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage.tempfile, "TemporaryFile", refuse)  # root may write everywhere
    check = storage.check_folder(storage.find_place(folder / "new"))
    assert check.status == "fail" and "Permission denied" in check.found and "NEMOLAB_CACHE" in check.advice


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("NEMOLAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    report = examine()
    assert [check.name for check in report.failures] == ["store folder"] and not report.store
    assert "no home folder" in report.failures[0].found and "NEMOLAB_CACHE" in report.failures[0].advice


def test_a_full_disk_is_warned_of(tmp_path, monkeypatch):
    place = storage.find_place(tmp_path)
    assert storage.check_free(place).status in ("ok", "warn") and place.free_bytes > 0
    full = os.statvfs_result((4096, 4096, 1000, 10, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(storage.os, "statvfs", lambda path: full)
    check = storage.check_free(place)
    assert check.status == "warn" and "40.00 KiB free" in check.found


# --- memory, limits, processor, system


def test_memory_and_the_tightest_limit_are_named(machine):
    machine.v2("/a/b")
    machine.limit_v2("a", max=8 * GIB, current=GIB)
    machine.limit_v2("a/b", max=16 * GIB)
    found = by_name(resources.check_memory(read_memory(machine.root)))
    assert found["memory"].status == "ok" and "limit: cgroup /a memory.max" in found["memory"].found
    assert "cgroup /a/b memory.max 16.00 GiB" in found["other limits"].found
    assert found["cache budget"].found == "at most 3.25 GiB by default, 6.50 GiB on request"
    machine.limit_v2("a", max=GIB, current=GIB // 2)
    found = by_name(resources.check_memory(read_memory(machine.root)))
    assert found["memory"].status == "warn" and "cgroup /a memory.max" in found["memory"].advice


def test_limits_that_cannot_be_read_are_warned_of(machine):
    machine.v2("/a")
    machine.limit_v2("a", max="much")
    found = by_name(resources.check_memory(read_memory(machine.root)))
    assert found["memory limits"].status == "warn" and "'much'" in found["memory limits"].found


@pytest.mark.parametrize(
    ("locked", "gpu_present", "status"),
    [
        ("65536", False, "info"),
        ("65536", True, "warn"),
        ("8388608", True, "warn"),
        ("unlimited", True, "ok"),
        ("unlimited", False, "ok"),
    ],
)
def test_locked_memory_comes_with_the_flags_that_raise_it_where_a_card_needs_it(machine, locked, gpu_present, status):
    machine.write("proc/self/limits", limits_text(locked=locked))
    check = resources.check_memlock(machine.root, gpu_present)
    assert check.status == status
    assert ("64.00 KiB at most (ulimit -l)" in check.found) == (locked == "65536"), "a fact either way"
    if status != "warn":
        assert not check.advice and (gpu_present or "GPU" not in check.expected)
    else:
        for flag in ("ulimit -l unlimited", "--ulimit memlock=-1", "LimitMEMLOCK=infinity"):
            assert flag in check.advice


@pytest.mark.parametrize(("files", "status"), [("64", "warn"), ("1024", "ok"), ("unlimited", "ok")])
def test_few_open_files_are_warned_of(machine, files, status):
    machine.write("proc/self/limits", limits_text(files=files))
    assert resources.check_open_files(machine.root).status == status


@pytest.mark.parametrize(
    ("release", "status"),
    [("6.8.0-generic", "ok"), ("5.15.153.1-microsoft-standard-WSL2", "warn"), ("4.4.0-19041-Microsoft", "warn")],
)
@pytest.mark.parametrize("gpu_present", [True, False])
def test_windows_below_is_warned_of(machine, release, status, gpu_present):
    machine.write("proc/sys/kernel/osrelease", release)
    (check,) = resources.check_system(machine.root, gpu_present)
    assert check.status == status and (".wslconfig" in check.advice) == (status == "warn")
    assert ("pinned memory" in check.advice) == (status == "warn" and gpu_present)


@pytest.mark.parametrize(("sign", "kind"), [(".dockerenv", "docker"), ("run/.containerenv", "podman")])
def test_a_container_is_named(machine, sign, kind):
    machine.write(sign, "")
    (check,) = resources.check_system(machine.root, gpu_present=False)
    assert check.status == "ok" and f"in a {kind} container" in check.found


def test_a_quota_below_the_cores_is_warned_of(machine, monkeypatch):
    monkeypatch.setattr(resources, "usable_cores", lambda: 8)
    assert by_name(resources.check_processor(machine.root))["processor"].status == "ok"
    machine.v2("/a")
    machine.write("sys/fs/cgroup/a/cpu.max", "150000 100000")
    check = by_name(resources.check_processor(machine.root))["processor"]
    assert check.status == "warn" and "1.50 cores" in check.found and "cgroup /a" in check.found


@pytest.mark.parametrize(
    ("architecture", "text", "status"),
    [
        ("x86_64", "flags : avx avx2 f16c", "ok"),
        ("x86_64", "flags : sse4_2", "warn"),
        ("aarch64", "Features : fp asimd", "ok"),
        ("riscv64", "isa : rv64", "info"),
        ("x86_64", "", "info"),
    ],
)
def test_missing_vector_instructions_are_warned_of(machine, monkeypatch, architecture, text, status):
    name = type("Name", (), {"machine": architecture})
    monkeypatch.setattr(resources.os, "uname", lambda: name)
    machine.write("proc/cpuinfo", text)
    assert by_name(resources.check_processor(machine.root))["vector instructions"].status == status


# --- all together


def test_an_examination_of_this_machine(tmp_path):
    report = examine(tmp_path)
    names = [check.name for check in report.checks]
    for name in ("python", "torch", "data/tiny", "gpu", "memory", "locked memory", "file system", "direct I/O"):
        assert name in names
    assert report.ok and all(check.status in STATUSES and check.found for check in report.checks)
    if by_name(report.checks)["gpu"].found.startswith("no NVIDIA card"):
        assert not [check.name for check in report.checks if "ulimit -l" in check.advice]
    assert all(check.advice for check in report.checks if check.status in ("warn", "fail"))
    assert report.store["folder"] == str(tmp_path) and report.store["free_bytes"] > 0


def test_an_examination_of_a_machine_that_tells_nothing(tmp_path):
    report = examine(tmp_path, root=tmp_path / "nothing")
    assert report.ok and not [check for check in report.checks if "could not be made" in check.found]


def test_a_check_that_breaks_is_a_warning_and_not_the_end(monkeypatch, tmp_path):
    def broken(*_):
        raise ZeroDivisionError("by\nnothing")

    for place, name in (
        (software, "check_packages"),
        (resources, "check_memlock"),
        (gpu, "find_gpus"),
        (storage, "find_place"),
    ):
        monkeypatch.setattr(place, name, broken)
    report = examine(tmp_path)
    broken_ones = [check for check in report.checks if "could not be made" in check.found]
    assert [check.name for check in broken_ones] == ["packages", "gpu", "locked memory", "store folder"]
    assert all(check.found.endswith("(ZeroDivisionError: by nothing)") for check in broken_ones)


def test_a_check_that_breaks_half_way_is_one_warning():
    def look():
        yield Check("a", "ok", "here")
        raise KeyError("b")

    (check,) = attempt("both", look)
    assert check.name == "both" and check.status == "warn"


def test_the_verb_answers_people_and_scripts(capsys, tmp_path):
    assert main(["doctor", "--store", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert not err and "direct I/O" in out and "limit: " in out
    assert main(["doctor", "--store", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"checks", "ok", "memory", "store"} and told["ok"] is True
    assert all(set(check) == {"name", "status", "found", "expected", "advice"} for check in told["checks"])
    assert told["memory"]["tightest"] in [limit["name"] for limit in told["memory"]["limits"]]
    assert told["store"]["mode"] in ("direct", "buffered")


def test_a_failed_check_is_exit_code_1_and_still_a_whole_answer(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--store", str(tmp_path / "file"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is False and err.startswith("nemolab: store folder: ") and err.count("\n") == 1


def test_the_doctor_imports_neither_torch_nor_the_engine(tmp_path):
    code = (
        "import sys; from nemolab.cli import main; assert main(['doctor', '--json']) in (0, 1); "
        "print([name for name in ('torch', 'transformers', 'numba', 'nemolab.engine') if name in sys.modules], "
        "file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.stderr.splitlines()[-1] == "[]"
