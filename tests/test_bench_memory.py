"""`nemolab bench card-memory`: whose bytes are counted, when the driver is asked, and what is refused. On twins."""

import threading

import pytest
from faults import run_cli
from synthetic import write_checkpoint

from nemolab.errors import EngineError, UsageError
from nemolab.measure import bench_card_memory as module
from nemolab.measure.bench_card_memory import Watch, bench_card_memory
from nemolab.store import Store, ensure_store


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    path = tmp_path_factory.mktemp("bench") / "model"
    write_checkpoint(path, pattern="ME*EE", hidden=32, latent=32, inter=32, experts=8, top_k=2)
    return Store.open(ensure_store(path))


class FakeMeter:
    """A card of which 100 bytes are others', and more and more is ours."""

    touched = False

    def __init__(self, step_bytes: int = 2**20):
        self.asked, self._step_bytes = 0, step_bytes

    def used_bytes(self) -> int:
        self.asked += 1
        return 100 + self._step_bytes * (self.asked - 1)


def test_memory_is_what_the_driver_tells_less_what_others_held(store):
    meter = FakeMeter()
    found = bench_card_memory(store.path, device="twin", vram_gib=1, prompt_tokens=5, tokens=2, meter=meter)
    assert found["asked"] == meter.asked - 1 >= 3, "each phase is looked at once at least"
    assert found["peak_gib"] == found["decode_gib"] == found["asked"] / 2**10
    assert found["load_gib"] < found["prompt_gib"] < found["decode_gib"] and found["within_budget"]
    assert [row["name"] for row in found["rows"]] == [f"card_memory.{of}" for of in ("load", "prompt", "decode")]
    assert found["rows"][0]["settings"]["planned"]["total_bytes"] == found["planned_gib"] * 2**30
    assert found["found_gib"] is None, "a twin has no account of its own"
    assert not [name for name in found["rows"][0]["settings"] if name.endswith(("_s", "_ms"))], "not timed"


def test_a_peak_between_two_looks_at_the_engine_is_seen():
    watch = Watch(FakeMeter())
    with watch.phase("load"):
        pass
    assert watch.most_bytes["load"] == watch.asked * 2**20


def watching():
    return [thread for thread in threading.enumerate() if thread.name == "nemolab-watch"]


def test_an_interrupt_as_watching_begins_leaves_no_thread_at_it(monkeypatch):
    real = threading.Thread.start

    def interrupt(thread):
        real(thread)
        raise KeyboardInterrupt

    watch = Watch(FakeMeter())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt), watch.phase("load"):
            raise AssertionError("nothing is done unwatched")
    assert watching() == []
    with watch.phase("load"):
        assert all(thread.daemon for thread in watching()) and watching(), "no exit of the process waits for it"


def test_a_thread_that_cannot_be_had_is_what_is_said(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"), Watch(FakeMeter()).phase("load"):
        raise AssertionError("nothing is done unwatched")


class FailingMeter(FakeMeter):
    def used_bytes(self) -> int:
        if self.asked == 1:
            raise OSError("nvmlDeviceGetMemoryInfo failed with status 15")
        return super().used_bytes()


def test_a_driver_that_ceases_to_tell_is_no_peak(store):
    with pytest.raises(EngineError, match=r"does not tell any more what is in use \(nvml.* status 15\)"):
        bench_card_memory(store.path, device="twin", vram_gib=1, prompt_tokens=5, tokens=2, meter=FailingMeter())
    with pytest.raises(ValueError, match="of the work itself"), Watch(FailingMeter()).phase("prompt"):
        raise ValueError("of the work itself")


def test_a_process_that_used_the_card_before_is_not_measured(store):
    meter = FakeMeter()
    meter.touched = True
    with pytest.raises(UsageError, match="used the card already, .* a process of its own"):
        bench_card_memory(store.path, device="twin", meter=meter)


def test_memory_needs_a_driver_that_tells(store):
    with pytest.raises(UsageError, match="'twin' has no memory of its own"):
        bench_card_memory(store.path, device="twin")
    with pytest.raises(UsageError, match="1 of each"):
        bench_card_memory(store.path, device="twin", tokens=0, meter=FakeMeter())


def test_the_command_fails_where_memory_was_exceeded(store, monkeypatch):
    monkeypatch.setattr(module, "open_meter", lambda device: FakeMeter(step_bytes=2**31))
    words = ("card-memory", store.path, "--device", "twin", "--vram", "1GiB", "--prompt", 5, "--tokens", 1)
    code, out, err = run_cli("bench", *words)
    assert code == 1 and "GiB were in use, 1 allowed" in err and "within_budget" in out
