"""Bytes per token of several models side by side: those we count, and those whose figures are published."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemolab import paths
from nemolab.checkpoint.formats import matrix_bytes
from nemolab.checkpoint.json_files import read_json
from nemolab.errors import NemolabError
from nemolab.plan.planner import plan
from nemolab.units import PAGE_BYTES

if TYPE_CHECKING:
    import pandas as pd

COUNTED_CONFIGS = ("nemotron-3-super.json", "nemotron-3-nano.json")


@dataclass(frozen=True)
class Published:
    """A model as its source describes it; fields as in data/README.md. `read_published` recomputes `expert_bytes`."""

    name: str
    moe_layers: int
    experts: int
    top_k: int
    expert: str
    expert_params: int
    format: str
    expert_bytes: int
    per_token_as_published: str
    routed_as_published: str
    source: str
    confidence: str

    @property
    def bytes_per_token(self) -> int:
        return self.moe_layers * self.top_k * self.expert_bytes

    @property
    def routed_bytes(self) -> int:
        return self.moe_layers * self.experts * self.expert_bytes


def read_published(path: str | Path | None = None) -> list[Published]:
    """The models of `data/configs/published.json`.

    Raises NemolabError where a stated block is not what its parameters weigh in its format.
    """
    path = Path(path) if path else paths.configs_folder() / "published.json"
    models = [Published(**entry) for entry in read_json(path)["models"]]
    for model in models:
        # Values and scales depend on the number of parameters alone, so one long row stands for all matrices.
        counted = matrix_bytes(1, model.expert_params, model.format)
        if counted != model.expert_bytes:
            raise NemolabError(
                f"{path}: {model.name} states {model.expert_bytes:,} bytes an expert, counted {counted:,}"
            )
    return models


def compare_models(model: str | Path | None = None) -> pd.DataFrame:
    """One row a model: the checkpoint at `model` (default: the one in use), Super, Nano, and published ones.

    Columns: model, moe_layers, experts, top_k, expert_format, expert_bytes, pages_per_expert, bytes_per_token,
    gb_per_token (10^9), gib_per_token (2^30), routed_bytes, routed_gib, dense_gib (NaN where it is not published),
    reads_per_token, how ("counted" or "published, recomputed"), source.
    """
    import pandas as pd

    folder = paths.model_folder(model)
    counted = [plan(folder)] + [plan(paths.configs_folder() / name) for name in COUNTED_CONFIGS]
    rows = [_row(p.name, p, p.experts_as, "counted", p.source) | {"dense_gib": p.dense_bytes / 2**30} for p in counted]
    rows += [_row(p.name, p, p.format, "published, recomputed", p.source) for p in read_published()]
    return pd.DataFrame(rows)


def _row(name: str, sizes: Any, expert_format: str, how: str, source: str) -> dict[str, Any]:
    return {
        "model": name,
        "moe_layers": sizes.moe_layers,
        "experts": sizes.experts,
        "top_k": sizes.top_k,
        "expert_format": expert_format,
        "expert_bytes": sizes.expert_bytes,
        "pages_per_expert": sizes.expert_bytes / PAGE_BYTES,
        "reads_per_token": sizes.moe_layers * sizes.top_k,
        "bytes_per_token": sizes.bytes_per_token,
        "gb_per_token": sizes.bytes_per_token / 1e9,
        "gib_per_token": sizes.bytes_per_token / 2**30,
        "routed_bytes": sizes.routed_bytes,
        "routed_gib": sizes.routed_bytes / 2**30,
        "dense_gib": float("nan"),
        "how": how,
        "source": source,
    }
