"""How work on a card is timed, and how fast the card reads its own memory: the floor of the run that needs it.

Every function waits for the card only at its end; samples are seconds or GB/s (10^9), one a repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from nemolab.errors import UsageError

BUFFER_BYTES = 2**30  # read by a floor: well above any card's cache
WARM_S = 0.1  # of work before anything counts: an idle card takes a while to raise its clocks


def need_card() -> torch.device:
    """The current CUDA device. Raises UsageError where there is none."""
    if not torch.cuda.is_available():
        raise UsageError("this benchmark needs a CUDA card, and torch sees none on this machine")
    return torch.device("cuda", torch.cuda.current_device())


def time_graph(calls: Sequence[Callable[[], object]], repeats: int = 9, warm_s: float = WARM_S) -> list[float]:
    """Seconds a call, a sample a replay: all calls, one after another, as one CUDA graph.

    Many short launches are timed without the time Python takes to make them. Give calls on different buffers, together
    well above the card's cache, and no call finds its own bytes there.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()  # compiles what has to be compiled
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return [seconds / len(calls) for seconds in time_events(graph.replay, repeats, warm_s)]


def time_events(call: Callable[[], object], repeats: int = 9, warm_s: float = WARM_S) -> list[float]:
    """Seconds of each call between two events on the card, after warm_s seconds of the same work."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    started = time.perf_counter()
    while True:
        call()
        torch.cuda.synchronize()
        if time.perf_counter() - started >= warm_s:
            break
    call()  # not waited for: the card is busy when the first mark comes, as at all others
    for before, after in marks:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in marks]


def device_read_gb_s(repeats: int = 9, buffer_bytes: int = BUFFER_BYTES) -> list[float]:
    """GB/s of a kernel that reads the card's own memory and adds it up, nothing else."""
    from nemolab.kernels.gpu.stream import stream

    device = need_card()
    buffer = torch.randint(-100, 100, (buffer_bytes // 16 * 4,), dtype=torch.int32, device=device)
    programs = 32 * torch.cuda.get_device_properties(device).multi_processor_count
    sums = torch.empty(programs, dtype=torch.int32, device=device)
    seconds = time_events(lambda: stream(buffer.data_ptr(), buffer.numel(), sums), repeats)
    return [buffer.nbytes / second / 1e9 for second in seconds]
