"""The measures have known answers, and refuse what would give a wrong one quietly."""

import math

import pytest
import torch

from nemolab.compare import measures
from nemolab.errors import NemolabError


def rows_of(logits):
    return lambda start, stop: logits[start:stop]


def logits_of(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_kl_has_the_textbook_value_in_nats():
    p, q = logits_of(0.9, 0.1), logits_of(0.5, 0.5)
    # 0.9 ln(0.9 / 0.5) + 0.1 ln(0.1 / 0.5) = 0.52901 - 0.16094
    assert measures.kl_rows(reference=p, engine=q).item() == pytest.approx(0.3680642, abs=1e-7)


def test_kl_of_swapped_models_is_another_number():
    p, q = logits_of(0.9, 0.1), logits_of(0.5, 0.5)
    # 0.5 ln(0.5 / 0.9) + 0.5 ln(0.5 / 0.1) = -0.29389 + 0.80472
    assert measures.kl_rows(reference=q, engine=p).item() == pytest.approx(0.5108256, abs=1e-7)
    with pytest.raises(TypeError):
        measures.kl_rows(p, q)


def test_kl_of_a_model_with_itself_is_zero():
    logits = torch.randn(5, 300)
    assert measures.kl_rows(reference=logits, engine=logits).tolist() == [0.0] * 5


def test_kl_ignores_a_constant_added_to_every_logit():
    logits = torch.randn(5, 300, dtype=torch.float64)
    assert measures.kl_rows(reference=logits, engine=logits + 7).abs().max() < 1e-14


def test_kl_counts_the_tail_a_narrow_store_would_floor():
    # One logit at 0, the others at -30 against -20: the tail's own mass is 1e-13 and 2e-9 of it all.
    size = 1000
    p, q = torch.full((1, size), -30.0), torch.full((1, size), -20.0)
    p[0, 0] = q[0, 0] = 0.0
    mass_p, mass_q = 1 + (size - 1) * math.exp(-30), 1 + (size - 1) * math.exp(-20)
    expected = (math.log(mass_q) - math.log(mass_p)) / mass_p + (size - 1) * math.exp(-30) / mass_p * (
        -30 - math.log(mass_p) + 20 + math.log(mass_q)
    )
    assert measures.kl_rows(reference=p, engine=q).item() == pytest.approx(expected, rel=1e-6)
    assert measures.kl_rows(reference=p, engine=p).item() == 0.0


def test_kl_is_accumulated_in_float64():
    torch.manual_seed(0)
    logits = 4 * torch.randn(1, 131072)
    moved = logits + 1e-4 * torch.randn(1, 131072)
    p, q = torch.log_softmax(logits.double(), 1), torch.log_softmax(moved.double(), 1)
    exact = math.fsum((p.exp() * (p - q))[0].tolist())
    assert measures.kl_rows(reference=logits, engine=moved).item() == pytest.approx(exact, rel=1e-9)
    single = (p.float().exp() * (p.float() - q.float())).sum().item()
    assert single != pytest.approx(exact, rel=1e-3), "float32 would have done: this test shows nothing"


def test_an_impossible_token_in_both_models_adds_nothing():
    p = torch.tensor([[0.0, 0.0, -math.inf]])
    assert measures.kl_rows(reference=p, engine=p).item() == 0.0


def test_a_token_only_the_engine_holds_impossible_is_infinitely_wrong():
    p, q = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -math.inf]])
    assert measures.kl_rows(reference=p, engine=q).item() == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_logits_are_refused_by_row_and_owner(value):
    good, bad = torch.zeros(3, 4), torch.zeros(3, 4)
    bad[2, 1] = value
    with pytest.raises(NemolabError, match="engine: logits of row 2"):
        measures.kl_rows(reference=good, engine=bad)


def test_probabilities_in_place_of_logits_are_refused():
    p = torch.softmax(torch.randn(4, 9), dim=1)
    with pytest.raises(NemolabError, match="probabilities came"):
        measures.kl_rows(reference=p, engine=p)


def test_a_negative_kl_is_an_error(monkeypatch):
    p = logits_of(0.9, 0.1)
    monkeypatch.setattr(measures.torch, "log_softmax", lambda x, dim: x)  # a measure that forgot to normalise
    with pytest.raises(NemolabError, match="cannot be negative"):
        measures.kl_rows(reference=p, engine=p + 1)


def test_one_planted_position_is_found_with_its_token():
    torch.manual_seed(1)
    reference = torch.randn(150, 40)
    engine = reference.clone()
    engine[97, 3] += 6
    ids = list(range(150))
    found = measures.diverge(
        ids, reference=rows_of(reference), engine=rows_of(engine), rows=range(149), token_text=lambda ids: f"<{ids[0]}>"
    )
    assert (found.worst.position, found.worst.token_id, found.worst.token) == (97, 97, "<97>")
    assert found.tokens == 149 and found.median == 0.0 and found.p99 == 0.0
    assert found.max == found.worst.kl == pytest.approx(found.mean * 149)
    assert found.top1_agreement == pytest.approx(148 / 149)


def test_only_the_asked_rows_are_compared():
    reference = torch.randn(20, 10)
    engine = reference.clone()
    engine[:10] = 0
    found = measures.diverge(list(range(20)), reference=rows_of(reference), engine=rows_of(engine), rows=range(10, 20))
    assert found.tokens == 10 and found.max == 0.0


def test_perplexity_of_a_uniform_model_is_its_vocabulary():
    ids = [3, 1, 4, 1, 5]
    uniform = rows_of(torch.zeros(5, 32))
    scored = measures.score(ids, reference=uniform, engine=uniform)
    assert scored.tokens == 4
    assert scored.engine == pytest.approx(32) and scored.reference == pytest.approx(32)
    assert scored.log_ratio_error == 0.0


def test_perplexity_scores_each_token_by_the_row_before_it():
    # Row t gives probability 1/2 to the token that follows; a shifted reading would find 1/6.
    ids = [0, 1, 2, 3]
    logits = torch.full((4, 4), 1 / 6).log()
    for t in range(3):
        logits[t, ids[t + 1]] = math.log(0.5)
    assert measures.score(ids, reference=rows_of(logits), engine=rows_of(logits)).engine == pytest.approx(2)


def test_perplexity_of_a_hopeless_model_is_infinite_not_an_exception():
    logits = torch.zeros(3, 2)
    logits[:, 1] = -2000
    assert measures.score([0, 1, 1], reference=rows_of(logits), engine=rows_of(logits)).engine == math.inf


def test_a_single_token_cannot_be_scored():
    with pytest.raises(NemolabError, match="two or more"):
        measures.score([7], reference=rows_of(torch.zeros(1, 9)), engine=rows_of(torch.zeros(1, 9)))


def test_greedy_reports_the_references_gap_at_each_mismatch():
    reference = torch.tensor([[0.0, 20.0, 19.95], [5.0, 1.0, 0.0], [0.0, 0.0, 9.0]])
    greedy = measures.score_greedy([2, 0, 1], reference)
    assert (greedy.match, greedy.of) == (1, 3)
    tie, fault = greedy.mismatches
    assert (tie.step, tie.engine_token, tie.reference_token) == (0, 2, 1)
    assert tie.gap == pytest.approx(0.05, abs=1e-5) and tie.bf16_step == 0.125 and tie.tie
    assert fault.step == 2 and fault.gap == 9.0 and not fault.tie


@pytest.mark.parametrize("value, step", [(1.0, 2**-7), (1.99, 2**-7), (16.0, 0.125), (-20.0, 0.125), (0.4, 2**-9)])
def test_bf16_step_is_the_spacing_of_bfloat16(value, step):
    assert measures.bf16_step(value) == step
    one = torch.tensor(abs(value), dtype=torch.bfloat16)
    after = (one.view(torch.int16) + 1).view(torch.bfloat16)
    assert (after.double() - one.double()).item() == step


def test_greedy_refuses_scores_of_another_length():
    with pytest.raises(NemolabError, match="3 tokens were written"):
        measures.score_greedy([1, 2, 3], torch.zeros(2, 5))
