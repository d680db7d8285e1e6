"""torch's allocator of a card's memory, as far as one thread's use of it can break another's."""

from __future__ import annotations

import threading

import torch

# torch cannot give memory back while any thread records a graph: that is an assertion of its own, and the graph is
# lost. So whoever records, and whoever gives back, holds this. Reentrant: an error in what one thread records may make
# the same thread give back.
LOCK = threading.RLock()


def give_back(device: torch.device) -> None:
    """What torch keeps of freed memory goes back to the driver. Without a card, nothing."""
    if device.type == "cuda":
        with LOCK:
            torch.cuda.empty_cache()
