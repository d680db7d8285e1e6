"""The floor of an LRU where routings are not plain: one layer, layers that differ, prompts, layers left out."""

import numpy as np
import pytest

from nemolab.simulate import DECODE, from_routing, lru_curve, lru_floor, replay, token_cycle, warn_below_floor


def steady(n_tokens=12, n_layers=4, top_k=3):
    return np.tile(np.arange(top_k), (n_tokens, n_layers, 1))


def first_size_that_hits(lookups, in_slots):
    return int(lru_curve(lookups, phase=DECODE, in_slots=in_slots).sizes[0])


def test_one_layer_has_no_floor():
    lookups = from_routing(steady(n_layers=1), n_experts=8, layer_bytes=10)
    assert lru_floor(lookups) == (0, 0) and token_cycle(lookups) == (3, 30)
    assert warn_below_floor(lookups, slots=1) is None and warn_below_floor(lookups, budget_bytes=5) is None
    assert warn_below_floor(lookups, slots=0) == "0 blocks hold nothing: every lookup is a read"


@pytest.mark.parametrize("warms", [False, True])
def test_a_prompt_alone_has_no_steady_decode(warms):
    prompt = from_routing(steady(), n_experts=8, phase=[0] * 12, layer_bytes=10, prefill_warms=warms)
    assert lru_floor(prompt) == (0, 0) and token_cycle(prompt) == (0, 0)
    assert warn_below_floor(prompt, slots=2) is None


def test_layers_of_other_sizes_and_widths_count_as_they_are():
    experts = steady()
    experts[:, 1, 1:] = -1  # one expert in layer 1, three in the others
    lookups = from_routing(experts, n_experts=8, layer_bytes=[10, 500, 10, 20])
    assert token_cycle(lookups) == (10, 30 + 500 + 30 + 60)
    assert lru_floor(lookups) == (7, 30 + 30 + 60), "another layer of three is the shortest way round; in bytes layer 1"
    assert first_size_that_hits(lookups, in_slots=True) == 8
    assert first_size_that_hits(lookups, in_slots=False) > 120
    assert "7 blocks (what the other layers look up between two of its visits)" in warn_below_floor(lookups, slots=7)
    assert warn_below_floor(lookups, slots=8) is None


def test_a_token_that_skips_layers_lowers_the_floor_to_what_holds():
    experts = steady()
    experts[5, 1:3] = -1
    lookups = from_routing(experts, n_experts=8)
    assert lru_floor(lookups) == (3, None)
    assert first_size_that_hits(lookups, in_slots=True) == 4
    assert replay(lookups, slots=3).row("decode")["hits"] == 0


def test_prompts_that_leave_nothing_behind_do_not_lift_the_floor_and_others_may():
    experts, phase = steady(), [1] * 4 + [0] * 3 + [1] * 5
    aside = from_routing(experts, n_experts=8, phase=phase)
    assert lru_floor(aside) == (9, None) and first_size_that_hits(aside, in_slots=True) == 10
    mixed = np.array(experts)
    mixed[4:7] = [[[3, 4, 5]], [[4, 5, 6]], [[5, 6, 7]]]
    warm = from_routing(mixed, n_experts=8, phase=phase, prefill_warms=True)
    assert lru_floor(warm) == (9, None) and first_size_that_hits(warm, in_slots=True) == 10


def test_the_warning_names_what_was_asked_and_what_is_least():
    lookups = from_routing(steady(), n_experts=8, layer_bytes=1000)
    assert warn_below_floor(lookups, slots=9) == (
        "9 blocks are less than one token's cycle: an LRU hits nothing in steady decode up to 9 blocks ((layers - 1) x "
        "top 3); just above, the curve is vertical"
    )
    assert warn_below_floor(lookups, budget_bytes=9000).startswith("9,000 bytes are less than one token's cycle")
    assert warn_below_floor(lookups, slots=10) is None and warn_below_floor(lookups, budget_bytes=9001) is None
