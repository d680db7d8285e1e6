"""Four ways for experts to reach the arithmetic: equal bits, misses, banks in turn, graphs. By twins, and on a card."""

import pytest
import torch
from moe_worlds import EXPERTS, INTER, TOP_K, WIDTH

from nemolab.engine.gpu.expert_fetch import Fetch
from nemolab.engine.gpu.moe_step import slots_bytes, spread
from nemolab.engine.transfers import TRANSFERS
from nemolab.errors import EngineError
from nemolab.store.arena import Arena
from nemolab.store.direct_io import address
from nemolab.store.page_lock import PageLock

pytest_plugins = ["card_fixtures"]


@pytest.mark.parametrize(("waves", "top_k"), [((4, 11, 5, 2), 22), ((4, 11, 5, 2), 6), ((1, 1), 1), ((3, 2), 9)])
def test_waves_are_spread_over_all_experts(waves, top_k):
    found = spread(waves, top_k)
    assert sum(found) == top_k and min(found) >= 1 and len(found) <= len(waves)


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

    replay = world.device.new_graphs().capture(work)
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
    with pytest.raises(EngineError, match="11 slots on the card; two banks of 6 are needed"):
        world.make("whole", slots=11)
    with pytest.raises(EngineError, match="do not add up to 6"):
        world.make("rows", waves=(3, 4))


def test_slots_take_what_is_planned(world):
    block_bytes = INTER * WIDTH * 9 // 8
    taken = {strategy: slots_bytes(strategy, INTER, WIDTH, TOP_K) for strategy in TRANSFERS}
    half = 2 * TOP_K * block_bytes // 2
    assert taken == {"whole": 2 * half, "grouped": half, "rows": half, "pull": 0}
    assert taken["rows"] == world.make("rows")._banks.numel()
