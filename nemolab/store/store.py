"""An opened store: what it holds, its dense tensors, and readers for its blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.modules import Module, find_modules
from nemolab.checkpoint.reading import read_range_into
from nemolab.checkpoint.safetensors_header import TensorEntry, read_header
from nemolab.errors import CheckpointError, StoreError
from nemolab.progress import say
from nemolab.store import files
from nemolab.store.layout import BlockLayout, ExpertViews
from nemolab.store.manifest import Manifest
from nemolab.store.reader import DEFAULT_THREADS, BlockReader

if TYPE_CHECKING:
    import torch


class Store:
    """A folder made by `repack`. Opening reads no weights and holds no descriptor.

    .config         ModelConfig of the model
    .layout         "neuron" or "source"; .block_layout has the sizes that follow from it
    .n_layers       MoE layers; .n_experts experts in each
    .block_bytes    an expert's block, padded to whole pages; .payload_bytes without the padding
    .expert_shape   (I, X): neurons, width
    .globals        float32 [n_layers, n_experts, 2]: `weight_scale_2` of up and down
    .dense_tensors  canonical tensor name -> where it lies in dense.safetensors
    .dense          canonical module name -> Module, for everything but the routed experts
    .fingerprint    tells models apart, retrained ones too; the same for both layouts and however the files were cut
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest
        self.block_layout: BlockLayout = manifest.block_layout
        self.layout = manifest.layout
        self.n_layers, self.n_experts = manifest.layers, manifest.experts
        self.block_bytes = self.block_layout.block_bytes
        self.payload_bytes = self.block_layout.payload_bytes
        self.expert_shape = (manifest.expert_inter, manifest.expert_in)

    @classmethod
    def open(cls, path: str | Path, check_sizes: bool = True) -> Store:
        """Open and check a store. Raises StoreError where the folder is none, or unfinished, or its sizes disagree.

        check_sizes  False: files of other sizes are found when they are read (`verify` lists all of them)
        """
        path = Path(path).expanduser()
        store = cls(path, Manifest.read(path, check_sizes))
        try:
            config = store.config
        except CheckpointError as problem:
            raise StoreError(f"{path}: {problem}") from problem
        shape = (len(config.moe_layers), config.n_experts, config.expert_inter, config.expert_in)
        if shape != (store.n_layers, store.n_experts, *store.expert_shape):
            raise StoreError(
                f"{path}: config.json describes {shape[0]} MoE layers of {shape[1]} experts {shape[2:]}, "
                f"the manifest {store.n_layers} of {store.n_experts} experts {store.expert_shape}"
            )
        return store

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.load(self.path)

    @cached_property
    def fingerprint(self) -> str:
        # The checksums of all dense tensors: what a model routes by is among them.
        facts = [self.n_layers, self.n_experts, *self.expert_shape, sorted(self.manifest.dense_crc32.items())]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @cached_property
    def globals(self) -> np.ndarray:
        path = self.path / files.GLOBALS
        entries = _header(path)
        entry = entries.get("weight_scale_2")
        shape = (self.n_layers, self.n_experts, 2)
        if entry is None or entry.dtype != "F32" or entry.shape != shape:
            found = f"{entry.dtype} {list(entry.shape)}" if entry else f"only {sorted(entries)}"
            raise StoreError(f"{path}: weight_scale_2 F32 {list(shape)} was expected, {found} was found")
        values = np.empty(shape, np.float32)
        _read(path, entry.offset_bytes, values)
        bad = np.argwhere(~(np.isfinite(values) & (values >= 0)))
        if len(bad):
            layer, expert, matrix = bad[0].tolist()
            raise StoreError(
                f"{path}: weight_scale_2 of layer {self.config.moe_layers[layer]}, expert {expert}, "
                f"{('up', 'down')[matrix]} is {values[layer, expert, matrix]}; a finite factor >= 0 was expected"
            )
        return values

    @cached_property
    def dense_tensors(self) -> Mapping[str, TensorEntry]:
        return _header(self.path / files.DENSE)

    @cached_property
    def dense(self) -> Mapping[str, Module]:
        try:
            return find_modules(self.dense_tensors, self.config, without=("routed",))[0]
        except CheckpointError as problem:
            raise StoreError(f"{self.path / files.DENSE}: {problem}") from problem

    def dense_tensor(self, name: str) -> torch.Tensor:
        """One dense tensor, in stored dtype and shape, in memory of its own. Raises StoreError for an unknown name."""
        from nemolab.checkpoint.torch_dtypes import as_torch

        entry = self.dense_tensors.get(name)
        if entry is None:
            raise StoreError(f"{self.path / files.DENSE} holds no tensor {name!r}")
        stored = np.empty(entry.nbytes, np.uint8)
        _read(self.path / files.DENSE, entry.offset_bytes, stored)
        return as_torch(stored, entry.dtype, entry.shape)

    def dense_chunks(self, name: str, chunk_bytes: int) -> Iterator[np.ndarray]:
        """A dense tensor's bytes in pieces of at most `chunk_bytes`."""
        entry = self.dense_tensors[name]
        for start in range(0, entry.nbytes, chunk_bytes):
            piece = np.empty(min(chunk_bytes, entry.nbytes - start), np.uint8)
            _read(self.path / files.DENSE, entry.offset_bytes + start, piece)
            yield piece

    def dense_module(self, name: str) -> tuple[str, dict[str, torch.Tensor], tuple[int, ...]]:
        """(format, suffix -> tensor as stored, logical shape) of a dense module."""
        module = self.dense.get(name)
        if module is None:
            raise StoreError(f"{self.path} holds no dense module {name!r}")
        tensors = {suffix: self.dense_tensor(entry.name) for suffix, entry in module.tensors.items()}
        return module.format, tensors, module.shape

    def small_file(self, name: str) -> Path | None:
        """A copied file such as tokenizer.json, or None where the checkpoint had none."""
        path = self.path / name
        return path if name in self.manifest.files and path.is_file() else None

    def block_index(self, layer: int, expert: int) -> int:
        """Where an expert lies in experts.bin, in blocks; `layer` counts MoE layers only."""
        return layer * self.n_experts + expert

    def views(self, block: np.ndarray) -> ExpertViews:
        """The planes of a block (uint8 [block_bytes]); shapes by layout."""
        return self.block_layout.views(block)

    def open_reader(
        self,
        threads: int = DEFAULT_THREADS,
        direct: bool | None = None,
        announce: Callable[[str], None] = say,
    ) -> BlockReader:
        """A reader of experts.bin; the caller closes it."""
        return BlockReader(
            self.path / files.EXPERTS,
            self.block_bytes,
            self.manifest.blocks,
            threads=threads,
            direct=direct,
            announce=announce,
        )


def _header(path: Path) -> dict[str, TensorEntry]:
    try:
        return read_header(path)[1]
    except CheckpointError as problem:
        raise StoreError(str(problem)) from problem


def _read(path: Path, offset_bytes: int, buffer) -> None:
    try:
        read_range_into(path, offset_bytes, buffer)
    except CheckpointError as problem:
        raise StoreError(str(problem)) from problem
