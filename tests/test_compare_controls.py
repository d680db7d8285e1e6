"""The controls break what they say they break, alike in both layouts, and leave the files alone."""

import math

import numpy as np
import pytest
import torch
from synthetic import write_checkpoint

from nemolab.checkpoint import Checkpoint
from nemolab.checkpoint.formats import decode_nvfp4
from nemolab.compare.controls import CONTROLS, MUST_REACH_NATS, TamperedStore, judge_control, measure_control
from nemolab.compare.texts import Text
from nemolab.store import ExpertCache, Store, repack, verify
from nemolab.store.direct_io import aligned_buffer

LAYOUTS = ("neuron", "source")
SWAPPED, NEIGHBOURS, REMOVED = CONTROLS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    # 96 x 64 makes blocks of 6,912 bytes: no whole pages.
    return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp("model") / "m"))


@pytest.fixture(scope="module", params=LAYOUTS)
def store(checkpoint, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("store") / request.param
    repack(checkpoint.path, folder, layout=request.param)
    return Store.open(folder)


def read(store, block):
    buffer = aligned_buffer(store.block_bytes)
    reader = store.open_reader(threads=2)
    try:
        reader.read_into(block, buffer)
    finally:
        reader.close()
    return store.block_layout.unpack(buffer)


def swapped(values):
    return (values << 4) | (values >> 4)


def test_swapped_nibbles_are_those_of_the_published_bytes(checkpoint, store):
    for layer, expert in ((0, 0), (1, 7)):
        planes = read(TamperedStore(store, SWAPPED), store.block_index(layer, expert))
        published = checkpoint.expert(layer, expert)
        assert np.array_equal(planes.up_values, swapped(published.up_values))
        assert np.array_equal(planes.down_values, swapped(published.down_values))
        assert np.array_equal(planes.up_scales, published.up_scales)
        assert np.array_equal(planes.down_scales, published.down_scales)


@pytest.mark.parametrize("expert", [0, 7])
def test_neighbours_scales_are_those_of_the_next_expert_of_the_layer(checkpoint, store, expert):
    broken = TamperedStore(store, NEIGHBOURS)
    planes = read(broken, store.block_index(1, expert))
    own, next_one = checkpoint.expert(1, expert), checkpoint.expert(1, (expert + 1) % 8)
    assert np.array_equal(planes.up_values, own.up_values) and np.array_equal(planes.down_values, own.down_values)
    assert np.array_equal(planes.up_scales, next_one.up_scales)
    assert np.array_equal(planes.down_scales, next_one.down_scales)
    assert not np.array_equal(planes.up_scales, own.up_scales), "the neighbour has the same scales: nothing is shown"
    assert broken.globals[1, expert].tolist() == pytest.approx([next_one.up_scale_2, next_one.down_scale_2])


def test_removed_experts_decode_to_nothing_but_zeros(store):
    broken = TamperedStore(store, REMOVED)
    planes = read(broken, 3)
    up = decode_nvfp4(torch.from_numpy(planes.up_values), torch.from_numpy(planes.up_scales), broken.globals[0, 3, 0])
    assert not up.any() and broken.globals.shape == store.globals.shape


def test_the_cache_hands_out_what_the_control_made_of_a_block(store):
    broken = TamperedStore(store, SWAPPED)
    with ExpertCache(broken, slots=4, threads=3) as cache:
        blocks = dict(zip((5, 2), cache.lookup(0, [5, 2]), strict=True))
        for batch in cache.stream(0, range(8)):
            blocks |= dict(batch)
            for expert, block in batch:
                planes, expected = store.block_layout.unpack(block), read(broken, expert)
                assert all(map(np.array_equal, planes, expected)), expert
    assert set(blocks) == set(range(8))


def test_controls_leave_the_store_as_it_is(checkpoint, store):
    for control in CONTROLS:
        read(TamperedStore(store, control), 1)
    assert store.globals.any()
    assert verify(store, source=checkpoint.path, all=True).mismatches == 0
    planes, published = read(store, 1), checkpoint.expert(0, 1)
    assert np.array_equal(planes.down_values, published.down_values)


class FakeEngine:
    """Gives the logits it was made with."""

    def __init__(self, logits):
        self.logits = logits

    def new_state(self):
        return None

    def prefill(self, ids, state):
        return self.logits


def judge(shift, texts=2):
    """A control whose logits differ from the reference's by `shift` times noise."""
    generator = torch.Generator().manual_seed(4)
    reference = torch.randn(20, 50, generator=generator)
    noise = torch.randn(20, 50, generator=generator)
    text = Text("passage", list(range(20)), 20)
    rows = [
        measure_control(FakeEngine(reference + shift * noise), text, lambda a, b: reference[a:b]) for _ in range(texts)
    ]
    return judge_control(SWAPPED, rows)


def test_a_control_that_breaks_every_text_failed_as_it_must():
    judged = judge(shift=2.0)
    assert judged["failed_as_it_must"] is True and judged["kl_mean_least"] >= MUST_REACH_NATS
    assert judged["ppl"] == pytest.approx(judged["texts"][0]["ppl"])


def test_a_control_that_breaks_nothing_is_not_passed_off_as_one_that_did():
    judged = judge(shift=1e-3)
    assert judged["failed_as_it_must"] is False and judged["kl_mean_least"] < 1e-3


def test_one_text_that_hardly_moved_is_enough_to_doubt_a_control():
    rows = [{"name": name, "tokens": 10, "nats": 60.0, "kl_mean": kl} for name, kl in (("a", 3.0), ("b", 0.09))]
    assert judge_control(REMOVED, rows)["failed_as_it_must"] is False
    rows[1]["kl_mean"] = 0.1
    assert judge_control(REMOVED, rows)["failed_as_it_must"] is True


def test_logits_that_are_no_numbers_count_as_infinitely_wrong():
    text = Text("passage", [1, 2, 3], 3)
    row = measure_control(FakeEngine(torch.full((3, 5), math.nan)), text, lambda a, b: torch.zeros(b - a, 5))
    judged = judge_control(SWAPPED, [row])
    assert judged["failed_as_it_must"] is True and judged["ppl"] == math.inf
