"""A stand-in for CUDA graphs: it does not run what it captures, and notices when a graph would touch what has moved."""

import torch
from synthetic import one_thread
from test_gpu_engine import IDS, SMALL, both_paths, open_engine

from nemolab.engine.gpu.decoder import _tensors

SIZES = SMALL | {"pattern": "ME*EM"}  # segments with and without attention; the last has a layer, too


@one_thread
def run_without_graphs(path):
    """Logits of a prompt and of steps, everything cached, nothing read ahead, no graph."""
    with open_engine(path) as engine:
        engine._model._parts.segments.wanted = False
        return torch.cat(both_paths(engine, IDS))


class Graphs:
    """Captures that do not run what is captured, and that are right for the very tensors they were made with."""

    made: list["Graphs"] = []

    def __init__(self, device=None):
        self.captured = self.replayed = 0
        self.made.append(self)

    def capture(self, work):
        self.captured += 1
        number, state = work.args
        tensors = _tensors(state)
        addresses = [tensor.data_ptr() for tensor in tensors]

        def replay():
            self.replayed += 1
            assert [tensor.data_ptr() for tensor in _tensors(state)] == addresses, "a tensor has moved"
            work()

        return replay

    def close(self):
        pass
