"""What of a checkpoint goes where in a store, and what a store was made from."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemolab.checkpoint import Checkpoint, Module, TensorEntry
from nemolab.checkpoint.checkpoint import SMALL_FILES
from nemolab.checkpoint.structure import LEFT_OUT_PARTS
from nemolab.errors import CheckpointError, StoreError
from nemolab.store.layout import BlockLayout
from nemolab.store.manifest import EXPERT_FORMAT


@dataclass(frozen=True)
class Contents:
    """Every tensor of a checkpoint, sorted by fate.

    experts    block index -> (up module, down module)
    dense      tensors copied as stored
    left_out   why -> names as stored
    """

    experts: list[tuple[Module, Module]]
    dense: list[TensorEntry]
    left_out: dict[str, list[str]]


def sort_contents(checkpoint: Checkpoint) -> Contents:
    """Decide for every tensor. Raises StoreError unless the routed experts are NVFP4, the one format blocks have."""
    experts = list(_routed(checkpoint))
    dense, left_out = [], {}
    placed = set()
    for module in checkpoint.modules.values():
        for suffix, entry in module.tensors.items():
            placed.add(entry.name)
            if module.part in LEFT_OUT_PARTS:
                left_out.setdefault(module.part, []).append(entry.source_name)
            elif suffix == "input_scale":
                left_out.setdefault("input_scale", []).append(entry.source_name)
            elif module.part != "routed":
                dense.append(entry)
    unplaced = [entry.source_name for name, entry in checkpoint.tensors.items() if name not in placed]
    if unplaced:  # the checkpoint refuses unknown tensors that hold bytes, so these are empty
        left_out["empty"] = unplaced
    dense.sort(key=lambda entry: (entry.shard, entry.offset_bytes))
    return Contents(experts, dense, {why: sorted(names) for why, names in sorted(left_out.items())})


def block_layout(checkpoint: Checkpoint, layout: str) -> BlockLayout:
    """The blocks this checkpoint's experts make."""
    return BlockLayout(layout, checkpoint.config.expert_inter, checkpoint.config.expert_in)


def fingerprint(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a store records about its source. Headers do not tell retrained weights apart, times of change do.

    Raises CheckpointError for a shard that is no longer as large as when its header was read.
    """
    shards = {}
    for name, facts in checkpoint.fingerprint().items():
        status = (checkpoint.path / name).stat()
        if status.st_size != facts["bytes"]:
            raise CheckpointError(
                f"{checkpoint.path / name} has {status.st_size:,} bytes now and had {facts['bytes']:,}: it was changed"
            )
        shards[name] = facts | {"mtime_ns": status.st_mtime_ns}
    small = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in checkpoint.small_files().items()}
    return {"name": checkpoint.path.resolve().name, "files": shards, "small_files": small}


def touched(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Shard -> facts that change with any change of it, also one that puts back size and time: [inode, ctime_ns]."""
    found = {name: (checkpoint.path / name).stat() for name in checkpoint.headers}
    return {name: [status.st_ino, status.st_ctime_ns] for name, status in found.items()}


def missing_small_files(checkpoint: Checkpoint) -> list[str]:
    """Names of small files a checkpoint usually has and this one does not."""
    return [name for name in SMALL_FILES if name not in checkpoint.small_files()]


def _routed(checkpoint: Checkpoint) -> Iterator[tuple[Module, Module]]:
    config = checkpoint.config
    if not config.moe_layers:
        raise StoreError(f"{checkpoint.path} has no MoE layer, so there are no experts to repack")
    for layer in config.moe_layers:
        for expert in range(config.n_experts):
            prefix = f"backbone.layers.{layer}.mixer.experts.{expert}"
            pair = checkpoint.modules[f"{prefix}.up_proj"], checkpoint.modules[f"{prefix}.down_proj"]
            for module in pair:
                if module.format != EXPERT_FORMAT:
                    raise StoreError(
                        f"layer {layer}, expert {expert}: {module.name} is {module.format}; "
                        f"blocks hold {EXPERT_FORMAT} experts only"
                    )
            yield pair
