"""RMS norm of one token: y = x / sqrt(mean(x^2) + eps) * weight. Reads x twice and the weight once.

The mean's sum: four running sums of eight lanes, added in a fixed order; a rest of fewer than 8 comes last.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from nemolab.jit import jit
from nemolab.kernels import simd
from nemolab.kernels.matvec import dot_f32


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The plain twin, over the last axis: prompts run it, x [tokens, n]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@jit
def inverse_rms(x_at, count, eps):
    """1 / sqrt(mean(x^2) + eps) of `count` float32 at an address."""
    return np.float32(1) / np.float32(math.sqrt(dot_f32(x_at, x_at, count) / np.float32(count) + eps))


@jit
def _rms_norm_kernel(x, weight, eps, y):
    factor = inverse_rms(simd.address_of(x), x.shape[0], eps)
    for i in range(x.shape[0]):
        y[i] = x[i] * factor * weight[i]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: np.float32, y: np.ndarray) -> None:
    """x, weight, y float32 [n]; eps a float32."""
    _rms_norm_kernel(x, weight, eps, y)
