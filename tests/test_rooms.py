"""Imports go one way: a room, or a file in a row of the README's map, imports from what stands above it, never back."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def read_order(readme: str) -> list[str]:
    """Rooms in the order of the README's map: errors, paths, units, progress, checkpoint, plan ..."""
    table = readme.split("## Where things are")[1].split("\n\n")[1]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [Path(name).stem for name in names if name not in ("notebooks", "data", "tests")]


@cache
def list_imports() -> list[tuple[str, str, str]]:
    """(file, its room, the room it imports from) for every import within the package, those inside functions too."""
    found = []
    for path in [*(ROOT / "nemolab").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        room = parts[0] if parts[0] == "kernels" else parts[1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nemolab":
                inside = node.module.split(".")[1:]
                rooms = inside[:1] or [alias.name for alias in node.names]
                found += [("/".join(parts), room, other) for other in rooms if not other.startswith("__")]
    return found


def find_ways_back(order: list[str]) -> list[str]:
    entry = {"__init__", "__main__"}  # the package itself and its command stand beside the map
    return [
        f"{file} imports {other}"
        for file, room, other in list_imports()
        if room not in entry and room != other and order.index(other) >= order.index(room)
    ]


@pytest.fixture(scope="module")
def order() -> list[str]:
    return read_order((ROOT / "README.md").read_text(encoding="utf-8"))


def test_every_room_stands_in_the_map_once(order):
    rooms = {
        path.stem for path in (ROOT / "nemolab").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert sorted(order) == sorted({*rooms, "kernels"} - {"__init__", "__main__"})


def test_imports_go_one_way(order):
    assert len(list_imports()) > 100
    assert find_ways_back(order) == []


def test_a_way_back_is_found(order):
    swapped = [{"engine": "store", "store": "engine"}.get(room, room) for room in order]
    assert "nemolab/engine/engine imports store" in find_ways_back(swapped)
