"""Which files of a folder are the checkpoint's, and whether index and files say the same."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nemolab.checkpoint.json_files import read_json
from nemolab.checkpoint.safetensors_header import Header, TensorEntry, load_header
from nemolab.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
_INDEX_ENDING = ".safetensors.index.json"
_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})\.safetensors$")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class Shards:
    """The checked files of a checkpoint: headers by file name, entries by stored name, what was noticed."""

    headers: dict[str, Header]
    tensors: dict[str, TensorEntry]
    notes: list[str]


def open_shards(folder: Path) -> Shards:
    """Read the headers of a checkpoint folder. With an index its files count and no others, and both must agree;
    without one every safetensors file counts, and a tensor may occur once. Raises CheckpointError.
    """
    on_disk = sorted(path.name for path in folder.iterdir() if path.name.endswith(".safetensors"))
    index_path = _find_index(folder)
    if index_path is None:
        return _open_without_index(folder, on_disk)
    weight_map, total_bytes = _read_index(index_path)
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise CheckpointError(_say_missing(folder, index_path, files, missing, total_bytes))
    headers = {file: load_header(folder / file) for file in files}
    tensors = _join(headers.values())
    notes = _cross_check(index_path, weight_map, tensors)
    stored_bytes = sum(entry.nbytes for entry in tensors.values())
    if total_bytes is not None and total_bytes != stored_bytes:
        notes.append(f"{index_path.name}: total_size says {total_bytes:,} bytes, the files hold {stored_bytes:,}")
    return Shards(headers, tensors, notes + _note_extra_files(folder, files))


def _find_index(folder: Path) -> Path | None:
    if os.path.lexists(folder / INDEX_FILE):
        return folder / INDEX_FILE
    found = sorted(path for path in folder.iterdir() if path.name.endswith(_INDEX_ENDING))
    if len(found) > 1:
        raise CheckpointError(f"{folder} has several indices ({', '.join(p.name for p in found)}); one was expected")
    return found[0] if found else None


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; an object of tensor name -> file name was expected")
    for name, file in weight_map.items():
        # A path in the map could lead out of the folder: only plain names are followed.
        plain = isinstance(file, str) and file.isprintable() and not {"/", "\\"} & set(file)
        if not plain or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {name!r} is mapped to {str(file)[:80]!r}; the plain name of a .safetensors file was expected"
            )
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, int(total) if type(total) in (int, float) and 0 <= total < 1 << 62 else None


def _say_missing(folder: Path, index_path: Path, files: list[str], missing: list[str], total_bytes: int | None) -> str:
    message = f"{index_path} names {len(files)} files, {len(missing)} of them not there: {_listed(missing)}"
    present = [load_header(folder / file) for file in files if file not in missing]
    present_bytes = sum(header.file_bytes - header.data_start_bytes for header in present)
    if total_bytes is not None and total_bytes > present_bytes:
        message += f" ({total_bytes - present_bytes:,} bytes of tensors in all)"
    return f"{message}; fetch them again"


def _open_without_index(folder: Path, on_disk: list[str]) -> Shards:
    if not on_disk:
        others = sorted(path.name for path in folder.iterdir() if path.name.endswith(_OTHER_WEIGHTS))
        hint = f"; {_listed(others)} cannot be read (pickles can run code)" if others else ""
        raise CheckpointError(f"{folder} has no .safetensors files and no {INDEX_FILE}{hint}")
    notes = []
    numbered = [match for match in map(_NUMBERED.match, on_disk) if match]
    for match in numbered:
        stem, total, digits = match["stem"], int(match["total"]), len(match["number"])
        wanted = {f"{stem}-{number:0{digits}d}-of-{match['total']}.safetensors" for number in range(1, total + 1)}
        missing = sorted(wanted - set(on_disk))
        if missing:
            raise CheckpointError(
                f"{folder} has no index, and of the {total} files that {match[0]} belongs to"
                f" {len(missing)} are not there: {_listed(missing)}"
            )
    if len(on_disk) > 1:
        notes.append(f"{INDEX_FILE} is missing; the tensors were taken from all {len(on_disk)} safetensors files")
    headers = {file: load_header(folder / file) for file in on_disk}
    return Shards(headers, _join(headers.values()), notes + _note_extra_files(folder, on_disk))


def _join(headers: Iterable[Header]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for header in headers:
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            name = min(twice)
            raise CheckpointError(
                f"{name} is stored twice, in {tensors[name].shard} and in {header.path.name}: which one counts?"
                " Remove the file that does not belong to this checkpoint"
            )
        tensors |= header.tensors
    return tensors


def _cross_check(index_path: Path, weight_map: dict[str, str], tensors: dict[str, TensorEntry]) -> list[str]:
    """Every name of the index is in the file it says, and every stored tensor is in the index."""
    for name, file in weight_map.items():
        entry = tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{index_path} says {name} is in {file}, but no file of the index holds it")
        if entry.shard != file:
            raise CheckpointError(f"{index_path} says {name} is in {file}, but it lies in {entry.shard}")
    unlisted = [entry for name, entry in tensors.items() if name not in weight_map]
    full = [entry for entry in unlisted if entry.nbytes]
    if full:
        raise CheckpointError(
            f"{full[0].name} lies in {full[0].shard}, but {index_path} does not list it"
            + (f" (and {len(full) - 1:,} more)" if len(full) > 1 else "")
        )
    return [f"{entry.name} (empty) lies in {entry.shard}, but the index does not list it" for entry in unlisted]


def _note_extra_files(folder: Path, used: list[str]) -> list[str]:
    extra = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in used and path.name.endswith((*_OTHER_WEIGHTS, _INDEX_ENDING)) and path.name != INDEX_FILE
    )
    return [f"not part of this checkpoint, left aside: {_listed(extra)}"] if extra else []


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
