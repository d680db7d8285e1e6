"""How fast this machine reads memory: the floor under every kernel whose weights come from there.

Reads a buffer once, adding it up in lanes (so that the reads cannot be left out), a part for each thread of the team.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from nemolab.jit import jit
from nemolab.kernels import simd
from nemolab.kernels.team import Team


def read_memory_torch(buffer: torch.Tensor) -> torch.Tensor:
    """The plain twin: the sum of a float32 buffer."""
    return buffer.sum()


@jit
def _read_kernel(part, parts, buffer, sums):
    blocks = buffer.shape[0] // 32
    at = simd.address_of(buffer)
    a, b, c, d = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
    for block in range(blocks * part // parts, blocks * (part + 1) // parts):
        start = at + 128 * block
        a = simd.add(a, simd.load_f32(start))
        b = simd.add(b, simd.load_f32(start + 32))
        c = simd.add(c, simd.load_f32(start + 64))
        d = simd.add(d, simd.load_f32(start + 96))
    sums[part] = simd.total(simd.add(simd.add(a, b), simd.add(c, d)))


def read_memory(team: Team, buffer: np.ndarray) -> float:
    """The sum of a float32 buffer whose length is a multiple of 32, read once by all threads of the team."""
    sums = np.zeros(team.threads, np.float32)
    team.run(_read_kernel, buffer.nbytes, buffer, sums)
    return float(sums.sum())


def measure_read_gb_s(team: Team, buffer_bytes: int = 2**29, repeats: int = 5) -> list[float]:
    """Read bandwidth in GB/s (10^9), one sample a repeat; the buffer must be well above the last cache's size."""
    buffer = np.ones(buffer_bytes // 128 * 32, np.float32)
    read_memory(team, buffer)
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        read_memory(team, buffer)
        samples.append(buffer.nbytes / (time.perf_counter() - started) / 1e9)
    return samples
