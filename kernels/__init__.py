"""Operators, one a file, imported only as `nemolab.kernels.<operator>`."""
