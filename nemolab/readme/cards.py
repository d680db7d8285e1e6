"""Tables of measurements on CUDA cards, each from the newest recorded runs; a table says where it holds several."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isclose

from nemolab.readme.markdown import how_taken, markdown_table, spread
from nemolab.readme.measured import broken_models, compared_texts, newest_comparison

# Of the engine's settings that are tried: how a table says that one is set, and to what.
_TRIALS = {
    "shared_first": "shared expert first",
    "speculate": "guesses copied early",
    "kept_gib": "recent experts kept, GiB",
    "no_graphs": "no CUDA graphs",
    "prompt_enters": "the prompt's experts put into the cache",
}


def moe_step_table() -> str:
    """One MoE layer on a card by transfer strategy, beside the time of its bytes, from the newest recorded runs."""
    from nemolab.measure.transfer import read_of_floor, read_timed

    rows, taken, rates, ranges = [], [], [], []
    for active in (0.075, 1.0):
        timed = read_timed(active).set_index("strategy")
        whole, pull = timed.loc["whole"], timed.loc["pull"]
        copy_gb_s, read_gb_s = (
            1e-3 * case[moved] / case["floor_us"] for case, moved in ((whole, "bytes_copied"), (pull, "bytes_in_place"))
        )
        rates.append(f"{active:.1%}: {copy_gb_s:.1f} and {read_gb_s:.1f}")
        for strategy, case in timed.iterrows():
            row = case["row"]
            rows.append(
                [
                    _name_step(strategy),
                    f"{100 * case['active']:.3g}",
                    f"{case['bytes_copied'] / 1e6:.1f}",
                    f"{case['bytes_in_place'] / 1e6:.1f}",
                    f"{case['floor_us']:,.0f}",
                    f"{case['us']:,.0f} ({case['low_us']:,.0f} to {case['high_us']:,.0f})",
                    f"{case['of_floor']:.3f}",
                    f"{case['of_whole']:.2f}",
                    len(row["values"]),
                ]
            )
            taken.append(row)
        found = read_of_floor(active)
        spans = [
            f"{_name_step(of)} {found[of].min():.3f} to {found[of].max():.3f}"
            for of in timed.index
            if found[of].count() > 1
        ]
        if spans:
            counted = f"{len(found)} runs of {found['commit'].nunique()} commits"
            ranges.append(f"{100 * active:g} % active, {counted}: {', '.join(spans)}")
    headers = ["strategy", "active, %:", "MB copied:", "MB read in place:", "floor, us:", "measured, us:"]
    how = (
        f"{how_taken(taken)}. {taken[0]['settings']['experts']} experts of Nemotron-3-Super's shape, all in page-locked"
        " memory. Median (least to most); a run for each share of active neurons, all strategies in turns in it. GB/s"
        f" copied and read in place there, of {'; of '.join(rates)}."
    )
    table = markdown_table([*headers, "measured / floor:", "of `whole`:", "samples:"], rows)
    told = "Measured / floor in all recorded runs with such a card and processor, the medians' least to most."
    return f"{how}\n\n{table}" + f"\n\n{told} {'. '.join(ranges)}." * bool(ranges)


def _name_step(strategy: str) -> str:
    names = {
        "pull_graph": "`pull` as a CUDA graph",
        "neurons": "no strategy: `rows`, scales read again for each neuron",
    }
    return names.get(strategy, f"`{strategy}`")


def linear_table() -> str:
    """Dense products of one token on a card, as a share of the bandwidth of a kernel that only reads."""
    from nemolab.measure import runs_with

    formats = ("fp8", "nvfp4", "bf16")
    runs = runs_with(["linear.read_bandwidth", *(f"linear.{of}{what}" for of in formats for what in ("", "_of_read"))])
    read = runs[-1]["linear.read_bandwidth"]
    rows, spans = [], []
    for kind in formats:
        time_us, share = runs[-1][f"linear.{kind}"], runs[-1][f"linear.{kind}_of_read"]
        settings = share["settings"]
        shape = f"{settings['rows']:,} x {settings['columns']:,}"
        share_cell = f"{100 * share['median']:.1f} ({100 * share['low']:.1f} to {100 * share['high']:.1f})"
        rows.append([kind, shape, f"{settings['bytes'] / 1e6:.1f}", spread(time_us), share_cell])
        alike = _alike([run[f"linear.{kind}_of_read"] for run in runs], ("rows", "columns"))
        spans.append((kind, alike, lambda row: 100 * row["median"]))
    headers = ["format", "matrix", "MB:", "us:", "% of the read bandwidth:"]
    bandwidth = f"Read bandwidth: {read['median']:,.0f} GB/s"
    how = f"{how_taken([read])}. {bandwidth}. Median (least to most) of {len(read['values'])}."
    return f"{how}\n\n{markdown_table(headers, rows)}{_over_runs('% of the read bandwidth', spans, '.1f')}"


def decode_table() -> str:
    """One token of a large model's shape on a card by transfer strategy, beside the time of its bytes."""
    from nemolab.engine.transfers import TRANSFERS
    from nemolab.measure import runs_with

    rows, taken, spans = [], [], []
    for share in (0.24, 1.0):
        near = partial(isclose, share, abs_tol=0.01)
        runs = runs_with([f"card_decode.{strategy}" for strategy in TRANSFERS], cached=near)
        for name, row in runs[-1].items():
            said = row["settings"]
            floors = [f"{said[of]:.2f}" for of in ("bus_ms", "disk_ms", "dense_ms")]
            strategy, share_cell, hits = name.partition(".")[2], f"{100 * said['cached']:.0f}", 100 * said["hit_rate"]
            needed = f"{said['needed_reads']:.1f}" if "needed_reads" in said else ""
            moved = f"{(said['bytes_copied'] + said['bytes_in_place']) / 1e6:,.0f}"
            ratios = [f"{row['median'] / said[of]:.2f}" for of in ("floor_ms", "bus_and_dense_ms")]
            cells = [f"`{strategy}`", share_cell, f"{hits:.1f}", f"{said['reads']:.1f}", needed, moved, spread(row)]
            rows.append([*cells, *floors, *ratios, f"{said['driver_cpu_ms']:.1f}", len(row["values"])])
            taken.append(row)
            alike = _alike([run[name] for run in runs], (*_SHAPE, "slots", "prefetch", "vram_gib", "routing"))
            spans.append((f"`{strategy}` with {share_cell} % cached", alike, lambda row: row["median"]))
    headers = ["strategy", "cached, %:", "hits, %:", "reads a token:", "of them needed:", "MB over the bus:"]
    more = [
        "ms a token:",
        "bus, ms:",
        "disk, ms:",
        "dense, ms:",
        "measured / longest of these:",
        "measured / (bus + dense):",
        "CPU time of the engine's thread, ms:",
        "samples:",
    ]
    said = taken[0]["settings"]
    turns = "in turns in it" if all(row["settings"]["in_turns"] for row in taken) else "one after another in it"
    how = (
        f"{how_taken(taken)}. {_layers(said)}; routing {said['routing']}; {said['prefetch']} guesses read ahead;"
        f" {100 * said['active']:.1f} % of neurons active. GB/s there: copied {said['copy_gb_s']:.1f}, read in place"
        f" {said['in_place_gb_s']:.1f}, from disk {said['disk_gb_s']:.1f}, the card's own {said['read_gb_s']:,.0f}."
        f" Median (least to most); a run for each share cached, all strategies {turns}."
    )
    return f"{how}\n\n{markdown_table([*headers, *more], rows)}{_over_runs('ms a token', spans, '.3g')}"


def whole_model_table() -> str:
    """One token of a whole model of 3.5-Super's shape within the memory of a small card."""
    from nemolab.measure import latest

    rows, taken = [], []
    for share, prefetch in ((1.0, 4), (0.24, 0), (0.24, 4)):
        near = partial(isclose, share, abs_tol=0.01)
        row = latest("card_decode.pull", moe_layers=40, experts=512, cached=near, prefetch=prefetch, trials={})
        said = row["settings"]
        cells = [f"{100 * said['cached']:.0f}", prefetch, f"{100 * said['hit_rate']:.1f}", f"{said['reads']:.0f}"]
        cells += [f"{said['bytes_in_place'] / 1e9:.2f}", spread(row), f"{1e3 / row['median']:.1f}"]
        cells += [f"{said[name]:.1f}" for name in ("bus_ms", "dense_ms", "disk_ms")]
        rows.append([*cells, f"{row['median'] / said['floor_ms']:.2f}", len(row["values"])])
        taken.append(row)
    headers = ["experts in RAM, %:", "guesses:", "hits, %:", "reads a token:", "GB over the bus:", "ms a token:"]
    headers += ["tokens/s:", "bus, ms:", "dense, ms:", "disk, ms:", "measured / longest of these:", "samples:"]
    said = taken[0]["settings"]
    how = (
        f"{how_taken(taken)}. {_layers(said)}; `pull`; `vram_gib` {said['vram_gib']:.2f}; routing {said['routing']};"
        f" {100 * said['active']:.1f} % of neurons active. From disk"
        f" {min(row['settings']['disk_gb_s'] for row in taken):.1f} to"
        f" {max(row['settings']['disk_gb_s'] for row in taken):.1f} GB/s. Median (least to most); a run each."
    )
    return f"{how}\n\n{markdown_table(headers, rows)}"


def trials_table() -> str:
    """What was tried beside the same engine without it: a table for each newest run in which something was."""
    from nemolab.measure import read_rows

    cases = [row for _, row in read_rows("card_decode.*").iterrows() if "trials" in row["settings"]]
    newest = {}
    for row in cases:  # oldest first: the newest run in which just this was tried stays
        if (tried := _tried(row)) != row["settings"]["transfer"]:
            newest[tried] = row
    runs = dict.fromkeys((row["run"], row["settings"]["transfer"]) for row in newest.values())
    together = [[row for row in cases if (row["run"], row["settings"]["transfer"]) == run] for run in runs]
    return "\n\n".join(_tried_table(rows) for rows in together)


def _tried(row) -> str:
    """A case's name without the values of what was tried: `rows_kept_gib`."""
    return "_".join(word for word in row["name"].partition(".")[2].split("_") if not word.isdigit())


def _tried_table(cases: Sequence) -> str:
    """The cases of one run and one strategy, the one without a trial first."""
    plain = next(row for row in cases if row["name"] == f"card_decode.{row['settings']['transfer']}")
    said, cached = plain["settings"], plain["settings"]["cached"] == 1
    rows = []
    for row in sorted(cases, key=lambda row: row is not plain):
        here = row["settings"]
        words = [_TRIALS[of] if value is True else f"{_TRIALS[of]}: {value:g}" for of, value in here["trials"].items()]
        if here["prefetch"] != said["prefetch"]:
            words.append(f"guesses read ahead: {here['prefetch']}")
        moved = f"{(here['bytes_copied'] + here['bytes_in_place']) / 1e6:,.0f}"
        reads = [] if cached else [f"{here['reads']:.1f}"]
        ratio = f"{row['median'] / plain['median']:.2f}"
        rows.append([", ".join(words) or "none", moved, *reads, spread(row), ratio, len(row["values"])])
    where = "all" if cached else f"{100 * said['cached']:.0f} %"
    ahead = "" if cached else f" {said['prefetch']} guesses read ahead;"
    turns = "in turns" if said["in_turns"] else "one after another"
    how = f"{how_taken(cases)}. {_layers(said)}, {where} in RAM;{ahead} `{said['transfer']}`; {turns} in one run."
    headers = ["trial", "MB over the bus:", *([] if cached else ["reads a token:"]), "ms a token:", "of none:"]
    return f"{how}\n\n{markdown_table([*headers, 'samples:'], rows)}"


def prefill_table() -> str:
    """A prompt's pass on a card, experts in RAM and on disk, beside their way over the bus and torch's products."""
    from nemolab.measure import runs_with

    runs = runs_with(["card_prefill.cached", "card_prefill.disk"])
    rows, taken = [], list(runs[-1].values())
    for where, row in zip(("RAM", "disk"), taken, strict=True):
        said, from_disk = row["settings"], where == "disk"
        floors = [f"{said['copy_ms']:,.0f}", f"{said['torch_ms']:,.0f}"]
        cells = [where, f"{said['tokens']:,}", f"{said['needed']:,}", f"{said['crossed']:,.0f}", spread(row), *floors]
        ratio = "" if from_disk else f"{_of_longer(row):.2f}"
        disk = (
            [f"{said['disk_read_ms']:,.0f}", f"{row['median'] / said['disk_read_ms']:.2f}"] if from_disk else ["", ""]
        )
        rows.append([*cells, ratio, *disk, len(row["values"])])
    headers = ["experts in", "tokens:", "experts needed:", "that crossed the bus:", "ms:", "crossing, ms:"]
    more = ["torch BF16, ms:", "measured / longer of these two:", "disk in order, ms:", "measured / disk:", "samples:"]
    said = taken[0]["settings"]
    how = (
        f"{how_taken(taken)}. {_layers(said)}; copied at {said['copy_gb_s']:.1f} GB/s. Median (least to most), one run."
        " The disk's time is that of the same blocks read in order between the passes: a comparison, no bound."
    )
    alike = _alike([run["card_prefill.cached"] for run in runs], (*_SHAPE, "tokens", "needed", "vram_gib"))
    over = _over_runs("Measured / longer of the two", [("experts in RAM", alike, _of_longer)], ".2f")
    return f"{how}\n\n{markdown_table([*headers, *more], rows)}{over}"


def _of_longer(row) -> float:
    return row["median"] / max(row["settings"]["copy_ms"], row["settings"]["torch_ms"])


def memory_table() -> str:
    """What a process takes of a card's memory, as the driver tells, beside what was allowed and planned."""
    from nemolab.measure import latest_run

    taken = list(latest_run([f"card_memory.{phase}" for phase in ("load", "prompt", "decode")]).values())
    said = taken[0]["settings"]
    planned = {name.removesuffix("_bytes"): size / 2**30 for name, size in said["planned"].items() if "bytes" in name}
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in planned.items() if name != "total" and gib)
    names = ["loaded", f"a prompt of {said['prompt_tokens']:,} tokens", f"{said['tokens']} tokens behind it"]
    rows = [[name, f"{row['median']:.2f}"] for name, row in zip(names, taken, strict=True)]
    rows += [["planned", f"{planned['total']:.2f}"], ["allowed", f"{said['budget_gib']:.2f}"]]
    how = (
        f"{how_taken(taken)}. {_layers(said)}; `{said['transfer']}`. One run: the most of each phase, a single sample."
    )
    return f"{how} Planned, GiB: {parts}.\n\n{markdown_table(['most in use by the process', 'GiB:'], rows)}"


def card_correctness_table() -> str:
    """The engine on a card beside transformers in fp32 and beside the CPU's engine; and whether it repeats itself."""
    beside = ("kl_mean_beside_cpu", "kl_mean_decode_beside_cpu")
    texts, taken = compared_texts("cuda", beside)
    figures = ("kl_mean", "kl_mean_decode", *beside)
    rows = [
        [text, settings["tokens"], *(f"{value[name]:.1e}" for name in figures)]
        + [f"{value['greedy_match']:.0f}/{settings['greedy_of']}"]
        for text, value, settings in texts
    ]
    headers = ["text", "tokens scored:", "mean KL, prompt:", "mean KL, decode:", "KL from the CPU's engine, prompt:"]
    table = markdown_table([*headers, "KL from the CPU's engine, decode:", "greedy tokens equal:"], rows)
    controls, broken = broken_models("cuda")
    (repeats,) = (row for row in newest_comparison("cuda") if row["name"] == "compare.distinct_repeats")
    runs, distinct = repeats["settings"]["runs"], repeats["median"]
    same = "the same bits" if distinct == 1 else f"{distinct:.0f} DIFFERENT RESULTS"
    told = f"{len(runs)} runs ({'; '.join(runs)}) gave {same}."
    return f"{how_taken([*taken, *controls, repeats])}.\n\n{table}\n\n{broken} {told}"


_SHAPE = ("model", "layers", "moe_layers", "experts")


def _layers(said: Mapping) -> str:
    shape = f"{said['layers']} layers of the shape of {said['model']}"
    return f"{shape}, {said['moe_layers']} of them with {said['experts']} experts"


def _alike(rows: Sequence, fields: Sequence[str]) -> list:
    """Those of the last one's machine and of its settings in these fields."""
    from nemolab.measure import same_machine

    def key(row) -> list:
        return [row["settings"].get(field) for field in fields]

    return [row for row in rows if same_machine(row["machine"], rows[-1]["machine"]) and key(row) == key(rows[-1])]


def _over_runs(what: str, spans: Sequence[tuple[str, list, Callable]], digits: str) -> str:
    """A paragraph: how far a figure lies apart between recorded runs, of cases that were run more than once.

    spans  (name of a case, its rows, a run each, what the figure is of a row)
    """
    parts = []
    for name, rows, figure in spans:
        found = [figure(row) for row in rows]
        if len(found) > 1:
            parts.append(f"{name} {min(found):{digits}} to {max(found):{digits}} ({len(found)} runs)")
    return f"\n\n{what} in all recorded runs on this machine, the medians' least to most: {', '.join(parts)}." * bool(
        parts
    )
