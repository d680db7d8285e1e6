"""Inventory: a checkpoint as a table, one row a tensor; and what becomes of each of its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemolab.checkpoint.modules import UNUSED_SCALES, Module
from nemolab.checkpoint.safetensors_header import Header, TensorEntry
from nemolab.checkpoint.structure import LEFT_OUT_PARTS

if TYPE_CHECKING:
    import pandas as pd

# What becomes of a tensor. A fifth verdict, refused, stops the opening: unknown tensors that hold bytes.
USED, UNUSED, LEFT_OUT, REPORTED = "used", "kept, not used", "left out", "reported"

COLUMNS = ("tensor", "module", "part", "format", "shape", "bytes", "shard")


class Inventory:
    """What a checkpoint holds. Takes a Checkpoint, or the modules alone (canonical name -> Module)."""

    def __init__(self, checkpoint):
        self.modules: Mapping[str, Module] = getattr(checkpoint, "modules", checkpoint)
        self.tensors: Mapping[str, TensorEntry] = getattr(checkpoint, "tensors", {})
        self.headers: Mapping[str, Header] = getattr(checkpoint, "headers", {})

    def frame(self) -> pd.DataFrame:
        """One row a tensor: tensor, module, part, format (the module's), shape (as stored), bytes, shard."""
        import pandas as pd

        rows = [
            (entry.name, module.name, module.part, module.format, entry.shape, entry.nbytes, entry.shard)
            for module in self.modules.values()
            for entry in module.tensors.values()
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def by_part(self) -> pd.DataFrame:
        """Modules, tensors and bytes of each part, largest first; index: part."""
        return self._summed(["part"])

    def by_format(self) -> pd.DataFrame:
        """Modules, tensors and bytes of each part in each format; index: part, format."""
        return self._summed(["part", "format"])

    def accounting(self) -> pd.DataFrame:
        """Tensors and bytes of every verdict and reason; they add up to all the data the files hold.

        used                    the model is run with them
        kept, not used          stored with it, multiplied by nothing: k_scale, v_scale
        left out                not run and in no store: mtp, vision, input_scale
        reported                tensors without a byte that nothing asks for
        """
        import pandas as pd

        rows = [
            (*judge(module, suffix), entry.name, entry.nbytes)
            for module in self.modules.values()
            for suffix, entry in module.tensors.items()
        ]
        judged = {name for _, _, name, _ in rows}
        rows += [(REPORTED, "empty", name, entry.nbytes) for name, entry in self.tensors.items() if name not in judged]
        frame = pd.DataFrame(rows, columns=["verdict", "reason", "tensor", "bytes"])
        grouped = frame.groupby(["verdict", "reason"])
        summed = grouped.agg(tensors=("tensor", "size"), bytes=("bytes", "sum"))
        return summed.sort_values("bytes", ascending=False).reset_index()

    def file_bytes(self) -> dict[str, int]:
        """Bytes of the files: {"files", "headers", "data"}; headers and data make up the files."""
        files = sum(header.file_bytes for header in self.headers.values())
        headers = sum(header.data_start_bytes for header in self.headers.values())
        return {"files": files, "headers": headers, "data": files - headers}

    def _summed(self, keys: list[str]) -> pd.DataFrame:
        grouped = self.frame().groupby(keys)
        summed = grouped.agg(modules=("module", "nunique"), tensors=("tensor", "size"), bytes=("bytes", "sum"))
        return summed.sort_values("bytes", ascending=False)


def judge(module: Module, suffix: str) -> tuple[str, str]:
    """(verdict, reason) of one tensor of a module."""
    if module.part in LEFT_OUT_PARTS:
        return LEFT_OUT, module.part
    if suffix == "input_scale":
        return LEFT_OUT, suffix
    if suffix in UNUSED_SCALES:
        return UNUSED, suffix
    return USED, "routed" if module.part == "routed" else "dense"
