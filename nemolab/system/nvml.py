"""How much of a CUDA card's memory is in use, by everybody and by this process, also before this process uses the card.

From the driver's management library (NVML), which needs no context on the card; by ctypes, since it comes with every
driver and needs no package. CUDA and NVML number cards differently; both know a card's UUID.
"""

import ctypes
import os
import uuid

_NOT_TOLD = 2**64 - 1  # what NVML says of a process where the driver does not know (Windows' driver model)
_TOO_SHORT = 7  # NVML_ERROR_INSUFFICIENT_SIZE
_SPARE_ENTRIES = 16  # processes that may have come between asking how many there are and asking which


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_uint64),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class CardMeter:
    """The memory of one card.

    index     the card's number for CUDA, as torch counts too
    .touched  whether this process had a context on the card already when this was made
    Raises OSError, with what is missing, where the driver or its management library do not tell.
    """

    def __init__(self, index: int, cuda=None, nvml=None):
        """cuda, nvml: the two libraries, or stand-ins for tests."""
        cuda = cuda or ctypes.CDLL("libcuda.so.1")
        self._nvml = nvml or ctypes.CDLL("libnvidia-ml.so.1")
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        raw = (ctypes.c_ubyte * 16)()
        _check("cuInit", cuda.cuInit(0))
        _check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), index))
        _check("cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid_v2(ctypes.byref(raw), device))
        state = cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        _check("cuDevicePrimaryCtxGetState", state)
        self.touched = bool(active.value)
        _check("nvmlInit_v2", self._nvml.nvmlInit_v2())
        self._handle, name = ctypes.c_void_p(), uuid.UUID(bytes=bytes(raw))
        for kind in ("GPU", "MIG"):
            words = f"{kind}-{name}".encode()
            status = self._nvml.nvmlDeviceGetHandleByUUID(words, ctypes.byref(self._handle))
            if status == 0:
                break
        _check(f"nvmlDeviceGetHandleByUUID of {name}", status)
        self.used_bytes()  # a library that cannot tell is found here, not later

    def used_bytes(self) -> int:
        """In use by everybody. Raises OSError."""
        return self._memory().used

    def total_bytes(self) -> int:
        """There are. Raises OSError."""
        return self._memory().total

    def _memory(self) -> _Memory:
        memory = _Memory()
        _check("nvmlDeviceGetMemoryInfo", self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)))
        return memory

    def own_bytes(self) -> int | None:
        """In use by this process; None where that is not told: in most containers and on Windows' driver model."""
        ask = getattr(self._nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if ask is None:  # a driver before 2022
            return None
        count = ctypes.c_uint(0)
        if ask(self._handle, ctypes.byref(count), None) not in (0, _TOO_SHORT):
            return None
        count.value += _SPARE_ENTRIES
        found = (_Process * count.value)()
        if ask(self._handle, ctypes.byref(count), found) != 0:
            return None
        mine = [entry.used for entry in found[: count.value] if entry.pid == os.getpid()]
        return mine[0] if mine and 0 < mine[0] < _NOT_TOLD else None


def _check(call: str, status: int) -> None:
    if status:
        raise OSError(f"{call} failed with status {status}")
