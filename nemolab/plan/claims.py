"""The claims ledger, `data/claims.csv`: what the articles say, what we got, and where anyone can see it.

data/README.md says what its columns hold.
"""

import ast
import csv
import re
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path

from nemolab import paths
from nemolab.errors import NemolabError

VERDICTS = {
    "reproduced": "the same figure, by arithmetic or by a measurement of the same thing",
    "in kind": "the same effect on what we can run, or the same figure under a stated assumption",
    "contradicted": "we get something else",
    "open": "not shown yet; the last column says what would show it",
}
COLUMNS = ("claim", "theirs", "ours", "verdict", "where")
CLAIM_IDS = tuple(f"A{n}" for n in range(1, 21)) + tuple(f"B{n}" for n in range(1, 11))


@dataclass(frozen=True)
class Claim:
    """One row of the ledger: its columns as text."""

    claim: str
    theirs: str
    ours: str
    verdict: str
    where: str


def read_claims(path: str | Path | None = None) -> list[Claim]:
    """The ledger's rows, in file order. Default: `data/claims.csv`.

    Raises NemolabError that names the line where the columns are not `COLUMNS`.
    """
    path = Path(path) if path else paths.data_folder() / "claims.csv"
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise NemolabError(f"{path}: first line is {rows[:1]}, needed {','.join(COLUMNS)}")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(COLUMNS):
            raise NemolabError(f"{path}, row {number}: {len(row)} columns, needed {len(COLUMNS)}; quote the commas")
    return [Claim(*row) for row in rows[1:]]


def check_claims(claims: list[Claim], root: Path) -> list[str]:
    """What is wrong with a ledger, one sentence each; empty when all is well.

    root  the folder that holds `tests/`, `notebooks/` and `data/`, to which `where` refers
    """
    faults = [f"{claim_id} is missing" for claim_id in CLAIM_IDS if claim_id not in {c.claim for c in claims}]
    faults += [f"a row is there {n} times: {row[:2]}" for row, n in Counter(map(astuple, claims)).items() if n > 1]
    for claim in claims:
        faults += [f"{claim.claim}: {fault}" for fault in _row_faults(claim, root)]
    return faults


def _row_faults(claim: Claim, root: Path) -> list[str]:
    faults = []
    if claim.claim not in CLAIM_IDS:
        faults.append("no such claim")
    if claim.verdict not in VERDICTS:
        faults.append(f"verdict {claim.verdict!r} is none of {', '.join(VERDICTS)}")
    if not claim.theirs.strip():
        faults.append("what they claim is not said")
    if claim.verdict == "open":
        if not re.match(r"needs \S", claim.where):
            faults.append(f'open, but says {claim.where!r} instead of what it "needs ..."')
        return faults
    if not claim.ours.strip():
        faults.append("has a verdict, but no figure of ours")
    places = claim.where.split("; ")
    return faults + [fault for place in places if (fault := _place_fault(place, root))]


def _place_fault(place: str, root: Path) -> str | None:
    """Why a reader who goes to `place` finds nothing there, or None."""
    if place.startswith("nemolab "):
        missing = [word for word in place.split() if "/" in word and not (root / word).exists()]
        return f"{place!r}: no {missing[0]}" if missing else None
    if re.fullmatch(r"nemolab(\.\w+)+", place):
        return _function_fault(place, root)
    file, _, test = place.partition("::")
    if not (root / file).is_file() or "/" not in file:
        return f"no file {file!r}"
    if test and test not in _functions(root / file):
        return f"{file} has no {test!r}"
    return None


def _function_fault(place: str, root: Path) -> str | None:
    """`nemolab.room.name` must be defined in one of the room's files: looked up without importing them."""
    *room, name = place.split(".")
    folder = root.joinpath(*room)
    files = sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    if any(file.is_file() and name in _functions(file) for file in files):
        return None
    return f"no function {place}"


def _functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def claims_table(claims: list[Claim]) -> str:
    """The ledger as a Markdown table; above it how many there are of each verdict, and what the verdict means."""
    counts = Counter(claim.verdict for claim in claims)
    lines = [f"- {counts[verdict]} **{verdict}**: {meaning}" for verdict, meaning in VERDICTS.items()] + [""]
    lines += ["| claim | theirs | ours | verdict | where |", "|---|---|---|---|---|"]
    for claim in claims:
        cells = [cell.replace("|", r"\|") for cell in astuple(claim)]
        cells[4] = cells[4] if claim.verdict == "open" else _as_code(cells[4])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _as_code(where: str) -> str:
    return ", ".join(f"`{place}`" for place in where.split("; "))
