"""Stored bytes as torch tensors: the only place that maps safetensors' dtype names to torch's."""

import numpy as np
import torch

from nemolab.errors import CheckpointError

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def as_torch(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """uint8 [nbytes] -> a tensor of a safetensors dtype and shape, sharing the memory."""
    if dtype not in TORCH_DTYPES:
        raise CheckpointError(f"dtype {dtype} has no torch counterpart here; known are {', '.join(TORCH_DTYPES)}")
    if raw.size == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.from_numpy(raw).view(TORCH_DTYPES[dtype]).reshape(shape)
