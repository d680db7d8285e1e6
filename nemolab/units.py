"""Sizes as people write and read them. GB is 10^9 bytes (traffic), GiB is 2^30 bytes (memory)."""

import re
from dataclasses import dataclass

from nemolab.errors import UsageError

PAGE_BYTES = 4096  # what direct reads are aligned to, and what blocks are whole multiples of

BYTES_PER = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
EXAMPLES = "4GiB, 500MiB, 2GB or 48slots"
SIZES = "8GiB, 500MiB or 2GB"
_LONGEST = 30  # digits of a number; more bytes than anything holds


def whole_pages(nbytes: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class Budget:
    """Room for experts: in bytes or in slots (blocks). Exactly one of the two is set."""

    size_bytes: int | None = None
    slots: int | None = None

    @property
    def gib(self) -> float | None:
        return None if self.size_bytes is None else self.size_bytes / 2**30


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `500MiB`, `2GB` or `1.5 GiB`, as `parse_budget` reads them. Raises UsageError, for slots too."""
    if re.search(r"slots?\s*$", text, re.IGNORECASE):
        raise UsageError(f"{text!r} counts slots; give a size in bytes, such as {SIZES}")
    return parse_budget(text, SIZES).size_bytes


def parse_budget(text: str, examples: str = EXAMPLES) -> Budget:
    """Read `4GiB`, `500MiB`, `2GB`, `1.5 GiB` or `48slots`; the unit is not optional, capitals are.

    Raises UsageError, which names examples, for anything else, zero and bare numbers included: 16 could be GiB, GB or
    slots.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*", text, flags=re.ASCII)
    if not found:
        raise UsageError(f"{text!r} is no size: give a number and a unit, such as {examples}")
    if len(found[1]) > _LONGEST:
        raise UsageError(f"a size of {len(found[1])} digits is beyond any machine; give one such as {examples}")
    number, unit = found[1], found[2].lower()
    if unit in ("slot", "slots"):
        if not number.isdigit() or int(number) == 0:
            raise UsageError(f"{text!r}: slots are counted in whole blocks, from 1 up")
        return Budget(slots=int(number))
    if unit not in BYTES_PER:
        raise UsageError(f"{text!r}: unknown unit {found[2]!r}; give a size such as {examples}")
    size_bytes = int(float(number) * BYTES_PER[unit]) if "." in number else int(number) * BYTES_PER[unit]
    if size_bytes <= 0:
        raise UsageError(f"{text!r} leaves room for nothing; give a size above zero, such as {examples}")
    return Budget(size_bytes=size_bytes)


def show_bytes(count: float) -> str:
    """A byte count in the largest binary unit that keeps it at 1 or more: `2.54 GiB`.

    >>> show_bytes(2724986880)
    '2.54 GiB'
    """
    for unit, step in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= step:
            return f"{count / step:.2f} {unit}"
    return f"{int(count)} B"
