"""Measures of routing against cases worked out by hand, each with the controls that must not pass."""

import numpy as np
import pytest
from small_lookups import from_batches

from nemolab.errors import TraceError
from nemolab.simulate import measures
from nemolab.simulate.measures import (
    count_usage,
    entropy_bits,
    experts_for_share,
    guess_accuracy,
    hottest_share,
    number_runs,
    perfect_guesses,
    repeat_rate,
    reuse_histogram,
    shuffle_guesses,
    shuffle_tokens,
)


def draw(seed, tokens=400, layers=3, n_experts=32, top_k=4):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, n_experts)), axis=2)[:, :, :top_k].astype(np.int16)


def test_usage_counts_every_choice_once():
    experts = np.array([[[0, 1], [2, 0]], [[1, 3], [-1, -1]]])
    assert count_usage(experts, 4).tolist() == [[1, 2, 0, 1], [1, 0, 1, 0]]


def test_the_hottest_quarter_is_chosen_over_all_layers():
    counts = np.array([[70, 10, 1, 1], [15, 1, 1, 1]])
    assert hottest_share(counts) == 85 / 100
    assert hottest_share(np.full((2, 8), 5)) == 0.25, "even routing"
    assert hottest_share(np.zeros((2, 4))) is None
    assert experts_for_share(counts, 0.7) == 1 / 8 and experts_for_share(counts, 0.71) == 2 / 8
    assert experts_for_share(counts, 1) == 1.0


def test_a_hot_set_learned_elsewhere_is_held_against_these_lookups():
    here, there = np.array([[6, 3, 1, 0]]), np.array([[0, 5, 2, 1]])
    assert hottest_share(here) == 0.6 and hottest_share(here, chosen_by=there) == 0.3
    assert hottest_share(here, chosen_by=here) == hottest_share(here)


def test_entropy_is_that_of_the_choice():
    counts = np.array([[5, 5, 5, 5], [20, 0, 0, 0], [10, 10, 0, 0]])
    assert entropy_bits(counts).tolist() == [2.0, 0.0, 1.0]


def test_repetition_is_counted_within_a_run():
    experts = np.array([[[0, 1]], [[1, 2]], [[1, 2]], [[1, 2]]])
    assert repeat_rate(experts) == (1 + 2 + 2) / 6
    assert repeat_rate(experts, [0, 0, 1, 1]) == (1 + 2) / 4
    assert repeat_rate(experts[:1]) is None
    experts[1] = -1
    assert repeat_rate(experts) == 2 / 2, "a token that was not seen neither asks nor answers"
    assert abs(repeat_rate(draw(0)) - 4 / 32) < 0.02, "chance"


def test_a_run_ends_with_its_conversation_and_where_a_position_is_left_out():
    assert number_runs([0, 0, 0, 1, 1], [4, 5, 9, 10, 11]).tolist() == [0, 0, 1, 2, 2]
    assert number_runs([], []).tolist() == []


def test_shuffles_keep_the_tokens_and_within_also_their_conversations():
    conversation = np.array([0, 1, 0, 1, 1, 0, 2])
    within, across = shuffle_tokens(conversation), shuffle_tokens(conversation, across=True)
    assert np.array_equal(np.sort(within), np.arange(7)) and np.array_equal(np.sort(across), np.arange(7))
    assert np.array_equal(conversation[within], conversation) and not np.array_equal(conversation[across], conversation)
    assert np.array_equal(within, shuffle_tokens(conversation)), "the seed fixes it"


def test_the_two_controls_tell_a_topic_from_recency():
    """Each conversation draws from 4 experts of its own: all repetition beyond chance is topic, none is recency."""
    conversation = np.repeat([0, 1], 200)
    experts = (np.random.default_rng(0).integers(0, 4, 400) + 4 * conversation).reshape(400, 1, 1)
    runs = number_runs(conversation, np.arange(400))
    found = repeat_rate(experts, runs)
    within, across = (repeat_rate(experts[shuffle_tokens(conversation, across=a)], runs) for a in (False, True))
    assert abs(found - 1 / 4) < 0.06 and abs(within - 1 / 4) < 0.06 and abs(across - 1 / 8) < 0.06


def test_reuse_distances_are_binned_by_doubling():
    lookups = from_batches([[key] for key in (0, 0, 1, 2, 3, 0)])
    histogram = reuse_histogram(lookups)
    assert histogram.never == 4
    assert histogram.edges.tolist() == [1, 2, 4, 8] and histogram.counts.tolist() == [1, 0, 1]


def test_accuracy_of_guesses_by_hand():
    experts = np.array([[[0, 1, 2], [3, 4, 5]]])
    guesses = np.array([[[-1, -1], [3, 9]]])
    accuracy = guess_accuracy(experts, guesses)
    assert accuracy.right.tolist() == [1.0, 0.5]
    assert accuracy.covered.tolist() == [1 / 3, 1 / 3]
    assert accuracy.n_guessed == 1


def test_perfect_guesses_are_all_right():
    experts = draw(1)
    accuracy = guess_accuracy(experts, perfect_guesses(experts))
    assert np.all(accuracy.right == 1) and accuracy.covered.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert accuracy.n_guessed == 400 * 2


def test_shuffled_guesses_fall_to_chance():
    experts = draw(2)
    shuffled = shuffle_guesses(perfect_guesses(experts))
    assert np.all(np.abs(guess_accuracy(experts, shuffled).right - 4 / 32) < 0.03)
    assert np.array_equal(count_usage(shuffled[:, 1:], 32), count_usage(experts[:, 1:], 32)), "as often as before"
    assert np.array_equal(shuffled, shuffle_guesses(perfect_guesses(experts))), "the seed fixes it"
    assert np.all(shuffled[:, 0] == -1)


def test_no_guesses_are_no_accuracy():
    experts = draw(3, tokens=5)
    accuracy = guess_accuracy(experts, np.full((5, 3, 2), -1))
    assert accuracy.n_guessed == 0 and np.all(accuracy.right == 0)
    with pytest.raises(TraceError, match=r"guesses of shape \(4, 3, 2\)"):
        guess_accuracy(experts, np.zeros((4, 3, 2), int))


def test_measures_leave_their_input_alone():
    experts = draw(4, tokens=20)
    before = experts.copy()
    for measure in (repeat_rate, perfect_guesses, shuffle_guesses):
        measure(experts)
    measures.count_usage(experts, 32)
    assert np.array_equal(experts, before)
