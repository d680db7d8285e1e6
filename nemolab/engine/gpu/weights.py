"""The dense weights on a card, in the checkpoint's own formats, side by side in one allocation.

torch rounds what it allocates of a card's memory up by as much as 2 MiB, and a large model has hundreds of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from nemolab.engine import weights as host
from nemolab.errors import EngineError
from nemolab.kernels.matvec import PLAIN, pack

QUANTISED = ("fp8", "nvfp4")
ALIGNMENT_BYTES = 512  # as torch's own allocations
SMALL_BYTES = 2**20  # torch keeps what is smaller side by side by itself
_STORED_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "fp8": 1}  # of a weight


def list_tensors(dense: Mapping) -> Iterator[int]:
    """Bytes of each tensor that dense modules have on a card, by what a store says of them, in no particular order.

    Matrices are there as stored, their biases, quantised routers and all other tensors in float32; the embeddings only
    where no head of its own is stored.
    """
    for name, module in dense.items():
        if name == "backbone.embeddings" and "lm_head" in dense:
            continue
        count = math.prod(module.shape)
        if len(module.shape) != 2 or (name.endswith(".mixer.gate") and module.format in QUANTISED):
            yield 4 * count
        elif module.format == "nvfp4":
            yield from (count // 2, count // 16)
        else:
            yield _STORED_BYTES[module.format] * count
        if "bias" in module.tensors:
            yield 4 * module.shape[0]


def room_bytes(dense: Mapping) -> int:
    """Of the one allocation that holds those of them that are not small."""
    return sum(_aligned(nbytes) for nbytes in list_tensors(dense) if nbytes >= SMALL_BYTES)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Room:
    """Memory of a device that tensors are put into, one behind the other."""

    def __init__(self, nbytes: int, device: torch.device):
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, in an allocation of its own where it is small. Raises EngineError where it is full."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < SMALL_BYTES:
            return tensor.to(self._memory.device, copy=True)
        begin, end = self._used, self._used + nbytes
        if end > self._memory.numel():
            raise EngineError(
                f"dense weights take more of the card's memory than the {self._memory.numel():,} bytes that were "
                f"counted for them: {self._used:,} are used, and {nbytes:,} more are needed. The store's list of dense "
                "modules does not say what is in it: make it anew with nemolab repack"
            )
        self._used = _aligned(end)
        return self._memory[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class Matrix:
    """A linear map [rows, columns] on a device, as the checkpoint stores it."""

    def __init__(self, stored: host.Matrix, room: _Room, operators):
        self.rows, self.columns, self.nbytes, self._operators = stored.rows, stored.columns, stored.nbytes, operators
        tensors = [None if t is None else room.put(t) for t in (stored.weight, stored.scales, stored.bias)]
        self.packed = pack(stored.format, stored.rows, stored.columns, *tensors[:2], stored.scale, tensors[2])

    def multiply(self, x: torch.Tensor, y: torch.Tensor, mode: int = PLAIN) -> None:
        """One token, float32 throughout: x [columns] into y [rows] as `mode` says (see kernels.matvec)."""
        self._operators.matvec(self.packed, x, y, mode)

    def apply(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        mode: int = PLAIN,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Tokens of a prompt: x bfloat16 [tokens, columns] into y float32 [tokens, rows], by default a new one.

        rows  only these rows of the matrix, first and last + 1: y has as many columns
        """
        if y is None:
            first, last = rows or (0, self.rows)
            y = torch.empty(x.shape[0], last - first, device=x.device)
        self._operators.linear_prompt(self.packed, x, y, mode, rows)
        return y

    def apply_float32(self, x: torch.Tensor) -> torch.Tensor:
        """As `apply`, nothing rounded, for a small matrix that is not quantised: x float32 [tokens, columns]."""
        return x @ self.packed.keep[0].float().T


class CardWeights:
    """Reads dense weights out of a store onto a device, one at a time: no second copy of the model in RAM.

    room_bytes    of all of them together, allocated at once
    piece_tokens  of a prompt that layers project at once: their outputs are the widest activations of a model
    """

    def __init__(self, stored: host.DenseWeights, room_bytes: int, piece_tokens: int, device: torch.device, operators):
        self.stored, self.device, self.operators, self.piece_tokens = stored, device, operators, piece_tokens
        self._room = _Room(room_bytes, device)
        self.nbytes = 0
        self.has_module = stored.has_module

    def matrix(self, name: str, rows: int, columns: int, *, decoded: bool = False) -> Matrix:
        """The linear module `name`, as `DenseWeights.matrix` checks it; decoded: in float32, should it be quantised."""
        stored = self.stored.matrix(name, rows, columns)
        return self.put(stored.in_float32() if decoded and stored.format in QUANTISED else stored)

    def put(self, stored: host.Matrix) -> Matrix:
        """One that was read already."""
        made = Matrix(stored, self._room, self.operators)
        self.nbytes += made.nbytes
        return made

    def vector(self, name: str, length: int) -> torch.Tensor:
        return self.tensor(name, (length,))

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A small tensor as float32."""
        made = self.stored.tensor(name, shape).to(self.device)
        self.nbytes += made.numel() * 4
        return made
