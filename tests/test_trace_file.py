"""Traces and their files: what is written comes back, and nothing else is ever believed."""

import errno
import os
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from fuzz import fuzzing
from hypothesis import given
from hypothesis import strategies as st
from traces import OPTIONAL, edit_facts, equal, join_file, make_full_trace, split_file, with_meta, without

from nemolab.errors import TraceError
from nemolab.trace import Trace, check_target, is_trace, open_trace, read_trace, write_trace


@pytest.fixture
def path(tmp_path):
    return tmp_path / "toy.safetensors"


@pytest.fixture
def written(path):
    write_trace(path, make_full_trace())
    return path


# What is written comes back


@fuzzing()
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
    trace = without(make_full_trace(**sizes), *left_out)
    path = tmp_path_factory.mktemp("trace") / "t"
    assert write_trace(path, trace) == path.stat().st_size
    assert equal(read_trace(path), trace)
    assert equal(open_trace(path), trace), "whatever its name"


def test_equality_can_fail():
    trace = make_full_trace()
    other = replace(trace, weights=trace.weights + np.float32(1e-3))
    assert equal(trace, make_full_trace())
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
        make_full_trace(),
        model="модель",
        fingerprint=None,
        block_bytes=None,
        prefill_warms=True,
        ranked=False,
        taken=taken,
    )
    write_trace(path, trace)
    assert equal(read_trace(path), trace)


def test_ids_beyond_int16_come_back(path):
    trace = with_meta(make_full_trace(), n_experts=100_000)
    trace = replace(trace, experts=trace.experts.astype(np.int32) + 90_000)
    write_trace(path, trace)
    assert equal(read_trace(path), trace)


def test_other_libraries_read_the_arrays(written):
    from safetensors.numpy import load_file

    trace, found = make_full_trace(), load_file(written)
    assert found.keys() == trace.arrays.keys()
    assert all(np.array_equal(found[name], array) for name, array in trace.arrays.items())


# Nothing else is believed


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A path to write damaged files to, and the bytes of a sound one."""
    path = tmp_path_factory.mktemp("damaged") / "t"
    write_trace(path, make_full_trace())
    return path, path.read_bytes()


@fuzzing(4)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_the_same(sound, data):
    trace, path, raw = make_full_trace(), sound[0], bytearray(sound[1])
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
    write_trace(other, make_full_trace(seed=1))
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
    assert equal(read_trace(written), make_full_trace()), "the twin of the test above"


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
        write_trace(written, make_full_trace(seed=1))
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == [written.name]


def test_an_unsound_trace_is_not_written(path):
    trace = make_full_trace()
    with pytest.raises(TraceError, match="step falls"):
        write_trace(path, replace(trace, step=trace.step[::-1].copy()))
    assert os.listdir(path.parent) == []


def test_what_an_unsound_writer_wrote_is_refused(path, monkeypatch):
    trace = make_full_trace()
    with monkeypatch.context() as patch:
        patch.setattr(Trace, "check", lambda self: None)
        write_trace(path, replace(trace, phase=trace.phase + np.uint8(7)))
    with pytest.raises(
        TraceError, match="toy.safetensors: phase holds 7 to 8; phases 0 \\(prefill\\) and 1 \\(decode\\) were expected"
    ):
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
