"""The recorder against the formulas of the model, computed elsewhere from transformers' own hidden states."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from synthetic import write_checkpoint
from traces import equal

from nemolab.checkpoint import Checkpoint
from nemolab.compare.reference import Reference
from nemolab.engine import Engine
from nemolab.errors import TraceError
from nemolab.trace import DECODE, GUESSES, PREFILL, Recorder, TraceMeta, count_guesses, recorder

# Four MoE layers, so that one of them is guessed three layers before.
SIZES = {"pattern": "ME*EMEE", "experts": 12, "top_k": 3, "inter": 48, "latent": 48, "hidden": 48, "shared_inter": 32}
MOE_LAYERS = (1, 3, 5, 6)
IDS = [int(i) for i in torch.randint(32, 280, (14,), generator=torch.Generator().manual_seed(3))]
PROMPT = 5


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("four-moe-layers"), **SIZES)


@pytest.fixture(scope="module")
def engine(path):
    with Engine(path, ram_cache_slots=12) as engine:
        yield engine


def feed(engine, ids=IDS, prompt=PROMPT):
    state = engine.new_state()
    engine.last_logits(ids[:prompt], state)
    return [engine.step(token, state) for token in ids[prompt:]]


@pytest.fixture(scope="module")
def trace(engine):
    with engine.record() as recording:
        feed(engine)
    return recording.trace()


@pytest.fixture(scope="module")
def reference(path):
    """What transformers feeds its MoE layers, and the weights of those, decoded without our own decoder."""
    reference = Reference(Checkpoint.open(path))
    inputs, build = [], reference._build_block

    def build_and_listen(index):
        block = build(index)
        if index in MOE_LAYERS:
            block.mixer.register_forward_pre_hook(lambda mixer, given: inputs.append(given[0][0].clone()))
        return block

    reference._build_block = build_and_listen
    gap = reference.read({"text": IDS})["text"].gap
    tensor = reference.weights.tensor
    layers = [f"backbone.layers.{index}.mixer" for index in MOE_LAYERS]
    return SimpleNamespace(
        h=torch.stack(inputs).double(),
        gap=gap,
        gates=[tensor(f"{layer}.gate.weight").double() for layer in layers],
        biases=[tensor(f"{layer}.gate.e_score_correction_bias").double() for layer in layers],
        latents=[tensor(f"{layer}.fc1_latent_proj.weight").double() for layer in layers],
        up=lambda layer, expert: tensor(f"{layers[layer]}.experts.{expert}.up_proj.weight").double(),
    )


def choose(reference, layer, h, count):
    """Ids by key = sigmoid(gate h) + bias, descending; and the sigmoids."""
    scores = torch.sigmoid(h @ reference.gates[layer].T)
    order = (scores + reference.biases[layer]).argsort(dim=-1, descending=True, stable=True)
    return order[:, :count], scores


def test_choices_and_weights_are_the_routers(trace, reference):
    assert reference.gap.min() > 1e-5, "no near tie that rounding could turn"
    for layer in range(4):
        wanted, scores = choose(reference, layer, reference.h[layer], 3)
        assert trace.experts[:, layer].tolist() == wanted.tolist()
        weights = scores.gather(1, wanted)
        weights = 2.5 * weights / weights.sum(-1, keepdim=True)
        assert np.abs(trace.weights[:, layer] - weights.numpy()).max() < 1e-5


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_guesses_are_the_later_routers_on_this_layers_input(trace, reference, ahead):
    found = getattr(trace, GUESSES[ahead])
    assert found.shape == (len(IDS), 4, 8) and (found[:, :ahead] == -1).all()
    for layer in range(4 - ahead):
        wanted, _ = choose(reference, layer + ahead, reference.h[layer], 8)
        assert found[:, layer + ahead].tolist() == wanted.tolist(), f"from layer {layer}"


def test_another_layers_router_is_noticed(trace, reference):
    """The twin: guesses of the wrong router, of the wrong input or rescaled by a norm are other guesses."""
    other_router, _ = choose(reference, 0, reference.h[0], 8)
    other_input, _ = choose(reference, 1, reference.h[1], 8)
    rescaled, _ = choose(reference, 1, 1.5 * reference.h[0], 8)
    for wrong in (other_router, other_input, rescaled):
        assert trace.guesses[:, 1].tolist() != wrong.tolist()


def test_active_neurons_and_groups_are_those_above_zero(trace, reference):
    for layer in range(4):
        latent = reference.h[layer] @ reference.latents[layer].T
        for token, rank in ((0, 0), (3, 2), (4, 1), (5, 0), (9, 2), (13, 1)):
            up = reference.up(layer, int(trace.experts[token, layer, rank])) @ latent[token]
            assert up.abs().min() > 1e-5, "no neuron so near to zero that rounding could turn it"
            assert trace.active_neurons[token, layer, rank] == (up > 0).sum()
            assert trace.active_groups[token, layer, rank] == (up > 0).view(-1, 16).any(1).sum()


def test_phases_positions_and_steps_are_those_of_the_passes(trace):
    assert trace.phase.tolist() == [PREFILL] * 5 + [DECODE] * 9
    assert trace.position.tolist() == list(range(14))
    assert trace.step.tolist() == [0] * 5 + list(range(1, 10))
    assert set(trace.conversation) == {0} and trace.token_ids.tolist() == IDS


def test_metadata_name_the_model_and_its_cache(trace, engine, path):
    meta = trace.meta
    assert (meta.model, meta.n_experts, meta.source, meta.ranked) == (path.name, 12, "nemolab", True)
    assert meta.block_bytes == (engine.store.block_bytes,) * 4 and not meta.prefill_warms
    settings = meta.taken["cache"]
    assert (settings["policy"], settings["slots"], settings["prefetch"]) == ("lru", 12, 0)
    assert settings["budget_bytes"] == 12 * engine.store.block_bytes
    trace.check_model(engine.store.fingerprint, 4, 12, 3)


def test_both_layouts_of_a_store_have_one_fingerprint(path, tmp_path, engine):
    from nemolab.store import Store, repack

    repack(path, tmp_path / "source", layout="source", announce=lambda line: None)
    assert Store.open(tmp_path / "source").fingerprint == engine.store.fingerprint
    other = write_checkpoint(tmp_path / "other", **SIZES, seed=1)
    repack(other, tmp_path / "store", announce=lambda line: None)
    assert Store.open(tmp_path / "store").fingerprint != engine.store.fingerprint


def test_lookups_are_tokens_times_layers_times_top_k(engine):
    before = engine.stats()
    with engine.record() as recording:
        feed(engine, ids=IDS + IDS[:7], prompt=1)
    trace, after = recording.trace(), engine.stats()
    for number, phase in enumerate(("prefill", "decode")):
        added = {name: after[phase][name] - before[phase][name] for name in ("lookups", "hits", "misses")}
        tokens = int((trace.phase == number).sum())
        assert added["hits"] + added["misses"] == added["lookups"] == tokens * 4 * 3
        live = trace.live_misses[trace.phase == number]
        assert live[live >= 0].sum() == added["misses"]


def test_cold_recordings_of_one_text_miss_alike(engine):
    def misses(cold):
        with engine.record(cold=cold) as recording:
            feed(engine)
        return recording.trace().live_misses.tolist()

    first = misses(cold=True)
    assert misses(cold=True) == first
    assert misses(cold=False) != first, "the twin: what an earlier run left in the cache changes the counts"


def test_recording_changes_no_logit(engine):
    plain = feed(engine)
    with engine.record():
        recorded = feed(engine)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


@pytest.mark.parametrize("sizes", [{}, {"top_k": 2, "config_extra": {"n_group": 4, "topk_group": 2}}])
def test_guesses_made_on_the_way_are_those_made_in_bulk(tmp_path, sizes):
    path = write_checkpoint(tmp_path / "model", **SIZES | sizes)
    made = []
    for prefetch in (0, 3):
        with Engine(path, ram_cache_slots=12, prefetch=prefetch) as engine:
            with engine.record() as recording:
                feed(engine)
            made.append(recording.trace())
    assert made[0].guesses.shape[2] == (6 if sizes else 8), "as many as the limit of groups lets a token reach"
    for name, array in made[0].arrays.items():
        if name != "live_misses":
            assert array.tolist() == made[1].arrays[name].tolist(), name
    assert made[0].live_misses.tolist() != made[1].live_misses.tolist(), "prefetch did something"


def test_what_is_derived_does_not_depend_on_when(engine, monkeypatch):
    monkeypatch.setattr(recorder, "BULK_TOKENS", 64)
    ids = (IDS * 6)[: PROMPT + 64 + 6]  # more than are derived together
    with engine.record() as recording:
        feed(engine, ids)
    in_bulk = recording.trace()
    monkeypatch.setattr(recorder, "BULK_TOKENS", 1)
    with engine.record() as recording:
        feed(engine, ids)
    assert equal(recording.trace(), in_bulk)


def test_a_trace_can_be_had_midway(engine):
    with engine.record() as recording:
        feed(engine, IDS[:9])
        half = recording.trace()
        feed(engine, IDS)
    assert recording.trace().select(conversation=0).guesses_2.tolist() == half.guesses_2.tolist()


def test_ids_are_left_out_when_asked(engine):
    with engine.record(token_ids=False) as recording:
        feed(engine)
    assert recording.trace().token_ids is None


# The recorder alone


class State:
    def __init__(self, tokens=0):
        self.tokens = tokens


def make_recorder(layers=2):
    return Recorder(TraceMeta(model="toy", n_experts=4), n_layers=layers, top_k=2, hidden=3, groups=2)


def record_token(recorder, state, layers=2, end=True):
    recorder.begin_step(DECODE, state, [7])
    for layer in range(layers):
        bits = np.array([[0b101, 0], [0x8001, 0xFFFF]], np.uint16)
        recorder.decode_layer(layer, np.ones(3, np.float32), np.array([1, 3]), np.array([0.5, 0.25]), bits, layer)
    if end:
        recorder.end_step()
        state.tokens += 1


def test_bits_are_counted():
    made = make_recorder()
    record_token(made, State())
    trace = made.trace()
    assert trace.active_neurons.tolist() == [[[2, 18], [2, 18]]] and trace.active_groups.tolist() == [[[1, 2], [1, 2]]]
    assert trace.guesses is None and trace.live_misses.tolist() == [[0, 1]]


def test_a_step_that_failed_leaves_nothing():
    made, state = make_recorder(), State()
    record_token(made, state)
    record_token(made, state, layers=1, end=False)
    record_token(made, state)
    trace = made.trace()
    assert trace.n_tokens == 2 and trace.step.tolist() == [0, 1] and trace.position.tolist() == [0, 1]
    assert (trace.active_neurons >= 0).all()


def test_each_state_is_a_conversation():
    made, first, second = make_recorder(), State(), State()
    made.begin("named")
    for state in (first, second, first, State(tokens=5)):
        record_token(made, state)
    trace = made.trace(seed=3)
    assert trace.conversation.tolist() == [0, 1, 0, 2] and trace.position.tolist() == [0, 0, 1, 5]
    assert trace.meta.taken == {"conversations": ["named", "1", "2"], "seed": 3}


def test_a_new_state_where_an_old_one_lay_is_another_conversation():
    made = make_recorder()
    for _ in range(20):
        record_token(made, State())  # freed at once, so that addresses come again
    assert made.trace().conversation.tolist() == list(range(20))


@pytest.mark.parametrize("limit", [{"BULK_TOKENS": 7}, {"BULK_BYTES": 1}])
def test_rows_grow_without_losing_any(monkeypatch, limit):
    for name, value in limit.items():
        monkeypatch.setattr(recorder, name, value)
    made, state = make_recorder(), State()
    for _ in range(recorder.FIRST_ROWS + 10):
        record_token(made, state)
    trace = made.trace()
    assert trace.position.tolist() == list(range(trace.n_tokens)) and trace.n_tokens > recorder.FIRST_ROWS
    assert (trace.active_neurons == trace.active_neurons[0]).all()


def test_nothing_recorded_is_no_trace():
    with pytest.raises(TraceError, match="nothing was recorded"):
        make_recorder().trace()


@pytest.mark.parametrize(
    "experts, top_k, groups, top_groups, wanted",
    [(512, 22, 1, 1, 22), (64, 6, 1, 1, 8), (4, 2, 1, 1, 4), (16, 2, 4, 1, 4)],
)
def test_there_are_as_many_guesses_as_can_be_right(experts, top_k, groups, top_groups, wanted):
    assert count_guesses(experts, top_k, groups, top_groups) == wanted
