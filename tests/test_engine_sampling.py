"""Choosing ids: greedy, temperature, top-k, top-p, seeds, ties, and what is refused."""

import numpy as np
import pytest

from nemolab.engine.sampling import Sampler
from nemolab.errors import EngineError

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def shares(sampler, logits=LOGITS, draws=4000):
    return np.bincount([sampler.choose(logits) for _ in range(draws)], minlength=len(logits)) / draws


@pytest.mark.parametrize("settings", [{}, {"temperature": 1e-6}, {"temperature": 1.0, "top_p": 0.0},
                                      {"temperature": 1.0, "top_k": 1}])  # fmt: skip
def test_greedy_takes_the_first_of_the_best(settings):
    assert Sampler(**settings).choose(LOGITS) == 1
    assert Sampler(**settings).choose(np.array([1.0, 3.0, 3.0], np.float32)) == 1


def test_temperature_one_follows_the_softmax():
    assert np.allclose(shares(Sampler(temperature=1.0)), [0.1, 0.4, 0.2, 0.3], atol=0.03)


def test_temperature_sharpens_and_flattens():
    wanted = np.array([0.1, 0.4, 0.2, 0.3]) ** 2
    assert np.allclose(shares(Sampler(temperature=0.5)), wanted / wanted.sum(), atol=0.03)
    assert np.allclose(shares(Sampler(temperature=1e6)), 0.25, atol=0.03)


def test_top_k_keeps_the_k_best():
    assert np.allclose(shares(Sampler(temperature=1.0, top_k=2)), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    assert np.allclose(shares(Sampler(temperature=1.0, top_k=99)), [0.1, 0.4, 0.2, 0.3], atol=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    assert np.allclose(shares(Sampler(temperature=1.0, top_p=0.69)), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    assert np.allclose(shares(Sampler(temperature=1.0, top_p=0.71)), [0, 4 / 9, 2 / 9, 3 / 9], atol=0.03)


def test_ties_at_the_edge_keep_the_lowest_ids():
    equal = np.zeros(4, np.float32)
    assert np.allclose(shares(Sampler(temperature=1.0, top_k=2), equal), [0.5, 0.5, 0, 0], atol=0.03)
    assert np.allclose(shares(Sampler(temperature=1.0, top_p=0.5), equal), [0.5, 0.5, 0, 0], atol=0.03)


def test_large_logits_overflow_nothing():
    assert shares(Sampler(temperature=0.01), np.array([3e4, -3e4, 2.9e4], np.float32), 50).tolist() == [1, 0, 0]
    assert shares(Sampler(temperature=1.0), np.array([0, -np.inf, -np.inf], np.float32), 50).tolist() == [1, 0, 0]


def test_seeds_repeat():
    def draws(seed):
        sampler = Sampler(temperature=1.0, seed=seed)
        return [sampler.choose(LOGITS) for _ in range(20)]

    assert draws(7) == draws(7) != draws(8)


@pytest.mark.parametrize("settings", [{"temperature": -1}, {"temperature": float("nan")}, {"temperature": float("inf")},
                                      {"top_p": 1.1}, {"top_p": -0.1}, {"top_p": float("nan")}, {"top_k": -1},
                                      {"top_k": 1.5}, {"seed": -1}, {"seed": "1"}, {"temperature": "hot"},
                                      {"temperature": True}])  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(settings):
    with pytest.raises(EngineError, match=next(iter(settings))):
        Sampler(**settings)


def test_nan_logits_are_named_for_what_they_are():
    with pytest.raises(EngineError, match="NaN"):
        Sampler().choose(np.array([1.0, np.nan, 2.0], np.float32))
