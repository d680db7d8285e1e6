"""JSON lines of strangers, one object at a time: nothing long, deep, doubled or not quite JSON gets through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nemolab.errors import TraceError
from nemolab.trace.importers.arrange import shown

# The longest honest line known holds 100 layers of 64 experts: 40 kB. A parsed number takes 32 bytes for 2 of the file.
LINE_LIMIT_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank. Raises TraceError naming the line."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LINE_LIMIT_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield number, parse_line(f"{path}, line {number}", line, file)


def parse_line(where: str, line: bytes, file: BinaryIO | None = None) -> dict[str, Any]:
    """The object in one line; `file`, where it is read from, tells whether the line is the last."""
    if len(line) > LINE_LIMIT_BYTES:
        raise TraceError(f"{where} has more than {LINE_LIMIT_BYTES:,} bytes; one token's choices were expected")
    try:
        parsed = json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise TraceError(f"{where} is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise TraceError(f"{where} is nested too deeply to be an honest file") from None
    except _NotPlainError as error:
        raise TraceError(f"{where} {error}") from None
    except ValueError as error:
        cut = file is not None and not line.endswith(b"\n")
        raise TraceError(
            f"{where} is not valid JSON{': the file is cut off' if cut else ''} ({str(error)[:80]})"
        ) from None
    if not isinstance(parsed, dict):
        raise TraceError(f"{where} is {shown(parsed)}; an object {{...}} was expected")
    return parsed


def whole_number(where: str, record: dict[str, Any], key: str) -> int:
    """A number from 0 to 2^31 - 1 under a key; true is not one."""
    if key not in record:
        raise TraceError(f"{where} has no {key!r}; it has {shown(sorted(record))}")
    value = record[key]
    if type(value) is not int or not 0 <= value < 2**31:
        raise TraceError(f"{where}: {key!r} is {shown(value)}; a whole number from 0 up was expected")
    return value


def check_ids(where: str, ids: object) -> list[int]:
    """A list of experts' numbers, not empty."""
    if not isinstance(ids, list) or not ids:
        raise TraceError(f"{where} is {shown(ids)}; a list of experts was expected")
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > 2**31 - 2:
        wrong = next(item for item in ids if type(item) is not int or not 0 <= item <= 2**31 - 2)
        raise TraceError(f"{where} holds {shown(wrong)}; experts are whole numbers from 0 up")
    return ids


class _NotPlainError(Exception):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _NotPlainError(f"names {shown(key)} twice; each name may occur once")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> None:
    raise _NotPlainError(f"holds {name}, which JSON does not know; numbers were expected")
