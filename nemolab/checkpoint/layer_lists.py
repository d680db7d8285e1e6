"""What each layer is, from any of the three spellings in which configs of the family say it."""

from nemolab.errors import CheckpointError

# Of a pattern.
LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_WORDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "moe": "moe",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
}
SPELLINGS = ("hybrid_override_pattern", "layers_block_type", "layer_types")
MTP_SPELLINGS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type", "mtp_layer_types")

_MOST_LAYERS = 10_000


def read_layer_list(config: dict, where: str, spellings: tuple[str, ...] = SPELLINGS) -> tuple[str, ...] | None:
    """The layers as ("mamba" | "moe" | "attention" | "mlp", ...), or None when no spelling is there.

    Raises CheckpointError for an unknown letter or word (with its place), and when two spellings contradict each other.
    """
    found = {key: _parse(config[key], f"{where}: {key}") for key in spellings if config.get(key) is not None}
    if not found:
        return None
    (first_key, first), *others = found.items()
    for key, layers in others:
        if layers != first:
            place = next((i for i, (a, b) in enumerate(zip(first, layers, strict=False)) if a != b), None)
            what = f"at layer {place}" if place is not None else f"in length ({len(first)} and {len(layers)})"
            raise CheckpointError(f"{where}: {first_key} and {key} disagree {what}; one of them must go")
    return first


def _parse(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        table, kind, items = LETTERS, "letter", list(value)
    elif isinstance(value, list):
        table, kind, items = _WORDS, "word", value
    else:
        raise CheckpointError(f"{where} is a {type(value).__name__}; a pattern string or a list of words was expected")
    if not 0 < len(items) <= _MOST_LAYERS:
        raise CheckpointError(f"{where} has {len(items)} layers; 1 to {_MOST_LAYERS} are possible")
    for place, item in enumerate(items):
        if not isinstance(item, str) or item not in table:
            raise CheckpointError(
                f"{where} has the unknown {kind} {str(item)[:40]!r} at position {place}; known are {', '.join(table)}"
            )
    return tuple(table[item] for item in items)
