"""A CUDA card, or the CPU in its place: where tensors lie, what locks pages, what copies blocks."""

from __future__ import annotations

import ctypes

import torch

from nemolab.errors import EngineError, StoreError
from nemolab.store.page_lock import Driver

TWIN = "twin"  # the engine of a card without the card: operators' twins on the CPU


class Card:
    """A CUDA card by its number in torch.

    .torch_device  where tensors lie; .total_bytes  of its memory
    Raises EngineError where there is none that can be used.
    """

    def __init__(self, index: int):
        _check_card(index)
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        try:
            self.locker = Driver(index)
        except StoreError as problem:
            raise EngineError(str(problem)) from None
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.name, self.total_bytes = properties.name, properties.total_memory

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A small page-locked tensor that copies to and from the card need not wait for."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def main_stream(self) -> torch.cuda.Stream:
        """torch's current stream."""
        return torch.cuda.current_stream(self.torch_device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def copy(self, to: int, source: int, nbytes: int, stream: torch.cuda.Stream | None = None) -> None:
        """Queue a copy between two addresses, each the card's or this process's, on a stream (None: the current)."""
        self.locker.copy(to, source, nbytes, (stream or self.main_stream()).cuda_stream)

    def wait(self) -> None:
        """Until everything queued is done."""
        torch.cuda.synchronize(self.torch_device)

    def set_limit(self, nbytes: int | None) -> None:
        """torch's allocations beyond these bytes fail from now on (None: no limit). What torch keeps unused goes."""
        torch.cuda.empty_cache()
        fraction = 1.0 if nbytes is None else min(1.0, nbytes / self.total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)

    def memory(self) -> dict:
        """Bytes: in tensors now and at the peak, held by torch, and in use on the card by everybody."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        return {
            "name": self.name,
            "allocated_bytes": torch.cuda.memory_allocated(self.torch_device),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.torch_device),
            "reserved_bytes": torch.cuda.memory_reserved(self.torch_device),
            "in_use_bytes": total_bytes - free_bytes,
            "total_bytes": total_bytes,
        }


class StandIn:
    """The CPU in a card's place."""

    torch_device = torch.device("cpu")
    name = "no card: twins on the CPU"
    total_bytes = None

    def __init__(self):
        self.locker = _NothingToLock()

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def main_stream(self) -> _AtOnce:
        return _AtOnce()

    def new_stream(self) -> _AtOnce:
        return _AtOnce()

    def new_event(self) -> _AtOnce:
        return _AtOnce()

    def copy(self, to: int, source: int, nbytes: int, stream: _AtOnce | None = None) -> None:
        ctypes.memmove(to, source, nbytes)

    def wait(self) -> None:
        pass

    def set_limit(self, nbytes: int | None) -> None:
        pass

    def memory(self) -> dict:
        return {"name": self.name}


class _AtOnce:
    """In the place of a stream and of an event, where everything is done when the call returns."""

    cuda_stream = 0

    def record(self, stream: _AtOnce | None = None) -> None: ...

    def wait_event(self, event: _AtOnce) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _NothingToLock:
    def lock(self, address: int, nbytes: int) -> None:
        return None

    def unlock(self, address: int) -> None:
        return None


def open_device(name: str) -> Card | StandIn:
    """`cuda`, `cuda:1`, ... or `twin`. Raises EngineError for another name and where there is no such card."""
    if name == TWIN:
        return StandIn()
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise EngineError(f"device {name!r}: this engine runs on 'cpu', 'cuda' or 'cuda:1' and so on")
    return Card(int(index or 0))


def _check_card(index: int) -> None:
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__}"
        why = f"{built} finds no card or driver" if torch.version.cuda else f"{built} was built without CUDA"
        raise EngineError(f"device 'cuda:{index}': {why}; device='cpu' runs everywhere, `nemolab doctor` says more")
    count = torch.cuda.device_count()
    if index >= count:
        raise EngineError(f"device 'cuda:{index}': there are {count} cards here, 0 to {count - 1}")
