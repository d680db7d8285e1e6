"""Markdown between a README's markers, and what its tables of measurements share.

A table stands between `<!-- name -->` and `<!-- /name -->`; what stands there is replaced, the rest is left alone.
"""

import re

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


def markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; columns whose header ends in a colon are set to the right."""
    marks = ["---:" if header.endswith(":") else "---" for header in headers]
    names = [header.removesuffix(":") for header in headers]
    lines = [names, marks, *([str(cell).replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def how_taken(rows) -> str:
    """Machine, day and code of rows that share a table; what differs between them is all said, runs are counted.

    Rows from before there was a `run` (`measure.rows`) do not tell whether they are of one, unless their table asks.
    """
    from nemolab.measure import one_line

    machines = dict.fromkeys(one_line(row["machine"]) for row in rows)
    codes = dict.fromkeys(
        f"{row['time'][:10]}, commit {row['commit']}{' with changes' if row['dirty'] else ''}" for row in rows
    )
    runs = {row["settings"].get("run") for row in rows}
    return "; ".join([*machines, *codes, *([f"{len(runs)} runs"] if len(runs) > 1 and None not in runs else [])])


def spread(row) -> str:
    """Median, least and most of a row, in three digits or, from 1,000 on, as whole numbers."""
    median, low, high = (f"{row[of]:,.0f}" if row[of] >= 1000 else f"{row[of]:.3g}" for of in ("median", "low", "high"))
    return f"{median} ({low} to {high})"
