"""A small world for one MoE step: blocks in page-locked memory, the table that names them, inputs, steps over both."""

import numpy as np
import torch

from nemolab.engine.gpu.device import open_device
from nemolab.engine.gpu.expert_fetch import Fetch
from nemolab.engine.gpu.moe_step import MoeStep
from nemolab.engine.gpu.operators import find_operators
from nemolab.engine.gpu.table import ExpertTable
from nemolab.store.arena import Arena
from nemolab.store.direct_io import address
from nemolab.store.layout import BlockLayout
from nemolab.store.page_lock import PageLock

LAYERS, EXPERTS, TOP_K = 3, 16, 6
INTER, WIDTH = 256, 128


class World:
    def __init__(self, device):
        self.form, random = BlockLayout("neuron", INTER, WIDTH), np.random.default_rng(0)
        self.device, self.arena = open_device(device), Arena(LAYERS * EXPERTS, self.form.block_bytes)
        self.operators, there = find_operators(self.device.torch_device), self.device.torch_device
        for row in self.arena.rows:
            views = self.form.views(row)
            for plane in views[0], views[2]:
                plane[:] = random.integers(0, 256, plane.shape, np.uint8)
            for plane in views[1], views[3]:
                plane[:] = random.integers(0x28, 0x48, plane.shape, np.uint8)
        locker = self.device.locker
        self.lock = PageLock(
            address(self.arena.rows), self.arena.reserved_bytes, self.form.block_bytes, locker, chunk_bytes=200_000
        )
        assert self.lock.grow(self.arena.reserved_bytes) is None
        at = address(self.arena.rows) + self.form.block_bytes * np.arange(LAYERS * EXPERTS, dtype=np.int64)
        self.addresses = at.reshape(LAYERS, EXPERTS)
        self.table = ExpertTable(LAYERS, EXPERTS, self.device)
        for layer in range(LAYERS):
            self.table.set(layer, np.arange(EXPERTS), self.addresses[layer])
        generator = torch.Generator().manual_seed(0)
        self.scales_2 = (torch.rand(LAYERS, EXPERTS, 2, generator=generator) * 1e-2).to(there)
        self.inputs = [
            (
                torch.randn(WIDTH, generator=generator).to(there),
                torch.randperm(EXPERTS, generator=generator)[:TOP_K].int().to(there),
                torch.rand(TOP_K, generator=generator).to(there),
            )
            for _ in range(LAYERS)
        ]
        self.made = []

    def make(self, strategy, **kwargs):
        sizes = (INTER, WIDTH, TOP_K)
        step = MoeStep(strategy, *sizes, self.table, self.scales_2, self.device, self.operators, **kwargs)
        self.made.append(step)
        return step

    def feed(self, step, layer):
        for buffer, value in zip((step.x, step.ids, step.weights), self.inputs[layer], strict=True):
            buffer.copy_(value)
        step.step.partial.fill_(float("nan"))
        step.out.fill_(float("nan"))

    def outputs(self, step, layers=range(LAYERS)):
        found = []
        for layer in layers:
            self.feed(step, layer)
            step.run(layer, lambda chosen, layer=layer: Fetch(self.addresses[layer, chosen]))
            found.append(step.out.clone())
        return torch.stack(found)

    def close(self):
        for step in self.made:
            step.close()
        self.table.close()
        self.lock.close()
        self.arena.close()
