"""Checkpoint: a vendor's folder, opened, checked and read. Nothing else in the package reads vendor files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemolab.checkpoint.config import CONFIG_FILE, ModelConfig
from nemolab.checkpoint.modules import Module, find_modules
from nemolab.checkpoint.names import canonical_name, find_prefix
from nemolab.checkpoint.quant_metadata import cross_check_metadata, read_metadata
from nemolab.checkpoint.reading import read_range, read_range_into
from nemolab.checkpoint.safetensors_header import Header, TensorEntry, place_of
from nemolab.checkpoint.shards import open_shards
from nemolab.checkpoint.structure import EMBEDDINGS, HEAD
from nemolab.checkpoint.values import check_block_scales, check_factor, check_order
from nemolab.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "hf_quant_config.json",
)  # fmt: skip

STORE_FILES = ("manifest.json", "experts.bin")  # a store looks like a checkpoint otherwise: config, safetensors
_COMPARE_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class ExpertBytes:
    """One routed NVFP4 expert as stored (I neurons, X wide): uint8 arrays of packed values and of E4M3 scales."""

    up_values: np.ndarray  # [I, X/2]
    up_scales: np.ndarray  # [I, X/16]
    down_values: np.ndarray  # [X, I/2]
    down_scales: np.ndarray  # [X, I/16]
    up_scale_2: float
    down_scale_2: float


class Checkpoint:
    """An opened checkpoint. `Checkpoint.open(folder)` reads headers only; tensors are read when asked for.

    path     the folder
    config   ModelConfig
    prefix   how the files spell the backbone, such as "backbone." or "language_model.backbone."
    headers  file name -> Header
    notes    readable lines: what was left aside, what metadata and tensors disagree about
    tensors  canonical name -> TensorEntry
    modules  canonical name -> Module
    Reading a name that is not there, or a file that cannot be read to the end of the tensor, raises CheckpointError.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        prefix: str,
        headers: dict[str, Header],
        tensors: dict[str, TensorEntry],
        modules: dict[str, Module],
        notes: list[str],
    ):
        self.path, self.config, self.prefix = path, config, prefix
        self.headers, self.tensors, self.modules, self.notes = headers, tensors, modules, notes

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open and check a folder. Raises CheckpointError naming file, tensor, what was found and what was expected."""
        folder = Path(path)
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise CheckpointError(f"{folder} {what}; the folder of a checkpoint was needed")
        if not os.path.lexists(folder / CONFIG_FILE):
            raise CheckpointError(f"{folder} has no {CONFIG_FILE}, so it is no checkpoint folder")
        if all((folder / name).is_file() for name in STORE_FILES):
            raise CheckpointError(f"{folder} is a store made by repack; the checkpoint it was made from was needed")
        config = ModelConfig.load(folder)
        try:
            shards = open_shards(folder)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
        sources = read_metadata(folder, config)  # before the tensors are judged: a foreign quant_method says more
        prefix = find_prefix(shards.tensors)
        tensors = rename_tensors(shards.tensors, prefix)
        modules, module_notes = find_modules(tensors, config)
        notes = [*config.notes, *shards.notes, *module_notes, *cross_check_metadata(sources, modules)]
        checkpoint = cls(folder, config, prefix, shards.headers, tensors, modules, notes)
        checkpoint._note_untied_head()
        return checkpoint

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self.tensors):,} tensors, {len(self.modules):,} modules)"

    def entry(self, name: str) -> TensorEntry:
        """A tensor's entry by canonical name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}") from None

    def read_into(self, name: str, buffer) -> None:
        """Fill `buffer` (writable, exactly the tensor's bytes) with a tensor's stored bytes."""
        entry = self.entry(name)
        wanted = memoryview(buffer).nbytes
        if wanted != entry.nbytes:
            raise CheckpointError(f"{name} has {entry.nbytes:,} bytes, the buffer {wanted:,}")
        read_range_into(self.path / entry.shard, entry.offset_bytes, buffer)

    def read_bytes(self, name: str) -> np.ndarray:
        """A tensor's stored bytes, uint8 [nbytes], in memory of our own."""
        entry = self.entry(name)
        return read_range(self.path / entry.shard, entry.offset_bytes, entry.nbytes)

    def read_chunks(self, name: str, chunk_bytes: int) -> Iterator[np.ndarray]:
        """A tensor's stored bytes in pieces of at most `chunk_bytes`, for tensors larger than one wants to hold."""
        entry = self.entry(name)
        for start in range(0, entry.nbytes, chunk_bytes):
            length = min(chunk_bytes, entry.nbytes - start)
            yield read_range(self.path / entry.shard, entry.offset_bytes + start, length)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor with its stored dtype and shape."""
        from nemolab.checkpoint.torch_dtypes import as_torch

        entry = self.entry(name)
        return as_torch(self.read_bytes(name), entry.dtype, entry.shape)

    def decode(self, module_name: str) -> torch.Tensor:
        """A module's weight as float32 in its logical shape, whatever its format."""
        from nemolab.checkpoint.formats import decode_fp8, decode_nvfp4

        if module_name not in self.modules:
            raise CheckpointError(f"{self.path} has no module {module_name!r}")
        module = self.modules[module_name]
        stored = {suffix: self.tensor(entry.name) for suffix, entry in module.tensors.items()}
        if module.format == "nvfp4":
            return decode_nvfp4(stored["weight"], stored["weight_scale"], stored["weight_scale_2"])
        if module.format == "fp8":
            return decode_fp8(stored["weight"], stored["weight_scale"])
        return stored["weight"].float()

    def expert(self, layer: int, expert: int) -> ExpertBytes:
        """The bytes of one routed expert; `layer` counts MoE layers only. Raises CheckpointError if it is not NVFP4."""
        layers, experts = len(self.config.moe_layers), self.config.n_experts
        if not (0 <= layer < layers and 0 <= expert < experts):
            raise CheckpointError(f"no expert {expert} in MoE layer {layer}: there are {layers} layers of {experts}")
        index = self.config.moe_layers[layer]
        prefix = f"backbone.layers.{index}.mixer.experts.{expert}"
        parts = {}
        for matrix in ("up", "down"):
            module = self.modules[f"{prefix}.{matrix}_proj"]
            if module.format != "nvfp4":
                raise CheckpointError(f"layer {index}, expert {expert}: {module.name} is {module.format}, not NVFP4")
            parts[f"{matrix}_values"] = self._matrix_bytes(module.tensors["weight"])
            parts[f"{matrix}_scales"] = self._matrix_bytes(module.tensors["weight_scale"])
            parts[f"{matrix}_scale_2"] = self.scalar(module.tensors["weight_scale_2"].name)
        return ExpertBytes(**parts)

    def scalar(self, name: str) -> float:
        """A one-element F32 tensor as a float. Raises CheckpointError unless it is finite and not negative."""
        entry = self.entry(name)
        value = float(self.read_bytes(name).view("<f4")[0])
        check_factor(entry, value)
        return value

    def fingerprint(self) -> dict[str, dict]:
        """{file: {"bytes", "header_sha256"}} of the shards: tells two checkpoints apart without reading their data."""
        return {
            file: {"bytes": header.file_bytes, "header_sha256": header.sha256}
            for file, header in sorted(self.headers.items())
        }

    def small_files(self) -> dict[str, Path]:
        """The files beside the weights that are present: configs, tokenizer, chat template."""
        return {name: self.path / name for name in SMALL_FILES if (self.path / name).is_file()}

    def _matrix_bytes(self, entry: TensorEntry) -> np.ndarray:
        return self.read_bytes(entry.name).reshape(entry.shape)

    def _note_untied_head(self) -> None:
        """A config that says tied beside a stored head of other values: the stored head is used, and that is said."""
        if not self.config.tie_word_embeddings or HEAD not in self.modules:
            return
        head, embeddings = self.modules[HEAD].tensors["weight"], self.modules[EMBEDDINGS].tensors["weight"]
        if not self._same_bytes(head, embeddings):
            self.notes.append(
                "config.json: tie_word_embeddings is true, but lm_head.weight is stored with other values than the"
                " embeddings; the stored head is used"
            )

    def _same_bytes(self, a: TensorEntry, b: TensorEntry) -> bool:
        if a.dtype != b.dtype or a.nbytes != b.nbytes:
            return False
        for start in range(0, a.nbytes, _COMPARE_CHUNK_BYTES):
            length = min(_COMPARE_CHUNK_BYTES, a.nbytes - start)
            pieces = [read_range(self.path / e.shard, e.offset_bytes + start, length) for e in (a, b)]
            if not np.array_equal(*pieces):
                return False
        return True


def rename_tensors(stored: dict[str, TensorEntry], prefix: str) -> dict[str, TensorEntry]:
    """Entries by canonical name. Raises CheckpointError when two stored names mean the same tensor."""
    renamed: dict[str, TensorEntry] = {}
    for source_name, entry in stored.items():
        name = canonical_name(source_name, prefix)
        if name in renamed:
            raise CheckpointError(f"{source_name} and {renamed[name].source_name} are both {name}: which one counts?")
        renamed[name] = entry if name == source_name else replace(entry, name=name)
    return renamed


def check_expert_scales(expert: ExpertBytes, up: Module, down: Module) -> None:
    """Raise CheckpointError with coordinates for block scales of an expert that nobody can use.

    NaN (its values would be), negative ones (hardware disagrees about them), and scales in the swizzled order.
    expert  anything with the four arrays of ExpertBytes, read from the tensors of these two modules
    """
    for values, scales, module in (
        (expert.up_values, expert.up_scales, up),
        (expert.down_values, expert.down_scales, down),
    ):
        where = place_of(module.tensors["weight_scale"])
        check_block_scales(scales, where)
        check_order(values, scales, where)
