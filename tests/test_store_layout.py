"""Blocks: where planes lie, and that the published bytes come back exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemolab.errors import StoreError
from nemolab.store.layout import LAYOUTS, BlockLayout, ExpertViews
from nemolab.store.nibbles import transpose_nibbles, transpose_nibbles_fast
from nemolab.units import PAGE_BYTES

SIZES = [(16, 2), (32, 64), (96, 64), (48, 34), (256, 128), (80, 30)]


def random_planes(layout, seed=0):
    rng = np.random.default_rng(seed)
    return ExpertViews(*(rng.integers(0, 256, shape, dtype=np.uint8) for shape in layout.source_shapes.values()))


def packed(layout, planes):
    block = np.full(layout.block_bytes, 0xEE, np.uint8)
    layout.pack(planes, block)
    return block


def code(plane, row, column):
    """A 4-bit code of a packed plane, by the vendor's rule: even columns in the low nibble."""
    byte = int(plane[row, column // 2])
    return byte >> 4 if column % 2 else byte & 0x0F


@pytest.mark.parametrize("inter, width", SIZES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_unpacking_gives_the_published_bytes_back(name, inter, width):
    layout = BlockLayout(name, inter, width)
    planes = random_planes(layout)
    for before, after in zip(planes, layout.unpack(packed(layout, planes)), strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize("inter, width", SIZES)
def test_neuron_rows_hold_the_codes_of_one_neuron(inter, width):
    """The definition, written out code by code: byte b holds output 2b low and 2b+1 high."""
    layout = BlockLayout("neuron", inter, width)
    planes = random_planes(layout, seed=1)
    views = layout.views(packed(layout, planes))
    assert views.down_values.shape == (inter, width // 2)
    assert views.down_scales.shape == (inter // 16, width)
    for neuron in range(inter):
        for b in range(width // 2):
            low, high = (code(planes.down_values, output, neuron) for output in (2 * b, 2 * b + 1))
            assert views.down_values[neuron, b] == (high << 4 | low)
    assert np.array_equal(views.down_scales, planes.down_scales.T)
    assert np.array_equal(views.up_values, planes.up_values)
    assert np.array_equal(views.up_scales, planes.up_scales)


def test_neuron_rows_of_swapped_nibbles_differ_so_the_definition_can_fail():
    layout = BlockLayout("neuron", 32, 64)
    planes = random_planes(layout, seed=1)
    swapped = planes._replace(down_values=(planes.down_values >> 4) | (planes.down_values << 4))
    assert not np.array_equal(packed(layout, planes), packed(layout, swapped))


def test_all_byte_values_survive_in_every_place():
    """256 byte values at both output parities: no code is lost or moved to the other nibble."""
    everything = np.arange(256, dtype=np.uint8)
    source = np.stack([everything, everything[::-1]])
    once, twice = np.empty((512, 1), np.uint8), np.empty_like(source)
    transpose_nibbles(source, once)
    transpose_nibbles(once, twice)
    assert np.array_equal(twice, source)
    assert once[2 * 0x21, 0] == 0x1 | (0xDE & 0xF) << 4  # byte 0x21 is at column 0x21, its partner is 0xDE


@pytest.mark.parametrize("rows, row_bytes", [(16, 8), (64, 24), (1024, 1344), (16, 3), (34, 24), (2, 1)])
def test_the_compiled_transposition_equals_the_plain_one(rows, row_bytes):
    packed = np.random.default_rng(rows).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    plain, compiled = (np.empty((2 * row_bytes, rows // 2), np.uint8) for _ in range(2))
    transpose_nibbles(packed, plain)
    transpose_nibbles_fast(packed, compiled)
    assert np.array_equal(plain, compiled)


@settings(max_examples=60, deadline=None)
@given(groups=st.integers(1, 8), half_width=st.integers(1, 80), name=st.sampled_from(LAYOUTS), seed=st.integers(0, 99))
def test_any_size_goes_there_and_back(groups, half_width, name, seed):
    layout = BlockLayout(name, 16 * groups, 2 * half_width)
    planes = random_planes(layout, seed)
    block = packed(layout, planes)
    assert all(np.array_equal(a, b) for a, b in zip(planes, layout.unpack(block), strict=True))
    assert not block[layout.payload_bytes :].any()
    assert block.size % PAGE_BYTES == 0 and block.size - layout.payload_bytes < PAGE_BYTES


@pytest.mark.parametrize("name", LAYOUTS)
def test_planes_tile_the_payload(name):
    place = 0
    for plane in BlockLayout(name, 96, 64).planes:
        assert plane.offset_bytes == place
        place += plane.nbytes
    assert place == BlockLayout(name, 96, 64).payload_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_sizes(name):
    """Nemotron-3-Super: 2 x 2688 x 1024 x 9/16 = 756 pages. Nano: 2 x 1856 x 2688 x 9/16 = 1370.25 pages, padded."""
    super_ = BlockLayout(name, 2688, 1024)
    assert super_.payload_bytes == super_.block_bytes == 3_096_576 == 756 * PAGE_BYTES
    assert super_.up_bytes == 1_548_288 and BlockLayout("neuron", 48, 40).up_bytes == 48 * (20 + 3)
    nano = BlockLayout(name, 1856, 2688)
    assert nano.payload_bytes == 5_612_544 and nano.block_bytes == 1371 * PAGE_BYTES


def test_views_share_the_block():
    layout = BlockLayout("neuron", 32, 64)
    block = np.zeros(layout.block_bytes, np.uint8)
    layout.views(block).down_scales[...] = 7
    assert block.sum() == 7 * 2 * 64


@pytest.mark.parametrize(
    "name, inter, width, words",
    [
        ("columns", 32, 64, "unknown layout 'columns'"),
        ("neuron", 24, 64, "24 neurons does not split into groups of 16"),
        ("neuron", 32, 33, "33 outputs"),
        ("source", 0, 64, "0 neurons"),
    ],
)
def test_sizes_that_cannot_be_packed_are_refused(name, inter, width, words):
    with pytest.raises(StoreError, match=words):
        BlockLayout(name, inter, width)


def test_planes_of_other_shapes_are_refused():
    layout = BlockLayout("neuron", 32, 64)
    planes = random_planes(BlockLayout("neuron", 48, 64))
    with pytest.raises(StoreError, match="up_values has shape"):
        layout.pack(planes, np.empty(layout.block_bytes, np.uint8))
