"""What a config does not say: sizes for which transformers' defaults stand, and fields left null."""

import dataclasses
from typing import Any

from nemolab.plan.meta_model import TEXT_KEYS

# Without these a config describes no model of its own; every family of transformers knows them by these names.
_OWN_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
_MOST_NAMED = 8


def described_parts(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """A config and, however deep, the parts of it that may describe a language model."""
    nested = [part for key in TEXT_KEYS if isinstance(raw.get(key), dict) for part in described_parts(raw[key])]
    return [raw, *nested]


def without_nulls(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with nothing said where it says null, at every depth."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in raw.items()
        if value is not None
    }


def note_defaults(raw: dict[str, Any], config: Any) -> list[str]:
    """A sentence where the sizes of a model are transformers' rather than the config's: it may call them otherwise.

    config  transformers' object of the language model
    """
    stated = {key for part in described_parts(raw) for key in part}
    aliases = {known: alias for alias, known in (getattr(config, "attribute_map", None) or {}).items()}
    mapped = {alias: known for known, alias in aliases.items()}
    missing = [
        name
        for name in _OWN_SIZES
        if hasattr(config, name) and not stated & {name, mapped.get(name), aliases.get(name)}
    ]
    if not missing or not dataclasses.is_dataclass(config):
        return []
    known = {field.name for field in dataclasses.fields(config)} | set(mapped)
    unlisted = sorted(
        key for part in described_parts(raw) for key, value in part.items() if type(value) is int and key not in known
    )
    defaults = ", ".join(f"{name} {getattr(config, name)}" for name in missing)
    note = f"transformers' own {defaults} stand, as the config states none by that name"
    if unlisted:
        note += f"; it states {', '.join(unlisted[:_MOST_NAMED])}, which are no fields of {type(config).__name__}"
    return [note]
