"""Figures in one style: colour-blind safe, units on the axes, bars from zero, ready for a slide.

style       colours, axes, limits
sizes       bytes of a model, a token, a block
agreement   engine and reference
routing     what a trace of choices is like
cache       hits and reads, size by size
prefetch    reads ahead, guess by guess
curve       the whole LRU curve, policies beside it
skipping    active neurons, and what leaving out the others saves

Every function takes the numbers it draws, returns the Figure and reads nothing from disk.
"""

from nemolab.plots.agreement import plot_agreement
from nemolab.plots.cache import plot_cache
from nemolab.plots.curve import plot_curve
from nemolab.plots.prefetch import plot_prefetch
from nemolab.plots.routing import plot_routing
from nemolab.plots.sizes import plot_blocks, plot_bytes_per_token, plot_families, plot_parts
from nemolab.plots.skipping import plot_skipping
from nemolab.plots.style import COLOURS, ceiling, use_style

__all__ = [
    "COLOURS",
    "ceiling",
    "plot_agreement",
    "plot_blocks",
    "plot_bytes_per_token",
    "plot_cache",
    "plot_curve",
    "plot_families",
    "plot_parts",
    "plot_prefetch",
    "plot_routing",
    "plot_skipping",
    "use_style",
]
