"""Tables of measurements on a CPU and its disk, each from the newest recorded rows."""

from functools import partial
from math import isclose

from nemolab.readme.markdown import how_taken, markdown_table, spread


def correctness_table() -> str:
    """The engine beside transformers in fp32, from the newest recorded comparison of the shipped model on a CPU."""
    texts, taken = compared_texts(None)
    headers = [
        "text",
        "tokens scored:",
        "PPL transformers fp32:",
        "PPL engine:",
        "mean KL, prompt:",
        "mean KL, decode:",
    ]
    rows = [
        [
            text,
            settings["tokens"],
            f"{value['ppl_reference']:.3f}",
            f"{value['ppl_engine']:.3f}",
            f"{value['kl_mean']:.1e}",
            f"{value['kl_mean_decode']:.1e}",
            f"{value['greedy_match']:.0f}/{settings['greedy_of']}",
        ]
        for text, value, settings in texts
    ]
    controls, broken = broken_models(None)
    table = markdown_table([*headers, "greedy:"], rows)
    return f"{how_taken([*taken, *controls])}.\n\n{table}\n\n{broken}"


def compared_texts(device: str | None, more: tuple[str, ...] = ()) -> tuple[list[tuple[str, dict, dict]], list]:
    """(text, its figures by name, settings) of the newest comparison, and rows that tell how it was taken.

    device  None: the CPU's engine; more: names of further figures
    """
    names = ("ppl_reference", "ppl_engine", "kl_mean", "kl_mean_decode", "greedy_match", *more)
    found: dict[str, dict] = {}
    for row in newest_comparison(device):
        if "text" in row["settings"]:
            found.setdefault(row["settings"]["text"], {})[row["name"].partition(".")[2]] = row
    texts = [
        (text, {name: got[name]["median"] for name in names}, got["kl_mean"]["settings"]) for text, got in found.items()
    ]
    return texts, [got["kl_mean"] for got in found.values()]


def broken_models(device: str | None) -> tuple[list, str]:
    """The rows of models broken on purpose in that comparison, and a sentence."""
    rows = [row for row in newest_comparison(device) if row["name"] == "compare.control_ppl"]
    worse = ", ".join(f"{row['settings']['control']} {row['median']:,.0f}" for row in rows)
    return rows, f"The same measure on models broken on purpose (PPL over all texts): {worse}."


def newest_comparison(device: str | None) -> list:
    """All rows of the newest comparison of the shipped model; those of other models and devices may stand beside."""
    from nemolab.measure import latest_run, read_rows

    names = ["compare.kl_mean", "compare.control_ppl"]
    run = latest_run(names, model="tiny", device=device)["compare.kl_mean"]["run"]
    return [row for _, row in read_rows("compare.*").iterrows() if row["run"] == run]


def speed_table() -> str:
    """Decode and experts, as ratios to a rival in the same run, from the newest recorded benchmarks."""
    from nemolab.measure import latest, latest_run

    experts = "44 experts of Nemotron-3-Super's shape"
    all_active, few_active = ({"shape": "super", "active": partial(isclose, a, abs_tol=0.01)} for a in (1.0, 0.075))
    cases = [
        ("decode of data/tiny, everything cached", "transformers fp32", "decode", "transformers", {"model": "tiny"}),
        (f"{experts}, all neurons active", "torch fp32", "expert", "torch_f32", all_active),
        (f"{experts}, 7.5 % of neurons active", "torch fp32", "expert", "torch_f32", few_active),
    ]
    rows, taken = [], []
    for what, rival, name, row_of_rival, settings in cases:
        names = [f"{name}.{part}" for part in (row_of_rival, "engine", "ratio")]
        theirs, ours, ratio = latest_run(names, **settings).values()
        rows.append([what, rival, spread(theirs), spread(ours), spread(ratio), len(ratio["values"])])
        taken.append(ratio)
    headers = ["what", "baseline", "baseline, ms:", "nemolab, ms:", "times faster:", "samples:"]
    threads = " or ".join(dict.fromkeys(str(row["settings"]["threads"]) for row in taken))
    how = f"{how_taken(taken)}; {threads} threads. Median (least to most); both sides in turns in one run."
    engine, cached = latest_run(["expert.engine", "expert.cached"], **all_active).values()
    gb_s = latest("expert.read_bandwidth", run=engine["run"])["median"]
    read_bytes = engine["settings"]["bytes_read"]
    floor_ms = read_bytes / gb_s / 1e6
    bound = (
        f"What bounds the experts (all neurons active): their {read_bytes:,} bytes at the {gb_s:.1f} GB/s measured in"
        f" the same run would take {floor_ms:.1f} ms; the same work on one block over and over, out of a cache, takes"
        f" {cached['median']:.1f} ms. So it is {'decoding' if cached['median'] > floor_ms else 'memory'}."
    )
    return f"{how}\n\n{markdown_table(headers, rows)}\n\n{bound}"


def repack_table() -> str:
    """Repack beside a plain direct copy of the same bytes, from the newest recorded benchmark of each layout."""
    from nemolab.measure import latest_run

    rows, taken = [], []
    for layout in ("neuron", "source"):
        names = [f"repack.{part}" for part in ("copy", layout, "of_copy")]
        copy, repack, share = latest_run(names, layout=layout).values()
        size_gb = f"{share['settings']['store_bytes'] / 1e9:.2f}"
        rows.append([layout, size_gb, spread(copy), spread(repack), spread(share), len(share["values"])])
        taken.append(share)
    headers = ["layout", "GB written:", "plain copy, GB/s:", "repack, GB/s:", "repack / copy:", "samples:"]
    experts = taken[0]["settings"]["experts"]
    how = (
        f"{experts} experts of Nemotron-3-Super's shape and a dense part, cold cache. Median (least to most);"
        " both sides in turns in one run."
    )
    return f"{how_taken(taken)}. {how}\n\n{markdown_table(headers, rows)}"


def replay_table() -> str:
    """The replay's own speed by policy, libCacheSim's trace runner beside it, and what recording costs."""
    from nemolab.measure import latest_run
    from nemolab.simulate import POLICY_NAMES

    names = ("curve", "of_libcachesim", "libcachesim", "one_by_one", "curve_of_libcachesim")
    run = latest_run([f"replay.{name}" for name in (*names, *(name.replace("-", "_") for name in POLICY_NAMES))])
    curve, faster, theirs, ours, by_curve, *policies = run.values()
    rows = [[row["settings"]["policy"], spread(row), len(row["values"])] for row in policies]
    recording, derive = latest_run(["trace.slowdown", "trace.derive"], model="tiny").values()
    made, sizes = policies[0]["settings"], faster["settings"]["sizes"]
    return (
        f"{how_taken([*policies, curve, faster, recording])}. {made['lookups']:,} lookups of a synthetic trace of"
        f" Nemotron-3-Super's shape, {made['slots']:,} of {made['blocks']:,} blocks cached, one thread. Median (least"
        f" to most).\n\n"
        f"{markdown_table(['policy', 'million lookups a second:', 'samples:'], rows)}\n\n"
        f"- The whole LRU curve, every size at once: {spread(curve)} s.\n"
        f"- LRU at {sizes} sizes, one lookup at a time, both in turns in one run: libCacheSim"
        f" {faster['settings']['libcachesim']} {spread(theirs)} million lookups a second, nemolab {spread(ours)}:"
        f" {spread(faster)} times as fast. One curve holds all sizes: {spread(by_curve)} times as fast.\n"
        f"- Recording while data/tiny decodes: {spread(recording)} times the time without it,"
        f" {len(recording['values'])} rounds in turns; what is derived after an answer: {spread(derive)} ms a token."
    )
