"""The dense weights on a card, in the checkpoint's own formats."""

from __future__ import annotations

import torch

from nemolab.engine import weights as host
from nemolab.kernels.matvec import PLAIN, pack

QUANTISED = ("fp8", "nvfp4")


class Matrix:
    """A linear map [rows, columns] on a device, as the checkpoint stores it."""

    def __init__(self, stored: host.Matrix, device: torch.device, operators):
        self.rows, self.columns, self.nbytes, self._operators = stored.rows, stored.columns, stored.nbytes, operators
        tensors = [None if t is None else t.to(device) for t in (stored.weight, stored.scales, stored.bias)]
        self.packed = pack(stored.format, stored.rows, stored.columns, *tensors[:2], stored.scale, tensors[2])

    def multiply(self, x: torch.Tensor, y: torch.Tensor, mode: int = PLAIN) -> None:
        """One token, float32 throughout: x [columns] into y [rows] as `mode` says (see kernels.matvec)."""
        self._operators.matvec(self.packed, x, y, mode)

    def apply(self, x: torch.Tensor, y: torch.Tensor | None = None, mode: int = PLAIN) -> torch.Tensor:
        """Tokens of a prompt: x bfloat16 [tokens, columns] into y float32 [tokens, rows], by default a new one."""
        if y is None:
            y = torch.empty(x.shape[0], self.rows, device=x.device)
        self._operators.linear_prompt(self.packed, x, y, mode)
        return y

    def apply_float32(self, x: torch.Tensor) -> torch.Tensor:
        """As `apply`, nothing rounded, for a small matrix that is not quantised: x float32 [tokens, columns]."""
        return x @ self.packed.keep[0].float().T


class CardWeights:
    """Reads dense weights out of a store onto a device, one at a time: no second copy of the model in RAM."""

    def __init__(self, stored: host.DenseWeights, device: torch.device, operators):
        self.stored, self.device, self.operators = stored, device, operators
        self.nbytes = 0
        self.has_module = stored.has_module

    def matrix(self, name: str, rows: int, columns: int, *, decoded: bool = False) -> Matrix:
        """The linear module `name`, as `DenseWeights.matrix` checks it; decoded: in float32, should it be quantised."""
        stored = self.stored.matrix(name, rows, columns)
        return self.put(stored.in_float32() if decoded and stored.format in QUANTISED else stored)

    def put(self, stored: host.Matrix) -> Matrix:
        """One that was read already."""
        made = Matrix(stored, self.device, self.operators)
        self.nbytes += made.nbytes
        return made

    def vector(self, name: str, length: int) -> torch.Tensor:
        return self.tensor(name, (length,))

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A small tensor as float32."""
        made = self.stored.tensor(name, shape).to(self.device)
        self.nbytes += made.numel() * 4
        return made
