"""JSON files of strangers, read carefully: a size limit before reading, no duplicate keys, one readable error."""

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from nemolab.errors import CheckpointError

# The largest honest config.json known is 5.7 MB (a table of 41,100 modules), the largest index 20 MB.
JSON_LIMIT_BYTES = 100_000_000
# A parsed value takes up to 220 bytes, whatever few bytes it took in the file: this many stay below 1 GiB. The largest
# honest file has 160,000 tensors, in a header 7 of what is counted here for each.
MOST_VALUES = 4_000_000
NAME_LIMIT = 1000


def read_json(path: str | Path, limit_bytes: int = JSON_LIMIT_BYTES) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file and what is wrong with it."""
    path = Path(path)
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} {_say_what_it_is(path)}; a JSON file was needed")
        file_bytes = path.stat().st_size
        if file_bytes > limit_bytes:
            raise CheckpointError(f"{path}: {file_bytes:,} bytes of JSON, the limit is {limit_bytes:,}")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_json_object(raw, str(path))


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object; `where` names its origin in errors. Duplicate and unprintable keys are refused."""
    if not raw.strip():
        raise CheckpointError(f"{where} is empty; a JSON object was needed")
    if raw.startswith(BOM_UTF8):
        raise CheckpointError(
            f"{where} begins with a byte order mark; JSON as plain UTF-8 was expected: save it without"
        )
    values = raw.count(b",") + raw.count(b"{") + raw.count(b"[")
    if values > MOST_VALUES:
        raise CheckpointError(f"{where} holds some {values:,} JSON values; the limit is {MOST_VALUES:,}")
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_printable_keys)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise CheckpointError(f"{where} is nested too deeply to be an honest file") from error
    except RefusedJson as error:
        raise CheckpointError(f"{where} {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} holds a JSON {type(parsed).__name__}; an object was needed")
    return parsed


def _say_what_it_is(path: Path) -> str:
    if path.exists():
        return "is not a regular file"
    return "is a link that leads nowhere" if path.is_symlink() else "does not exist"


class RefusedJson(ValueError):
    """What Python's reader takes and we do not. The message goes on after the name of the text."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise RefusedJson(f"names {key[:NAME_LIMIT]!r} twice; each name may occur once")
            seen.add(key)
    return result


def _printable_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, _ in pairs:
        # Names end up in messages and tables: nothing that could steer a terminal, nothing endless.
        if not key.isprintable() or len(key) > NAME_LIMIT:
            raise RefusedJson(f"has a name that is too long or not printable: {key[:40]!r}")
    return _unique_keys(pairs)


def _refuse_constant(name: str) -> None:
    raise RefusedJson(f"holds {name}, which JSON does not know; numbers were expected")


# For JSON of our own making or of traces. (Configs of the vendor's form do hold `Infinity`.)
STRICT_JSON = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
