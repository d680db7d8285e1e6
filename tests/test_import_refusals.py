"""Routing traces that are not what their form promises: refused by name and place, never "0 misses"."""

import json
import os
import struct
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
from foreign_traces import draw_routing, layer_lines, npy, route_csv, routed_npz, token_lines, zip_of

from nemolab.errors import TraceError
from nemolab.trace import open_trace

EXPERTS, WEIGHTS = draw_routing()
CSV = route_csv(EXPERTS, WEIGHTS)
TOKENS = token_lines(EXPERTS)
LAYERS = layer_lines(EXPERTS, WEIGHTS)
ROWS = CSV.splitlines()
WHOLE = route_csv(EXPERTS, WEIGHTS, short=False)


@pytest.fixture
def refuse(tmp_path):
    """Opens the content, which must be refused with a message that names the file and what `pattern` finds."""

    def check(content, pattern, **told):
        path = tmp_path / "trace.dat"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(TraceError, match=pattern) as caught:
            open_trace(path, **told)
        message = str(caught.value)
        assert message.startswith(str(path)) and "\n" not in message and len(message) < 1500 and message.isprintable()
        return message

    return check


def test_the_refusals_can_fail(tmp_path):
    """Nothing below is refused for another reason: unspoiled, each is read."""
    for content in (CSV, TOKENS, LAYERS, routed_npz(EXPERTS)):
        (tmp_path / "trace").write_bytes(content.encode() if isinstance(content, str) else content)
        assert open_trace(tmp_path / "trace").n_tokens == 7


UNKNOWN = {
    "nothing": (b"", "is empty"),
    "blanks": (b"  \n\n ", "no form that is known here"),
    "prose": (
        b"Once upon a time",
        r"no form that is known here; it begins b'Once upon a time'. Known: a trace of nemolab",
    ),
    "html": (b"<!doctype html><html>", "begins b'<!doctype"),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(40), "gzip archive: unpack it first"),
    "a bare array": (
        npy({"descr": "<i2", "fortran_order": False, "shape": (1, 1, 1)}, b"00"),
        r"np.savez\(path, routed",
    ),
    "utf-16": ("{}".encode("utf-16"), "UTF-16"),
    "pickle": (b"\x80\x04\x95", "pickle: it can run code"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    "rows alone": ("\n".join(ROWS[5:]).encode(), "without the comments above them"),
    "random": (bytes(range(130, 200)), "no form that is known"),
    "json of another form": (b'{"a": 1}\n', r"holds JSON with \['a'\], no known form"),
    "a json list": (b"[1, 2]\n", "no form that is known"),
    "half a record": (b'{"tok": 0, "layers": [[1, 2]', "line 1 is not valid JSON: the file is cut off"),
    "a pretty-printed object": (b'{\n  "tok": 0\n}\n', "line 1 is not valid JSON"),
    "no layers": (b'{"tok": 0}\n', r"line 1 has \['tok'\] but no layers"),
    "no selected_ids": (b'{"layer_idx": 0, "token_idx": 0}\n', "but no selected_ids"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_file_of_no_known_form_is_named_with_the_known_ones(refuse, name):
    message = refuse(*UNKNOWN[name])
    if name != "nothing":
        for known in ("safetensors", "route_trace v1", '"tok"', '"layer_idx"', "routed_experts[sequence, layer, k]"):
            assert known in message


def test_a_shard_of_a_checkpoint_gets_a_hint(refuse, tiny_path):
    shard = next(tiny_path.glob("*.safetensors"))
    with pytest.raises(TraceError, match="perhaps a shard of a checkpoint: `nemolab trace` makes a trace"):
        open_trace(shard)
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    refuse(struct.pack("<Q", len(header)) + header, "perhaps a shard of a checkpoint")


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        open_trace(tmp_path / "missing")
    with pytest.raises(TraceError, match="is not a file"):
        open_trace(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="is not a file"):
        open_trace(tmp_path / "pipe")


def change_row(number, column, value):
    """CSV with one field of one row changed; rows count from 0."""
    lines = list(ROWS)
    fields = lines[6 + number].split(",")
    fields[column] = value
    lines[6 + number] = ",".join(fields)
    return "\n".join(lines) + "\n"


def drop_lines(*numbers):
    return "\n".join(line for number, line in enumerate(ROWS) if number not in numbers) + "\n"


def without_column(name):
    place = ROWS[5].split(",").index(name)
    table = [line.split(",") for line in ROWS[5:]]
    return "\n".join([*ROWS[:5], *(",".join(row[:place] + row[place + 1 :]) for row in table)]) + "\n"


LAST = len(ROWS) - 1
SPOILED_CSV = {
    "version 2": (CSV.replace("v1", "v2"), "line 1 is '# route_trace v2'; '# route_trace v1' is known"),
    "no version": (CSV.replace(" v1", "", 1), "'# route_trace v1' is known"),
    "no rows": ("\n".join(ROWS[:6]) + "\n", "a header and no rows: nothing was recorded"),
    "only remarks": ("\n".join(ROWS[:5]) + "\n", "ends within its header"),
    "no model": (drop_lines(1), "no line '# model="),
    "model without n_expert": (CSV.replace("n_expert=8 ", ""), "n_expert_used=..' was expected"),
    "n_layer no number": (CSV.replace("n_layer=3", "n_layer=x"), "line 2 is"),
    "no layers": (CSV.replace("n_layer=3", "n_layer=0"), "n_layer=0 .* cannot be"),
    "more used than there are": (CSV.replace("n_expert_used=2", "n_expert_used=9"), "n_expert_used=9 cannot be"),
    "a billion layers": (CSV.replace("n_layer=3", "n_layer=1000000000"), "cannot be"),
    "digits without end": (CSV.replace("n_layer=3", "n_layer=" + "3" * 400), "line 2 is"),
    "layer line cut": (CSV.replace("# layer=1 expert_bytes=2000", "# layer=1 expert"), "line 4 is '# layer=1 expert"),
    "layer twice": (CSV.replace("# layer=1 ", "# layer=0 "), "line 4 names layer 0 a second time"),
    "layer without size": (drop_lines(3), "sizes for 2 layers and says n_layer=3; look at layer 1"),
    "layer beyond": (CSV.replace("# layer=2 ", "# layer=7 "), "look at layer 2"),
    "second header": (CSV + CSV, "begins a second header: split the files that were joined"),
    "column names again": (CSV + "\n".join(ROWS[5:]), "turn is 'turn'; a whole number was expected"),
    "second run": (CSV + "\n".join(ROWS[6:]), "prefill after decode"),
    "a model named twice": (CSV.replace("# layer=0", ROWS[1] + "\n# layer=0"), "line 3 begins a second header"),
    **{
        f"no column {name}": (without_column(name), f"has no {name}")
        for name in ("turn", "phase", "step", "layer", "slot")
    },
    "column twice": (CSV.replace("residency", "weight"), "names a column twice"),
    "turn falls": (route_csv(EXPERTS, WEIGHTS, ((2, 2), (1, 2))).replace("\n0,", "\n5,"), "turn falls from 5 to 1"),
    "phase 2": (change_row(0, 1, "2"), "line 7: phase is 2; 0 to 1 was expected"),
    "negative step": (change_row(0, 2, "-1"), "line 7: step is -1"),
    "huge step": (change_row(0, 2, "2147483648"), "line 7: step is 2147483648"),
    "step without end": (change_row(0, 2, "1" * 30), "line 7: step is '1111"),
    "another model's layers": (
        CSV.replace("n_layer=3", "n_layer=2").replace(ROWS[4] + "\n", ""),
        "layer is 2; 0 to 1 .*another model",
    ),
    "more layers than rows": (
        CSV.replace("n_layer=3", "n_layer=4").replace("turn,", "# layer=3 expert_bytes=5 dense_bytes=1\nturn,"),
        "no row of layer 3, and the header tells of experts there",
    ),
    "another model's experts": (
        CSV.replace("n_expert=8", "n_expert=6"),
        r"expert is [67]; 0 to 5 was expected: is this ano",
    ),
    "another model's k": (
        CSV.replace("n_expert_used=2", "n_expert_used=1"),
        "slot is 1; 0 to 0 was expected: is this another",
    ),
    "a larger k": (CSV.replace("n_expert_used=2", "n_expert_used=3"), "has 2 of 3 ranks: .*another model's header"),
    "k far too large": (
        CSV.replace("n_expert_used=2", "n_expert_used=8"),
        "rows are missing, or this is another model's",
    ),
    "another model's sizes": (
        CSV.replace("expert_bytes=3000", "expert_bytes=3001"),
        "has expert_bytes 3000; the header says 3001",
    ),
    "rows of a layer without experts": (
        CSV.replace("=2000", "=0").replace(",2000\n", ",0\n"),
        "layer 1 has a choice; the header says that it has no experts",
    ),
    "negative bytes": (
        "\n".join([*ROWS[:2], *ROWS[5:6], *change_row(0, 8, "-1").splitlines()[6:]]),
        "line 4: expert_bytes is -1; 0 or more",
    ),
    "negative expert": (change_row(3, 5, "-2"), "line 10: expert is -2"),
    "expert no number": (change_row(3, 5, "1.0"), "line 10: expert is '1.0'; a whole number was expected"),
    "expert empty": (change_row(3, 5, ""), "line 10: expert is ''"),
    "expert quoted": (change_row(3, 5, '"1"'), "line 10: expert is"),
    "expert with blanks": (change_row(3, 5, " 1"), "line 10: expert is ' 1'"),
    "weight no number": (change_row(3, 6, "heavy"), "line 10 is .*weight is not a number"),
    "weight without end": (change_row(3, 6, "1e999"), "line 10: weight is too large"),
    "weight beyond float32": (change_row(3, 6, "4e38"), "line 10: weight is too large"),
    "weight infinite": (change_row(3, 6, "inf"), "weight is not a number"),
    "an expert_bytes too short": (change_row(0, 8, "300"), "has expert_bytes 300; the header says 3000"),
    "too many fields": (change_row(3, 8, "0,0"), "line 10 has 10 fields; the line of column names has 9"),
    "too few fields": (
        change_row(3, 8, "0")[: change_row(3, 8, "0").index("\n0,0,2")] + "\n0,0,2\n0,0,2,0,0,1,1,1,0\n",
        "line 11 has 3 of 9 fields .*this row was cut off",
    ),
    "dropped 2": (route_csv(EXPERTS, WEIGHTS, dropped=True).replace(",1,0,1\n", ",1,0,2\n", 1), "dropped is 2; 0 to 1"),
    "rank missing": (drop_lines(LAST - 8), "step 5, layer 1 has 1 of 2 ranks: rows are missing"),
    "rank twice": (change_row(1, 4, "0"), "step 0, layer 0, slot 0 was there before"),
    "layer missing": (drop_lines(LAST - 9, LAST - 8), "step 5, layer 1 has 0 of 2 ranks: rows are missing"),
    "token missing": (drop_lines(*range(LAST - 11, LAST - 5)), "step jumps from 4 to 6 in turn 0"),
    "tokens in disorder": (
        "\n".join([*ROWS[:-12], *ROWS[-6:], *ROWS[-12:-6]]) + "\n",
        "step falls from 6 to 5 within layer 0",
    ),
    "a prompt that lost a middle layer": (drop_lines(6 + 8, 6 + 9), "step 0, layer 1 has 0 of 2 ranks"),
    "a prompt whose last layer saw all but one": (
        "".join(line for line in WHOLE.splitlines(True) if not line.startswith("0,0,1,2,")),
        "step 1, layer 2 has 0 of 2 ranks",
    ),
    "a prompt without its last token's last layer": (
        CSV.replace("\n0,0,3,2,0", "\n#").replace("\n0,0,3,2,1", "\n#"),
        "step 3, layer 2 has 0 of 2 ranks",
    ),
    "a prompt after an answer": (
        CSV.replace("\n0,1,4,", "\n0,0,4,").replace("\n0,0,3,", "\n0,1,3,"),
        "line 15: prefill after decode; a turn is a prompt and then its answer",
    ),
    "a token of both phases": (change_row(0, 1, "1"), "line 8: prefill after decode"),
    "an answer that begins too late": (
        "".join(line for line in CSV.splitlines(True) if not line.startswith("0,1,4,")),
        "line 25: after a prompt up to step 3 the answer begins at 5; 4 was expected, or 0",
    ),
    "two answers in one turn": (CSV + "".join(CSV.splitlines(True)[-6:]), "step 6, layer 0, slot 0 was there before"),
    "a step far away": (change_row(LAST - 6, 2, "2147483647"), "step jumps from 6 to 2147483647|step jumps from"),
}


@pytest.mark.parametrize("name", SPOILED_CSV)
def test_a_spoiled_route_trace_is_refused(refuse, name):
    refuse(*SPOILED_CSV[name])


def test_a_route_trace_cut_off_anywhere_is_refused(refuse):
    """Between two tokens of an answer nothing tells that more were to come; everywhere else the cut is seen."""
    whole_tokens = {len("\n".join(ROWS[: LAST + 1 - 6 * left])) + 1 for left in range(4)}
    begin = len("\n".join(ROWS[:6]))
    for end in range(begin + 1, len(CSV)):
        if end in whole_tokens or end + 1 in whole_tokens:  # the line end of a last row may be missing
            continue
        refuse(CSV[:end], "cut off|rows are missing|no row of layer|whole number|expert_bytes|not a number|no rows")


def line_of(text, number, change):
    lines = text.splitlines()
    record = json.loads(lines[number])
    change(record)
    lines[number] = json.dumps(record)
    return "\n".join(lines) + "\n"


def set_to(key, value):
    return lambda record: record.update({key: value})


def set_id(value):
    return lambda record: record["layers"][1].__setitem__(0, value)


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


def test_experts_beyond_what_is_told_are_refused(refuse):
    for content in (TOKENS, LAYERS, routed_npz(EXPERTS)):
        refuse(content, "holds expert 7; a layer is said to have 7, from 0 up", n_experts=7)
        refuse(content, "chooses 2 of 1 experts|holds expert 7", n_experts=1)


def test_more_ranks_than_experts_are_refused(refuse):
    refuse(routed_npz(np.zeros((3, 1, 2), int)), "chooses 2 of 1 experts; no more than there are")


def test_numbers_that_would_make_a_replay_count_without_end_are_refused(refuse):
    """A single huge number among the experts would be the number of blocks that every replay keeps arrays for."""
    for content in (
        CSV.replace("n_expert=8", "n_expert=2147483647"),
        line_of(TOKENS, 1, set_id(2**31 - 2)),
        routed_npz(np.array([[[0, 2**31 - 2]]])),
    ):
        refuse(content, r"layers? of 2,147,483,647 experts .*are more than 16,777,216 blocks")
    refuse(TOKENS, "more than 16,777,216 blocks", n_experts=2**30)


def set_record(number, key, value):
    return line_of(LAYERS, number, set_to(key, value))


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


HONEST = {"descr": "<i2", "fortran_order": False, "shape": (7, 3, 2)}
DATA = EXPERTS.astype("<i2").tobytes()


def packed(header, data=DATA, **options):
    return zip_of("routed_experts.npy", npy(header, data, **options))


SPOILED_NPZ = {
    "another array": (zip_of("experts.npy", npy(HONEST, DATA)), r"holds 'routed_experts' not, but \['experts.npy'\]"),
    "an empty archive": (
        zip_of("a", b"")[-22:].replace(b"\x01\x00\x01\x00", b"\x00\x00\x00\x00"),
        "no whole NumPy|not, but",
    ),
    "a pytorch archive": (zip_of("archive/data.pkl", b"\x80\x02."), "PyTorch archive: it can run code and is not read"),
    "objects": (routed_npz(EXPERTS.astype(object)), "holds Python objects or records, which are not unpickled"),
    "records": (routed_npz(np.zeros((1, 1, 1), [("a", "i4")])), "holds Python objects or records"),
    "floats": (routed_npz(EXPERTS.astype(np.float32)), "is of type '<f4'; integers were expected"),
    "bools": (routed_npz(EXPERTS > 3), "is of type '|b1'; integers"),
    "texts": (routed_npz(EXPERTS.astype("U2")), "is of type '<U2'; integers"),
    "two axes": (routed_npz(EXPERTS[:, :, 0]), r"has shape .*7, 3.*; \(tokens, layers, top_k\)"),
    "four axes": (routed_npz(EXPERTS[None]), r"has shape .*1, 7, 3, 2"),
    "no token": (routed_npz(EXPERTS[:0]), r"has shape .*0, 3, 2.*each above 0"),
    "no rank": (routed_npz(EXPERTS[:, :, :0]), "each above 0"),
    "negative": (routed_npz(np.where(EXPERTS == 7, -1, EXPERTS)), "holds -1; experts are numbers from 0 up"),
    "huge": (routed_npz(EXPERTS.astype(np.uint64) + 2**63), "holds 92233720368547758.*; experts"),
    "a header that promises more": (
        packed(HONEST | {"shape": (8, 3, 2)}),
        r"\(8, 3, 2\) takes .* bytes with its header; the",
    ),
    "a header that promises less": (packed(HONEST | {"shape": (6, 3, 2)}), r"\(6, 3, 2\) takes"),
    "a header that promises terabytes": (packed(HONEST | {"shape": (10**9, 100, 100)}), "takes 20,000,000,000,"),
    "a shape beyond 64 bits": (packed(HONEST | {"shape": (2**62, 4, 4)}), "has shape .*4611686018427387904"),
    "a shape of endless digits": (packed(repr(HONEST).replace("7, 3", "7" * 500 + ", 3")), "takes|has shape"),
    "a negative shape": (packed(HONEST | {"shape": (-7, 3, 2)}), "type, order and shape were expected"),
    "code in the header": (
        packed("{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (7, 3, 2)}"),
        "type, or",
    ),
    "no order": (packed("{'descr': '<i2', 'shape': (7, 3, 2), }"), "type, order and shape were expected"),
    "a long header": (packed(repr(HONEST) + " " * 70_000, version=2), "a header of .* the limit"),
    "a version from the future": (packed(HONEST, version=9), "begins .* a NumPy array was expected"),
    "no array": (zip_of("routed_experts.npy", b"words"), "no whole NumPy archive: .*ends early"),
    "no bytes": (zip_of("routed_experts.npy", b""), "no whole NumPy archive"),
    "packed as NumPy does not": (
        zip_of("routed_experts.npy", npy(HONEST, DATA), compression=zipfile.ZIP_BZIP2),
        "encrypted, or",
    ),
    "a bomb": (routed_npz(np.zeros((1000, 1000, 8), np.int64)), "would unpack from .* to 64,000,128 bytes"),
    "words after the magic": (b"PK\x03\x04" + b"words" * 20, "no whole NumPy archive"),
}


@pytest.mark.parametrize("name", SPOILED_NPZ)
def test_a_spoiled_archive_is_refused(refuse, name):
    refuse(*SPOILED_NPZ[name])


@pytest.mark.parametrize("compressed", [True, False])
def test_an_archive_cut_off_or_damaged_is_refused(refuse, compressed):
    whole = routed_npz(EXPERTS, compressed=compressed)
    for end in range(30, len(whole), 7):
        refuse(whole[:end], "no whole NumPy archive")
    place = whole.index(b"\x93NUMPY") + 100 if not compressed else 80
    refuse(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], "no whole NumPy archive|was expected|takes")


def test_an_archive_that_lies_about_a_member_s_size_is_refused(refuse):
    """The directory at the end of the archive says how large a member is; here it says other than it is."""
    whole = bytearray(routed_npz(EXPERTS))
    directory = whole.rindex(b"PK\x01\x02")
    for said in (1, 213, 1 << 20, (1 << 32) - 2):
        whole[directory + 24 : directory + 28] = said.to_bytes(4, "little")
        refuse(bytes(whole), "takes|would unpack|no whole NumPy")


def test_an_encrypted_archive_is_refused(refuse):
    whole = bytearray(routed_npz(EXPERTS))
    for place in (6, whole.rindex(b"PK\x01\x02") + 8):
        whole[place] |= 1
    refuse(bytes(whole), "is encrypted")


BOMBS = {
    "csv of huge steps": change_row(LAST - 6, 2, "2147483647"),
    "csv of huge k": CSV.replace("n_expert=8", "n_expert=2147483647").replace(
        "n_expert_used=2", "n_expert_used=2000000000"
    ),
    "npz of zeros": routed_npz(np.zeros((1000, 1000, 8), np.int64)),
    "npz that promises": packed(HONEST | {"shape": (10**6, 100, 100)}),
    "a line without end": '{"tok": 0, "x": "' + "a" * (1 << 22),
    "layers far apart": LAYERS.replace('"layer_idx": 2', '"layer_idx": 2147483647'),
    "tokens far away": set_record(20, "token_idx", 2**31 - 1),
    "a remark without end": CSV.replace("# layer=0", "#" + "a" * (1 << 22) + "\n# layer=0"),
    "a row without end": CSV + "1" * (1 << 23),
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_claim_of_a_file_costs_memory(tmp_path, name):
    content = BOMBS[name]
    path = tmp_path / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    (tmp_path / "plain").write_text(CSV)
    open_trace(tmp_path / "plain")  # compile before counting
    tracemalloc.start()
    try:
        if name == "layers far apart":
            open_trace(path)
        else:
            with pytest.raises(TraceError):
                open_trace(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 60 << 20, f"{peak >> 20} MiB"


def test_nothing_in_an_archive_is_run(tmp_path):
    """A pickle that would leave a mark, as routed_experts and beside it."""
    import pickle

    mark = tmp_path / "mark"

    class Mark:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    with np.errstate(all="ignore"):
        np.savez(tmp_path / "inside.npz", routed_experts=np.array([[[Mark()]]], object))
        np.savez(tmp_path / "beside.npz", routed_experts=EXPERTS, other=np.array([Mark()], object))
    with pytest.raises(TraceError, match="not unpickled"):
        open_trace(tmp_path / "inside.npz")
    assert open_trace(tmp_path / "beside.npz").n_tokens == 7
    assert not mark.exists()
    pickle.loads(pickle.dumps(Mark()))
    assert mark.exists(), "the mark would have been left"


def test_a_message_cannot_steer_a_terminal(refuse):
    evil = "\x1b[31m\x07\r\u202e"
    refuse(CSV.replace("0,1,4,1,0,", f"0,1,4,1,{evil},"), "slot is '")
    refuse(CSV.replace("# route_trace v1", f"# route_trace {evil}"), "line 1 is '")
    refuse(CSV.replace("turn,phase", f"{evil},phase"), "has no turn")
    refuse(json.dumps({evil: 1}) + "\n", "holds JSON with")
    refuse(json.dumps({"tok": evil, "layers": [[1]]}) + "\n", "'tok' is")
    refuse(zip_of(evil, b"x"), "not, but")
    refuse(zip_of("routed_experts.npy", npy("{'descr': '" + "\x1b[31m" + "'}")), "has the header")


def test_a_model_s_name_cannot_steer_a_terminal(tmp_path):
    path = tmp_path / "trace"
    path.write_text(CSV.replace("Tiny-MoE", "Ti\x1bny\x07" + "x" * 500))
    name = open_trace(path).meta.model
    assert name.isprintable() and name.startswith("Ti?ny?") and len(name) == 100


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path = tmp_path / "trace"
    path.write_text(CSV)
    path.chmod(0)
    with pytest.raises(TraceError, match="cannot be read: Permission denied"):
        open_trace(path)


def test_opening_needs_no_pandas_and_no_torch_kernels():
    """`open_trace` stays quick to import: nothing here needs a data frame."""
    code = "import sys, nemolab.trace; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
