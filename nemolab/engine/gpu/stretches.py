"""A token's work in stretches between two choices of experts, each a CUDA graph when it comes again.

A stretch is some twenty small kernels. Queued one by one they take the CPU longer than the card; as a graph they are
one call. A graph holds the addresses it was recorded with. So one serves a conversation as long as all tensors of its
state stay where they are: keys and values that grow, or another conversation, end it, and the first token after that is
queued kernel by kernel again (which also compiles what was never compiled: nothing of that kind can be recorded).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

# Graphs go before longer prompts: what the driver keeps for them is needed there, and recording takes less than that.
LONG_PROMPT_TOKENS = 256


class CardGraphs:
    """Records CUDA graphs that share one pool of memory, which goes with the last of them."""

    def __init__(self, device: torch.device):
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # the default one cannot be recorded

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` queues on torch's current stream, nothing of it run: a function that queues it all at once.

        `torch.cuda.graph` does the same, but collects garbage and waits for the card each time.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may do what they like meanwhile: open another engine, say.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(Exception):  # it has failed with what was being recorded
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay


class Repeats:
    """In the place of graphs, without a card: the work itself, again."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


class Branch:
    """Lets work run beside what is queued after it: as a branch, in what is recorded as a graph.

    Else one follows the other: queued kernel by kernel, a stream of its own costs the CPU more than the card gains.
    .wanted  False: no branches either
    """

    def __init__(self, device):
        self._device, self._stream, self.wanted = device, device.new_stream(), True
        self._forked, self._joined = device.new_event(), device.new_event()

    @property
    def _branches(self) -> bool:
        return self.wanted and self._device.is_recording()

    def run(self, work: Callable[[], None]) -> None:
        """Queue work that needs what is queued so far, and nothing of what comes until `join`, nor that of it."""
        if not self._branches:
            work()
            return
        self._forked.record(self._device.main_stream())
        self._stream.wait_event(self._forked)
        with self._device.current(self._stream):
            work()
            self._joined.record(self._stream)

    def join(self) -> None:
        """What is queued from here on comes after both."""
        if self._branches:
            self._device.main_stream().wait_event(self._joined)


class Stretches:
    """Runs the stretches of one model's tokens, from the second token alike on as graphs.

    make_graphs  makes a CardGraphs or its like
    .wanted      False: no graphs
    """

    def __init__(self, make_graphs: Callable[[], CardGraphs | Repeats]):
        self._make_graphs, self.wanted = make_graphs, True
        self.drop()

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """A token begins whose stretches work on these tensors of a state, beside others that are always the same."""
        # By identity, not address: another tensor may come to lie where one was freed. And weakly: no conversation is
        # kept in the card's memory because graphs were made of it.
        self._alike = len(tensors) == len(self._met) and all(
            [met() is tensor for met, tensor in zip(self._met, tensors, strict=True)]
        )
        if not self._alike:
            self.drop()
            self._met = [weakref.ref(tensor) for tensor in tensors]

    def run(self, number: int, work: Callable[[], None]) -> None:
        """Queue one stretch: `work`, which queues the same for every token, or what was recorded of it."""
        if not (self._alike and self.wanted):
            work()
            return
        replay = self._recorded.get(number)
        if replay is None:
            if self._graphs is None:
                self._graphs = self._make_graphs()
            replay = self._recorded[number] = self._graphs.record(work)
        replay()

    def drop(self) -> None:
        """Let go of all graphs. Whenever something else that a stretch does or touches has changed."""
        self._recorded: dict[int, Callable[[], None]] = {}
        self._graphs: CardGraphs | Repeats | None = None
        self._met: list[weakref.ref] = []
        self._alike = False
