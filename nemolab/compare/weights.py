"""The reference's weights: the vendor's bytes, decoded by transformers' own helper, every tensor accounted for.

transformers cannot load a ModelOpt checkpoint itself (it skips the unknown scheme, and would cast FP8 weights without
their scale), so this module decodes first and loads strictly. It shares nothing with `nemolab.checkpoint.formats`: an
error in our own decoding must not reach both sides of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from nemolab.errors import CheckpointError

if TYPE_CHECKING:
    from nemolab.checkpoint import Checkpoint

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
}
PLAIN = ("F64", "F32", "F16", "BF16")
# Scales of activations and of the KV cache: weight-only arithmetic does not use them.
UNUSED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale")
# transformers' helper makes int64 indices, eight times the packed bytes: large matrices are decoded in row pieces.
VALUES_AT_ONCE = 1 << 22


class SourceWeights:
    """Float32 tensors of a checkpoint by canonical name, and a ledger of what was used.

    checkpoint  only `tensors` (names, dtypes, shapes) and `read_bytes` are used
    """

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._used: set[str] = set()
        self._under: dict[str, list[str]] = {}
        for name in checkpoint.tensors:
            self._under.setdefault(block_of(name), []).append(name)

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def under(self, block: str) -> list[str]:
        """Names of the tensors of one block ("backbone.layers.7") or of what lies outside the layers ("lm_head")."""
        return self._under.get(block, [])

    def claim(self, name: str) -> None:
        """Note that `name` and the scales its dtype needs are used. Raises CheckpointError naming what is missing."""
        tensors = self._checkpoint.tensors
        if name not in tensors:
            raise CheckpointError(f"{self._checkpoint.path}: tensor {name} is missing; the reference needs it")
        self._used.add(name)
        dtype = tensors[name].dtype
        if dtype in PLAIN:
            return
        for suffix in {"F8_E4M3": ("_scale",), "U8": ("_scale", "_scale_2")}.get(dtype, ()):
            if name + suffix not in tensors:
                raise CheckpointError(
                    f"{self._checkpoint.path}: {name} is {dtype} but {name + suffix} is missing;"
                    " without its scale the weight means nothing"
                )
            self._used.add(name + suffix)
        if dtype not in ("F8_E4M3", "U8"):
            raise CheckpointError(
                f"{self._checkpoint.path}: {name} is {dtype}; a weight is one of {PLAIN}, F8_E4M3, U8"
            )

    def check_all_claimed(self, names: Iterable[str], where: str) -> None:
        """Raise CheckpointError when the checkpoint holds tensors here that nothing claimed."""
        tensors = self._checkpoint.tensors  # an empty tensor means nothing, so it is nothing to account for
        extra = [name for name in names if name not in self._used and tensors[name].nbytes]
        extra = sorted(name for name in extra if not name.endswith(UNUSED_SUFFIXES))
        if extra:
            shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            raise CheckpointError(
                f"{self._checkpoint.path}: {where} holds {len(extra)} tensor(s) the reference has no place for: {shown}"
            )

    def unused(self) -> list[str]:
        """Tensors that no part of the language model uses: MTP, vision, and scales of activations and the KV cache."""
        return sorted(name for name in self._checkpoint.tensors if name not in self._used)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, decoded to float32 in its logical shape."""
        self.claim(name)
        entry = self._checkpoint.tensors[name]
        stored = self._stored(name)
        if entry.dtype in PLAIN:
            return stored.float()
        scale = self._stored(name + "_scale").float()
        if entry.dtype == "F8_E4M3":
            if scale.numel() not in (1, stored.shape[0]):
                raise CheckpointError(
                    f"{self._checkpoint.path}: {name}_scale has shape {tuple(scale.shape)};"
                    f" an FP8 weight {tuple(stored.shape)} has one scale, or one a row"
                )
            return decode(stored, scale.reshape(-1, 1))
        global_scale = self._stored(name + "_scale_2").float()
        columns = 2 * stored.shape[-1]
        if global_scale.numel() != 1 or scale.shape != (stored.shape[0], columns // 16):
            raise CheckpointError(
                f"{self._checkpoint.path}: {name} packs [{stored.shape[0]}, {columns}] and needs scales"
                f" [{stored.shape[0]}, {columns // 16}] and one weight_scale_2;"
                f" found {tuple(scale.shape)} and {tuple(global_scale.shape)}"
            )
        return decode(stored.view(torch.int8), scale * global_scale.reshape(()))

    def rows(self, name: str, rows: list[int]) -> torch.Tensor:
        """Chosen rows of a table as float32 [len(rows), columns]: the whole table is never held in float32.

        Raises CheckpointError for a row that the table does not have.
        """
        entry = self._checkpoint.tensors.get(name)
        if entry is not None and rows and not 0 <= min(rows) <= max(rows) < entry.shape[0]:
            raise CheckpointError(
                f"{self._checkpoint.path}: token {max(rows)} was asked of {name}, which has {entry.shape[0]} rows;"
                " the tokenizer belongs to another checkpoint"
            )
        if entry is None or entry.dtype not in PLAIN:
            return self.tensor(name)[rows]
        self.claim(name)
        return self._stored(name)[rows].float()

    def _stored(self, name: str) -> torch.Tensor:
        """The bytes of a tensor under their own dtype and shape."""
        entry = self._checkpoint.tensors[name]
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(
                f"{self._checkpoint.path}: {name} has dtype {entry.dtype}, known are {[*TORCH_DTYPES]}"
            )
        raw = torch.from_numpy(self._checkpoint.read_bytes(name))
        if entry.dtype == "U8":
            return raw.reshape(entry.shape)
        # A view needs its first byte aligned to the item; memory of our own always is.
        return raw.view(TORCH_DTYPES[entry.dtype]).reshape(entry.shape)


def decode(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantised matrix [N, K] (float8, or int8 [N, K/2] holding two FP4 codes a byte) x scale grid -> float32 [N, K].

    scales  float32 [N or 1, K / block]; the grid's shape says how many values share a scale
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    helper = Fp8Dequantize(None)
    rows, width = quantized.shape[0], quantized.shape[1] * (2 if quantized.dtype == torch.int8 else 1)
    decoded = torch.empty(rows, width, dtype=torch.float32)
    step = max(1, VALUES_AT_ONCE // max(width, 1))
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        grid = scales[piece] if len(scales) == rows else scales
        decoded[piece] = helper._dequantize_one(quantized[piece], grid, torch.float32)
    return decoded


class LazyExperts:
    """Stands where transformers holds all experts stacked [experts, out, in]: indexing decodes one, for one use.

    A layer of Nemotron-3-Super would be 10.5 GiB in float32; one matrix of it is 10.5 MiB.
    """

    def __init__(self, weights: SourceWeights, names: list[str], shape: tuple[int, int]):
        self._weights, self._names, self._shape = weights, names, shape
        for name in names:
            weights.claim(name)

    def __getitem__(self, expert: int) -> torch.Tensor:
        matrix = self._weights.tensor(self._names[int(expert)])
        check_shape(self._names[int(expert)], matrix, self._shape)
        return matrix


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}; config.json asks for {tuple(shape)}")


def block_of(name: str) -> str:
    """The block a tensor belongs to: "backbone.layers.7", else its first two parts or its module."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[:2] == ["backbone", "layers"] else ".".join(parts[: min(2, len(parts) - 1)])
