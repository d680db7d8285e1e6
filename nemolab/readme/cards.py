"""Tables of measurements on CUDA cards, each from the newest recorded rows."""

from collections.abc import Mapping
from functools import partial
from math import isclose

from nemolab.readme.markdown import how_taken, markdown_table, spread
from nemolab.readme.measured import broken_models, compared_texts


def moe_step_table() -> str:
    """One MoE layer on a card by transfer strategy, beside the time of its bytes, from the newest recorded runs."""
    from nemolab.measure.transfer import read_timed

    rows, taken, rates = [], [], []
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
                    "`pull` as a CUDA graph" if strategy == "pull_graph" else f"`{strategy}`",
                    f"{100 * case['active']:.3g}",
                    f"{case['bytes_copied'] / 1e6:.1f}",
                    f"{case['bytes_in_place'] / 1e6:.1f}",
                    f"{case['floor_us']:,.0f}",
                    f"{case['us']:,.0f} ({case['low_us']:,.0f} to {case['high_us']:,.0f})",
                    f"{case['of_floor']:.3f}",
                    len(row["values"]),
                ]
            )
            taken.append(row)
    headers = ["strategy", "active, %:", "MB copied:", "MB read in place:", "floor, us:", "measured, us:"]
    how = (
        f"{how_taken(taken)}. {taken[0]['settings']['experts']} experts of Nemotron-3-Super's shape, all in page-locked"
        " memory. Median (least to most); all in turns in one run. GB/s copied and read in place there, of "
        f"{'; of '.join(rates)}."
    )
    return f"{how}\n\n{markdown_table([*headers, 'measured / floor:', 'samples:'], rows)}"


def linear_table() -> str:
    """Dense products of one token on a card, as a share of the bandwidth of a kernel that only reads."""
    from nemolab.measure import latest

    read = latest("linear.read_bandwidth")
    rows = []
    for kind in ("fp8", "nvfp4", "bf16"):
        time_us, share = latest(f"linear.{kind}"), latest(f"linear.{kind}_of_read")
        settings = share["settings"]
        shape = f"{settings['rows']:,} x {settings['columns']:,}"
        share_cell = f"{100 * share['median']:.1f} ({100 * share['low']:.1f} to {100 * share['high']:.1f})"
        rows.append([kind, shape, f"{settings['bytes'] / 1e6:.1f}", spread(time_us), share_cell])
    headers = ["format", "matrix", "MB:", "us:", "% of the read bandwidth:"]
    bandwidth = f"Read bandwidth: {read['median']:,.0f} GB/s"
    how = f"{how_taken([read])}. {bandwidth}. Median (least to most) of {len(read['values'])}."
    return f"{how}\n\n{markdown_table(headers, rows)}"


def decode_table() -> str:
    """One token of a large model's shape on a card by transfer strategy, beside the time of its bytes."""
    from nemolab.engine.transfers import TRANSFERS
    from nemolab.measure import latest

    rows, taken = [], []
    for share in (0.24, 1.0):
        near = partial(isclose, share, abs_tol=0.01)
        run = latest("card_decode.whole", cached=near)["settings"]["read_gb_s"]  # measured once a run, so it names one
        for strategy in TRANSFERS:
            row = latest(f"card_decode.{strategy}", cached=near, read_gb_s=run)
            said = row["settings"]
            floors = [f"{said[name]:.2f}" for name in ("bus_ms", "disk_ms", "dense_ms")]
            share_cell, hits = f"{100 * said['cached']:.0f}", f"{100 * said['hit_rate']:.1f}"
            moved = f"{(said['bytes_copied'] + said['bytes_in_place']) / 1e6:,.0f}"
            ratios = [f"{row['median'] / said[name]:.2f}" for name in ("floor_ms", "bus_and_dense_ms")]
            cells = [f"`{strategy}`", share_cell, hits, f"{said['reads']:.1f}", moved, spread(row), *floors, *ratios]
            rows.append([*cells, f"{said['driver_cpu_ms']:.1f}", len(row["values"])])
            taken.append(row)
    headers = [
        "strategy",
        "cached, %:",
        "hits, %:",
        "reads a token:",
        "MB over the bus:",
        "ms a token:",
        "bus, ms:",
        "disk, ms:",
    ]
    more = [
        "dense, ms:",
        "measured / longest of these:",
        "measured / (bus + dense):",
        "CPU time of the engine's thread, ms:",
        "samples:",
    ]
    said = taken[0]["settings"]
    how = (
        f"{how_taken(taken)}. {_layers(said)}; routing {said['routing']}; {said['prefetch']} guesses read ahead;"
        f" {100 * said['active']:.1f} % of neurons active. GB/s there: copied {said['copy_gb_s']:.1f}, read in place"
        f" {said['in_place_gb_s']:.1f}, from disk {said['disk_gb_s']:.1f}, the card's own {said['read_gb_s']:,.0f}."
        " Median (least to most)."
    )
    return f"{how}\n\n{markdown_table([*headers, *more], rows)}"


def trials_table() -> str:
    """What others tried without gain, beside the same engine without it, in one run on a card."""
    from nemolab.measure import latest

    plain = latest("card_decode.rows", trials={})
    run = plain["settings"]["read_gb_s"]
    cases = [("none", plain)]
    for what, field in (("shared expert first", "shared_first"), ("guesses copied early", "speculate"),
                        ("recent experts kept, GiB", "kept_gib")):  # fmt: skip
        row = latest("card_decode.rows_*", read_gb_s=run, trials=lambda trials, field=field: field in trials)
        value = row["settings"]["trials"][field]
        cases.append((what if value is True else f"{what}: {value:g}", row))
    rows = []
    for what, row in cases:
        said, ratio = row["settings"], row["median"] / plain["median"]
        moved = f"{(said['bytes_copied'] + said['bytes_in_place']) / 1e6:,.0f}"
        rows.append([what, moved, spread(row), f"{ratio:.2f}", len(row["values"])])
    taken = how_taken([row for _, row in cases])
    how = f"{taken}. {_layers(plain['settings'])}, all in RAM; `rows`; in turns in one run."
    return f"{how}\n\n{markdown_table(['trial', 'MB over the bus:', 'ms a token:', 'of none:', 'samples:'], rows)}"


def prefill_table() -> str:
    """A prompt's pass on a card, experts in RAM and on disk, beside their way over the bus and torch's products."""
    from nemolab.measure import latest

    rows, taken = [], []
    for where, name in (("RAM", "cached"), ("disk", "disk")):
        row = latest(f"card_prefill.{name}")
        said = row["settings"]
        disk = f"{said['disk_read_ms']:,.0f}" if "disk_read_ms" in said else ""
        floors = [f"{said['copy_ms']:,.0f}", f"{said['torch_ms']:,.0f}", disk]
        cells = [where, f"{said['tokens']:,}", f"{said['needed']:,}", f"{said['crossed']:,.0f}", spread(row), *floors]
        bound_ms = max(said["copy_ms"], said["torch_ms"])
        rows.append([*cells, "" if disk else f"{row['median'] / bound_ms:.2f}", len(row["values"])])
        taken.append(row)
    headers = ["experts in", "tokens:", "experts needed:", "that crossed the bus:", "ms:", "crossing, ms:"]
    more = ["torch BF16, ms:", "disk in order, ms:", "measured / longer of the first two:", "samples:"]
    said = taken[0]["settings"]
    how = f"{how_taken(taken)}. {_layers(said)}; copied at {said['copy_gb_s']:.1f} GB/s. Median (least to most)."
    how += " The disk's time is that of the same blocks read in order between the passes: a comparison, no bound."
    return f"{how}\n\n{markdown_table([*headers, *more], rows)}"


def memory_table() -> str:
    """What a process takes of a card's memory, as the driver tells, beside what was allowed and planned."""
    from nemolab.measure import latest

    taken = [latest(f"card_memory.{phase}") for phase in ("load", "prompt", "decode")]
    said = taken[0]["settings"]
    planned = {name.removesuffix("_bytes"): size / 2**30 for name, size in said["planned"].items() if "bytes" in name}
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in planned.items() if name != "total" and gib)
    names = ["loaded", f"a prompt of {said['prompt_tokens']:,} tokens", f"{said['tokens']} tokens behind it"]
    rows = [[name, f"{row['median']:.2f}"] for name, row in zip(names, taken, strict=True)]
    rows += [["planned", f"{planned['total']:.2f}"], ["allowed", f"{said['budget_gib']:.2f}"]]
    how = f"{how_taken(taken)}. {_layers(said)}; `{said['transfer']}`. Planned, GiB: {parts}."
    return f"{how}\n\n{markdown_table(['most in use by the process', 'GiB:'], rows)}"


def card_correctness_table() -> str:
    """The engine on a card beside transformers in fp32 and beside the CPU's engine; and whether it repeats itself."""
    from nemolab.measure import latest

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
    repeats = latest("compare.distinct_repeats", model="tiny", device="cuda")
    runs, distinct = repeats["settings"]["runs"], repeats["median"]
    same = "the same bits" if distinct == 1 else f"{distinct:.0f} DIFFERENT RESULTS"
    told = f"{len(runs)} runs ({'; '.join(runs)}) gave {same}."
    return f"{how_taken([*taken, *controls, repeats])}.\n\n{table}\n\n{broken} {told}"


def _layers(said: Mapping) -> str:
    shape = f"{said['layers']} layers of the shape of {said['model']}"
    return f"{shape}, {said['moe_layers']} of them with {said['experts']} experts"
