"""Four ways for experts to reach the arithmetic: equal bits, misses, banks in turn, graphs. By twins, and on a card."""

import gc
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemolab.engine.gpu.cache_memory import CacheMemory
from nemolab.engine.gpu.device import open_device
from nemolab.engine.gpu.moe_step import Fetch, MoeStep, slots_bytes, spread
from nemolab.engine.gpu.operators import find_operators
from nemolab.engine.gpu.pinned import PinnedArray, wait_for_ids
from nemolab.engine.gpu.table import ExpertTable, TableKeeper
from nemolab.engine.transfers import TRANSFERS
from nemolab.errors import EngineError, StoreError, UsageError
from nemolab.measure.bench_moe_step import bench_moe_step
from nemolab.store.arena import Arena
from nemolab.store.direct_io import address
from nemolab.store.layout import BlockLayout
from nemolab.store.page_lock import PageLock

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


@pytest.fixture(params=["twin", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request):
    """Blocks of three layers in page-locked memory, with their table."""
    found = World(request.param)
    yield found
    found.close()


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
        self.table = ExpertTable(LAYERS, EXPERTS, self.device, self.operators)
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


def test_all_strategies_and_all_waves_give_the_same_bits(world):
    expected = world.outputs(world.make("pull"))
    assert expected.isfinite().all() and expected.abs().max() > 0
    for strategy in TRANSFERS[:3]:
        for waves in (None, (6,), (1,) * 6, (5, 1)):
            # Two banks, five steps: each bank is used again.
            found = world.outputs(world.make(strategy, waves=waves), (0, 1, 2, 0, 1))
            assert torch.equal(found, expected[[0, 1, 2, 0, 1]]), (strategy, waves)


def test_the_strategies_equal_the_cpu_engine(world):
    from nemolab.kernels.expert_step import expert_step_torch

    found = world.outputs(world.make("pull")).cpu()
    for layer, (x, ids, weights) in enumerate(world.inputs):
        chosen = ids.tolist()
        blocks = [world.arena.rows[layer * EXPERTS + expert] for expert in chosen]
        scales = world.scales_2[layer].cpu()[chosen]
        expected = expert_step_torch(blocks, world.form.views, "neuron", scales, weights.cpu(), x.cpu())
        assert (found[layer] - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("strategy", TRANSFERS)
@pytest.mark.parametrize("ranks", [[0, 3, 5], [2], [0, 1, 2, 3, 4, 5]], ids=str)
def test_misses_are_waited_for_and_change_no_bit(world, strategy, ranks):
    step = world.make(strategy)
    expected = world.outputs(step)
    ids = world.inputs[1][1].tolist()
    gone = [ids[rank] for rank in ranks]
    rows = [EXPERTS + expert for expert in gone]
    blocks, waits = world.arena.rows[rows].copy(), []
    world.arena.rows[rows] = 0x77  # until the disk has been read
    world.table.set(1, gone, 0)
    world.feed(step, 1)

    def wait():
        waits.append(1)
        world.arena.rows[rows] = blocks

    def lookup(chosen):
        assert chosen == ids
        return Fetch(world.addresses[1, chosen], ranks, wait)

    for number in range(3):  # both banks, in another order of ranks, and back
        assert step.run(1, lookup) == len(ranks) and len(waits) == number + 1
        assert torch.equal(step.out, expected[1])
        world.device.wait()
        world.arena.rows[rows] = 0x77
    wait()
    world.table.set(1, gone, world.addresses[1, gone])
    assert torch.equal(world.outputs(step), expected)


@pytest.mark.parametrize("strategy", TRANSFERS)
def test_an_expert_is_used_where_it_was_found_whatever_the_table_says(world, strategy):
    """Read ahead, or copied to another place: there, but not yet told; some are still being read, too."""
    step = world.make(strategy)
    expected = world.outputs(step)
    ids, spare = world.inputs[0][1].tolist(), Arena(2, world.form.block_bytes)
    lock = PageLock(address(spare.rows), spare.reserved_bytes, world.form.block_bytes, world.device.locker)
    assert lock.grow(spare.reserved_bytes) is None
    spare.rows[0] = world.arena.rows[ids[4]]
    world.table.set(0, [ids[1], ids[4]], 0)
    addresses = world.addresses[0, ids].copy()
    addresses[4] = address(spare.rows)
    for missing in ((), (1,), (4,)):
        for _ in range(2):
            world.feed(step, 0)
            assert step.run(0, lambda _, missing=missing: Fetch(addresses, missing)) == (
                len(missing) if strategy == "whole" else 2
            )
            assert torch.equal(step.out, expected[0]), missing
    world.device.wait()
    lock.close()


@pytest.mark.parametrize("strategy", TRANSFERS)
def test_a_wait_that_fails_leaves_a_step_that_goes_on(world, strategy):
    step = world.make(strategy)
    expected = world.outputs(step)
    ids = world.inputs[0][1].tolist()

    def fail():
        raise KeyboardInterrupt

    for rank in (0, 5, 2):
        world.table.set(0, ids[rank], 0)
        world.feed(step, 0)
        with pytest.raises(KeyboardInterrupt):
            step.run(0, lambda chosen, rank=rank: Fetch(world.addresses[0, chosen], (rank,), fail))
        world.table.set(0, ids[rank], world.addresses[0, ids[rank]])
        assert torch.equal(world.outputs(step), expected)


def test_the_table_changes_in_the_order_of_the_stream(world):
    random = np.random.default_rng(1)
    for _ in range(150):  # more than the ring of changes holds
        blocks = random.permutation(LAYERS * EXPERTS)[: random.integers(1, 9)]
        world.table.update(blocks, random.integers(0, 2**40, len(blocks)))
    assert np.array_equal(world.table.device.cpu().numpy(), world.table.host)
    large = ExpertTable(2, 500, world.device, world.operators)
    large.update(np.arange(1000), np.arange(1000) + 7)
    assert np.array_equal(large.device.cpu().numpy().ravel(), np.arange(1000) + 7)
    large.clear()
    assert not large.device.any() and not large.host.any()
    large.close()


class SomeRowsSeen:
    """A CacheMemory of rows of 10 bytes, of which the card does not see those from 5 on."""

    def address_of(self, row):
        return 1000 + 10 * row

    def is_seen(self, row):
        return row < 5


def test_the_table_is_told_what_the_cache_was_told_last(world):
    keeper = TableKeeper(world.table, SomeRowsSeen())
    before = world.table.host.copy()
    keeper.came([0, 17, 20], [3, 4, 5])
    keeper.left([1, 17, 40])
    keeper.came([1], [2])
    assert np.array_equal(world.table.host, before), "gathered until it is flushed"
    keeper.flush()
    before.reshape(-1)[[0, 1, 17, 40]] = [1030, 1020, 0, 0]  # 20 lies where the card does not see it
    assert np.array_equal(world.table.host, before) and np.array_equal(world.table.device.cpu().numpy(), before)
    keeper.left([0])
    keeper.start_over()
    keeper.flush()
    assert not world.table.host.any() and not world.table.device.any() and keeper.behind


def test_changes_whose_launch_was_interrupted_are_told_again(world, monkeypatch):
    keeper = TableKeeper(world.table, SomeRowsSeen())
    launch = world.table._write.launch

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(world.table._write, "launch", interrupt)
    keeper.came([3], [1])
    with pytest.raises(KeyboardInterrupt):
        keeper.flush()
    monkeypatch.setattr(world.table._write, "launch", launch)
    keeper.left([5])
    keeper.flush()
    assert world.table.device.cpu()[0, [3, 5]].tolist() == [1010, 0]


def test_pull_starts_without_the_cpu_and_leaves_out_what_is_missing(world):
    step = world.make("pull")
    expected = world.outputs(step)
    ids = world.inputs[2][1].tolist()
    world.table.set(2, ids[1], 0)
    world.feed(step, 2)
    step.expect(2)
    step.start(2)
    world.device.wait()
    here = step.step.partial.isfinite().flatten(1).all(1).cpu()
    assert here.tolist() == [rank != 1 for rank in range(TOP_K)], "computed before anybody asked"
    assert step.choice(2) == ids
    assert step.finish(2, Fetch(world.addresses[2, ids])) == 1 and torch.equal(step.out, expected[2])


@pytest.mark.parametrize("strategy", TRANSFERS)
def test_what_needs_no_word_from_the_cpu_can_be_a_graph(world, strategy):
    step = world.make(strategy)
    expected = world.outputs(step)

    def work():
        step.tell(1)
        step.start(1)

    replay = world.device.new_graphs().record(work)
    for other in (0, 1):
        world.feed(step, other)
        for buffer, value in zip((step.x, step.ids, step.weights), world.inputs[1], strict=True):
            buffer.copy_(value)
        step.expect(1)
        replay()
        assert step.choice(1) == world.inputs[1][1].tolist()
        assert step.finish(1, Fetch(world.addresses[1, step.choice(1)])) == 0
        assert torch.equal(step.out, expected[1])


def test_a_wrong_block_is_noticed(world):
    """Must fail: one bit of a chosen block."""
    step = world.make("rows")
    expected = world.outputs(step)
    world.arena.rows[world.inputs[0][1][2], 7] ^= 0x10
    assert not torch.equal(world.outputs(step)[0], expected[0])


def test_what_cannot_work_is_refused(world):
    with pytest.raises(EngineError, match="unknown transfer strategy 'push'"):
        world.make("push")
    with pytest.raises(EngineError, match="do not add up to 6"):
        world.make("rows", waves=(3, 4))


def test_slots_take_what_is_planned(world):
    block_bytes = INTER * WIDTH * 9 // 8
    taken = {strategy: slots_bytes(strategy, INTER, WIDTH, TOP_K) for strategy in TRANSFERS}
    half = 2 * TOP_K * block_bytes // 2
    assert taken == {"whole": 2 * half, "grouped": half, "rows": half, "pull": 0}
    assert taken["rows"] == world.make("rows")._banks.numel()


def test_a_pinned_array_is_seen_by_the_card(world):
    shared = PinnedArray((3, 5), np.int32, world.device.locker)
    shared.array[:] = np.arange(15).reshape(3, 5)
    there = torch.zeros(15, dtype=torch.int32, device=world.device.torch_device)
    world.device.copy(there.data_ptr(), shared.address, 60)
    assert there.tolist() == list(range(15))
    shared.close()
    shared.close()


class CountingLocker:
    def __init__(self):
        self.locked = set()

    def lock(self, address, nbytes):
        self.locked.add(address)

    def unlock(self, address):
        self.locked.remove(address)


def test_a_pinned_array_is_unlocked_when_it_is_forgotten():
    locker = CountingLocker()
    kept = PinnedArray((3,), np.int32, locker)
    PinnedArray((5000,), np.int32, locker)
    assert locker.locked == {kept.address}
    kept.close()
    assert not locker.locked


def test_a_pinned_array_interrupted_once_it_is_locked_is_unlocked(monkeypatch):
    grow, locker = PageLock.grow, CountingLocker()

    def interrupted(lock, nbytes):
        grow(lock, nbytes)
        assert locker.locked
        raise KeyboardInterrupt

    monkeypatch.setattr(PageLock, "grow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PinnedArray((3,), np.int32, locker)
    gc.collect()
    assert not locker.locked


class KeepsTheFirst(CountingLocker):
    """A driver that does not unlock what lies in front."""

    def unlock(self, address):
        if address == min(self.locked):
            return "CUDA_ERROR_UNKNOWN"
        super().unlock(address)


def test_every_range_of_the_cache_is_unlocked_whatever_the_others_raise():
    locker, arena = KeepsTheFirst(), Arena(5, 4096)
    cache, device = SimpleNamespace(arena=arena.rows, slots=3), SimpleNamespace(locker=locker)
    memory = CacheMemory(cache, device)
    assert memory.is_seen(0) and memory.is_seen(3) and len(locker.locked) == 2
    with pytest.raises(StoreError, match="CUDA_ERROR_UNKNOWN"):
        memory.close()
    assert locker.locked == {address(arena.rows)}
    memory.close()


def test_memory_that_cannot_be_shared_is_refused(monkeypatch):
    monkeypatch.setattr(CountingLocker, "lock", lambda *_: "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(EngineError, match=r"20 B that card and CPU share: .*CUDA_ERROR_OUT_OF_MEMORY"):
        PinnedArray((5,), np.int32, CountingLocker())


@pytest.mark.gpu
def test_the_bench_runs_and_its_rows_can_be_kept(tmp_path):
    from nemolab.measure import record

    found = bench_moe_step("tiny", top_k=6, cached=32, steps=2, repeats=3)
    assert found["same_bits"] and found["relative_error"] < 1e-5
    settings = found["rows"][0]["settings"]
    assert settings["bytes_copied"] == 6 * 36_864 and settings["bytes_in_place"] == 0
    for row in found["rows"]:
        assert len(record(**row, folder=tmp_path)["values"]) == 3
