"""The table on a card of where each expert lies: it changes in the stream's order, and is told what the cache did."""

import numpy as np
import pytest
from moe_worlds import EXPERTS, LAYERS

from nemolab.engine.gpu.table import ExpertTable, TableKeeper

pytest_plugins = ["card_fixtures"]


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

    def addresses_seen(self, rows):
        return np.where(rows < 5, 1000 + 10 * rows, 0)


def come(keeper, blocks, rows):
    keeper.came(np.array(blocks), np.array(rows))


def test_the_table_is_told_what_the_cache_was_told_last(world):
    keeper = TableKeeper(world.table, SomeRowsSeen())
    before = world.table.host.copy()
    come(keeper, [0, 17, 20], [3, 4, 5])
    keeper.left([1, 17, 40])
    come(keeper, [1], [2])
    assert [keeper.find(block) for block in (0, 1, 17, 20)] == [1030, 1020, 0, 0], "what is not flushed yet, too"
    assert np.array_equal(world.table.host, before), "gathered until it is flushed"
    keeper.flush()
    before.reshape(-1)[[0, 1, 17, 20, 40]] = [1030, 1020, 0, 0, 0]  # 20 lies where the card does not see it
    assert np.array_equal(world.table.host, before) and np.array_equal(world.table.device.cpu().numpy(), before)
    keeper.left([0])
    keeper.start_over()
    keeper.flush()
    assert not world.table.host.any() and not world.table.device.any()


def test_a_block_told_often_before_a_flush_is_written_as_it_was_told_last(world):
    keeper = TableKeeper(world.table, SomeRowsSeen())
    for number in range(300):  # more than two launches
        come(keeper, [number % 7], [number % 5])
    keeper.left([3])
    keeper.flush()
    last = {number % 7: 1000 + 10 * (number % 5) for number in range(300)} | {3: 0}
    assert world.table.device.cpu()[0, :7].tolist() == [last[block] for block in range(7)]


def test_changes_whose_launch_was_interrupted_are_told_again(world, monkeypatch):
    keeper = TableKeeper(world.table, SomeRowsSeen())
    launch = world.table._write.launch

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(world.table._write, "launch", interrupt)
    come(keeper, [3], [1])
    with pytest.raises(KeyboardInterrupt):
        keeper.flush()
    monkeypatch.setattr(world.table._write, "launch", launch)
    keeper.left([5])
    keeper.flush()
    assert world.table.device.cpu()[0, [3, 5]].tolist() == [1010, 0]
