"""Faults of checkpoints, kind by kind: `plan` and `repack` refuse each in one line that names tensor, found, expected.

A fault is planted in every kind of tensor there is, in three forms of the family, not in the one tensor of a report.
"""

import math
import re
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import FORMS, assert_refused, run_cli
from patching import add_tensor, drop_tensor, edit_json, edit_tensors, patch_bytes, refusal, relabel, stored_tensors
from safetensors.torch import load_file, save_file
from synthetic import copy_checkpoint, write_checkpoint

from nemolab.checkpoint import Checkpoint
from nemolab.checkpoint.formats import encode_nvfp4
from nemolab.checkpoint.values import check_order
from nemolab.errors import CheckpointError

# Not run, or not multiplied by anything: a checkpoint is whole without them.
NOT_NEEDED = ("input_scale", "k_scale", "v_scale", "vision_", "mlp1", "mtp")
LAST_SHARD = "model-00003-of-00003.safetensors"
ORDERED = "backbone.layers.4.mixer.experts.6"
NAN, INFINITY = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))


@cache
def stored(form):
    """Stored name -> (file name, dtype, shape) of a form as it is written."""
    with tempfile.TemporaryDirectory() as parent:
        made = stored_tensors(copy_checkpoint(Path(parent) / "model", **FORMS[form]))
    return {name: (file.name, dtype, shape) for name, (file, dtype, shape) in made.items()}


def kinds(form, needed=True, dtype=None, suffix=""):
    """One stored name of every kind of tensor, the last: "...layers.*.mixer.experts.*.up_proj.weight" -> its name."""
    names = {
        re.sub(r"\.\d+\.", ".*.", name): name
        for name, (_, its_dtype, _) in sorted(stored(form).items())
        if name.endswith(suffix) and dtype in (None, its_dtype)
    }
    return [name for name in names.values() if not (needed and any(part in name for part in NOT_NEEDED))]


def each(dtype=None, suffix="", needed=True):
    """(form, name) for every form and every kind of tensor in it."""
    return [(form, name) for form in FORMS for name in kinds(form, needed, dtype, suffix)]


def some(pairs, every=8):
    """A few of many: what the commands add to the opening is the same for all of them."""
    return pairs[::every]


@pytest.fixture
def spoil(tmp_path):
    """A fresh copy of a form, in the place of the one before."""

    def copy(form="super", **changes):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        return copy_checkpoint(tmp_path / "model", **FORMS[form] | changes)

    return copy


# --- tensors that are missing, extra, renamed, doubled


@pytest.mark.parametrize(("form", "name"), some(each(), 2))
def test_a_missing_tensor_of_any_kind_is_named(spoil, form, name):
    folder = spoil(form)
    drop_tensor(folder, name)
    message = refusal(folder)
    assert f"{name} is missing" in message and ("file" in message or ".safetensors" in message)


@pytest.mark.parametrize(("form", "name"), some(each(), 5))
def test_a_renamed_tensor_of_any_kind_is_named(spoil, form, name):
    folder = spoil(form)
    edit_tensors(folder, lambda each_name, tensor: {each_name + "s" if each_name == name else each_name: tensor})
    message = refusal(folder)
    assert f"{name}s in " in message and "unknown tensor" in message and ".safetensors" in message


@pytest.mark.parametrize(("form", "name"), some(each(), 12))
def test_both_commands_refuse_what_is_missing_and_what_is_renamed(spoil, form, name):
    folder = spoil(form)
    drop_tensor(folder, name)
    assert_refused(folder, f"{name} is missing")


@pytest.mark.parametrize(("form", "name"), some(each(suffix=".weight")))
def test_the_same_tensor_in_two_shards_is_refused_with_both(spoil, form, name):
    folder = spoil(form)
    (holder, _, _) = stored(form)[name]
    other = "model-00002-of-00003.safetensors" if holder == LAST_SHARD else LAST_SHARD
    tensor = {}
    edit_tensors(folder, lambda n, t: tensor.update({n: t}) or {n: t} if n == name else {n: t})
    add_to = {file.name: file for file in folder.glob("*.safetensors")}[other]
    save_file(load_file(add_to) | {name: torch.zeros_like(tensor[name])}, add_to)
    message = refusal(folder)
    assert f"{name} is stored twice" in message and holder in message and other in message


def name_of(form, ending):
    return next(name for name in reversed(stored(form)) if name.endswith(ending))


UNKNOWN = {
    "an expert more than the config says": "backbone.layers.1.mixer.experts.8.up_proj.weight",
    "a layer beyond the last": "backbone.layers.6.norm.weight",
    "an expert in a Mamba layer": "backbone.layers.0.mixer.experts.0.up_proj.weight",
    "a Mamba tensor in an attention layer": "backbone.layers.3.mixer.A_log",
    "a bias where none belongs": "backbone.layers.3.mixer.q_proj.bias",
    "a tensor beside a parameter": "backbone.layers.0.mixer.A_log.weight",
    "another tower": "sound_encoder.layers.0.weight",
    "no name at all": "weight",
    "a gate of three matrices": "backbone.layers.1.mixer.experts.0.gate_proj.weight",
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_tensor_that_does_not_belong_is_refused_with_file_and_shape(spoil, case):
    folder = spoil()
    add_tensor(folder, UNKNOWN[case], torch.ones(3))
    message = assert_refused(folder, f"{UNKNOWN[case]} in {LAST_SHARD}")
    layer = re.search(r"layers\.(\d)\.(?!0)", UNKNOWN[case])
    assert "bias" in case or "F32 [3], 12 bytes" in message
    if layer and "sound" not in UNKNOWN[case] and "bias" not in case:
        assert "config.json" in message


def test_an_expert_that_is_missing_in_one_layer_is_named_with_the_layer(spoil):
    folder = spoil()
    expert = "backbone.layers.4.mixer.experts.7."
    edit_tensors(folder, lambda name, tensor: {} if name.startswith(expert) else {name: tensor})
    assert_refused(folder, f"layer 4, expert 7: {expert}up_proj.weight is missing", "config.json says layer 4 is moe")


def test_names_that_mean_one_tensor_twice_are_refused(spoil):
    folder = spoil("vl")
    add_tensor(folder, "mtp.layers.0.norm.weight", torch.ones(64))
    assert_refused(folder, "mtp.layers.0.norm.weight", "which one counts?")


@pytest.mark.parametrize("root", ["vision_model.", "mtp."])
def test_a_weight_and_its_module_of_one_name_are_refused(spoil, root):
    folder = spoil()
    add_tensor(folder, f"{root}x", torch.ones(3))
    add_tensor(folder, f"{root}x.weight", torch.ones(3))
    assert_refused(folder, f"{root}x", "are both the weight of")


# --- dtypes and shapes

SAME_WIDTH = {
    "U8": ["I8", "F8_E5M2", "F8_E8M0", "BOOL"],
    "F8_E4M3": ["I8", "F8_E5M2", "U8"],
    "BF16": ["I16", "U16"],
    "F32": ["I32", "U32"],
}


@pytest.mark.parametrize(
    ("form", "name", "dtype"),
    [
        (form, name, others[number % len(others)])
        for number, (form, name) in enumerate(some(each(), 3))
        if (others := SAME_WIDTH[stored(form)[name][1]])
    ],
)
def test_another_dtype_of_the_same_bytes_is_refused(spoil, form, name, dtype):
    folder = spoil(form)
    relabel(folder, name, dtype=dtype)
    message = refusal(folder)
    owner = name.rpartition(".")[0]
    assert owner in message and ".safetensors" in message and dtype in message, message


@pytest.mark.parametrize(("form", "name"), [pair for pair in some(each(), 3) if stored(pair[0])[pair[1]][2]])
def test_another_shape_of_the_same_bytes_is_refused_with_both_shapes(spoil, form, name):
    shape = stored(form)[name][2]
    turned = shape[::-1] if shape[::-1] != shape else (1, *shape) if len(name) % 2 else (math.prod(shape),)
    if turned == shape:
        turned = (*shape, 1)
    folder = spoil(form)
    relabel(folder, name, shape=list(turned))
    message = refusal(folder)
    assert f"{name} in " in message and ("expected" in message or "needs" in message), message
    assert str(list(turned)) in message


@pytest.mark.parametrize(("form", "name"), some(each(), 4))
def test_a_tensor_one_short_or_one_long_is_refused(spoil, form, name):
    if stored(form)[name][2] == ():
        change = lambda tensor: tensor.reshape(1).repeat(2)  # noqa: E731  a scalar of two elements
    else:
        change = lambda tensor: torch.cat([tensor, tensor[:1].clone()])  # noqa: E731
    folder = spoil(form)
    edit_tensors(folder, lambda n, t: {n: change(t) if n == name else t})
    message = refusal(folder)
    assert f"{name} in " in message or f"{name.rpartition('.')[0]}.weight" in message, message
    assert "expected" in message and ".safetensors" in message


@pytest.mark.parametrize(("form", "name"), some(each(dtype="U8")) + some(each(dtype="F8_E4M3")))
def test_both_commands_refuse_other_dtypes_and_shapes(spoil, form, name):
    folder = spoil(form)
    relabel(folder, name, dtype="I8")
    assert_refused(folder, name.rpartition(".")[0], "I8", ".safetensors")


SCALE_LAYOUTS = {
    "one group in 32": (lambda t: t[:, ::2].contiguous(), "one scale for 32 columns, not 16"),
    "padded to tiles": (
        lambda t: torch.zeros(-(-t.shape[0] // 128) * 128, -(-t.shape[1] // 4) * 4).to(t.dtype),
        "padded, swizzled layout (128 x 4 tiles)",
    ),
    "a group short": (lambda t: t[:, :-1].contiguous(), "was expected"),
    "BF16": (lambda t: t.bfloat16(), "NVFP4 needs F8_E4M3"),
    "F32": (lambda t: t.float(), "NVFP4 needs F8_E4M3"),
    "U8, as MXFP4 has them": (lambda t: t.view(torch.uint8), "MXFP4"),
    "a scalar": (lambda t: t.reshape(-1)[0].clone(), "was expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALE_LAYOUTS)
@pytest.mark.parametrize("form", ["nano", "vl"])
def test_block_scales_of_every_other_layout_are_refused_by_what_they_are(spoil, case, form):
    change, words = SCALE_LAYOUTS[case]
    names = [name for name in kinds(form, False, "F8_E4M3", ".weight_scale")]
    assert len(names) >= 4
    for name in names[len(case) % 2 :: 2]:
        folder = spoil(form)
        edit_tensors(folder, lambda n, t, name=name: {n: change(t).contiguous() if n == name else t})
        message = refusal(folder)
        assert f"{name} in " in message and words in message, message


SCALARS = {
    "two elements": lambda t: t.reshape(1).repeat(2),
    "rank two": lambda t: t.reshape(1, 1),
    "BF16": lambda t: t.bfloat16(),
    "F64": lambda t: t.double(),
    "empty": lambda t: t.reshape(1)[:0].clone(),
}


@pytest.mark.parametrize("case", SCALARS)
@pytest.mark.parametrize("form", FORMS)
def test_scalars_of_every_other_form_are_refused(spoil, case, form):
    endings = ("weight_scale", "weight_scale_2") + (("k_scale", "v_scale") if case != "empty" else ())
    names = [name for name in kinds(form, False, "F32") if name.endswith(endings)]
    for name in names[len(case) % 3 :: 3]:  # each kind of module in one case or another
        folder = spoil(form)
        edit_tensors(folder, lambda n, t, name=name: {n: SCALARS[case](t) if n == name else t})
        message = refusal(folder)
        assert f"{name} in " in message and "one F32 number, [] or [1], was expected" in message, message


# --- forms that are not ours

FOREIGN_NAMES = {
    "weight_packed": "compressed-tensors",
    "weight_global_scale": "compressed-tensors",
    "weight_scale_inv": "block-wise FP8",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "g_idx": "GPTQ",
    "weight.absmax": "bitsandbytes",
    "weight.quant_state.bitsandbytes__nf4": "bitsandbytes",
    "SCB": "bitsandbytes",
    "weights_scaling_factor": "TensorRT-LLM",
    "pre_quant_scale": "AWQ",
}
FOREIGN_METHODS = ("compressed-tensors", "fp8", "gptq", "awq", "bitsandbytes", "mxfp4", "fbgemm_fp8", "quanto", 3)


@pytest.mark.parametrize("ending", FOREIGN_NAMES)
@pytest.mark.parametrize(
    ("form", "module"),
    [
        ("super", "backbone.layers.1.mixer.experts.3.up_proj"),
        ("nano", "backbone.layers.0.mixer.in_proj"),
        ("vl", "language_model.lm_head"),
    ],
)
def test_foreign_names_are_refused_by_what_they_are(spoil, ending, form, module):
    folder = spoil(form)
    add_tensor(folder, f"{module}.{ending}", torch.ones(2))
    assert_refused(folder, f"{module}.{ending} in {LAST_SHARD}", FOREIGN_NAMES[ending], "not ModelOpt's NVFP4")


@pytest.mark.parametrize("method", FOREIGN_METHODS)
def test_a_foreign_method_is_named_before_the_tensors_are_judged(spoil, method):
    folder = spoil()
    drop_tensor(folder, "backbone.norm_f.weight")
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(quant_method=method))
    assert_refused(folder, "config.json: quantization_config", repr(str(method)), "only ModelOpt's NVFP4 and FP8")


@pytest.mark.parametrize(("value", "found"), [(None, "null"), ([], "a list"), ("NVFP4", "a str")])
def test_a_form_beside_the_config_that_is_no_object_is_named_with_its_field(spoil, value, found):
    folder = spoil("nano")
    edit_json(folder / "hf_quant_config.json", put(quantization=value))
    assert_refused(folder, f"hf_quant_config.json: quantization is {found}; an object was expected")


@pytest.mark.parametrize(
    ("dtype", "words"), [("I8", "has dtype I8; U8 (NVFP4)"), ("BF16", "or no scale, was expected")]
)
def test_a_weight_of_another_dtype_beside_its_scales_is_the_one_named(spoil, dtype, words):
    """Both go by one name in the message: the weight that is wrong, not only the scale that is right."""
    folder = spoil()
    name = "backbone.layers.1.mixer.experts.2.up_proj.weight"
    rows, columns = stored("super")[name][2]
    relabel(folder, name, dtype=dtype, shape=[rows, columns // 2 if dtype == "BF16" else columns])
    assert_refused(folder, f"{name} in ", dtype, words)


def test_stacked_experts_of_other_families_are_named(spoil):
    folder = spoil()
    add_tensor(folder, "backbone.layers.1.mixer.experts.gate_up_proj_blocks", torch.ones(2, dtype=torch.uint8))
    assert_refused(folder, "gate_up_proj_blocks", "MXFP4")


# --- values that headers cannot show: found at repack, with their place


def factors():
    """Every kind of number that weights are multiplied by."""
    return [
        (form, name)
        for form in FORMS
        for name in kinds(form, True, "F32")
        if name.endswith(("weight_scale", "weight_scale_2"))
    ]


@pytest.mark.parametrize(("form", "name"), factors())
def test_an_impossible_factor_of_any_module_is_named(spoil, form, name):
    shown = {NAN: "nan", INFINITY: "inf", struct.pack("<f", -1): "-1.0"}
    raw = list(shown)[len(name) % 3]
    folder = spoil(form)
    patch_bytes(folder, name, 0, raw)
    assert_refused(folder, f"{name} in ", f"is {shown[raw]}; a finite factor >= 0 was expected", plan=False)


@pytest.mark.parametrize(
    ("form", "byte", "what"),
    [("super", 0xFF, "NaN"), ("nano", 0x7F, "NaN"), ("vl", 0xFE, "negative"), ("super", 0x81, "negative")],
)
def test_unusable_block_scales_of_any_module_are_found_with_their_place(spoil, form, byte, what):
    for name in kinds(form, True, "F8_E4M3", ".weight_scale"):
        columns = stored(form)[name][2][1]
        folder = spoil(form)
        patch_bytes(folder, name, 5 * columns + 2, bytes([byte]))
        words = f"has the {what} byte {byte:#04x} at row 5, group 2"
        assert_refused(folder, f"{name} in ", words, plan=False)


@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form, name in each() if stored(form)[name][1] in ("BF16", "F32")][::6]
)
def test_a_nan_in_a_weight_is_found_with_its_place(spoil, form, name):
    _, dtype, shape = stored(form)[name]
    if name.endswith(("_scale", "_scale_2")):
        return
    folder = spoil(form)
    item = {"BF16": b"\xc0\x7f", "F32": NAN}[dtype]
    place = math.prod(shape) - 1
    patch_bytes(folder, name, place * len(item), item)
    assert_refused(folder, f"{name} in ", f"is NaN (0x7fc0{'0000' * (dtype == 'F32')} in {dtype})", plan=False)


def test_a_nan_in_an_fp8_weight_is_found_with_its_place(spoil):
    folder = spoil("vl")
    name = "language_model.backbone.layers.3.mixer.q_proj.weight"
    patch_bytes(folder, name, 64 * 3 + 9, b"\xff")
    assert_refused(folder, f"layer 3: {name} in ", "is NaN (0xff in F8_E4M3) at [3, 9]", plan=False)


LEGAL_VALUES = {
    "scales of zero": ("backbone.layers.1.mixer.experts.2.up_proj.weight_scale", b"\x00\x80\x01\x08\x7e"),
    "a factor of zero": ("backbone.layers.1.mixer.experts.2.up_proj.weight_scale_2", bytes(4)),
    "a row of minus zeros": ("backbone.layers.1.mixer.experts.2.up_proj.weight", b"\x88" * 32),
    "a routing bias of -inf": ("backbone.layers.1.mixer.gate.e_score_correction_bias", struct.pack("<f", -math.inf)),
    "a NaN input scale": ("backbone.layers.1.mixer.experts.2.up_proj.input_scale", NAN),
    "a NaN in the MTP block": ("mtp.layers.0.enorm.weight", b"\xc0\x7f"),
    "a NaN cache scale": ("backbone.layers.3.mixer.k_proj.k_scale", NAN),
}


@pytest.mark.parametrize("case", LEGAL_VALUES)
def test_odd_values_that_harm_nothing_are_kept_as_they_are(spoil, tmp_path, case):
    folder = spoil()
    patch_bytes(folder, LEGAL_VALUES[case][0], 0, LEGAL_VALUES[case][1])
    for words in (("repack", folder, "--to", tmp_path / "s"), ("verify", tmp_path / "s", "--source", folder, "--all")):
        code, _, err = run_cli(*words)
        assert code == 0, err


def swizzle(scales):
    """The layout of tensor cores: tiles of 128 rows x 4 groups, each laid out 32 x 4 x 4."""
    rows, groups = scales.shape
    tiles = scales.view(torch.uint8).reshape(rows // 128, 4, 32, groups // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, groups).contiguous().view(torch.float8_e4m3fn)


@pytest.fixture
def quantised(tmp_path):
    """A checkpoint whose experts fill whole tiles, with one expert quantised from normal weights."""
    folder = copy_checkpoint(tmp_path / "model", inter=256, latent=128)
    stored = {}
    for matrix, shape in (("up", (256, 128)), ("down", (128, 256))):
        packed, scales, _ = encode_nvfp4(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        stored |= {f"{ORDERED}.{matrix}_proj.weight": packed, f"{ORDERED}.{matrix}_proj.weight_scale": scales}
    edit_tensors(folder, lambda name, tensor: {name: stored.get(name, tensor)})
    return folder


@pytest.mark.parametrize("matrix", ["up", "down"])
def test_swizzled_scales_of_an_unchanged_shape_are_found(quantised, matrix):
    """Bytes, dtypes and shapes are all right; only the weights tell the orders apart."""
    name = f"{ORDERED}.{matrix}_proj.weight_scale"
    edit_tensors(quantised, lambda n, t: {n: swizzle(t) if n == name else t})
    words = f"layer 4, expert 6: {name} in ", "swizzled order (tiles of 128 x 4)", "the linear order that was expected"
    assert_refused(quantised, *words, plan=False)


def test_scales_in_linear_order_pass(quantised, tmp_path):
    code, _, err = run_cli("repack", quantised, "--to", tmp_path / "store")
    assert code == 0, err


def test_the_order_of_every_trained_expert_is_judged_rightly(tiny_path):
    checkpoint = Checkpoint.open(tiny_path)
    judged = 0
    for layer in range(len(checkpoint.config.moe_layers)):
        for number in range(0, checkpoint.config.n_experts, 8):
            expert = checkpoint.expert(layer, number)
            for values, scales in ((expert.up_values, expert.up_scales), (expert.down_values, expert.down_scales)):
                check_order(values, scales, "x")
                with pytest.raises(CheckpointError, match="swizzled order"):
                    check_order(values, swizzle(torch.from_numpy(scales)).view(torch.uint8).numpy(), "x")
                judged += 1
    assert judged >= 50


@pytest.mark.parametrize("kind", ["random bytes", "zeros", "one value"])
def test_weights_that_say_nothing_about_the_order_are_let_through(kind):
    draw = np.random.default_rng(0)
    packed, scales = draw.integers(0, 256, (128, 256), np.uint8), draw.integers(0, 0x7F, (128, 32), np.uint8)
    if kind != "random bytes":
        packed[:], scales[:] = (0, 0x38) if kind == "zeros" else (0x11, 0x40)
    check_order(packed, scales, "x")


PATTERNED = {
    "sorted throughout": lambda w, i, j: w.flatten().sort().values.reshape(w.shape),
    "sorted in each row": lambda w, i, j: w.sort(1).values,
    "sorted rows": lambda w, i, j: w[w.norm(dim=1).argsort()],
    "of low rank": lambda w, i, j: w[:, :2] @ w[:2],
    "a chess board": lambda w, i, j: w * ((i // 32 + j // 64) % 2),
    "a chess board of the tile's own": lambda w, i, j: w * ((i // 32) % 4 == (j // 16) % 4),
    "a soft chess board": lambda w, i, j: w * (0.05 + (i // 32 + j // 16) % 2),
    "banded": lambda w, i, j: w * torch.exp(-(i - j).abs() / 20),
    "a triangle": lambda w, i, j: w.triu(),
    "blocks of a size each": lambda w, i, j: w * torch.kron(torch.exp(2 * w[::16, ::16]), torch.ones(16, 16)),
    "rows of a size each": lambda w, i, j: w * torch.exp(4 * w[:, :1]),
    "columns of a size each": lambda w, i, j: w * torch.exp(4 * w[:1]),
    "heavy tails": lambda w, i, j: w**5,
    "mostly zero": lambda w, i, j: w * (w.roll(7) > 2),
    "one outlier": lambda w, i, j: w * torch.where(i + j == 0, 1e6, 1.0),
    "waves": lambda w, i, j: torch.sin(i * j / 50) + 0.01 * w,
    "signs": lambda w, i, j: w.sign(),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(128, 64), (256, 128)])
def test_weights_with_a_pattern_of_their_own_are_never_taken_for_swizzled(shape):
    i, j = torch.arange(float(shape[0]))[:, None], torch.arange(float(shape[1]))[None]
    for seed in range(3):
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for name, change in PATTERNED.items():
            weight = change(weights, i, j)
            for factor in (448, 256):
                packed, scales, _ = encode_nvfp4(weight, weight.abs().amax() / (6 * factor))
                check_order(packed.numpy(), scales.view(torch.uint8).numpy(), name)


# --- what is not run is checked in itself


@pytest.mark.parametrize("part", ["mtp.layers.1.mixer.experts.3.up_proj", "vision_model.radio_model.x"])
@pytest.mark.parametrize("missing", ["weight_scale", "weight_scale_2", "weight"])
def test_half_a_quantised_module_of_mtp_or_the_tower_is_refused(spoil, part, missing):
    folder = spoil("vl")
    name = f"language_model.{part}" if part.startswith("mtp") else part
    packed, scales, factor = encode_nvfp4(torch.randn(96, 64))
    whole = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor.reshape(())}
    for suffix, tensor in whole.items():
        if f"{name}.{suffix}" not in stored("vl"):
            add_tensor(folder, f"{name}.{suffix}", tensor)
    Checkpoint.open(folder)
    drop_tensor(folder, f"{name}.{missing}")
    assert_refused(folder, f"{name}.{missing} is missing")


# --- experts that are not alike


def test_experts_of_one_layer_in_two_formats_are_refused_with_both(tmp_path):
    name = "backbone.layers.4.mixer.experts.3.down_proj"
    folder = write_checkpoint(tmp_path / "model", overrides={name: "bf16"})
    assert_refused(folder, f"layer 4, expert 3: {name}.weight in ", "is bf16", "is nvfp4", "share one format")


def test_experts_of_another_format_in_one_whole_layer_are_refused(tmp_path):
    overrides = {f"backbone.layers.4.mixer.experts.{n}.{m}_proj": "bf16" for n in range(8) for m in ("up", "down")}
    folder = write_checkpoint(tmp_path / "model", overrides=overrides)
    assert_refused(folder, "layers.4", "bf16", "nvfp4")


# --- configs


def remove(field):
    return lambda config: config.pop(field) and None


def put(**fields):
    return lambda config: config.update(fields)


HUGE = 10**30
NEEDED_FIELDS = (
    "hidden_size", "vocab_size", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "num_attention_heads",
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size",
)  # fmt: skip
SIZE_FIELDS = (*NEEDED_FIELDS, "head_dim", "conv_kernel", "n_groups", "moe_shared_expert_intermediate_size")
NOT_SIZES = ["64", 64.0, -64, 0, HUGE, True, math.nan, math.inf, [64], {"value": 64}]


@pytest.mark.parametrize("field", NEEDED_FIELDS)
@pytest.mark.parametrize("edit", [remove, lambda field: put(**{field: None})], ids=["missing", "null"])
def test_a_size_that_is_missing_is_named_not_guessed(spoil, field, edit):
    folder = spoil()
    edit_json(folder / "config.json", edit(field))
    assert_refused(folder, "config.json", f"has no {field}")


@pytest.mark.parametrize(
    ("field", "value"), [(field, NOT_SIZES[n % len(NOT_SIZES)]) for n, field in enumerate(SIZE_FIELDS * 2)]
)
def test_a_size_that_is_none_is_refused_with_the_field_and_what_was_found(spoil, field, value):
    folder = spoil()
    edit_json(folder / "config.json", put(**{field: value}))
    assert_refused(folder, "config.json", f"{field} is {str(value)[:60]!r}; a whole number >= 1 was expected")


CONFIGS = {
    "more experts a token than there are": (put(num_experts_per_tok=9), "num_experts_per_tok is 9", "<= n_routed"),
    "an unknown letter": (put(hybrid_override_pattern="MEX*E-"), "unknown letter 'X' at position 2"),
    "a pattern too short": (put(hybrid_override_pattern="MEM*E"), "config.json has layers 0 to 4"),
    "a pattern too long": (put(hybrid_override_pattern="MEM*E-M"), "backbone.layers.6.norm.weight is missing"),
    "another order of layers": (put(hybrid_override_pattern="EMM*E-"), "config.json says layer 0 is moe"),
    "an empty pattern": (put(hybrid_override_pattern=""), "has 0 layers"),
    "a pattern of numbers": (put(hybrid_override_pattern=[1, 2]), "unknown word '1' at position 0"),
    "a number as pattern": (put(hybrid_override_pattern=6), "is a int; a pattern string"),
    "no list of layers": (remove("hybrid_override_pattern"), "no list of layers: hybrid_override_pattern"),
    "two lists that differ": (put(layers_block_type=["mamba"] * 6), "disagree at layer 1"),
    "an unknown word": (put(layers_block_type=["mamba", "conv"], hybrid_override_pattern=None), "unknown word 'conv'"),
    "another family's architecture": (put(architectures=["LlamaForCausalLM"]), "architectures is 'LlamaForCausalLM'"),
    "an architecture that is no list": (put(architectures="NemotronHForCausalLM"), "a list of names was expected"),
    "a switch that is a word": (put(tie_word_embeddings="false"), "tie_word_embeddings is 'false'; true or false"),
    "a number that is a word": (put(routed_scaling_factor="5"), "routed_scaling_factor is '5'; a finite number"),
    "a number that is none": (put(layer_norm_epsilon=math.nan), "layer_norm_epsilon is 'nan'; a finite number"),
    "a negative number": (put(routed_scaling_factor=-1.0), "routed_scaling_factor is '-1.0'; a finite number"),
    "a negative time step": (put(time_step_limit=[-1, 1]), "time_step_limit is"),
    "heads that do not divide": (put(num_key_value_heads=3), "num_key_value_heads is 3; a divisor of 4 heads"),
    "groups that do not divide": (put(n_group=3), "n_group is 3; a divisor of 8 experts"),
    "too many experts to be there": (put(n_routed_experts=9), "gate.weight", "by config.json [9, 64] was expected"),
    "too few experts for what is there": (put(n_routed_experts=7), "layer 1, expert 7", "unknown tensor"),
    "millions of experts": (put(n_routed_experts=10**8), "n_routed_experts", "100,000,000 experts each"),
    "a table of formats that is a list": (
        lambda c: c["quantization_config"].update(quantized_layers=[]), "quantized_layers is a list"),
    "an unknown format": (
        lambda c: c["quantization_config"].update(quantized_layers={"lm_head": {"quant_algo": "FOO"}}),
        "quantization_config: lm_head", "unknown quant_algo 'FOO'"),
    "a size of null that has a default": (put(head_dim=None), "head_dim is null; a whole number >= 1 was expected"),
    "a language model that is a list": (put(llm_config=[]), "llm_config is a list; an object was expected"),
    "no latent where one is stored": (
        put(moe_latent_size=None), "layer 1: ", "fc1_latent_proj.weight in ", "with 8 experts and no moe_latent_size"),
    "no shared expert where one is stored": (
        put(n_shared_experts=0), "layer 1: ", "shared_experts.up_proj.weight in ", "and n_shared_experts 0"),
    "formats that are a word": (put(quantization_config="NVFP4"), "quantization_config is a str"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_is_refused_with_the_field(spoil, case):
    edit, *words = CONFIGS[case]
    folder = spoil()
    edit_json(folder / "config.json", edit)
    assert_refused(folder, *words)


@pytest.mark.parametrize("model_type", ["llama", None, 3, ""])
def test_another_family_is_refused_by_its_name(spoil, model_type):
    folder = spoil()
    edit_json(folder / "config.json", put(model_type=model_type))
    code, _, err = run_cli("repack", folder, "--to", folder.parent / "store")
    assert code == 1 and "model_type" in err and "nemotron_h" in err and err.count("\n") == 1
    assert not (folder.parent / "store").exists()


@pytest.mark.parametrize("count", [7, 1, None, "six"])
def test_a_contradicting_number_of_layers_is_said_and_the_list_used(spoil, count):
    folder = spoil()
    edit_json(folder / "config.json", put(num_hidden_layers=count))
    code, out, err = run_cli("plan", folder)
    assert code == 0 and not err
    assert (f"num_hidden_layers says {count}, the list of layers has 6; the list is used" in out) == (count is not None)


def test_metadata_that_contradicts_itself_is_refused_with_both_files(spoil):
    folder = spoil()
    edit_json(
        folder / "hf_quant_config.json",
        lambda quant: quant["quantization"]["quantized_layers"].update({"lm_head": {"quant_algo": "FP8"}}),
    )
    assert_refused(folder, "config.json: quantization_config says lm_head is not quantised", "hf_quant_config.json")


def test_a_head_that_is_neither_stored_nor_tied_is_named(spoil):
    folder = spoil()
    drop_tensor(folder, "lm_head.weight")
    assert_refused(folder, "lm_head.weight is missing", "tie_word_embeddings is false")


def test_an_unknown_prefix_shows_names_found_and_names_expected(spoil):
    folder = spoil()
    edit_tensors(folder, lambda name, tensor: {f"decoder.{name}": tensor})
    assert_refused(folder, "the first names are decoder.backbone.embeddings.weight", "expected names like backbone.")
