"""An engine of a card that ends, or does not come to be, leaves nothing behind, whatever part of it fails."""

import gc
import weakref

import pytest
from fake_cards import GIB, MIB, FakeCard

from nemolab.engine import Engine
from nemolab.engine.gpu.guard import Guard
from nemolab.engine.gpu.model import CardModel
from nemolab.errors import EngineError

pytest_plugins = ["card_fixtures"]


@pytest.mark.parametrize("broken", ["_decoder", "_token", "device", "team"])
def test_a_part_that_does_not_close_keeps_nothing_else_open(small_path, monkeypatch, broken):
    closed = []

    def fail(*_):
        raise RuntimeError("CUDA error: unspecified launch failure")

    card = FakeCard(reserved=MIB)
    monkeypatch.setattr("nemolab.engine.gpu.side.open_device", lambda name: card)
    card.total_bytes = 8 * GIB
    engine = Engine(small_path, device="twin", vram_gib=4)
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


def test_a_model_that_did_not_close_is_closed_the_next_time(small_path, monkeypatch):
    engine = Engine(small_path, device="twin")
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
def test_a_model_refused_when_it_is_there_is_closed_and_kept_by_no_error(small_path, monkeypatch, broken):
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
            Engine(small_path, device="twin")
        assert closed == [1] and made[0]() is None and kept.tb is not None
    finally:
        gc.enable()


def test_a_closed_engine_leaves_no_model_behind(small_path):
    """Not even until the next garbage collection: the next engine's weights need its place on the card."""
    engine = Engine(small_path, device="twin", transfer="rows", prefetch=1)
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
