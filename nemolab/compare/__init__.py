"""The engine against transformers in float32, with controls that must fail. Importing this imports torch."""

from nemolab.compare.comparison import KL_BOUND, Comparison, compare
from nemolab.compare.reference import Reference

__all__ = ["KL_BOUND", "Comparison", "Reference", "compare"]
