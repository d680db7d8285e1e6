"""Measurement rows, the machine they were taken on, and honest comparisons."""

from nemolab.measure.machine import machine, one_line, same_card, same_machine, versions
from nemolab.measure.rows import latest, latest_run, make_row, read_rows, record, record_run, runs_with
from nemolab.measure.versus import Versus, versus

__all__ = [
    "Versus",
    "latest",
    "latest_run",
    "machine",
    "make_row",
    "one_line",
    "read_rows",
    "record",
    "record_run",
    "runs_with",
    "same_card",
    "same_machine",
    "versions",
    "versus",
]
