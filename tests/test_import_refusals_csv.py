"""A route_trace that is not what its header promises is refused by line and column."""

from functools import partial

import pytest
from foreign_traces import route_csv
from spoiled_traces import CSV, EXPERTS, LAST, ROWS, WEIGHTS, change_row, refuse_at

WHOLE = route_csv(EXPERTS, WEIGHTS, short=False)


@pytest.fixture
def refuse(tmp_path):
    return partial(refuse_at, tmp_path / "trace.dat")


def drop_lines(*numbers):
    return "\n".join(line for number, line in enumerate(ROWS) if number not in numbers) + "\n"


def without_column(name):
    place = ROWS[5].split(",").index(name)
    table = [line.split(",") for line in ROWS[5:]]
    return "\n".join([*ROWS[:5], *(",".join(row[:place] + row[place + 1 :]) for row in table)]) + "\n"


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
    short = route_csv(EXPERTS[:4], WEIGHTS[:4], ((2, 2),))
    rows = short.splitlines()
    whole_tokens = {len("\n".join(rows[: len(rows) - 6 * left])) + 1 for left in range(3)}
    for end in range(len("\n".join(rows[:6])) + 1, len(short)):
        if end in whole_tokens or end + 1 in whole_tokens:  # the line end of a last row may be missing
            continue
        refuse(short[:end], "cut off|rows are missing|no row of layer|whole number|expert_bytes|not a number|no rows")
