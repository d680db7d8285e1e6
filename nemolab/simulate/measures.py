"""How concentrated, how repetitive, how predictable a routing is. Pure functions of expert ids.

experts is ids (tokens, layers, top_k) in rank order, -1 where a layer saw no token; rows follow one another in time.
Every share is of lookups, from 0 to 1, and None where there are none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.errors import TraceError
from nemolab.simulate.curve import NEVER, lru_distances
from nemolab.simulate.lookups import Lookups


def count_usage(experts: np.ndarray, n_experts: int) -> np.ndarray:
    """How often each expert was chosen: int64 (layers, n_experts)."""
    experts = np.asarray(experts)
    n_layers = experts.shape[1]
    keys = experts.astype(np.int64) + (np.arange(n_layers) * n_experts)[None, :, None]
    counts = np.bincount(keys[experts >= 0], minlength=n_layers * n_experts)
    return counts.reshape(n_layers, n_experts)


def hottest_share(counts: np.ndarray, share: float = 0.25, *, chosen_by: np.ndarray | None = None) -> float | None:
    """Share of lookups that go to the hottest `share` of all experts, chosen over all layers together.

    counts     as from count_usage, or one layer of it. Even routing gives `share` itself.
    chosen_by  counts of other lookups that say which are the hottest: how well a set learned there serves here
    """
    counts = np.asarray(counts).reshape(-1)
    hottest = np.argsort(-(counts if chosen_by is None else np.asarray(chosen_by).reshape(-1)), kind="stable")
    total = counts.sum()
    return float(counts[hottest[: round(share * len(counts))]].sum() / total) if total else None


def experts_for_share(counts: np.ndarray, share: float) -> float | None:
    """The smallest share of all experts that carries `share` of the lookups."""
    counts = np.sort(np.asarray(counts).reshape(-1))[::-1]
    total = counts.sum()
    if not total:
        return None
    return float((np.searchsorted(np.cumsum(counts), share * total) + 1) / len(counts))


def entropy_bits(counts: np.ndarray) -> np.ndarray:
    """Entropy of the choice in each layer, bits (layers,): log2(n_experts) if even, 0 if one expert takes all."""
    counts = np.asarray(counts, np.float64)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    logs = np.log2(share, out=np.zeros_like(share), where=share > 0)
    return np.abs((share * logs).sum(axis=1))


def number_runs(conversation: np.ndarray, position: np.ndarray) -> np.ndarray:
    """A number for each run of tokens that follow one another: int64 (tokens,), from 0.

    A run is of one conversation and leaves no position out: of decode tokens alone, each answer is one.
    """
    conversation, position = np.asarray(conversation), np.asarray(position)
    changes = np.diff(conversation, prepend=conversation[:1]) != 0
    return np.cumsum(changes | (np.diff(position, prepend=position[:1] - 1) != 1))


def repeat_rate(experts: np.ndarray, runs: np.ndarray | None = None) -> float | None:
    """Share of lookups whose expert the same layer also chose for the token before, in the same run (`number_runs`).

    runs  (tokens,): pairs of tokens across a change of it are left out; None: every token follows the one before
    Independent draws give about top_k / n_experts. A real routing also repeats because some experts are hot, at all or
    in what a conversation is about: hold it against `shuffle_tokens`.
    """
    now, before = np.asarray(experts)[1:], np.asarray(experts)[:-1]
    asked = now >= 0
    if runs is not None:
        asked &= (np.diff(np.asarray(runs)) == 0)[:, None, None]
    asked &= (before >= 0).any(axis=2, keepdims=True)
    again = _is_among(now, before) & asked
    return float(again.sum() / asked.sum()) if asked.any() else None


def shuffle_tokens(
    conversation: np.ndarray, *, across: bool = False, seed: int | np.random.Generator = 0
) -> np.ndarray:
    """The controls of `repeat_rate`: an order (tokens,) that deals tokens anew. `experts[order]` with the same runs.

    Within each conversation, what still repeats does so because an expert is hot in that conversation; across all of
    them, because it is hot in the whole trace. Only what the true order has beyond the first is recency.
    """
    rng = np.random.default_rng(seed)
    conversation = np.asarray(conversation)
    if across:
        return rng.permutation(len(conversation))
    order = np.empty(len(conversation), np.int64)
    # Sorting by conversation with random ties deals the places of each conversation among its own tokens.
    order[np.argsort(conversation, kind="stable")] = np.lexsort((rng.random(len(conversation)), conversation))
    return order


class Histogram(NamedTuple):
    """counts[i] lookups have a reuse distance of edges[i] to edges[i + 1] - 1 blocks; `never`: looked up first then."""

    edges: np.ndarray
    counts: np.ndarray
    never: int


def reuse_histogram(lookups: Lookups, *, phase: int | None = None, cold: bool = False) -> Histogram:
    """Reuse distances in blocks, in bins that double: the smallest LRU cache in which a lookup hits."""
    distances = lru_distances(lookups, in_slots=True, cold=cold)
    if phase is not None:
        distances = distances[np.repeat(lookups.phase == phase, np.diff(lookups.starts))]
    again = distances[distances != NEVER]
    edges = 2 ** np.arange(int(again.max(initial=1)).bit_length() + 1)
    counts, _ = np.histogram(again, edges)
    return Histogram(edges, counts, len(distances) - len(again))


class Accuracy(NamedTuple):
    """right[j]: share of the first j + 1 guesses that were chosen; covered[j]: share of the chosen that they name."""

    right: np.ndarray
    covered: np.ndarray
    n_guessed: int


def guess_accuracy(experts: np.ndarray, guesses: np.ndarray) -> Accuracy:
    """How good guesses by rank are, for 1 to n of them, over the places that have any.

    guesses  ids (tokens, layers, n) made *for* that layer, by rank, -1 for none; one, two or three layers ahead alike
    Guesses equal to the experts themselves must give 1 everywhere (`perfect_guesses`), those of other tokens nearly
    what chance gives (`shuffle_guesses`): the controls without which no accuracy means anything.
    Raises TraceError where shapes disagree.
    """
    experts, guesses = np.asarray(experts), np.asarray(guesses)
    if experts.ndim != 3 or guesses.ndim != 3 or experts.shape[:2] != guesses.shape[:2]:
        raise TraceError(f"guesses of shape {guesses.shape} do not stand beside experts of shape {experts.shape}")
    known = (guesses >= 0).all(axis=2) & (experts >= 0).all(axis=2)
    n_guessed, top_k, n = int(known.sum()), experts.shape[2], guesses.shape[2]
    right = np.cumsum(_is_among(guesses[known], experts[known]).sum(axis=0))
    n_known = max(n_guessed, 1)
    return Accuracy(right / (n_known * np.arange(1, n + 1)), right / (n_known * top_k), n_guessed)


def perfect_guesses(experts: np.ndarray, like: np.ndarray | None = None) -> np.ndarray:
    """The control that must give 1: each layer's own choice, of which there are top_k at most.

    like  guesses (tokens, layers, n): then no more than n, and only where these are made; else none for the first layer
    """
    guesses = np.array(experts)
    if like is None:
        guesses[:, 0] = -1
        return guesses
    guesses[like[:, :, 0] < 0] = -1
    return guesses[:, :, : like.shape[2]]


def shuffle_guesses(guesses: np.ndarray, seed: int = 0) -> np.ndarray:
    """The control that must fall to chance: every layer's guesses dealt to other tokens.

    Each layer is shuffled by itself, so that how often an expert is guessed stays what it was.
    """
    rng = np.random.default_rng(seed)
    shuffled = np.array(guesses)
    for layer in range(shuffled.shape[1]):
        known = np.flatnonzero((shuffled[:, layer] >= 0).all(axis=1))
        shuffled[known, layer] = shuffled[rng.permutation(known), layer]
    return shuffled


def _is_among(ids: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether each id (..., n) is one of the others (..., m) of its place; compared pair by pair of ranks."""
    found = np.zeros(ids.shape, bool)
    for rank in range(others.shape[-1]):
        found |= ids == others[..., rank : rank + 1]
    return found & (ids >= 0)
