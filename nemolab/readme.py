"""The README's tables, made from data: `python -m nemolab.readme` fills them in, a test compares.

A table stands between `<!-- name -->` and `<!-- /name -->`; what stands there is replaced, the rest is left alone.
"""

import re
import sys
from collections.abc import Callable
from functools import cache, partial
from math import isclose
from pathlib import Path

from nemolab import paths
from nemolab.errors import NemolabError


def fill(text: str, name: str, content: str) -> str:
    """Replace what stands between a pair of markers.

    Raises NemolabError unless there is exactly one pair of that name.
    """
    pattern = re.compile(rf"<!-- {re.escape(name)} -->\n.*?<!-- /{re.escape(name)} -->", re.DOTALL)
    found = len(pattern.findall(text))
    if found != 1:
        raise NemolabError(f"README: {found} places marked <!-- {name} --> ... <!-- /{name} -->, needed one")
    return pattern.sub(lambda _: f"<!-- {name} -->\n{content.strip()}\n<!-- /{name} -->", text)


def render(text: str) -> str:
    """A README with every table made anew."""
    for name, make in TABLES.items():
        text = fill(text, name, make())
    return text


def markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; columns whose header ends in a colon are set to the right."""
    marks = ["---:" if header.endswith(":") else "---" for header in headers]
    names = [header.removesuffix(":") for header in headers]
    lines = [names, marks, *([str(cell).replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bytes_table() -> str:
    """Bytes per token of the models we count and of published ones."""
    from nemolab.plan import compare_models

    rows = [
        [
            row.model,
            f"{row.moe_layers} x {row.top_k} of {row.experts}",
            f"{row.expert_bytes:,}",
            f"{row.pages_per_expert:,.6g}",
            f"{row.bytes_per_token:,}",
            f"{row.routed_gib:,.4g}",
            row.how,
        ]
        for row in compare_models(paths.tiny_folder()).itertuples()
    ]
    headers = ["model", "experts read per token", "bytes an expert:", "pages:", "bytes a token:"]
    return markdown_table([*headers, "all experts, GiB:", "how"], rows)


def families_table() -> str:
    """Bytes per token of other families, counted from their configs."""
    from nemolab.plan import compare_families

    rows = [
        [
            row.model,
            f"{row.moe_layers} x {row.top_k} of {row.experts}",
            row.expert_format,
            f"{row.expert_bytes:,}",
            f"{row.gb_per_token:,.3f}",
            f"{row.gb_per_token_nvfp4:,.3f}",
            f"{row.routed_gib:,.1f}",
            f"{row.total_params / 1e9:,.2f}",
            f"{row.active_params_per_token / 1e9:,.2f}",
        ]
        for row in compare_families().itertuples()
    ]
    headers = ["model", "experts read per token", "published in", "bytes an expert:", "GB a token:"]
    more = ["GB a token in NVFP4:", "all experts, GiB:", "parameters, 10⁹:", "used by a token, 10⁹:"]
    return markdown_table([*headers, *more], rows)


def correctness_table() -> str:
    """The engine beside transformers in fp32, from the newest recorded comparison of the shipped model."""
    from nemolab.measure import latest, read_rows

    def names(measured: str, of: str) -> list[str]:
        """What was compared of the shipped model; rows of other models may stand beside."""
        all_settings = read_rows(measured)["settings"]
        return list(dict.fromkeys(settings[of] for settings in all_settings if settings["model"] == "tiny"))

    rows, taken = [], []
    for text in names("compare.kl_mean", "text"):
        got = {
            name: latest(f"compare.{name}", model="tiny", text=text)
            for name in ("ppl_reference", "ppl_engine", "kl_mean", "kl_mean_decode", "greedy_match")
        }
        value = {name: row["median"] for name, row in got.items()}
        settings = got["kl_mean"]["settings"]
        rows.append(
            [
                text,
                settings["tokens"],
                f"{value['ppl_reference']:.3f}",
                f"{value['ppl_engine']:.3f}",
                f"{value['kl_mean']:.1e}",
                f"{value['kl_mean_decode']:.1e}",
                f"{value['greedy_match']:.0f}/{settings['greedy_of']}",
            ]
        )
        taken.append(got["kl_mean"])
    headers = [
        "text",
        "tokens scored:",
        "PPL transformers fp32:",
        "PPL engine:",
        "mean KL, prompt:",
        "mean KL, decode:",
    ]
    table = markdown_table([*headers, "greedy:"], rows)
    broken = {
        name: latest("compare.control_ppl", model="tiny", control=name)
        for name in names("compare.control_ppl", "control")
    }
    taken += broken.values()
    worse = ", ".join(f"{name} {row['median']:,.0f}" for name, row in broken.items())
    return f"{_taken(taken)}.\n\n{table}\n\nThe same measure on models broken on purpose (PPL over all texts): {worse}."


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
        rows.append([what, rival, _spread(theirs), _spread(ours), _spread(ratio), len(ratio["values"])])
        taken.append(ratio)
    headers = ["what", "baseline", "baseline, ms:", "nemolab, ms:", "times faster:", "samples:"]
    threads = " or ".join(dict.fromkeys(str(row["settings"]["threads"]) for row in taken))
    how = f"{_taken(taken)}; {threads} threads. Median (least to most); both sides in turns in one run."
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


def _taken(rows) -> str:
    """Machine, day and code of rows that share a table; what differs between them is all said."""
    from nemolab.measure import one_line

    machines = dict.fromkeys(one_line(row["machine"]) for row in rows)
    codes = dict.fromkeys(
        f"{row['time'][:10]}, commit {row['commit']}{' with changes' if row['dirty'] else ''}" for row in rows
    )
    return "; ".join([*machines, *codes])


def _spread(row) -> str:
    return f"{row['median']:.3g} ({row['low']:.3g} to {row['high']:.3g})"


def repack_table() -> str:
    """Repack beside a plain direct copy of the same bytes, from the newest recorded benchmark of each layout."""
    from nemolab.measure import latest

    rows, taken = [], []
    for layout in ("neuron", "source"):
        copy, repack, share = (latest(f"repack.{part}", layout=layout) for part in ("copy", layout, "of_copy"))
        size_gb = f"{share['settings']['store_bytes'] / 1e9:.2f}"
        rows.append([layout, size_gb, _spread(copy), _spread(repack), _spread(share), len(share["values"])])
        taken.append(share)
    headers = ["layout", "GB written:", "plain copy, GB/s:", "repack, GB/s:", "repack / copy:", "samples:"]
    experts = taken[0]["settings"]["experts"]
    how = (
        f"{experts} experts of Nemotron-3-Super's shape and a dense part, cold cache. Median (least to most);"
        " both sides in turns in one run."
    )
    return f"{_taken(taken)}. {how}\n\n{markdown_table(headers, rows)}"


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
        f"{_taken(taken)}. {taken[0]['settings']['experts']} experts of Nemotron-3-Super's shape, all in page-locked "
        "memory. Median (least to most); all in turns in one run. GB/s copied and read in place there, of "
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
        rows.append([kind, shape, f"{settings['bytes'] / 1e6:.1f}", _spread(time_us), share_cell])
    headers = ["format", "matrix", "MB:", "us:", "% of the read bandwidth:"]
    bandwidth = f"Read bandwidth: {read['median']:,.0f} GB/s"
    how = f"{_taken([read])}. {bandwidth}. Median (least to most) of {len(read['values'])}."
    return f"{how}\n\n{markdown_table(headers, rows)}"


def replay_table() -> str:
    """The replay's own speed by policy, libCacheSim's trace runner beside it, and what recording costs."""
    from nemolab.measure import latest
    from nemolab.simulate import POLICY_NAMES

    policies = [latest(f"replay.{policy.replace('-', '_')}") for policy in POLICY_NAMES]
    rows = [[row["settings"]["policy"], _spread(row), len(row["values"])] for row in policies]
    names = ("curve", "of_libcachesim", "libcachesim", "one_by_one", "curve_of_libcachesim")
    curve, faster, theirs, ours, by_curve = (latest(f"replay.{name}") for name in names)
    recording, derive = (latest(f"trace.{name}", model="tiny") for name in ("slowdown", "derive"))
    made, sizes = policies[0]["settings"], faster["settings"]["sizes"]
    return (
        f"{_taken([*policies, curve, faster, recording])}. {made['lookups']:,} lookups of a synthetic trace of"
        f" Nemotron-3-Super's shape, {made['slots']:,} of {made['blocks']:,} blocks cached, one thread. Median (least"
        f" to most).\n\n"
        f"{markdown_table(['policy', 'million lookups a second:', 'samples:'], rows)}\n\n"
        f"- The whole LRU curve, every size at once: {_spread(curve)} s.\n"
        f"- LRU at {sizes} sizes, one lookup at a time, both in turns in one run: libCacheSim"
        f" {faster['settings']['libcachesim']} {_spread(theirs)} million lookups a second, nemolab {_spread(ours)}:"
        f" {_spread(faster)} times as fast. One curve holds all sizes: {_spread(by_curve)} times as fast.\n"
        f"- Recording while data/tiny decodes: {_spread(recording)} times the time without it,"
        f" {len(recording['values'])} rounds in turns; what is derived after an answer: {_spread(derive)} ms a token."
    )


@cache
def policies_table() -> str:
    """Decode hit rates of the shipped trace by policy and size, where the cliff is, and engine against replay."""
    from nemolab.policy import POLICIES
    from nemolab.sample_trace import find_trace
    from nemolab.simulate import POLICY_NAMES, advise, check_live, from_trace, lru_curve, replay
    from nemolab.trace import read_trace
    from nemolab.units import show_bytes

    trace = read_trace(find_trace(model=paths.tiny_folder()))
    lookups = from_trace(trace)
    sizes = {f"{share:.0%}": round(share * lookups.n_keys) for share in (0.1, 0.24, 0.5, 0.75)}
    found = {
        (policy, slots): replay(lookups, policy, slots=slots).row("decode")
        for policy in POLICY_NAMES
        for slots in sizes.values()
    }
    rows = [
        [
            policy,
            POLICIES[policy].about if policy in POLICIES else "an LRU for each layer, with an equal share",
            *(f"{100 * found[policy, slots]['hit_rate']:.1f}" for slots in sizes.values()),
        ]
        for policy in POLICY_NAMES
    ]
    reads = [f"{found['lru', slots]['reads_per_token']:.2f}" for slots in sizes.values()]
    rows.append(["", "blocks read a token under LRU", *reads])
    headers = [f"{share} = {slots} blocks:" for share, slots in sizes.items()]
    facts = found["lru", sizes["24%"]]
    floor = advise(lookups, lru_curve(lookups, in_slots=True)).floor
    live = check_live(trace)
    agree = "all are equal" if live.equal else f"{len(live.differing)} DIFFER"
    conversations = len(trace.meta.taken["conversations"])
    ahead = replay(lookups, "lru", slots=sizes["24%"], prefetch=4).row("decode")
    on_demand = ahead["misses"] / ahead["tokens"]
    return (
        f"Decode lookups that hit, %: {facts['lookups']:,} lookups of {facts['tokens']:,} tokens in {conversations} "
        f"conversations, the cache carried from one to the next, by the share of {lookups.n_keys} blocks "
        f"({show_bytes(int(lookups.size_bytes.sum()))}) that it holds. Exact and offline: no machine, no spread.\n\n"
        f"{markdown_table(['policy', 'what it does', *headers], rows)}\n\n"
        f"- Up to {floor.slots} blocks, (layers - 1) x top_k, an LRU hits nothing.\n"
        f"- Paper against practice: the engine that recorded this, with {live.settings['slots']} blocks, missed "
        f"{int(live.live[live.live >= 0].sum()):,} times, a replay misses {int(live.replayed.sum()):,} times; of "
        f"{live.compared:,} batches {agree}.\n"
        f"- Four guesses read ahead for each layer, at 24%: {on_demand:.2f} reads a token to wait for instead of "
        f"{facts['reads_per_token']:.2f}, and {ahead['reads_per_token']:.2f} in all."
    )


def notebooks_table() -> str:
    """Each notebook's question and the headline of its committed outputs."""
    import nbformat

    from nemolab.notebooks import find_notebooks
    from nemolab.report import find_headline

    rows = []
    for path in find_notebooks():
        notebook = nbformat.read(path, as_version=4)
        title = notebook.cells[0].source.splitlines()[0].removeprefix(f"# {path.stem[:2]} ")
        rows.append([f"[{path.stem}](notebooks/{path.name})", title, find_headline(notebook)])
    return markdown_table(["notebook", "question", "answer on the shipped model"], rows)


def claims_table() -> str:
    """The ledger of claims."""
    from nemolab.plan import claims_table as make
    from nemolab.plan import read_claims

    return make(read_claims())


TABLES: dict[str, Callable[[], str]] = {
    "bytes": bytes_table,
    "families": families_table,
    "repack": repack_table,
    "correctness": correctness_table,
    "speed": speed_table,
    "moe-step": moe_step_table,
    "linear": linear_table,
    "policies": policies_table,
    "replay": replay_table,
    "notebooks": notebooks_table,
    "claims": claims_table,
}


def main() -> int:
    """Rewrite README.md in place; says what was done."""
    path: Path = paths.home() / "README.md"
    before = path.read_text(encoding="utf-8")
    after = render(before)
    path.write_text(after, encoding="utf-8")
    print("README.md was up to date" if after == before else "README.md rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
