"""A token's segments as graphs, by stand-ins for them and on a card: when they are captured, replayed and dropped."""

import gc
import threading
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from gpu_graphs import SIZES, Graphs, run_without_graphs
from synthetic import one_thread, write_checkpoint
from test_gpu_engine import IDS, TRANSFERS, both_paths, open_engine, step_through

from nemolab.engine.gpu import allocator, segments
from nemolab.engine.gpu.device import StandIn
from nemolab.engine.gpu.segments import CudaGraphs, Segments
from nemolab.engine.trials import Trials
from nemolab.simulate import check_live


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("decode") / "model", **SIZES)


@pytest.fixture(scope="module")
def wanted(path):
    return run_without_graphs(path)


@pytest.fixture
def graphs(monkeypatch):
    Graphs.made = []
    monkeypatch.setattr(StandIn, "new_graphs", Graphs)
    return Graphs.made


def counts(graphs):
    return [(each.captured, each.replayed) for each in graphs]


@one_thread
def test_the_second_token_alike_is_captured_and_then_replayed(path, graphs):
    with open_engine(path) as engine:
        state = engine.new_state()
        engine.last_logits(IDS[:5], state)
        engine.step(IDS[5], state)
        assert counts(graphs) == []
        step_through(engine, IDS[6:9], state)
        assert counts(graphs) == [(3, 9)], "a segment before each of two MoE layers, and one behind"


@one_thread
def test_none_is_made_where_none_is_wanted(path, wanted, graphs):
    with open_engine(path, trials=Trials(no_graphs=True)) as engine:
        assert torch.equal(torch.cat(both_paths(engine, IDS)), wanted)
    assert counts(graphs) == []


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
        engine._model._parts.segments.wanted = False
        assert torch.equal(step_through(engine, IDS[:10]), grown)


@one_thread
def test_prompts_keep_graphs_or_drop_them_by_their_length(path, graphs, monkeypatch):
    monkeypatch.setattr("nemolab.engine.gpu.model.LONG_PROMPT_TOKENS", 4)
    released = []
    monkeypatch.setattr(StandIn, "release", lambda _: released.append(1))
    with open_engine(path) as engine:
        engine._model._parts.segments.wanted = False
        state = engine.new_state()
        expected = [step_through(engine, IDS[:3], state), engine.prefill(IDS[3:7], state)]
        expected += [step_through(engine, IDS[7:10], state), engine.prefill(IDS[10:15], state)]
        expected += [step_through(engine, IDS[15:18], state)]
        engine._model._parts.segments.wanted, state = True, engine.new_state()
        released.clear()
        found = [step_through(engine, IDS[:3], state), engine.prefill(IDS[3:7], state)]
        assert counts(graphs) == [(3, 6)] and not released
        found += [step_through(engine, IDS[7:10], state)]
        assert counts(graphs) == [(3, 15)]
        found += [engine.prefill(IDS[10:15], state), step_through(engine, IDS[15:18], state)]
        assert counts(graphs) == [(3, 15), (3, 6)] and released
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@one_thread
def test_what_changes_a_segment_drops_its_graphs(path, graphs):
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
    with open_engine(path) as engine:
        state = engine.new_state()
        step_through(engine, IDS[:4], state)
        ssm = weakref.ref(state.layers[0].ssm)
        graphs.clear()
        engine._model._parts.segments._captured.clear()  # these stand-ins hold the state; graphs hold addresses
        del state
        assert ssm() is None


def test_a_state_without_tensors_has_a_first_token_too():
    found = Segments(Graphs)
    for alike in (False, True):
        found.begin([])
        assert found._alike == alike


class Recording:
    """In the place of torch's graphs and streams: what was called, and what fails."""

    def __init__(self, monkeypatch, failing=()):
        self.called, self.failing = [], failing
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_pool, raising=False)

    def call(self, name):
        self.called.append(name)
        if name in self.failing:
            raise RuntimeError(f"CUDA error in {name}")

    def capture_begin(self, **_):
        self.call("begin")

    def capture_end(self):
        self.call("end")

    def end_pool(self, index, pool):
        self.call(f"pool {pool} of {index}")

    def replay(self):
        self.call("replay")

    def reset(self):
        self.call("reset")


def test_a_capture_that_fails_is_ended_and_what_failed_comes_out(monkeypatch):
    for failing, called in (
        (("work",), ["begin", "work", "end"]),
        (("work", "end"), ["begin", "work", "end", "pool (0, 1) of 0"]),
    ):
        fake = Recording(monkeypatch, failing)
        with pytest.raises(RuntimeError, match=f"CUDA error in {failing[0]}"):
            CudaGraphs(torch.device("cuda", 0)).capture(partial(fake.call, "work"))
        assert fake.called == called


def test_graphs_end_when_they_are_dropped_and_none_ends_while_one_is_captured(monkeypatch):
    """Not when a traceback that held them is forgotten: should another be captured just then, it is spoilt."""

    def work():
        fake.call("work" if not gc.isenabled() else "garbage may be collected")

    for failing in ((), ("work",)):
        fake = Recording(monkeypatch, failing)
        found = Segments(lambda: CudaGraphs(torch.device("cuda", 0)))
        found.begin([])
        found._alike = True
        kept = pytest.raises(RuntimeError) if failing else nullcontext()
        with kept:
            found.run(0, work)
        assert gc.isenabled()
        found.drop()
        found.drop()
        assert fake.called == ["begin", "work", "end", *([] if failing else ["replay"]), "reset"]


@pytest.mark.parametrize(
    ("failing", "tried"),
    [
        (["end"], ["begin", "work", "end", "pool (0, 1) of 0"]),
        (["begin"], ["begin", "end"]),
        (["begin", "end"], ["begin", "end", "pool (0, 1) of 0"]),
    ],
)
def test_where_no_graph_can_be_made_tokens_go_on_without(monkeypatch, capsys, failing, tried):
    fake = Recording(monkeypatch, failing)
    found = Segments(lambda: CudaGraphs(torch.device("cuda", 0)))
    for _ in range(3):
        found.begin([])
        found.run(0, partial(fake.call, "work"))
    assert fake.called == ["work", *tried, "reset", "work", "work"]
    assert capsys.readouterr().err.count(f"no graph could be made of them: CUDA error in {failing[0]}") == 1


def test_a_capture_whose_end_was_interrupted_is_ended_with_the_graphs(monkeypatch):
    """It would stay open: nothing can be waited for then."""
    fake = Recording(monkeypatch)
    graphs = CudaGraphs(torch.device("cuda", 0))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(graphs, "_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            graphs.capture(partial(fake.call, "work"))
    graphs.close()
    graphs.close()
    assert fake.called == ["begin", "work", "end", "reset"]


def interrupt(*_):
    raise KeyboardInterrupt


@one_thread
def test_graphs_go_before_the_card_is_waited_for(path, monkeypatch):
    """After a token that broke off, be it to go on or to close: one may be open still."""
    called = []
    with open_engine(path) as engine:
        state = engine.new_state()
        step_through(engine, IDS[:3], state)
        graphs, parts = engine._model._parts.segments, engine._model._parts
        monkeypatch.setattr(engine._model.device, "wait", lambda: called.append("wait"))
        with monkeypatch.context() as interrupted:
            interrupted.setattr(parts.step, "choice", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.step(IDS[3], state)
        monkeypatch.setattr(graphs, "drop", lambda real=graphs.drop: (called.append("drop"), real()))
        engine.step(IDS[0], engine.new_state())
        assert called[:2] == ["drop", "wait"]
        called.clear()
    assert called[:2] == ["drop", "wait"]


def test_garbage_is_collected_again_whenever_an_interrupt_comes(monkeypatch):
    disable = gc.disable

    def disable_and_stop():
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", disable_and_stop)
    try:
        with pytest.raises(KeyboardInterrupt), segments._no_collection():
            pass
        assert gc.isenabled()
    finally:
        gc.enable()


def test_no_graph_ends_while_another_engine_records_one(monkeypatch):
    fake, device = Recording(monkeypatch), torch.device("cuda", 0)
    first, second = CudaGraphs(device), CudaGraphs(device)
    first.capture(partial(fake.call, "work"))
    fake.called.clear()
    others = threading.Thread(target=first.close)

    def work():
        others.start()
        others.join(timeout=0.1)
        fake.call("work")

    second.capture(work)
    others.join()
    assert fake.called == ["begin", "work", "end", "reset"]


def test_no_memory_is_given_back_while_a_graph_is_captured(monkeypatch):
    fake = Recording(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fake.call("give back"))
    device = torch.device("cuda", 0)
    others = threading.Thread(target=allocator.give_back, args=(device,))

    def work():
        others.start()
        others.join(timeout=0.1)
        fake.call("work")

    CudaGraphs(device).capture(work)
    others.join()
    assert fake.called == ["begin", "work", "end", "give back"]


class Branching(StandIn):
    def is_capturing(self):
        return True


@pytest.mark.parametrize("broken", ["work", "beside"])
def test_a_branch_ends_whatever_fails_in_it(broken):
    def call(name):
        if name == broken:
            raise KeyboardInterrupt

    branch, joined = segments.Branch(Branching()), []
    branch._join = lambda: joined.append(1)
    with pytest.raises(KeyboardInterrupt):
        branch.run(partial(call, "work"), partial(call, "beside"))
    assert joined


@pytest.mark.gpu
@pytest.mark.parametrize("transfer", TRANSFERS)
@one_thread
def test_graphs_and_branches_on_a_card_change_no_bit(path, transfer):
    """Two conversations in turn, one behind a long prompt, small caches: with graphs and without, branching or not."""
    found = []
    for wanted_graphs, branching in ((False, False), (True, False), (False, True), (True, True)):
        with open_engine(path, "cuda", transfer=transfer, ram_cache_slots=8, prefetch=2) as engine:
            parts = engine._model._parts
            parts.segments.wanted, parts.branch.wanted = wanted_graphs, branching
            branches, join = [], parts.branch._join
            parts.branch._join = lambda branches=branches, join=join: (branches.append(1), join())
            logits = [torch.cat(both_paths(engine, IDS)), step_through(engine, IDS * 8)]
            engine.last_logits(IDS * (segments.LONG_PROMPT_TOKENS // len(IDS) + 1), engine.new_state())
            with engine.record() as recorder:
                logits += [step_through(engine, IDS), torch.cat(both_paths(engine, IDS))]
                assert bool(parts.segments._captured) == wanted_graphs
                assert bool(branches) == (wanted_graphs and branching)
            assert check_live(recorder.trace()).equal
            found.append(torch.cat(logits))
    assert all(torch.equal(other, found[0]) for other in found)
