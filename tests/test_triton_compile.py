"""Every kernel of `kernels/gpu` becomes machine code for cards that are not here."""

import importlib
import re
from pathlib import Path

import pytest
from triton_compile import CAPABILITIES, SHARED_KIB, architecture, compile_kernel, instructions, loop_instructions

ROOT = Path(__file__).resolve().parent.parent

_MATVEC = {
    "w": "*i64", "scales": "*u8", "x": "*fp32", "bias": "*fp32", "y": "*fp32", "scale": "fp32", "rows": "i32",
    "places": "i32:16",
}  # fmt: skip
_PLAIN = {"MODE": 0, "BIAS": False, "ROWS": 8, "PLACES": 128, "STAGES": 1}
_EXPERTS = {"addresses": "*i64", "ids": "*i32", "scales_2": "*fp32", "starts": "*i32", "begin": "i32", "end": "i32"}
_NORM = {"x": "*fp32", "gate": "*fp32", "weight": "*fp32", "eps": "fp32", "y": "*fp32", "width": "i32:16"}
_SIZES = {"inter": "i32:16", "width": "i32:16"}
_UP = _EXPERTS | {"pairs": "*i32", "top_k": "i32", "x": "*bf16", "h": "*bf16"} | _SIZES
_DOWN = _EXPERTS | {"h": "*bf16", "results": "*fp32"} | _SIZES

# (file, kernel, types of its arguments, its constants at Super's sizes, warps[, stages]), as its launcher has them;
# CARD is filled in for each card.
CASES = {
    "matvec nvfp4": ("matvec", "_matvec_kernel", _MATVEC, _PLAIN | {"FORMAT": 4}, 4),
    "matvec fp8": ("matvec", "_matvec_kernel", _MATVEC, _PLAIN | {"FORMAT": 3, "MODE": 2, "BIAS": True}, 4),
    "matvec f32": ("matvec", "_matvec_kernel", _MATVEC, _PLAIN | {"FORMAT": 2}, 4),
    "matvec f16": ("matvec", "_matvec_kernel", _MATVEC, _PLAIN | {"FORMAT": 1}, 4),
    "matvec bf16": ("matvec", "_matvec_kernel", _MATVEC, _PLAIN | {"FORMAT": 0, "MODE": 1}, 4),
    "rms_norm": ("rms_norm", "_rms_norm_kernel", _NORM | {"y": "*bf16"}, {"GATED": False, "BLOCK": 1024}, 8),
    "mamba norm": ("rms_norm", "_rms_norm_kernel", _NORM, {"GATED": False, "BLOCK": 1024}, 8),
    "mamba prompt gate": ("rms_norm", "_rms_norm_kernel", _NORM | {"y": "*bf16"}, {"GATED": True, "BLOCK": 1024}, 8),
    "mamba convolve": (
        "mamba_step", "_convolve_kernel",
        {name: "*fp32" for name in ("xbc", "weight", "bias", "state", "out")} | {"channels": "i32:16"},
        {"TAPS": 4, "BLOCK": 128}, 4,
    ),
    "mamba update": (
        "mamba_step", "_update_kernel",
        {name: "*fp32" for name in ("projected", "conv", "a", "d", "dt_bias", "ssm", "gated")}
        | {name: "fp32" for name in ("low", "high")}
        | {name: "i32:16" for name in ("heads", "head_dim", "state_size", "conv_dim")} | {"groups": "i32"},
        {"ROWS": 16, "STATE": 128}, 4,
    ),
    "mamba prompt convolve": (
        "mamba_prompt", "_convolve_kernel",
        {name: "*fp32" for name in ("inputs", "weight", "bias", "out")} | {"tokens": "i32", "channels": "i32:16"},
        {"TAPS": 4, "TOKENS": 8, "BLOCK": 256}, 4,
    ),
    "mamba prompt scan": (
        "mamba_prompt", "_scan_kernel",
        {name: "*fp32" for name in ("conv", "dt", "a", "d", "dt_bias", "ssm", "y")}
        | {name: "fp32" for name in ("low", "high")}
        | {name: "i32:16" for name in ("heads", "head_dim", "state_size")} | {"tokens": "i32", "groups": "i32"},
        {"CHUNK": 64, "DIM": 32, "SLICE": 16}, 4, 1,
    ),
    "router groups": (
        "router_step", "_group_keys_kernel",
        {name: "*fp32" for name in ("logits", "bias", "keys", "best")}
        | {name: "i32" for name in ("size", "groups", "top_groups")},
        {"GROUPS": 8, "SIZE": 32}, 4,
    ),
    "router ranks": (
        "router_step", "_rank_kernel",
        {name: "*fp32" for name in ("logits", "bias", "keys")}
        | {"experts": "*i32", "count": "i32:16", "top_k": "i32"},
        {"GROUPED": False, "COUNT": 512, "MINE": 8}, 4,
    ),
    "router weights": (
        "router_step", "_weigh_kernel",
        {"logits": "*fp32", "experts": "*i32", "weights": "*fp32", "top_k": "i32", "scaling": "fp32"},
        {"NORMALISE": True, "TOP_K": 32}, 1,
    ),
    "attention split": (
        "attention_step", "_split_kernel",
        {name: "*fp32" for name in ("q", "k", "v", "largest_out", "sums_out", "mixes_out")}
        | {"keys": "*bf16", "values": "*bf16", "tokens_ptr": "*i32", "scale": "fp32"}
        | {name: "i32:16" for name in ("share", "kv_width", "head_dim")} | {"splits": "i32"},
        {"TOKENS": 64, "SHARE": 16, "DIM": 128}, 8,
    ),
    "attention merge": (
        "attention_step", "_merge_kernel",
        {name: "*fp32" for name in ("largest_in", "sums_in", "mixes_in", "mixed")}
        | {"tokens_ptr": "*i32", "head_dim": "i32:16", "splits": "i32"},
        {"TOKENS": 64, "MERGE": 32, "DIM": 128}, 4,
    ),
    "decode nvfp4": (
        "decode_bf16", "_decode_kernel", {"words": "*i64", "scales": "*u8", "out": "*i64", "places": "i32:16"},
        {"NVFP4": True, "PLACES": 512}, 4,
    ),
    "decode fp8": (
        "decode_bf16", "_decode_kernel", {"words": "*i64", "scales": "*u8", "out": "*i64", "places": "i32:16"},
        {"NVFP4": False, "PLACES": 512}, 4,
    ),
    "prompt up": ("expert_prompt", "_up_kernel", _UP, {"TOKENS": 64, "NEURONS": 64, "K": 64}, 4),
    "prompt up 128": ("expert_prompt", "_up_kernel", _UP, {"TOKENS": 128, "NEURONS": 64, "K": 64}, 4),
    "prompt down": ("expert_prompt", "_down_kernel", _DOWN, {"TOKENS": 64, "OUTPUTS": 128, "K": 64}, 4),
    "prompt down 128": ("expert_prompt", "_down_kernel", _DOWN, {"TOKENS": 128, "OUTPUTS": 128, "K": 64}, 8),
    "add experts": (
        "add_experts", "_add_kernel",
        {name: "*fp32" for name in ("results", "shares", "out")}
        | {"places": "*i32", "begin": "i32", "end": "i32", "width": "i32:16"},
        {"K": 22, "BLOCK": 1024}, 4,
    ),
    "expert step": (
        "expert_step", "_expert_kernel",
        {name: "*i32" for name in ("ranks", "up_index", "down_index", "ids", "active")}
        | {name: "*i64" for name in ("up_table", "down_table")}
        | {name: "*fp32" for name in ("scales_2", "x", "partial")}
        | {"first": "i32", "amount": "i32", "post": "i64"},
        {"INTER": 2688, "WIDTH": 1024, "GROUPS_A_PART": 2, "WORDS": 128, "PACK": 4, "UP_UNIT": 1.0, "NEURONS": False},
        2, 1,
    ),
    "combine": (
        "combine", "_combine_kernel",
        {name: "*fp32" for name in ("partial", "weights", "scales_2", "out")} | {"ids": "*i32"},
        {"RANKS": 22, "PARTS": 84, "WIDTH": 1024, "PARTS_2": 128, "BLOCK": 16, "DOWN_UNIT": 1.0}, 8,
    ),
    "stream": (
        "stream", "_stream_kernel", {"address": "i64:16", "words": "i64:16", "sums": "*i32"},
        {"BLOCK": 1024, "LOADS": 4}, 4,
    ),
}  # fmt: skip

# Which of the cards' own conversions a kernel takes, of two codes an instruction: E4M3 from sm_89 on, E2M1 from sm_100.
CONVERSIONS = {
    "matvec nvfp4": {"e4m3x2": 89, "e2m1x2": 100},
    "matvec fp8": {"e4m3x2": 89},
    "decode nvfp4": {"e4m3x2": 89, "e2m1x2": 100},
    "decode fp8": {"e4m3x2": 89},
    "prompt up": {"e4m3x2": 89},
    "prompt down": {"e4m3x2": 89},
    "expert step": {},
}
CONVERTED = [(case, capability) for case in CONVERSIONS for capability in CAPABILITIES] + [
    (case, capability) for case in list(CONVERSIONS)[:4] for capability in (89, 100)
]

CASES["expert step neurons"] = CASES["expert step"][:3] + (CASES["expert step"][3] | {"NEURONS": True}, 2, 1)

# The form for 128 tokens is built at its real sizes, and for the widest cards this one is.
_SMALL = {"prompt down": {"OUTPUTS": 32, "K": 32}}


def find_kernels() -> set[tuple[str, str]]:
    """(file, name) of every `@triton.jit` function called `..._kernel`: what launchers start."""
    found = set()
    for path in (ROOT / "kernels" / "gpu").glob("*.py"):
        module = importlib.import_module(f"nemolab.kernels.gpu.{path.stem}")
        found |= {
            (path.stem, name)
            for name, value in vars(module).items()
            if hasattr(value, "arg_names") and name.endswith("_kernel") and value.fn.__module__ == module.__name__
        }
    return found


def build(case: str, capability: int):
    from nemolab.kernels.gpu.codes import card_of_capability

    file, name, types, constants, *warps_and_stages = CASES[case]
    kernel = getattr(importlib.import_module(f"nemolab.kernels.gpu.{file}"), name)
    if capability < 100:
        constants = constants | _SMALL.get(case, {})
    if "CARD" in kernel.arg_names:
        constants = constants | {"CARD": card_of_capability(divmod(capability, 10))}
    options = dict(zip(("num_warps", "num_stages"), warps_and_stages, strict=False))
    return compile_kernel(kernel, types, constants, capability, **options)


def test_every_kernel_is_among_the_cases():
    assert find_kernels() == {(file, name) for file, name, *_ in CASES.values()}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", CASES)
def test_kernel_compiles_without_the_card(case, capability):
    built = build(case, capability)
    assert architecture(built.asm["cubin"]) == capability
    assert built.metadata.shared <= 1024 * SHARED_KIB[capability]


@pytest.mark.parametrize(("case", "capability"), CONVERTED)
def test_conversions_of_codes_are_taken_where_a_card_has_them(case, capability):
    """A card of sm_100 or later has to be there to run them; that they stand in the code can be seen without."""
    built = build(case, capability)
    assert architecture(built.asm["cubin"]) == capability
    for name in ("e4m3x2", "e2m1x2"):
        assert (name in built.asm["ptx"]) == (capability >= CONVERSIONS[case].get(name, 1000)), name


@pytest.mark.parametrize("card", [90, 120])
@pytest.mark.parametrize("format", ["nvfp4", "fp8", "bf16"])
def test_instructions_of_a_product_are_those_its_benchmark_reckons_with(format, card):
    """Those of the loop over the weights it takes: the rows of a program, and the weights of a lane's eight bytes."""
    from nemolab.kernels.gpu.codes import card_of_capability
    from nemolab.kernels.gpu.matvec import _COLUMNS, _matvec_kernel, _shape
    from nemolab.kernels.matvec import FORMATS
    from nemolab.measure.bench_linear import INSTRUCTIONS, matrix_shape

    code, (rows, columns) = FORMATS[format], matrix_shape(format)
    warps, rows_each = _shape(code, columns // _COLUMNS[code], rows)
    constants = _PLAIN | {"FORMAT": code, "ROWS": rows_each, "PLACES": 32 * warps}
    constants |= {"CARD": card_of_capability(divmod(card, 10))}
    built = compile_kernel(_matvec_kernel, _MATVEC, constants, card, num_warps=warps)
    found = len(loop_instructions(built.asm["cubin"])) / (rows_each * _COLUMNS[code])
    assert found == pytest.approx(INSTRUCTIONS[format][card], abs=0.05)


def test_a_kernel_without_a_loop_is_said():
    with pytest.raises(ValueError, match="without a loop"):
        loop_instructions(build("combine", 90).asm["cubin"])


def test_the_form_that_reads_scales_again_adds_up_as_the_other():
    """Sums over the 16 neurons of a group run in the order of a tensor's layout: the same one, so the same bits."""
    sums = []
    for case in ("expert step", "expert step neurons"):
        code = build(case, 90).asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", code, re.MULTILINE))
        found = re.findall(r"\(tensor<16x128xf32, (#\w+)>\) -> tensor<128xf32,", code)
        sums.append([layouts[name] for name in found])
    assert len(sums[0]) == 8 and sums[0] == sums[1]


def test_an_experts_up_is_under_way_at_once():
    """Nine loads of 16 bytes a lane; the assembler would rather have three, and wait between the arithmetic."""
    for capability in (90, 120):
        wide = [
            at
            for at, code in enumerate(instructions(build("expert step", capability).asm["cubin"]))
            if "LDG.E.128" in code
        ]
        assert wide[8] - wide[0] < 40, capability


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", ["mamba update", "mamba prompt scan"])
def test_a_time_step_that_is_not_a_number_is_not_lost(case, capability):
    """min.f32 and max.f32 of NaN and a number are the number, on cards; in the interpreter they are NaN."""
    found = set(re.findall(r"\b(?:min|max)\.(?:\w+\.)*f32", build(case, capability).asm["ptx"]))
    assert found == {"min.NaN.f32", "max.NaN.f32"}


def test_a_kernel_for_newer_cards_is_refused_for_an_older():
    """What compiles must be what the card can do: sm_80 converts no E4M3."""
    from nemolab.kernels.gpu import decode_bf16
    from nemolab.kernels.gpu.codes import SM_89

    _, _, types, constants, _ = CASES["decode fp8"]
    with pytest.raises(Exception, match="(?s)e4m3|fp8|PTX"):
        compile_kernel(decode_bf16._decode_kernel, types, constants | {"CARD": SM_89}, 80)


def test_signatures_must_be_whole():
    from nemolab.kernels.gpu import rms_norm

    with pytest.raises(ValueError, match=r"no type or value for \['GATED', 'BLOCK'\]; no argument of it: \['m'\]"):
        compile_kernel(rms_norm._rms_norm_kernel, CASES["rms_norm"][2] | {"m": "i32"}, {}, 90)
