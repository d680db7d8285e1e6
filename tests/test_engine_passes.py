"""What comes before a pass of an engine: whose turn it is, who records, and what is fed to which state."""

import threading

import numpy as np
import pytest
import torch
from synthetic import write_checkpoint

from nemolab.engine import Engine
from nemolab.errors import EngineError

IDS = [40, 41, 42, 43, 44]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passes")
    return write_checkpoint(folder, pattern="M*EE", hidden=32, latent=32, inter=32, experts=6)


@pytest.fixture
def engine(path):
    with Engine(path, threads=1) as engine:
        yield engine


@pytest.fixture
def ours():
    """Which threads of engines there are that were not there before the test."""
    before = set(threading.enumerate())
    return lambda: [t for t in threading.enumerate() if t.name.startswith("nemolab") and t not in before]


def test_closing_waits_for_the_pass_of_another_thread_and_the_next_finds_it_closed(path, monkeypatch, ours):
    engine, inside, go_on, seen = Engine(path, threads=1), threading.Event(), threading.Event(), []
    step = engine._model.step

    def slowly(*arguments):
        inside.set()
        go_on.wait(20)
        assert engine._cache is not None, "what a pass uses stays"
        return step(*arguments)

    def use():
        seen.append(engine.step(40, state).shape)
        with pytest.raises(EngineError, match="closed"):
            engine.step(41, state)
        seen.append("refused")

    state = engine.new_state()
    monkeypatch.setattr(engine._model, "step", slowly)
    user, closer = threading.Thread(target=use), threading.Thread(target=engine.close)
    user.start()
    assert inside.wait(20)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive() and engine._model is not None
    with pytest.raises(EngineError, match="closed"):
        engine.step(40, state)
    go_on.set()
    user.join(20)
    closer.join(20)
    assert seen == [(engine.config.vocab_size,), "refused"] and not closer.is_alive() and not ours()


def test_an_engine_can_be_closed_between_two_tokens_and_not_amid_one(path, monkeypatch, ours):
    engine = Engine(path, threads=1)
    with pytest.raises(EngineError, match="closed"):
        for _ in engine.generate(IDS, max_tokens=5, stop_ids=()):
            engine.close()
    engine = Engine(path, threads=1)
    monkeypatch.setattr(engine._model, "step", lambda *arguments: engine.close())  # as a signal handler would
    with engine, pytest.raises(EngineError, match="amid a pass"):
        engine.step(40, engine.new_state())
    assert not ours()


@pytest.mark.parametrize("fails_at", ["start", "end"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), EngineError("no memory")])
def test_a_recording_that_fails_to_start_or_to_end_hinders_no_other(engine, monkeypatch, fails_at, failure):
    set_recorder, calls = engine._model.set_recorder, []

    def fail_once(recorder):
        set_recorder(recorder)
        calls.append(recorder)
        if len(calls) == (1 if fails_at == "start" else 2):
            raise failure

    monkeypatch.setattr(engine._model, "set_recorder", fail_once)
    with pytest.raises(type(failure)), engine.record():
        pass
    engine.step(40, engine.new_state())
    told = {"start": 2, "end": 3}[fails_at]
    assert len(calls) == told and calls[-1] is None, "the model is told again"
    with engine.record() as recorder:
        engine.step(40, engine.new_state())
        with pytest.raises(EngineError, match="recorded already"), engine.record():
            pass
        engine.step(41, engine.new_state())
    engine.step(42, engine.new_state())
    assert len(recorder.trace().experts) == 2


def test_a_state_of_another_model_or_place_is_refused_and_one_of_the_same_is_not(path, tmp_path, engine):
    other = write_checkpoint(tmp_path / "m", pattern="M*EE", hidden=32, latent=32, inter=32, experts=6, seed=5)
    with Engine(other, threads=1) as retrained, Engine(path, device="twin") as twin, Engine(path, threads=1) as same:
        state = retrained.new_state()
        for unfit, words in (
            (state, "of model .* the same weights"),
            (state.copy(), "of model"),
            (twin.new_state().copy(), "an engine's on twin; one on the CPU is needed"),
            (None, "the state is None; .*new_state"),
            ([], r"the state is \[\]"),
        ):
            for use in (engine.step, lambda _, state: engine.last_logits([40], state)):
                with pytest.raises(EngineError, match=words):
                    use(40, unfit)
        retrained.step(40, state)
        with pytest.raises(EngineError, match="on the CPU; one on twin"):
            twin.generate(IDS, max_tokens=1, state=engine.new_state())
        with Engine(path, device="twin", transfer="rows") as rows:
            twin.step(40, rows.new_state())
        assert torch.equal(engine.step(40, same.new_state().copy()), same.step(40, engine.new_state()))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (None, "are None; whole numbers in a list"),
        (5, "are 5;"),
        ("abc", "are 'abc';"),
        ([float("nan")], "nan among"),
        ([2**70], "from a number of 71 bits"),
        ([40, 1.5], "1.5 among"),
        (torch.tensor([1.5]), "1.5 among"),
        (np.array([40, 41.0]), "40.0 among"),
        ([True], "True among"),
        (torch.tensor([True]), "True among"),
    ],
)
def test_ids_of_other_types_are_refused_by_name(engine, ids, words):
    state = engine.new_state()
    for use in (lambda: engine.prefill(ids, state), lambda: engine.generate(ids, max_tokens=1)):
        with pytest.raises(EngineError, match=words):
            use()
    for one in ("a", None, 1.5, True, [40], 2**70, -1):
        with pytest.raises(EngineError, match="token id"):
            engine.step(one, state)
    assert state.whole and state.tokens == 0


def test_whole_numbers_of_numpy_and_torch_are_ids(engine):
    wanted = engine.prefill(IDS, engine.new_state())
    for ids in (np.array(IDS), np.array(IDS, np.uint8), list(torch.tensor(IDS)), torch.tensor(IDS, dtype=torch.int32),
                iter(IDS), tuple(np.array(IDS))):  # fmt: skip
        assert torch.equal(engine.prefill(ids, engine.new_state()), wanted)
    for one in (np.int64(40), np.uint16(40), torch.tensor(40)):
        assert torch.equal(engine.step(one, engine.new_state()), engine.step(40, engine.new_state()))


def test_a_place_that_is_not_there_is_refused_before_a_store_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMOLAB_CACHE", str(tmp_path / "cache"))
    model = write_checkpoint(tmp_path, pattern="M*EE", hidden=32, latent=32, inter=32, experts=6)
    wrong = (
        {"device": "gpu"},
        {"device": "cuda:999"},
        {"device": "twin", "transfer": "push"},
        {"vram_gib": 8},
        {"threads": 0},
        *({"reader_threads": count} for count in (0, None, True, "4", 4.0, float("nan"), 10**6)),
    )
    for settings in wrong:
        with pytest.raises(EngineError, match=next(reversed(settings))):
            Engine(model, **settings)
    assert not (tmp_path / "cache").exists()
    with Engine(model, threads=1):
        assert (tmp_path / "cache").exists(), "it is made there"


def test_ids_may_come_from_the_engine_itself(engine):
    wanted = engine.prefill(list(engine.generate(IDS, max_tokens=4, stop_ids=())), engine.new_state())
    found = engine.prefill(engine.generate(IDS, max_tokens=4, stop_ids=()), engine.new_state())
    assert torch.equal(found, wanted)
