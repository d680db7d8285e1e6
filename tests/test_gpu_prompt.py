"""Prompts on a card, against the plain twins: decoding to BF16, dense products, routed experts from a ring."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from test_kernels_dense import random, stored
from torch.utils._python_dispatch import TorchDispatchMode
from triton_interpreter import on_both

from nemolab.checkpoint.formats import encode_nvfp4
from nemolab.errors import EngineError
from nemolab.kernels.expert_prompt import expert_prompt_torch
from nemolab.kernels.matvec import ADD, FORMATS, PLAIN, RELU2, pack
from nemolab.store.layout import BlockLayout, ExpertViews


def poisoned(*shape, device, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def decode(device, weight, scales):
    from nemolab.kernels.gpu.decode_bf16 import decode_bf16

    columns = weight.shape[1] * (1 if scales is None else 2)
    out = poisoned(weight.shape[0], columns, device=device, dtype=torch.bfloat16)
    decode_bf16(weight.to(device), None if scales is None else scales.to(device), out)
    return out.cpu()


@on_both
def test_every_fp8_code_decodes_exactly(device):
    from nemolab.kernels.gpu.decode_bf16 import decode_bf16_torch

    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    wanted = decode_bf16_torch(codes, None)
    assert torch.equal(wanted.float().nan_to_num(7), codes.view(torch.float8_e4m3fn).float().nan_to_num(7))
    torch.testing.assert_close(decode(device, codes, None), wanted, rtol=0, atol=0, equal_nan=True)


@on_both
def test_every_byte_under_every_scale_decodes_exactly(device):
    from nemolab.kernels.gpu.decode_bf16 import decode_bf16_torch

    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32)
    wanted = decode_bf16_torch(packed, scales)
    torch.testing.assert_close(decode(device, packed, scales), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1024, 4096), (4096, 5376), (2688, 3712), (1296, 256)])
@pytest.mark.parametrize("packed", [True, False], ids=["nvfp4", "fp8"])
def test_whole_matrices_decode_exactly(rows, columns, packed):
    """Any bytes at all, in sizes of Super, Nano and the tiny model."""
    from nemolab.kernels.gpu.decode_bf16 import decode_bf16_torch

    generator = torch.Generator().manual_seed(rows)
    shape = (rows, columns // 2 if packed else columns)
    weight = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (rows, columns // 16), dtype=torch.uint8, generator=generator) if packed else None
    wanted = decode_bf16_torch(weight, scales)
    torch.testing.assert_close(decode("cuda", weight, scales), wanted, rtol=0, atol=0, equal_nan=True)


@on_both
def test_decoding_check_can_fail(device):
    from nemolab.kernels.gpu.decode_bf16 import decode_bf16_torch

    packed, scales = torch.arange(256, dtype=torch.uint8)[None], torch.full((1, 32), 0x38, dtype=torch.uint8)
    with pytest.raises(AssertionError):
        assert torch.equal(decode(device, packed, scales), decode_bf16_torch(packed >> 4 | packed << 4, scales))


@on_both
def test_wrong_sizes_are_refused(device):
    with pytest.raises(EngineError, match="contiguous bytes of one matrix"):
        decode(device, torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(EngineError, match="no whole 8 bytes"):
        decode(device, torch.zeros(3, 5, dtype=torch.uint8), None)


def linear(device, packed, x, y, mode, piece_bytes, rows=None):
    from nemolab.kernels.gpu.linear_prompt import linear_prompt

    weight, scales, bias = (None if t is None else t.to(device) for t in packed.keep)
    name = next(name for name, code in FORMATS.items() if code == packed.table[0])
    there = pack(name, packed.rows, packed.columns, weight, scales, float(packed.scale), bias)
    out = y.to(device, copy=True)
    linear_prompt(there, x.to(device), out, mode, rows, piece_bytes)
    return out.cpu()


@on_both
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", [PLAIN, ADD, RELU2])
def test_prompt_product_equals_its_twin(device, format, mode):
    """In one piece and in several; a pass that does not add ignores what the output held."""
    from nemolab.kernels.gpu.linear_prompt import linear_prompt_torch

    packed, x = stored(format, 40, 256), random(5, 256).bfloat16()
    y = random(5, 40) if mode == ADD else torch.full((5, 40), torch.nan)
    wanted = linear_prompt_torch(packed, x, y, mode)
    for piece_bytes in (2**20, 16 * 256 * 2):
        found = linear(device, packed, x, y, mode, piece_bytes)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


class LargestMade(TorchDispatchMode):
    """Bytes of the largest memory that any operator's result lies in, but for that of the tensors given."""

    def __init__(self, *known):
        super().__init__()
        self._known, self.nbytes = {t.untyped_storage().data_ptr() for t in known if t is not None}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            memory = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if memory is not None and memory.data_ptr() not in self._known:
                self.nbytes = max(self.nbytes, memory.nbytes())
        return made


@pytest.mark.parametrize("mode", [PLAIN, ADD, RELU2])
@pytest.mark.parametrize("format", ["f16", "f32"])
def test_a_matrix_that_is_multiplied_in_float32_is_never_decoded_whole(format, mode):
    from nemolab.kernels.gpu.linear_prompt import linear_prompt

    packed, x, y = stored(format, 400, 256), random(50, 256).bfloat16(), torch.zeros(50, 400)
    with LargestMade(x, y, *packed.keep) as largest:
        linear_prompt(packed, x, y, mode, None, 16 * 256 * 4)
    assert largest.nbytes == 50 * 256 * 4, "x in float32: more than a piece of the matrix, and of the products"


@on_both
@pytest.mark.parametrize("format", FORMATS)
def test_some_rows_of_a_matrix_have_the_products_that_all_have(device, format):
    packed, x = stored(format, 40, 256), random(5, 256).bfloat16()
    y = torch.full((5, 40), torch.nan)
    wanted, there = linear(device, packed, x, y, RELU2, 2**20), []
    for rows in ((0, 8), (8, 39), (39, 40)):
        there.append(linear(device, packed, x, y[:, slice(*rows)].contiguous(), RELU2, 2**20, rows))
    torch.testing.assert_close(torch.cat(there, 1), wanted, rtol=1e-5, atol=1e-5)
    for rows in ((0, 41), (3, 3)):
        with pytest.raises(EngineError, match="rows"):
            linear(device, packed, x, y, PLAIN, 2**20, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8", "nvfp4", "bf16"])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 2688), (1024, 4096), (2688, 3712), (256, 512)])
def test_prompt_product_of_whole_matrices_equals_its_twin(format, rows, columns):
    packed, x = stored(format, rows, columns), random(70, columns).bfloat16()
    wanted = x.double() @ decoded(packed).double().T + packed.keep[2]
    found = linear("cuda", packed, x, torch.full((70, rows), torch.nan), PLAIN, 2**22)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4)


def decoded(packed):
    from nemolab.kernels.decode_nvfp4 import decode_rows_torch

    weight, scales, _ = packed.keep
    if scales is not None:
        return decode_rows_torch(weight, scales, float(packed.scale))
    return weight.float() * torch.tensor(packed.scale)


def mixer(tokens, heads=4, head_dim=24, groups=2, state_size=40, taps=4):
    """A Mamba mixer's weights, what goes into it for so many tokens, and the states before."""
    inner = heads * head_dim
    conv_dim = inner + 2 * groups * state_size
    weights = [random(conv_dim, taps, seed=1), random(conv_dim, seed=2), -random(heads, seed=3).exp()]
    weights += [random(heads, seed=4), random(heads, seed=5), (1e-3, 20.0), random(inner, seed=6), groups, 1e-5]
    projected = random(tokens, inner + conv_dim + heads, seed=7)
    return weights, projected, random(conv_dim, taps - 1, seed=8), random(heads, head_dim, state_size, seed=9)


def through_mixer(device, weights, projected, conv_state, ssm):
    """(bfloat16 outputs, the state after) by the kernels, in two stretches."""
    from nemolab.kernels.gpu.mamba_prompt import MambaPrompt

    there = [t.to(device) if isinstance(t, torch.Tensor) else t for t in weights]
    prompt, inner = MambaPrompt(*there), weights[6].shape[0]
    gate, inputs, dt = projected.to(device).split([inner, weights[1].shape[0], weights[3].shape[0]], 1)
    inputs, state, outs = torch.cat([conv_state.T.to(device), inputs]), ssm.to(device, copy=True), []
    for begin, end in ((0, 3), (3, len(projected))):
        held = inputs[begin : end + conv_state.shape[1]]
        y = prompt.scan(prompt.convolve(held), dt[begin:end].contiguous(), state)
        outs.append(poisoned(end - begin, inner, device=device, dtype=torch.bfloat16))
        prompt.gate(y, gate[begin:end].contiguous(), outs[-1])
    return torch.cat(outs).cpu(), state.cpu()


SMALL_MIXER = {"heads": 2, "head_dim": 8, "state_size": 16, "taps": 2}
SUPER_HEAD = {"heads": 1, "head_dim": 64, "groups": 1, "state_size": 128}


@on_both
@pytest.mark.parametrize(("tokens", "sizes"), [(75, {}), (5, SMALL_MIXER), (70, SUPER_HEAD)])
def test_a_stretch_through_a_mamba_mixer_equals_its_twin(device, tokens, sizes):
    """Token by token is the twin: chunks, a last one that is not full, sizes that are no powers of two."""
    check_mixer(device, tokens, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [128, 64], ids=["super", "nano"])
def test_a_stretch_through_a_mixer_of_real_sizes_equals_its_twin(heads):
    check_mixer("cuda", 75, SUPER_HEAD | {"heads": heads, "groups": 8})


def check_mixer(device, tokens, sizes):
    from nemolab.kernels.gpu.mamba_prompt import mamba_prompt_torch

    weights, projected, conv_state, ssm = mixer(tokens, **sizes)
    found, state = through_mixer(device, weights, projected, conv_state, ssm)
    weight, bias, a, d, dt_bias, limit, norm, groups, eps = weights
    wanted = mamba_prompt_torch(projected, weight, bias, conv_state, a, d, dt_bias, limit, ssm, norm, groups, eps)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=1e-3)  # of rounding to BF16, or cutting off
    # Products of three TF32 are good to 2^-21 of what they add up, which may cancel: to about its largest value.
    torch.testing.assert_close(state, ssm, rtol=1e-4, atol=1e-5 * ssm.abs().max().item())


@on_both
def test_the_mixers_comparison_can_fail(device):
    from nemolab.kernels.gpu.mamba_prompt import mamba_prompt_torch

    weights, projected, conv_state, ssm = mixer(70)
    found, _ = through_mixer(device, weights, projected, conv_state, ssm)
    weight, bias, a, d, dt_bias, limit, norm, groups, eps = weights
    late = mamba_prompt_torch(projected, weight, bias, conv_state, a, d, dt_bias, limit, ssm + 1, norm, groups, eps)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.float(), late, rtol=2**-7, atol=1e-3)


@on_both
def test_a_time_step_that_is_not_a_number_shows_in_its_head_from_there_on(device):
    """Tokens before it in its chunk may show it too: zero times NaN is NaN."""
    weights, projected, conv_state, ssm = mixer(6, **SMALL_MIXER)
    clean, clean_state = through_mixer(device, weights, projected, conv_state, ssm)
    projected[4, -1] = torch.nan
    found, state = through_mixer(device, weights, projected, conv_state, ssm)
    assert found[4:, 8:].isnan().all() and state[1].isnan().all()
    assert torch.equal(found[:, :8], clean[:, :8]) and torch.equal(found[:3], clean[:3])
    assert torch.equal(state[0], clean_state[0])


@on_both
def test_mixers_refuse_what_does_not_fit(device):
    weights, projected, conv_state, ssm = mixer(5)
    with pytest.raises(EngineError, match=r"ssm is torch\.float32 \[4, 24, 39\]"):
        through_mixer(device, weights, projected, conv_state, ssm[..., 1:].contiguous())


def expert_blocks(count, inter, width, seed=0):
    """Blocks in layout `neuron` uint8 [count, block_bytes], and scales_2 float32 [count, 2]."""
    form, source = BlockLayout("neuron", inter, width), BlockLayout("source", inter, width)
    blocks, scales_2 = np.empty((count, form.block_bytes), np.uint8), torch.empty(count, 2)
    for place in range(count):
        up = encode_nvfp4(random(inter, width, seed=seed + place) * width**-0.5)
        down = encode_nvfp4(random(width, inter, seed=seed + place + 50) * inter**-0.5)
        planes = [t.view(torch.uint8).numpy() for t in (up[0], up[1], down[0], down[1])]
        form.pack(ExpertViews(*planes), blocks[place])
        scales_2[place] = torch.stack([up[2], down[2]])
    assert source.payload_bytes == form.payload_bytes
    return form, torch.from_numpy(blocks), scales_2


def prompt_of_experts(device, counts, inter, width, tokens, top_k, cut=None):
    """(found, wanted): `results` of experts with these numbers of pairs, computed in two stretches cut at this place.

    The experts are every other one of a model, before them are three pairs of another. Rows never written stay NaN.
    """
    from nemolab.kernels.gpu.expert_prompt import expert_prompt

    form, blocks, scales_2 = expert_blocks(len(counts), inter, width)
    pairs = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(1))[: sum(counts) + 3]
    assert pairs.numel() == sum(counts) + 3
    x = (random(tokens, width) / 2).bfloat16()
    wanted = poisoned(tokens * top_k, width, device="cpu")
    bounds = torch.tensor([3, *counts]).cumsum(0)
    expert_prompt_torch(
        list(blocks.numpy()), form.views, "neuron", scales_2, bounds.tolist(), pairs, top_k, x.float(), wanted
    )
    ids = 1 + 2 * torch.arange(len(counts))
    starts = torch.cat([torch.tensor([0, 3]), bounds[1:].repeat_interleave(2)])
    all_scales = torch.full((2 * len(counts) + 1, 2), torch.nan).index_copy_(0, ids, scales_2)
    there, found = blocks.to(device), poisoned(sum(counts), width, device=device)
    addresses = there.data_ptr() + form.block_bytes * torch.arange(len(counts))
    cut, end = 3 + (sum(counts) if cut is None else cut), 3 + sum(counts)
    for stretch in ((3, cut), (cut, end)):
        places = slice(stretch[0] - 3, stretch[1] - 3)
        count = stretch[1] - stretch[0]
        most = min(max(counts), count)
        expert_prompt(
            addresses.to(device), ids.int().to(device), inter, all_scales.to(device), starts.int().to(device),
            pairs.int().to(device), stretch, most, top_k, x.to(device),
            poisoned(count, inter, device=device, dtype=torch.bfloat16), found[places],
        )  # fmt: skip
    return found.cpu(), wanted[pairs[3:]]


def check_prompt(found, wanted):
    """Two roundings to BF16 (of h, cut off in the interpreter) between them: 2^-8 of the size of a row's values."""
    assert found.shape == wanted.shape and not wanted.isnan().any() and not found.isnan().any()
    error = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-6)
    assert error.max() < 0.008, f"a row is off by {error.max():.4f} of its size"


@on_both
def test_experts_on_a_prompt_equal_their_twin(device):
    """Experts without tokens, with one, with more than a tile holds; sizes that are no multiples of a tile."""
    check_prompt(*prompt_of_experts(device, [0, 1, 67, 5], 48, 80, tokens=30, top_k=3))


@on_both
def test_experts_have_the_same_bits_wherever_their_pairs_are_cut(device):
    found = [prompt_of_experts(device, [9, 0, 20], 32, 48, tokens=20, top_k=2, cut=cut)[0] for cut in (None, 9, 17)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@on_both
def test_experts_check_can_fail(device):
    """The neighbouring pair's row instead of one's own has to be noticed."""
    found, wanted = prompt_of_experts(device, [9], 32, 32, tokens=6, top_k=2)
    with pytest.raises(AssertionError):
        check_prompt(found.roll(1, 0), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("inter", "width"), [(2688, 1024), (1856, 2688), (256, 128)])
def test_experts_of_real_sizes_equal_their_twin(inter, width):
    found, wanted = prompt_of_experts("cuda", [88, 3, 130], inter, width, tokens=64, top_k=6)
    check_prompt(found, wanted)


@pytest.mark.gpu
def test_experts_have_the_same_bits_in_any_batch():
    """A pair's row does not depend on the experts and pairs it goes with."""
    few, _ = prompt_of_experts("cuda", [40], 256, 128, tokens=64, top_k=6)
    many, _ = prompt_of_experts("cuda", [40, 70, 90], 256, 128, tokens=64, top_k=6)
    assert torch.equal(few, many[:40])


def sums_of_experts(device, results, places, shares, out, cuts):
    """`out` after adding the results of all places, cut into stretches there."""
    from nemolab.kernels.gpu.add_experts import add_experts

    out = out.to(device, copy=True)
    for begin, end in pairwise((0, *cuts, len(results))):
        there = poisoned(end - begin + 2, results.shape[1], device=device)
        there[: end - begin] = results[begin:end].to(device)
        add_experts(there, (begin, end), places.int().to(device), shares.to(device), out)
    return out.cpu()


def places_of_experts(tokens=9, top_k=3, width=80):
    generator = torch.Generator().manual_seed(2)
    places = torch.randperm(tokens * top_k, generator=generator).view(tokens, top_k).sort(1)[0]
    results, out = random(tokens * top_k, width, seed=3), random(tokens, width, seed=4)
    return results, places, torch.rand(tokens * top_k, generator=generator), out


@on_both
def test_experts_are_added_up_as_by_their_twin(device):
    check_sums(device)


@pytest.mark.gpu
@pytest.mark.parametrize(("top_k", "width"), [(22, 1024), (6, 2688), (4, 128)], ids=["super", "nano", "tiny"])
def test_experts_of_real_sizes_are_added_up_as_by_their_twin(top_k, width):
    check_sums("cuda", tokens=40, top_k=top_k, width=width)


def check_sums(device, **sizes):
    from nemolab.kernels.gpu.add_experts import add_experts_torch

    results, places, shares, out = places_of_experts(**sizes)
    wanted = out.clone()
    add_experts_torch(results, (0, len(results)), places, shares, wanted)
    exact = out.double() + (results.double() * shares[:, None])[places].sum(1)
    torch.testing.assert_close(wanted.double(), exact, rtol=1e-5, atol=1e-5)
    # A product that is rounded before it is added, or not: half a last place of the largest sum on the way, each time.
    most = (results.abs() * shares[:, None])[places].sum(1).max() + out.abs().max()
    found = sums_of_experts(device, results, places, shares, out, ())
    torch.testing.assert_close(found, wanted, rtol=0, atol=float(most) * 2.0**-24 * places.shape[1])


@on_both
def test_sums_of_experts_have_the_same_bits_wherever_pairs_are_cut(device):
    case = places_of_experts()
    whole = sums_of_experts(device, *case, ())
    for cuts in ((13,), (1, 2, 20)):
        assert torch.equal(sums_of_experts(device, *case, cuts), whole)


@on_both
def test_another_order_of_experts_shows_in_the_bits(device):
    results, places, shares, out = places_of_experts()
    there = sums_of_experts(device, results, places, shares, out, ())
    assert not torch.equal(
        sums_of_experts(device, results.flip(0), (26 - places).flip(1), shares.flip(0), out, ()), there
    )


@on_both
def test_stretches_that_do_not_fit_are_refused(device):
    results, places, shares, out = places_of_experts()
    with pytest.raises(EngineError, match="places 0 to 30 of 27"):
        sums_of_experts(device, random(30, 80), places, shares, out, ())
    with pytest.raises(EngineError, match=r"shares is torch\.float32 \[26\]"):
        sums_of_experts(device, results, places, shares[1:], out, ())
