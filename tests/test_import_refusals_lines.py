"""JSON lines of tokens and of layers that are not what their form promises are refused by line and name."""

import json
from functools import partial

import pytest
from foreign_traces import layer_lines
from spoiled_traces import EXPERTS, LAYERS, TOKENS, WEIGHTS, line_of, refuse_at, set_id, set_record, set_to


@pytest.fixture
def refuse(tmp_path):
    return partial(refuse_at, tmp_path / "trace.dat")


DEEP = '{"tok": 0, "layers": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
SPOILED_TOKENS = {
    "tok falls": (
        line_of(TOKENS, 3, set_to("tok", 1)),
        "line 4 'tok' goes from 2 to 1; each follows .*file of its own",
    ),
    "tok stays": (line_of(TOKENS, 3, set_to("tok", 2)), "line 4 'tok' goes from 2 to 2"),
    "tok jumps": (line_of(TOKENS, 3, set_to("tok", 9)), "line 4 'tok' goes from 2 to 9"),
    "tok begins anew": (TOKENS + TOKENS, "line 8 'tok' goes from 6 to 0"),
    "tok negative": (line_of(TOKENS, 0, set_to("tok", -1)), "line 1 'tok' is -1; a whole number from 0 up"),
    "tok true": (line_of(TOKENS, 1, set_to("tok", True)), "line 2 'tok' is True"),
    "tok a text": (line_of(TOKENS, 1, set_to("tok", "1")), "line 2 'tok' is '1'"),
    "tok a fraction": (line_of(TOKENS, 1, set_to("tok", 1.0)), r"line 2 'tok' is 1\.0"),
    "tok huge": (line_of(TOKENS, 1, set_to("tok", 2**31)), "line 2 'tok' is 2147483648"),
    "tok gone": (
        line_of(TOKENS, 1, lambda record: record.pop("tok")),
        r"line 2 'tok' is missing, there are \['layers'\]",
    ),
    "layers gone": (line_of(TOKENS, 1, lambda record: record.pop("layers")), "line 2 'layers' is None"),
    "layers no lists": (
        line_of(TOKENS, 1, set_to("layers", [1, 2, 3])),
        r"line 2 'layers' is \[1, 2, 3\]; a list of lists",
    ),
    "no layer": (line_of(TOKENS, 1, set_to("layers", [])), r"line 2 'layers' is \[\]"),
    "empty layers": (line_of(TOKENS, 0, set_to("layers", [[], []])), r"line 1 'layers' is \[\]; a list of experts"),
    "a layer missing": (
        line_of(TOKENS, 1, lambda record: record["layers"].pop()),
        "line 2 has 2 layers of .*have 3 of 2",
    ),
    "a rank missing": (
        line_of(TOKENS, 1, lambda record: record["layers"][1].pop()),
        r"has 3 layers of \[1, 2\] experts",
    ),
    "id true": (line_of(TOKENS, 1, set_id(True)), "line 2 'layers' holds True; experts are whole numbers"),
    "id null": (line_of(TOKENS, 1, set_id(None)), "line 2 'layers' holds None"),
    "id a fraction": (line_of(TOKENS, 1, set_id(1.5)), r"line 2 'layers' holds 1\.5"),
    "id a text": (line_of(TOKENS, 1, set_id("1")), "line 2 'layers' holds '1'"),
    "id a list": (line_of(TOKENS, 1, set_id([1])), r"line 2 'layers' holds \[1\]"),
    "id negative": (line_of(TOKENS, 1, set_id(-1)), "line 2 'layers' holds -1"),
    "id huge": (line_of(TOKENS, 1, set_id(2**31)), "line 2 'layers' holds 2147483648"),
    "id without end": (TOKENS.replace("[[", "[[" + "9" * 5000 + ",", 1), "line 1 is not valid JSON .*digits"),
    "NaN": (TOKENS.replace("[[", "[[NaN, ", 1), "line 1 holds NaN, which JSON does not know"),
    "Infinity": (TOKENS.replace("[[", "[[-Infinity, ", 1), "line 1 holds -Infinity"),
    "a name twice": (TOKENS.replace('{"tok": 3', '{"tok": 3, "tok": 3'), "line 4 names 'tok' twice"),
    "deep": (DEEP, "line 1 is nested too deeply"),
    "a line without end": ('{"tok": 0, "x": "' + "a" * (1 << 20) + '"}', "line 1 has more than 1,048,576 bytes"),
    "a later line without end": (TOKENS + "[" * (1 << 21), "line 8 has more than 1,048,576 bytes"),
    "no object": (TOKENS + "[1]\n", r"line 8 is \[1\]; an object"),
    "words": (TOKENS + "done.\n", "line 8 is not valid JSON"),
    "no utf-8": (TOKENS.encode() + b'{"tok": 7, "x": "\xff"}', "line 8 is not UTF-8 at byte 17"),
    "record of the other form": (TOKENS + LAYERS, "line 8 'tok' is missing"),
}


@pytest.mark.parametrize("name", SPOILED_TOKENS)
def test_spoiled_lines_of_tokens_are_refused(refuse, name):
    refuse(*SPOILED_TOKENS[name])


@pytest.mark.parametrize("text", [TOKENS, LAYERS], ids=["tokens", "layers"])
def test_json_lines_cut_off_within_a_line_are_refused(refuse, text):
    last = text.rstrip().rfind("\n") + 1
    for end in range(last + 1, len(text) - 1):
        refuse(text[:end], "the file is cut off")


def shift_layer(layer, *, by, first):
    """The tokens of one layer counted from another number than those of the others."""
    records = [json.loads(line) for line in layer_lines(EXPERTS, WEIGHTS, first=first).splitlines()]
    for record in records:
        record["token_idx"] += by * (record["layer_idx"] == layer)
    return "\n".join(map(json.dumps, records)) + "\n"


SPOILED_LAYERS = {
    "token falls": (set_record(9, "token_idx", 1), "line 10: 'token_idx' goes from 2 to 1 in layer 0; each follows"),
    "token jumps": (set_record(20, "token_idx", 9), "line 21: 'token_idx' goes from 5 to 9 in layer 2"),
    "tokens begin anew": (LAYERS + LAYERS, "line 22: 'token_idx' goes from 6 to 0 in layer 0; .*file of its own"),
    "a record missing": (LAYERS.replace(LAYERS.splitlines()[10] + "\n", ""), "'token_idx' goes from 2 to 4 in layer 1"),
    "the first missing": (
        "".join(LAYERS.splitlines(True)[1:]),
        "layer 0 has 6 tokens from 1 on; 7 from 0 on were expected",
    ),
    "the last missing": (
        "".join(LAYERS.splitlines(True)[:-1]),
        "layer 2 has 6 tokens from 0 on; 7 .*the file is cut off",
    ),
    "a layer that is one token early": (
        shift_layer(1, by=-1, first=1),
        "layer 1 has 7 tokens from 0 on; 7 from 1 on were expected",
    ),
    "a record twice": (LAYERS + LAYERS.splitlines()[-1] + "\n", "line 22: 'token_idx' goes from 6 to 6 in layer 2"),
    "a layer once": (set_record(4, "layer_idx", 7), "'token_idx' goes from 0 to 2 in layer 1"),
    "layer negative": (set_record(4, "layer_idx", -1), "line 5 'layer_idx' is -1"),
    "layer true": (set_record(4, "layer_idx", True), "line 5 'layer_idx' is True"),
    "token a fraction": (set_record(4, "token_idx", 1.0), r"line 5 'token_idx' is 1\.0"),
    "ids gone": (line_of(LAYERS, 4, lambda record: record.pop("selected_ids")), "line 5 'selected_ids' is None"),
    "ids a number": (set_record(4, "selected_ids", 3), "line 5 'selected_ids' is 3; a list of experts"),
    "ids empty": (set_record(4, "selected_ids", []), r"line 5 'selected_ids' is \[\]"),
    "ids of another k": (set_record(4, "selected_ids", [1]), "line 5 has 1 experts; the lines before have 2"),
    "id true": (set_record(4, "selected_ids", [True, 2]), "line 5 'selected_ids' holds True"),
    "id negative": (set_record(4, "selected_ids", [1, -2]), "line 5 'selected_ids' holds -2"),
    "weights gone": (line_of(LAYERS, 4, lambda record: record.pop("gate_weights")), "line 5 lacks 'gate_weights'"),
    "weights null": (set_record(4, "gate_weights", None), "line 5 lacks 'gate_weights'"),
    "weights appear": (
        line_of(layer_lines(EXPERTS), 4, set_to("gate_weights", [1, 2])),
        "line 5 has 'gate_weights', unlike",
    ),
    "weights of another k": (set_record(4, "gate_weights", [0.5]), r"line 5 'gate_weights' is \[0\.5\]; 2 numbers"),
    "weights a number": (set_record(4, "gate_weights", 0.5), r"line 5 'gate_weights' is 0\.5"),
    "weight true": (set_record(4, "gate_weights", [True, 0.1]), "line 5 'gate_weights' is .*float32"),
    "weight a text": (set_record(4, "gate_weights", ["a", 0.1]), "line 5 'gate_weights' is .*float32"),
    "weight NaN": (set_record(4, "gate_weights", [float("nan"), 0.1]), "line 5 holds NaN"),
    "weight infinite": (
        LAYERS.replace('"gate_weights": [', '"gate_weights": [1e999, ', 1).replace("]}", "]}", 1),
        "line 1 'gate_weights'",
    ),
    "weight beyond float32": (set_record(4, "gate_weights", [4e38, 0.1]), "line 5 'gate_weights' is .*float32"),
    "weight a huge integer": (set_record(4, "gate_weights", [10**400, 0]), "line 5 'gate_weights' is .*float32"),
    "a name twice": (
        LAYERS.replace('"token_idx": 1,', '"token_idx": 1, "token_idx": 1,', 1),
        "line 4 names 'token_idx' twice",
    ),
    "a record of the other form": (LAYERS + TOKENS, "line 22 'layer_idx' is missing"),
}


@pytest.mark.parametrize("name", SPOILED_LAYERS)
def test_spoiled_lines_of_layers_are_refused(refuse, name):
    refuse(*SPOILED_LAYERS[name])
