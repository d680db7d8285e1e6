"""What all verbs share: `--json`, `--debug`, the answer they hand back and how it is shown."""

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import click

from nemolab.errors import NemolabError, UsageError


@dataclass(frozen=True)
class Answer:
    """What a verb found out.

    data     the JSON document of `--json`
    text     the same for people
    problem  one line when a check failed: the answer is still shown, then the exit code is 1
    """

    data: dict[str, Any]
    text: str = ""
    problem: str = ""


@dataclass
class Settings:
    """What the options shared by all verbs say, and when the command began."""

    as_json: bool = False
    debug: bool = False
    began: datetime = field(default_factory=lambda: datetime.now(UTC))


class FailedCheck(NemolabError):
    """A check that ran and said no."""


def verb(name: str) -> Callable[[Callable[..., Answer]], click.Command]:
    """Make a command of a function that returns an `Answer`; adds `--json` and `--debug`."""

    def register(function: Callable[..., Answer]) -> click.Command:
        @functools.wraps(function)
        def show(*args, **kwargs):
            as_json = settings().as_json
            # Whatever a library prints while we work must not mix with the one JSON document on stdout.
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                answer = function(*args, **kwargs)
            if as_json:
                click.echo(to_json(answer.data))
            elif answer.text:
                click.echo(answer.text)
            if answer.problem:
                raise FailedCheck(answer.problem)

        return click.command(name)(shared_options(show))

    return register


def settings() -> Settings:
    """The settings of the running command."""
    return click.get_current_context().find_object(Settings)


def shared_options(function: Callable) -> Callable:
    """`--json` and `--debug`: the same words before and after the verb."""
    for flag, attribute, text in (
        ("--debug", "debug", "Show the traceback when something fails."),
        ("--json", "as_json", "Print one JSON document on stdout, and nothing else there."),
    ):
        function = click.option(
            flag, is_flag=True, expose_value=False, is_eager=True, help=text, callback=_remember(attribute)
        )(function)
    return function


def _remember(attribute: str) -> Callable:
    def callback(context, parameter, value):
        if value:
            setattr(context.find_object(Settings), attribute, True)

    return callback


def checkpoint_argument(function: Callable) -> Callable:
    """PATH, a checkpoint folder: optional, by default `NEMOLAB_MODEL` or the shipped `data/tiny`."""

    def resolve(context, parameter, value):
        from nemolab import paths

        return None if context.resilient_parsing else paths.model_folder(value)

    return click.argument("path", required=False, metavar="[PATH]", type=PathName(), callback=resolve)(function)


def share_cores() -> None:
    """Let torch's idle threads sleep. Call before torch is imported; the benchmarks keep torch as it comes.

    By default they spin until their next piece of work, which beside other programs made a comparison seven times
    slower (285 to 415 s against 40 to 55 s on two busy cores).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def to_json(document: Any) -> str:
    """Strict JSON: infinities and NaN become null, numpy numbers and paths become what they stand for."""
    unicode_out = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    return json.dumps(_plain(document), ensure_ascii=not unicode_out, allow_nan=False, indent=2)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        # A lone surrogate (a file name that is no UTF-8) cannot be written as UTF-8.
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # numpy and torch scalars and arrays
        return _plain(value.tolist())
    return _plain(str(value))


class PathName(click.ParamType):
    """A file or folder, `~` expanded. Refuses an empty word: an unset shell variable, not the current folder."""

    name = "path"

    def convert(self, value, parameter, context):
        from nemolab import paths

        try:
            return paths.expand(value)
        except UsageError as error:
            self.fail(str(error), parameter, context)


store_option = click.option(
    "--store",
    type=PathName(),
    default=None,
    metavar="STORE",
    help="Use this store; else one is made in the cache folder.",
)


def engine_path(path: Any, store: Any) -> Any:
    """PATH as the engine takes it: None where a store was named and a checkpoint was not."""
    from click.core import ParameterSource

    named = click.get_current_context().get_parameter_source("path") is ParameterSource.COMMANDLINE
    # The store says which model it is; a default checkpoint would only contradict it.
    return None if store and not named else path


class FiniteRange(click.FloatRange):
    """A number within bounds. NaN passes click's own comparison, infinity its open end."""

    def convert(self, value, parameter, context):
        number = super().convert(value, parameter, context)
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a finite number.", parameter, context)


def sampling_options(function: Callable) -> Callable:
    """--temperature, --top-p, --seed."""
    for option in (
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the sampling."),
        click.option("--top-p", type=FiniteRange(0, 1, min_open=True), default=1.0, show_default=True),
        click.option("--temperature", type=FiniteRange(min=0), default=0.0, show_default=True, help="0 is greedy."),
    ):
        function = option(function)
    return function


def table(headers: list[str], rows: list[list[Any]]) -> str:
    """A plain text table: numbers to the right, words to the left.

    >>> print(table(["part", "bytes"], [["routed", 12], ["norm", 7]]))
    part    bytes
    routed     12
    norm        7
    """
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(header), *(len(row[i]) for row in cells), 0) for i, header in enumerate(headers)]
    right = [all(_is_number(row[i]) for row in rows) and bool(rows) for i in range(len(headers))]
    lines = [headers, *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
