"""A token's work in segments between two choices of experts, each a CUDA graph when it comes again.

A segment is some twenty small kernels. Queued one by one they take the CPU longer than the card; as a graph they are
one call. A graph holds the addresses it was captured with. So one serves a conversation as long as all tensors of its
state stay where they are: keys and values that grow, or another conversation, end it, and the first token after that is
queued kernel by kernel again (which also compiles what was never compiled: nothing of that kind can be captured).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from nemolab.engine.gpu import allocator
from nemolab.progress import say

# Graphs go before longer prompts: what the driver keeps for them is needed there, and capturing takes less than that.
LONG_PROMPT_TOKENS = 256


class CudaGraphs:
    """Records CUDA graphs that share one pool of memory, which goes with the last of them."""

    def __init__(self, device: torch.device):
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream = torch.cuda.Stream(device)  # the default one cannot be captured
        self._open: torch.cuda.CUDAGraph | None = None  # begun, and not known to be ended

    def capture(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """What `work` queues on torch's current stream, nothing of it run: a function that queues it all at once.

        None, and said why, where the driver does not begin a graph or makes none of it. What `work` raises comes out
        as it is.
        `torch.cuda.graph` does the same, but collects garbage and waits for the card each time; here none is collected.
        """
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        with allocator.LOCK, torch.cuda.stream(self._stream), _no_collection():
            self._open = graph
            try:
                refused = self._begin(graph)
                if refused is None:
                    work()
            except BaseException:
                self._end(graph)
                raise
            failed = self._end(graph)
        problem = refused or failed
        if problem is not None:
            say(f"card: tokens go on kernel by kernel, since no graph could be made of them: {problem}")
            return None
        return graph.replay

    def _begin(self, graph: torch.cuda.CUDAGraph) -> Exception | None:
        """Record from here on; why not."""
        try:
            # Other threads may do what they like meanwhile, but for letting memory or graphs go: open an engine, say.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except Exception as problem:
            return problem
        return None

    def _end(self, graph: torch.cuda.CUDAGraph) -> Exception | None:
        """Record no more; why there is no graph."""
        problem = None
        try:
            graph.capture_end()
        except Exception as failure:
            # Then torch may still take this thread's memory from the graph's pool, and refuse to give any back.
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            problem = failure
        self._open = None  # an interrupt before here leaves it to `close`
        return problem

    def close(self) -> None:
        """Let go of all graphs now. Tracebacks may hold them, and one that ends while another is captured spoils it.

        Those that the card still runs are freed by the driver once they are through.
        """
        with allocator.LOCK:
            if self._open is not None:
                with torch.cuda.stream(self._stream):  # it ends on the stream it began on, or not at all
                    self._end(self._open)
            graphs, self._graphs = self._graphs, []
            for graph in graphs:
                with suppress(Exception):  # one that failed half-made has nothing to let go of
                    graph.reset()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: what ends on the card while a graph is captured spoils it."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()


class EagerSegments:
    """In the place of graphs, without a card: the work itself, again."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def close(self) -> None: ...


class Branch:
    """Lets work run beside what is queued after it: as a branch, in what is captured as a graph.

    Else one follows the other: queued kernel by kernel, a stream of its own costs the CPU more than the card gains.
    .wanted  False: no branches either
    """

    def __init__(self, device):
        self._device, self._stream, self.wanted = device, device.new_stream(), True
        self._forked, self._joined = device.new_event(), device.new_event()

    @property
    def _branches(self) -> bool:
        return self.wanted and self._device.is_capturing()

    def run(self, work: Callable[[], None], beside: Callable[[], None]) -> None:
        """Queue two works that need what is queued so far and nothing of each other; what comes then is after both."""
        if not self._branches:
            work()
            beside()
            return
        self._forked.record(self._device.main_stream())
        self._stream.wait_event(self._forked)
        try:
            with self._device.current(self._stream):
                work()
            beside()
        except BaseException:
            with suppress(Exception):  # what is being captured cannot be ended, not even as failed, with a branch open
                self._join()
            raise
        self._join()

    def _join(self) -> None:
        self._joined.record(self._stream)
        self._device.main_stream().wait_event(self._joined)


class Segments:
    """Runs the segments of one model's tokens, from the second token alike on as graphs.

    make_graphs  makes a CudaGraphs or its like
    .wanted      False: no graphs
    """

    def __init__(self, make_graphs: Callable[[], CudaGraphs | EagerSegments]):
        self._make_graphs, self.wanted = make_graphs, True
        self._graphs: CudaGraphs | EagerSegments | None = None
        self.drop()

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """A token begins whose segments work on these tensors of a state, beside others that are always the same."""
        # By identity, not address: another tensor may come to lie where one was freed. And weakly: no conversation is
        # kept in the card's memory because graphs were made of it.
        met = self._met
        self._alike = (
            met is not None
            and len(met) == len(tensors)
            and all([known() is tensor for known, tensor in zip(met, tensors, strict=True)])
        )
        if not self._alike:
            self.drop()
            self._met = [weakref.ref(tensor) for tensor in tensors]

    def run(self, number: int, work: Callable[[], None]) -> None:
        """Queue one segment: `work`, which queues the same for every token, or what was captured of it."""
        if not (self._alike and self.wanted):
            work()
            return
        replay = self._captured.get(number)
        if replay is None:
            if self._graphs is None:
                self._graphs = self._make_graphs()
            replay = self._graphs.capture(work)
            if replay is None:
                self.drop()
                self.wanted = False
                work()
                return
            self._captured[number] = replay
        replay()

    def drop(self) -> None:
        """Let go of all graphs. Whenever something else that a segment does or touches has changed."""
        self._captured: dict[int, Callable[[], None]] = {}
        self._met: list[weakref.ref] | None = None  # none yet: a state without tensors has a first token, too
        self._alike = False
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None  # not before: should an interrupt come first, they are closed the next time
