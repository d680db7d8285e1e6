"""The README's tables, made from data: `python -P -m nemolab.readme` fills them in, a test compares."""

from collections.abc import Callable

from nemolab.readme import cards, counted, measured
from nemolab.readme.markdown import fill, markdown_table

__all__ = ["TABLES", "fill", "markdown_table", "render"]

TABLES: dict[str, Callable[[], str]] = {
    "bytes": counted.bytes_table,
    "families": counted.families_table,
    "repack": measured.repack_table,
    "correctness": measured.correctness_table,
    "speed": measured.speed_table,
    "moe-step": cards.moe_step_table,
    "linear": cards.linear_table,
    "card-decode": cards.decode_table,
    "card-whole-model": cards.whole_model_table,
    "card-prefill": cards.prefill_table,
    "card-memory": cards.memory_table,
    "card-correctness": cards.card_correctness_table,
    "card-trials": cards.trials_table,
    "policies": counted.policies_table,
    "replay": measured.replay_table,
    "notebooks": counted.notebooks_table,
    "claims": counted.claims_table,
}


def render(text: str) -> str:
    """A README with every table made anew."""
    for name, make in TABLES.items():
        text = fill(text, name, make())
    return text
