"""Measurement rows, the machine they were taken on, and honest comparisons."""

from nemolab.measure.machine import machine, one_line, versions
from nemolab.measure.rows import latest, make_row, read_rows, record
from nemolab.measure.versus import Versus, versus

__all__ = ["Versus", "latest", "machine", "make_row", "one_line", "read_rows", "record", "versions", "versus"]
