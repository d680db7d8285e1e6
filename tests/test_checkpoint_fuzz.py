"""Mutated headers, indices, configs and metadata: opened or refused in one line, never a traceback of another kind."""

import copy
import json
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patching import INDEX, write_raw
from synthetic import copy_checkpoint

from nemolab.checkpoint import Checkpoint, Inventory
from nemolab.errors import CheckpointError

SHARD = "model-00002-of-00003.safetensors"
BOUNDED = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

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


def open_or_refuse(model):
    """Open the spoiled folder; whatever opens must also add up. Restores the files."""
    folder, untouched = model
    try:
        checkpoint = Checkpoint.open(folder)
        stored_bytes = sum(header.file_bytes - header.data_start_bytes for header in checkpoint.headers.values())
        assert Inventory(checkpoint).frame()["bytes"].sum() == stored_bytes
        return "opened"
    except CheckpointError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 2000
        return "refused"
    finally:
        for name, content in untouched.items():
            (folder / name).write_bytes(content)


@BOUNDED
@given(data=st.data(), file=st.sampled_from(["config.json", "hf_quant_config.json", "generation_config.json", INDEX]))
def test_any_json_file_may_be_anything(model, data, file):
    folder, untouched = model
    mutated = data.draw(mutations(json.loads(untouched[file])))
    (folder / file).write_text(json.dumps(mutated))
    open_or_refuse(model)


@BOUNDED
@given(data=st.data())
def test_any_header_may_be_anything(model, data):
    folder, untouched = model
    content = untouched[SHARD]
    (length,) = struct.unpack("<Q", content[:8])
    mutated = data.draw(mutations(json.loads(content[8 : 8 + length])))
    write_raw(folder / SHARD, mutated, content[8 + length :])
    open_or_refuse(model)


@BOUNDED
@given(
    file=st.sampled_from([SHARD, INDEX, "config.json", "hf_quant_config.json"]),
    place=st.integers(0, 2000),
    patch=st.binary(min_size=1, max_size=12),
    cut=st.one_of(st.none(), st.integers(0, 3000)),
)
def test_any_bytes_may_be_anywhere(model, file, place, patch, cut):
    folder, untouched = model
    content = bytearray(untouched[file])
    content[place : place + len(patch)] = patch
    (folder / file).write_bytes(bytes(content[:cut]))
    open_or_refuse(model)


def test_the_fuzz_can_tell_opened_from_refused(model):
    folder, _ = model
    assert open_or_refuse(model) == "opened"
    (folder / "config.json").write_text("{}")
    assert open_or_refuse(model) == "refused"
    assert open_or_refuse(model) == "opened"
