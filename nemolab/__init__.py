"""nemolab: count, repack, run and check mixture-of-experts models larger than the GPU."""

__version__ = "0.1.0"
