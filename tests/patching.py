"""Ways to spoil a checkpoint on purpose (tensors, headers, indices and configs of a copy), and how it is refused."""

import json
import struct
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nemolab.checkpoint import Checkpoint
from nemolab.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def refusal(folder):
    """The one line with which a spoiled folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_json(path, edit):
    """Rewrite a JSON file with what `edit(object)` returns (or leaves behind when it returns nothing)."""
    path = Path(path)
    value = json.loads(path.read_text())
    changed = edit(value)
    path.write_text(json.dumps(value if changed is None else changed))


def edit_tensors(folder, edit):
    """Rewrite every shard with what `edit(name, tensor)` returns: {name: tensor}, {} to drop it. The index follows."""
    folder, weight_map = Path(folder), {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(file).items():
            tensors |= edit(name, tensor)
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    if (folder / INDEX).exists():
        total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        edit_json(folder / INDEX, lambda index: {"metadata": {"total_size": total}, "weight_map": weight_map})


def drop_tensor(folder, dropped):
    edit_tensors(folder, lambda name, tensor: {} if name == dropped else {name: tensor})


def replace_tensor(folder, replaced, change):
    """`change(tensor)` in the place of one tensor."""
    edit_tensors(folder, lambda name, tensor: {name: change(tensor) if name == replaced else tensor})


def add_tensor(folder, name, tensor):
    """One more tensor, in the last shard, listed in the index."""
    last = max(Path(folder).glob("*.safetensors"))
    save_file(load_file(last) | {name: tensor}, last, metadata={"format": "pt"})
    if (Path(folder) / INDEX).exists():
        edit_json(Path(folder) / INDEX, lambda index: index["weight_map"].update({name: last.name}))


def write_raw(path, header, data=b"", length=None):
    """A file with any header (an object, or bytes as they are), any data and any length field."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return Path(path)


def edit_header(path, edit):
    """Change the JSON header of a file and leave its data as it is."""
    content = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    changed = edit(header)
    write_raw(path, header if changed is None else changed, content[8 + length :])


def read_raw_header(path):
    """(header object, first byte of the data) of a file."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def stored_tensors(folder):
    """Stored name -> (file, dtype, shape) of a folder that is not spoiled yet."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        header, _ = read_raw_header(file)
        header.pop("__metadata__", None)
        found |= {name: (file, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    return found


def relabel(folder, name, **fields):
    """Another dtype or shape for a tensor's bytes, which stay as they are."""
    file, _, _ = stored_tensors(folder)[name]
    edit_header(file, lambda header: header[name].update(fields))


def patch_bytes(folder, name, place, content):
    """Overwrite a tensor's stored bytes from byte `place` of it on."""
    file, _, _ = stored_tensors(folder)[name]
    header, data_start = read_raw_header(file)
    with open(file, "r+b") as opened:
        opened.seek(data_start + header[name]["data_offsets"][0] + place)
        opened.write(content)
