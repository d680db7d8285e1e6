"""The dense weights: kept in memory in the checkpoint's own formats, decoded a matrix (or a piece of one) at a time.

Nothing here ever holds a float32 copy of the model. One-token steps multiply straight from the stored bytes
(`nemolab.kernels.matvec`); prompts decode a matrix, use it and drop it; a matrix larger than `PIECE_BYTES` in float32
(the head of a large model) is decoded and used in pieces of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

from nemolab.errors import EngineError
from nemolab.kernels.decode_nvfp4 import decode_rows
from nemolab.kernels.matvec import FORMATS, PLAIN, Packed, matvec, pack
from nemolab.kernels.team import Team

PIECE_BYTES = 64 * 2**20  # float32 bytes of a matrix decoded at once


@dataclass(frozen=True)
class Matrix:
    """A linear map [rows, columns] as the checkpoint stores it.

    format  "bf16", "f16", "f32", "fp8" or "nvfp4"
    weight  the stored tensor: [rows, columns], or packed uint8 [rows, columns / 2]
    scales  NVFP4 block scales as bytes, uint8 [rows, columns / 16]; else None
    scale   FP8's weight_scale or NVFP4's weight_scale_2; else 1.0
    bias    float32 [rows] or None
    """

    name: str
    team: Team
    format: str
    rows: int
    columns: int
    weight: torch.Tensor
    scales: torch.Tensor | None = None
    scale: float = 1.0
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        tensors = [t for t in (self.weight, self.scales, self.bias) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def decoded(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows start..stop in float32, [stop - start, columns]."""
        weight = self.weight[start:stop]
        if self.format == "nvfp4":
            return decode_rows(self.team, weight, self.scales[start:stop], self.scale)
        if self.format == "fp8":
            return weight.float().mul_(self.scale)
        return weight.float()

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids in float32, [ids, columns]: an embedding table."""
        if self.format == "nvfp4":
            return decode_rows(self.team, self.weight[ids], self.scales[ids], self.scale)
        picked = (
            self.weight.view(torch.uint8)[ids].view(self.weight.dtype) if self.format == "fp8" else self.weight[ids]
        )
        return picked.float() * self.scale if self.format == "fp8" else picked.float()

    def row(self, number: int) -> torch.Tensor:
        """One row in float32, [columns], of its own: a token's embedding.

        No matter of `take`: for a tensor of row numbers torch wakes all its threads as soon as rows have 3,000 columns,
        and they then spin for milliseconds, at every token.
        """
        return self.decoded(number, number + 1)[0].clone()

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, columns] float32 -> [tokens, rows] float32, for prompts."""
        step = max(1, PIECE_BYTES // (4 * self.columns))
        if self.rows <= step:
            return F.linear(x, self.decoded(), self.bias)
        out = torch.empty(x.shape[0], self.rows)
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            bias = None if self.bias is None else self.bias[start:stop]
            out[:, start:stop] = F.linear(x, self.decoded(start, stop), bias)
        return out

    def in_float32(self) -> Matrix:
        """The same matrix, kept decoded: for the few that are small and decide much."""
        return Matrix(self.name, self.team, "f32", self.rows, self.columns, self.decoded().contiguous(), bias=self.bias)

    @cached_property
    def packed(self) -> Packed:
        """The same bytes as the step kernels take them: no copy."""
        return pack(self.format, self.rows, self.columns, self.weight, self.scales, self.scale, self.bias)

    def multiply(self, x: np.ndarray, y: np.ndarray, mode: int = PLAIN) -> None:
        """One token, straight from the stored bytes: x [columns] into y [rows] as `mode` says (see kernels.matvec)."""
        matvec(self.team, self.packed, x, y, mode)


class DenseWeights:
    """Reads what is not routed out of a store, by canonical names, and says clearly what is missing."""

    def __init__(self, store, team: Team):
        self._store, self._team = store, team
        self.nbytes = 0

    def has_module(self, name: str) -> bool:
        return name in self._store.dense

    def matrix(self, name: str, rows: int | None = None, columns: int | None = None) -> Matrix:
        """The linear module `name`. Raises EngineError when its shape is not the one the config implies."""
        format, tensors, shape = self._store.dense_module(name)
        if format not in FORMATS:
            raise EngineError(f"{name}: format {format!r}; the engine multiplies {', '.join(FORMATS)}")
        wanted = (rows or shape[0], columns or shape[1])
        if len(shape) != 2 or tuple(shape) != wanted:
            raise EngineError(f"{name}: shape {list(shape)}, but config.json implies {list(wanted)}")
        scales, scale = None, 1.0
        if format == "nvfp4":
            scales = tensors["weight_scale"].view(torch.uint8)
            scale = _scalar(tensors["weight_scale_2"])
            _refuse_nan(f"{name}.weight_scale", scales)
        elif format == "fp8":
            scale = _scalar(tensors["weight_scale"])
            _refuse_nan(f"{name}.weight", tensors["weight"].view(torch.uint8))
        bias = tensors["bias"].float().contiguous() if "bias" in tensors else None
        made = Matrix(name, self._team, format, *wanted, tensors["weight"].contiguous(), scales, scale, bias)
        self.nbytes += made.nbytes
        return made

    def vector(self, name: str, length: int) -> torch.Tensor:
        """A small tensor (norm weight, A_log, bias ...) as float32 [length]."""
        return self.tensor(name, (length,))

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A small tensor in float32, contiguous. Raises EngineError when its shape is another one."""
        found = self._store.dense_tensor(name)
        if tuple(found.shape) != shape:
            raise EngineError(f"{name}: shape {list(found.shape)}, but config.json implies {list(shape)}")
        made = found.float().contiguous()
        self.nbytes += made.numel() * 4
        return made


def _refuse_nan(name: str, codes: torch.Tensor) -> None:
    """E4M3 NaN decodes to something else in some kernels, so it must not come in."""
    for piece in codes.flatten().split(2**24):
        if ((piece & 0x7F) == 0x7F).any():
            raise EngineError(f"{name} holds NaN (E4M3 0x7F or 0xFF): the checkpoint is damaged")


def _scalar(tensor: torch.Tensor) -> float:
    return float(tensor.float().reshape(()))
