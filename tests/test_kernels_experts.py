"""Expert kernels against their plain twins: both block layouts, the three models' shapes, any number of threads."""

import numpy as np
import pytest
import torch

from nemolab.checkpoint.formats import encode_nvfp4
from nemolab.errors import EngineError
from nemolab.kernels import team as team_module
from nemolab.kernels.expert_prompt import TOKENS, expert_prompt, expert_prompt_torch
from nemolab.kernels.expert_step import ExpertStep, expert_step_torch
from nemolab.kernels.simd import array_address
from nemolab.kernels.team import Team
from nemolab.store.layout import BlockLayout, ExpertViews

# (I, X) of one expert: Nemotron-3-Super, Nano, data/tiny, and shapes whose groups do not pair up.
SHAPES = {"super": (2688, 1024), "nano": (1856, 2688), "tiny": (256, 128), "odd": (48, 80), "least": (16, 16)}


@pytest.fixture(scope="module")
def solo():
    with Team(1) as team:
        yield team


@pytest.fixture(params=[2, 3, 7])
def crew(request, monkeypatch):
    monkeypatch.setattr(team_module, "SMALL_BYTES", 0)
    with Team(request.param) as team:
        yield team


class Experts:
    """A few random experts in one layout. Scales spread over 2^-9 .. 448, zeros and -0 among the codes."""

    def __init__(self, shape, layout, count, seed=0):
        self.inter, self.width = SHAPES[shape]
        self.layout, self.form = layout, BlockLayout(layout, self.inter, self.width)
        random = np.random.default_rng(seed)
        codes = [random.integers(0, 256, plane, np.uint8) for plane in [(self.inter, self.width // 2)] * count]
        self.blocks, self.scales_2 = [], random.uniform(0.5, 2, (count, 2)).astype(np.float32) * 1e-3
        for up in codes:
            source = ExpertViews(
                up,
                random.integers(1, 0x7F, (self.inter, self.width // 16), np.uint8),
                random.integers(0, 256, (self.width, self.inter // 2), np.uint8),
                random.integers(1, 0x7F, (self.width, self.inter // 16), np.uint8),
            )
            block = np.full(self.form.block_bytes, 0xA5, np.uint8)
            self.form.pack(source, block)
            self.blocks.append(block)
        self.weights = random.uniform(0.1, 1, count).astype(np.float32)
        self.x = torch.from_numpy(random.standard_normal(self.width).astype(np.float32))
        self.addresses = np.array([array_address(block) for block in self.blocks])

    def step(self, team, order=None):
        order = np.arange(len(self.blocks)) if order is None else np.array(order)
        step = ExpertStep(self.inter, self.width, len(order), self.layout)
        step.h[:], step.active[:] = np.nan, 0xFFFF
        out = np.full(self.width, np.nan, np.float32)
        step.run(
            team, self.addresses[order], self.form.block_bytes, self.scales_2[order], self.weights[order],
            self.x.numpy(), out,
        )  # fmt: skip
        return torch.from_numpy(out), step

    def step_torch(self):
        return expert_step_torch(
            self.blocks, self.form.views, self.layout, torch.from_numpy(self.scales_2), torch.from_numpy(self.weights),
            self.x,
        )  # fmt: skip


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=float(3e-6 * wanted.abs().max()))


@pytest.mark.parametrize("layout", ["neuron", "source"])
@pytest.mark.parametrize(("shape", "count"), [("super", 2), ("nano", 1), ("tiny", 6), ("odd", 5), ("least", 3)])
def test_step_equals_its_twin(solo, shape, count, layout):
    experts = Experts(shape, layout, count)
    found, step = experts.step(solo)
    close(found, experts.step_torch())
    bits = np.unpackbits(step.active.view(np.uint8), bitorder="little").reshape(step.h.shape)
    assert np.array_equal(bits == 1, step.h != 0), "the active bits say which neurons are not zero"


def test_step_comparison_can_fail(solo):
    experts = Experts("tiny", "neuron", 2)
    wanted = experts.step_torch()
    experts.blocks[1][:] = (experts.blocks[1] >> 4) | (experts.blocks[1] << 4)
    with pytest.raises(AssertionError):
        close(experts.step(solo)[0], wanted)


@pytest.mark.parametrize(("shape", "count"), [("super", 2), ("nano", 1), ("tiny", 6), ("odd", 5), ("least", 3)])
def test_step_gives_the_same_bits_from_both_layouts(solo, shape, count):
    first, second = (Experts(shape, layout, count) for layout in ("neuron", "source"))
    assert torch.equal(first.step(solo)[0], second.step(solo)[0])


@pytest.mark.parametrize("layout", ["neuron", "source"])
@pytest.mark.parametrize("shape", ["tiny", "odd", "least"])
def test_step_gives_the_same_bits_for_any_number_of_threads(solo, crew, shape, layout):
    experts = Experts(shape, layout, 4)
    assert torch.equal(experts.step(solo)[0], experts.step(crew)[0])


def test_step_adds_experts_in_rank_order(solo):
    """Another order is another rounding: it must show, or the order would not be fixed."""
    experts = Experts("tiny", "neuron", 6)
    assert torch.equal(experts.step(solo)[0], experts.step(solo)[0])
    assert not torch.equal(experts.step(solo)[0], experts.step(solo, order=[5, 4, 3, 2, 1, 0])[0])


@pytest.mark.parametrize("layout", ["neuron", "source"])
def test_step_gives_exact_zeros_for_silent_neurons(solo, layout):
    experts = Experts("odd", layout, 1)
    experts.form.views(experts.blocks[0]).up_values[:] = 0x99  # -0.5 everywhere
    experts.x = experts.x.abs()
    found, step = experts.step(solo)
    assert torch.equal(found, torch.zeros(experts.width)) and not step.active.any()
    experts.form.views(experts.blocks[0]).up_values[17] = 0x11  # neuron 17 alone wakes up
    found, step = experts.step(solo)
    assert found.any() and step.active.tolist() == [[0, 2, 0]]


def test_step_passes_nan_on(solo):
    experts = Experts("odd", "neuron", 2)
    experts.x[3] = torch.nan
    assert experts.step(solo)[0].isnan().all()


def test_step_scale_codes_reach_down_exactly(solo):
    """All 254 scale bytes x 16 codes of down: one active neuron of height one, so an output is code * scale."""
    inter, width = 16, 16 * 254
    form = BlockLayout("neuron", inter, width)
    block = np.zeros(form.block_bytes, np.uint8)
    views = form.views(block)
    views.up_scales[:] = 0x38  # 1.0
    views.up_values[3, 0] = 0x02  # neuron 3 reads x[0] * 1.0
    codes = np.tile(np.arange(16, dtype=np.uint8), 254)
    views.down_values[3] = codes[0::2] | codes[1::2] << 4
    scales = np.repeat(np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8), 16)
    views.down_scales[0] = scales
    x, out = np.zeros(width, np.float32), np.full(width, np.nan, np.float32)
    x[0] = 1.0
    step = ExpertStep(inter, width, 1, "neuron")
    ones = np.ones((1, 2), np.float32)
    step.run(solo, np.array([array_address(block)]), form.block_bytes, ones, ones[0, :1], x, out)
    from nemolab.checkpoint.formats import decode_e2m1, decode_e4m3

    wanted = decode_e2m1(torch.from_numpy(views.down_values[3])) * decode_e4m3(torch.from_numpy(scales))
    assert torch.equal(torch.from_numpy(out), wanted)


def test_step_of_an_encoded_matrix_equals_plain_arithmetic(solo):
    """From weights to result, past every table of ours: torch's own float64 on what the encoder wrote."""
    generator = torch.Generator().manual_seed(1)
    inter, width = 64, 32
    up, down = (torch.randn(n, k, generator=generator) * k**-0.5 for n, k in ((inter, width), (width, inter)))
    (uv, us, u2), (dv, ds, d2) = encode_nvfp4(up), encode_nvfp4(down)
    form = BlockLayout("neuron", inter, width)
    block = np.empty(form.block_bytes, np.uint8)
    form.pack(ExpertViews(uv.numpy(), us.view(torch.uint8).numpy(), dv.numpy(), ds.view(torch.uint8).numpy()), block)
    x, out = torch.randn(width, generator=generator), np.full(width, np.nan, np.float32)
    scales_2, weight = np.array([[float(u2), float(d2)]], np.float32), np.array([0.7], np.float32)
    step = ExpertStep(inter, width, 1, "neuron")
    step.run(solo, np.array([array_address(block)]), form.block_bytes, scales_2, weight, x.numpy(), out)
    from nemolab.checkpoint.formats import decode_nvfp4

    h = torch.relu(decode_nvfp4(uv, us, u2).double() @ x.double()).square()
    wanted = 0.7 * (decode_nvfp4(dv, ds, d2).double() @ h)
    torch.testing.assert_close(torch.from_numpy(out).double(), wanted, rtol=1e-5, atol=1e-6)


def test_step_refuses_blocks_that_are_too_small(solo):
    step = ExpertStep(32, 32, 1, "neuron")
    one = np.ones((1, 2), np.float32)
    x = np.ones(32, np.float32)
    with pytest.raises(EngineError, match=r"blocks of 100 bytes.*at most 1 in blocks of 1152 bytes"):
        step.run(solo, np.zeros(1, np.int64), 100, one, one[0, :1], x, x.copy())
    with pytest.raises(EngineError, match=r"multiples of 16"):
        ExpertStep(40, 32, 1, "neuron")


def prompt_case(experts, tokens, top_k, seed=3):
    """Random routing of `tokens` tokens over the experts: starts and pairs as the engine makes them, and inputs."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(len(experts.blocks), generator=generator)[:top_k] for _ in range(tokens)])
    flat = chosen.flatten()
    pairs = flat.argsort(stable=True)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), flat.bincount(minlength=len(experts.blocks)).cumsum(0)])
    return starts.numpy(), pairs.numpy(), torch.randn(tokens, experts.width, generator=generator)


def run_prompt(team, experts, starts, pairs, top_k, x, only=None, active=None):
    places = slice(None) if only is None else slice(only, only + 1)
    results = np.full((x.shape[0] * top_k, experts.width), np.nan, np.float32)
    expert_prompt(
        team, experts.addresses[places], experts.layout, experts.inter, experts.scales_2[places],
        starts if only is None else starts[only : only + 2], pairs, top_k, x.numpy(), results,
        active,
    )  # fmt: skip
    return torch.from_numpy(results)


@pytest.mark.parametrize("layout", ["neuron", "source"])
@pytest.mark.parametrize(
    ("shape", "count", "tokens", "top_k"),
    [("tiny", 8, 30, 3), ("odd", 3, 2 * TOKENS + 5, 2), ("least", 2, 1, 1), ("super", 1, 3, 1), ("nano", 1, 2, 1)],
)
def test_prompt_equals_its_twin(solo, shape, count, tokens, top_k, layout):
    experts = Experts(shape, layout, count)
    starts, pairs, x = prompt_case(experts, tokens, top_k)
    wanted = torch.full((tokens * top_k, experts.width), torch.nan)
    expert_prompt_torch(
        experts.blocks, experts.form.views, layout, torch.from_numpy(experts.scales_2), starts.tolist(),
        torch.from_numpy(pairs), top_k, x, wanted,
    )  # fmt: skip
    close(run_prompt(solo, experts, starts, pairs, top_k, x), wanted)


@pytest.mark.parametrize("layout", ["neuron", "source"])
def test_prompt_tells_which_neurons_were_active_as_its_twin_does(solo, crew, layout):
    experts, tokens, top_k = Experts("odd", layout, 3), 2 * TOKENS + 5, 2
    starts, pairs, x = prompt_case(experts, tokens, top_k)
    shape = (tokens * top_k, experts.inter // 16)
    wanted, found = torch.zeros(shape, dtype=torch.int32), np.zeros(shape, np.uint16)
    expert_prompt_torch(
        experts.blocks, experts.form.views, layout, torch.from_numpy(experts.scales_2), starts.tolist(),
        torch.from_numpy(pairs), top_k, x, torch.empty(tokens * top_k, experts.width), wanted,
    )  # fmt: skip
    told = run_prompt(crew, experts, starts, pairs, top_k, x, active=found)
    assert np.array_equal(found, wanted.numpy()) and len(np.unique(found)) > 50
    assert torch.equal(told, run_prompt(solo, experts, starts, pairs, top_k, x)), "asking changes no result"
    with pytest.raises(EngineError, match="active"):
        run_prompt(solo, experts, starts, pairs, top_k, x, active=found[1:])


def test_prompt_comparison_can_fail(solo):
    experts = Experts("tiny", "neuron", 4)
    starts, pairs, x = prompt_case(experts, 5, 2)
    right = run_prompt(solo, experts, starts, pairs, 2, x)
    experts.scales_2 = np.roll(experts.scales_2, 1, axis=0)
    with pytest.raises(AssertionError):
        close(run_prompt(solo, experts, starts, pairs, 2, x), right)


def test_prompt_gives_the_same_bits_from_both_layouts(solo):
    found = []
    for layout in ("neuron", "source"):
        experts = Experts("odd", layout, 3)
        found.append(run_prompt(solo, experts, *prompt_case(experts, 20, 2)[:2], 2, prompt_case(experts, 20, 2)[2]))
    assert torch.equal(*found)


def test_prompt_gives_the_same_bits_for_any_number_of_threads_and_any_batch(solo, crew):
    experts = Experts("tiny", "neuron", 5)
    starts, pairs, x = prompt_case(experts, 40, 2)
    whole = run_prompt(solo, experts, starts, pairs, 2, x)
    assert torch.equal(run_prompt(crew, experts, starts, pairs, 2, x), whole)
    for only in range(5):
        alone = run_prompt(solo, experts, starts, pairs, 2, x, only)
        mine = pairs[starts[only] : starts[only + 1]]
        assert torch.equal(alone[mine], whole[mine]), "an expert's results do not depend on its batch"
        assert alone.isnan().any(1).sum() == len(pairs) - len(mine), "nothing else is written"


def test_prompt_result_of_a_token_does_not_depend_on_its_neighbours(solo):
    experts = Experts("tiny", "neuron", 1)
    x = torch.randn(7, experts.width, generator=torch.Generator().manual_seed(1))
    together = run_prompt(solo, experts, np.array([0, 7]), np.arange(7), 1, x)
    for token in range(7):
        alone = run_prompt(solo, experts, np.array([0, 1]), np.zeros(1, np.int64), 1, x[token : token + 1].clone())
        assert torch.equal(alone[0], together[token])
