"""How much memory there is, as machines of many kinds would tell it, and as this one does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from machines import GIB, V1_NO_LIMIT, FakeMachine, limits_text

from nemolab.system.cgroups import cpu_quota_cores, find_cgroups
from nemolab.system.memory import read_memory, read_rss_bytes
from nemolab.system.mounts import find_mount, read_mounts


@pytest.fixture
def machine(tmp_path) -> FakeMachine:
    return FakeMachine(tmp_path)


def tightest(machine) -> tuple[str, int]:
    memory = read_memory(machine.root)
    assert memory.notes == (), memory.notes
    return memory.tightest.name, memory.available_bytes


# --- the machine itself


def test_without_cgroups_the_machine_decides(machine):
    memory = read_memory(machine.root)
    assert (memory.total_bytes, memory.available_bytes, memory.reserve_bytes) == (32 * GIB, 24 * GIB, 2 * GIB)
    assert memory.room_bytes == 22 * GIB and memory.tightest.name == "MemAvailable" and not memory.notes


@pytest.mark.parametrize(
    ("total_gib", "reserve_gib"), [(64, 4), (32, 2), (4, 0.25), (1, 0.25), (0.5, 0.125), (0.25, 0.0625)]
)
def test_the_reserve_is_a_sixteenth_and_of_small_machines_a_quarter(tmp_path, total_gib, reserve_gib):
    assert read_memory(FakeMachine(tmp_path, total_gib).root).reserve_bytes == reserve_gib * GIB


def test_swap_is_not_counted(machine):
    with open(machine.root / "proc/meminfo", "a") as file:
        file.write("SwapTotal: 33554432 kB\nSwapFree: 33554432 kB\nSwapCached: 0 kB\n")
    assert tightest(machine) == ("MemAvailable", 24 * GIB)


def test_kernels_before_memavailable_count_free_and_droppable_pages(machine):
    machine.write("proc/meminfo", "MemTotal: 4194304 kB\nMemFree: 1048576 kB\nInactive(file): 1048576 kB\n")
    assert tightest(machine) == ("MemAvailable", 2 * GIB)


@pytest.mark.parametrize("text", [None, "", "MemTotal: many kB", "MemTotal: " + "9" * 5000 + " kB\nMemAvailable: x"])
def test_a_machine_that_does_not_tell_is_asked_another_way_and_that_is_noted(machine, text):
    (machine.root / "proc/meminfo").unlink()
    if text is not None:
        machine.write("proc/meminfo", text)
    memory = read_memory(machine.root)
    assert memory.tightest.name == "free pages" and memory.total_bytes > 0 and "meminfo" in memory.notes[0]


def test_an_empty_root_still_answers(tmp_path):
    assert read_memory(tmp_path).available_bytes > 0 and read_rss_bytes(tmp_path) == (0, 0)


# --- cgroups, version 2


def test_the_tightest_of_all_ancestors_counts(machine):
    machine.v2("/a/b/c")
    machine.limit_v2("a/b/c", max="max", current=GIB)
    machine.limit_v2("a/b", max=8 * GIB, current=2 * GIB)
    machine.limit_v2("a", max=7 * GIB, current=3 * GIB)
    assert tightest(machine) == ("cgroup /a memory.max", 4 * GIB)
    machine.limit_v2("a/b/c", max=2 * GIB, current=GIB)
    assert tightest(machine) == ("cgroup /a/b/c memory.max", GIB)


def test_a_cousin_s_limit_does_not_count(machine):
    machine.v2("/a/b")
    machine.limit_v2("a/x", max=GIB)
    machine.limit_v2("a/b/below", max=GIB)
    machine.limit_v2("a/b", max="max")
    assert tightest(machine) == ("MemAvailable", 24 * GIB)


def test_max_is_no_limit_and_zero_is_one(machine):
    machine.v2("/a")
    machine.limit_v2("a", max="max", high="max", current=5 * GIB)
    assert tightest(machine) == ("MemAvailable", 24 * GIB)
    machine.limit_v2("a", max="0")
    assert tightest(machine) == ("cgroup /a memory.max", 0)


def test_memory_high_counts_as_a_limit(machine):
    machine.v2("/a")
    machine.limit_v2("a", max=8 * GIB, high=6 * GIB, current=GIB)
    assert tightest(machine) == ("cgroup /a memory.high", 5 * GIB)


def test_page_cache_that_can_be_dropped_is_free(machine):
    machine.v2("/a")
    machine.limit_v2("a", max=8 * GIB, current=7 * GIB, stat=f"anon 5\ninactive_file {4 * GIB}\nactive_file {GIB}\n")
    assert tightest(machine) == ("cgroup /a memory.max", 5 * GIB)


def test_use_above_the_limit_leaves_nothing(machine):
    machine.v2("/a")
    machine.limit_v2("a", max=GIB, current=2 * GIB)
    memory = read_memory(machine.root)
    assert memory.available_bytes == memory.room_bytes == 0


@pytest.mark.parametrize("text", ["", "lots", "12 34", "9" * 5000, "\x00\xff", "1e9"])
def test_a_limit_that_makes_no_sense_is_noted_and_not_counted(machine, text):
    machine.v2("/a/b")
    machine.limit_v2("a/b", max=text)
    machine.limit_v2("a", max=9 * GIB)
    memory = read_memory(machine.root)
    assert memory.tightest.name == "cgroup /a memory.max"
    assert len(memory.notes) == 1 and "cgroup /a/b memory.max holds" in memory.notes[0]


def test_a_limit_that_cannot_be_read_is_noted(machine):
    machine.v2("/a")
    machine.limit_v2("a", high=9 * GIB)
    (machine.root / "sys/fs/cgroup/a/memory.max").mkdir()  # for root, permissions would not do
    memory = read_memory(machine.root)
    assert memory.tightest.name == "cgroup /a memory.high"
    assert "cgroup /a memory.max cannot be read" in memory.notes[0]


@pytest.mark.parametrize("current", [None, "none"])
def test_where_the_use_cannot_be_read_this_process_is_counted_and_that_is_noted(machine, current):
    machine.v2("/a")
    machine.limit_v2("a", max=4 * GIB, current=current)
    memory = read_memory(machine.root)
    assert memory.available_bytes == 3.5 * GIB and "memory.current" in memory.notes[0]


def test_without_memory_stat_no_page_cache_is_deducted(machine):
    machine.v2("/a")
    machine.limit_v2("a", max=4 * GIB, current=GIB)
    (machine.root / "sys/fs/cgroup/a/memory.stat").unlink()
    assert tightest(machine)[1] == 3 * GIB


# --- cgroups, version 1 and mixtures


def test_version_1_counts_with_its_names_for_everything(machine):
    machine.v1("/docker/x")
    machine.limit_v1("docker/x", 4 * GIB, 3 * GIB, f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    machine.limit_v1("docker", V1_NO_LIMIT)
    machine.limit_v1("", V1_NO_LIMIT)
    assert tightest(machine) == ("cgroup /docker/x memory.limit_in_bytes", 2 * GIB)


@pytest.mark.parametrize("limit", [V1_NO_LIMIT, 2**63 - 1, 2**64 - 1, -1])
def test_version_1_s_huge_numbers_are_no_limit(machine, limit):
    machine.v1("/a")
    machine.limit_v1("a", limit, 3 * GIB)
    assert tightest(machine) == ("MemAvailable", 24 * GIB)


def test_version_1_tells_limits_above_what_can_be_seen(machine):
    machine.v1("/docker/x", root="/docker/x")  # a container sees its own cgroup as the top
    machine.limit_v1("", V1_NO_LIMIT, GIB, f"hierarchical_memory_limit {4 * GIB}\n")
    assert tightest(machine) == ("cgroup /docker/x hierarchical_memory_limit", 3 * GIB)


def test_in_a_mixture_both_hierarchies_count(machine):
    machine.v1("/old")
    machine.v2("/new", point="/sys/fs/cgroup/unified")
    machine.limit_v1("old", 4 * GIB, GIB)
    assert tightest(machine) == ("cgroup /old memory.limit_in_bytes", 3 * GIB)
    machine.write("sys/fs/cgroup/unified/new/memory.max", 2 * GIB)
    machine.write("sys/fs/cgroup/unified/new/memory.current", 0)
    assert tightest(machine) == ("cgroup /new memory.max", 2 * GIB)


def test_other_controllers_of_version_1_are_passed_over(machine):
    machine.v1("/a")
    machine.limit_v1("a", 3 * GIB)
    machine.v1("/b", point="/sys/fs/cgroup/cpu,cpuacct", controller="cpu,cpuacct")
    machine.write("sys/fs/cgroup/cpu,cpuacct/b/memory.limit_in_bytes", 5)
    assert [cgroup.name for cgroup in find_cgroups("memory", machine.root)] == ["/a", "/"]
    assert tightest(machine) == ("cgroup /a memory.limit_in_bytes", 3 * GIB)


# --- where the hierarchy lies


def test_a_hierarchy_mounted_elsewhere_is_found(machine):
    machine.v2("/a", point="/mnt/my groups")
    machine.write("mnt/my groups/a/memory.max", 3 * GIB)
    machine.write("mnt/my groups/a/memory.current", GIB)
    assert tightest(machine) == ("cgroup /a memory.max", 2 * GIB)


def test_a_mount_of_a_part_is_matched_with_the_path(machine):
    machine.v2("/outer/inner", root="/outer")
    machine.limit_v2("inner", max=3 * GIB)
    machine.limit_v2("", max=2 * GIB)
    assert tightest(machine) == ("cgroup /outer memory.max", 2 * GIB)


def test_in_a_cgroup_namespace_the_top_is_this_process_s_own(machine):
    machine.v2("/")
    machine.limit_v2("", max=2 * GIB, current=GIB)
    assert tightest(machine) == ("cgroup / memory.max", GIB)


@pytest.mark.parametrize(("inside", "mount_root"), [("/", "/../.."), ("/../../else", "/")])
def test_where_the_path_leads_out_of_sight_the_process_is_searched_by_its_number(machine, inside, mount_root):
    machine.v2(inside, root=mount_root)
    machine.limit_v2("a/b", max=2 * GIB)
    machine.limit_v2("a/x", max=GIB)
    machine.write("sys/fs/cgroup/a/x/cgroup.procs", "1\n42\n")
    machine.write("sys/fs/cgroup/a/b/cgroup.procs", "1\n4242\n")
    assert tightest(machine) == ("cgroup /a/b memory.max", 2 * GIB)


def test_a_process_that_is_nowhere_counts_with_the_top_and_a_note(machine):
    machine.v2("/../../else")
    machine.limit_v2("", max=2 * GIB)
    machine.limit_v2("a", max=GIB)
    memory = read_memory(machine.root)
    assert memory.tightest.name == "cgroup / memory.max" and "out of sight" in memory.notes[0]


def test_a_path_that_is_not_there_any_more_counts_with_the_top(machine):
    machine.v2("/gone/a (deleted)")
    machine.limit_v2("", max=2 * GIB)
    assert read_memory(machine.root).tightest.name == "cgroup / memory.max"


def test_without_mountinfo_the_usual_places_are_tried(machine):
    machine.v2("/a")
    machine.limit_v2("a", max=2 * GIB)
    (machine.root / "proc/self/mountinfo").unlink()
    assert tightest(machine) == ("cgroup /a memory.max", 2 * GIB)


@pytest.mark.parametrize("text", ["", "nonsense", "0:/a", "::::", "0::relative", "\x00"])
def test_a_malformed_list_of_cgroups_is_no_failure(machine, text):
    machine.v2("/a")
    machine.write("proc/self/cgroup", text)
    assert read_memory(machine.root).available_bytes == 24 * GIB


@pytest.mark.parametrize("text", ["", "\n\n", "20 1 8:1", "a b c d e f - ", "1 2 3 / /x rw shared:1 ext4 none rw"])
def test_a_malformed_list_of_mounts_is_no_failure(machine, text):
    machine.write("proc/self/mountinfo", text)
    assert read_mounts(machine.root) == [] and read_memory(machine.root).available_bytes == 24 * GIB


# --- other limits


def test_ulimits_on_the_address_space_count(machine):
    machine.write("proc/self/limits", limits_text(address_space=str(6 * GIB)))
    assert tightest(machine) == ("ulimit -v", 2 * GIB), "4 GiB of 6 are mapped"
    machine.write("proc/self/limits", limits_text(data=str(GIB)))
    assert tightest(machine) == ("ulimit -d", GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_a_cpu_quota_is_found_in_any_ancestor(machine, version):
    assert cpu_quota_cores(machine.root) is None
    if version == 2:
        machine.v2("/a/b")
        machine.write("sys/fs/cgroup/a/b/cpu.max", "max 100000")
        machine.write("sys/fs/cgroup/a/cpu.max", "150000 100000")
    else:
        machine.v1("/a/b", point="/sys/fs/cgroup/cpu", controller="cpu")
        machine.write("sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1")
        machine.write("sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000")
        machine.write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "150000")
        machine.write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000")
    assert cpu_quota_cores(machine.root) == (1.5, "/a")


def test_the_innermost_and_latest_mount_holds_a_path(machine):
    machine.mount("/mnt/my disk", "xfs")
    machine.mount("/mnt/my disk", "zfs")
    machine.mount("/mnt/my", "nfs4")
    mounts = read_mounts(machine.root)
    found = [find_mount(Path(path), mounts).fs_type for path in ("/mnt/my disk/a", "/mnt/my/b", "/mnt/myself", "/")]
    assert found == ["zfs", "nfs4", "ext4", "ext4"]
    assert find_mount(Path("/x"), []) is None


# --- this machine


def test_this_machine_answers():
    memory = read_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes and memory.limits[0].limit_bytes >= memory.total_bytes
    now, peak = read_rss_bytes()
    assert 10**6 < now and now <= peak + 2**20


REPORT = """
import json, os, sys
for file in sys.argv[1:]:
    with open(file, "w") as procs:
        procs.write(str(os.getpid()))
from nemolab.system.memory import read_memory
print(json.dumps(read_memory().to_dict()))
"""


def test_a_real_cgroup_s_limit_above_a_process_is_found(real_cgroup):
    inner, name, limit = real_cgroup
    command = [sys.executable, "-c", REPORT, str(inner / "cgroup.procs")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["tightest"] == f"cgroup {name} {limit}" and told["total_bytes"] == GIB
    assert GIB // 2 < told["available_bytes"] < GIB
