"""Random: any entry outside the running batch leaves, by dice that a seed fixes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.jit import jit_inner
from nemolab.policy.interface import HIT, Policy, Setting, ignore, register


class RandomState(NamedTuple):
    """pool int32: what is cached, in any order; where int32: the place of a key in it; size int64, dice uint64 [1]."""

    pool: np.ndarray
    where: np.ndarray
    size: np.ndarray
    dice: np.ndarray


def start(setting: Setting) -> RandomState:
    by_key = (np.zeros(setting.n_keys, np.int32) for _ in range(2))
    return RandomState(*by_key, np.zeros(1, np.int64), np.array([setting.seed], np.uint64))


@jit_inner
def roll(dice):
    """The next of 2^64 numbers in an order that looks random (splitmix64)."""
    dice[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = dice[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def meet(state, key, held):
    pass


def choose(state, entries, stamp):
    while True:
        key = np.int64(state.pool[roll(state.dice) % np.uint64(state.size[0])])
        if entries[key].mark != stamp:
            return key


def remove(state, key):
    state.size[0] -= 1
    last = state.pool[state.size[0]]
    state.pool[state.where[key]] = last
    state.where[last] = state.where[key]


def place(state, key, how, at):
    if how != HIT:
        state.where[key] = state.size[0]
        state.pool[state.size[0]] = key
        state.size[0] += 1
    return True


RANDOM = register(
    RandomState, Policy("random", "any entry leaves, by seeded dice", start, meet, choose, remove, place, ignore)
)
