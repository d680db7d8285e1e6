"""What crosses the bus by each transfer strategy: counted, and as it was timed on a card.

whole     the block is copied
grouped   up is copied; of down, every group of 16 neurons with an active one is read in place, values and scales
rows      up is copied; of down, a group's scales are read once and then the values of its active neurons only
pull      as rows, but up is read in place, too
"""

from __future__ import annotations

from math import isclose
from typing import TYPE_CHECKING, NamedTuple

from nemolab.checkpoint.formats import GROUP
from nemolab.engine.transfers import TRANSFERS
from nemolab.errors import NemolabError
from nemolab.measure.machine import same_card
from nemolab.measure.rows import runs_with

if TYPE_CHECKING:
    import pandas as pd


class Crossing(NamedTuple):
    """Bytes of experts that go over the bus: copied, and read in place."""

    copied: float
    in_place: float

    @property
    def total(self) -> float:
        return self.copied + self.in_place


def count_crossing(inter: int, width: int, neurons: float, groups: float) -> dict[str, Crossing]:
    """Bytes of one expert by strategy, in the layout `neuron`.

    inter, width     neurons of an expert, and the size of its input: up is inter x width, down width x inter
    neurons, groups  how many are active, and in how many groups; means are fine
    A value takes half a byte, a scale one byte for GROUP values: the scales of a group of down are one row of `width`.
    """
    up = inter * width / 2 + inter * width / GROUP
    down_of_groups = groups * (GROUP * width / 2 + width)
    down_of_rows = groups * width + neurons * width / 2
    return {
        "whole": Crossing(2 * up, 0.0),
        "grouped": Crossing(up, down_of_groups),
        "rows": Crossing(up, down_of_rows),
        "pull": Crossing(0.0, up + down_of_rows),
    }


def count_neurons(inter: int, width: int, neurons: float) -> Crossing:
    """The same of no strategy, for comparison: as `rows`, but a group's scales read again for each active neuron."""
    return Crossing(inter * width / 2 + inter * width / GROUP, neurons * (width / 2 + width))


def groups_if_independent(active: float) -> float:
    """The share of groups with an active neuron, were each neuron active on its own with probability `active`."""
    return 1 - (1 - active) ** GROUP


def read_timed(active: float, inter: int = 2688, width: int = 1024) -> pd.DataFrame:
    """The newest recorded run of MoE steps at about this share of active neurons, one row a strategy; Super's shape.

    returns  columns strategy (pull_graph: pull as a CUDA graph; last, in runs that have it, neurons: as
             `count_neurons`), floor_us, us, low_us, high_us, of_floor, of_whole (the median over that of the strategy
             `whole`), bytes_copied, bytes_in_place (of all experts of a token), experts, active, and row, the
             measurement itself
    Raises NemolabError when no run has them all.
    """
    import pandas as pd

    run = _runs(active, inter, width)[-1]
    rows = []
    for name, row in run.items():
        settings = row["settings"]
        rows.append(
            {
                "strategy": name.partition(".")[2],
                "us": row["median"],
                "low_us": row["low"],
                "high_us": row["high"],
                "of_floor": row["median"] / settings["floor_us"],
                "of_whole": row["median"] / run["moe_step.whole"]["median"],
                **{key: settings[key] for key in ("floor_us", "bytes_copied", "bytes_in_place", "experts", "active")},
                "row": row,
            }
        )
    return pd.DataFrame(rows)


def read_of_floor(active: float, inter: int = 2688, width: int = 1024) -> pd.DataFrame:
    """Median over floor in every recorded run like that of `read_timed`: its active share, shape, card and processor.

    returns  one row a run, oldest first; a column for each strategy (NaN where a run has none), and commit
    """
    import pandas as pd

    runs = _runs(active, inter, width)
    newest = runs[-1]["moe_step.whole"]
    found = []
    for run in runs:
        row = run["moe_step.whole"]
        if same_card(row["machine"], newest["machine"]) and row["settings"]["experts"] == newest["settings"]["experts"]:
            ratios = {name.partition(".")[2]: row["median"] / row["settings"]["floor_us"] for name, row in run.items()}
            found.append(ratios | {"commit": row["commit"]})
    return pd.DataFrame(found)


_STEPS = [f"moe_step.{name}" for name in (*TRANSFERS, "pull_graph")]
_NEURONS = "moe_step.neurons"


def _runs(active: float, inter: int, width: int) -> list[dict[str, pd.Series]]:
    """All runs of `_STEPS`, oldest first, with `_NEURONS` where it was measured, too."""
    like = {"inter": inter, "width": width, "active": lambda share: isclose(share, active, abs_tol=0.005)}
    try:
        also = {run[_NEURONS]["run"]: run for run in runs_with([_NEURONS], **like)}
    except NemolabError:  # older rows know nothing of it
        also = {}
    return [run | also.get(run[_STEPS[0]]["run"], {}) for run in runs_with(_STEPS, **like)]


def tabulate_crossing(experts: dict[str, dict[str, Crossing]]) -> pd.DataFrame:
    """Counted bytes as rows. experts: a name -> what `count_crossing` gave.

    returns  columns expert, strategy, copied, in_place, bytes (both), of_whole (share of the strategy `whole`)
    """
    import pandas as pd

    rows = [
        (name, strategy, moved.copied, moved.in_place, moved.total, moved.total / strategies["whole"].total)
        for name, strategies in experts.items()
        for strategy, moved in strategies.items()
    ]
    return pd.DataFrame(rows, columns=["expert", "strategy", "copied", "in_place", "bytes", "of_whole"])


def percent_of_whole(counted: dict[str, Crossing], timed: pd.DataFrame) -> pd.DataFrame:
    """Bytes counted and time measured (`read_timed`) of each strategy, in % of those of `whole`.

    returns  columns strategy, copied, in_place, low, middle, high (of time)
    """
    import pandas as pd

    times = timed.set_index("strategy")[["low_us", "us", "high_us"]]
    rows = [
        (
            strategy,
            *(100 * part / counted["whole"].total for part in moved),
            *(100 * times.loc[strategy] / times.loc["whole", "us"]),
        )
        for strategy, moved in counted.items()
    ]
    return pd.DataFrame(rows, columns=["strategy", "copied", "in_place", "low", "middle", "high"])
