"""Bytes per token of several models side by side: those we count, those whose figures are published, other families."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemolab import paths
from nemolab.checkpoint.formats import matrix_bytes
from nemolab.checkpoint.json_files import read_json
from nemolab.errors import NemolabError
from nemolab.plan.planner import plan
from nemolab.plan.result import ExpertGroup, Plan
from nemolab.plan.weight_formats import PUBLISHED, weight_bytes
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


def compare_families() -> pd.DataFrame:
    """One row for each family's model in `data/configs/`, fewest bytes a token first; each as its publisher stores it.

    Nemotron-3-Super stands among them.

    Columns: model, model_type, moe_layers, experts, top_k, expert_format, expert_bytes, bytes_per_token, gb_per_token
    (10^9), gb_per_token_nvfp4 (the same experts in NVFP4), routed_gib (2^30), share_read (of the routed bytes, 0..1),
    total_params, active_params_per_token, published_params (what the publisher says, as written or exact; may be NaN).
    """
    import pandas as pd

    rows = [_family_row(path) for path in [paths.configs_folder() / COUNTED_CONFIGS[0], *family_configs()]]
    return pd.DataFrame(rows).sort_values("bytes_per_token", ignore_index=True)


def family_configs() -> list[Path]:
    """The configs of `data/configs/` that are of other families than the one the engine runs, by name."""
    files = sorted(paths.configs_folder().glob("*.json"))
    return [path for path in files if not path.stem.startswith(("nemotron", "published"))]


@cache
def _family_plan(path: Path) -> Plan:
    """Built once: the tables of the README and of a notebook ask for the same."""
    return plan(path, experts_as=PUBLISHED)


def _family_row(path: Path) -> dict[str, Any]:
    counted = _family_plan(path)
    in_nvfp4 = sum(len(group.layers) * group.top_k * _expert_bytes_as(group, "nvfp4") for group in counted.groups)
    return {
        "model": counted.name,
        "model_type": counted.model_type,
        "moe_layers": counted.moe_layers,
        "experts": counted.experts,
        "top_k": counted.top_k,
        "expert_format": counted.experts_as,
        "expert_bytes": counted.expert_bytes,
        "bytes_per_token": counted.bytes_per_token,
        "gb_per_token": counted.bytes_per_token / 1e9,
        "gb_per_token_nvfp4": in_nvfp4 / 1e9,
        "routed_gib": counted.routed_bytes / 2**30,
        "share_read": counted.bytes_per_token / counted.routed_bytes,
        "total_params": counted.total_params,
        "active_params_per_token": counted.active_params_per_token,
        "published_params": read_json(path)["nemolab"].get("published", {}).get("total_params", float("nan")),
    }


def _expert_bytes_as(group: ExpertGroup, format: str) -> int:
    """An expert of a group in another format; its biases stay in BF16."""
    matrices = sum(weight_bytes(rows, columns, format) for rows, columns in group.matrices)
    biases = group.expert_params - sum(rows * columns for rows, columns in group.matrices)
    return matrices + 2 * biases


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
