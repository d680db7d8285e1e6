"""Opening, closing, budgets, refusals, generating: how the engine behaves, whatever it computes."""

import gc
import os
import threading
import weakref

import numpy
import pytest
import torch
from synthetic import write_checkpoint

from nemolab.engine import Engine
from nemolab.errors import CheckpointError, EngineError, NemolabError, StoreError
from nemolab.store import Store, repack

IDS = [40, 41, 42, 43, 44]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(
        tmp_path_factory.mktemp("session"), pattern="M*EE", hidden=32, latent=32, inter=32, experts=6
    )


@pytest.fixture
def engine(path):
    with Engine(path, threads=1) as engine:
        yield engine


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def ours():
    return [thread for thread in threading.enumerate() if thread.name.startswith("nemolab")]


def test_closing_gives_threads_descriptors_and_memory_back(path):
    def use():
        with Engine(path, threads=3) as engine:
            engine.step(40, engine.new_state())
            assert ours()
            return weakref.ref(engine._model), weakref.ref(engine._cache)

    use()
    before = descriptors()
    for _ in range(20):
        held = use()
        assert not ours() and descriptors() == before
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_an_exception_inside_the_block_frees_everything_too(path):
    before = descriptors()
    with pytest.raises(ZeroDivisionError), Engine(path, threads=2) as engine:
        engine.prefill(IDS, engine.new_state())
        raise ZeroDivisionError
    assert not ours() and descriptors() == before


def test_a_failed_opening_leaves_nothing_behind(path, monkeypatch):
    from nemolab.engine import engine as module

    def fail(*args):
        raise MemoryError("no room for the model")

    Engine(path).close()
    before = descriptors()
    monkeypatch.setattr(module, "Model", fail)
    with pytest.raises(MemoryError):
        Engine(path, threads=2)
    gc.collect()
    assert not ours() and descriptors() == before


def test_closing_twice_is_fine_and_a_closed_engine_says_so(path):
    engine = Engine(path)
    state = engine.new_state()
    engine.close()
    engine.close()
    for use in (lambda: engine.step(40, state), lambda: engine.prefill(IDS, state), engine.stats,
                lambda: list(engine.generate(IDS, max_tokens=1))):  # fmt: skip
        with pytest.raises(EngineError, match="closed"):
            use()


def test_a_closing_that_is_interrupted_closes_all_the_same(path):
    class Interrupted(Engine):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_team" and value is None:  # what is closed first
                raise KeyboardInterrupt

    engine = Engine(path, threads=2)
    engine.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert not ours()


def test_a_recording_that_ends_while_the_model_is_told_of_it_is_taken_back(engine, monkeypatch):
    told, recorder = [], object()

    def end_meanwhile(who):
        told.append(who)
        engine._recorder = None

    monkeypatch.setattr(engine._model, "set_recorder", end_meanwhile)
    engine._recorder = recorder
    for _ in range(3):
        engine._tell_recorder()
    assert told == [recorder, None]


def test_two_engines_at_once_do_not_disturb_each_other(path):
    with Engine(path, threads=1) as one, Engine(path, threads=1) as two:
        first = one.prefill(IDS, one.new_state())
        assert torch.equal(first, two.prefill(IDS, two.new_state()))


def test_torch_keeps_its_number_of_threads(path):
    before = torch.get_num_threads()
    with Engine(path, threads=before + 1) as engine:
        engine.prefill(IDS, engine.new_state())
        assert torch.get_num_threads() == before


def test_a_store_works_in_place_of_the_checkpoint(path, tmp_path, engine):
    wanted = engine.prefill(IDS, engine.new_state())
    repack(path, tmp_path / "store", layout="source")
    for choice in ({"path": tmp_path / "store"}, {"path": path, "store": tmp_path / "store"},
                   {"path": None, "store": Store.open(tmp_path / "store")}):  # fmt: skip
        with Engine(threads=1, **choice) as other:
            assert other.store.layout == "source"
            assert torch.equal(other.prefill(IDS, other.new_state()), wanted)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"ram_cache_slots": 1}, r"cache of 1 slots .* cannot hold the 2 experts"),
        ({"ram_cache_gib": 1e-6}, r"cannot hold the 2 experts"),
        ({"ram_cache_slots": 0}, "1 or more"),
        ({"ram_cache_slots": 2.5}, "whole number"),
        ({"ram_cache_gib": float("nan")}, "ram_cache_gib is nan; a positive number"),
        ({"ram_cache_gib": numpy.float32(1e-6)}, r"cannot hold the 2 experts"),
        ({"ram_cache_gib": 100_000}, r"97.66 TiB was asked for, but \d+.\d+ GiB of \d+.\d+ GiB are available"),
        ({"ram_cache_slots": 10**9}, "was asked for"),
        ({"ram_cache_slots": 4, "ram_cache_gib": 1}, "not both"),
        ({"device": "cuda"}, "'cpu'"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_impossible_choices_are_refused_with_numbers(path, choice, message):
    before = descriptors()
    with pytest.raises(NemolabError, match=message):
        Engine(path, **choice)
    assert descriptors() == before and not ours()


def test_folders_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(NemolabError):
        Engine(tmp_path)
    with pytest.raises(StoreError):
        Engine(None, store=tmp_path)
    with pytest.raises(EngineError, match="give a checkpoint folder"):
        Engine(None)


@pytest.mark.parametrize("ids", [[], [-1], [10**6], [[1, 2]]])
def test_unfit_ids_are_refused_and_leave_the_state_alone(engine, ids):
    state = engine.new_state()
    with pytest.raises(EngineError, match="token ids"):
        engine.prefill(ids, state)
    engine.prefill(IDS, state)


def test_a_context_too_long_is_refused_before_anything_is_computed(path, monkeypatch):
    with Engine(path, threads=1) as engine:
        limit = engine.config.max_position_embeddings
        with pytest.raises(EngineError, match=f"{limit + 1} prompt .* {limit}"):
            engine.prefill([40] * (limit + 1), engine.new_state())
        with pytest.raises(EngineError, match=f"5 prompt \\+ {limit} new tokens"):
            engine.generate(IDS, max_tokens=limit)
        state = engine.new_state()
        state.tokens = limit
        with pytest.raises(EngineError, match=f"{limit} in the conversation"):
            engine.step(40, state)


def test_a_state_left_half_way_cannot_be_continued(engine, monkeypatch):
    state = engine.new_state()
    engine.prefill(IDS, state)

    def fail(*args, **kwargs):
        raise StoreError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine._cache, "lookup_rows", fail)
        patch.setattr(engine._cache, "stream_rows", fail)
        with pytest.raises(StoreError):
            engine.step(40, state)
        other = engine.new_state()
        with pytest.raises(StoreError):
            engine.prefill(IDS, other)
    for broken in (state, other):
        with pytest.raises(EngineError, match="half-way"):
            engine.step(40, broken)
    engine.step(40, engine.new_state())


def test_generate_is_greedy_by_default_and_stops_at_max_tokens(engine):
    state = engine.new_state()
    logits, wanted = engine.prefill(IDS, state)[-1], []
    for _ in range(6):
        wanted.append(int(logits.argmax()))
        logits = engine.step(wanted[-1], state)
    assert list(engine.generate(IDS, max_tokens=6, stop_ids=())) == wanted
    assert list(engine.generate(IDS, max_tokens=0, stop_ids=())) == []
    third = wanted[2]
    assert list(engine.generate(IDS, max_tokens=6, stop_ids=[third])) == wanted[: wanted.index(third)]


def test_generate_streams(engine):
    before = engine.stats()["decode"]["tokens"]
    tokens = engine.generate(IDS, max_tokens=50, stop_ids=())
    next(tokens), next(tokens)
    assert engine.stats()["decode"]["tokens"] - before == 1
    tokens.close()


def test_generate_continues_a_state(engine):
    whole = list(engine.generate(IDS, max_tokens=8, stop_ids=()))
    state = engine.new_state()
    first = list(engine.generate(IDS, max_tokens=4, stop_ids=(), state=state))
    assert state.tokens == len(IDS) + 3
    assert first + list(engine.generate(first[-1:], max_tokens=4, stop_ids=(), state=state)) == whole


def test_sampling_follows_its_seed(engine):
    def draw(seed):
        return list(engine.generate(IDS, max_tokens=12, temperature=1.5, seed=seed, stop_ids=()))

    assert draw(1) == draw(1) != draw(2)


def test_a_checkpoint_without_its_config_is_refused(tmp_path):
    path = write_checkpoint(tmp_path / "m", pattern="M*E", hidden=32, latent=32, inter=32, experts=4)
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json"):
        Engine(path)


def spoil(path, tmp_path, suffix, place):
    """A copy of the store in which one byte of the first dense tensor with this ending is E4M3's NaN."""
    store_path = tmp_path / "store"
    repack(path, store_path)
    store = Store.open(store_path)
    entry = next(entry for name, entry in store.dense_tensors.items() if name.endswith(suffix))
    with open(store_path / "dense.safetensors", "r+b") as file:
        file.seek(entry.offset_bytes + place)
        file.write(b"\xff")
    return entry.name, Store.open(store_path)


def test_nan_among_fp8_weights_is_refused_by_name(path, tmp_path):
    name, store = spoil(path, tmp_path, "in_proj.weight", 17)
    with pytest.raises(EngineError, match=f"{name} holds NaN"):
        Engine(path, store=store)


def test_unknown_activations_are_refused(tmp_path):
    path = write_checkpoint(
        tmp_path / "m",
        pattern="M*E",
        hidden=32,
        latent=32,
        inter=32,
        experts=4,
        config_extra={"mlp_hidden_act": "gelu"},
    )
    with pytest.raises(EngineError, match="mlp_hidden_act is 'gelu'; the engine computes 'relu2'"):
        Engine(path)
