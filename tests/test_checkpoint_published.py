"""The two published checkpoints whose real counts are known, rebuilt from their description without a file."""

import math

import pytest
from published import NANO_CONFIG, SUPER_CONFIG, nano_tensors, super_tensors

from nemolab.checkpoint import Inventory, ModelConfig, TensorEntry
from nemolab.checkpoint.modules import find_modules
from nemolab.errors import CheckpointError

ITEM_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
GIB = 2**30


def entries(listed):
    return {
        name: TensorEntry(name, name, dtype, shape, "fake", 0, ITEM_BYTES[dtype] * math.prod(shape))
        for name, dtype, shape in listed
    }


@pytest.fixture(scope="module")
def super_entries():
    return entries(super_tensors())


@pytest.fixture(scope="module")
def super_modules(super_entries):
    return find_modules(super_entries, ModelConfig.from_dict(SUPER_CONFIG))[0]


def test_the_description_of_super_has_the_published_totals(super_entries):
    assert len(super_entries) == 165_860
    assert sum(entry.nbytes for entry in super_entries.values()) == 80_297_329_824


def test_super_has_the_published_formats(super_modules):
    formats = [module.format for module in super_modules.values()]
    assert (formats.count("nvfp4"), formats.count("fp8")) == (40_961, 139)
    table = Inventory(super_modules).by_format()["modules"]
    assert table["routed", "nvfp4"] == 40_960
    assert (table["shared", "nvfp4"], table["shared", "fp8"], table["shared", "bf16"]) == (1, 39 + 37, 1 + 2)
    assert table["mamba", "fp8"] == 28 + 29 and table["latent", "fp8"] == 4 and table["attention", "fp8"] == 2


def test_super_has_the_published_bytes_by_part(super_modules):
    bytes_of = Inventory(super_modules).by_part()["bytes"]
    frame = Inventory(super_modules).frame()
    in_proj = frame[frame["module"].str.endswith("in_proj")]["bytes"].sum()
    assert round(in_proj / GIB, 3) == 3.682
    assert bytes_of["routed"] == 63_418_204_160
    assert round(bytes_of["shared"] / GIB, 3) == 1.693 and round(bytes_of["latent"] / GIB, 3) == 0.609
    assert round(bytes_of["attention"] / GIB, 3) == 0.281 + 0.219 and round(bytes_of["router"] / GIB, 3) == 0.156
    resident = bytes_of.drop(["routed", "mtp"]).sum()
    assert round(resident / GIB, 3) == 10.239 and round((resident - bytes_of["embeddings"]) / GIB, 3) == 9.239
    mtp = frame[frame["part"] == "mtp"]
    assert len(mtp) == 1_040 and round(mtp["bytes"].sum() / GIB, 2) == 5.48


def test_super_minus_one_scale_is_refused_by_name(super_entries):
    name = "backbone.layers.87.mixer.experts.511.up_proj.weight_scale"
    spoiled = {key: entry for key, entry in super_entries.items() if key != name}
    with pytest.raises(CheckpointError, match="layer 87, expert 511: .*up_proj.weight_scale is missing"):
        find_modules(spoiled, ModelConfig.from_dict(SUPER_CONFIG))


def test_nano_has_the_published_totals_and_formats():
    listed = entries(nano_tensors())
    assert len(listed) == 24_147 and sum(entry.nbytes for entry in listed.values()) == 19_339_781_632
    modules, _ = find_modules(listed, ModelConfig.from_dict(NANO_CONFIG))
    table = Inventory(modules).by_format()
    assert table.xs("nvfp4", level="format")["modules"].sum() == 5_968
    counts = table["modules"]
    assert (counts["routed", "nvfp4"], counts["shared", "nvfp4"], counts["mamba", "nvfp4"]) == (5_888, 46, 34)
    resident = Inventory(modules).by_part()["bytes"].drop("routed").sum()
    assert round(resident / GIB, 3) == 2.623
