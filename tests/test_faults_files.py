"""Faults of files (configs, indices, shards): `plan` and `repack` refuse each in one line, in little memory."""

import json
import os
import struct
import subprocess
import sys
import tracemalloc

import pytest
import torch
from faults import assert_refused, run_cli
from patching import INDEX, edit_header, edit_json, read_raw_header, write_raw
from safetensors.torch import load_file, save_file
from synthetic import copy_checkpoint, write_checkpoint

FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
GENEROUS_BYTES = 8 << 20  # what opening a tiny checkpoint may take at its peak; it takes about a tenth


@pytest.fixture
def folder(tmp_path):
    return copy_checkpoint(tmp_path / "model")


def assert_refused_in_little_memory(folder, *words):
    run_cli("plan", folder)  # what is imported on the way is no memory of the file's
    tracemalloc.start()
    try:
        assert_refused(folder, *words)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < GENEROUS_BYTES


def replace_file(content):
    """A file's whole content, as bytes or as a function of what it was."""

    def spoil(path):
        before = path.read_bytes()
        path.write_bytes(content(before) if callable(content) else content)

    return spoil


# --- shards that are something else, or less


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 4988140016\n"
SHARDS = {
    "an LFS pointer": (LFS, "is a Git LFS pointer", "git lfs pull"),
    "a web page": (b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>", "is a web page (HTML)"),
    "a web page after blank lines": (b"\r\n\r\n  <html lang=en>", "is a web page (HTML)"),
    "a message in JSON": (b'{"error":"Access to this model is restricted."}', "is a text file that begins"),
    "a word": (b"Not Found", "is a text file that begins", "fetch this file again"),
    "empty": (b"", "is empty (0 bytes)", "fetch this file again"),
    "a few bytes": (b"\x10\0\0\0", "has 4 bytes"),
    "its first 8 bytes": (lambda b: b[:8], "the file has 8", "the download stopped early"),
    "its first 100 bytes": (lambda b: b[:100], "but the file has 100", "the download stopped early"),
    "its header only": (lambda b: b[: 8 + struct.unpack("<Q", b[:8])[0]], "is cut off", "0 are there"),
    "half of itself": (lambda b: b[: len(b) // 2], "fetch this file again"),
    "all but a byte": (lambda b: b[:-1], "is cut off", "(1 missing)"),
    "itself and a byte": (lambda b: b + b"\0", "has 1 bytes after its last tensor"),
    "itself twice": (lambda b: b + b, "bytes after its last tensor"),
    "zeros of its size": (lambda b: bytes(len(b)), "begins with zeros only", "fetch this file again"),
    "a zip of pickles": (b"PK\x03\x04" + bytes(300), "is a PyTorch pickle", "not read"),
    "a pickle": (b"\x80\x02}q\x00." + bytes(300), "is a PyTorch pickle"),
    "a GGUF file": (b"GGUF\x03\0\0\0" + bytes(300), "is a GGUF file"),
    "a NumPy file": (b"\x93NUMPY\x01\0v\0" + bytes(300), "is a NumPy file"),
    "an HDF5 file": (b"\x89HDF\r\n\x1a\n" + bytes(300), "is an HDF5 file"),
    "compressed": (b"\x1f\x8b\x08\0" + bytes(range(200)), "is a gzip archive"),
    "a length of 2^40": (lambda b: struct.pack("<Q", 1 << 40) + b[8:], "1,099,511,627,776", "the limit is 100,000,000"),
    "a length of 2^63": (lambda b: struct.pack("<Q", 1 << 63) + b[8:], "9,223,372,036,854,775,808"),
    "a length of 2^64 - 1": (lambda b: b"\xff" * 8 + b[8:], "18,446,744,073,709,551,615"),
    "a length of the file": (lambda b: struct.pack("<Q", len(b)) + b[8:], "but the file has"),
    "a length of zero": (lambda b: bytes(8) + b[8:], "is empty; a JSON object was needed"),
    "a length one short": (lambda b: struct.pack("<Q", unpadded_bytes(b) - 1) + b[8:], "not valid JSON"),
    "an array as header": (lambda b: with_header(b, b"[1, 2]"), "'{' was expected"),
    "a header in UTF-16": (lambda b: with_header(b, "{}".encode("utf-16-le") * 9), "not valid JSON"),
    "a header that is not UTF-8": (lambda b: with_header(b, b'{"\xff\xfe": 1}'), "is not UTF-8 at byte 2"),
    "a name twice": (lambda b: with_header(b, b'{"x": 1, "x": 2}'), "names 'x' twice"),
    "a header nested deeply": (lambda b: with_header(b, b'{"x":' + b"[" * 200_000), "nested too deeply"),
}  # fmt: skip


def header_bytes(content):
    return struct.unpack("<Q", content[:8])[0]


def unpadded_bytes(content):
    return len(content[8 : 8 + header_bytes(content)].rstrip())


def with_header(content, raw):
    return struct.pack("<Q", len(raw)) + raw + content[8 + header_bytes(content) :]


@pytest.mark.parametrize("case", SHARDS)
@pytest.mark.parametrize("file", [SECOND])
def test_a_shard_that_is_none_is_named_with_what_it_is(folder, file, case):
    content, *words = SHARDS[case]
    replace_file(content)(folder / file)
    assert_refused_in_little_memory(folder, file, *words)


@pytest.mark.parametrize("part", [n / 12 for n in range(12)])
def test_a_download_that_stopped_anywhere_is_told(folder, part):
    path = folder / THIRD
    whole = path.stat().st_size
    os.truncate(path, int(part * whole))
    message = assert_refused(folder, THIRD)
    assert "again" in message or "early" in message


# --- headers that lie about their tensors


def edit_entry(**fields):
    """Change the entry of the file's largest tensor."""

    def edit(header):
        name = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
        header[name].update(fields)

    return edit


def shift(first, last):
    """Move the offsets of the last tensor in the file."""

    def edit(header):
        name = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])
        start, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = [start + first, end + last]

    return edit


ENTRIES = {
    "a promise of a million": (edit_entry(shape=[1000, 1000]), "bytes, its data_offsets cover"),
    "an overflow": (edit_entry(shape=[1 << 62, 4]), "overflows 64 bits"),
    "an overflow to zero": (edit_entry(shape=[1 << 32, 1 << 32]), "overflows 64 bits"),
    "a huge extent": (edit_entry(shape=[10**300]), "overflows 64 bits"),
    "a negative extent": (edit_entry(shape=[-1, -4]), "a list of whole numbers >= 0 was expected"),
    "a fraction as extent": (edit_entry(shape=[1.5]), "a list of whole numbers >= 0"),
    "a shape that is none": (edit_entry(shape=None), "a list of whole numbers >= 0"),
    "a negative start": (edit_entry(data_offsets=[-4, 0]), "0 <= start <= end"),
    "an end before the start": (edit_entry(data_offsets=[8, 4]), "0 <= start <= end"),
    "one offset": (edit_entry(data_offsets=[8]), "two numbers 0 <= start <= end"),
    "offsets far beyond": (shift(1 << 40, 1 << 40), "a hole of 1,099,511,627,776 bytes"),
    "a hole": (shift(16, 16), "a hole of 16 bytes"),
    "an overlap": (shift(-2, -2), "an overlap of 2 bytes"),
    "a range too short": (shift(0, -1), "bytes, its data_offsets cover"),
    "a range too long": (shift(0, 1), "bytes, its data_offsets cover"),
    "a dtype of the future": (edit_entry(dtype="F3"), "dtype 'F3'; known are"),
    "a dtype that is a number": (edit_entry(dtype=32), "dtype 32; known are"),
    "a field more": (edit_entry(strides=[1]), "dtype, shape and data_offsets were expected"),
    "metadata of numbers": (lambda h: h.update(__metadata__={"format": 1}), "must be an object of strings"),
    "a list as metadata": (lambda h: h.update(__metadata__=[]), "must be an object of strings"),
    "a tensor that is a number": (lambda h: h.update(x=3), "dtype, shape and data_offsets were expected"),
    "a name with an escape": (lambda h: h.update({"\x1b[2J": {}}), "not printable"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENTRIES)
def test_a_header_that_lies_is_refused_with_file_and_tensor(folder, case):
    edit, *words = ENTRIES[case]
    edit_header(folder / SECOND, edit)
    assert_refused_in_little_memory(folder, SECOND, *words)


def test_a_header_of_too_many_values_is_refused_before_it_is_parsed(folder):
    raw = b'{"__metadata__":{},"x":[' + b"[]," * 5_000_000 + b"0]}"
    replace_file(lambda content: with_header(content, raw))(folder / SECOND)
    run_cli("plan", folder)
    tracemalloc.start()
    assert_refused(folder, SECOND, "holds some 10,000,004 JSON values; the limit is 4,000,000")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 3 * len(raw)


# --- an index that does not fit the files


def move(name, file):
    return lambda index: index["weight_map"].update({name: file})


NORM = "backbone.norm_f.weight"
INDICES = {
    "a moved entry": (move(NORM, FIRST), f"says {NORM} is in {FIRST}, but it lies in {THIRD}"),
    "an entry for nothing": (move("backbone.ghost", FIRST), "says backbone.ghost is in", "no file of the index"),
    "an entry left out": (lambda i: i["weight_map"].pop(NORM) and None, f"{NORM} lies in {THIRD}", "does not list it"),
    "a file that is not there": (move("x", "model-00009-of-00009.safetensors"), "1 of them not there: model-00009"),
    "a path upwards": (move(NORM, f"../model/{THIRD}"), "the plain name of a .safetensors file was expected"),
    "an absolute path": (move(NORM, "/etc/passwd"), "the plain name of a .safetensors file"),
    "a path of another system": (move(NORM, "..\\x.safetensors"), "the plain name of a .safetensors file"),
    "a file of another kind": (move(NORM, "pytorch_model.bin"), "the plain name of a .safetensors file"),
    "a number as file": (move(NORM, 7), "the plain name of a .safetensors file"),
    "no map": (lambda i: i.pop("weight_map") and None, "has no weight_map"),
    "an empty map": (lambda i: i.update(weight_map={}), "has no weight_map"),
    "a list as map": (lambda i: i.update(weight_map=[]), "has no weight_map"),
    "a list": (lambda i: [i], "an object was needed"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDICES)
def test_an_index_that_does_not_fit_is_refused_by_its_name(folder, case):
    edit, *words = INDICES[case]
    edit_json(folder / INDEX, edit)
    assert_refused(folder, INDEX, *words)


def test_a_missing_shard_is_named_with_the_bytes_to_fetch(folder):
    data_bytes = (folder / SECOND).stat().st_size - read_raw_header(folder / SECOND)[1]
    (folder / SECOND).unlink()
    assert_refused(folder, f"1 of them not there: {SECOND} ({data_bytes:,} bytes of tensors in all)")


def test_a_stray_copy_counts_only_without_an_index(folder):
    name, tensor = next(iter(load_file(folder / FIRST).items()))
    save_file({name: torch.zeros_like(tensor)}, folder / "model.safetensors")
    code, out, _ = run_cli("plan", folder)
    assert code == 0 and "left aside: model.safetensors" in out
    (folder / INDEX).unlink()
    assert_refused(folder, f"{name} is stored twice", "model.safetensors", FIRST)


def test_two_indices_of_other_names_are_refused_with_both(folder):
    content = (folder / INDEX).read_bytes()
    (folder / INDEX).unlink()
    for name in ("a", "b"):
        (folder / f"{name}.safetensors.index.json").write_bytes(content)
    assert_refused(folder, "several indices (a.safetensors.index.json, b.safetensors.index.json)")


# --- JSON files that are none

JSON_FILES = ("config.json", "hf_quant_config.json", INDEX, "generation_config.json")


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


def link_to_nothing(path):
    path.unlink()
    path.symlink_to("gone")


def make_folder(path):
    path.unlink()
    path.mkdir()


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def make_large(path):
    with open(path, "r+b") as file:
        file.truncate(100_000_001)  # sparse: takes no room


def make_many_values(path):
    path.write_bytes(b'{"x": [' + b"0," * 4_000_001 + b"0]}")


BROKEN_JSON = {
    "text": (replace_file(b"Not Found"), "is not valid JSON"),
    "cut off": (replace_file(lambda b: b[: len(b) // 2]), "is not valid JSON"),
    "empty": (replace_file(b""), "is empty"),
    "an array": (replace_file(b"[]"), "a JSON list; an object was needed"),
    "null": (replace_file(b"null"), "an object was needed"),
    "a byte order mark": (replace_file(lambda b: b"\xef\xbb\xbf" + b), "byte order mark"),
    "another encoding": (replace_file(lambda b: b.decode().encode("utf-16")), "is not UTF-8"),
    "a name twice": (replace_file(b'{"a": 1, "a": 2}'), "names 'a' twice"),
    "nested deeply": (replace_file(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
    "a number without end": (replace_file(b'{"a": ' + b"9" * 5000 + b"}"), "is not valid JSON"),
    "an LFS pointer": (replace_file(LFS), "is not valid JSON"),
    "a folder": (make_folder, "is not a regular file"),
    "a pipe": (make_pipe, "is not a regular file"),
    "a link to itself": (link_to_itself, "link"),
    "a link to nothing": (link_to_nothing, "is a link that leads nowhere"),
    "100 MB": (make_large, "100,000,001 bytes of JSON, the limit is 100,000,000"),
    "millions of values": (make_many_values, "values; the limit is 4,000,000"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_JSON)
@pytest.mark.parametrize("file", JSON_FILES)
def test_a_json_file_that_is_none_is_refused_by_its_name(folder, file, case):
    spoil, *words = BROKEN_JSON[case]
    spoil(folder / file)
    assert_refused(folder, file, *words)


def test_a_shard_that_is_a_pipe_or_a_loop_is_refused_without_waiting(folder):
    make_pipe(folder / SECOND)
    assert_refused(folder, SECOND, "not a regular file")
    link_to_itself(folder / SECOND)
    assert_refused(folder, SECOND, "not there")


# --- memory


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
from nemolab.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_limited(limit_bytes, *words):
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    code = LIMITED.format(limit=limit_bytes)
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, env=environment, timeout=300
    )


def test_a_tensor_of_512_mb_is_repacked_in_1_gb_of_address_space(tmp_path):
    """The embeddings as 512 MB of nothing: a sparse file, so only the store takes room."""
    folder = write_checkpoint(tmp_path / "model", tie=True, single_file=True)
    name, rows = "backbone.embeddings.weight", 1 << 22
    (path,) = folder.glob("*.safetensors")
    header, data_start = read_raw_header(path)
    data = path.read_bytes()[data_start:]
    start, end = header[name]["data_offsets"]
    more = rows * 64 * 2 - (end - start)
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset + more for offset in entry["data_offsets"]]
    header[name] |= {"shape": [rows, 64], "data_offsets": [start, end + more]}
    write_raw(path, header, data[:end])
    with open(path, "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.seek(more, os.SEEK_CUR)
        file.write(data[end:])
        file.truncate()
    edit_json(folder / "config.json", lambda config: config.update(vocab_size=rows))
    ran = run_limited(1 << 30, "repack", folder, "--to", tmp_path / "store", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["bytes_written"] > 512 << 20


def test_the_limit_of_address_space_can_fail(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    assert run_limited(64 << 20, "repack", folder, "--to", tmp_path / "store").returncode != 0
