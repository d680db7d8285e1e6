"""Which families can be counted: `python -P -m nemolab.plan.survey [model_type ...]` tries all that transformers knows.

Each is built from its default config, so a family may fail here only because its defaults are no model; a published
config decides. Takes minutes.
"""

import sys
from collections.abc import Iterator

from nemolab.errors import NemolabError
from nemolab.plan.any_model import plan_any


def survey(model_types: list[str]) -> Iterator[tuple[str, str, str]]:
    """(model type, "experts", "dense" or "failed", what was found)."""
    for model_type in model_types:
        try:
            plan = plan_any({"model_type": model_type}, model_type, name=model_type)
        except NemolabError as error:
            yield model_type, "failed", str(error)
        else:
            kinds = ", ".join(
                f"{len(group.layers)} x {group.top_k} of {group.experts} x {group.expert_bytes:,} bytes"
                for group in plan.groups
            )
            yield model_type, "experts" if kinds else "dense", kinds or f"{plan.dense_bytes:,} bytes"


def main() -> int:
    """Print a line for each family, and how many of each kind there were."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    counts: dict[str, int] = {}
    for model_type, kind, found in survey(sys.argv[1:] or sorted(CONFIG_MAPPING.keys())):
        counts[kind] = counts.get(kind, 0) + 1
        print(f"{model_type:<32} {kind:<8} {found[:200]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
