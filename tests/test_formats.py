"""The meaning of every stored byte: all E2M1 codes under all E4M3 scales, nibble order, encoders, byte counts."""

import math

import numpy as np
import pytest
import torch

from nemolab.checkpoint import formats
from nemolab.errors import CheckpointError

CODES = torch.arange(16, dtype=torch.uint8)
SCALE_BYTES = torch.arange(256, dtype=torch.uint8)


def e4m3_by_hand(byte):
    """float64 of an E4M3 byte, from its definition: 1 sign, 4 exponent (bias 7), 3 mantissa; 0x7F and 0xFF are NaN."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1_by_hand(code):
    """float64 of an E2M1 code: 1 sign, 2 exponent (bias 1), 1 mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def every_code_and_scale():
    """One row for each scale byte, its 16 columns the 16 codes in order: packed [256, 8], scales [256, 1]."""
    packed = formats.pack_e2m1(CODES.expand(256, 16).contiguous())
    return packed, SCALE_BYTES.reshape(256, 1)


def table64(scale_2):
    """float64 [256, 16]: what every_code_and_scale decodes to, from the definitions."""
    values = np.array([e2m1_by_hand(code) for code in range(16)])
    scales = np.array([e4m3_by_hand(byte) for byte in range(256)])
    return scales[:, None] * float(np.float32(scale_2)) * values


@pytest.mark.parametrize("scale_2", [1.0, 1e-6, 3.7e-4, 0.0, 2.0**-40])
def test_nvfp4_decodes_every_code_under_every_scale_like_a_float64_table(scale_2):
    decoded = formats.decode_nvfp4(*every_code_and_scale(), scale_2).double().numpy()
    expected = table64(scale_2)
    finite = np.isfinite(expected)
    # Two float32 roundings: scale times scale_2, then times the code.
    assert np.all(np.abs(decoded - expected)[finite] <= 2.0**-23 * np.abs(expected)[finite])
    assert np.array_equal(np.isnan(decoded), ~finite)


def test_the_float64_table_can_fail():
    decoded = formats.decode_nvfp4(*every_code_and_scale(), 1.0).double().numpy()
    moved = np.roll(decoded, 1, axis=1)
    assert np.nanmax(np.abs(moved - table64(1.0))) > 1


def test_nan_scale_bytes_decode_to_nan_in_the_whole_group_and_nowhere_else():
    decoded = formats.decode_nvfp4(*every_code_and_scale(), 1.0)
    assert sorted(set(torch.nonzero(decoded.isnan())[:, 0].tolist())) == [0x7F, 0xFF]
    assert decoded[[0x7F, 0xFF]].isnan().all()


def test_nan_scales_are_found_with_their_places():
    scales = np.zeros((3, 4), np.uint8)
    scales[1, 2], scales[2, 0] = 0x7F, 0xFF
    assert formats.nan_scales(scales).tolist() == [[1, 2], [2, 0]]
    assert formats.nan_scales(np.full((2, 2), 0x7E, np.uint8)).size == 0


def test_scale_products_are_formed_in_float32():
    # The smallest subnormal scale times 1e-30 is 1.95e-33: fine in float32, zero in float16.
    packed, scales = formats.pack_e2m1(CODES.reshape(1, 16)), torch.tensor([[0x01]], dtype=torch.uint8)
    decoded = formats.decode_nvfp4(packed, scales, 1e-30)
    assert decoded[0, 7].item() == pytest.approx(6 * 2.0**-9 * 1e-30, rel=1e-6)


def test_minus_zero_is_zero_and_keeps_its_byte():
    packed = torch.full((1, 8), 0x88, dtype=torch.uint8)
    decoded = formats.decode_nvfp4(packed, torch.tensor([[0x38]], dtype=torch.uint8), 1.0)
    assert torch.equal(decoded, torch.zeros(1, 16)) and torch.signbit(decoded).all()
    assert torch.equal(formats.pack_e2m1(formats.encode_e2m1(decoded)), packed)


def test_low_nibble_is_the_even_column():
    assert formats.decode_e2m1(torch.tensor([[0x21]], dtype=torch.uint8)).tolist() == [[0.5, 1.0]]
    for byte in range(256):
        decoded = formats.decode_e2m1(torch.tensor([byte], dtype=torch.uint8)).tolist()
        assert decoded == [e2m1_by_hand(byte & 15), e2m1_by_hand(byte >> 4)]


def test_low_nibble_is_the_even_column_can_fail():
    byte = torch.tensor([[0x21]], dtype=torch.uint8)
    swapped = (byte >> 4) | (byte << 4)
    assert formats.decode_e2m1(swapped).tolist() != [[0.5, 1.0]]


def test_transformers_own_helpers_agree_bit_for_bit():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import FP4_VALUES

    assert [abs(value) for value in FP4_VALUES] == [abs(value) for value in formats.E2M1_VALUES]
    assert list(FP4_VALUES) == list(formats.E2M1_VALUES)
    packed, scales = every_code_and_scale()
    for scale_2 in (1.0, 3.7e-4):
        factor = scales.view(torch.float8_e4m3fn).float() * torch.tensor(scale_2)
        theirs = Fp8Dequantize(None)._dequantize_one(packed.view(torch.int8), factor, torch.float32)
        ours = formats.decode_nvfp4(packed, scales, scale_2)
        assert torch.equal(ours.view(torch.int32)[~ours.isnan()], theirs.view(torch.int32)[~theirs.isnan()])
        assert torch.equal(ours.isnan(), theirs.isnan())


def test_transformers_own_helpers_disagree_with_swapped_nibbles():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    packed = torch.arange(256, dtype=torch.uint8).reshape(32, 8)
    swapped = (packed >> 4) | (packed << 4)
    ones = torch.full((32, 1), 0x38, dtype=torch.uint8)
    theirs = Fp8Dequantize(None)._dequantize_one(swapped.view(torch.int8), torch.ones(32, 1), torch.float32)
    assert not torch.equal(formats.decode_nvfp4(packed, ones, 1.0), theirs)


def test_fp8_decodes_every_byte_like_the_definition():
    decoded = formats.decode_e4m3(SCALE_BYTES).double().numpy()
    expected = np.array([e4m3_by_hand(byte) for byte in range(256)])
    assert np.array_equal(decoded, expected, equal_nan=True)
    scaled = formats.decode_fp8(SCALE_BYTES, 0.37).double().numpy()
    assert np.array_equal(scaled, (expected * float(np.float32(0.37))).astype(np.float32), equal_nan=True)


def test_scalars_may_be_given_as_empty_or_one_element_shape():
    packed, scales = every_code_and_scale()
    a = formats.decode_nvfp4(packed[:10], scales[:10], torch.tensor(0.5))
    assert torch.equal(a, formats.decode_nvfp4(packed[:10], scales[:10], torch.tensor([0.5])))


def test_scales_of_another_shape_are_refused():
    packed, scales = every_code_and_scale()
    with pytest.raises(CheckpointError, match=r"packed \[256, 8\] needs scales \[256, 1\], found \[1, 256\]"):
        formats.decode_nvfp4(packed, scales.reshape(1, 256), 1.0)


def test_every_value_encodes_to_its_own_code():
    values = torch.tensor(formats.E2M1_VALUES)
    assert torch.equal(formats.encode_e2m1(values), CODES)


def test_ties_go_to_the_even_code_and_the_rest_to_the_nearest():
    magnitudes = [e2m1_by_hand(code) for code in range(8)]
    for low, (a, b) in enumerate(zip(magnitudes, magnitudes[1:], strict=False)):
        middle = torch.tensor([(a + b) / 2])
        even = low if low % 2 == 0 else low + 1
        assert formats.encode_e2m1(middle).item() == even
        assert formats.encode_e2m1(-middle).item() == even | 8
        assert formats.encode_e2m1(torch.nextafter(middle, torch.tensor([0.0]))).item() == low
        assert formats.encode_e2m1(torch.nextafter(middle, torch.tensor([9.0]))).item() == low + 1
    assert formats.encode_e2m1(torch.tensor([1e9])).item() == 7


def test_nvfp4_round_trip_is_within_half_a_step_of_every_block():
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    packed, scales, scale_2 = formats.encode_nvfp4(weight)
    assert packed.dtype == torch.uint8 and packed.shape == (24, 32)
    assert scales.dtype == torch.float8_e4m3fn and scales.shape == (24, 4) and scale_2.shape == ()
    decoded = formats.decode_nvfp4(packed, scales, scale_2)
    # Half of the widest step (4 to 6) in units of the block's factor; saturation adds the rounding of the scale itself.
    factor = (scales.float() * scale_2).repeat_interleave(16, dim=1)
    assert ((decoded - weight).abs() <= factor * 1.0 + weight.abs() / 16).all()
    assert (decoded - weight).norm() / weight.norm() < 0.12


def test_encoding_what_was_decoded_gives_the_same_bytes():
    weight = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    packed, scales, scale_2 = formats.encode_nvfp4(weight)
    again = formats.encode_nvfp4(formats.decode_nvfp4(packed, scales, scale_2), scale_2)
    assert torch.equal(again[0], packed) and torch.equal(again[1].view(torch.uint8), scales.view(torch.uint8))


def test_zero_blocks_get_scale_one_and_tiny_blocks_the_smallest_scale():
    weight = torch.randn(2, 32, generator=torch.Generator().manual_seed(2))
    weight[0, :16] = 0
    weight[1, :16] *= 1e-9
    _, scales, _ = formats.encode_nvfp4(weight)
    assert scales.float()[0, 0] == 1.0 and scales.float()[1, 0] == 2.0**-9
    for written in formats.encode_nvfp4(torch.zeros(2, 32))[1:]:
        assert (written.float() == 1.0).all()


def test_fp8_round_trip_uses_the_whole_range():
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    encoded, scale = formats.encode_fp8(weight)
    assert encoded.float().abs().max() == 448 and scale.shape == ()
    assert ((formats.decode_fp8(encoded, scale) - weight).abs() <= weight.abs() / 16 + scale * 2.0**-10).all()
    assert torch.equal(formats.decode_fp8(*formats.encode_fp8(torch.zeros(2, 2))), torch.zeros(2, 2))


def test_matrix_bytes_add_up_to_the_published_experts():
    assert formats.matrix_bytes(2688, 1024, "nvfp4") + formats.matrix_bytes(1024, 2688, "nvfp4") == 3_096_576
    assert formats.matrix_bytes(1856, 2688, "nvfp4") + formats.matrix_bytes(2688, 1856, "nvfp4") == 5_612_544
    assert 3 * formats.matrix_bytes(640, 2560, "nvfp4") == 2_764_800
    assert 3 * formats.matrix_bytes(2048, 5760, "mxfp4") == 3 * 11_796_480 * 17 // 32 == 18_800_640
    assert [formats.matrix_bytes(64, 32, plain) for plain in ("fp8", "bf16", "f16", "f32")] == [2048, 4096, 4096, 8192]


def test_matrix_bytes_refuses_unknown_formats_and_broken_groups():
    with pytest.raises(CheckpointError, match="unknown format 'int3'"):
        formats.matrix_bytes(64, 32, "int3")
    with pytest.raises(CheckpointError, match="groups of 16 columns, found 24"):
        formats.matrix_bytes(64, 24, "nvfp4")
