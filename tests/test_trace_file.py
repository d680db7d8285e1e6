"""Traces and their files: what is written comes back, and nothing else is ever believed."""

import errno
import os
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import OPTIONAL, edit_facts, equal, join_file, make_trace, split_file, with_meta, without

from nemolab.errors import TraceError
from nemolab.trace import DECODE, PREFILL, Trace, check_target, is_trace, open_trace, read_trace, write_trace

FUZZ = int(os.environ.get("NEMOLAB_FUZZ", "30"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "toy.safetensors"


@pytest.fixture
def written(path):
    write_trace(path, make_trace())
    return path


# What is written comes back


@settings(max_examples=FUZZ, deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {
            "prompt": st.integers(0, 4),
            "decode": st.integers(1, 5),
            "conversations": st.integers(1, 3),
            "layers": st.integers(1, 5),
            "experts": st.integers(3, 12),
            "top_k": st.integers(1, 3),
            "seed": st.integers(0, 9),
        }
    ),
    left_out=st.sets(st.sampled_from(OPTIONAL)),
)
def test_a_trace_comes_back_bit_for_bit(tmp_path_factory, sizes, left_out):
    trace = without(make_trace(**sizes), *left_out)
    path = tmp_path_factory.mktemp("trace") / "t"
    assert write_trace(path, trace) == path.stat().st_size
    assert equal(read_trace(path), trace)
    assert equal(open_trace(path), trace), "whatever its name"


def test_equality_can_fail():
    trace = make_trace()
    other = replace(trace, weights=trace.weights + np.float32(1e-3))
    assert equal(trace, make_trace())
    assert not equal(trace, other) and not equal(trace, without(trace, "weights"))
    assert not equal(trace, with_meta(trace, fingerprint=None))


def test_facts_of_every_kind_come_back(path):
    taken = {
        "kind": "text",
        "conversations": ["Ä", "日本"],
        "cache": {"slots": 3, "start": None},
        "rate": 0.1,
        "on": True,
    }
    trace = with_meta(
        make_trace(), model="модель", fingerprint=None, block_bytes=None, prefill_warms=True, ranked=False, taken=taken
    )
    write_trace(path, trace)
    assert equal(read_trace(path), trace)


def test_ids_beyond_int16_come_back(path):
    trace = with_meta(make_trace(), n_experts=100_000)
    trace = replace(trace, experts=trace.experts.astype(np.int32) + 90_000)
    write_trace(path, trace)
    assert equal(read_trace(path), trace)


def test_other_libraries_read_the_arrays(written):
    from safetensors.numpy import load_file

    trace, found = make_trace(), load_file(written)
    assert found.keys() == trace.arrays.keys()
    assert all(np.array_equal(found[name], array) for name, array in trace.arrays.items())


# Nothing else is believed


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A path to write damaged files to, and the bytes of a sound one."""
    path = tmp_path_factory.mktemp("damaged") / "t"
    write_trace(path, make_trace())
    return path, path.read_bytes()


@settings(max_examples=10 * FUZZ, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_the_same(sound, data):
    trace, path, raw = make_trace(), sound[0], bytearray(sound[1])
    at = data.draw(st.integers(0, len(raw) - 1))
    kind = data.draw(st.sampled_from(["flip", "byte", "cut", "longer", "insert", "remove"]))
    if kind == "flip":
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "byte":
        raw[at] = data.draw(st.integers(0, 255))
    elif kind == "cut":
        del raw[at:]
    elif kind == "longer":
        raw += data.draw(st.binary(min_size=1, max_size=40))
    elif kind == "insert":
        raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    else:
        del raw[at : at + data.draw(st.integers(1, 8))]
    path.write_bytes(raw)
    try:
        found = read_trace(path)
    except TraceError as problem:
        assert str(path) in str(problem)
        return
    assert equal(found, trace), kind


def test_a_header_of_another_trace_is_refused(written, tmp_path):
    other = tmp_path / "other"
    write_trace(other, make_trace(seed=1))
    header, _ = split_file(other)
    _, data = split_file(written)
    join_file(written, header, data)
    with pytest.raises(TraceError, match="sha256 is said to be .* or this header belongs to another trace"):
        read_trace(written)


def test_two_arrays_in_each_others_place_are_refused(written):
    header, data = split_file(written)
    header["active_neurons"], header["active_groups"] = header["active_groups"], header["active_neurons"]
    join_file(written, header, data)
    with pytest.raises(TraceError, match="sha256"):
        read_trace(written)


def test_a_file_cut_anywhere_is_refused(written):
    raw = written.read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(raw) // 2, len(raw) - 1}:
        written.write_bytes(raw[:length])
        with pytest.raises(TraceError, match=str(written)):
            read_trace(written)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"format_version": 2}, "format_version is 2; this nemolab reads 1"),
        ({"format_version": True}, "format_version is True"),
        ({"format_version": None}, "format_version is None"),
        ({"tokens": 15}, r"experts has shape \(14, 4, 2\); \(15, 4, 2\) was expected for 15 tokens"),
        ({"layers": 3}, r"experts has shape \(14, 4, 2\); \(14, 3, 2\) was expected"),
        ({"top_k": 3}, r"top-3"),
        ({"tokens": 0}, "tokens is 0; 1 or more was expected: an empty trace tells nothing"),
        ({"layers": -1}, "layers is -1"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"n_experts": 9}, "sha256"),
        ({"n_experts": "8"}, "sha256"),
        ({"model": "another"}, "sha256"),
        ({"fingerprint": "another"}, "sha256"),
        ({"block_bytes": 4096}, "block_bytes is 4096; a list of sizes or null"),
        ({"taken": {}}, "sha256"),
        ({"sha256": 5}, "sha256"),
        ({"sha256": None}, r"fields missing: \['sha256'\], unknown: none"),
        ({"ranked": None}, r"fields missing: \['ranked'\]"),
        ({"note": "hello"}, r"fields missing: none, unknown: \['note'\]"),
    ],
)
def test_facts_that_were_changed_are_refused(written, changed, message):
    edit_facts(written, **changed)
    with pytest.raises(TraceError, match=message):
        read_trace(written)


def test_facts_written_as_they_were_are_read(written):
    edit_facts(written, model="toy")
    assert equal(read_trace(written), make_trace()), "the twin of the test above"


@pytest.mark.parametrize(
    "name, entry, message",
    [
        ("experts", {"dtype": "U16"}, "experts is U16; I16 or I32 was expected"),
        ("weights", {"dtype": "I32"}, "weights is I32; F32 was expected"),
        ("phase", {"dtype": "I8"}, "phase is I8; U8 was expected"),
        ("experts", {"shape": [14, 8]}, r"experts has shape \(14, 8\); \(14, 4, 2\) was expected"),
        ("experts", {"shape": [14, 2, 4]}, r"experts has shape \(14, 2, 4\)"),
        ("guesses", {"shape": [14, 8, 4]}, r"guesses has shape \(14, 8, 4\); \(14, 4, 'n'\) was expected"),
        ("step", {"shape": [7, 2]}, r"step has shape \(7, 2\); \(14,\) was expected"),
    ],
)
def test_types_and_shapes_that_do_not_fit_are_refused(written, name, entry, message):
    header, data = split_file(written)
    header[name] |= entry
    join_file(written, header, data)
    with pytest.raises(TraceError, match=message):
        read_trace(written)


def test_missing_and_unknown_arrays_are_named(written):
    header, data = split_file(written)
    header["steps"] = header.pop("step")
    join_file(written, header, data)
    with pytest.raises(TraceError, match="'step' is missing; it holds active_groups"):
        read_trace(written)
    header["step"] = header.pop("steps")
    header["gates"] = header.pop("weights")
    join_file(written, header, data)
    with pytest.raises(TraceError, match="'gates' is no array of a trace; known are experts, phase"):
        read_trace(written)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty"),
        (b"{}", "has 2 bytes"),
        (b"turn,phase,step\n0,0,0\n" * 20, "no safetensors|not safetensors|is a text file"),
        (b"\x80\x04" + bytes(100), "pickle"),
    ],
)
def test_other_files_are_refused_as_what_they_are(path, content, message):
    path.write_bytes(content)
    assert not is_trace(path)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_safetensors_file_of_others_is_no_trace(path, tiny_path):
    for other in sorted(tiny_path.glob("*.safetensors"))[:1]:
        assert not is_trace(other)
        with pytest.raises(TraceError, match="no 'nemolab.trace' in its header .* this is no trace of nemolab"):
            read_trace(other)
    with pytest.raises(TraceError, match="nowhere"):
        read_trace(path.with_name("nowhere"))


def test_nothing_is_allocated_on_the_word_of_a_header(written):
    raw = written.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = split_file(written)
    huge = 1 << 40
    header["experts"]["shape"] = [huge, 4, 2]
    header["experts"]["data_offsets"][1] = header["experts"]["data_offsets"][0] + huge * 16
    tracemalloc.start()
    try:
        with pytest.raises(TraceError):
            read_trace(join_file(written, header, data))
        written.write_bytes(struct.pack("<Q", huge) + raw[8:])
        with pytest.raises(TraceError, match="its header has 1,099,511,627,776 bytes"):
            read_trace(written)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert length < 1 << 16


# Writing


def test_a_file_appears_only_when_it_is_whole(written, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = written.read_bytes()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(written, make_trace(seed=1))
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


def test_an_unsound_trace_is_not_written(path):
    trace = make_trace()
    with pytest.raises(TraceError, match="step falls"):
        write_trace(path, replace(trace, step=trace.step[::-1].copy()))
    assert os.listdir(path.parent) == []


def test_what_an_unsound_writer_wrote_is_refused(path, monkeypatch):
    trace = make_trace()
    with monkeypatch.context() as patch:
        patch.setattr(Trace, "check", lambda self: None)
        write_trace(path, replace(trace, phase=trace.phase + np.uint8(7)))
    with pytest.raises(TraceError, match="toy.safetensors: phase holds 7 to 8; phases 0 \\(prefill\\) and 1 \\(decode\\) were expected"):
        read_trace(path)


def test_targets_are_checked_before_anything_runs(tmp_path, written):
    check_target(written)
    check_target(tmp_path / "new")
    (tmp_path / "notes.txt").write_text("mine")
    for target, message in (
        (tmp_path / "notes.txt", "exists and is no trace"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "trace", "no is no folder"),
        (written / "trace", "is no folder"),
    ):
        with pytest.raises(TraceError, match=message):
            check_target(target)


# What a trace must be


def spoil(name, edit):
    def spoiled(trace):
        array = getattr(trace, name).copy()
        return replace(trace, **{name: edit(array)})

    return spoiled


def put(at, value):
    def edit(array):
        array[at] = value
        return array

    return edit


UNSOUND = {
    "experts has shape": lambda t: replace(t, experts=t.experts[0]),
    "without a single record": lambda t: replace(t, **{n: a[:0] for n, a in t.arrays.items()}),
    "without a single lookup": spoil("experts", lambda a: np.full_like(a, -1)),
    "experts is int64; int16 or int32": spoil("experts", lambda a: a.astype(np.int64)),
    "experts holds -1 to 8; ids from 0 to 7, or -1 for none, were expected": spoil("experts", put((1, 1), (-1, 8))),
    "experts holds -2 to": spoil("experts", put((1, 1), -2)),
    "weights is float64": spoil("weights", lambda a: a.astype(float)),
    "weights holds nan at token 2, layer 1, rank 0": spoil("weights", put((2, 1, 0), np.nan)),
    r"weights has shape \(13, 4, 2\); \(14, 4, 2\)": spoil("weights", lambda a: a[1:]),
    r"position has shape \(14, 1\)": spoil("position", lambda a: a[:, None]),
    "phase is list; uint8": lambda t: replace(t, phase=t.phase.tolist()),
    "phase is NoneType": lambda t: replace(t, phase=None),
    "phase holds 0 to 2": spoil("phase", put(13, 2)),
    "conversation holds -1": spoil("conversation", put(slice(0, 7), -1)),
    "position goes from 2 to 2 at token 3 of conversation 0; it must rise: are these several": spoil(
        "position", put(3, 2)
    ),
    "position goes from 6 to 0 at token 7 of conversation 0": spoil("conversation", lambda a: a * 0),
    "step falls from 1 to 0 at token 4": spoil("step", put(4, 0)),
    "step 0 mixes phases or conversations": spoil("step", put(slice(0, 4), 0)),
    "step 4 mixes": spoil("step", put(slice(7, 10), 4)),
    "token_ids holds -5": spoil("token_ids", put(0, -5)),
    "guesses holds -1 to 8": spoil("guesses", put((0, 1, 0), 8)),
    "guesses holds guesses for layer 0; no layer is 1 before it": spoil("guesses", put((0, 0), 0)),
    "guesses_3 holds guesses for layer 2": spoil("guesses_3", put((5, 2, 0), 0)),
    r"guesses_2 has shape \(14, 3, 8\)": spoil("guesses_2", lambda a: a[:, 1:]),
    "active_groups holds -2": spoil("active_groups", put((0, 0, 0), -2)),
    "live_misses has counts at token 1, which is not the last of its step": spoil("live_misses", put((1, 2), 0)),
    "model is 5; a str": lambda t: with_meta(t, model=5),
    "n_experts is True; a int": lambda t: with_meta(t, n_experts=True),
    "n_experts is 0": lambda t: with_meta(t, n_experts=0),
    "fingerprint is 7": lambda t: with_meta(t, fingerprint=7),
    "block_bytes names 1 layers; experts has 4": lambda t: with_meta(t, block_bytes=(4096,)),
    r"block_bytes is \(0,": lambda t: with_meta(t, block_bytes=(0,) * 4),
    "taken cannot be written as JSON": lambda t: with_meta(t, taken={"rate": float("nan")}),
}


@pytest.mark.parametrize("message", UNSOUND)
def test_unsound_traces_are_refused_by_field(message):
    with pytest.raises(TraceError, match=message):
        UNSOUND[message](make_trace()).check()


def test_sound_traces_pass():
    make_trace().check()
    without(make_trace(), *OPTIONAL).check()
    one = make_trace(prompt=0, decode=1, conversations=1, layers=1)
    replace(one, experts=np.where(np.arange(2) == 0, one.experts, -1).astype(np.int16)).check()


def test_a_trace_of_another_model_is_refused():
    trace = make_trace()
    trace.check_model("toy's", 4, 8, 2)
    trace.check_model(None, 4, 8, 2)
    with_meta(trace, fingerprint=None).check_model("another's", 4, 8, 2)
    for layers, experts, top_k in ((5, 8, 2), (4, 16, 2), (4, 8, 3)):
        with pytest.raises(TraceError, match=f"another model: .* {layers} of {experts}, top-{top_k} were expected"):
            trace.check_model("toy's", layers, experts, top_k)
    with pytest.raises(TraceError, match='its fingerprint is "toy\'s", "another\'s" was expected'):
        trace.check_model("another's", 4, 8, 2)


# Looking at it


def test_the_frame_has_a_row_for_each_lookup():
    trace = make_trace()
    experts = trace.experts.copy()
    experts[0, 3] = -1
    trace = replace(trace, experts=experts)
    frame = trace.frame()
    assert len(frame) == (experts >= 0).sum() == trace.n_tokens * 4 * 2 - 2
    assert list(frame.columns) == [
        "token", "layer", "rank", "expert", "weight", "active_neurons", "active_groups", "phase", "conversation",
        "position", "step",
    ]  # fmt: skip
    row = frame[(frame.token == 9) & (frame.layer == 2) & (frame["rank"] == 1)].iloc[0]
    assert (row.expert, row.phase, row.conversation, row.position, row.step) == (experts[9, 2, 1], "prefill", 1, 2, 5)
    assert row.weight == trace.weights[9, 2, 1] and row.active_groups == trace.active_groups[9, 2, 1]
    assert set(without(trace, "weights").frame().columns) == set(frame.columns) - {"weight"}


def test_selecting_keeps_whole_tokens():
    trace = make_trace()
    part = trace.select(conversation=1, phase="decode")
    part.check()
    assert part.n_tokens == 4 and set(part.conversation) == {1} and set(part.phase) == {DECODE}
    assert trace.select(conversation=[0, 1]).n_tokens == trace.n_tokens
    assert trace.select(phase=PREFILL).n_tokens == 6
    for wrong in ({"conversation": 2}, {"phase": "both"}, {"phase": 2}):
        with pytest.raises(TraceError):
            trace.select(**wrong)


def test_a_trace_introduces_itself():
    assert repr(make_trace()) == (
        "Trace of toy: 14 tokens x 4 MoE layers x top-2 of 8, 2 conversation(s), with weights, guesses, guesses_2, "
        "guesses_3, active_neurons, active_groups, token_ids, live_misses"
    )
