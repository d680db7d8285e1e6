"""Routing traces: what was chosen, guessed, active and missed for every token; one file, one frame, one recorder."""

from nemolab.trace.file import check_target, is_trace, read_trace, write_trace
from nemolab.trace.open import open_trace
from nemolab.trace.recorder import Recorder, Routers, count_guesses
from nemolab.trace.trace import DECODE, GUESSES, PHASES, PREFILL, Trace, TraceMeta

__all__ = [
    "DECODE",
    "GUESSES",
    "PHASES",
    "PREFILL",
    "Recorder",
    "Routers",
    "Trace",
    "TraceMeta",
    "check_target",
    "count_guesses",
    "is_trace",
    "open_trace",
    "read_trace",
    "write_trace",
]
