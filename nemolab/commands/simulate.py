"""`nemolab simulate`: what a cache of any size and policy would have done for a recorded trace."""

import click

from nemolab.commands.verb import Answer, PathName, verb
from nemolab.errors import UsageError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def _list_option(name: str, metavar: str, **settings):
    """An option that takes a list with commas, and may be given several times."""
    return click.option(name, metavar=metavar, multiple=True, **settings)


@verb("simulate")
@click.argument("trace", metavar="TRACE", type=PathName())
@_list_option("--budget", "LIST", help="Sizes of the cache: 500MiB,2GiB,4854slots. Default: shares of all blocks.")
@_list_option("--policy", "LIST", help="Who leaves, or: all.  [default: lru,belady]")
@_list_option("--prefetch", "LIST", help="How many guesses for the next layer are read ahead.  [default: 0]")
@click.option("--cold", is_flag=True, help="Empty the cache at each conversation; else it is carried over.")
@click.option(
    "--prefill-warms/--prefill-aside",
    default=None,
    help="Prompt passes go through the cache, or leave nothing in it. Default: as the trace says it was.",
)
@click.option("--block-bytes", type=click.IntRange(min=1), default=None, help="Size of a block, unknown or another.")
@click.option("--experts", type=click.IntRange(min=1), default=None, help="Experts in a layer, where unknown.")
@click.option("--model", type=PathName(), default=None, metavar="PATH", help="Checkpoint or store it must be of.")
@click.option(
    "--reads-in-time",
    type=click.IntRange(min=0),
    default=None,
    metavar="N",
    help="Prefetch reads that end before the next layer asks; later ones that are used count as late.",
)
@click.option("--curve", is_flag=True, help="The LRU hit rate at every size where it changes.")
@click.option("--measures", is_flag=True, help="How concentrated, repetitive and predictable the routing is.")
@click.option(
    "--check", is_flag=True, help="The live misses in the trace against a replay; exit code 1 if they differ."
)
@click.option("--plot", type=PathName(), default=None, metavar="FILE", help="The curve as .png, .svg or .pdf.")
def simulate(
    trace,
    budget,
    policy,
    prefetch,
    cold,
    prefill_warms,
    block_bytes,
    experts,
    model,
    reads_in_time,
    curve,
    measures,
    check,
    plot,
):
    """What would a cache have hit, and what would it have read?

    TRACE is a file of `nemolab trace`, or routing that another engine recorded: its form is recognised by its content.
    It is replayed exactly, offline, by the rules of the engine's own cache. Any size may be asked for, also of another
    machine. Every figure comes with its phase (prefill, decode, all), with the cache cold or carried from one
    conversation to the next, and with its unit.

    \b
    hit_rate         share of lookups that were cached, 0 to 1; a lookup is a distinct expert of a layer and step
    reads_per_token  misses and prefetch reads a token, bytes_per_token the same in bytes
    compulsory       misses of what was never in the cache before, which no size and no policy avoids; where prompts
                     leave nothing in it, their misses stay first ones until decode reads the same
    slots            blocks, where they are all of one size
    prefetch_*       read ahead and used (useful), thrown out unused (wasted), used but not there in time (late)

    \b
    Policies: lru, lru-per-layer, lfu (counts kept after eviction), lfu-incache (forgotten), lfu-ageing, slru, s3fifo,
    sieve, arc, random, static (hottest blocks), belady (optimum that inserts every miss), belady-bypass (that may not).

    \b
    Examples:
      nemolab simulate data/traces/conversations.safetensors
      nemolab simulate my.trace --budget 500MiB,2GiB,4854slots --policy lru,belady --prefetch 0,4 --json
      nemolab simulate routes.csv --policy all --budget 2GiB --plot curve.svg
      nemolab simulate my.trace --check --measures
    """
    from nemolab import simulate as simulation
    from nemolab.commands import simulate_text

    # Words first: what is wrong with them is said before a large file is read.
    budgets = simulation.read_budgets(",".join(budget)) if budget else None
    policies = simulation.read_policies(",".join(policy)) if policy else list(simulation.DEFAULT_POLICIES)
    depths = simulation.read_prefetches(",".join(prefetch)) if prefetch else [0]
    if plot is not None:
        _check_plot(plot)

    recorded, notes = _open(trace, model, n_experts=experts, block_bytes=block_bytes, prefill_warms=prefill_warms)
    lookups = simulation.from_trace(recorded)
    live = simulation.check_live(recorded) if check else None
    if budgets is None:
        budgets = simulation.default_budgets(lookups)
        shares = ", ".join(f"{share:.0%}" for share in simulation.DEFAULT_SHARES)
        notes.insert(0, f"no --budget was given: {shares} of all blocks of this model")
    whole, found = _replay(lookups, budgets, policies, depths, cold, reads_in_time)
    notes += _list_notes(recorded, lookups, budgets, policies, depths, cold, reads_in_time)
    data = {"trace": {"path": str(trace)} | simulation.list_facts(recorded), "notes": notes} | found
    if curve:
        data["curve"] = simulation.list_points(lookups, whole)
    if measures:
        data["measures"] = simulation.measure_trace(recorded, cold=cold)
    problem = ""
    if live is not None:
        data["live"] = live.to_dict()
        if not live.equal:
            problem = f"live and replayed misses differ in {len(live.differing):,} of {live.compared:,} batches"
    if plot is not None:
        data["plot"] = str(plot)
        _draw(plot, whole, data)
    return Answer(data, simulate_text.render(data), problem)


def _open(path, model, **overrides):
    """The trace, and what is to be said of the model that it was held against."""
    from nemolab.simulate import join_model
    from nemolab.trace import open_trace

    trace = open_trace(path, **overrides)
    return (trace, []) if model is None else join_model(trace, model)


def _replay(lookups, budgets, policies, depths, cold: bool, reads_in_time: int | None):
    """The whole LRU curve, and the part of the answer that follows from it and from the replays."""
    from nemolab import simulate as simulation
    from nemolab.progress import progress_bar

    rows = simulation.sweep(
        lookups,
        budgets,
        policies,
        depths,
        cold=cold,
        reads_in_time=reads_in_time,
        progress=progress_bar("replay", "run"),
    )
    phase, whole = simulation.main_curve(lookups, cold=cold)
    return whole, {
        "rows": rows,
        "advice": simulation.advise(lookups, whole).to_dict(),
        "gaps": simulation.find_gaps(rows, phase),
        "curve_phase": phase,
        "curve_cold": cold,
    }


def _list_notes(trace, lookups, budgets, policies, depths, cold: bool, reads_in_time: int | None) -> list[str]:
    """What is to be read beside the figures, and the options that would change it."""
    from nemolab.simulate import list_notes
    from nemolab.system.memory import read_memory

    notes = list_notes(trace, lookups, budgets, policies, depths, cold=cold, memory_bytes=read_memory().total_bytes)
    options = []
    if not cold and (lookups.conversation != lookups.conversation[0]).any():
        options.append("--cold empties the cache at each conversation")
    if lookups.size_bytes is None:
        options.append("--block-bytes N says how large a block is")
    if any(depths) and reads_in_time is None:
        options.append("--reads-in-time N counts what is late")
    return notes + (["; ".join(options)] if options else [])


def _check_plot(path) -> None:
    """Before any work: a form that is known, a folder that is there."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {path}: the form is told by the suffix; {', '.join(PLOT_SUFFIXES)} are known")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"--plot {path}: that is a folder; the name of a file is needed")


def _draw(path, curve, data: dict) -> None:
    """Draw the curve and the rows of its phase. The file appears under its name when all of it is on disk."""
    import matplotlib

    matplotlib.use("agg")
    import pandas as pd

    from nemolab import plots
    from nemolab.store.files import finished_file

    unit = "slots" if curve.in_slots else "budget_bytes"
    advice = data["advice"]
    rows = pd.DataFrame([row for row in data["rows"] if row["phase"] == data["curve_phase"]])
    points = rows.rename(columns={unit: "size"})[["policy", "prefetch", "size", "hit_rate"]].dropna()
    marks = {"knee": advice["knee"][unit]} if advice["knee"] else {}
    plots.use_style()
    figure = plots.plot_curve(
        pd.DataFrame({"size": curve.sizes, "hit_rate": curve.hit_rates}),
        points,
        in_slots=curve.in_slots,
        phase=data["curve_phase"],
        cold=data["curve_cold"],
        floor=advice["floor"][unit] if advice["floor"] else None,
        marks=marks,
        note=f"{data['trace']['kind']}, synthetic" if data["trace"]["synthetic"] else "",
    )
    with finished_file(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower())
