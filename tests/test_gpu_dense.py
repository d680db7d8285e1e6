"""One token of the dense layers on a card, against plain twins: products, norm, router, Mamba and attention steps."""

import pytest
import torch
from test_kernels_dense import mamba_case, random, stored
from triton_interpreter import on_both

from nemolab.checkpoint.formats import E2M1_VALUES
from nemolab.errors import EngineError
from nemolab.kernels.attention_step import attention_step_torch
from nemolab.kernels.mamba_step import gated_rms_norm_torch, mamba_step_torch
from nemolab.kernels.matvec import ADD, FORMATS, PLAIN, RELU2, matvec_torch, pack
from nemolab.kernels.rms_norm import rms_norm_torch
from nemolab.kernels.router_step import router_step_torch

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
WIDTHS = [16, 48, 256, 2688, 4096, 5376]  # one group, odd, tiny, Nano, Super, Super's shared expert


def poisoned(*shape, device, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def moved(packed, device):
    """The same matrix with its tensors on a device."""
    weight, scales, bias = (None if t is None else t.to(device) for t in packed.keep)
    name = next(name for name, code in FORMATS.items() if code == packed.table[0])
    return pack(name, packed.rows, packed.columns, weight, scales, float(packed.scale), bias)


def product(packed, x, device, mode=PLAIN, y=None):
    from nemolab.kernels.gpu.matvec import matvec

    out = poisoned(packed.rows, device=device) if y is None else y.to(device)
    matvec(moved(packed, device), x.to(device), out, mode)
    return out.cpu()


@on_both
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (7, 48), (19, 256)])
def test_product_equals_its_twin(device, format, rows, columns):
    packed, x = stored(format, rows, columns), random(columns, seed=5)
    torch.testing.assert_close(product(packed, x, device), matvec_torch(packed, x), **CLOSE)


@on_both
@pytest.mark.parametrize("columns", WIDTHS)
def test_product_of_real_widths_equals_its_twin(device, columns):
    for format in ("nvfp4", "fp8"):
        packed, x = stored(format, 3, columns), random(columns, seed=5)
        torch.testing.assert_close(product(packed, x, device), matvec_torch(packed, x), **CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(18560, 4096), (4096, 8192), (10304, 2688), (2688, 3712), (1296, 256)])
def test_product_of_whole_matrices_equals_its_twin(format, rows, columns):
    packed, x = stored(format, rows, columns), random(columns, seed=5)
    torch.testing.assert_close(product(packed, x, "cuda"), matvec_torch(packed, x), **CLOSE)


@on_both
def test_modes_add_and_square(device):
    packed, x, y = stored("nvfp4", 24, 32), random(32), random(24)
    plain = product(packed, x, device)
    assert torch.equal(product(packed, x, device, ADD, y.clone()), plain + y)
    assert torch.equal(product(packed, x, device, RELU2), torch.relu(plain).square())


@on_both
def test_product_comparison_can_fail(device):
    packed, x = stored("nvfp4", 24, 32, bias=False), random(32)
    swapped = (packed.keep[0] >> 4) | (packed.keep[0] << 4)
    other = pack("nvfp4", 24, 32, swapped, packed.keep[1], float(packed.scale))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(product(other, x, device), matvec_torch(packed, x), **CLOSE)


@pytest.fixture
def tall_programs(monkeypatch):
    """Programs of 256 rows: their number decides how long the interpreter takes, and no bit of a row."""
    from nemolab.kernels.gpu import matvec

    monkeypatch.setattr(matvec, "_shape", lambda code, places, rows: (1, 256))


@on_both
def test_every_fp8_code_decodes_exactly(device, tall_programs):
    """All 256, one a row, times unit vectors for every byte of a word and the next word; NaN stays NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    for place in range(9):
        weight = torch.zeros(256, 16, dtype=torch.uint8)
        weight[:, place] = codes
        packed = pack("fp8", 256, 16, weight.view(torch.float8_e4m3fn))
        found = product(packed, torch.eye(16)[place], device)
        torch.testing.assert_close(found, codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@on_both
def test_every_code_and_every_scale_of_nvfp4_multiply_exactly(device, tall_programs):
    """All 256 scales x 16 codes, a scale a row, a code a group: 16 unit vectors, each at another place of its group."""
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    codes = torch.zeros(256, 256, dtype=torch.uint8)
    places = [16 * group + group for group in range(16)]
    codes[:, places] = torch.arange(16, dtype=torch.uint8)
    packed = pack("nvfp4", 256, 256, codes[:, 0::2] | codes[:, 1::2] << 4, scales)
    values = scales[:, :1].view(torch.float8_e4m3fn).float() * torch.tensor(E2M1_VALUES)
    for group in range(16):
        found = product(packed, torch.eye(256)[places[group]], device)
        torch.testing.assert_close(found, values[:, group], rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_hardware_conversions_and_bit_placing_give_the_same_bits(format, monkeypatch):
    from nemolab.kernels.gpu import codes, matvec

    packed, x = stored(format, 300, 2688), random(2688)
    found = []
    for card in (codes.PLAIN_TRITON, codes.SM_80, codes.card_of(torch.device("cuda"))):
        monkeypatch.setattr(matvec, "card_of", lambda _, card=card: card)
        found.append(product(packed, x, "cuda"))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_product_has_the_same_bits_every_time(format):
    packed, x = stored(format, 4096, 4096), random(4096)
    first = product(packed, x, "cuda")
    assert all(torch.equal(product(packed, x, "cuda"), first) for _ in range(5))


@on_both
@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_rows_of_a_program_do_not_change_a_bit(device, format, monkeypatch):
    """They are chosen for speed, by the number of rows; warps, which decide the order of sums, by the columns alone."""
    from nemolab.kernels.gpu import matvec

    packed, x = stored(format, 5, 640), random(640)
    warps = {matvec._shape(int(packed.table[0]), 40, rows)[0] for rows in (1, 500, 5000, 50000)}
    assert len(warps) == 1
    found = []
    for rows_each in (1, 2, 4, 8) if device == "cuda" else (2, 8):
        monkeypatch.setattr(matvec, "_shape", lambda *_, rows_each=rows_each: (*warps, rows_each))
        found.append(product(packed, x, device))
    assert all(torch.equal(other, found[0]) for other in found)


@on_both
def test_wrong_sizes_and_widths_are_refused(device):
    with pytest.raises(EngineError, match=r"\[8, 16\], x is torch.float32 \[15\] .* torch.float32 \[16\] .* is needed"):
        product(stored("bf16", 8, 16), random(15), device)
    with pytest.raises(EngineError, match="rows of 12 columns .* 8 columns, are needed"):
        product(pack("fp8", 2, 12, torch.zeros(2, 12, dtype=torch.uint8)), random(12), device)


@on_both
@pytest.mark.parametrize("shape", [(1,), (33,), (256,), (2688,), (3, 48), (2, 4096)])
def test_rms_norm_equals_its_twin(device, shape):
    from nemolab.kernels.gpu.rms_norm import rms_norm

    x, weight = random(*shape), 1 + random(shape[-1], seed=3) / 10
    wanted = rms_norm_torch(x, weight, 1e-5)
    for dtype, close in ((torch.float32, {"rtol": 2e-6, "atol": 2e-6}), (torch.bfloat16, {"rtol": 8e-3, "atol": 1e-6})):
        out = poisoned(*shape, device=device, dtype=dtype)
        rms_norm(x.to(device), weight.to(device), 1e-5, out)
        torch.testing.assert_close(out.float().cpu(), wanted, **close)


@on_both
@pytest.mark.parametrize("width", [24, 1024, 1100])
def test_gated_norm_in_groups_equals_its_twin(device, width):
    """Of three rows in two groups; a mean over both groups, or the other group's weights, would show."""
    from nemolab.kernels.gpu.rms_norm import launch_norm

    x, gate, weight = random(3, 2 * width), random(3, 2 * width, seed=1), random(2 * width, seed=2)
    x[:, width:] *= 5
    out = poisoned(3, 2 * width, device=device, dtype=torch.bfloat16)
    launch_norm(x.to(device), weight.to(device), 1e-5, out, gate.to(device), 2)
    wanted = gated_rms_norm_torch(x, gate, weight, 2, 1e-5)
    torch.testing.assert_close(out.float().cpu(), wanted, rtol=8e-3, atol=1e-6)


SUPER_ROUTER, NANO_ROUTER = (512, 22, 1, 1, True), (128, 6, 1, 1, True)
ROUTERS = [(8, 2, 1, 1, True), (64, 6, 1, 1, False), SUPER_ROUTER, NANO_ROUTER, (32, 4, 4, 2, True), (6, 3, 6, 3, True)]


def choose(device, settings, logits, bias):
    from nemolab.kernels.gpu.router_step import RouterStep

    experts = torch.full((settings[1],), -1, dtype=torch.int32, device=device)
    weights = poisoned(settings[1], device=device)
    step = RouterStep(*settings, 2.5, device)
    step.run(logits.to(device), bias.to(device), experts, weights)
    return experts.cpu(), weights.cpu()


@on_both
@pytest.mark.parametrize("settings", ROUTERS)
def test_router_equals_its_twin(device, settings):
    bias = random(settings[0], seed=1) / 50
    for seed in range(20 if device == "cuda" else 1):
        logits = random(settings[0], seed=seed)
        chosen, weights = choose(device, settings, logits, bias)
        wanted, wanted_weights = router_step_torch(logits, bias, *settings[1:], 2.5)
        assert chosen.tolist() == wanted.tolist()
        torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)


@on_both
@pytest.mark.parametrize("groups", [1, 3])
def test_router_gives_ties_to_the_lowest_id(device, groups):
    logits = torch.tensor([0.5, 2.0, 2.0, 0.5, 2.0, 0.5])
    chosen, _ = choose(device, (6, 4, groups, groups, True), logits, torch.zeros(6))
    assert chosen.tolist() == [1, 2, 4, 0]


@on_both
def test_router_gives_ties_between_groups_to_the_lowest(device):
    chosen, _ = choose(device, (8, 4, 4, 2, True), torch.ones(8), torch.zeros(8))
    assert chosen.tolist() == [0, 1, 2, 3]


@on_both
def test_router_keeps_ids_in_range_and_shows_a_nan(device):
    logits = torch.zeros(16)
    logits[9] = torch.nan
    chosen, weights = choose(device, (16, 4, 1, 1, True), logits, torch.zeros(16))
    assert chosen.tolist() == [9, 0, 1, 2] and weights.isnan().all()


MAMBA_SHAPES = [(3, 5, 7, 1, 2), (2, 4, 8, 1, 1), (8, 64, 64, 2, 4)]
SUPER_MAMBA, NANO_MAMBA = (128, 64, 128, 8, 4), (64, 64, 128, 8, 4)


def check_mamba(device, shape, limit, lost=None):
    """Against the twin; the time step of head number `lost` is NaN. Returns what the twin made of the outputs."""
    from nemolab.kernels.gpu.mamba_step import MambaStep

    weights, projected, conv_state, ssm = mamba_case(*shape)
    if lost is not None:
        projected[lost - shape[0]] = torch.nan
    on_device = {name: tensor.to(device) for name, tensor in weights.items()}
    step = MambaStep(**on_device, dt_limit=limit, groups=shape[3], eps=1e-5)
    conv_after, ssm_after = conv_state.to(device, copy=True), ssm.to(device, copy=True)
    y = poisoned(weights["norm"].shape[0], device=device)
    step.run(projected.to(device), conv_after, ssm_after, y)
    norm = weights.pop("norm")
    wanted = mamba_step_torch(
        projected, **weights, conv_state=conv_state, dt_limit=limit, ssm=ssm, norm=norm, groups=shape[3], eps=1e-5
    )
    torch.testing.assert_close(y.cpu(), wanted, rtol=5e-5, atol=5e-5, equal_nan=lost is not None)
    assert torch.equal(conv_after.cpu(), conv_state)
    torch.testing.assert_close(ssm_after.cpu(), ssm, rtol=1e-5, atol=1e-5, equal_nan=lost is not None)
    return wanted


@on_both
@pytest.mark.parametrize("shape", MAMBA_SHAPES)
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.02, 0.05)])
def test_mamba_step_equals_its_twin(device, shape, limit):
    check_mamba(device, shape, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SUPER_MAMBA, NANO_MAMBA])
def test_mamba_step_of_real_sizes_equals_its_twin(shape):
    check_mamba("cuda", shape, (0.0, float("inf")))


@on_both
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.02, 0.05)])
def test_a_time_step_that_is_not_a_number_shows_in_its_group(device, limit):
    """Instead of becoming the limit, as the cards' own minimum and maximum would have it."""
    wanted = check_mamba(device, (4, 4, 8, 2, 2), limit, lost=3)
    assert wanted.view(2, 8).isnan().all(1).tolist() == [False, True]


@on_both
def test_mamba_comparison_can_fail(device):
    """Another limit of the time step than the twin's must be seen."""
    import test_gpu_dense as module

    def ignoring_the_limit(*args, dt_limit, **named):
        return mamba_step_torch(*args, dt_limit=(0.0, 0.01), **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "mamba_step_torch", ignoring_the_limit)
        with pytest.raises(AssertionError):
            module.check_mamba(device, MAMBA_SHAPES[0], (0.0, float("inf")))


@on_both
def test_softplus_keeps_small_steps_exact(device):
    """log(1 + e^x) taken literally loses half the digits of a time step of 0.001."""
    from nemolab.kernels.gpu.mamba_step import MambaStep

    heads = 24
    dt = torch.linspace(-20, 25, heads)
    zeros = torch.zeros(heads)
    step = MambaStep(
        *(t.to(device) for t in (torch.ones(3 * heads, 1), torch.zeros(3 * heads), zeros, zeros, zeros)),
        (0.0, float("inf")), torch.ones(heads, device=device), heads, 1e-5,
    )  # fmt: skip
    projected = torch.cat([zeros, torch.full((3 * heads,), 20.0), dt]).to(device)
    ssm = torch.zeros(heads, 1, 1, device=device)
    step.run(projected, torch.empty(3 * heads, 0, device=device), ssm, poisoned(heads, device=device))
    wanted = torch.nn.functional.softplus(dt.double()).float() * 400
    torch.testing.assert_close(ssm.cpu().flatten(), wanted, rtol=2e-6, atol=0)


ATTENTION_CASES = [((6, 3, 5), 1), ((6, 3, 5), 130), ((4, 2, 64), 64), ((4, 2, 64), 65), ((32, 2, 128), 130)]


def attend(device, shape, tokens, capacity, dtype=torch.float32):
    """(found, wanted, keys after, wanted keys); rows from `tokens` on are poisoned."""
    from nemolab.kernels.gpu.attention_step import AttentionStep

    heads, kv_heads, head_dim = shape
    q = random(heads * head_dim)
    # Exact in BF16: the interpreter cuts off where cards round.
    k, v = (random(kv_heads * head_dim, seed=seed).bfloat16().float() for seed in (1, 2))
    keys, values = (random(capacity, kv_heads * head_dim, seed=s).to(dtype) for s in (3, 4))
    keys[tokens - 1 :], values[tokens - 1 :] = torch.nan, torch.nan
    on_device = [t.to(device, copy=True) for t in (q, k, v, keys, values)]
    mixed = poisoned(heads * head_dim, device=device)
    count = torch.tensor([tokens], dtype=torch.int32, device=device)
    AttentionStep(heads, kv_heads, head_dim, capacity, device).run(*on_device, count, mixed)
    keys[tokens - 1], values[tokens - 1] = k.to(dtype), v.to(dtype)
    wanted = attention_step_torch(q, keys[:tokens].float(), values[:tokens].float(), head_dim)
    return mixed.cpu(), wanted, on_device[3].cpu()[:tokens], keys[:tokens]


@on_both
@pytest.mark.parametrize(("shape", "tokens"), ATTENTION_CASES)
def test_attention_equals_its_twin(device, shape, tokens):
    for dtype in (torch.float32, torch.bfloat16):
        found, wanted, keys, wanted_keys = attend(device, shape, tokens, 300, dtype)
        torch.testing.assert_close(found, wanted, **CLOSE)
        assert torch.equal(keys, wanted_keys)


@on_both
def test_attention_has_the_same_bits_for_any_capacity(device):
    """Rows beyond the tokens only make the grid larger."""
    from nemolab.kernels.gpu.attention_step import AttentionStep

    q, k, v, rows = random(32), random(16, seed=1), random(16, seed=2), random(600, 16)
    found = []
    for capacity in (260, 600):
        keys, values = (rows[:capacity].to(device, copy=True) for _ in range(2))
        count = torch.tensor([260], dtype=torch.int32, device=device)
        mixed = poisoned(32, device=device)
        AttentionStep(4, 2, 8, capacity, device).run(
            q.to(device), k.to(device), v.to(device), keys, values, count, mixed
        )
        found.append(mixed.cpu())
    assert torch.equal(*found) and not found[0].isnan().any()
