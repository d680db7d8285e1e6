"""The table on a card of where each expert lies: told what the cache did, and sent a layer at a time."""

import numpy as np
import pytest
from moe_worlds import EXPERTS, LAYERS

from nemolab.engine.gpu.table import ExpertTable, TableKeeper

pytest_plugins = ["card_fixtures"]


class SomeRowsSeen:
    """A CacheMemory of rows of 10 bytes, of which the card sees two, and could see those up to 5."""

    addresses, seen_rows = 1000 + 10 * np.arange(8), 2

    def lock_row(self, row):
        return row < 5


@pytest.fixture
def table(world):
    table = ExpertTable(LAYERS, EXPERTS, world.device)
    yield table
    world.device.wait()
    table.close()


def on_card(table, layer):
    return table.device[layer].cpu().numpy()


def test_a_layer_is_sent_as_the_cache_told_it_last(table):
    keeper = TableKeeper(table, SomeRowsSeen())
    keeper.came([0, 1, 17, EXPERTS, EXPERTS + 3], [3, 4, 2, 1, 5])
    keeper.left([1, 2])
    keeper.came([2], [0])
    assert [keeper.find(block) for block in (0, 1, 2, EXPERTS + 3)] == [1030, 0, 1000, 0], "the last is not seen"
    assert not table.device.any(), "nothing is sent by itself"
    table.send(0)
    assert np.array_equal(on_card(table, 0), table.host[0]) and table.host[0, [0, 2]].tolist() == [1030, 1000]
    assert not on_card(table, 1).any(), "nor is another layer"
    table.send(1)
    assert np.array_equal(on_card(table, 1), table.host[1]) and table.host[1, 0] == 1010


def test_a_layer_is_sent_when_it_changed_and_not_else(table, world, monkeypatch):
    keeper, sent, copy = TableKeeper(table, SomeRowsSeen()), [], world.device.copy
    monkeypatch.setattr(world.device, "copy", lambda *arguments: sent.append(arguments) or copy(*arguments))
    keeper.came([3, 5, EXPERTS], [0, 1, 2])
    for _ in range(2):
        for layer in range(LAYERS):
            table.send(layer)
    assert [nbytes for _, _, nbytes in sent] == 2 * [8 * EXPERTS]
    keeper.left([5])
    table.send(1)
    assert len(sent) == 2
    table.send(0)
    assert len(sent) == 3 and on_card(table, 0)[[3, 5]].tolist() == [1000, 0]
    table.clear()
    for layer in range(LAYERS):
        table.send(layer)
    assert len(sent) == 3 + LAYERS and not table.device.any() and not table.host.any()


def test_a_layer_whose_sending_was_interrupted_is_sent_again(table, world, monkeypatch):
    keeper = TableKeeper(table, SomeRowsSeen())

    def interrupt(*_):
        raise KeyboardInterrupt

    keeper.came([3], [1])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(world.device, "copy", interrupt)
        table.send(0)
    table.send(0)
    assert on_card(table, 0)[3] == 1010


def test_what_was_interrupted_while_it_was_told_is_sent(table, monkeypatch):
    """An address that stands here and is not sent would be taken for one that the card has."""
    keeper = TableKeeper(table, SomeRowsSeen())

    class Interrupted(SomeRowsSeen):
        def lock_row(self, row):
            raise KeyboardInterrupt

    monkeypatch.setattr(keeper, "_memory", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        keeper.came([3], [2])
    assert table._touched[0]
