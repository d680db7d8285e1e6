"""A CUDA card, or the CPU in its place: where tensors lie, what locks pages, what copies blocks."""

from __future__ import annotations

import ctypes
import re
import reprlib
import weakref
from contextlib import nullcontext
from typing import ClassVar, NamedTuple
from weakref import WeakSet

import torch

from nemolab.engine.gpu import allocator
from nemolab.engine.gpu.non_torch import ASSUMED, TOLD, non_torch_memory_of
from nemolab.engine.gpu.segments import CudaGraphs, EagerSegments
from nemolab.errors import EngineError, StoreError
from nemolab.store.page_lock import Driver

TWIN = "twin"  # the engine of a card without the card: operators' twins on the CPU


class Usage(NamedTuple):
    """Bytes of a card's memory.

    allocated  torch's tensors; reserved  held by torch; non_torch  held by this process beside it, None: not known
    used       by everybody; total  there are
    source     how non_torch is known (see `nemolab.engine.gpu.non_torch`): a difference may count others in
    """

    allocated_bytes: int
    reserved_bytes: int
    non_torch_bytes: int | None
    used_bytes: int
    total_bytes: int
    source: str = TOLD

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


class Card:
    """A CUDA card by its number in torch.

    .torch_device  where tensors lie; .total_bytes  of its memory
    Raises EngineError where there is none that can be used.
    """

    _open: WeakSet[Card] = WeakSet()  # torch keeps one account, and one limit, for the whole process
    _limits: ClassVar[dict[int, tuple[torch.device, int]]] = {}  # by card's id, of those that have one

    def __init__(self, index: int):
        _check_card(index)
        self._non_torch = non_torch_memory_of(index)  # looked at before this process touches the card
        reserved_bytes = torch.cuda.memory_reserved(index)  # 0 where torch has not begun, which this does not change
        self._non_torch.enter(reserved_bytes)
        try:
            self.torch_device = torch.device("cuda", index)
            torch.cuda.set_device(self.torch_device)
            self.locker = Driver(index)
            properties = torch.cuda.get_device_properties(self.torch_device)
            self.name, self.total_bytes = properties.name, properties.total_memory
            self._opened_bytes = self._non_torch.look(torch.cuda.memory_reserved(index))  # the context is ours
        except StoreError as problem:
            raise EngineError(str(problem)) from None
        finally:
            self._non_torch.leave()
        if not any(card.torch_device == self.torch_device for card in self._open):  # the peak would be theirs, too
            torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._open.add(self)

    def close(self) -> None:
        """No engine uses it any more. Closing twice is fine."""
        self._open.discard(self)

    def host_tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A small page-locked tensor that copies to and from the card need not wait for."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def use(self) -> None:
        """Before each pass, whatever thread it runs in: torch and the driver keep by thread which card is meant."""
        torch.cuda.set_device(self.torch_device)
        problem = self.locker.use()
        if problem is not None:
            raise EngineError(f"{self.name} cannot be used any more: {problem}")

    def main_stream(self) -> torch.cuda.Stream:
        """torch's current stream."""
        return torch.cuda.current_stream(self.torch_device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    def current(self, stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
        """With this, torch's current stream is another for a while."""
        return torch.cuda.stream(stream)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def new_graphs(self) -> CudaGraphs:
        return CudaGraphs(self.torch_device)

    def is_capturing(self) -> bool:
        """Is what is queued now recorded as a graph?"""
        return torch.cuda.is_current_stream_capturing()

    def copy(self, to: int, source: int, nbytes: int, stream: torch.cuda.Stream | None = None) -> None:
        """Queue a copy between two addresses, each the card's or this process's, on a stream (None: the current)."""
        self.locker.copy(to, source, nbytes, (stream or self.main_stream()).cuda_stream)

    def wait(self) -> None:
        """Until everything queued is done."""
        torch.cuda.synchronize(self.torch_device)

    def set_limit(self, nbytes: int | None) -> None:
        """torch's allocations beyond these bytes fail from now on (None: no limit). What torch keeps unused goes.

        It holds for the process: of several engines on a card, the tightest limit.
        """
        place = id(self), self.torch_device, self.total_bytes
        with allocator.LOCK:
            if nbytes is not None and id(self) not in self._limits:
                # Who never closes an engine, but opens another under its name, is not to be held to its limit.
                weakref.finalize(self, self._forget_limit, *place).atexit = False
            self._set_limit(*place, nbytes)

    @classmethod
    def _set_limit(cls, key: int, device: torch.device, total_bytes: int, nbytes: int | None) -> None:
        with allocator.LOCK:
            if nbytes is None:
                cls._limits.pop(key, None)
            else:
                cls._limits[key] = device, nbytes
            limits = [limit for where, limit in cls._limits.values() if where == device]
            torch.cuda.set_per_process_memory_fraction(min(1.0, min(limits, default=total_bytes) / total_bytes), device)
            allocator.give_back(device)

    @classmethod
    def _forget_limit(cls, key: int, device: torch.device, total_bytes: int) -> None:
        if key in cls._limits:
            cls._set_limit(key, device, total_bytes, None)

    def release(self) -> None:
        """What torch keeps of freed memory goes back to the driver."""
        allocator.give_back(self.torch_device)

    def expect(self, non_torch_bytes: int) -> None:
        """So much is planned for what this process holds beside torch."""
        self._non_torch.expect(non_torch_bytes)

    def enter(self, watched: bool) -> None:
        """A pass of this thread begins; watched: `look` comes before `leave`. See `NonTorchMemory.enter`."""
        self._non_torch.enter(torch.cuda.memory_reserved(self.torch_device) if watched else None)

    def leave(self) -> None:
        self._non_torch.leave()

    def look(self) -> Usage:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        reserved_bytes = torch.cuda.memory_reserved(self.torch_device)
        non_torch_bytes = self._non_torch.look(reserved_bytes)
        allocated_bytes = torch.cuda.memory_allocated(self.torch_device)
        used_bytes = total_bytes - free_bytes
        return Usage(allocated_bytes, reserved_bytes, non_torch_bytes, used_bytes, total_bytes, self._non_torch.source)

    def memory(self) -> dict:
        """Bytes as found: by torch, beside it and how that is known, in use by everybody; and at the peak.

        The peak is the process's, since the first was opened of the engines that are open now.
        """
        usage, beside, how = self.look(), self._non_torch, self._non_torch.source
        if how == ASSUMED:
            how = f"{how} as {'planned' if beside.bytes is None else 'last found'}: {beside.why_assumed}"
        return {
            "allocated_bytes": usage.allocated_bytes,
            "reserved_bytes": usage.reserved_bytes,
            "non_torch_bytes": usage.non_torch_bytes,
            "non_torch_is": how,
            "opened_bytes": self._opened_bytes,
            "in_use_bytes": usage.used_bytes,
            "total_bytes": usage.total_bytes,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.torch_device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.torch_device),
            "peak_non_torch_bytes": beside.peak_bytes if beside.bytes is not None else None,
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

    def use(self) -> None:
        pass

    def main_stream(self) -> _AtOnce:
        return _AtOnce()

    def new_stream(self) -> _AtOnce:
        return _AtOnce()

    def current(self, stream: _AtOnce) -> nullcontext:
        return nullcontext()

    def new_event(self) -> _AtOnce:
        return _AtOnce()

    def new_graphs(self) -> EagerSegments:
        return EagerSegments()

    def is_capturing(self) -> bool:
        return False

    def copy(self, to: int, source: int, nbytes: int, stream: _AtOnce | None = None) -> None:
        self.locker.copy(to, source, nbytes, 0)

    def wait(self) -> None:
        pass

    def set_limit(self, nbytes: int | None) -> None:
        pass

    def release(self) -> None:
        pass

    def expect(self, non_torch_bytes: int) -> None:
        pass

    def enter(self, watched: bool) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass

    def look(self) -> Usage | None:
        return None

    def memory(self) -> dict:
        return {}


class _AtOnce:
    """In the place of a stream and of an event, where everything is done when the call returns."""

    cuda_stream = 0

    def record(self, stream: _AtOnce | None = None) -> None: ...

    def wait_event(self, event: _AtOnce) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _NothingToLock:
    """In the place of a driver: everything can be read and copied anyway."""

    copy_batch = None

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def lock(self, address: int, nbytes: int) -> None:
        return None

    def unlock(self, address: int) -> None:
        return None


def open_device(name: str) -> Card | StandIn:
    """`cuda`, `cuda:1`, ... or `twin`. Raises EngineError for another name and where there is no such card."""
    index = check_device(name)
    return StandIn() if index is None else Card(index)


def check_device(name: str) -> int | None:
    """Which card a device is, as torch counts; None for `twin`. Raises as `open_device`, and opens nothing."""
    if name == TWIN:
        return None
    index = card_index(name)
    if index is None:
        raise EngineError(f"device {reprlib.repr(name)}: this engine runs on 'cpu', 'cuda' or 'cuda:1' and so on")
    _check_card(index)
    return index


def card_index(name: str) -> int | None:
    """Which card `cuda` or `cuda:1` is, as torch counts; None for what is no card's name."""
    found = re.fullmatch(r"cuda(?::(\d{1,9}))?", name, flags=re.ASCII)
    return int(found[1] or 0) if found else None


def _check_card(index: int) -> None:
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__}"
        why = f"{built} finds no card or driver" if torch.version.cuda else f"{built} was built without CUDA"
        raise EngineError(f"device 'cuda:{index}': {why}; device='cpu' needs none, `nemolab doctor` says more")
    count = torch.cuda.device_count()
    if index >= count:
        raise EngineError(f"device 'cuda:{index}': there are {count} cards here, 0 to {count - 1}")
