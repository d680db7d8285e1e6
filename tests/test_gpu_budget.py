"""A budget of a card's memory that the process does not exceed, and of RAM, of which page-locked memory is a part."""

import gc
import json
import math
import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from synthetic import one_thread, write_checkpoint

from nemolab.engine import Engine, memory
from nemolab.engine.gpu.beside import DIFFERENCE, TOLD
from nemolab.engine.gpu.device import Card, StandIn, Usage
from nemolab.engine.gpu.guard import SPARE_BYTES, Guard
from nemolab.engine.gpu.model import CardModel
from nemolab.engine.gpu.plan import least_bytes
from nemolab.errors import EngineError, StoreError
from nemolab.store import page_lock
from nemolab.system.memory import Limit, Memory

GIB, MIB = 2**30, 2**20
SIZES = {"pattern": "ME*E", "experts": 6, "inter": 32, "latent": 32, "hidden": 32, "top_k": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("budget") / "model", **SIZES)


class FakeCard(StandIn):
    """A device with `.usage`, that keeps book of limits and of what was given back."""

    def __init__(self, reserved=GIB, beside=600 * MIB, used=None, total=8 * GIB):
        super().__init__()
        used = reserved + (beside or 0) if used is None else used
        self.usage = Usage(reserved, reserved, beside, used, total)
        self.limits, self.released, self.begun, self.kept_bytes = [], 0, 0, 0

    def change(self, **fields):
        self.usage = self.usage._replace(**fields)

    def set_limit(self, nbytes):
        self.limits.append(nbytes)

    def release(self):
        self.released += 1
        self.change(reserved_bytes=self.usage.reserved_bytes - self.kept_bytes)

    def begin(self):
        self.begun += 1

    def look(self):
        return self.usage


def make_guard(card, budget=4 * GIB, context=768 * MIB):
    return Guard(card, SimpleNamespace(budget_bytes=budget, context_bytes=context))


def test_torch_gets_what_the_budget_leaves_as_planned_or_as_found():
    card = FakeCard()
    guard = make_guard(card)
    assert card.limits == [4 * GIB - 768 * MIB]
    guard.run(5, "a prompt", lambda: card.change(beside_bytes=700 * MIB))
    assert len(card.limits) == 1, "as planned"
    guard.run(5, "a prompt", lambda: card.change(beside_bytes=900 * MIB))
    assert card.limits[1:] == [4 * GIB - 900 * MIB - SPARE_BYTES] == [guard.limit_bytes]
    guard.run(5, "a prompt", lambda: card.change(beside_bytes=800 * MIB))
    assert len(card.limits) == 2, "what was taken once may be taken again"
    guard.close()
    guard.close()
    assert card.limits[2:] == [None]


def test_a_difference_that_falls_again_loosens_the_limit_and_is_called_one():
    card = FakeCard()
    card.change(told=False)
    guard = make_guard(card)
    guard.run(5, "a prompt", lambda: card.change(beside_bytes=3 * GIB))
    guard.run(5, "a prompt", lambda: card.change(beside_bytes=800 * MIB))
    assert card.limits[1:] == [GIB - SPARE_BYTES, 4 * GIB - 800 * MIB - SPARE_BYTES] and card.limits[2] == (
        guard.limit_bytes
    )
    card.change(beside_bytes=3 * GIB + MIB)
    with pytest.raises(EngineError, match=r"3\.00 GiB beside it \(a difference: what another program took .*\)"):
        guard.run(5, "a prompt", lambda: None)


@pytest.mark.parametrize("broken", ["_decoder", "_token", "device", "team"])
def test_a_part_that_does_not_close_keeps_nothing_else_open(path, monkeypatch, broken):
    closed = []

    def fail(*_):
        raise RuntimeError("CUDA error: unspecified launch failure")

    card = FakeCard(reserved=MIB)
    monkeypatch.setattr("nemolab.engine.gpu.side.open_device", lambda name: card)
    card.total_bytes = 8 * GIB
    engine = Engine(path, device="twin", vram_gib=4)
    part = {"device": card, "team": engine._team}.get(broken) or getattr(engine._model, broken)
    monkeypatch.setattr(part, "wait" if broken == "device" else "close", fail)
    memory, cache = engine._model.memory, engine._cache
    for each, name in ((memory, "memory"), (cache, "cache")):
        real = each.close
        monkeypatch.setattr(each, "close", lambda name=name, real=real: (closed.append(name), real()))
    with pytest.raises(RuntimeError, match="unspecified launch"):
        engine.close()
    assert closed == ["memory", "cache"] and card.limits[-1] is None and cache.watcher is None
    monkeypatch.undo()
    if broken != "device":
        part.close()  # other tests count threads


def test_a_model_that_did_not_close_is_closed_the_next_time(path, monkeypatch):
    engine = Engine(path, device="twin")
    side, model = engine._card, engine._model
    with monkeypatch.context() as failing:
        failing.setattr(model, "close", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            side.close()
    closed = []
    monkeypatch.setattr(model, "close", lambda real=model.close: (closed.append(1), real()))
    engine.close()
    side.close()
    assert closed == [1]


@pytest.mark.parametrize("broken", ["_limit", "_check_held"])
def test_a_model_refused_when_it_is_there_is_closed_and_kept_by_no_error(path, monkeypatch, broken):
    made, closed, real = [], [], getattr(Guard, broken)

    class Noted(CardModel):
        def __init__(self, *parts):
            super().__init__(*parts)
            made.append(weakref.ref(self))

        def close(self):
            closed.append(1)
            super().close()

    def refuse(guard):
        if made:
            raise EngineError("more than the budget")
        real(guard)

    monkeypatch.setattr("nemolab.engine.gpu.side.CardModel", Noted)
    monkeypatch.setattr(Guard, broken, refuse)
    gc.disable()
    try:
        with pytest.raises(EngineError, match="more than the budget") as kept:
            Engine(path, device="twin")
        assert closed == [1] and made[0]() is None and kept.tb is not None
    finally:
        gc.enable()


def test_a_limit_that_was_not_lifted_is_lifted_the_next_time(monkeypatch):
    card = FakeCard()
    guard = make_guard(card)
    with monkeypatch.context() as failing:
        failing.setattr(card, "set_limit", lambda nbytes: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            guard.close()
    guard.close()
    assert card.limits[1:] == [None]


def test_memory_that_ends_for_a_conversation_or_its_copy_is_an_error_of_ours(path, monkeypatch):
    from nemolab.engine.gpu import state

    def run_out(device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with Engine(path, device="twin") as engine:
        held = engine.new_state()
        engine.step(40, held)
        monkeypatch.setattr(state, "give_back", run_out)
        with pytest.raises(EngineError, match=r"does not suffice for a conversation: .*2\.00 GiB"):
            engine.new_state()
        with pytest.raises(EngineError, match=r"does not suffice for a copy of a conversation: .*2\.00 GiB"):
            held.copy()
        monkeypatch.undo()
        assert torch.equal(engine.step(41, held.copy()), engine.step(41, held))
    with pytest.raises(EngineError, match="closed"):
        engine.new_state()


def test_a_closed_engine_leaves_no_model_behind(path):
    """Not even until the next garbage collection: the next engine's weights need its place on the card."""
    engine = Engine(path, device="twin", transfer="rows", prefetch=1)
    state = engine.new_state()
    for token in (40, 41, 42):
        engine.step(token, state)
    engine.prefill([40, 41], engine.new_state())
    model, head = weakref.ref(engine._model), weakref.ref(engine._model.head)
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert model() is None and head() is None
    finally:
        gc.enable()


def test_without_a_budget_nothing_is_limited_or_measured():
    card = FakeCard(reserved=7 * GIB)
    guard = make_guard(card, budget=None)
    assert guard.run(5, "a prompt", lambda: 7) == 7 and (card.limits, card.begun) == ([], 0)
    guard.close()
    assert card.limits == []


def test_prompts_and_the_first_tokens_are_watched_and_later_ones_ever_more_rarely():
    card = FakeCard()
    guard = make_guard(card)
    watched = []
    for tokens in [9, *[1] * 40, 0, 1]:
        before = card.begun
        guard.run(tokens, "", lambda: None)
        watched.append(card.begun > before)
    assert [number for number, was in enumerate(watched) if was] == [0, 1, 2, 4, 8, 16, 32, 41, 42]


def test_a_process_above_its_budget_is_told_so_before_it_goes_on():
    card = FakeCard()
    guard = make_guard(card)
    guard.run(5, "a prompt", lambda: card.change(reserved_bytes=3 * GIB, beside_bytes=1200 * MIB))
    ran = []
    with pytest.raises(
        EngineError, match=r"holds 4\.17 GiB .*3\.00 GiB by torch, 1\.17 GiB beside it.* the 4\.00 GiB that vram_gib"
    ):
        guard.run(5, "a prompt", lambda: ran.append(1))
    assert not ran and card.released == 1
    card.kept_bytes = 200 * MIB  # torch kept that much for the next tensors, and can give it back
    guard.run(5, "a prompt", lambda: ran.append(1))
    assert ran and card.released == 2


def test_a_model_that_does_not_fit_is_told_so_at_once():
    card = FakeCard()
    with pytest.raises(EngineError, match=r"holds 5\.59 GiB"):
        make_guard(card).load("this model", lambda: card.change(reserved_bytes=5 * GIB))


def test_a_model_that_ends_the_memory_while_it_loads_asks_for_more():
    def load():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    with pytest.raises(
        EngineError, match=r"for this model: .* 2\.00 GiB; .* of 4\.00 GiB that vram_gib allows; allow more$"
    ):
        make_guard(FakeCard()).load("this model", load)


def run_out(card, budget=4 * GIB, tokens=5):
    def compute():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity ...")

    with pytest.raises(EngineError) as refusal:
        make_guard(card, budget).run(tokens, "a pass of 5 tokens behind 0", compute)
    assert card.released == 1 and refusal.value.__context__ is None
    return str(refusal.value)


def test_running_out_says_who_holds_what():
    words = run_out(FakeCard(reserved=3 * GIB))
    assert "for a pass of 5 tokens behind 0: CUDA out of memory. Tried to allocate 2.00 GiB; torch holds 3.00" in words
    assert words.endswith(
        "600.00 MiB are taken beside it, of 4.00 GiB that vram_gib allows; fewer tokens at once need less"
    )
    words = run_out(FakeCard(reserved=GIB, used=7 * GIB))
    assert (
        "other programs hold 5.41 GiB of the card's 8.00 GiB, 1.00 GiB are free: it is the card that is full" in words
    )
    words = run_out(FakeCard(reserved=6 * GIB, used=8 * GIB), budget=None)
    assert "torch holds 6.00 GiB" in words and "vram_gib" not in words and "other programs hold 1.41 GiB" in words
    assert "a shorter conversation" in run_out(FakeCard(reserved=3 * GIB), tokens=1)
    assert "768.00 MiB are taken beside it" in run_out(FakeCard(reserved=3 * GIB, beside=None)), "not known: as planned"


def test_memory_that_ends_for_kernels_is_told_alike_and_other_errors_stay_what_they_are():
    def fail(words):
        raise RuntimeError(words)

    def copy_fails():
        raise StoreError("copying 2 times 3 bytes: CUDA_ERROR_OUT_OF_MEMORY")

    with pytest.raises(EngineError, match=r"for a prompt: Triton Error \[CUDA\]: out of memory; torch holds"):
        make_guard(FakeCard()).run(5, "a prompt", lambda: fail("Triton Error [CUDA]: out of memory"))
    with pytest.raises(EngineError, match=r"for a prompt: copying 2 times 3 bytes: CUDA_ERROR_OUT_OF_MEMORY; torch"):
        make_guard(FakeCard()).run(5, "a prompt", copy_fails)
    card = FakeCard()
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        make_guard(card).run(5, "a prompt", lambda: fail("CUDA error: an illegal memory access was encountered"))
    assert card.released == 0


def test_an_error_that_is_kept_keeps_no_tensors():
    kept = []

    def compute():
        tensor = torch.zeros(5)
        kept.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    gc.disable()
    try:
        with pytest.raises(EngineError) as refusal:
            make_guard(FakeCard()).run(5, "", compute)
        assert kept[0]() is None and refusal.value.__traceback__ is not None
    finally:
        gc.enable()


def test_of_several_limits_on_a_card_the_tightest_holds(monkeypatch):
    """torch keeps one for the process; engines come and go."""
    fractions = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))

    def make_card(index):
        card = object.__new__(Card)
        card.torch_device, card.total_bytes = torch.device("cuda", index), 8 * GIB
        return card

    first, second, other = make_card(0), make_card(0), make_card(1)
    for card, limit in ((first, 4 * GIB), (second, 2 * GIB), (other, GIB), (first, 3 * GIB), (second, None)):
        card.set_limit(limit)
    assert fractions == [0.5, 0.25, 0.125, 0.25, 0.375]
    first.set_limit(None)
    assert fractions[-1] == 1.0


@pytest.mark.parametrize(
    "value", [True, 0, -1, math.nan, math.inf, -math.inf, "8", 2**40, pytest.param(10**5000, id="huge"), np.bool_(True)]
)
def test_a_budget_that_is_none_is_refused_with_the_least(path, value):
    words = r"vram_gib is .*; a positive number of GiB is needed, \d+\.\d\d [MG]iB or more .* less than 1048576$"
    with pytest.raises(EngineError, match=words):
        Engine(path, device="twin", vram_gib=value)


@pytest.mark.parametrize("value", [np.int64(2), np.float32(2), np.float64(2)])
def test_a_budget_may_be_a_number_of_numpy(path, value):
    with Engine(path, device="twin", vram_gib=value) as engine:
        assert engine.memory()["card"]["budget_bytes"] == 2 * GIB


def test_the_least_that_is_said_runs_and_less_does_not(path):
    with Engine(path, device="twin") as engine:
        least = least_bytes(engine.store, 6) / GIB
    with pytest.raises(EngineError, match=r"vram_gib allows .* but this model takes .*; that much is needed"):
        Engine(path, device="twin", vram_gib=least - 1e-6)
    with Engine(path, device="twin", vram_gib=least + 1e-6) as engine:
        assert engine.memory()["card"]["planned"]["total_bytes"] == int(least * GIB)


class TakenCard(FakeCard):
    """One of 8 GiB of which other programs leave so much."""

    def __init__(self, left):
        super().__init__(reserved=0, beside=600 * MIB, used=8 * GIB - left + 600 * MIB)
        self.name, self.total_bytes = "a card", 8 * GIB


def open_on(card, path, monkeypatch, **settings):
    monkeypatch.setattr("nemolab.engine.gpu.side.open_device", lambda name: card)
    with Engine(path, device="twin", **settings) as engine:
        return engine.memory()["card"]["planned"]


def test_without_a_budget_what_is_free_decides_the_passes(path, monkeypatch):
    ample = open_on(TakenCard(7 * GIB), path, monkeypatch)
    tight = open_on(TakenCard(ample["total_bytes"] - 1), path, monkeypatch)
    assert tight["piece_tokens"] < ample["piece_tokens"] == 1024 and ample["pass_tokens"] == 8192
    with pytest.raises(EngineError, match=r"a card has room for 512\.00 MiB, but this model takes"):
        open_on(TakenCard(512 * MIB), path, monkeypatch)


def test_a_budget_that_others_leave_no_room_for_is_said(path, monkeypatch, capsys):
    open_on(TakenCard(7 * GIB), path, monkeypatch, vram_gib=2)
    assert "are free" not in capsys.readouterr().err
    open_on(TakenCard(512 * MIB), path, monkeypatch, vram_gib=2)
    assert "but only 512.00 MiB of the 8.00 GiB of a card are free: close other" in capsys.readouterr().err


@one_thread
def test_after_memory_ran_out_a_shorter_prompt_runs(path, monkeypatch):
    from nemolab.engine.gpu import twins

    ids, real = list(range(40, 60)), twins.linear_prompt

    def short_only(packed, x, *others):
        if x.shape[0] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        real(packed, x, *others)

    with Engine(path, device="twin") as engine:
        wanted = engine.prefill(ids[:9], engine.new_state())
        monkeypatch.setattr(twins, "linear_prompt", short_only)
        state = engine.new_state()
        with pytest.raises(EngineError, match="does not suffice for a pass of 20 tokens behind 0"):
            engine.prefill(ids, state)
        with pytest.raises(EngineError, match="half-way"):
            engine.step(ids[0], state)
        assert torch.equal(engine.prefill(ids[:9], engine.new_state()), wanted)


def test_memory_tells_the_budget_the_plan_by_part_and_what_was_found(path):
    with Engine(path, device="twin", vram_gib=4) as engine:
        card = engine.memory()["card"]
    parts = ("dense", "experts", "state", "prompt", "workspace", "context")
    assert card["planned"]["total_bytes"] == sum(card["planned"][f"{part}_bytes"] for part in parts)
    assert card["limit_bytes"] == card["budget_bytes"] - card["planned"]["context_bytes"] == 4 * GIB - 768 * MIB
    assert card["found"] == {"dense_bytes": pytest.approx(card["planned"]["dense_bytes"], rel=0.05)}


# --- RAM, of which page-locked memory is a part


@pytest.fixture
def cgroup(monkeypatch):
    """A cgroup of 1 GiB with `.used_bytes` in use, wherever memory is asked after; `.locked`: what was locked."""
    told = SimpleNamespace(locked=[], used_bytes=0)

    def read_memory():
        return Memory((Limit("MemAvailable", 32 * GIB, GIB), Limit("cgroup /box memory.max", GIB, told.used_bytes)))

    for module in (memory, page_lock):
        monkeypatch.setattr(module, "read_memory", read_memory)
    locker = type(StandIn().locker)
    monkeypatch.setattr(locker, "lock", lambda _, at, nbytes: told.locked.append(nbytes))
    return told


def test_a_budget_above_the_cgroups_limit_is_refused_before_anything_is_locked(path, cgroup):
    with pytest.raises(EngineError, match=r"a cache of 2\.00 GiB was asked for, .*limit: cgroup /box memory\.max"):
        Engine(path, device="twin", ram_cache_gib=2)
    assert cgroup.locked == []
    with Engine(path, device="twin", ram_cache_gib=0.1) as engine:
        engine.step(40, engine.new_state())
    assert sum(cgroup.locked) > 0


def test_the_ring_for_what_is_not_locked_is_counted_beside_the_cache(path):
    beside = {}
    for device in ("cpu", "twin"):
        with Engine(path, device=device) as engine:
            dense = sum(module.nbytes for module in engine.store.dense.values())
            ring = engine.config.top_k * engine.store.block_bytes
            beside[device] = engine.budget.beside_bytes - (dense if device == "cpu" else 0)
            embeddings = engine.store.dense["backbone.embeddings"].nbytes
    assert beside["twin"] == beside["cpu"] + ring + embeddings


def test_a_chunk_that_memory_has_no_room_for_is_not_locked(cgroup):
    row = 4096
    lock = page_lock.PageLock(0, 10 * row, row, StandIn().locker, chunk_bytes=4 * row)
    cgroup.used_bytes = GIB - 3 * row
    problem = lock.grow(10 * row)
    assert "the next 16.00 KiB would not fit the 12.00 KiB left (limit: cgroup /box memory.max)" in problem
    assert cgroup.locked == [] and lock.locked_bytes == 0
    cgroup.used_bytes = 0
    assert lock.grow(10 * row) is None and cgroup.locked == [4 * row, 4 * row, 2 * row]


# --- on a card


def sizes(card):
    return card["peak"]["total_bytes"], card["found"]["reserved_bytes"] + card["found"]["beside_bytes"]


@pytest.mark.gpu
def test_a_card_tells_what_is_held_beside_torch(tiny_path):
    with Engine(tiny_path, device="cuda", vram_gib=2) as engine:
        engine.chat([{"role": "user", "content": "What is TCP?"}], max_tokens=8)
        card = engine.memory()["card"]
    assert card["found"]["beside_is"] in (TOLD, DIFFERENCE), card["found"]
    assert 100 * MIB < card["found"]["beside_bytes"] < 2 * GIB
    assert max(sizes(card)) <= card["budget_bytes"] == 2 * GIB


FIRST_ENGINE = """
import json, sys
from nemolab.engine import Engine
with Engine(sys.argv[1], device="cuda", vram_gib=2) as engine:
    engine.step(40, engine.new_state())
    print(json.dumps(engine.memory()["card"]))
"""


@pytest.mark.gpu
def test_the_first_engine_of_a_process_does_not_take_others_memory_for_its_own(tiny_path):
    others = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")  # this process's, as another one sees it
    done = subprocess.run([sys.executable, "-c", FIRST_ENGINE, str(tiny_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout.splitlines()[-1])
    assert card["found"]["in_use_bytes"] > others.nbytes
    assert 100 * MIB < card["found"]["beside_bytes"] < GIB and max(sizes(card)) <= 2 * GIB
    del others
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # it is this process's, and no engine's


@pytest.mark.gpu
def test_a_card_ends_an_allocation_beyond_the_budget_and_goes_on(tiny_path):
    with Engine(tiny_path, device="cuda", vram_gib=1.5) as engine:
        ids, state = engine.tokenizer.encode("TCP keeps a connection."), engine.new_state()
        wanted = engine.last_logits(ids, state.copy())
        left = engine.memory()["card"]
        left_bytes = left["limit_bytes"] - left["found"]["reserved_bytes"]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(left_bytes + 4 * MIB, dtype=torch.uint8, device="cuda")
        filler = torch.empty(left_bytes - 4 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(EngineError, match=r"does not suffice for a pass of .* vram_gib allows; fewer tokens"):
            engine.last_logits(ids * 200, state)
        del filler
        assert torch.equal(engine.last_logits(ids, engine.new_state()), wanted)
        assert max(sizes(engine.memory()["card"])) <= 1.5 * GIB


@pytest.mark.gpu
def test_a_closed_engine_gives_the_card_back(tiny_path):
    held = []
    for transfer in ("rows", "pull", "rows", "pull"):
        with Engine(tiny_path, device="cuda", transfer=transfer, prefetch=2) as engine:
            state = engine.new_state()
            engine.last_logits(range(300), state)
            for token in range(4):
                engine.step(token, state)
            del state
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert held[2:] == held[:2], "what libraries keep for themselves is there after the first"
