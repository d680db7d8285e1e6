"""The four ways for experts to reach the arithmetic: equal bits, misses, banks in turn, graphs. On a card."""

import threading
import time

import numpy as np
import pytest
import torch

from nemolab.engine.gpu.moe_step import STRATEGIES, ExpertTable, Fetch, MoeStep, PinnedArray, spread, wait_for_ids
from nemolab.errors import EngineError, UsageError
from nemolab.measure.bench_moe_step import bench_moe_step
from nemolab.store.arena import Arena
from nemolab.store.direct_io import address
from nemolab.store.layout import BlockLayout
from nemolab.store.page_lock import Driver, PageLock

LAYERS, EXPERTS, TOP_K = 3, 16, 6
INTER, WIDTH = 256, 128


@pytest.mark.parametrize(("waves", "top_k"), [((4, 11, 5, 2), 22), ((4, 11, 5, 2), 6), ((1, 1), 1), ((3, 2), 9)])
def test_waves_are_spread_over_all_experts(waves, top_k):
    found = spread(waves, top_k)
    assert sum(found) == top_k and min(found) >= 1 and len(found) <= len(waves)


@pytest.mark.parametrize("order", [range(5), reversed(range(5)), (0, 4, 2, 1, 3)], ids=["forth", "back", "last"])
def test_ids_are_waited_for_whatever_their_order(order):
    told = np.full(5, -1, np.int32)

    def tell():
        for place in order:
            time.sleep(1e-3)
            told[place] = place

    teller = threading.Thread(target=tell)
    teller.start()
    assert wait_for_ids(told) and told.tolist() == [0, 1, 2, 3, 4]
    teller.join()


def test_waiting_for_ids_ends():
    assert not wait_for_ids(np.array([1, -1, 2], np.int32), timeout_s=0.01)


def test_the_bench_needs_a_card_and_sizes_that_can_be(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="needs a CUDA card"):
        bench_moe_step("tiny")
    with pytest.raises(UsageError, match="known are super, nano, tiny"):
        bench_moe_step("huge")
    with pytest.raises(UsageError, match="22 of 5 experts"):
        bench_moe_step("tiny", cached=5)


@pytest.fixture
def world():
    """Blocks of three layers in page-locked memory, with their table."""
    torch.zeros(1, device="cuda")
    found = World()
    yield found
    found.close()


class World:
    def __init__(self):
        self.form, random = BlockLayout("neuron", INTER, WIDTH), np.random.default_rng(0)
        self.driver, self.arena = Driver(), Arena(LAYERS * EXPERTS, self.form.block_bytes)
        for row in self.arena.rows:
            views = self.form.views(row)
            for plane in views[0], views[2]:
                plane[:] = random.integers(0, 256, plane.shape, np.uint8)
            for plane in views[1], views[3]:
                plane[:] = random.integers(0x28, 0x48, plane.shape, np.uint8)
        self.lock = PageLock(
            address(self.arena.rows), self.arena.reserved_bytes, self.form.block_bytes, self.driver, chunk_bytes=200_000
        )
        assert self.lock.grow(self.arena.reserved_bytes) is None
        at = address(self.arena.rows) + self.form.block_bytes * np.arange(LAYERS * EXPERTS, dtype=np.int64)
        self.addresses = at.reshape(LAYERS, EXPERTS)
        self.table = ExpertTable(LAYERS, EXPERTS, self.driver)
        for layer in range(LAYERS):
            self.table.set(layer, np.arange(EXPERTS), self.addresses[layer])
        generator = torch.Generator().manual_seed(0)
        self.scales_2 = torch.rand(LAYERS, EXPERTS, 2, generator=generator).cuda() * 1e-2
        self.inputs = [
            (
                torch.randn(WIDTH, generator=generator).cuda(),
                torch.randperm(EXPERTS, generator=generator)[:TOP_K].int().cuda(),
                torch.rand(TOP_K, generator=generator).cuda(),
            )
            for _ in range(LAYERS)
        ]
        self.made = []

    def make(self, strategy, **kwargs):
        self.made.append(MoeStep(strategy, INTER, WIDTH, TOP_K, self.table, self.scales_2, self.driver, **kwargs))
        return self.made[-1]

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


@pytest.mark.gpu
def test_all_strategies_and_all_waves_give_the_same_bits(world):
    expected = world.outputs(world.make("pull"))
    assert expected.isfinite().all() and expected.abs().max() > 0
    for strategy in STRATEGIES[:3]:
        for waves in (None, (6,), (1,) * 6, (5, 1)):
            # Two banks, five steps: each bank is used again.
            found = world.outputs(world.make(strategy, waves=waves), (0, 1, 2, 0, 1))
            assert torch.equal(found, expected[[0, 1, 2, 0, 1]]), (strategy, waves)


@pytest.mark.gpu
def test_the_strategies_equal_the_cpu_engine(world):
    from nemolab.kernels.expert_step import expert_step_torch

    found = world.outputs(world.make("pull")).cpu()
    for layer, (x, ids, weights) in enumerate(world.inputs):
        chosen = ids.tolist()
        blocks = [world.arena.rows[layer * EXPERTS + expert] for expert in chosen]
        scales = world.scales_2[layer].cpu()[chosen]
        expected = expert_step_torch(blocks, world.form.views, "neuron", scales, weights.cpu(), x.cpu())
        assert (found[layer] - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [[0, 3, 5], [2], [0, 1, 2, 3, 4, 5]], ids=str)
def test_misses_are_waited_for_and_change_no_bit(world, strategy, ranks):
    step = world.make(strategy)
    expected = world.outputs(step)
    ids = world.inputs[1][1].tolist()
    gone = [ids[rank] for rank in ranks]
    rows = [EXPERTS + expert for expert in gone]
    blocks = world.arena.rows[rows].copy()
    world.arena.rows[rows] = 0x77  # until the disk has been read
    world.table.set(1, gone, 0)
    world.feed(step, 1)

    def wait():
        world.arena.rows[rows] = blocks
        world.table.set(1, gone, world.addresses[1, gone])

    def lookup(chosen):
        assert chosen == ids
        return Fetch(world.addresses[1, chosen], ranks, wait)

    for _ in range(3):  # both banks, in another order of ranks, and back
        assert step.run(1, lookup) == len(ranks)
        assert torch.equal(step.out, expected[1])
        world.arena.rows[rows] = 0x77
        world.table.set(1, gone, 0)
        torch.cuda.synchronize()
    wait()
    assert torch.equal(world.outputs(step), expected)


@pytest.mark.gpu
def test_the_table_changes_in_the_order_of_the_stream(world):
    random = np.random.default_rng(1)
    for _ in range(150):  # more than the ring of changes holds
        blocks = random.permutation(LAYERS * EXPERTS)[: random.integers(1, 9)]
        world.table.update(blocks, random.integers(0, 2**40, len(blocks)))
    assert np.array_equal(world.table.device.cpu().numpy(), world.table.host)
    large = ExpertTable(2, 500, world.driver)
    large.update(np.arange(1000), np.arange(1000) + 7)
    assert np.array_equal(large.device.cpu().numpy().ravel(), np.arange(1000) + 7)
    large.close()


@pytest.mark.gpu
def test_pull_starts_without_the_cpu_and_leaves_out_what_is_missing(world):
    step = world.make("pull")
    expected = world.outputs(step)
    ids = world.inputs[2][1].tolist()
    world.table.set(2, ids[1], 0)
    world.feed(step, 2)
    step.start(2)
    torch.cuda.synchronize()
    here = step.step.partial.isfinite().flatten(1).all(1).cpu()
    assert here.tolist() == [rank != 1 for rank in range(TOP_K)], "computed before anybody asked"
    assert step.choice(2) == ids
    assert step.finish(2, Fetch(world.addresses[2, ids])) == 1 and torch.equal(step.out, expected[2])


@pytest.mark.gpu
def test_pull_as_a_graph_gives_the_same_bits(world):
    step = world.make("pull")
    expected = world.outputs(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.start(1)
    for other in (0, 1):
        world.feed(step, other)
        for buffer, value in zip((step.x, step.ids, step.weights), world.inputs[1], strict=True):
            buffer.copy_(value)
        step.expect(1)
        graph.replay()
        assert step.choice(1) == world.inputs[1][1].tolist()
        assert step.finish(1, Fetch(world.addresses[1, step.choice(1)])) == 0
        assert torch.equal(step.out, expected[1])


@pytest.mark.gpu
def test_a_wrong_block_is_noticed(world):
    """Must fail: one bit of a chosen block."""
    step = world.make("rows")
    expected = world.outputs(step)
    world.arena.rows[world.inputs[0][1][2], 7] ^= 0x10
    assert not torch.equal(world.outputs(step)[0], expected[0])


@pytest.mark.gpu
def test_what_cannot_work_is_refused(world):
    with pytest.raises(EngineError, match="unknown transfer strategy 'push'"):
        world.make("push")
    with pytest.raises(EngineError, match="do not add up to 6"):
        world.make("rows", waves=(3, 4))


@pytest.mark.gpu
def test_a_pinned_array_is_seen_by_the_card():
    torch.zeros(1, device="cuda")
    driver = Driver()
    shared = PinnedArray((3, 5), np.int32, driver)
    shared.array[:] = np.arange(15).reshape(3, 5)
    there = torch.zeros(15, dtype=torch.int32, device="cuda")
    driver.copy(there.data_ptr(), shared.address, 60, torch.cuda.current_stream().cuda_stream)
    assert there.tolist() == list(range(15))
    shared.close()


@pytest.mark.gpu
def test_the_bench_runs_and_its_rows_can_be_kept(tmp_path):
    from nemolab.measure import record

    found = bench_moe_step("tiny", top_k=6, cached=32, steps=2, repeats=3)
    assert found["same_bits"] and found["relative_error"] < 1e-5
    settings = found["rows"][0]["settings"]
    assert settings["bytes_copied"] == 6 * 36_864 and settings["bytes_in_place"] == 0
    for row in found["rows"]:
        assert len(record(**row, folder=tmp_path)["values"]) == 3
