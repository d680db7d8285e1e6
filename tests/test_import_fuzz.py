"""Whatever becomes of a file on its way: it is refused with a TraceError or it is a trace that passes its check."""

import random
from pathlib import Path

import numpy as np
import pytest
from foreign_traces import draw_routing, layer_lines, route_csv, routed_npz, token_lines
from fuzz import fuzzing
from hypothesis import given
from hypothesis import strategies as st

from nemolab.errors import TraceError
from nemolab.trace import Trace, open_trace, write_trace

EXPERTS, WEIGHTS = draw_routing(tokens=5)
FORMS = {
    "csv": route_csv(EXPERTS, WEIGHTS, ((3, 1), (1, 0)), dropped=True).encode(),
    "tokens": token_lines(EXPERTS).encode(),
    "layers": layer_lines(EXPERTS, WEIGHTS).encode(),
    "npz": routed_npz(EXPERTS),
    "npz, stored": routed_npz(EXPERTS, compressed=False),
}
# What breaks parsers: numbers at the ends of types, words of numbers, brackets, line ends, nothing.
SNIPPETS = [
    b"", b"\x00", b"\n", b"\r", b",", b"-", b"-1", b"0", b"1", b"9" * 19, b"2147483647", b"2147483648", b"1e999",
    b"nan", b"NaN", b"Infinity", b"true", b"null", b"[", b"]", b"[[", b"]]", b"{", b"}", b'"', b"'", b"#", b"(", b")",
    b"# layer=0 ", b"\xff", b"\xef\xbb\xbf", b"1.5", b" ", b"=", b"PK\x01\x02", b"'|O'",
    b"\n# model=x arch= n_layer=1 n_expert=1 n_expert_used=1\n",
]  # fmt: skip

edits = st.lists(
    st.tuples(
        st.sampled_from(["insert", "replace", "delete", "swap", "repeat", "flip", "cut"]),
        st.integers(0, 10_000),
        st.integers(0, 10_000),
        st.sampled_from(SNIPPETS),
    ),
    min_size=1,
    max_size=4,
)


def spoil(content: bytes, changes) -> bytes:
    for kind, first, second, snippet in changes:
        length = len(content)
        if not length:
            break
        at, size = first % length, 1 + second % 12
        if kind == "insert":
            content = content[:at] + snippet + content[at:]
        elif kind == "replace":
            content = content[:at] + snippet + content[at + size :]
        elif kind == "delete":
            content = content[:at] + content[at + size :]
        elif kind == "repeat":
            content = content[:at] + content[at : at + 40 * size] * 2 + content[at + 40 * size :]
        elif kind == "flip":
            content = content[:at] + bytes([content[at] ^ (1 << second % 8)]) + content[at + 1 :]
        elif kind == "cut":
            content = content[:at]
        else:
            lines = content.split(b"\n")
            one, other = first % len(lines), second % len(lines)
            lines[one], lines[other] = lines[other], lines[one]
            content = b"\n".join(lines)
    return content


def open_or_refuse(path: Path, content: bytes) -> Trace | None:
    path.write_bytes(content)
    try:
        trace = open_trace(path)
    except TraceError as error:
        assert str(error).isprintable() and len(str(error)) < 2000
        return None
    trace.check()
    return trace


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "trace"


@pytest.fixture(scope="module")
def ours(path):
    write_trace(path, open_or_refuse(path, FORMS["csv"]))
    return path.read_bytes()


@pytest.mark.parametrize("form", FORMS)
@fuzzing(3)
@given(changes=edits)
def test_a_spoiled_file_is_refused_or_is_a_trace(path, form, changes):
    open_or_refuse(path, spoil(FORMS[form], changes))


@fuzzing(3)
@given(changes=edits)
def test_a_spoiled_file_of_ours_is_refused_or_is_a_trace(path, ours, changes):
    open_or_refuse(path, spoil(ours, changes))


@fuzzing(3)
@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"# route_trace v1\n", b'{"tok": ', b"PK\x03\x04", b"\x08\0\0\0\0\0\0\0{"]),
)
def test_noise_is_refused(path, noise, start):
    assert open_or_refuse(path, start + noise) is None


def test_the_edits_reach_both_ends(path):
    """The fuzzing above can fail: of random edits some leave a trace, most do not, in every form."""
    for form, content in FORMS.items():
        rng = random.Random(form)
        outcomes = set()
        for _ in range(300):
            change = rng.choice(["insert", "replace", "flip", "swap"]), rng.randrange(9999), rng.randrange(9999), b"1"
            trace = open_or_refuse(path, spoil(content, [change]))
            outcomes.add(trace is not None and np.array_equal(trace.experts, open_or_refuse(path, content).experts))
            if len(outcomes) == 2:
                break
        assert outcomes == {True, False}, form


def test_an_error_of_another_kind_would_be_seen(path, monkeypatch):
    from nemolab.trace.importers import token_jsonl

    monkeypatch.setattr(token_jsonl, "read", lambda path, overrides: {}["a fault of ours"])
    with pytest.raises(KeyError):
        open_or_refuse(path, FORMS["tokens"])
