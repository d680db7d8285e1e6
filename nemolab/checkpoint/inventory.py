"""Inventory: a checkpoint as a table, one row a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemolab.checkpoint.modules import Module

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("tensor", "module", "part", "format", "shape", "bytes", "shard")


class Inventory:
    """What a checkpoint holds. Takes a Checkpoint, or the modules alone (canonical name -> Module)."""

    def __init__(self, checkpoint):
        self.modules: Mapping[str, Module] = getattr(checkpoint, "modules", checkpoint)

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

    def _summed(self, keys: list[str]) -> pd.DataFrame:
        grouped = self.frame().groupby(keys)
        summed = grouped.agg(modules=("module", "nunique"), tensors=("tensor", "size"), bytes=("bytes", "sum"))
        return summed.sort_values("bytes", ascending=False)
