"""Tokens on a card, by twins: graphs and when they hold, tokens that break off, memory not locked, forced routes."""

import numpy as np
import pytest
import torch
from synthetic import one_thread, write_checkpoint
from test_gpu_engine import IDS, SMALL, TRANSFERS, both_paths, kl, open_engine, step_through

from nemolab.engine import Engine
from nemolab.engine.gpu import stretches
from nemolab.engine.gpu.decoder import _tensors
from nemolab.engine.gpu.device import StandIn, _NothingToLock
from nemolab.errors import EngineError, StoreError
from nemolab.simulate import check_live

SIZES = SMALL | {"pattern": "ME*EM"}  # stretches with and without attention; the last has a layer, too


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("decode") / "model", **SIZES)


@pytest.fixture(scope="module")
def wanted(path):
    """Logits of a prompt and of steps, everything cached, nothing read ahead, no graph."""

    @one_thread
    def run():
        with open_engine(path) as engine:
            engine._model._parts.stretches.wanted = False
            return torch.cat(both_paths(engine, IDS))

    return run()


class Graphs:
    """Recordings that do not run what is recorded, and that are right for the very tensors they were made with."""

    made: list["Graphs"] = []

    def __init__(self, device=None):
        self.recorded = self.replayed = 0
        self.made.append(self)

    def record(self, work):
        self.recorded += 1
        number, state = work.args
        tensors = _tensors(state)
        addresses = [tensor.data_ptr() for tensor in tensors]

        def replay():
            self.replayed += 1
            assert [tensor.data_ptr() for tensor in _tensors(state)] == addresses, "a tensor has moved"
            work()

        return replay


@pytest.fixture
def graphs(monkeypatch):
    Graphs.made = []
    monkeypatch.setattr(StandIn, "new_graphs", Graphs)
    return Graphs.made


def counts(graphs):
    return [(each.recorded, each.replayed) for each in graphs]


@one_thread
def test_the_second_token_alike_is_recorded_and_then_replayed(path, graphs):
    with open_engine(path) as engine:
        state = engine.new_state()
        engine.last_logits(IDS[:5], state)
        engine.step(IDS[5], state)
        assert counts(graphs) == []
        step_through(engine, IDS[6:9], state)
        assert counts(graphs) == [(3, 9)], "a stretch before each of two MoE layers, and one behind"


@one_thread
def test_graphs_change_no_bit(path, wanted, graphs):
    for transfer in TRANSFERS:
        with open_engine(path, transfer=transfer, ram_cache_slots=8, prefetch=2) as engine:
            assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
    assert min(counts(graphs)) > (0, 10)


@one_thread
def test_another_conversation_or_state_gets_graphs_of_its_own(path, graphs):
    with open_engine(path) as engine:
        alone = step_through(engine, IDS[:12])
        graphs.clear()
        first, second = engine.new_state(), engine.new_state()
        taken = [engine.step(token, state) for token in IDS[:12] for state in (first, second)]
        assert counts(graphs) == [], "turn by turn, no two tokens are alike"
        assert torch.equal(torch.stack(taken[::2]), alone) and torch.equal(torch.stack(taken[1::2]), alone)
        step_through(engine, IDS[:3], first)
        copy = first.copy()
        step_through(engine, IDS[:3], copy)
        assert counts(graphs) == [(3, 6), (3, 6)]


@one_thread
def test_keys_that_grow_need_other_graphs(path, graphs, monkeypatch):
    from nemolab.engine.gpu import state

    monkeypatch.setattr(state, "KV_STEP_TOKENS", 4)
    with open_engine(path) as engine:
        grown = step_through(engine, IDS[:10])
        assert counts(graphs) == [(3, 9), (3, 9), (3, 3)], "room for 4, 8 and 12 tokens: each has a first one"
        engine._model._parts.stretches.wanted = False
        assert torch.equal(step_through(engine, IDS[:10]), grown)


@one_thread
def test_prompts_keep_graphs_or_drop_them_by_their_length(path, graphs, monkeypatch):
    monkeypatch.setattr("nemolab.engine.gpu.model.LONG_PROMPT_TOKENS", 4)
    released = []
    monkeypatch.setattr(StandIn, "release", lambda _: released.append(1))
    with open_engine(path) as engine:
        engine._model._parts.stretches.wanted = False
        state = engine.new_state()
        expected = [step_through(engine, IDS[:3], state), engine.prefill(IDS[3:7], state)]
        expected += [step_through(engine, IDS[7:10], state), engine.prefill(IDS[10:15], state)]
        expected += [step_through(engine, IDS[15:18], state)]
        engine._model._parts.stretches.wanted, state = True, engine.new_state()
        released.clear()
        found = [step_through(engine, IDS[:3], state), engine.prefill(IDS[3:7], state)]
        assert counts(graphs) == [(3, 6)] and not released
        found += [step_through(engine, IDS[7:10], state)]
        assert counts(graphs) == [(3, 15)]
        found += [engine.prefill(IDS[10:15], state), step_through(engine, IDS[15:18], state)]
        assert counts(graphs) == [(3, 15), (3, 6)] and released
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@one_thread
def test_what_changes_a_stretch_drops_its_graphs(path, graphs):
    """A recorder, and forced choices, that come and go."""
    chosen = np.array([[0, 1, 2], [3, 4, 5]])
    with open_engine(path, prefetch=2) as engine:
        state = engine.new_state()
        for change in (lambda: None, lambda: engine.force_routing(chosen), lambda: engine.force_routing(chosen + 6)):
            change()
            step_through(engine, IDS[:3], state)
        assert counts(graphs) == [(3, 6), (3, 6 + 9)], "other experts by force need no other graph"
        engine.force_routing(chosen, chosen[:, :2])
        step_through(engine, IDS[:3], state)
        engine.force_routing(None)
        engine.force_routing(None)
        step_through(engine, IDS[:3], state)
        with engine.record() as recorder:
            step_through(engine, IDS[:3], state)
        step_through(engine, IDS[:3], state)
        assert counts(graphs)[2:] == [(3, 6)] * 4
        assert len(recorder.trace().experts) == 3


@one_thread
def test_no_conversation_is_kept_for_its_graphs(path, graphs):
    import weakref

    with open_engine(path) as engine:
        state = engine.new_state()
        step_through(engine, IDS[:4], state)
        ssm = weakref.ref(state.layers[0].ssm)
        graphs.clear()
        engine._model._parts.stretches._recorded.clear()  # these stand-ins hold the state; graphs hold addresses
        del state
        assert ssm() is None


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
    "finding where": lambda engine: (engine._model._finder, "fetch"),
    "what follows the choice": lambda engine: (engine._model._parts.step, "finish"),
    "the table": lambda engine: (engine._model._table, "update"),
    "a launch": lambda engine: (engine._model._parts.step.step, "compute"),
    "reading ahead": lambda engine: (engine._cache, "prefetch"),
    "a recording": lambda engine: (engine._model._parts.stretches, "run"),
}


@pytest.mark.parametrize("transfer", ["pull", "rows"])
@pytest.mark.parametrize("place", PLACES)
@one_thread
def test_a_token_that_breaks_off_ends_its_conversation_alone(path, wanted, graphs, place, transfer, monkeypatch):
    problem = StoreError("the disk said no") if place == "reading from disk" else KeyboardInterrupt()
    with open_engine(path, transfer=transfer, ram_cache_slots=9, prefetch=2) as engine:
        for at in (1, 4, 7):
            state, (owner, name) = engine.new_state(), PLACES[place](engine)
            breaks = Breaks(getattr(owner, name), at, problem)
            monkeypatch.setattr(owner, name, breaks, raising=True)
            with pytest.raises(type(problem)):
                step_through(engine, IDS * 4, state)
            monkeypatch.undo()
            monkeypatch.setattr(StandIn, "new_graphs", Graphs)
            assert breaks.broke and not state.whole
            with pytest.raises(EngineError, match="half-way"):
                engine.step(IDS[0], state)
            assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)


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
        step_through(engine, IDS)
        step_through(engine, IDS)
        assert np.count_nonzero(table.host) == filled and not any(late[len(late) // 2 :]) and any(late)


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
@pytest.mark.parametrize("blocks", [3, 4, 9, 14])
@one_thread
def test_memory_that_is_not_locked_changes_no_bit(path, wanted, shared_bytes, transfer, blocks, monkeypatch, capsys):
    """A ring of three blocks is locked in any case, some of the cache's rows beside it, or what was is given back."""
    with open_engine(path) as engine:
        block_bytes = engine.store.block_bytes
    locked = lock_at_most(monkeypatch, shared_bytes + blocks * block_bytes)
    with open_engine(path, transfer=transfer, prefetch=2, ram_cache_slots=20) as engine:
        assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
        assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
        held = engine.memory()["card"]["page_locked_bytes"] // block_bytes
        assert held == blocks - 3 and engine._model._finder._ring is not None
    assert capsys.readouterr().err.count("a small ring") == 1
    assert not locked.locked, "all is unlocked with the engine"


@one_thread
def test_a_driver_that_locks_nothing_worth_it_is_an_error_that_says_so(path, shared_bytes, monkeypatch):
    locked = lock_at_most(monkeypatch, shared_bytes + 8192)
    with open_engine(path) as engine:
        for _ in range(2):
            with pytest.raises(EngineError, match=r"does not page-lock memory for the 3 experts .*ulimit -l"):
                engine.step(IDS[0], engine.new_state())
    assert not locked.locked
    lock_at_most(monkeypatch, 0)
    with pytest.raises(EngineError, match="that card and CPU share"):
        open_engine(path)


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
def test_graphs_on_a_card_change_no_bit(path, transfer):
    """Two conversations in turn, one behind a long prompt, small caches: with graphs and without."""
    found = []
    for wanted_graphs in (False, True):
        with open_engine(path, "cuda", transfer=transfer, ram_cache_slots=8, prefetch=2) as engine:
            engine._model._parts.stretches.wanted = wanted_graphs
            logits = [torch.cat(both_paths(engine, IDS)), step_through(engine, IDS * 8)]
            engine.last_logits(IDS * (stretches.LONG_PROMPT_TOKENS // len(IDS) + 1), engine.new_state())
            with engine.record() as recorder:
                logits += [step_through(engine, IDS), torch.cat(both_paths(engine, IDS))]
                assert bool(engine._model._parts.stretches._recorded) == wanted_graphs
            assert check_live(recorder.trace()).equal
            found.append(torch.cat(logits))
    assert torch.equal(*found)


@pytest.mark.gpu
def test_a_card_computes_what_twins_do(path):
    logits = []
    for device in ("twin", "cuda"):
        with open_engine(path, device, ram_cache_slots=8, prefetch=2) as engine:
            logits.append(step_through(engine, IDS))
    assert kl(*logits) < 1e-9
