"""Mutated headers, indices, configs, metadata, names and data: refused in one line, or a store of just these bytes.

Every example goes through `nemolab plan`, in this process; what that accepts, most also through `nemolab repack`, and
the store is compared with the spoiled files as a plain reader of forty lines reads them. Never: a traceback, a hang,
memory without bounds, or a store that differs from its source.
"""

import copy
import json
import os
import resource
import shutil
import signal
import struct

import numpy as np
import pytest
from faults import assert_one_line, run_cli
from fuzz import fuzzing
from hypothesis import given
from hypothesis import strategies as st
from patching import INDEX, write_raw
from synthetic import copy_checkpoint

from nemolab.checkpoint import Checkpoint, Inventory
from nemolab.checkpoint.json_files import parse_json_object
from nemolab.errors import CheckpointError
from nemolab.store import Store

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
SHARD = SHARDS[1]
QUANT = "hf_quant_config.json"
GROWTH_BYTES = 512 << 20  # what all examples together may add to the largest size of this process
PATIENCE_S = 120  # for one example, which takes a tenth of a second: the end of a hang, not a measurement

ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**32, 2**62, 2**64, -(2**63), 10**30, 1e308, -0.0, 0.5]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["F32", "BF16", "U8", "F8_E4M3", "NVFP4", "FP8", "MEM*E", "Infinity", "*", "[", "../x", "x.safetensors"]
    ),
    st.lists(st.integers(-1, 99), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=2),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One folder that each example spoils and restores, with its untouched contents."""
    folder = copy_checkpoint(tmp_path_factory.mktemp("fuzz") / "model")
    return folder, {path.name: path.read_bytes() for path in folder.iterdir()}


def places(value, path=()):
    """Every place in a JSON value, as a path of keys."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@st.composite
def mutations(draw, value):
    """A JSON value with one to three places replaced, removed, doubled or moved."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        every = [path for path in places(value) if path]
        if not every:
            break
        *parents, key = draw(st.sampled_from(every))
        holder = value
        for parent in parents:
            holder = holder[parent]
        action = draw(st.sampled_from(["replace", "replace", "remove", "rename", "swap"]))
        if action == "remove":
            del holder[key]
        elif action == "rename" and isinstance(holder, dict):
            holder[draw(st.text(max_size=6)) or "x"] = holder.pop(key)
        elif action == "swap" and isinstance(holder, dict):
            other = draw(st.sampled_from(sorted(holder)))
            holder[key], holder[other] = holder[other], holder[key]
        else:
            holder[key] = draw(ODD_VALUES)
    return value


def read_plainly(folder):
    """Stored name -> (dtype, shape, bytes): the format in a few lines, without a doubt about anything."""
    tensors = {}
    for file in sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())):
        content = (folder / file).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            tensors[name] = (entry["dtype"], tuple(entry["shape"]), content[start + first : start + last])
    return tensors


def assert_store_is_of(folder, store_path):
    """Every expert and every other tensor of the store is what the files of the folder say, byte for byte."""
    plain = read_plainly(folder)
    store = Store.open(store_path)
    layout = store.manifest.block_layout
    blocks = np.fromfile(store_path / "experts.bin", np.uint8).reshape(-1, layout.block_bytes)
    for layer, index in enumerate(store.config.moe_layers):
        for expert in range(store.config.n_experts):
            planes = layout.unpack(blocks[store.block_index(layer, expert)])
            for side, matrix in enumerate(("up", "down")):
                name = f"backbone.layers.{index}.mixer.experts.{expert}.{matrix}_proj"
                assert getattr(planes, f"{matrix}_values").tobytes() == plain[f"{name}.weight"][2]
                assert getattr(planes, f"{matrix}_scales").tobytes() == plain[f"{name}.weight_scale"][2]
                factor = np.frombuffer(plain[f"{name}.weight_scale_2"][2], "<f4")[0]
                assert store.globals[layer, expert, side] == factor
    for name, entry in store.dense_tensors.items():
        dtype, shape, raw = plain[name]
        assert (entry.dtype, entry.shape) == (dtype, shape)
        assert b"".join(chunk.tobytes() for chunk in store.dense_chunks(name, 1 << 20)) == raw
    with_bytes = {name for name, (_, _, raw) in plain.items() if raw}
    elsewhere = {
        name for name in with_bytes if name.startswith(("mtp.", "vision_", "mlp1.", "model.vision_", "model.mlp1."))
    }
    elsewhere |= {name for name in with_bytes if ".mixer.experts." in name or name.endswith(".input_scale")}
    assert set(store.dense_tensors) == with_bytes - elsewhere


def judge(model, tmp_path, repack=True):
    """Plan the spoiled folder, then repack it: "refused", "planned" or "stored". Restores the files."""
    folder, untouched = model
    store = tmp_path / "store"
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("an example hangs"))
    signal.alarm(PATIENCE_S)
    try:
        code, _, err = run_cli("plan", folder)
        if code:
            assert_one_line(code, err)
            return "refused"
        checkpoint = Checkpoint.open(folder)
        stored_bytes = sum(header.file_bytes - header.data_start_bytes for header in checkpoint.headers.values())
        assert Inventory(checkpoint).accounting()["bytes"].sum() == stored_bytes
        if not repack or checkpoint.prefix != "backbone." or not (folder / INDEX).exists():
            return "planned"
        code, _, err = run_cli("repack", folder, "--to", store)
        if code:
            assert_one_line(code, err)
            assert not (store / "manifest.json").exists()
            return "planned"
        assert_store_is_of(folder, store)
        return "stored"
    finally:
        signal.alarm(0)
        shutil.rmtree(store, ignore_errors=True)
        for name in os.listdir(folder):
            if name not in untouched:
                os.unlink(folder / name)
        for name, content in untouched.items():
            (folder / name).write_bytes(content)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """All examples together may not blow this process up; what is imported on the way is let in first."""
    import nemolab.store  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown_bytes < GROWTH_BYTES


JSON_FILES = ["config.json", QUANT, "generation_config.json", INDEX]


@fuzzing()
@given(data=st.data(), file=st.sampled_from(JSON_FILES))
def test_any_json_file_may_be_anything(model, tmp_path, data, file):
    folder, untouched = model
    mutated = data.draw(mutations(json.loads(untouched[file])))
    (folder / file).write_text(json.dumps(mutated))
    judge(model, tmp_path)


@fuzzing()
@given(data=st.data(), shard=st.sampled_from(SHARDS))
def test_any_header_may_be_anything(model, tmp_path, data, shard):
    folder, untouched = model
    header, content = split(untouched[shard])
    write_raw(folder / shard, data.draw(mutations(header)), content)
    judge(model, tmp_path)


@fuzzing()
@given(
    file=st.sampled_from([*SHARDS, INDEX, "config.json", QUANT, "generation_config.json"]),
    place=st.one_of(st.integers(0, 16), st.integers(0, 30_000)),
    patch=st.binary(min_size=1, max_size=12),
    cut=st.one_of(st.none(), st.none(), st.integers(0, 300_000)),
    insert=st.booleans(),
)
def test_any_bytes_may_be_anywhere(model, tmp_path, file, place, patch, cut, insert):
    folder, untouched = model
    content = bytearray(untouched[file])
    content[place : place + (0 if insert else len(patch))] = patch
    (folder / file).write_bytes(bytes(content[:cut]))
    judge(model, tmp_path)


def split(content):
    """(header object, data) of a shard."""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


NAME_PARTS = ["backbone", "model", "language_model", "layers", "0", "1", "7", "99", "mixer", "experts", "up_proj",
              "down_proj", "weight", "weight_scale", "weight_scale_2", "bias", "A_log", "mtp", "vision_model",
              "qweight", "input_scale", "lm_head", "norm", "gate", "weight_packed", "void"]  # fmt: skip


@fuzzing(1 / 2)
@given(data=st.data(), shard=st.sampled_from(SHARDS), empty=st.booleans())
def test_any_tensor_may_be_called_anything(model, tmp_path, data, shard, empty):
    """Names are edited in header and index alike, so that both agree about the wrong ones."""
    folder, untouched = model
    header, content = split(untouched[shard])
    index = json.loads(untouched[INDEX])
    for _ in range(data.draw(st.integers(1, 3))):
        old = data.draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
        parts = old.split(".")
        place = data.draw(st.integers(0, len(parts)))
        parts[place : place + data.draw(st.integers(0, 2))] = data.draw(
            st.lists(st.sampled_from(NAME_PARTS), max_size=2)
        )
        new = ".".join(parts)
        if empty:
            header.setdefault(new, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
        else:
            header[new] = header.pop(old)
            index["weight_map"].pop(old, None)
        index["weight_map"].setdefault(new, shard)
    write_raw(folder / shard, header, content)
    (folder / INDEX).write_text(json.dumps(index))
    judge(model, tmp_path)


ALGORITHMS = [
    "FP8",
    "NVFP4",
    "W4A16_NVFP4",
    "MIXED_PRECISION",
    "FOO",
    None,
    {"quant_algo": "FP8"},
    {"quant_algo": "NVFP4"},
]
PATTERNS = ["*", "*.mixer.*", "backbone.layers.1.mixer.experts", "backbone.layers.0.mixer.in_proj", "mtp*", "lm_head",
            "[", "*in_proj", "model.layers.0.mixer.in_proj", "re:.*", "Linear", ""]  # fmt: skip


@fuzzing()
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    table=st.one_of(st.none(), st.dictionaries(st.sampled_from(PATTERNS), st.sampled_from(ALGORITHMS), max_size=4)),
    excluded=st.one_of(st.none(), st.lists(st.sampled_from(PATTERNS), max_size=4)),
    groups=st.one_of(
        st.none(),
        st.dictionaries(
            st.sampled_from("ab"),
            st.fixed_dictionaries({
                "weights": st.fixed_dictionaries({"type": st.just("float"), "num_bits": st.sampled_from([4, 8, 6])}),
                "targets": st.lists(st.sampled_from(PATTERNS), max_size=3),
            }),
            max_size=2,
        ),
    ),
    file=st.sampled_from(["config.json", QUANT]),
)  # fmt: skip
def test_metadata_may_claim_anything(model, tmp_path, algorithm, table, excluded, groups, file):
    folder, untouched = model
    claim = {"quant_algo": algorithm, "quantized_layers": table, "exclude_modules": excluded, "config_groups": groups}
    config = json.loads(untouched[file])
    config["quantization_config" if file == "config.json" else "quantization"] = claim
    (folder / file).write_text(json.dumps(config))
    judge(model, tmp_path)


@fuzzing(1 / 2)  # each of them makes a store
@given(
    shard=st.sampled_from(SHARDS),
    patches=st.lists(st.tuples(st.integers(0, 200_000), st.binary(min_size=1, max_size=4)), min_size=1, max_size=4),
)
def test_any_data_makes_a_store_of_just_that_data(model, tmp_path, shard, patches):
    folder, untouched = model
    content = bytearray(untouched[shard])
    start = 8 + struct.unpack("<Q", content[:8])[0]
    for place, patch in patches:
        at = start + place % (len(content) - start - len(patch))
        content[at : at + len(patch)] = patch
    (folder / shard).write_bytes(bytes(content))
    assert judge(model, tmp_path) in ("planned", "stored")


@fuzzing(10)
@given(raw=st.one_of(st.binary(max_size=60), st.text(alphabet='{}[]",:0e-\\u1n', max_size=40).map(str.encode)))
def test_any_bytes_are_an_object_or_refused(raw):
    try:
        assert isinstance(parse_json_object(raw, "x"), dict)
    except CheckpointError as error:
        assert str(error).startswith("x ") and "\n" not in str(error)


def test_the_fuzz_can_tell_stored_from_refused(model, tmp_path):
    folder, _ = model
    assert judge(model, tmp_path) == "stored"
    (folder / "config.json").write_text("{}")
    assert judge(model, tmp_path) == "refused"
    assert judge(model, tmp_path) == "stored"


def test_a_store_of_other_bytes_is_told(model, tmp_path):
    folder, untouched = model
    assert run_cli("repack", folder, "--to", tmp_path / "store")[0] == 0
    content = bytearray(untouched[SHARD])
    content[len(content) // 2 :: 512] = bytes(len(content[len(content) // 2 :: 512]))  # in experts and elsewhere
    (folder / SHARD).write_bytes(bytes(content))
    with pytest.raises(AssertionError):
        assert_store_is_of(folder, tmp_path / "store")
    (folder / SHARD).write_bytes(untouched[SHARD])
