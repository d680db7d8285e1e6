"""A stored matrix times the tokens of a prompt on the card: decoded to BF16 a tile of rows at a time, then torch's own
BF16 multiplication with float32 sums.

    y [tokens, rows] float32 (+)= act(scale * x W^T + bias)     x [tokens, columns] bfloat16

Decoding is exact (see `decode_bf16`) and the matrix's scale is the multiplication's factor, so that all that is lost
against float32 is the rounding of x. Reads the stored bytes once, writes and reads PIECE_BYTES of BF16 at a time, which
stay in one buffer. BF16 matrices go as they are; F16 and F32 ones (as a rule small, and they decide much) in float32,
PIECE_BYTES of it at a time.
"""

from __future__ import annotations

import torch

from nemolab.errors import EngineError
from nemolab.kernels.gpu.decode_bf16 import decode_bf16
from nemolab.kernels.matvec import ADD, BF16, F16, F32, NVFP4, PLAIN, RELU2, Packed, matvec_torch

PIECE_BYTES = 32 * 2**20  # of a tile: rows decoded at once, in BF16 or float32


def linear_prompt_torch(packed: Packed, x: torch.Tensor, y: torch.Tensor | None = None, mode: int = PLAIN):
    """The plain twin: the one-token product's, token by token."""
    columns = [matvec_torch(packed, row.float(), None if y is None else y[t], mode) for t, row in enumerate(x)]
    return torch.stack(columns)


def linear_prompt(
    packed: Packed,
    x: torch.Tensor,
    y: torch.Tensor,
    mode: int = PLAIN,
    rows: tuple[int, int] | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """y = x W^T (PLAIN), y += x W^T (ADD) or y = relu(x W^T)^2 (RELU2); see the file's contract.

    rows  first and last + 1 of those rows of the matrix that are multiplied (None: all): y has as many columns
    Raises EngineError for other sizes, types or devices.
    """
    code, columns = int(packed.table[0]), packed.columns
    first, last = rows or (0, packed.rows)
    weight, scales, bias = packed.keep
    fits = x.dtype == torch.bfloat16 and y.dtype == torch.float32 and y.is_contiguous()
    fits = fits and 0 <= first < last <= packed.rows
    if tuple(x.shape) != (x.shape[0], columns) or tuple(y.shape) != (x.shape[0], last - first) or not fits:
        raise EngineError(
            f"rows {first} to {last} of a matrix [{packed.rows}, {columns}] on {x.dtype} {list(x.shape)} into "
            f"{y.dtype} {list(y.shape)}; needed are bfloat16 [tokens, {columns}] and contiguous float32 [tokens, "
            f"{last - first}]"
        )
    if not x.device == y.device == weight.device:
        raise EngineError(f"a matrix on {weight.device}, its input on {x.device}, its output on {y.device}")
    in_float32 = code in (F16, F32)
    step = last - first if code == BF16 else max(1, piece_bytes // ((4 if in_float32 else 2) * columns))
    inputs = x.float() if in_float32 else x
    buffer = None if in_float32 or code == BF16 else torch.empty(
        min(step, last - first) * columns, dtype=torch.bfloat16, device=x.device
    )  # fmt: skip
    for start in range(first, last, step):
        stop = min(start + step, last)
        tile = y[:, start - first : stop - first]
        if in_float32:
            product = inputs @ weight[start:stop].float().T
            tile.add_(product) if mode == ADD else tile.copy_(product)
        else:
            decoded = weight[start:stop]
            if code != BF16:
                decoded = buffer[: (stop - start) * columns].view(stop - start, columns)
                decode_bf16(weight[start:stop], scales[start:stop] if code == NVFP4 else None, decoded)
            _multiply(x, decoded, float(packed.scale), tile, mode == ADD)
    if bias is not None:
        y += bias[first:last]
    if mode == RELU2:
        # Where y is negative the product is exactly zero; NaN stays.
        y.clamp_(min=0).square_()


def _multiply(x: torch.Tensor, weight: torch.Tensor, scale: float, y: torch.Tensor, add: bool) -> None:
    """y = scale * x weight^T, or y += it: BF16 in, float32 sums and float32 out."""
    factors = {"beta": 1.0 if add else 0.0, "alpha": scale, "out": y}
    if x.device.type == "cuda":
        torch.addmm(y, x, weight.T, out_dtype=torch.float32, **factors)
    else:  # torch's CPU has no such mixture of types; products of BF16 are exact in float32
        torch.addmm(y, x.float(), weight.float().T, **factors)
