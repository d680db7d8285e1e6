"""Safetensors headers: every malformed one is refused in words, before anything large is allocated."""

import json
import os
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from patching import write_raw
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nemolab.checkpoint.reading import read_range, read_range_into
from nemolab.checkpoint.safetensors_header import load_header, read_header
from nemolab.errors import CheckpointError

F32_2x2 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert path.name in message and "\n" not in message
    return message


def test_a_file_of_the_reference_library_reads_the_same(tmp_path):
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    metadata, entries = read_header(path)
    assert metadata == {"format": "pt"} and set(entries) == set(tensors)
    content = path.read_bytes()
    for name, tensor in tensors.items():
        entry = entries[name]
        assert entry.shape == tuple(tensor.shape) and entry.shard == "x.safetensors"
        stored = content[entry.offset_bytes : entry.offset_bytes + entry.nbytes]
        assert (
            stored == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if entry.nbytes else not stored
        )


def test_hash_and_sizes_follow_the_file(tmp_path):
    a = load_header(write_raw(tmp_path / "a.safetensors", {"x": F32_2x2}, bytes(16)))
    b = load_header(write_raw(tmp_path / "b.safetensors", {"y": F32_2x2}, bytes(16)))
    again = load_header(write_raw(tmp_path / "c.safetensors", {"x": F32_2x2}, bytes(range(16))))
    assert a.sha256 == again.sha256 != b.sha256
    assert a.file_bytes == a.data_start_bytes + 16


LEGAL = {
    "no tensors": ({}, b""),
    "scalar": ({"x": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4)),
    "empty tensor in front": (
        {"e": {"dtype": "F32", "shape": [0, 9], "data_offsets": [0, 0]}, "x": F32_2x2},
        bytes(16),
    ),
    "order in the header differs from the data": (
        {
            "b": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]},
            "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        },
        bytes(5),
    ),
    "metadata and padding": (b'{"__metadata__":{"a":"b"},"x":' + json.dumps(F32_2x2).encode() + b"}   ", bytes(16)),
    "four-bit values": ({"x": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}}, bytes(4)),
}


@pytest.mark.parametrize("case", LEGAL)
def test_legal_oddities_are_read(tmp_path, case):
    read_header(write_raw(tmp_path / "x.safetensors", *LEGAL[case]))


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


MALFORMED = {
    "offsets too short": (
        entry(shape=(1000, 1000), offsets=(0, 4)),
        4,
        "takes 4,000,000 bytes, its data_offsets cover 4",
    ),
    "offsets too long": (entry(offsets=(0, 20)), 20, "takes 16 bytes, its data_offsets cover 20"),
    "overflow": (entry(shape=(2**62, 4)), 16, "overflows 64 bits"),
    "overflow to zero": (entry(shape=(2**32, 2**32), offsets=(0, 0)), 0, "overflows 64 bits"),
    "negative start": (entry(offsets=(-16, 0)), 16, "two numbers 0 <= start <= end"),
    "end before start": (entry(offsets=(16, 0)), 16, "two numbers 0 <= start <= end"),
    "three offsets": (entry(offsets=(0, 8, 16)), 16, "two numbers"),
    "fractional offset": (entry(offsets=(0, 16.0)), 16, "two numbers"),
    "negative extent": (entry(shape=(-2, -2)), 16, "whole numbers >= 0"),
    "fractional extent": (entry(shape=(2.0, 2)), 16, "whole numbers >= 0"),
    "true as extent": (entry(shape=(True, 4)), 16, "whole numbers >= 0"),
    "text as extent": (entry(shape=("2", "2")), 16, "whole numbers >= 0"),
    "unknown dtype": (entry(dtype="F7"), 16, "dtype 'F7'; known are"),
    "dtype as list": (entry() | {"dtype": ["F32"]}, 16, r"dtype \['F32'\]"),
    "no dtype": ({"shape": [2, 2], "data_offsets": [0, 16]}, 16, "dtype, shape and data_offsets were expected"),
    "one field more": (entry() | {"strides": [1]}, 16, "dtype, shape and data_offsets were expected"),
    "not an object": ([1, 2], 16, "dtype, shape and data_offsets were expected"),
    "hole in front": (entry(offsets=(4, 20)), 20, "a hole of 4 bytes between 'the header' and 'x'"),
    "half a byte": (entry(dtype="F4", shape=(3,), offsets=(0, 1)), 1, "takes 1 bytes"),
    "bytes at the end": (entry(), 20, "4 bytes after its last tensor 'x'"),
    "data cut off": (entry(), 10, "promises 16 bytes of data, 10 are there"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_entries_are_refused_by_name(tmp_path, case):
    fields, data_bytes, words = MALFORMED[case]
    path = write_raw(tmp_path / "x.safetensors", {"x": fields}, bytes(data_bytes))
    with pytest.raises(CheckpointError, match=words):
        read_header(path)
    refusal(path)


def test_the_reference_library_refuses_most_of_them_too(tmp_path):
    """A check that our malformed files are malformed; it lets a few pass that we do not, such as extra fields."""
    refused = 0
    for case, (fields, data_bytes, _) in MALFORMED.items():
        path = write_raw(tmp_path / f"{case}.safetensors", {"x": fields}, bytes(data_bytes))
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OverflowError, ValueError):
            refused += 1
    assert refused >= len(MALFORMED) - 2


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((0, 8), (12, 20), "a hole of 4 bytes between 'a' and 'b'"),
        ((0, 8), (4, 12), "an overlap of 4 bytes between 'a' and 'b'"),
        ((0, 8), (0, 8), "an overlap of 8 bytes"),
    ],
)
def test_holes_and_overlaps_are_refused(tmp_path, first, second, words):
    header = {"a": entry("U8", (8,), first), "b": entry("U8", (8,), second)}
    path = write_raw(tmp_path / "x.safetensors", header, bytes(max(first[1], second[1])))
    assert words in refusal(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b'{"x": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "x": 1}', "names 'x' twice"),
        (b'{"x": {"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', "names 'dtype' twice"),
        (b'{"__metadata__": {"a": 1}}', "object of strings"),
        (b'{"__metadata__": []}', "object of strings"),
        (b'{"x": ', "is not valid JSON"),
        (b'{"x\xff": 1}', "is not UTF-8 at byte 3"),
        (b'{"x\\u001b[2J": 1}', "not printable"),
        (b'{"' + b"x" * 5000 + b'": 1}', "too long"),
        (b'{"x":' * 100_000, "nested too deeply|not valid JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[1, 2, 3]", "'{' was expected"),
    ],
)
def test_broken_json_is_refused(tmp_path, header, words):
    path = write_raw(tmp_path / "x.safetensors", header, bytes(1))
    with pytest.raises(CheckpointError, match=words):
        read_header(path)
    refusal(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty (0 bytes)"),
        (b"abc", "has 3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n" + b" " * 60, "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page (HTML)"),
        (b'\n<HTML lang="en">', "web page (HTML)"),
        (b"PK\x03\x04" + bytes(200), "PyTorch pickle"),
        (b"GGUF" + bytes(200), "GGUF"),
        (b'{"error": "Access to model is restricted"}', "text file that begins"),
        (bytes(100), "begins with zeros only"),
        (struct.pack("<Q", 50) + bytes(100), "no safetensors header"),
        (struct.pack("<Q", 500) + b"{" + bytes(100), "says its header has 500 bytes, but the file has 109"),
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path, content, words):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert words in refusal(path)


@pytest.mark.parametrize("kept", [100, 8, 1 << 10])
def test_an_unfinished_download_is_told(tmp_path, kept):
    path = tmp_path / "x.safetensors"
    save_file({f"tensor.{i}": torch.zeros(64) for i in range(40)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    assert "stopped early" in refusal(path) or "no safetensors header" in refusal(path)


@pytest.mark.parametrize("length", [2**40, 2**63, 2**64 - 1, 100_000_001])
def test_a_lying_length_field_allocates_nothing(tmp_path, length):
    path = write_raw(tmp_path / "x.safetensors", b"{" + bytes(4096), length=length)
    tracemalloc.start()
    message = refusal(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"{length:,}" in message and peak_bytes < 1 << 20


def test_a_header_over_the_limit_is_refused_even_if_the_file_has_it(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", b"{", length=100_000_001)
    with open(path, "r+b") as file:
        file.truncate(200_000_000)  # sparse: takes no room
    assert "the limit is 100,000,000" in refusal(path)


def test_pipes_folders_and_missing_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    assert "not a regular file" in refusal(tmp_path / "pipe.safetensors")
    assert "not a regular file" in refusal(tmp_path / "folder.safetensors")
    assert "No such file" in refusal(tmp_path / "missing.safetensors")


def test_shapes_that_would_take_forever_to_multiply_are_refused_at_once(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", {"x": entry(shape=[2**61] * 100_000)}, bytes(16))
    assert "overflows 64 bits" in refusal(path)


def test_reads_continue_after_short_ones_and_name_the_place_where_a_file_ended(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(200)))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    assert read_range(path, 50, 100).tolist() == list(range(50, 150))
    with pytest.raises(CheckpointError, match=r"ended early: wanted 100 bytes at offset 150, got 50"):
        read_range_into(path, 150, np.empty(100, np.uint8))


def test_failed_reads_say_where(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(bytes(10))

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match="reading 4 bytes at offset 2 failed after 0: Input/output error"):
        read_range(path, 2, 4)


def test_nothing_stays_open(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", {"x": F32_2x2}, bytes(16))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        read_header(path)
    assert len(os.listdir("/proc/self/fd")) == before
