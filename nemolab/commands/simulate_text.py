"""The answer of `nemolab simulate` for people: notes first, then the table, then what follows from it."""

from __future__ import annotations

from typing import Any

from nemolab.commands.verb import table
from nemolab.units import show_bytes

MOST_CURVE_ROWS = 16
GUESS_COLUMNS = ("right", "covered", "perfect", "shuffled")


def render(data: dict[str, Any]) -> str:
    """data  the JSON document of the verb."""
    parts = [
        _trace_line(data["trace"]),
        "\n".join(f"note: {note}" for note in data["notes"]),
        _rows(data["rows"]),
        *([_curve(data)] if "curve" in data else []),
        _advice(data),
        *([_measures(data["measures"])] if "measures" in data else []),
        *([_live(data["live"])] if "live" in data else []),
        *([f"drawn: {data['plot']}"] if "plot" in data else []),
    ]
    return "\n\n".join(part for part in parts if part)


def _trace_line(facts: dict[str, Any]) -> str:
    tokens = facts["tokens"]
    return (
        f"{facts['model']}: {facts['layers']} MoE layers, top {facts['top_k']} of {facts['n_experts']} experts, "
        f"{facts['blocks']:,} blocks; {tokens['prefill']:,} prompt and {tokens['decode']:,} decode tokens in "
        f"{facts['conversations']:,} conversation(s); {facts['guesses']} guesses a layer; read as {facts['source']}"
    )


def _rows(rows: list[dict[str, Any]]) -> str:
    ahead = any(row["prefetch"] for row in rows)
    late = any(row["prefetch"] and row["prefetch_late"] is not None for row in rows)
    # A phase without lookups has nothing to show, and `all` repeats the only other one.
    full = {row["phase"] for row in rows if row["lookups"]}
    phases = full - {"all"} if len(full) == 2 else full
    headers = ["policy", "cache", "phase", "lookups", "hit %", "misses", "compulsory", "reads/token", "MB/token"]
    headers[2:2] = ["prefetch"] if ahead else []
    headers += ["useful", "wasted"] if ahead else []
    headers += ["late"] if late else []
    cells = []
    for row in rows:
        if row["phase"] not in phases:
            continue
        line = [row["policy"], show_size(row), row["phase"], row["lookups"], _percent(row["hit_rate"])]
        line += [row["misses"], row["compulsory"], row["reads_per_token"], _mega(row["bytes_per_token"])]
        line[2:2] = [row["prefetch"]] if ahead else []
        line += [row["prefetch_useful"], row["prefetch_wasted"]] if ahead else []
        line += [row["prefetch_late"]] if late else []
        cells.append(line)
    return table(headers, cells) if cells else "nothing was looked up"


def _curve(data: dict[str, Any]) -> str:
    points = data["curve"]
    title = f"LRU, {data['curve_phase']}, {_start(data)}: {len(points):,} sizes where the hit rate changes"
    if not points:
        return f"{title}: nothing ever hits"
    stride = max(1, -(-len(points) // MOST_CURVE_ROWS))
    shown = points[::stride] + ([points[-1]] if (len(points) - 1) % stride else [])
    left_out = f"\n({len(points) - len(shown):,} left out here; --json has all)" if len(shown) < len(points) else ""
    return f"{title}\n{table(['cache', 'hit %'], [[show_size(p), _percent(p['hit_rate'])] for p in shown])}{left_out}"


def _advice(data: dict[str, Any]) -> str:
    advice, lines = data["advice"], []
    floor, cycle, knee, end = (advice[name] for name in ("floor", "cycle", "knee", "end"))
    if cycle and floor:
        lines.append(
            f"cliff: nothing hits up to {show_size(floor)}; at {show_size(cycle)}, one token's cycle, "
            f"{_percent(cycle['hit_rate'])} % do"
        )
    if knee:
        lines.append(f"knee: {show_size(knee)} hit {_percent(knee['hit_rate'])} %; beyond it more memory buys less")
    elif end:
        lines.append("knee: none, the curve rises evenly")
    if end:
        lines.append(f"end: from {show_size(end)} on {_percent(end['hit_rate'])} % hit, all but first lookups")
    else:
        lines.append("no cache of any size hits: nothing is looked up twice")
    for gap in data["gaps"]:
        ahead = f", prefetch {gap['prefetch']}" if gap["prefetch"] else ""
        lines.append(
            f"at {show_size(gap)}{ahead}: LRU {_percent(gap['lru_hit_rate'])} %, {gap['optimum']} "
            f"{_percent(gap['optimum_hit_rate'])} %; of all lookups {_percent(gap['policy_share'])} % miss by the "
            f"policy, {_percent(gap['size_share'])} % by the size, {_percent(gap['compulsory_share'])} % are first ones"
        )
    return "\n".join([f"LRU without prefetch, {data['curve_phase']}, {_start(data)}", *lines])


def _measures(found: dict[str, Any]) -> str:
    bits = found["entropy_bits"]
    rows = [
        ["lookups on the hottest quarter of experts", f"{_percent(found['hottest_quarter_share'])} %", "25 %"],
        [
            "experts that the token before chose too",
            f"{_percent(found['repeat_rate'])} %",
            f"{_percent(found['repeat_rate_by_chance'])} %",
        ],
        *(
            [
                f"  with tokens shuffled {how} conversations",
                f"{_percent(found[f'repeat_rate_shuffled_{how}_conversations'])} %",
                "-",
            ]
            for how in ("within", "across")
        ),
        [
            "entropy of the choice, least to most of layers",
            f"{min(bits):.2f} to {max(bits):.2f} bits",
            f"{found['entropy_bits_even']:.2f} bits",
        ],
        ["first lookups (compulsory)", f"{_percent(found['compulsory_share'])} %", "-"],
        ["experts touched", f"{found['distinct_experts']:,} of {found['experts']:,}", "-"],
    ]
    parts = [f"{found['tokens']:,} tokens of {found['phase']}", table(["measure", "here", "if even"], rows)]
    reuse = found["reuse_distance"]
    edges, counts = reuse["edges"], reuse["counts"]
    bins = [[f"{low:,} to {high - 1:,}", count] for low, high, count in zip(edges, edges[1:], counts, strict=False)]
    parts.append(table(["reuse distance, blocks", "lookups"], [*bins, ["never before", reuse["never"]]]))
    for ahead, guesses in found["guesses"].items():
        if guesses["right"] is None:
            continue
        lines = [
            [n + 1, *(_percent(guesses[name][n]) if n < len(guesses[name]) else None for name in GUESS_COLUMNS)]
            for n in range(len(guesses["right"]))
        ]
        title = f"guesses made {ahead} MoE layer(s) ahead, {guesses['places']:,} times"
        parts.append(f"{title}\n" + table(["first n", "right %", "of chosen %", "perfect %", "shuffled %"], lines))
    if not found["guesses"]:
        parts.append("no guesses in this trace")
    return "\n\n".join(parts)


def _live(live: dict[str, Any]) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in live["settings"].items())
    head = (
        f"live against replay ({settings}): {live['live_misses']:,} and {live['replay_misses']:,} misses in "
        f"{live['batches']:,} batches, "
    )
    if live["equal"]:
        return head + "equal in every one"
    columns = list(live["first_differences"][0])
    cells = [[row[name] for name in columns] for row in live["first_differences"]]
    return f"{head}{live['batches_differing']:,} differ; the first of them:\n{table(columns, cells)}"


def show_size(row: dict[str, Any]) -> str:
    """A budget as bytes and blocks, as far as both are known."""
    size_bytes, slots = row["budget_bytes"], row["slots"]
    if slots is None:
        return show_bytes(size_bytes)
    return f"{slots:,} blocks" + ("" if size_bytes is None else f" ({show_bytes(size_bytes)})")


def _start(data: dict[str, Any]) -> str:
    return "cold" if data["curve_cold"] else "carried"


def _percent(share: float | None) -> float | str | None:
    return None if share is None else float(f"{100 * share:.2f}")


def _mega(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else size_bytes / 1e6
