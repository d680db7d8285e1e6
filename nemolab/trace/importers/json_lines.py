"""JSON lines of strangers, one object at a time: nothing long, deep, doubled or not quite JSON gets through."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemolab.checkpoint.json_files import STRICT_JSON, RefusedJson
from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import LARGEST_ID, shown

# The longest honest line known holds 100 layers of 64 experts: 40 kB. A parsed number takes 32 bytes for 2 of the file.
LINE_LIMIT_BYTES = 1 << 20


def read_records(path: Path, take: Callable[[dict[str, Any], int], None]) -> None:
    """Hand every object to `take`, with its line number; blank lines are none.

    Raises TraceError naming the line, for lines that hold no object and for whatever `take` says is wrong with one:
    its messages go on after "FILE, line N".
    """
    number = 0
    with path.open("rb") as file:
        while line := file.readline(LINE_LIMIT_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            if line.strip():
                try:
                    take(parse_line(line), number)
                except TraceError as error:
                    raise TraceError(f"{path}, line {number} {error}") from None
    if number == 0:
        raise TraceError(f"{path} is empty: nothing was recorded")


def parse_line(line: bytes) -> dict[str, Any]:
    """The object in one line. Raises TraceError whose message goes on after the line's name."""
    if len(line) > LINE_LIMIT_BYTES:
        raise TraceError(f"has more than {LINE_LIMIT_BYTES:,} bytes; the choices of one token were expected")
    try:
        parsed = STRICT_JSON.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TraceError(f"is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise TraceError("is nested too deeply to be an honest file") from None
    except RefusedJson as error:
        raise TraceError(str(error)) from None
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else ": the file is cut off"
        raise TraceError(f"is not valid JSON{cut} ({str(error)[:80]})") from None
    if not isinstance(parsed, dict):
        raise TraceError(f"is {shown(parsed)}; an object {{...}} was expected")
    return parsed


def whole_number(record: dict[str, Any], key: str) -> int:
    """A number from 0 to 2^31 - 1 under a key; true is not one."""
    value = record.get(key)
    if type(value) is not int or not 0 <= value < 2**31:
        found = f"is {shown(value)}" if key in record else f"is missing, there are {shown(sorted(record))}"
        raise TraceError(f"{key!r} {found}; a whole number from 0 up was expected")
    return value


def check_ids(key: str, ids: object) -> list[int]:
    """A list of experts' numbers, not empty."""
    if not isinstance(ids, list) or not ids:
        raise TraceError(f"{key!r} is {shown(ids)}; a list of experts was expected")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > LARGEST_ID:
        wrong = next(item for item in ids if type(item) is not int or not 0 <= item <= LARGEST_ID)
        raise TraceError(f"{key!r} holds {shown(wrong)}; experts are whole numbers from 0 up")
    return ids
