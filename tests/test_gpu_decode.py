"""Tokens on a card, by twins and there: those that break off, memory that is not locked, forced routes, recording."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpu_graphs import SIZES, Graphs, run_without_graphs
from synthetic import one_thread, write_checkpoint
from test_gpu_engine import IDS, TRANSFERS, both_paths, kl, open_engine, step_through

from nemolab.engine import Engine
from nemolab.engine.gpu.device import StandIn, _NothingToLock
from nemolab.errors import EngineError, StoreError
from nemolab.simulate import check_live


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("decode") / "model", **SIZES)


@pytest.fixture(scope="module")
def wanted(path):
    return run_without_graphs(path)


class Breaks:
    """Raises `problem` at one call of a function, counted over the tokens of a test; a disk does from then on."""

    def __init__(self, function, at, problem):
        self.function, self.left, self.problem, self.broke = function, at, problem, False

    def __call__(self, *arguments, **named):
        self.left -= 1
        if self.left == 0 or (self.left < 0 and isinstance(self.problem, StoreError)):
            self.broke = True
            raise self.problem
        return self.function(*arguments, **named)


PLACES = {
    "reading from disk": lambda engine: (engine._cache.reader, "read_into"),
    "the choice": lambda engine: (engine._model._parts.step, "choice"),
    "the lookup": lambda engine: (engine._cache, "fetch"),
    "finding where": lambda engine: (engine._model._fetcher, "fetch"),
    "what follows the choice": lambda engine: (engine._model._parts.step, "finish"),
    "the table": lambda engine: (engine._model._table, "send"),
    "a launch": lambda engine: (engine._model._parts.step.step, "compute"),
    "reading ahead": lambda engine: (engine._cache, "prefetch"),
    "a recording": lambda engine: (engine._model._parts.segments, "run"),
}


@pytest.mark.parametrize(
    ("place", "transfer"),
    [*((place, "pull") for place in PLACES), ("reading from disk", "rows"), ("what follows the choice", "grouped")],
)
@one_thread
def test_a_token_that_breaks_off_ends_its_conversation_alone(path, wanted, place, transfer, monkeypatch):
    problem = StoreError("the disk said no") if place == "reading from disk" else KeyboardInterrupt()
    with open_engine(path, transfer=transfer, ram_cache_slots=9, prefetch=2) as engine:
        for at in (1, 6):
            state, (owner, name) = engine.new_state(), PLACES[place](engine)
            breaks = Breaks(getattr(owner, name), at, problem)
            monkeypatch.setattr(StandIn, "new_graphs", Graphs)
            monkeypatch.setattr(owner, name, breaks)
            with pytest.raises(type(problem)):
                step_through(engine, IDS * 4, state)
            monkeypatch.undo()
            assert breaks.broke and not state.whole
            with pytest.raises(EngineError, match="half-way"):
                engine.step(IDS[0], state)
            assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)


class Counted:
    """A function, and how often it was called."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


@one_thread
def test_after_a_token_that_broke_off_the_table_fills_again(path, monkeypatch):
    with open_engine(path) as engine:
        step, table = engine._model._parts.step, engine._model._table
        step_through(engine, IDS)
        filled = np.count_nonzero(table.host)
        monkeypatch.setattr(step, "choice", Breaks(step.choice, 2, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step(IDS[0], engine.new_state())
        monkeypatch.undo()
        late, finish = [], step.finish
        monkeypatch.setattr(step, "finish", lambda *arguments: late.append(finish(*arguments)))
        monkeypatch.setattr(engine._cache, "retell", retells := Counted(engine._cache.retell))
        step_through(engine, IDS)
        assert np.count_nonzero(table.host) == filled and not any(late), "told at once, all that is cached"
        assert retells.calls == 1, "and not again"


@one_thread
def test_an_engine_is_closed_with_a_token_half_done(path, monkeypatch):
    engine = open_engine(path)
    monkeypatch.setattr(engine._model._parts.step, "finish", Breaks(None, 1, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        engine.step(IDS[0], engine.new_state())
    engine.close()
    engine.close()


class Locked:
    """A driver that locks so many bytes."""

    def __init__(self, most_bytes):
        self.most_bytes, self.locked, self.most_seen = most_bytes, {}, 0

    def lock(self, _, address, nbytes):
        if sum(self.locked.values()) + nbytes > self.most_bytes:
            return "CUDA_ERROR_OUT_OF_MEMORY"
        self.locked[address] = nbytes
        self.most_seen = max(self.most_seen, sum(self.locked.values()))
        return None

    def unlock(self, _, address):
        del self.locked[address]


def lock_at_most(monkeypatch, most_bytes, chunk_bytes=1):
    from nemolab.store import page_lock

    locked = Locked(most_bytes)
    monkeypatch.setattr(_NothingToLock, "lock", lambda *arguments: locked.lock(*arguments))
    monkeypatch.setattr(_NothingToLock, "unlock", lambda *arguments: locked.unlock(*arguments))
    monkeypatch.setattr(page_lock.PageLock.__init__, "__defaults__", (chunk_bytes,))
    return locked


@pytest.fixture(scope="module")
def shared_bytes(path):
    """Page-locked in an engine before its cache and its ring are."""
    with pytest.MonkeyPatch.context() as patch:
        locked = lock_at_most(patch, 2**40)
        with open_engine(path, prefetch=2):
            return sum(locked.locked.values())


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("blocks", [3, 9])
@one_thread
def test_memory_that_is_not_locked_changes_no_bit(path, wanted, shared_bytes, transfer, blocks, monkeypatch, capsys):
    """A ring of three blocks is locked in any case, some of the cache's rows beside it, or what was is given back."""
    with open_engine(path) as engine:
        block_bytes = engine.store.block_bytes
    locked = lock_at_most(monkeypatch, shared_bytes + blocks * block_bytes)
    with open_engine(path, transfer=transfer, prefetch=2, ram_cache_slots=20) as engine:
        model, step = engine._model, engine._model._parts.step

        def expect(layer, expect=step.expect):
            seen = model._table.host < model.memory.addresses[0] + model.memory.locked_bytes
            assert seen.all(), "the table names nothing that is not locked"
            expect(layer)

        monkeypatch.setattr(step, "expect", expect)
        prompt = len(IDS) - 8
        assert torch.equal(step_through(engine, IDS[:12]), wanted[prompt : prompt + 12])
        assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
        held = engine.memory()["card"]["page_locked_bytes"] // block_bytes
        assert held == blocks - 3 and engine._model._fetcher._ring is not None
    assert capsys.readouterr().err.count("a small ring") == 1
    assert not locked.locked, "all is unlocked with the engine"


@one_thread
def test_a_driver_that_locks_nothing_worth_it_is_an_error_that_says_so(path, shared_bytes, monkeypatch):
    locked = lock_at_most(monkeypatch, shared_bytes + 8192)
    with open_engine(path) as engine:
        for _ in range(2):
            with pytest.raises(EngineError, match=r"no memory is page-locked for the 3 experts .*ulimit -l"):
                engine.step(IDS[0], engine.new_state())
    assert not locked.locked
    lock_at_most(monkeypatch, 0)
    with pytest.raises(EngineError, match="that card and CPU share.*ulimit -l"):
        open_engine(path)


@one_thread
def test_a_shortage_of_ram_unlocks_nothing_and_one_that_passes_is_forgotten(path, wanted, monkeypatch, capsys):
    from nemolab.engine.gpu import cache_memory
    from nemolab.store import page_lock

    locked, read_memory = lock_at_most(monkeypatch, 2**40), page_lock.read_memory
    short = SimpleNamespace(available_bytes=1000, tightest=SimpleNamespace(name="cgroup /box"))
    monkeypatch.setattr(cache_memory, "ASK_AGAIN_S", 0.0)
    with open_engine(path, ram_cache_slots=20) as engine:
        step_through(engine, IDS[:2])
        before = sum(locked.locked.values())
        monkeypatch.setattr(page_lock, "read_memory", lambda: short)
        with pytest.raises(EngineError, match=r"no memory is page-locked for a recording.*cgroup /box.*free some"):
            engine.record().__enter__()
        assert sum(locked.locked.values()) == before, "what is locked stays: unlocking frees no RAM"
        with pytest.raises(EngineError, match="the 3 experts of a layer"):
            step_through(engine, IDS)
        monkeypatch.setattr(page_lock, "read_memory", read_memory)
        assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
        memory, table = engine._model.memory, engine._model._table
        assert memory.seen_rows == 20 and engine._model._fetcher._ring is None
        assert np.count_nonzero(table.host) == 20, "what came meanwhile is in the table, too"
    assert capsys.readouterr().err.count("a small ring") == 1


@one_thread
def test_what_is_unlocked_is_named_no_more_before_it_is(path, monkeypatch):
    locked = lock_at_most(monkeypatch, 2**40)
    with open_engine(path, ram_cache_slots=20) as engine:
        step_through(engine, IDS)
        table, memory = engine._model._table, engine._model.memory
        filled, locked.most_bytes = np.count_nonzero(table.host), sum(locked.locked.values())

        def give_back():
            assert not table.host.any()
            raise StoreError("it stays locked")

        monkeypatch.setattr(memory, "give_back", give_back)
        with pytest.raises(StoreError, match="it stays locked"):
            engine.record(cold=False).__enter__()
        assert np.count_nonzero(table.host) == filled > 0, "told again, whatever came of it"


@one_thread
def test_what_was_locked_late_is_told_at_the_next_lookup(path):
    with open_engine(path) as engine:
        step_through(engine, IDS)
        table, memory = engine._model._table, engine._model.memory
        filled = np.count_nonzero(table.host)
        table.clear()
        memory.is_late = True
        step_through(engine, IDS[:1])
        assert np.count_nonzero(table.host) == filled and not memory.is_late


@pytest.mark.parametrize("transfer", TRANSFERS)
@one_thread
def test_recording_and_forcing_find_room_where_the_cache_has_locked_all(
    path, wanted, shared_bytes, transfer, monkeypatch
):
    with open_engine(path) as engine:
        block_bytes = engine.store.block_bytes
    locked = lock_at_most(monkeypatch, shared_bytes + 12 * block_bytes)
    with open_engine(path, transfer=transfer, prefetch=2, ram_cache_slots=20) as engine:
        assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
        assert locked.most_bytes - sum(locked.locked.values()) < 4096, "not a page is left"
        engine.force_routing([[7, 0, 11], [5, 4, 3]])
        forced = step_through(engine, IDS[:4])
        engine.force_routing(None)
        with engine.record() as recorder:
            assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
        assert len(recorder.trace().experts) == len(wanted)
        assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
        assert not torch.equal(forced, step_through(engine, IDS[:4]))
    assert not locked.locked


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ([[7, 0, 11], [5, 4]], "chosen are no array .*; whole numbers are needed"),
        ("abc", r"of shape \[\], <U3; whole numbers \[2, 3\]"),
        ([[7.0, 0, 11], [5, 4, 3]], "float64; whole numbers"),
        ([[2**70, 0, 11], [5, 4, 3]], "object; whole numbers"),
        ([[True, False, True]] * 2, "bool; whole numbers"),
    ],
)
@one_thread
def test_forced_experts_of_other_types_are_refused(path, chosen, words):
    with open_engine(path) as engine:
        with pytest.raises(EngineError, match=words):
            engine.force_routing(chosen)
        with pytest.raises(EngineError, match="guesses are no array"):
            engine.force_routing([[7, 0, 11], [5, 4, 3]], [[1], [1, 2]])


@one_thread
def test_forced_experts_are_those_used_and_counted(path):
    layers, top_k = 2, 3
    chosen = np.array([[7, 0, 11], [5, 4, 3]], np.int32)
    with open_engine(path, ram_cache_slots=9, prefetch=2) as engine:
        free = step_through(engine, IDS[:4])
        engine.force_routing(chosen, np.array([[5, 6, 1], [0, 0, 0]])[:, :2] if layers == 2 else None)
        with engine.record() as recorder:
            forced = step_through(engine, IDS[:4])
        engine.force_routing(None)
        assert torch.equal(step_through(engine, IDS[:4]), free) and not torch.equal(forced, free)
    trace = recorder.trace()
    assert (trace.experts == chosen).all() and trace.experts.shape == (4, layers, top_k)
    assert (trace.guesses[:, 1, :2] == [5, 6]).all() and check_live(trace).equal
    assert trace.live_misses[0].tolist() == [3, 2], "5 was read ahead"


@one_thread
def test_forced_experts_keep_the_weights_of_the_routers(path, monkeypatch):
    """By rank: forcing what is chosen anyway changes nothing."""
    with open_engine(path) as engine:
        with engine.record() as recorder:
            free = step_through(engine, IDS[:4])
        chosen, state, forced = recorder.trace().experts, engine.new_state(), []
        for token, experts in zip(IDS[:4], chosen, strict=True):
            engine.force_routing(experts)
            forced.append(engine.step(token, state))
        assert torch.equal(torch.stack(forced), free)


@pytest.mark.parametrize(
    ("chosen", "guesses", "message"),
    [
        (np.zeros((2, 2), int), None, r"experts chosen of shape \[2, 2\], int64; whole numbers \[2, 3\] are needed"),
        (np.zeros((2, 3)), None, r"float64; whole numbers \[2, 3\] are needed"),
        ([[0, 1, 12], [0, 1, 2]], None, "must differ and lie between 0 and 11"),
        ([[0, 1, 1], [0, 1, 2]], None, "must differ and lie between 0 and 11"),
        ([[0, 1, 2], [0, 1, 2]], [[1, 2]], r"experts guesses of shape \[1, 2\], int64; whole numbers \[2, any\]"),
        (None, [[1, 2], [1, 2]], "guesses alone cannot be forced"),
    ],
)
def test_choices_that_cannot_be_forced_are_refused(path, chosen, guesses, message):
    with open_engine(path) as engine:
        with pytest.raises(EngineError, match=message):
            engine.force_routing(chosen, guesses)


def test_only_an_engine_on_a_card_is_told_what_to_choose(path):
    with Engine(path) as engine, pytest.raises(EngineError, match="device='cuda'"):
        engine.force_routing(None)


@one_thread
def test_recording_changes_no_bit_and_is_the_same_by_every_way(path, wanted):
    traces = []
    for transfer in TRANSFERS:
        with open_engine(path, transfer=transfer, ram_cache_slots=8, prefetch=2) as engine:
            with engine.record() as recorder:
                assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
            traces.append(recorder.trace())
            assert check_live(traces[-1]).equal
    for trace in traces[1:]:
        for name in ("experts", "weights", "guesses", "active_neurons", "active_groups", "live_misses"):
            assert np.array_equal(getattr(trace, name), getattr(traces[0], name)), name


@one_thread
def test_a_token_that_breaks_off_leaves_nothing_in_a_recording(path, monkeypatch):
    with open_engine(path, ram_cache_slots=8) as engine, engine.record() as recorder:
        step_through(engine, IDS[:3])
        step = engine._model._parts.step
        monkeypatch.setattr(step, "finish", Breaks(step.finish, 2, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step(IDS[3], engine.new_state())
        monkeypatch.undo()
        step_through(engine, IDS[:3])
    assert len(recorder.trace().experts) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("transfer", TRANSFERS)
@one_thread
def test_a_token_that_breaks_off_on_a_card_ends_its_conversation_alone(path, transfer, monkeypatch):
    """Between segments, and in the middle of one, queued or recorded."""
    with open_engine(path, "cuda", transfer=transfer, ram_cache_slots=8, prefetch=2) as engine:
        parts, head = engine._model._parts, engine._model._decoder
        wanted = torch.cat(both_paths(engine, IDS))
        for owner, name in ((parts.step, "choice"), (parts.step, "finish"), (parts.step, "start"), (head, "_head")):
            for at in (1, 2, 3):
                monkeypatch.setattr(owner, name, Breaks(getattr(owner, name), at, KeyboardInterrupt()))
                with pytest.raises(KeyboardInterrupt):
                    step_through(engine, IDS * 4)
                    engine.step(IDS[0], engine.new_state())
                    engine.step(IDS[0], engine.new_state())
                monkeypatch.undo()
                assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted), (name, at)


@pytest.mark.gpu
@pytest.mark.parametrize("transfer", TRANSFERS)
@one_thread
def test_memory_that_is_not_locked_on_a_card_changes_no_bit(path, transfer, monkeypatch):
    from nemolab.store.page_lock import Driver, PageLock

    with open_engine(path, "cuda", transfer=transfer, prefetch=2) as engine:
        wanted = torch.cat(both_paths(engine, IDS))
        block_bytes = engine.store.block_bytes
    lock, left = Driver.lock, [2**40]

    def lock_some(driver, address, nbytes):
        if nbytes > left[0]:
            return "CUDA_ERROR_OUT_OF_MEMORY"
        left[0] -= nbytes
        return lock(driver, address, nbytes)

    def unlock_some(driver, address, unlock=Driver.unlock):
        left[0] += block_bytes  # of a cache's row: a chunk is one
        return unlock(driver, address)

    monkeypatch.setattr(Driver, "lock", lock_some)
    monkeypatch.setattr(Driver, "unlock", unlock_some)
    monkeypatch.setattr(PageLock.__init__, "__defaults__", (1,))
    with open_engine(path, "cuda", transfer=transfer, prefetch=2, ram_cache_slots=20) as engine:
        left[0] = 9 * block_bytes
        assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
        assert engine._model._fetcher._ring is not None
        assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("transfer", ["pull", "rows"])
def test_a_card_is_used_from_any_thread(path, transfer):
    """Opened here, used and closed elsewhere: in a notebook's or a server's threads."""
    engine, found = open_engine(path, "cuda", transfer=transfer), []
    wanted = torch.cat(both_paths(engine, IDS))
    tasks = (lambda: step_through(engine, IDS[:12]), lambda: torch.cat(both_paths(engine, IDS)), engine.close)
    for task in tasks:
        thread = threading.Thread(target=lambda task=task: found.append(task()))
        thread.start()
        thread.join()
    steps = len(IDS) - 8  # behind the prompt's logits
    assert torch.equal(found[1], wanted) and torch.equal(found[0], wanted[steps : steps + 12]) and len(found) == 3


@pytest.mark.gpu
def test_a_card_computes_what_twins_do(path):
    logits = []
    for device in ("twin", "cuda"):
        with open_engine(path, device, ram_cache_slots=8, prefetch=2) as engine:
            logits.append(step_through(engine, IDS))
    assert kl(*logits) < 1e-9
