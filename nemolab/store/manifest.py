"""`manifest.json`: what a store is, how large its files are and what they were made from. Written last of all."""

import dataclasses
import json
import stat
import typing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nemolab.checkpoint.json_files import read_json
from nemolab.errors import CheckpointError, StoreError
from nemolab.store import files
from nemolab.store.layout import BlockLayout
from nemolab.units import PAGE_BYTES

FORMAT = "nemolab-store"
VERSION = 1
EXPERT_FORMAT = "nvfp4"  # the one format that blocks have
MOST_BLOCKS = 1 << 22  # full Super has 20,480; what grows with the count (checksums, global scales) stays small


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says. Sizes in bytes; nothing in it depends on when or where the store was made.

    layers, experts      MoE layers and experts a layer; block i = layer * experts + expert
    files                name -> {"bytes", "crc32"}; experts.bin has its checksums in checksums.npy
    dense_crc32          tensor name -> crc32 of its bytes in dense.safetensors
    source               {"name", "files": {name: {bytes, header_sha256, mtime_ns}}, "small_files": {name: sha256}}
    direct_io            whether experts.bin was written past the page cache (shown by the kernel, not assumed)
    left_out             why -> names of the checkpoint's tensors that no file of the store holds
    missing_small_files  small files the checkpoint did not have
    """

    layout: str
    expert_inter: int
    expert_in: int
    expert_format: str
    layers: int
    experts: int
    files: dict[str, dict[str, int]]
    dense_crc32: dict[str, int]
    source: dict[str, Any]
    direct_io: bool
    left_out: dict[str, list[str]] = field(default_factory=dict)
    missing_small_files: list[str] = field(default_factory=list)

    @cached_property
    def block_layout(self) -> BlockLayout:
        return BlockLayout(self.layout, self.expert_inter, self.expert_in)

    @property
    def blocks(self) -> int:
        return self.layers * self.experts

    @property
    def experts_bytes(self) -> int:
        """Size of experts.bin."""
        return self.blocks * self.block_layout.block_bytes

    def to_dict(self) -> dict[str, Any]:
        """As written: format, version and the sizes a reader in another language needs come first."""
        layout = self.block_layout
        head = {
            "format": FORMAT,
            "version": VERSION,
            "page_bytes": PAGE_BYTES,
            "block_bytes": layout.block_bytes,
            "payload_bytes": layout.payload_bytes,
            "planes": [{"name": p.name, "offset_bytes": p.offset_bytes, "shape": list(p.shape)} for p in layout.planes],
        }
        return head | {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def write(self, folder: Path) -> None:
        """Write it durably, after the names of all other files; from then on the folder is a store."""
        files.sync_folder(folder)
        with files.finished_file(folder / files.MANIFEST) as file:
            file.write((json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n").encode())
        files.sync_folder(folder)

    @classmethod
    def read(cls, folder: str | Path, check_sizes: bool = True) -> "Manifest":
        """Read and check it, and check the sizes of the files it names unless told not to. Raises StoreError."""
        folder = Path(folder)
        path = folder / files.MANIFEST
        if not folder.is_dir():
            raise StoreError(f"{folder} is no folder; a store made by `nemolab repack` was expected")
        if not path.exists():
            raise StoreError(f"{folder} has no {files.MANIFEST}: {_guess_why(folder)}")
        try:
            manifest = cls.from_dict(read_json(path), path)
        except CheckpointError as problem:
            raise StoreError(str(problem)) from problem
        problems = manifest.list_size_problems(folder) if check_sizes else []
        if problems:
            raise StoreError(f"{problems[0]}: repack it again")
        return manifest

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str | Path = files.MANIFEST) -> "Manifest":
        """The manifest in a JSON document. Raises StoreError naming the field, what was found and what was expected."""
        if raw.get("format") != FORMAT:
            raise StoreError(f"{where}: format {raw.get('format')!r}; {FORMAT!r} was expected, so this is no store")
        if raw.get("version") != VERSION:
            raise StoreError(f"{where}: version {raw.get('version')!r}; this nemolab reads {VERSION}: repack it again")
        values = {}
        for known in dataclasses.fields(cls):
            kind = typing.get_origin(known.type) or known.type  # dict for dict[str, int]
            value = raw.get(known.name)
            # bool is an int in Python, and a layer count of `true` is none
            if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value <= 0)):
                raise StoreError(f"{where}: {known.name} is {value!r}; a {kind.__name__} was expected")
            values[known.name] = value
        if values["layers"] * values["experts"] > MOST_BLOCKS:
            raise StoreError(
                f"{where}: {values['layers']:,} layers of {values['experts']:,} experts; a store has {MOST_BLOCKS:,} "
                "blocks at most"
            )
        for name, record in values["files"].items():
            sizes = record if isinstance(record, dict) else {"bytes": None}
            # type() and not isinstance: True is no size.
            sound = all(type(sizes.get(key, 0)) is int and sizes.get(key, 0) >= 0 for key in ("bytes", "crc32"))
            if not _is_plain(name) or not sound or "bytes" not in sizes:
                raise StoreError(f"{where}: files: {name!r}: {record!r}; a plain name with its bytes was expected")
        _check_facts(values, where)
        if values["expert_format"] != EXPERT_FORMAT:
            raise StoreError(f"{where}: expert_format {values['expert_format']!r}; blocks hold {EXPERT_FORMAT} experts")
        for name in (files.EXPERTS, files.GLOBALS, files.DENSE, files.CHECKSUMS):
            if name not in values["files"]:
                raise StoreError(f"{where}: {name} is not listed under files")
        manifest = cls(**values)
        expected = manifest.to_dict()
        for derived in ("page_bytes", "block_bytes", "payload_bytes", "planes"):
            if raw.get(derived) != expected[derived]:
                raise StoreError(
                    f"{where}: {derived} is {raw.get(derived)!r}; the layout {manifest.layout} of experts "
                    f"{manifest.expert_inter} x {manifest.expert_in} needs {expected[derived]!r}"
                )
        stated = manifest.files[files.EXPERTS]["bytes"]
        if stated != manifest.experts_bytes:
            raise StoreError(
                f"{where}: {files.EXPERTS} has {stated} bytes there; {manifest.blocks} blocks of "
                f"{manifest.block_layout.block_bytes} take {manifest.experts_bytes}"
            )
        return manifest

    def list_size_problems(self, folder: Path) -> list[str]:
        """A line for every file that is missing, no regular file or of another size than recorded."""
        problems = []
        for name, record in self.files.items():
            path, wanted = folder / name, record["bytes"]
            try:
                status = path.stat()
            except OSError:
                problems.append(f"{path} is missing; the manifest lists it with {wanted} bytes")
                continue
            if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device read without end
                problems.append(f"{path} is no regular file; the manifest lists it with {wanted} bytes")
            elif status.st_size != wanted:
                problems.append(f"{path} has {status.st_size} bytes, the manifest says {wanted}")
        return problems


def _is_plain(name: str) -> bool:
    """A name within the folder: no path, no way up, nothing a file system or a terminal stumbles over."""
    return name not in ("", ".", "..") and name.isprintable() and not {"/", "\\"} & set(name)


def _check_facts(values: dict[str, Any], where: str | Path) -> None:
    """What only `verify` and a comparison with the source look at, checked here so that they need not."""
    source = values["source"]
    facts = {
        "dense_crc32": all(type(value) is int for value in values["dense_crc32"].values()),
        "left_out": all(_are_names(names) for names in values["left_out"].values()),
        "missing_small_files": _are_names(values["missing_small_files"]),
        "source.files": _is_table(source.get("files"), dict),
        "source.small_files": _is_table(source.get("small_files"), str),
    }
    for field_name, sound in facts.items():
        if not sound:
            raise StoreError(f"{where}: {field_name} is not of the form that repack writes")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_table(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())


def _guess_why(folder: Path) -> str:
    if any(folder.glob(f"*{files.PARTIAL}")):
        return "a repack into it was interrupted or is still at work; run `nemolab repack` again"
    if (folder / "config.json").exists():
        return "it looks like a checkpoint; make a store of it with `nemolab repack`"
    return "it is no store; make one with `nemolab repack`"
