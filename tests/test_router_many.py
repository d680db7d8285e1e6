"""One router for many tokens: the choices of the one-token step, bit for bit."""

import numpy as np
import pytest
import torch

from nemolab.errors import EngineError
from nemolab.kernels.matvec import matvec, pack
from nemolab.kernels.router_many import router_many, router_many_torch
from nemolab.kernels.router_step import RouterStep
from nemolab.kernels.team import Team

SHAPES = [(64, 256, 8, 1, 1), (24, 36, 5, 4, 2), (512, 1024, 22, 8, 3), (3, 8, 3, 1, 1)]


@pytest.fixture(scope="module")
def team():
    with Team(2) as team:
        yield team


def make_router(experts: int, width: int, tokens: int):
    generator = torch.Generator().manual_seed(experts)
    weight, h = (torch.randn(*shape, generator=generator) for shape in ((experts, width), (tokens, width)))
    return pack("f32", experts, width, weight), 0.1 * torch.randn(experts, generator=generator), h


def choose_one_by_one(team, gate, bias, h, count, groups, top_groups) -> np.ndarray:
    step, logits, found = RouterStep(gate.rows, count, groups, top_groups, False, 1.0), np.empty(gate.rows, "f4"), []
    for row in h:
        matvec(team, gate, row, logits)
        found.append(step.run(logits, bias)[0])
    return np.array(found)


@pytest.mark.parametrize("experts, width, count, groups, top_groups", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 67])
def test_many_tokens_choose_as_one_by_one(team, experts, width, count, groups, top_groups, tokens):
    gate, bias, h = make_router(experts, width, tokens)
    found = router_many(team, gate, bias.numpy(), h.numpy(), count, groups, top_groups)
    assert found.tolist() == choose_one_by_one(team, gate, bias.numpy(), h.numpy(), count, groups, top_groups).tolist()
    assert found.tolist() == router_many_torch(gate, bias, h, count, groups, top_groups).tolist()


def test_a_router_rounded_otherwise_is_noticed(team):
    gate, bias, h = make_router(64, 256, 67)
    rounded = pack("f32", 64, 256, gate.keep[0].bfloat16().float())
    found = router_many(team, rounded, bias.numpy(), h.numpy(), 8)
    assert found.tolist() != choose_one_by_one(team, gate, bias.numpy(), h.numpy(), 8, 1, 1).tolist()


def test_nothing_to_choose_for_is_an_answer(team):
    gate, bias, h = make_router(24, 36, 0)
    assert router_many(team, gate, bias.numpy(), h.numpy(), 5, 4, 2).shape == (0, 5)


def test_sizes_that_do_not_fit_are_refused(team):
    gate, bias, h = make_router(24, 36, 3)
    for wrong in (h.numpy()[:, :35], h.numpy()[0], h.numpy().T):
        with pytest.raises(EngineError, match=r"a router \[24, 36\]"):
            router_many(team, gate, bias.numpy(), wrong, 5)
    with pytest.raises(EngineError, match="13 of 24 experts, but 2 of 4 groups hold 12"):
        router_many(team, gate, bias.numpy(), h.numpy(), 13, 4, 2)
