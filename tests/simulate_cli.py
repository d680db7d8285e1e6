"""`nemolab simulate` called by tests: on a trace that is written to the working folder first, or on a path."""

import json

from faults import run_cli

from nemolab.trace import write_trace


def call(trace, *words) -> tuple[int, str, str]:
    """(exit code, stdout, stderr). A trace is written as toy.trace."""
    if not isinstance(trace, str):
        write_trace("toy.trace", trace)
        trace = "toy.trace"
    return run_cli("simulate", trace, *words)


def ask(trace, *words) -> dict:
    """The JSON document."""
    code, out, err = call(trace, *words, "--json")
    assert code == 0, err
    return json.loads(out)


def rows_of(data, phase="decode", **wanted) -> list[dict]:
    return [row for row in data["rows"] if row["phase"] == phase and wanted.items() <= row.items()]


def refuse(answer, *words) -> int:
    """The exit code of an answer that is one line on stderr with all of these words."""
    code, out, err = answer
    assert code in (1, 2) and not out and err.startswith("nemolab: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, err
    return code
