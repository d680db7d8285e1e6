"""Names of tensors: one table of prefixes, and the canonical spelling everything else uses.

Canonical is the vendor's Nemotron-3-Super spelling: backbone.layers.N.mixer..., backbone.embeddings.weight,
lm_head.weight, mtp.... Vision tensors keep the names they are stored under.
"""

import re
from collections.abc import Iterable

from nemolab.errors import CheckpointError

CANONICAL_BACKBONE = "backbone."

# How the language model may be prefixed -> what its lm_head and mtp are prefixed with. Longer prefixes come first.
PREFIXES = {
    "model.language_model.backbone.": "model.language_model.",
    "model.language_model.": "",
    "language_model.backbone.": "language_model.",
    "language_model.model.": "language_model.",
    "backbone.": "",
    "model.": "",
}

_VISION_PREFIXES = tuple(
    root + name for root in ("", "model.") for name in ("vision_model.", "vision_projector.", "mlp1.")
)


def find_prefix(names: Iterable[str]) -> str:
    """The prefix under which a checkpoint keeps its backbone. Raises CheckpointError showing the first names found."""
    names = list(names)
    for prefix in PREFIXES:
        if any(name.startswith((prefix + "layers.", prefix + "embeddings.")) for name in names):
            return prefix
    shown = ", ".join(sorted(names)[:3]) or "no tensors at all"
    raise CheckpointError(
        f"no layers found under a known prefix ({', '.join(PREFIXES)}): the first names are {shown};"
        " expected names like backbone.layers.0.norm.weight"
    )


def canonical_name(name: str, prefix: str) -> str:
    """A stored name in the canonical spelling; names outside the language model stay as they are."""
    if name.startswith(prefix):
        return CANONICAL_BACKBONE + name[len(prefix) :]
    root = PREFIXES[prefix]
    if root and name.startswith((root + "lm_head.", root + "mtp.")):
        return name[len(root) :]
    return name


def stored_name(canonical: str, prefix: str) -> str:
    """The way back: how a checkpoint of this prefix spells the canonical name of a tensor or module."""
    if canonical.startswith(CANONICAL_BACKBONE):
        return prefix + canonical[len(CANONICAL_BACKBONE) :]
    return PREFIXES.get(prefix, "") + canonical if canonical.partition(".")[0] in ("lm_head", "mtp") else canonical


def prefix_of(entries: Iterable) -> str:
    """How the entries of an opened checkpoint spell the backbone, from one whose canonical name lies in it."""
    for entry in entries:
        rest = entry.name[len(CANONICAL_BACKBONE) :]
        if entry.name.startswith(CANONICAL_BACKBONE) and entry.source_name.endswith(rest):
            return entry.source_name.removesuffix(rest)
    return CANONICAL_BACKBONE


def kind_of(name: str, part: str) -> str:
    """What a module is wherever it stands: `in_proj`, `shared_experts.up_proj`, `experts`, `lm_head`, `mtp.q_proj`."""
    if part == "vision":
        return "vision"
    kind = re.sub(r"^(backbone\.|mtp\.)?(layers\.\d+\.)?(mixer\.)?", "", name)
    kind = re.sub(r"^experts\..*", "experts", kind)
    return f"mtp.{kind}" if part == "mtp" else kind


def is_mtp(canonical: str) -> bool:
    """True for the multi-token-prediction block, which is recognised and counted, not run."""
    return canonical.startswith("mtp.")


def is_vision(canonical: str) -> bool:
    """True for the vision tower and its projector, in either layout."""
    return canonical.startswith(_VISION_PREFIXES)
