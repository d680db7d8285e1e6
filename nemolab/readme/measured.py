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
    from nemolab.measure import latest

    names = ("ppl_reference", "ppl_engine", "kl_mean", "kl_mean_decode", "greedy_match", *more)
    texts, taken = [], []
    for text in _compared("compare.kl_mean", "text", device):
        got = {name: latest(f"compare.{name}", model="tiny", text=text, device=device) for name in names}
        texts.append((text, {name: row["median"] for name, row in got.items()}, got["kl_mean"]["settings"]))
        taken.append(got["kl_mean"])
    return texts, taken


def broken_models(device: str | None) -> tuple[list, str]:
    """The rows of models broken on purpose, and a sentence."""
    from nemolab.measure import latest

    rows = {
        name: latest("compare.control_ppl", model="tiny", control=name, device=device)
        for name in _compared("compare.control_ppl", "control", device)
    }
    worse = ", ".join(f"{name} {row['median']:,.0f}" for name, row in rows.items())
    return list(rows.values()), f"The same measure on models broken on purpose (PPL over all texts): {worse}."


def _compared(measured: str, of: str, device: str | None) -> list[str]:
    """What was compared of the shipped model; rows of other models and devices may stand beside."""
    from nemolab.measure import read_rows

    found = [row for row in read_rows(measured)["settings"] if row["model"] == "tiny" and row.get("device") == device]
    return list(dict.fromkeys(row[of] for row in found))


def speed_table() -> str:
    """Decode and experts, as ratios to a rival in the same run, from the newest recorded benchmarks."""
    from nemolab.measure import latest

    experts = "44 experts of Nemotron-3-Super's shape"
    all_active, few_active = ({"shape": "super", "active": partial(isclose, a, abs_tol=0.01)} for a in (1.0, 0.075))
    cases = [
        ("decode of data/tiny, everything cached", "transformers fp32", "decode", "transformers", {"model": "tiny"}),
        (f"{experts}, all neurons active", "torch fp32", "expert", "torch_f32", all_active),
        (f"{experts}, 7.5 % of neurons active", "torch fp32", "expert", "torch_f32", few_active),
    ]
    rows, taken = [], []
    for what, rival, name, row_of_rival, settings in cases:
        theirs, ours, ratio = (latest(f"{name}.{part}", **settings) for part in (row_of_rival, "engine", "ratio"))
        rows.append([what, rival, spread(theirs), spread(ours), spread(ratio), len(ratio["values"])])
        taken.append(ratio)
    headers = ["what", "baseline", "baseline, ms:", "nemolab, ms:", "times faster:", "samples:"]
    threads = " or ".join(dict.fromkeys(str(row["settings"]["threads"]) for row in taken))
    how = f"{how_taken(taken)}; {threads} threads. Median (least to most); both sides in turns in one run."
    engine, cached = (latest(f"expert.{part}", **all_active) for part in ("engine", "cached"))
    gb_s = _bandwidth_of(engine)
    read_bytes = engine["settings"]["bytes_read"]
    floor_ms = read_bytes / gb_s / 1e6
    bound = (
        f"What bounds the experts (all neurons active): their {read_bytes:,} bytes at the {gb_s:.1f} GB/s measured in"
        f" the same run would take {floor_ms:.1f} ms; the same work on one block over and over, out of a cache, takes"
        f" {cached['median']:.1f} ms. So it is {'decoding' if cached['median'] > floor_ms else 'memory'}."
    )
    return f"{how}\n\n{markdown_table(headers, rows)}\n\n{bound}"


def _bandwidth_of(row) -> float:
    """GB/s read from memory in the run of a row: the measurement recorded right after it."""
    from nemolab.measure import read_rows

    measured = read_rows("expert.read_bandwidth")
    return measured[measured["time"] >= row["time"]].iloc[0]["median"]


def repack_table() -> str:
    """Repack beside a plain direct copy of the same bytes, from the newest recorded benchmark of each layout."""
    from nemolab.measure import latest

    rows, taken = [], []
    for layout in ("neuron", "source"):
        copy, repack, share = (latest(f"repack.{part}", layout=layout) for part in ("copy", layout, "of_copy"))
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
    from nemolab.measure import latest
    from nemolab.simulate import POLICY_NAMES

    policies = [latest(f"replay.{policy.replace('-', '_')}") for policy in POLICY_NAMES]
    rows = [[row["settings"]["policy"], spread(row), len(row["values"])] for row in policies]
    names = ("curve", "of_libcachesim", "libcachesim", "one_by_one", "curve_of_libcachesim")
    curve, faster, theirs, ours, by_curve = (latest(f"replay.{name}") for name in names)
    recording, derive = (latest(f"trace.{name}", model="tiny") for name in ("slowdown", "derive"))
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
