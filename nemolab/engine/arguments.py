"""What an engine is given, checked before anything large is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nemolab.checkpoint import Checkpoint
from nemolab.checkpoint.config import ModelConfig
from nemolab.engine.passes import show
from nemolab.engine.transfers import TRANSFERS
from nemolab.engine.trials import Trials
from nemolab.errors import EngineError
from nemolab.store import Store, check_source, ensure_store, files
from nemolab.store.target import MARKER

if TYPE_CHECKING:
    from nemolab.engine.gpu.side import CardSide


def find_store(path: str | Path | None, store: Store | str | Path | None, layout: str) -> Store:
    """The store that was given, or that of a folder; it is made where there is none yet."""
    if store is not None:
        if not isinstance(store, str | Path):
            return store
        store = Store.open(store)
        if path is not None and not (Path(path).expanduser() / files.MANIFEST).exists():
            check_source(store, Checkpoint.open(Path(path).expanduser()))
        return store
    if path is None:
        raise EngineError("give a checkpoint folder, or a store")
    path = Path(path).expanduser()
    # A store whose repack was cut off is named as what it is, too.
    is_store = (path / files.MANIFEST).exists() or (path / MARKER).exists()
    return Store.open(path if is_store else ensure_store(path, layout=layout))


def check_threads(threads: int | None, reader_threads: int) -> int:
    """How many threads compute. Raises EngineError for what is no number of threads."""
    threads = torch.get_num_threads() if threads is None else threads
    for name, count in (("threads", threads), ("reader_threads", reader_threads)):
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1024:
            raise EngineError(f"{name} is {show(count)}; a whole number from 1 to 1024 is needed")
    return threads


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """torch's number of threads for a while; the setting is the whole process's, so it is put back."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_prefetch(prefetch: int, config: ModelConfig) -> int:
    """How many guesses are read ahead. Raises EngineError for more than there are to guess."""
    reachable = config.reachable_experts
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or not 0 <= prefetch <= reachable:
        raise EngineError(
            f"prefetch is {prefetch!r}; a whole number from 0 to {reachable} is needed, "
            f"the experts that a token can reach in a layer"
        )
    return prefetch


def check_place(device: str | torch.device, transfer: str | None, vram_gib: float | None, trials: Trials) -> str:
    """The device by its name, once all that can be told without a store is known to be right: that may take minutes.

    Raises EngineError for an unknown device or transfer, without such a card, and for what a device does not have.
    """
    device = str(device) if isinstance(device, torch.device) else device
    for name, value, needed in (("device", device, "'cpu', 'cuda' or 'cuda:1'"), ("transfer", transfer, "'pull'")):
        if not isinstance(value, str) and not (name == "transfer" and value is None):
            raise EngineError(f"{name} is {show(value)}; a word such as {needed} is needed")
    if not isinstance(trials, Trials):
        raise EngineError(f"trials is {trials!r}; nemolab.engine.Trials(...) is needed")
    if device != "cpu":
        from nemolab.engine.gpu.device import check_device

        if transfer is not None and transfer not in TRANSFERS:
            raise EngineError(f"transfer is {transfer!r}; known are {', '.join(TRANSFERS)}")
        check_device(device)
        return device
    for name, value in (("transfer", transfer), ("vram_gib", vram_gib)):
        if value is not None:
            raise EngineError(f"{name} is {value!r}, but the device is 'cpu'; it is for device='cuda'")
    return device


def open_card(
    store: Store, device: str, transfer: str | None, vram_gib: float | None, trials: Trials
) -> CardSide | None:
    """What runs the model on a card; None for the CPU. Raises EngineError for settings that do not fit the store."""
    if device == "cpu":
        trials.check(device, transfer, store.config.reachable_experts)
        return None
    from nemolab.engine.gpu.side import CardSide

    return CardSide(store, device, transfer, vram_gib, trials)
