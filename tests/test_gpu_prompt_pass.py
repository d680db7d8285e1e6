"""Prompt passes on a card: what crosses the bus, what must be waited for, and what no bit may depend on."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from synthetic import one_thread, write_checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

from nemolab.engine import Engine
from nemolab.engine.attention import attend as attend_torch
from nemolab.engine.gpu import moe, prompt_experts, state
from nemolab.engine.gpu.attention import attend
from nemolab.engine.gpu.device import StandIn
from nemolab.engine.gpu.model import CardModel
from nemolab.engine.gpu.prompt_experts import PromptExperts

IDS = [int(i) for i in torch.randint(32, 280, (40,), generator=torch.Generator().manual_seed(0))]
SMALL = {"pattern": "ME*E-", "experts": 12, "inter": 80, "latent": 48, "hidden": 64, "shared_inter": 32, "top_k": 3}
on_twins_and_cards = pytest.mark.parametrize("device", ["twin", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module")
def small_path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("small") / "model", **SMALL)


def fill_cache(engine):
    for layer in range(engine.store.n_layers):
        engine._cache.lookup_rows(layer, range(engine.store.n_experts))


@on_twins_and_cards
@one_thread
def test_no_bit_of_a_prompt_depends_on_halves_stretches_or_the_cache(device, small_path, monkeypatch):
    with Engine(small_path, device=device) as engine:
        wanted = engine.prefill(IDS, engine.new_state())
        fill_cache(engine)
        assert torch.equal(engine.prefill(IDS, engine.new_state()), wanted), "all experts cached"
    for half, pairs in ((1, 4096), (5, 4096), (8, 7), (12, 40)):
        monkeypatch.setattr(prompt_experts, "HALF_BLOCKS", half)
        monkeypatch.setattr("nemolab.engine.gpu.model.PAIRS_PER_PIECE_TOKEN", pairs / 1024)  # for each token of a piece
        with Engine(small_path, device=device, ram_cache_slots=3) as engine:
            assert torch.equal(engine.prefill(IDS, engine.new_state()), wanted), (half, pairs)


@one_thread
def test_what_a_router_sorted_is_gone_once_the_choice_is_known(small_path, monkeypatch):
    """All ids of all tokens, of which a choice is a view: 33 MB of 8,192 tokens and 512 experts."""
    sorted_ids, checked, choose, sort = [], [], moe.router_step_torch, PromptExperts.sort

    def remember(*arguments):
        check()
        ids, shares = choose(*arguments)
        assert ids.untyped_storage().nbytes() > 8 * ids.numel()
        sorted_ids.append(StorageWeakRef(ids.untyped_storage()))
        return ids, shares

    def check():
        checked.extend(held.expired() for held in sorted_ids)

    monkeypatch.setattr(moe, "router_step_torch", remember)
    monkeypatch.setattr(PromptExperts, "sort", lambda *arguments: (check(), sort(*arguments))[1])
    monkeypatch.setattr("nemolab.engine.gpu.plan.PIECES", (16,))
    with Engine(small_path, device="twin") as engine:
        engine.prefill(IDS, engine.new_state())
    assert len(checked) > 2 * len(sorted_ids) > 4 and all(checked)


@pytest.mark.parametrize("slots", [3, 24])
@one_thread
def test_every_needed_expert_crosses_the_bus_once_a_pass(small_path, monkeypatch, slots):
    crossed = []

    def count(self, to, source, nbytes, stream=None):
        crossed.append(nbytes)
        copy(self, to, source, nbytes, stream)

    copy = StandIn.copy
    with Engine(small_path, device="twin", ram_cache_slots=slots) as engine:
        if slots == 24:
            fill_cache(engine)
        monkeypatch.setattr(StandIn, "copy", count)
        with engine.record(cold=slots == 3) as recorder:
            engine.prefill(IDS, engine.new_state())
        misses = engine.stats()["prefill"]["misses"]
    chosen = recorder.trace().experts
    needed = sum(len(np.unique(chosen[:, layer])) for layer in range(2))
    assert needed > 16 and misses == (needed if slots == 3 else 0)
    assert crossed == [80 * 48 * 9 // 8] * needed


class LoggedDevice(StandIn):
    """Knows which copies the CPU has not waited for."""

    def __init__(self):
        super().__init__()
        self.under_way = 0

    def copy(self, to, source, nbytes, stream=None):
        self.under_way += 1

    def new_event(self):
        return SimpleNamespace(record=lambda stream: None, synchronize=self._ended)

    def _ended(self):
        self.under_way = 0


@pytest.mark.parametrize("hits, enters", [(True, False), (False, False), (True, True)])
def test_copies_are_waited_for_where_their_memory_is_read_into_next(hits, enters):
    """The reader fills the rows behind the cached ones as soon as the next batch is asked for; the others stay, unless
    prompts enter the cache."""
    device, unended, by_last_use = LoggedDevice(), [], []

    def stream_rows(layer, experts, phase, lookups):
        by_last_use.append(lookups)
        for first in range(0, len(experts), 10):
            yield experts[first : first + 10], [place if hits else 100 + place for place in range(10)]
            unended.append(device.under_way)

    cache = SimpleNamespace(ring=10, slots=100, stream_rows=stream_rows, prompt_enters=enters)
    memory = SimpleNamespace(block_bytes=4096, addresses=4096 * np.arange(1000), lock_row=lambda row: True)
    operators = SimpleNamespace(expert_prompt=lambda *_: None, add_experts=lambda *_: None)
    prompts = PromptExperts((16, 16), 4096, cache, memory, device, operators)
    routing = prompts.sort(torch.arange(30).flip(0).view(15, 2), torch.ones(15, 2), 30)
    prompts.run(0, torch.zeros(15, 16, dtype=torch.bfloat16), routing, torch.ones(30, 2), None)
    assert unended == ([10, 20, 30] if hits and not enters else [0, 0, 0])
    if enters:
        assert by_last_use[0].tolist() == list(range(29, -1, -1)), "the cache learns in which order tokens asked"


def test_pairs_are_sorted_by_expert_and_a_tokens_places_ascend():
    device = StandIn()
    memory = SimpleNamespace(block_bytes=4096)
    prompts = PromptExperts((16, 16), 4096, SimpleNamespace(ring=4), memory, device, SimpleNamespace())
    experts, weights = torch.tensor([[5, 1], [0, 5], [1, 3]]), torch.tensor([[0.5, 0.1], [0.2, 0.6], [0.3, 0.4]])
    routing = prompts.sort(experts, weights, 7)
    assert routing.pairs.tolist() == [2, 1, 4, 5, 0, 3]
    assert routing.starts.tolist() == [0, 1, 3, 3, 4, 4, 6, 6] == routing.told.tolist()
    assert routing.ids[:4].tolist() == [0, 1, 3, 5]
    assert routing.places.tolist() == [[1, 4], [0, 5], [2, 3]]
    assert torch.equal(routing.shares, torch.tensor([0.2, 0.1, 0.3, 0.4, 0.5, 0.6]))


@one_thread
def test_what_stays_takes_memory_before_activations_do(small_path, monkeypatch):
    """Memory that torch keeps of activations is given back before, or what stays would lie in pieces of it."""
    events, embed = [], CardModel._embed
    monkeypatch.setattr(state, "give_back", lambda device: events.append("stays"))
    monkeypatch.setattr(CardModel, "_embed", lambda *arguments: (events.append("goes"), embed(*arguments))[1])
    with Engine(small_path, device="twin") as engine:
        held = engine.new_state()
        assert events == ["stays"]
        engine.prefill(IDS, held)
        assert events == ["stays", "stays", "goes"], "keys and values of the one attention layer, then the prompt"
        copy = held.copy()
    assert events == ["stays", "stays", "goes", "stays"], "once for the states of both layers"
    keys, values = copy.layers[2].keys, copy.layers[2].values
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr(), "in one allocation"
    assert torch.equal(keys[:40], held.layers[2].keys[:40]) and torch.equal(values[:40], held.layers[2].values[:40])


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@on_twins_and_cards
def test_attention_with_one_matrix_of_scores_equals_the_cpus(device):
    there, shape = torch.device("cpu" if device == "twin" else device), (4, 2, 16)
    queries, keys, values = (random(rows, width, seed=rows) for rows, width in ((5, 64), (40, 32), (41, 32)))
    wanted = attend_torch(queries, keys, values, 20, shape)
    found = attend(*(t.to(there) for t in (queries, keys, values)), 20, shape).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    other = attend(*(t.to(there) for t in (queries, keys, values)), 21, shape).cpu()
    assert not torch.allclose(other, wanted, rtol=1e-5, atol=1e-5), "the comparison can fail"
