"""Measurement rows: JSON lines under `data/measurements`. A row carries its excuses with it.

A name has one or two parts, `decode` or `compare.kl_mean`; rows that share the first part share a file.

| field    | what                                                                     |
|----------|--------------------------------------------------------------------------|
| name     | what was measured                                                         |
| unit     | of `values`: ms, ms/token, GB/s, nats, ratio, ...                         |
| values   | raw samples, never a mean                                                 |
| settings | everything that was chosen: model, text, cache, threads, cold or warm ...; `run`: when the run began |
| machine  | `machine()`                                                               |
| commit, dirty | the code that measured; null outside git                             |
| time     | UTC, ISO 8601                                                             |

Rows with one `run` come from one run: only they were taken in turns, and only they belong beside one another. Rows from
before there was a `run` were all written in one second at its end, and are told apart by that.

Where git does not know the code, in a copy on another machine say, NEMOLAB_COMMIT tells: `abc123def456`, or
`abc123def456+changes` where the tree was dirty. It wins over git.
"""

import json
import math
import os
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd

from nemolab import paths
from nemolab.errors import NemolabError
from nemolab.measure.machine import machine

COMMIT_VARIABLE, WITH_CHANGES = "NEMOLAB_COMMIT", "+changes"
FIELDS = ("name", "unit", "values", "settings", "machine", "commit", "dirty", "time")


def record(
    name: str, values: Iterable[float], unit: str, settings: dict[str, Any], folder: Path | None = None
) -> dict[str, Any]:
    """Append one row to `<folder>/<first part of name>.jsonl` and return it.

    Raises NemolabError without samples or with samples that are no finite numbers: an empty measurement is none.
    """
    row = make_row(name, values, unit, settings)
    folder = folder or paths.measurements_folder()
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row, allow_nan=False, ensure_ascii=False)
    with open(folder / f"{name.partition('.')[0]}.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")  # one write: a line is there whole or not at all
    return row


def record_run(rows: Iterable[Mapping[str, Any]], began: datetime, folder: Path | None = None) -> None:
    """Append the rows of one run, each as `record` takes it, tied together by when the run began.

    began  with a time zone
    """
    run = began.astimezone(UTC).isoformat(timespec="milliseconds")
    for row in rows:
        record(**{**row, "settings": {**row["settings"], "run": run}}, folder=folder)


def make_row(name: str, values: Iterable[float], unit: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A row as `record` writes it, without writing it."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)?", name):
        raise NemolabError(f"measurement name {name!r}: use small letters, digits, underscores and at most one dot")
    samples = [float(value) for value in values]
    if not samples:
        raise NemolabError(f"measurement {name}: no samples")
    if not all(math.isfinite(sample) for sample in samples):
        raise NemolabError(f"measurement {name}: samples must be finite numbers, got {samples}")
    commit, dirty = code_version()
    return {
        "name": name,
        "unit": unit,
        "values": samples,
        "settings": settings,
        "machine": machine(),
        "commit": commit,
        "dirty": dirty,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def read_rows(name: str = "*", folder: Path | None = None) -> pd.DataFrame:
    """All rows of a name (or a pattern such as `compare.*`), oldest first.

    Adds `median`, `low`, `high` of the samples, and `run`, equal in rows of one run and in no others.
    Raises NemolabError that names file and line of a row that is not whole.
    """
    folder = folder or paths.measurements_folder()
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        if not fnmatchcase(path.stem, name.partition(".")[0]):  # a file holds the rows of one first part
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
                missing = [field for field in FIELDS if field not in row]
            except (ValueError, TypeError) as error:
                raise NemolabError(f"{path}, line {number}: no JSON row ({error})") from None
            if missing or not row["values"]:
                raise NemolabError(f"{path}, line {number}: without {', '.join(missing) or 'samples'}")
            if fnmatchcase(row["name"], name):
                rows.append({**row, **_derive(row)})
    frame = pd.DataFrame(rows, columns=[*FIELDS, "median", "low", "high", "run"])
    return frame.sort_values("time", kind="stable", ignore_index=True)


def _derive(row: Mapping[str, Any]) -> dict[str, Any]:
    values = row["values"]
    found = {"median": float(statistics.median(values)), "low": float(min(values)), "high": float(max(values))}
    return found | {"run": row["settings"].get("run", row["time"])}


def latest(name: str, folder: Path | None = None, run: str | None = None, **settings: Any) -> pd.Series:
    """The newest row of a name whose settings include all those given: a value, a test it has to pass, or None.

    run   only of this one: the `run` of another row
    None stands for a setting that a row does not have, such as the device of a comparison on the CPU.

    Raises NemolabError when there is none.
    """
    frame = _fitting(name, folder, settings)
    if run is not None:
        frame = frame[frame["run"] == run]
    if frame.empty:
        raise NemolabError(f"no measurement {name}{_say(settings)}" + (f" in the run of {run}" if run else ""))
    return frame.iloc[-1]


def latest_run(names: Sequence[str], folder: Path | None = None, **settings: Any) -> dict[str, pd.Series]:
    """The newest run that has a row of every name, whose settings include those given: name -> its row.

    A newer run of which one is missing does not count: rows of two runs never stand beside one another.
    Raises NemolabError when there is none.
    """
    return runs_with(names, folder, **settings)[-1]


def runs_with(names: Sequence[str], folder: Path | None = None, **settings: Any) -> list[dict[str, pd.Series]]:
    """All such runs, oldest first; of several rows of a name in one run, the last. Raises NemolabError without any."""
    found: dict[str, dict[str, pd.Series]] = {}
    for name in names:
        for _, row in _fitting(name, folder, settings).iterrows():
            found.setdefault(row["run"], {})[name] = row
    whole = [{name: rows[name] for name in names} for rows in found.values() if len(rows) == len(names)]
    if not whole:
        raise NemolabError(f"no run with all of {', '.join(names)}{_say(settings)}")
    return sorted(whole, key=lambda rows: rows[names[0]]["time"])


def _fitting(name: str, folder: Path | None, settings: Mapping[str, Any]) -> pd.DataFrame:
    frame = read_rows(name, folder)
    fit = [all(_fits(found.get(key), wanted) for key, wanted in settings.items()) for found in frame["settings"]]
    return frame[pd.Series(fit, index=frame.index, dtype=bool)]


def _fits(found: Any, wanted: Any) -> bool:
    if wanted is None:
        return found is None
    return found is not None and wanted(found) if callable(wanted) else found == wanted


def _say(settings: Mapping[str, Any]) -> str:
    wanted = (f"{key} that passes a test" if callable(value) else f"{key}={value}" for key, value in settings.items())
    return f" with {', '.join(wanted)}" if settings else ""


def code_version() -> tuple[str | None, bool | None]:
    """The commit of the clone and whether its tree was dirty; rows being added do not count as dirt.

    Raises NemolabError where NEMOLAB_COMMIT is set to what is no commit.
    """
    told = os.environ.get(COMMIT_VARIABLE)
    if told is not None:
        commit = told.removesuffix(WITH_CHANGES)
        if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
            raise NemolabError(
                f"{COMMIT_VARIABLE} is {told!r}; 7 to 40 hexadecimal digits were expected, as git rev-parse prints, "
                f"with {WITH_CHANGES} behind them where the tree was dirty; unset it to ask git"
            )
        return commit[:12], told != commit
    try:
        home = str(paths.home())
        commit = _git(home, "rev-parse", "--short=12", "HEAD")
        changes = _git(home, "status", "--porcelain", "--", ".", ":(exclude)data/measurements")
    except (OSError, subprocess.CalledProcessError, NemolabError):
        return None, None
    return commit, bool(changes)


def _git(home: str, *words: str) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    command = ["git", "-C", home, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()
