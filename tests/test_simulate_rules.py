"""Replay of raw routing equals a plain reading of the rules, batch by batch: odd routings, prompts, prefetch."""

import numpy as np
import pytest
from plain_cache import replay_plainly
from toy_traces import draw_case

from nemolab.policy.core import FIRST, MISSED, USEFUL
from nemolab.simulate import DECODE, from_routing, lru_curve, lru_floor, replay

CASES = 500


def run_replay(routing, n_experts, sizes, budget, asked, policy="lru"):
    """(batches as `replay_plainly` gives them, the lookups)."""
    lookups = from_routing(**routing, n_experts=n_experts, layer_bytes=sizes)
    result = replay(lookups, policy, budget_bytes=budget, **asked)
    batches = []
    for number, (first, last) in enumerate(zip(lookups.starts[:-1], lookups.starts[1:], strict=True)):
        outcome = result.outcome[first:last]
        batches.append(
            {
                "step": int(lookups.step[number]),
                "layer": int(lookups.layer[number]),
                "lookups": int(last - first),
                "missed": (lookups.keys[first:last][outcome & MISSED != 0] % n_experts).tolist(),
                "first": int(np.count_nonzero(outcome & FIRST)),
                "useful": int(np.count_nonzero(outcome & USEFUL)),
                "issued": int(result.issued[number]),
                "wasted": int(result.wasted[number]),
            }
        )
    return batches, lookups


def run_plainly(routing, sizes, budget, asked):
    lists = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in routing.items()}
    return replay_plainly(**lists, sizes=sizes, budget=budget, depth=asked["prefetch"], cold=asked["cold"])


def test_replay_follows_the_rules_batch_by_batch():
    counted = {"useful": 0, "wasted": 0, "missed": 0}
    for seed in range(CASES):
        routing, n_experts, sizes, budget, asked = draw_case(seed)
        found, _ = run_replay(routing, n_experts, sizes, budget, asked)
        assert found == run_plainly(routing, sizes, budget, asked), f"case {seed}: {asked}, {budget}, {sizes}"
        for batch in found:
            counted["useful"] += batch["useful"]
            counted["wasted"] += batch["wasted"]
            counted["missed"] += len(batch["missed"])
    assert min(counted.values()) > 500, "the cases reach what they are drawn for"


@pytest.mark.parametrize(
    "slip",
    [
        dict(prefetch=1),  # one guess fewer or more
        dict(cold=True),
        dict(budget=1),
        dict(prefill_warms=True),
    ],
)
def test_a_replay_of_other_settings_does_not_pass(slip):
    """The comparison can fail: for each setting some of the cases tell it from the others."""
    seen = 0
    for seed in range(60):
        routing, n_experts, sizes, budget, asked = draw_case(seed)
        right = run_plainly(routing, sizes, budget, asked)
        budget += slip.get("budget", 0)
        changed = asked | {name: value for name, value in slip.items() if name in asked}
        warms = {"prefill_warms": True} if "prefill_warms" in slip else {}
        seen += run_replay(routing | warms, n_experts, sizes, budget, changed)[0] != right
    assert seen >= 5


def test_an_lru_of_each_layer_follows_the_rules_on_its_layer():
    """Layers of other sizes, and layers that never occur, take an equal share of the budget all the same."""
    for seed in range(150):
        routing, n_experts, sizes, budget, asked = draw_case(seed)
        asked |= {"prefetch": 0, "cold": False}
        found, _ = run_replay(routing, n_experts, sizes, budget, asked, "lru-per-layer")
        for layer, size in enumerate(sizes):
            alone = routing | {"experts": routing["experts"][:, layer : layer + 1], "guesses": None}
            expected = run_plainly(alone, [size], budget // len(sizes), asked)
            assert [batch | {"layer": 0} for batch in found if batch["layer"] == layer] == expected, f"case {seed}"


def test_nothing_hits_up_to_the_floor_whatever_the_routing():
    hit_above = 0
    for seed in range(CASES):
        routing, n_experts, sizes, _, asked = draw_case(seed)
        lookups = from_routing(**routing, n_experts=n_experts, layer_bytes=sizes)
        for in_slots, least in zip((True, False), lru_floor(lookups), strict=True):
            curve = lru_curve(lookups, phase=DECODE, in_slots=in_slots, cold=asked["cold"])
            assert curve.hits_at(least) == 0, f"case {seed}"
            hit_above += curve.hits_at(least + 1) > 0
    assert hit_above > CASES / 10, "and just above it something often does"


def test_guesses_of_a_step_of_several_tokens_are_not_used_even_where_a_layer_saw_one():
    """As in prompts whose last layer is computed for the last token only."""
    experts = np.array([[[0], [-1]], [[1], [2]], [[3], [3]]])
    guesses = np.array([[[-1], [7]], [[-1], [2]], [[-1], [3]]])
    lookups = from_routing(experts, n_experts=8, step=[0, 0, 1], guesses=guesses)
    assert lookups.guesses.tolist() == [[-1], [-1], [-1], [11]]
