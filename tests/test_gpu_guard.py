"""What keeps a process within its budget of a card's memory: limits for torch, and words for what does not suffice."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from fake_cards import GIB, MIB, FakeCard, stand_in_for_limits

from nemolab.engine.gpu.guard import SPARE_BYTES, WATCHED_TOKENS, Guard
from nemolab.engine.gpu.non_torch import ASSUMED, DIFFERENCE
from nemolab.errors import EngineError, StoreError


def make_guard(card, budget=4 * GIB, context=768 * MIB):
    return Guard(card, SimpleNamespace(budget_bytes=budget, context_bytes=context))


def test_torch_gets_what_the_budget_leaves_as_planned_or_as_found():
    card = FakeCard()
    guard = make_guard(card)
    assert card.limits == [4 * GIB - 768 * MIB]
    guard.run(5, "a prompt", lambda: card.change(non_torch_bytes=700 * MIB))
    assert len(card.limits) == 1, "as planned"
    guard.run(5, "a prompt", lambda: card.change(non_torch_bytes=900 * MIB))
    assert card.limits[1:] == [4 * GIB - 900 * MIB - SPARE_BYTES] == [guard.limit_bytes]
    guard.run(5, "a prompt", lambda: card.change(non_torch_bytes=800 * MIB))
    assert len(card.limits) == 2, "what was taken once may be taken again"
    guard.close()
    guard.close()
    assert card.limits[2:] == [None]


def test_a_difference_that_falls_again_loosens_the_limit_and_is_called_one():
    card = FakeCard()
    card.change(source=DIFFERENCE)
    guard = make_guard(card)
    guard.run(5, "a prompt", lambda: card.change(non_torch_bytes=3 * GIB))
    guard.run(5, "a prompt", lambda: card.change(non_torch_bytes=800 * MIB))
    assert card.limits[1:] == [GIB - SPARE_BYTES, 4 * GIB - 800 * MIB - SPARE_BYTES] and card.limits[2] == (
        guard.limit_bytes
    )
    card.change(non_torch_bytes=3 * GIB + MIB)
    with pytest.raises(EngineError, match=r"3\.00 GiB beside it \(a difference: what another program took .*\)"):
        guard.run(5, "a prompt", lambda: None)


def test_a_figure_that_nobody_tells_any_more_is_not_told():
    card = FakeCard()
    guard = make_guard(card)
    guard.run(5, "a prompt", lambda: card.change(source=ASSUMED, non_torch_bytes=3 * GIB))
    guard.run(5, "a prompt", lambda: card.change(non_torch_bytes=800 * MIB))
    assert card.limits[2:] == [4 * GIB - 800 * MIB - SPARE_BYTES]
    card.change(non_torch_bytes=4 * GIB)
    with pytest.raises(EngineError, match=r"4\.00 GiB beside it \(assumed: the driver does not tell\)"):
        guard.run(5, "a prompt", lambda: None)


def test_whatever_may_take_memory_is_a_pass_until_it_was_looked_at(monkeypatch):
    card, seen = FakeCard(), []
    guard, look = make_guard(card), card.look
    monkeypatch.setattr(card, "look", lambda: (seen.append(card.passes), look())[1])
    for run in (
        lambda work: guard.run(5, "", work),
        lambda work: guard.load("", work),
        lambda work: guard.take("", work),
    ):
        run(lambda: seen.append(card.passes))
    with pytest.raises(ZeroDivisionError):
        guard.run(5, "", lambda: 1 / 0)
    assert set(seen) == {1} and len(seen) == 3 + 2 + 3 + 1 and card.passes == 0, "one that fails, too"


def test_a_limit_that_was_not_lifted_is_lifted_the_next_time(monkeypatch):
    card = FakeCard()
    guard = make_guard(card)
    with monkeypatch.context() as failing:
        failing.setattr(card, "set_limit", lambda nbytes: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            guard.close()
    guard.close()
    assert card.limits[1:] == [None]


def test_without_a_budget_nothing_is_limited_or_measured():
    card = FakeCard(reserved=7 * GIB)
    guard = make_guard(card, budget=None)
    assert guard.run(5, "a prompt", lambda: 7) == 7 and (card.limits, card.begun) == ([], 0)
    guard.close()
    assert card.limits == []


def test_prompts_and_the_first_tokens_are_watched_and_later_ones_ever_more_rarely():
    card = FakeCard()
    guard = make_guard(card)
    watched = []
    for tokens in [9, *[1] * 800, 0, 1]:
        before = card.begun
        guard.run(tokens, "", lambda: None)
        watched.append(card.begun > before)
    expected = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 801, 802]
    assert [number for number, was in enumerate(watched) if was] == expected and WATCHED_TOKENS == 256


def test_a_process_above_its_budget_is_told_so_before_it_goes_on():
    card = FakeCard()
    guard = make_guard(card)
    guard.run(5, "a prompt", lambda: card.change(reserved_bytes=3 * GIB, non_torch_bytes=1200 * MIB))
    ran = []
    with pytest.raises(
        EngineError, match=r"holds 4\.17 GiB .*3\.00 GiB by torch, 1\.17 GiB beside it.* the 4\.00 GiB that vram_gib"
    ):
        guard.run(5, "a prompt", lambda: ran.append(1))
    assert not ran and card.released == 1
    card.kept_bytes = 200 * MIB  # torch kept that much for the next tensors, and can give it back
    guard.run(5, "a prompt", lambda: ran.append(1))
    assert ran and card.released == 2


def test_a_model_that_does_not_fit_is_told_so_at_once():
    card = FakeCard()
    with pytest.raises(EngineError, match=r"holds 5\.59 GiB"):
        make_guard(card).load("this model", lambda: card.change(reserved_bytes=5 * GIB))


def test_a_model_that_ends_the_memory_while_it_loads_asks_for_more():
    def load():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    with pytest.raises(
        EngineError, match=r"for this model: .* 2\.00 GiB; .* of 4\.00 GiB that vram_gib allows; allow more$"
    ):
        make_guard(FakeCard()).load("this model", load)


def run_out(card, budget=4 * GIB, tokens=5):
    def compute():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity ...")

    with pytest.raises(EngineError) as refusal:
        make_guard(card, budget).run(tokens, "a pass of 5 tokens behind 0", compute)
    assert card.released == 1 and refusal.value.__context__ is None
    return str(refusal.value)


def test_running_out_says_who_holds_what():
    words = run_out(FakeCard(reserved=3 * GIB))
    assert "for a pass of 5 tokens behind 0: CUDA out of memory. Tried to allocate 2.00 GiB; torch holds 3.00" in words
    assert words.endswith(
        "600.00 MiB are taken beside it, of 4.00 GiB that vram_gib allows; fewer tokens at once need less"
    )
    words = run_out(FakeCard(reserved=GIB, used=7 * GIB))
    assert (
        "other programs hold 5.41 GiB of the card's 8.00 GiB, 1.00 GiB are free: it is the card that is full" in words
    )
    words = run_out(FakeCard(reserved=6 * GIB, used=8 * GIB), budget=None)
    assert "torch holds 6.00 GiB" in words and "vram_gib" not in words and "other programs hold 1.41 GiB" in words
    assert "a shorter conversation" in run_out(FakeCard(reserved=3 * GIB), tokens=1)
    assert "768.00 MiB are taken beside it" in run_out(FakeCard(reserved=3 * GIB, beside=None)), "not known: as planned"


def test_memory_that_ends_for_kernels_is_told_alike_and_other_errors_stay_what_they_are():
    def fail(words):
        raise RuntimeError(words)

    def copy_fails():
        raise StoreError("copying 2 times 3 bytes: CUDA_ERROR_OUT_OF_MEMORY")

    with pytest.raises(EngineError, match=r"for a prompt: Triton Error \[CUDA\]: out of memory; torch holds"):
        make_guard(FakeCard()).run(5, "a prompt", lambda: fail("Triton Error [CUDA]: out of memory"))
    with pytest.raises(EngineError, match=r"for a prompt: copying 2 times 3 bytes: CUDA_ERROR_OUT_OF_MEMORY; torch"):
        make_guard(FakeCard()).run(5, "a prompt", copy_fails)
    card = FakeCard()
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        make_guard(card).run(5, "a prompt", lambda: fail("CUDA error: an illegal memory access was encountered"))
    assert card.released == 0


def test_an_error_that_is_kept_keeps_no_tensors():
    kept = []

    def compute():
        tensor = torch.zeros(5)
        kept.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    gc.disable()
    try:
        with pytest.raises(EngineError) as refusal:
            make_guard(FakeCard()).run(5, "", compute)
        assert kept[0]() is None and refusal.value.__traceback__ is not None
    finally:
        gc.enable()


def test_of_several_limits_on_a_card_the_tightest_holds(monkeypatch):
    """torch keeps one for the process; engines come and go."""
    fractions, make_card = stand_in_for_limits(monkeypatch)
    first, second, other = make_card(0), make_card(0), make_card(1)
    for card, limit in ((first, 4 * GIB), (second, 2 * GIB), (other, GIB), (first, 3 * GIB), (second, None)):
        card.set_limit(limit)
    assert fractions == [0.5, 0.25, 0.125, 0.25, 0.375]
    first.set_limit(None)
    assert fractions[-1] == 1.0
