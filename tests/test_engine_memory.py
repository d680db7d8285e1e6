"""What the engine may take: a budget asked for or chosen, checked against the machine before memory is taken."""

import json
import subprocess
import sys

import pytest
from machines import GIB
from synthetic import write_checkpoint

from nemolab.engine import Engine, memory
from nemolab.errors import EngineError
from nemolab.store import repack
from nemolab.store.arena import Arena
from nemolab.system.memory import Limit, Memory
from nemolab.system.pinned import pinned_footprints


@pytest.fixture
def machine(monkeypatch):
    """Set what the system says: machine(32, 22) for GiB in all and available, and the name of the limit."""

    def tell(total_gib: float, available_gib: float, name: str = "MemAvailable"):
        total, used = int(total_gib * GIB), int((total_gib - available_gib) * GIB)
        monkeypatch.setattr(memory, "read_memory", lambda: Memory((Limit(name, total, used),)))

    return tell


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(
        tmp_path_factory.mktemp("memory"), pattern="M*EE", hidden=32, latent=32, inter=32, experts=6
    )


def test_the_default_is_everything_or_half_of_what_may_be_taken(machine):
    machine(32, 22)
    everything = memory.plan_cache(4096, 100, 2, ring=8)
    assert (everything.blocks, everything.size_bytes) == (100, 100 * 4096)
    assert memory.plan_cache(4096, 10**8, 2, ring=8).size_bytes == 10 * GIB


@pytest.mark.parametrize("slots", [0, -1, True, "3", 3.0, 2**63, 10**400])
def test_numbers_of_slots_that_cannot_be_are_refused_in_a_line(slots):
    with pytest.raises(EngineError, match="ram_cache_slots is .*; a whole number of blocks") as refused:
        memory.plan_cache(4096, 100, 2, slots=slots)
    assert len(str(refused.value)) < 200


def test_the_default_leaves_room_for_the_dense_weights(machine):
    machine(32, 22)
    assert memory.plan_cache(4096, 10**8, 2, dense_bytes=13 * GIB).size_bytes == 7 * GIB


def test_a_budget_up_to_what_may_be_taken_is_granted_and_one_above_is_refused(machine):
    machine(32, 22)
    assert memory.plan_cache(4096, 10**8, 2, gib=20).size_bytes == 20 * GIB
    with pytest.raises(EngineError, match=r"20.00 GiB is the most here; ask for no more than that \(5242880slots\)"):
        memory.plan_cache(4096, 10**8, 2, gib=21)
    with pytest.raises(EngineError, match="dense weights and prompts need 1.00 GiB: 19.00 GiB is the most here"):
        memory.plan_cache(4096, 10**8, 2, gib=19.5, dense_bytes=GIB)


def test_a_budget_above_the_room_is_refused_even_where_the_store_is_small(machine):
    machine(1, 0.9, "cgroup /box memory.max")
    with pytest.raises(EngineError) as refusal:
        memory.plan_cache(4096, 100, 2, gib=2)
    for words in (
        "a cache of 2.00 GiB was asked for",
        "921.60 MiB of 1.00 GiB are available (limit: cgroup /box memory.max)",
        "256.00 MiB must stay free",
        "665.60 MiB is the most here",
        "docker --memory, systemd MemoryMax=",
    ):
        assert words in str(refusal.value)


def test_where_not_even_the_least_fits_nothing_is_started(machine):
    machine(8, 0.6, "ulimit -v")
    with pytest.raises(EngineError, match="is the least that runs.*raise that limit .`ulimit -v unlimited`"):
        memory.plan_cache(GIB // 8, 100, 2)
    machine(8, 0.1)
    with pytest.raises(
        EngineError, match="0 B is the most here; the least that runs is 8.00 KiB: close other programs"
    ):
        memory.plan_cache(4096, 100, 2, slots=3)


def test_the_answer_says_who_limits_and_what_stays_free(machine):
    machine(4, 3, "cgroup /a/b memory.max")
    budget = memory.plan_cache(4096, 100_000, 2, gib=0.25, ring=4)
    assert budget.line() == (
        "cache: 65,536 blocks, 256.00 MiB of 3.00 GiB available (limit: cgroup /a/b memory.max), 256.00 MiB kept free"
    )
    told = json.loads(json.dumps(budget.to_dict()))
    assert (told["blocks"], told["bytes"], told["beside_bytes"]) == (65536, GIB // 4, 4 * 4096)
    assert (told["limit"], told["available_bytes"]) == ("cgroup /a/b memory.max", 3 * GIB)


def test_dense_weights_that_do_not_fit_are_refused_before_they_are_read(path, machine):
    machine(1, 0.25)
    with pytest.raises(EngineError, match="dense weights take .* must stay free"):
        Engine(path)


def test_a_refused_budget_allocates_nothing(path, machine, monkeypatch):
    made = []
    monkeypatch.setattr(Arena, "__init__", lambda *_: made.append(1))
    machine(1, 0.9)
    with pytest.raises(EngineError, match="was asked for"):
        Engine(path, ram_cache_gib=2)
    assert not made


def test_an_engine_tells_its_budget_and_its_peak(path):
    with Engine(path, ram_cache_slots=4, threads=1) as engine:
        told = engine.memory()
        assert told["peak_rss_bytes"] >= told["rss_bytes"] - 2**20 > 10**7
        assert told["cache"]["blocks"] == 4 and engine.budget.line().startswith("cache: 4 blocks, ")


def test_pinned_memory_costs_what_the_allocator_rounds_it_to():
    block = 3_096_576
    planned = 6458 * block
    real = {entry.strategy: entry.real_bytes for entry in pinned_footprints(6458, block)}
    assert real == {
        "one pin a block": 6458 * 4 * 2**20,  # 4 MiB each: 27.1 GB for a cache of 20
        "one pinned tensor": 2**35,
        "registered pages": planned,
    }
    assert all(entry.planned_bytes == planned for entry in pinned_footprints(6458, block))
    powers = pinned_footprints(8, 4096)
    assert all(entry.real_bytes == 8 * 4096 for entry in powers), "a power of two is not rounded further"
    assert [entry.real_bytes for entry in pinned_footprints(0, 4096)] == [0, 0, 0]


def test_the_engine_needs_no_locked_memory(path, tmp_path):
    store = tmp_path / "store"
    repack(path, store)
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"  # ulimit -l 64
        "from nemolab.engine import Engine\n"
        f"with Engine(None, store={str(store)!r}, threads=1) as engine:\n"
        "    engine.chat([{'role': 'user', 'content': 'a'}], max_tokens=2)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_in_a_cgroup_of_one_gib_a_cache_of_two_is_refused_and_a_small_one_chats(path, tmp_path, real_cgroup):
    store = tmp_path / "store"
    repack(path, store)
    inner, name, limit = real_cgroup

    def chat(cache: str) -> subprocess.CompletedProcess:
        words = ["chat", "--store", str(store), "--prompt", "a", "--max-tokens", "2", "--ram-cache", cache]
        code = (
            "import os, sys\n"
            f"open({str(inner / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            "from nemolab.cli import main\n"
            f"sys.exit(main({words!r}))"
        )
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    refused = chat("2GiB")
    assert refused.returncode == 1 and not refused.stdout
    assert "a cache of 2.00 GiB was asked for" in refused.stderr and f"limit: cgroup {name} {limit}" in refused.stderr
    granted = chat("4slots")
    assert granted.returncode == 0, granted.stderr
    assert f"available (limit: cgroup {name} {limit}), 256.00 MiB kept free" in granted.stderr
