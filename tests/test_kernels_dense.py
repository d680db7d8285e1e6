"""Dense kernels against their plain twins: products, norms, the router, the Mamba and attention steps."""

import numpy as np
import pytest
import torch

from nemolab.checkpoint.formats import E2M1_VALUES, decode_nvfp4, encode_fp8, encode_nvfp4
from nemolab.errors import EngineError
from nemolab.kernels import team as team_module
from nemolab.kernels.attention_step import attention_step, attention_step_torch
from nemolab.kernels.decode_nvfp4 import decode_rows, decode_rows_torch
from nemolab.kernels.mamba_step import MambaStep, mamba_step_torch
from nemolab.kernels.matvec import ADD, FORMATS, PLAIN, RELU2, matvec, matvec_torch, pack
from nemolab.kernels.rms_norm import rms_norm, rms_norm_torch
from nemolab.kernels.router_step import RouterStep, router_step_torch
from nemolab.kernels.team import Team

E4M3_CODES = [code for code in range(256) if code & 0x7F != 0x7F]  # without the two NaN


@pytest.fixture(scope="module")
def solo():
    with Team(1) as team:
        yield team


@pytest.fixture(params=[2, 3, 5])
def crew(request, monkeypatch):
    """Several threads that share even the smallest work."""
    monkeypatch.setattr(team_module, "SMALL_BYTES", 0)
    with Team(request.param) as team:
        yield team


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def poisoned(*shape):
    return np.full(shape, np.nan, np.float32)


def stored(format, rows, columns, bias=True, seed=0):
    """A random matrix in a format, packed."""
    weight = random(rows, columns, seed=seed) * columns**-0.5
    b = random(rows, seed=seed + 1) if bias else None
    if format == "nvfp4":
        values, scales, scale_2 = encode_nvfp4(weight)
        return pack(format, rows, columns, values, scales.view(torch.uint8), float(scale_2), b)
    if format == "fp8":
        values, scale = encode_fp8(weight)
        return pack(format, rows, columns, values, None, float(scale), b)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[format]
    return pack(format, rows, columns, weight.to(dtype), bias=b)


def product(team, packed, x, mode=PLAIN, y=None):
    out = poisoned(packed.rows) if y is None else y.copy()
    matvec(team, packed, x.numpy(), out, mode)
    return torch.from_numpy(out)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (7, 48), (40, 96), (3, 1344), (129, 272)])
def test_product_equals_its_twin(solo, format, rows, columns):
    packed, x = stored(format, rows, columns), random(columns, seed=5)
    torch.testing.assert_close(product(solo, packed, x), matvec_torch(packed, x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("format", ["bf16", "f16", "f32", "fp8"])
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 31, 33, 45])
def test_product_of_odd_widths_equals_its_twin(solo, format, columns):
    packed, x = stored(format, 5, columns), random(columns, seed=5)
    torch.testing.assert_close(product(solo, packed, x), matvec_torch(packed, x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_product_has_the_same_bits_for_any_number_of_threads(solo, crew, format):
    packed, x = stored(format, 37, 64), random(64)
    assert torch.equal(product(crew, packed, x), product(solo, packed, x))


def test_modes_add_and_square(solo):
    packed, x, y = stored("bf16", 24, 32), random(32), random(24)
    plain = product(solo, packed, x)
    assert torch.equal(product(solo, packed, x, ADD, y.numpy()), plain + y)
    assert torch.equal(product(solo, packed, x, RELU2), torch.relu(plain).square())
    torch.testing.assert_close(product(solo, packed, x, ADD, y.numpy()), matvec_torch(packed, x, y, ADD))


def test_product_comparison_can_fail(solo):
    packed, x = stored("nvfp4", 24, 32, bias=False), random(32)
    swapped = (packed.keep[0] >> 4) | (packed.keep[0] << 4)
    other = pack("nvfp4", 24, 32, swapped, packed.keep[1], float(packed.scale))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(product(solo, other, x), matvec_torch(packed, x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("place", [0, 5, 31, 32, 40, 42])
def test_every_fp8_code_decodes_exactly(solo, place):
    """One code a row, times a unit vector: places 0 to 39 go through lanes, the rest through the scalar end."""
    codes = torch.tensor(E4M3_CODES, dtype=torch.uint8)
    weight = torch.zeros(len(codes), 43, dtype=torch.uint8)
    weight[:, place] = codes
    x = torch.zeros(43)
    x[place] = 1.0
    packed = pack("fp8", len(codes), 43, weight.view(torch.float8_e4m3fn), None, 1.0)
    assert torch.equal(product(solo, packed, x), codes.view(torch.float8_e4m3fn).float())


def test_every_byte_and_every_scale_of_nvfp4_decode_exactly(solo):
    packed = torch.arange(256, dtype=torch.uint8).repeat(len(E4M3_CODES), 1)
    scales = torch.tensor(E4M3_CODES, dtype=torch.uint8)[:, None].repeat(1, 32)
    for scale_2 in (1.0, 3.1e-4, 1e-6):
        decoded = decode_rows(solo, packed, scales, scale_2)
        assert torch.equal(decoded, decode_rows_torch(packed, scales, scale_2))
        assert torch.equal(decoded, decode_nvfp4(packed, scales, scale_2))


@pytest.mark.parametrize("place", [0, 1, 17, 31, 33, 47])
def test_every_code_and_scale_of_nvfp4_multiply_exactly(solo, place):
    """All 16 codes x 254 scales, one a row, times a unit vector: both groups of a pair and the odd last one."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(E4M3_CODES))
    values = torch.zeros(len(codes), 24, dtype=torch.uint8)
    values[:, place // 2] = codes << 4 * (place % 2)
    scales = torch.tensor(E4M3_CODES, dtype=torch.uint8).repeat_interleave(16)[:, None].repeat(1, 3)
    x = torch.zeros(48)
    x[place] = 1.0
    packed = pack("nvfp4", len(codes), 48, values, scales, 1.0)
    wanted = torch.tensor(E2M1_VALUES)[codes.long()] * scales[:, 0].view(torch.float8_e4m3fn).float()
    assert torch.equal(product(solo, packed, x), wanted)


def test_all_bf16_and_f16_patterns_multiply_exactly(solo):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        values = bits.view(dtype)
        values = values[torch.isfinite(values.float())]
        weight = torch.zeros(len(values), 9, dtype=dtype)
        for place in (0, 8):
            weight.zero_()
            weight[:, place] = values
            x = torch.zeros(9)
            x[place] = 1.0
            name = "bf16" if dtype == torch.bfloat16 else "f16"
            assert torch.equal(product(solo, pack(name, len(values), 9, weight), x), values.float())


def test_wrong_sizes_are_refused(solo):
    packed = stored("bf16", 8, 16)
    with pytest.raises(EngineError, match=r"\[8, 16\].*\(15,\)"):
        matvec(solo, packed, np.ones(15, np.float32), poisoned(8))
    with pytest.raises(EngineError, match="needs 256 contiguous bytes"):
        pack("bf16", 8, 16, torch.zeros(8, 15, dtype=torch.bfloat16))
    with pytest.raises(EngineError, match="groups of 16"):
        pack("nvfp4", 8, 24, torch.zeros(8, 12, dtype=torch.uint8), torch.zeros(8, 1, dtype=torch.uint8))


@pytest.mark.parametrize("width", [1, 8, 33, 256])
def test_rms_norm_equals_its_twin(width):
    x, weight, out = random(width), 1 + random(width, seed=3) / 10, poisoned(width)
    rms_norm(x.numpy(), weight.numpy(), np.float32(1e-5), out)
    torch.testing.assert_close(torch.from_numpy(out), rms_norm_torch(x, weight, 1e-5), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "top_groups", "normalise"),
    [(8, 2, 1, 1, True), (64, 6, 1, 1, False), (512, 22, 1, 1, True), (32, 4, 4, 2, True), (6, 3, 6, 3, True)],
)
def test_router_equals_its_twin(experts, top_k, groups, top_groups, normalise):
    step = RouterStep(experts, top_k, groups, top_groups, normalise, 2.5)
    bias = random(experts, seed=1) / 50
    for seed in range(20):
        logits = random(experts, seed=seed)
        chosen, weights = step.run(logits.numpy(), bias.numpy())
        wanted, wanted_weights = router_step_torch(logits, bias, top_k, groups, top_groups, normalise, 2.5)
        assert chosen.tolist() == wanted.tolist()
        torch.testing.assert_close(torch.from_numpy(weights), wanted_weights, rtol=1e-6, atol=1e-7)


def test_router_gives_ties_to_the_lowest_id():
    logits = torch.tensor([0.5, 2.0, 2.0, 0.5, 2.0, 0.5])
    for groups in (1, 3):
        chosen, _ = RouterStep(6, 4, groups, groups, True, 1.0).run(logits.numpy(), np.zeros(6, np.float32))
        assert chosen.tolist() == [1, 2, 4, 0]
        assert router_step_torch(logits, torch.zeros(6), 4, groups, groups, True, 1.0)[0].tolist() == [1, 2, 4, 0]


def test_router_bias_chooses_but_does_not_weigh():
    logits, bias = np.array([0.0, 3.0], np.float32), np.array([5.0, 0.0], np.float32)
    chosen, weights = RouterStep(2, 1, 1, 1, False, 1.0).run(logits, bias)
    assert chosen.tolist() == [0] and weights.tolist() == [0.5]


def test_router_keeps_a_large_bias_apart_in_float32():
    """A bias of 6.8 with steps of 0.0005 would collapse to a handful of values in BF16."""
    bias = (6.8 + torch.arange(512) * 0.0005).float()
    step = RouterStep(512, 22, 1, 1, True, 1.0)
    for seed in range(50):
        logits = random(512, seed=seed) / 4
        key = torch.sigmoid(logits.double()) + bias.double()
        chosen, _ = step.run(logits.numpy(), bias.numpy())
        boundary = key.sort(descending=True).values
        if boundary[21] - boundary[22] > 1e-6:
            assert set(chosen.tolist()) == set(key.topk(22).indices.tolist())


def test_router_refuses_more_experts_than_its_groups_hold():
    with pytest.raises(EngineError, match="top-5 of 8 experts, but 1 of 2 groups hold only 4"):
        RouterStep(8, 5, 2, 1, True, 1.0)


MAMBA_SHAPES = [(4, 16, 16, 2, 4), (8, 8, 12, 8, 4), (3, 5, 7, 1, 2), (2, 4, 8, 1, 1), (8, 64, 64, 2, 4)]


def mamba_case(heads, head_dim, state_size, groups, taps, seed=0):
    inner = heads * head_dim
    conv_dim = inner + 2 * groups * state_size
    weights = {
        "conv_weight": random(conv_dim, taps, seed=seed),
        "conv_bias": random(conv_dim, seed=seed + 1) / 4,
        "a": -random(heads, seed=seed + 2).exp(),
        "d": random(heads, seed=seed + 3),
        "dt_bias": random(heads, seed=seed + 4) - 3,
        "norm": 1 + random(inner, seed=seed + 5) / 10,
    }
    projected = random(inner + conv_dim + heads, seed=seed + 6)
    conv_state, ssm = random(conv_dim, taps - 1, seed=seed + 7), random(heads, head_dim, state_size, seed=seed + 8)
    return weights, projected, conv_state, ssm


def run_mamba(team, weights, projected, conv_state, ssm, groups, limit):
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    norm = arrays.pop("norm")
    step = MambaStep(**arrays, dt_limit=limit, norm=norm, groups=groups, eps=1e-5)
    conv_state, ssm, y = conv_state.clone(), ssm.clone(), poisoned(norm.shape[0])
    step.run(team, projected.numpy(), conv_state.numpy(), ssm.numpy(), y)
    return torch.from_numpy(y), conv_state, ssm


@pytest.mark.parametrize("shape", MAMBA_SHAPES)
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.02, 0.05)])
def test_mamba_step_equals_its_twin(solo, shape, limit):
    groups = shape[3]
    weights, projected, conv_state, ssm = mamba_case(*shape)
    y, conv_after, ssm_after = run_mamba(solo, weights, projected, conv_state, ssm, groups, limit)
    named = {name: weights[name] for name in ("conv_weight", "conv_bias")}
    wanted = mamba_step_torch(
        projected, **named, conv_state=conv_state, a=weights["a"], d=weights["d"], dt_bias=weights["dt_bias"],
        dt_limit=limit, ssm=ssm, norm=weights["norm"], groups=groups, eps=1e-5,
    )  # fmt: skip
    torch.testing.assert_close(y, wanted, rtol=2e-5, atol=2e-5)
    assert torch.equal(conv_after, conv_state)
    torch.testing.assert_close(ssm_after, ssm, rtol=1e-5, atol=1e-5)


def test_mamba_step_has_the_same_bits_for_any_number_of_threads(solo, crew):
    case = mamba_case(8, 8, 16, 4, 4)
    alone = run_mamba(solo, *case, 4, (0.0, float("inf")))
    together = run_mamba(crew, *case, 4, (0.0, float("inf")))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_gated_norm_works_group_by_group(solo):
    """The norm over the whole width instead would look plausible; the comparison must see it."""
    weights, projected, conv_state, ssm = mamba_case(8, 8, 16, 4, 4)
    by_group, _, _ = run_mamba(solo, weights, projected, conv_state, ssm, 4, (0.0, float("inf")))
    inner, gated = 64, by_group / weights["norm"]
    assert torch.allclose(gated.view(4, -1).square().mean(-1), torch.ones(4), atol=1e-3)
    whole = gated * torch.linspace(0.8, 1.2, 4).repeat_interleave(inner // 4)
    assert not torch.allclose(whole.view(4, -1).square().mean(-1), torch.ones(4), atol=1e-3)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (4, 4, 8), (6, 1, 12), (32, 2, 128)])
@pytest.mark.parametrize("tokens", [1, 5, 67])
def test_attention_step_equals_its_twin(solo, heads, kv_heads, head_dim, tokens):
    q = random(heads * head_dim)
    keys, values = random(tokens + 3, kv_heads * head_dim, seed=1), random(tokens + 3, kv_heads * head_dim, seed=2)
    keys[tokens:], values[tokens:] = torch.nan, torch.nan  # capacity that is not in use
    mixed = poisoned(heads * head_dim)
    scores = poisoned(heads, tokens)
    attention_step(solo, q.numpy(), keys.numpy(), values.numpy(), tokens, head_dim, scores, mixed)
    wanted = attention_step_torch(q, keys[:tokens], values[:tokens], head_dim)
    torch.testing.assert_close(torch.from_numpy(mixed), wanted, rtol=1e-5, atol=1e-5)


def test_attention_step_has_the_same_bits_for_any_number_of_threads(solo, crew):
    q, keys, values = random(64), random(9, 32, seed=1), random(9, 32, seed=2)
    found = []
    for team in (solo, crew):
        mixed = poisoned(64)
        attention_step(team, q.numpy(), keys.numpy(), values.numpy(), 9, 16, poisoned(4, 9), mixed)
        found.append(mixed)
    assert np.array_equal(*found)


def test_a_helper_s_failure_reaches_the_caller_and_the_team_goes_on():
    def kernel(part, parts, seen):
        seen.append((part, parts))
        if part == 1 and len(seen) < 3:
            raise ValueError("part 1 fails")

    with Team(2) as team:
        seen = []
        with pytest.raises(ValueError, match="part 1 fails"):
            team.run(kernel, 2**30, seen)
        team.run(kernel, 2**30, seen)
        assert sorted(seen) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    team.close()
    team.run(kernel, 2**30, seen)
    assert seen[-1] == (0, 1)
