"""Launching a compiled kernel without Triton's own launcher, which checks every argument at every call.

A decode step launches two kernels for each of 40 layers, always the same ones on the same buffers: what Triton checks
and looks up each time is done once, and after that the driver is called with a prepared list of arguments.
"""

from __future__ import annotations

import ctypes
import re

import torch

from nemolab.errors import EngineError


def check_tensor(
    whose: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raises EngineError, by the tensor's name, unless it is contiguous, of this type and shape, and on this device."""
    fits = tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == device
    if tuple(tensor.shape) != shape or not fits:
        raise EngineError(
            f"{whose} {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; contiguous {dtype} "
            f"{list(shape)} on {device} is needed"
        )


class Prepared:
    """One kernel with its constants, compiled at the first call, launched by the driver from then on.

    kernel     a `triton.jit` function; constants  its constexpr arguments; options  num_warps, num_stages, ...
    Later calls must have tensors where the first had tensors, on the same device and aligned alike: whoever calls has
    checked them. In Triton's interpreter every call goes through Triton.
    """

    def __init__(self, kernel, constants: dict, **options):
        self._kernel, self._constants, self._options = kernel, constants, options
        self._direct: _Direct | None = None

    @property
    def ready(self) -> bool:
        """Whether it is compiled: before, a call must have tensors, afterwards addresses do."""
        return self._direct is not None

    def __call__(self, grid: tuple[int, ...], arguments: list) -> None:
        """Launch on torch's current stream. arguments  tensors and integers in the kernel's order"""
        if self._direct is None:
            compiled = self._kernel[grid](*arguments, **self._constants, **self._options)
            if next(a for a in arguments if isinstance(a, torch.Tensor)).is_cuda:
                self._direct = _Direct(compiled, len(arguments))
        else:
            values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            self.launch(grid, values, torch.cuda.current_stream().cuda_stream)

    def launch(self, grid: tuple[int, ...], values: list[int], stream: int) -> None:
        """As a call, but with the addresses of tensors, and on a stream given as a number. Only once it is `ready`."""
        self._direct(grid, values, stream)


class _Direct:
    """cuLaunchKernel for one compiled kernel."""

    def __init__(self, compiled, arguments: int):
        ptx = compiled.asm["ptx"]
        entry = ptx[ptx.index(".entry") :]
        widths = re.findall(r"\.param \.[a-z](\d+)\b", entry[: entry.index("{")])
        metadata = compiled.metadata
        scratch = [getattr(metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size")]
        # Triton appends pointers to scratch memory, null where a kernel needs none.
        if len(widths) < arguments or any(scratch) or getattr(metadata, "num_ctas", 1) != 1:
            raise EngineError(f"{metadata.name}: {len(widths)} parameters, scratch {scratch}: not launched directly")
        self._slots = [(ctypes.c_uint64 if width == "64" else ctypes.c_uint32)(0) for width in widths]
        self._given = self._slots[:arguments]
        self._parameters = (ctypes.c_void_p * len(widths))(*(ctypes.addressof(slot) for slot in self._slots))
        self._function = ctypes.c_void_p(compiled.function)
        self._block, self._shared_bytes = 32 * metadata.num_warps, metadata.shared
        self._name, self._keep = metadata.name, compiled
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]

    def __call__(self, grid: tuple[int, ...], values: list[int], stream: int) -> None:
        # One too few would go out with what the last launch had there.
        for slot, value in zip(self._given, values, strict=True):
            slot.value = value
        x, y, z = (*grid, 1, 1)[:3]
        status = self._launch(
            self._function, x, y, z, self._block, 1, 1, self._shared_bytes, stream, self._parameters, None
        )
        if status:
            raise EngineError(f"launching {self._name} on a grid of {grid} failed: CUDA error {status}")
