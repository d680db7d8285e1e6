"""Where a model runs and what it may take, as every verb spells it: --device, --transfer, --vram, --ram-cache.

Words that are off on any machine are refused here, before anything is opened. Whether this machine has such a card is
for whoever opens it to find. Nothing heavy is imported: words of help are wanted at once.
"""

import re
import reprlib
from collections.abc import Callable
from typing import Any

import click

from nemolab.errors import UsageError
from nemolab.units import Budget, parse_budget, parse_size

CPU, TWIN = "cpu", "twin"
TRANSFERS = ("pull", "rows", "grouped", "whole")  # those of nemolab.engine.transfers, the default first
EVERY = "all"


class DeviceName(click.ParamType):
    """`cpu`, `cuda`, `cuda:1` and so on; and `twin`, which shows on the CPU that what runs on a card works."""

    name = "device"

    def convert(self, value, parameter, context):
        if value not in (CPU, TWIN) and not re.fullmatch(r"cuda(:\d{1,9})?", value, re.ASCII):
            self.fail(f"{reprlib.repr(value)} is no device; cpu, cuda, cuda:1 and so on are.", parameter, context)
        return value


def device_option(default: str = CPU) -> Callable:
    """--device. default: "cuda" for what only a card does."""
    metavar = "cpu|cuda" if default == CPU else "cuda"
    words = "cuda:1 is a second card."
    return click.option("--device", type=DeviceName(), default=default, show_default=True, metavar=metavar, help=words)


def transfer_option(default: str | None = None, every: bool = False) -> Callable:
    """--transfer. default: None where a model may run on the CPU, too; every: `all` asks for each in turn."""
    ways = click.Choice([*TRANSFERS, EVERY] if every else TRANSFERS)
    words = "How experts reach a card." + ("" if default else f" [default: {TRANSFERS[0]}]")
    return click.option("--transfer", type=ways, default=default, show_default=True, help=words)


def vram_option(default: str | None = None) -> Callable:
    """--vram: what may be taken of a card's memory, as GiB; without a default, None."""
    words = "Of a card's memory, such as 8GiB." + ("" if default else " Default: all.")
    read = _read_as(lambda value: parse_size(value) / 2**30)
    return click.option("--vram", callback=read, default=default, show_default=True, metavar="SIZE", help=words)


def device_options(function: Callable) -> Callable:
    """--device, --transfer, --vram of a verb that opens an engine; hand them to `place`."""
    for option in (vram_option(), transfer_option(), device_option()):
        function = option(function)
    return function


def ram_cache_option(function: Callable) -> Callable:
    """--ram-cache, as a Budget or None; hand it to `cache_size`."""
    words = "RAM for experts: 4GiB, 500MiB, 2GB or 48slots (blocks). Default: the engine's choice."
    return click.option("--ram-cache", callback=_read_as(parse_budget), metavar="SIZE|Nslots", help=words)(function)


def place(device: str, transfer: str | None = None, vram: float | None = None) -> dict[str, Any]:
    """The three as `Engine` takes them. Raises UsageError for what is for cards where none was named."""
    refuse_on_cpu(device, transfer=transfer, vram=vram)
    return {"device": device, "transfer": transfer, "vram_gib": vram}


def cache_size(ram_cache: Budget | None) -> dict[str, Any]:
    """--ram-cache as `Engine` takes it."""
    budget = ram_cache or Budget()
    return {"ram_cache_gib": budget.gib, "ram_cache_slots": budget.slots}


def refuse_on_cpu(device: str, **given: Any) -> None:
    """Raise UsageError for options that were given (not None, not empty) and mean nothing without a card."""
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value not in (None, ())]
    if device == CPU and names:
        raise UsageError(f"{', '.join(names)}: for an engine on a card; add --device cuda")


def refuse_rows_of_twins(record: bool, device: str) -> None:
    """Rows measured with `--device twin` would stand among those of cards. Raises UsageError."""
    if record and device == TWIN:
        raise UsageError("--record with --device twin: twins on the CPU show that it works, and are no card")


def _read_as(read: Callable[[str], Any]) -> Callable:
    """A callback that reads a size and names its option where there is none."""

    def callback(context, parameter, value):
        try:
            return None if value is None else read(value)
        except UsageError as error:
            raise UsageError(f"{parameter.opts[0]}: {error}") from None

    return callback
