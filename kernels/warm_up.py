"""Compile (or load from the cache on disk) every kernel before it is needed, so that no answer waits for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from nemolab.kernels import attention_step, decode_nvfp4, expert_prompt, expert_step, mamba_step, matvec, rms_norm
from nemolab.kernels import router_step as router
from nemolab.kernels.router_many import router_many
from nemolab.kernels.simd import array_address
from nemolab.kernels.team import Team

_done = False


def warm_up(announce: Callable[[str], None]) -> None:
    """Run every operator once on tiny inputs. The first time on a machine this compiles, which is said."""
    global _done
    if _done:
        return
    if not matvec.kernel_is_cached():
        announce("compiling the kernels for this machine: some 20 s, once")
    with Team(1) as team:
        _run_all(team)
    _done = True


def _run_all(team: Team) -> None:
    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, np.float32)

    eps = np.float32(1e-5)
    matrix = matvec.pack("f32", 16, 16, torch.ones(16, 16))
    matvec.matvec(team, matrix, ones(16), ones(16))
    decode_nvfp4.decode_rows(team, torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), 1.0)
    rms_norm.rms_norm(ones(16), ones(16), eps, ones(16))
    experts, weights = router.RouterStep(2, 1, 1, 1, True, 1.0).run(ones(2), ones(2))
    router_many(team, matrix, ones(16), ones(1, 16), 1)
    mamba = mamba_step.MambaStep(ones(24, 4), *(ones(n) for n in (24, 1, 1, 1)), (0.0, 1.0), ones(8), 1, 1e-5)
    mamba.run(team, ones(33), ones(24, 3), ones(1, 8, 8), ones(8))
    attention_step.attention_step(team, ones(8), ones(1, 8), ones(1, 8), 1, 8, ones(1, 1), ones(8))
    step = expert_step.ExpertStep(16, 16, 1, "neuron")
    block = np.zeros(step.payload_bytes, np.uint8)
    addresses = np.array([array_address(block)])
    step.run(team, addresses, block.nbytes, ones(1, 2), weights, ones(16), ones(16))
    pairs, starts = np.zeros(1, np.int64), np.array([0, 1])
    expert_prompt.expert_prompt(team, addresses, "neuron", 16, ones(1, 2), starts, pairs, 1, ones(1, 16), ones(1, 16))
