"""Trials (the shared expert first, kept and early copies, prompts that enter the cache): no bit depends on them."""

import ctypes
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import one_thread, write_checkpoint

from nemolab.engine import Engine
from nemolab.engine.gpu.device import StandIn
from nemolab.engine.gpu.expert_fetch import Fetch
from nemolab.engine.gpu.kept import CopyWatcher, KeepingStep, KeptSlots
from nemolab.engine.gpu.moe_step import MoeStep
from nemolab.engine.gpu.operators import find_operators
from nemolab.engine.gpu.table import ExpertTable
from nemolab.engine.trials import COPYING, Trials
from nemolab.errors import EngineError
from nemolab.store.layout import BlockLayout

SIZES = {"pattern": "ME*E-E", "experts": 12, "inter": 48, "latent": 32, "hidden": 48, "shared_inter": 32, "top_k": 3}
IDS = [int(i) for i in torch.randint(32, 280, (30,), generator=torch.Generator().manual_seed(3))]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("trials") / "model", **SIZES)


def answers(path, **asked):
    """Logits of tokens from nothing, of a prompt, of tokens behind it; and the step, to ask what it counted."""
    with Engine(path, device="twin", **asked) as engine:
        first, state = engine.new_state(), engine.new_state()
        found = [engine.step(token, first) for token in IDS[:8]]
        found.append(engine.last_logits(IDS[8:20], state))
        found += [engine.step(token, state) for token in IDS[20:]]
        return torch.stack(found), engine._model._parts.step, engine.stats()


@given(st.integers(4, 9), st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True), max_size=30))
@settings(max_examples=60, deadline=None)
def test_slots_hold_the_blocks_used_last(count, batches):
    kept, plain = KeptSlots(count), OrderedDict()
    for batch in batches:
        known = {block: slot for block, slot in kept._slot_of.items()}
        slots, lacking = kept.take(batch)
        assert len(set(slots)) == len(batch), "a slot each"
        assert [batch[place] for place in lacking] == [block for block in batch if block not in plain]
        assert all(known[block] == slot for block, slot in zip(batch, slots, strict=True) if block in plain)
        for block in sorted(batch, key=lambda block: block not in plain):
            plain.pop(block, None)
            plain[block] = True
            if len(plain) > count:
                plain.popitem(last=False)
        assert list(kept._slot_of) == list(plain)
        assert len(set(kept._slot_of.values())) == len(plain) and max(kept._slot_of.values()) < count
    kept.clear()
    assert kept.take(range(4))[1] == [0, 1, 2, 3]


TRIED = {
    "shared first": {"shared_first": True},
    "prompts enter": {"prompt_enters": True},
    "kept": {"kept_gib": 1e-4},
    "early": {"speculate": 4},
    "no graphs": {"no_graphs": True},
    # Fewer slots than the cache has blocks: else no guess has anything to copy.
    "all": {"shared_first": True, "prompt_enters": True, "kept_gib": 1e-5, "speculate": 3},
}


@pytest.fixture(scope="module")
def plain(path):
    return answers(path, ram_cache_slots=7)[0]


CASES = [("pull", "shared first"), ("pull", "prompts enter"), *(("rows", tried) for tried in TRIED)]


@pytest.mark.parametrize(("transfer", "tried"), [*CASES, ("grouped", "all"), ("whole", "all")])
@one_thread
def test_no_bit_depends_on_a_trial(path, plain, transfer, tried):
    trials = Trials(**TRIED[tried])
    found, step, _ = answers(path, transfer=transfer, ram_cache_slots=18, prefetch=2, trials=trials)
    assert torch.equal(found, plain)
    if trials.keeps:
        assert step.held > 0 and step.copied > 0
        assert (step.early > 0) == bool(trials.speculate)


@pytest.mark.parametrize("first", [False, True])
@one_thread
def test_the_shared_expert_comes_where_it_was_asked_for(path, first):
    with Engine(path, device="twin", trials=Trials(shared_first=first)) as engine:
        called, model = [], engine._model
        for name, part, call in (
            ("shared", model.moe_layers[0].shared, "add_step"),
            ("router", model._parts.router, "run"),
            ("experts", model._parts.step, "start"),
        ):
            real = getattr(part, call)
            setattr(part, call, lambda *args, real=real, name=name: (called.append(name), real(*args))[1])
        engine.step(IDS[0], engine.new_state())
    assert called[:3] == (["shared", "router", "experts"] if first else ["router", "shared", "experts"])


class LateDevice(StandIn):
    """Copies on other streams than the main one are done when they are waited for, and not a moment earlier."""

    def __init__(self):
        super().__init__()
        self.queue, self.done = [], 0
        self.locker.copy = self._copy

    def new_stream(self):
        return _LateStream(self)

    def new_event(self):
        return _LateEvent(self)

    def main_stream(self):
        return _LateStream(self, main=True)

    def copy(self, to, source, nbytes, stream=None):
        self._copy(to, source, nbytes, 0 if stream is None else stream.cuda_stream)

    def _copy(self, to, source, nbytes, stream):
        if stream:
            self.queue.append((to, source, nbytes))
        else:
            ctypes.memmove(to, source, nbytes)

    def run(self, until):
        while self.done < until:
            ctypes.memmove(*self.queue[self.done])
            self.done += 1


class _LateStream:
    def query(self):
        return True

    def __init__(self, device, main=False):
        self._device, self._main, self.cuda_stream = device, main, 0 if main else 1

    def wait_event(self, event):
        if self._main:
            event.synchronize()

    def synchronize(self):
        if not self._main:
            self._device.run(len(self._device.queue))


class _LateEvent:
    def __init__(self, device):
        self._device, self._until = device, 0

    def record(self, stream=None):
        self._until = len(self._device.queue)

    def synchronize(self):
        self._device.run(self._until)

    def query(self):
        return self._device.done >= self._until


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr("nemolab.engine.gpu.side.open_device", lambda name: LateDevice())


# Fewer slots than the cache has blocks: else what is cached is on the card as well, and no guess has anything to copy.
EARLY, TIGHT = Trials(speculate=4), {"ram_cache_slots": 18, "prefetch": 2}


@pytest.mark.parametrize("transfer", COPYING)
@one_thread
def test_copies_that_end_as_late_as_they_may_change_no_bit(path, plain, late, transfer):
    for trials in (Trials(), EARLY):
        found, step, _ = answers(path, transfer=transfer, trials=trials, **TIGHT)
        assert torch.equal(found, plain), trials
    assert step.early > 0 and step.held > 0 and step.copied > 0


def test_experts_that_were_all_guessed_are_computed_once_their_copies_have_ended():
    form, device, random = BlockLayout("neuron", 32, 64), LateDevice(), torch.Generator().manual_seed(0)
    operators = find_operators(device.torch_device)
    blocks = torch.randint(0x28, 0x48, (4, form.block_bytes), generator=random, dtype=torch.uint8)
    at = blocks.data_ptr() + form.block_bytes * np.arange(4)
    table = ExpertTable(2, 4, device)
    table.set(1, np.arange(4), at)
    parts = (32, 64, 2, table, torch.ones(2, 4, 2), device, operators)
    found = []
    for step in (MoeStep("rows", *parts), KeepingStep("rows", *parts, slots=6)):
        if isinstance(step, KeepingStep):
            step.look_ahead(1, [3, 0, 1], lambda block: int(at[block - 4]))
        step.x.copy_(torch.randn(64, generator=random.manual_seed(1)))
        step.ids.copy_(torch.tensor([0, 3]))
        step.weights.fill_(1)
        step.run(1, lambda ids: Fetch(at[ids]))
        found.append(step.out.clone())
        step.close()
    assert torch.equal(*found) and found[0].any()
    assert step.counts == {"slots": 6, "copied": 0, "held": 2, "early": 3, "early_used": 2}
    table.close()


@pytest.mark.parametrize("told", [True, False])
def test_memory_that_a_copy_on_a_guess_reads_is_not_used_before_the_copy_has_ended(told):
    """Not told of it, the copy would read what came there next: so much for whether this can fail."""
    device, width = LateDevice(), 64
    operators = find_operators(device.torch_device)
    table = ExpertTable(2, 4, device)
    step = KeepingStep("rows", 32, width, 2, table, torch.ones(2, 4, 2), device, operators, slots=5)
    keeper = SimpleNamespace(left=lambda blocks: None, came=None)
    host = torch.full((32 * width,), 7, dtype=torch.uint8)
    step.look_ahead(1, [3], lambda block: host.data_ptr() if block == 1 * 4 + 3 else 0)
    slot = step._banks[step._kept.take([7])[0][0], : 32 * width * 9 // 16]
    if told:
        CopyWatcher(keeper, step).left([0, 7])
    host.fill_(9)
    device.run(len(device.queue))
    assert step.early == 1 and (slot == (7 if told else 9)).all()
    step.close()
    table.close()


@one_thread
def test_what_is_kept_is_not_copied_again(path):
    """All blocks fit: after the first time nothing is copied; without keeping, every expert every time."""
    trials = Trials(kept_gib=1e-3)
    with Engine(path, device="twin", transfer="rows", trials=trials) as engine:
        step = engine._model._parts.step
        state = engine.new_state()
        for token in IDS:
            engine.step(token, state)
        copied = step.copied
        assert copied <= engine.store.n_layers * engine.store.n_experts
        assert step.held + copied == len(IDS) * engine.store.n_layers * engine.config.top_k
        state = engine.new_state()
        for token in IDS:
            engine.step(token, state)
        assert step.copied == copied
        assert engine.memory()["card"]["kept"] == step.counts


@one_thread
def test_after_a_token_that_broke_off_nothing_half_copied_is_used(path, plain, monkeypatch):
    with Engine(path, device="twin", transfer="rows", trials=EARLY, **TIGHT) as engine:
        calls, real = [], KeepingStep._tell_places

        def break_off(self, *arguments):
            calls.append(1)
            if len(calls) == 2:  # the second layer of the first token: it will choose the same again
                raise KeyboardInterrupt
            return real(self, *arguments)

        monkeypatch.setattr(KeepingStep, "_tell_places", break_off)
        state = engine.new_state()
        with pytest.raises(KeyboardInterrupt):
            for token in IDS[:8]:
                engine.step(token, state)
        assert len(calls) == 2
        state = engine.new_state()
        assert torch.equal(torch.stack([engine.step(token, state) for token in IDS[:8]]), plain[:8])


@one_thread
def test_a_prompt_that_enters_saves_reads(path):
    found = {}
    for enters in (False, True):
        with Engine(path, device="twin", trials=Trials(prompt_enters=enters)) as engine:
            state = engine.new_state()
            engine.last_logits(IDS, state)
            engine.step(IDS[0], state)
            found[enters] = engine.stats()["decode"]["misses"]
    assert found[True] < found[False]


def test_what_is_kept_is_planned(path):
    planned = []
    for gib in (0.0, 0.25):
        with Engine(path, device="twin", transfer="rows", trials=Trials(kept_gib=gib)) as engine:
            planned.append(engine.memory()["card"]["planned"])
    assert planned[1]["total_bytes"] - planned[0]["total_bytes"] == planned[1]["kept_bytes"] > 0.24 * 2**30
    assert planned[0]["kept_bytes"] == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"shared_first": 1}, "shared_first is 1; True or False"),
        ({"prompt_enters": "yes"}, "prompt_enters is 'yes'"),
        ({"no_graphs": 1}, "no_graphs is 1; True or False"),
        ({"kept_gib": -1}, "kept_gib is -1; a number of GiB"),
        ({"kept_gib": float("nan")}, "kept_gib is nan"),
        ({"kept_gib": True}, "kept_gib is True"),
        ({"kept_gib": 2**20}, "kept_gib is 1048576; a number"),
        ({"speculate": 1.5}, "speculate is 1.5; a whole number"),
        ({"speculate": -1}, "speculate is -1"),
    ],
)
def test_values_that_cannot_be_are_refused(asked, message):
    with pytest.raises(EngineError, match=message):
        Trials(**asked)


def test_a_size_may_be_a_number_of_numpy():
    assert [Trials(kept_gib=gib).kept_bytes for gib in (np.float32(0.5), np.int64(1), 0)] == [2**29, 2**30, 0]


def test_trials_are_said_by_their_class(path):
    with pytest.raises(EngineError, match=r"trials is {'speculate': 2}; nemolab.engine.Trials\(...\) is needed"):
        Engine(path, trials={"speculate": 2})


@pytest.mark.parametrize(
    ("settings", "asked", "message"),
    [
        ({"device": "cpu"}, {"shared_first": True}, "shared_first is set, but the device is 'cpu'"),
        ({}, {"no_graphs": True}, "no_graphs is set, but the device is 'cpu'; it is for device='cuda'"),
        ({"device": "twin"}, {"kept_gib": 1}, "kept_gib is for transfers that copy .whole, grouped, rows.; 'pull'"),
        ({"device": "twin", "transfer": "pull"}, {"speculate": 1}, "speculate is for transfers that copy"),
        ({"device": "twin", "transfer": "rows"}, {"speculate": 13}, "speculate is 13; a token can reach 12 experts"),
        ({"device": "twin", "transfer": "rows", "vram_gib": 2}, {"kept_gib": 1.9}, "vram_gib allows 2.00 GiB"),
    ],
)
def test_trials_that_do_not_go_with_other_settings_are_refused(path, settings, asked, message):
    with pytest.raises(EngineError, match=message):
        Engine(path, trials=Trials(**asked), **settings)


@pytest.mark.gpu
@one_thread
def test_no_bit_depends_on_a_trial_on_a_card(tiny_path):
    def run(**asked):
        with Engine(tiny_path, device="cuda", ram_cache_slots=40, **asked) as engine:
            ids = engine.tokenizer.encode("TCP keeps a connection and delivers every byte in order; UDP does not. " * 3)
            state = engine.new_state()
            found = [engine.last_logits(ids[:30], state), *(engine.step(token, state) for token in ids[30:])]
            return torch.stack(found), engine._model._parts.step

    wanted, _ = run()
    for transfer in COPYING:
        trials = Trials(shared_first=True, prompt_enters=True, speculate=4)
        found, step = run(transfer=transfer, prefetch=2, trials=trials)
        assert torch.equal(found, wanted) and step.held > 0 and step.early > 0
        found, step = run(transfer=transfer, trials=Trials(kept_gib=0.01))
        assert torch.equal(found, wanted) and step.held > 0 and step.copied > 0
    assert torch.equal(run(trials=Trials(no_graphs=True))[0], wanted)
