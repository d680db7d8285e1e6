"""Routed experts as Triton kernels against their twins: formats enumerated, amounts equal to the bit, misses added."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton_interpreter import on_both

from nemolab.checkpoint import formats
from nemolab.checkpoint.formats import E2M1_VALUES
from nemolab.errors import EngineError
from nemolab.kernels.gpu.combine import Combine, combine_torch
from nemolab.kernels.gpu.decode import decode_e2m1, decode_e4m3
from nemolab.kernels.gpu.expert_step import GROUPED, ROWS, ExpertStep, expert_step_torch
from nemolab.kernels.gpu.stream import stream, stream_torch
from nemolab.store.layout import BlockLayout

# I neurons, X inputs and outputs, experts. The interpreter takes a quarter of a second a group: there, the real widths.
PIECES = {
    "one_group": (16, 16, 1),
    "odd": (48, 48, 2),
    "half_words": (80, 96, 1),
    "tiny_width": (80, 128, 2),
    "super_width": (32, 1024, 1),
    "nano_width": (16, 2688, 1),
}
WHOLE_MODELS = {"tiny": (256, 128, 6), "super": (2688, 1024, 22), "nano": (1856, 2688, 6)}
SMALL = (48, 32, 2)  # two parts, the second with one group


def make_blocks(inter, width, count, seed=0, active=0.2):
    """Blocks in layout neuron, with the share of neurons planted that a positive x makes active."""
    form, random = BlockLayout("neuron", inter, width), np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, form.block_bytes), np.uint8)
    for block in blocks:
        views = form.views(block)
        awake = random.random(inter) < active
        views.up_values[:] = np.where(awake[:, None], views.up_values & 0x77, views.up_values | 0x88)
        views.up_scales[:] = random.integers(0x28, 0x48, views.up_scales.shape)
        views.down_scales[:] = random.integers(0x28, 0x48, views.down_scales.shape)
    return form, blocks


class Case:
    """Blocks on a device with everything a launch needs; partial and active poisoned."""

    def __init__(self, device, inter, width, count, **kwargs):
        generator = torch.Generator().manual_seed(1)
        self.form, self.host = make_blocks(inter, width, count, **kwargs)
        self.device, self.count = device, count
        self.blocks = torch.from_numpy(self.host).to(device)
        self.experts = 2 * count + 1
        self.ids = torch.randperm(self.experts, generator=generator)[:count].int().to(device)
        self.scales_2 = (torch.rand(self.experts, 2, generator=generator) * 1e-2 + 1e-3).to(device)
        self.weights = torch.rand(count, generator=generator).to(device)
        self.x = (torch.rand(width, generator=generator) + 0.5).to(device)
        self.step = ExpertStep(inter, width, count, device)
        self.table = torch.zeros(self.experts, dtype=torch.int64)
        at = self.blocks.data_ptr() + torch.arange(count) * self.form.block_bytes
        self.table[self.ids.cpu().long()] = at
        self.table = self.table.to(device)
        self.poison()

    def poison(self):
        self.step.partial.fill_(float("nan"))
        self.step.active.fill_(-1)

    def launch(self, **kwargs):
        here = (self.table, self.ids)
        self.step.bind(here, here, self.ids, self.scales_2, self.x).launch(**kwargs)
        return self.step.partial.cpu().clone(), self.step.active.cpu().clone()

    def expected(self, rank, amount):
        planes = [torch.from_numpy(plane) for plane in self.form.views(self.host[rank])]
        return expert_step_torch(planes, self.scales_2.cpu()[self.ids[rank].item()], self.x.cpu(), amount)

    def combined(self):
        out = torch.full_like(self.x, float("nan"))
        self.combine(self.ids, out)
        return out.cpu()

    def combine(self, ids, out):
        Combine(*self.step.partial.shape).bind(self.step.partial, self.weights, ids, self.scales_2, out)()


def natural(partial):
    """Outputs of partial sums in natural order."""
    return partial.unflatten(-1, (8, -1)).transpose(-1, -2).flatten(-2)


def assert_near(found, expected, share=2e-6):
    assert torch.isfinite(found).all() and found.shape == expected.shape
    assert (found - expected).abs().max() <= share * expected.abs().max()


@triton.jit
def codes_kernel(words, low, high, scales, PLACE: tl.constexpr):
    at = tl.arange(0, 256)
    first, second = decode_e2m1(tl.load(words + at), PLACE)
    tl.store(low + at, first)
    tl.store(high + at, second)
    tl.store(scales + at, decode_e4m3(at))


@on_both
def test_every_code_decodes_to_its_value(device):
    byte = torch.arange(256, device=device)
    values = torch.tensor(E2M1_VALUES)[torch.arange(256) % 16]
    for place in range(4):
        other = (byte * 7 + 3) % 16
        noise = torch.randint(0, 2**31, (256,), device=device) & ~(0xF << 4 * place) & ~(0xF << 4 * (place + 4))
        words = (noise | (byte % 16) << 4 * place | other << 4 * (place + 4)).to(torch.uint32)
        low, high, scales = torch.full((3, 256), float("nan"), device=device)
        codes_kernel[(1,)](words, low, high, scales, PLACE=place)
        assert torch.equal(low.cpu() * 2**14, values)
        assert torch.equal(high.cpu() * 2**14, torch.tensor(E2M1_VALUES)[other.cpu()])
        expected = formats.decode_e4m3(torch.arange(256, dtype=torch.uint8))
        assert torch.equal(scales.cpu().nan_to_num(-1) * 2**8, (expected / 2**8).nan_to_num(-1) * 2**8)
        assert scales.isnan().sum() == 2


@on_both
@pytest.mark.parametrize("shape", PIECES.values(), ids=PIECES)
def test_step_and_combine_match_their_twins(device, shape):
    check_against_twins(Case(device, *shape))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", WHOLE_MODELS.values(), ids=WHOLE_MODELS)
def test_whole_experts_match_their_twins(shape):
    check_against_twins(Case("cuda", *shape))


def check_against_twins(case):
    partial, active = case.launch()
    for rank in range(case.count):
        expected, bits = case.expected(rank, ROWS)
        assert torch.equal(active[rank], bits)
        assert_near(natural(partial[rank]) * 2.0**22, expected)
    if case.device == "cpu" and case.x.numel() > 128:
        return  # the sum has a program for every 16 outputs
    twin = combine_torch(case.step.partial.cpu(), case.weights.cpu(), case.ids.cpu(), case.scales_2.cpu())
    assert_near(case.combined(), twin)


@on_both
def test_amounts_and_slots_agree_to_the_bit(device):
    """Whatever of down is read, and wherever up lies: the same bits."""
    case = Case(device, *SMALL)
    partial, active = case.launch(amount=ROWS)
    case.poison()
    assert all(map(torch.equal, case.launch(amount=GROUPED), (partial, active)))
    slots = torch.zeros(case.count, case.form.block_bytes // 2, dtype=torch.uint8, device=device)
    half = case.form.payload_bytes // 2
    slots[:, :half] = case.blocks[:, :half]
    at = (slots.data_ptr() + torch.arange(case.count) * slots.shape[1]).to(device)
    case.poison()
    up, down = (at, case.step.all_ranks), (case.table, case.ids)
    case.step.bind(up, down, case.ids, case.scales_2, case.x).launch(amount=GROUPED)
    assert torch.equal(case.step.partial.cpu(), partial)


@on_both
@pytest.mark.parametrize("share", [0, 0.05, 0.5, 1])
@pytest.mark.parametrize("shape", [SMALL, (256, 128, 2)], ids=["small", "tiny"])
def test_scales_read_again_for_each_neuron_give_the_same_bits(device, shape, share):
    case = Case(device, *shape, active=share)
    expected = case.launch(amount=ROWS)
    neurons = sum(int(bits).bit_count() for bits in expected[1].flatten())
    assert neurons == share * shape[0] * shape[2] if share in (0, 1) else 0 < neurons < shape[0] * shape[2]
    case.step = ExpertStep(*shape, device, neurons=True)
    case.poison()
    assert all(map(torch.equal, case.launch(), expected))


@on_both
def test_whether_amounts_agree_can_fail(device):
    """Must fail: one bit of an active neuron's row."""
    case = Case(device, *SMALL)
    partial, active = case.launch()
    group = int(active[0].ne(0).nonzero()[0, 0])
    neuron = 16 * group + (int(active[0, group]) & -int(active[0, group])).bit_length() - 1
    row = case.form.planes[2].offset_bytes + neuron * case.form.planes[2].shape[1]
    case.blocks[0, row] ^= 1
    assert not torch.equal(case.launch()[0], partial)


@on_both
def test_missing_experts_are_left_out_and_added(device):
    case = Case(device, *SMALL)
    whole, bits = case.launch()
    expected = case.combined()
    case.poison()
    missing = torch.tensor([1], dtype=torch.int32, device=device)
    case.table[case.ids[missing.long()].long()] = 0
    partial, active = case.launch()
    assert partial[1].isnan().all() and (active[1] == -1).all()
    assert torch.equal(partial[0], whole[0])
    at = (case.blocks.data_ptr() + torch.arange(case.count) * case.form.block_bytes).to(device)
    there = (at, case.step.all_ranks)
    case.step.bind(there, there, case.ids, case.scales_2, case.x, missing).launch()
    assert torch.equal(case.step.partial.cpu(), whole) and torch.equal(case.step.active.cpu(), bits)
    assert torch.equal(case.combined(), expected)


@on_both
def test_waves_write_what_one_launch_writes(device):
    case = Case(device, *SMALL)
    whole, _ = case.launch()
    case.poison()
    for first, count in ((0, 1), (1, 1)):
        case.launch(first=first, count=count)
    assert torch.equal(case.step.partial.cpu(), whole)


@on_both
def test_choice_is_told(device):
    case = Case(device, *SMALL)
    told = torch.full((case.count,), -1, dtype=torch.int32, device=device)
    case.table[:] = 0
    case.launch(post=told.data_ptr())
    assert torch.equal(told, case.ids), "told even of experts that are not there"


@on_both
def test_nan_scales_count_where_something_is_active_and_only_there(device):
    case = Case(device, 64, 32, 1, active=0.05, seed=3)
    _, active = case.launch()
    idle, busy = (int((active[0] != 0).eq(flag).nonzero()[0, 0]) for flag in (False, True))
    scales = case.form.planes[3].offset_bytes
    before = case.combined()
    case.blocks[0, scales + idle * 32] = 0x7F
    for amount in (GROUPED, ROWS):
        case.poison()
        case.launch(amount=amount)
        assert torch.equal(case.combined(), before)
    case.blocks[0, scales + busy * 32 + 5] = 0x7F
    case.launch()
    assert case.combined().isnan().nonzero().flatten().tolist() == [5]


@on_both
def test_nan_in_up_is_not_lost(device):
    case = Case(device, 32, 32, 1)
    case.blocks[0, case.form.planes[1].offset_bytes] = 0xFF
    case.launch()
    assert case.combined().isnan().all()


@on_both
def test_launcher_refuses_what_does_not_fit(device):
    with pytest.raises(EngineError, match="multiples of 16"):
        ExpertStep(40, 32, 1, device)
    case = Case(device, 32, 32, 2)
    here = (case.table, case.ids)
    with pytest.raises(EngineError, match="float32"):
        case.step.bind(here, here, case.ids, case.scales_2, case.x.double())
    with pytest.raises(EngineError, match="int64"):
        case.step.bind((case.table.int(), case.ids), here, case.ids, case.scales_2, case.x)
    with pytest.raises(EngineError, match="ranks 1 to 3 of 2"):
        case.launch(first=1, count=2)
    with pytest.raises(EngineError, match="combine"):
        case.combine(case.ids.long(), case.x)


@on_both
def test_stream_adds_up_everything(device):
    words = torch.randint(-(2**31), 2**31, (5 * 4096 + 12,), device=device).int()
    for programs in (1, 3):
        sums = torch.full((programs,), -7, dtype=torch.int32, device=device)
        stream(words.data_ptr(), words.numel(), sums, block=1024, loads=2)
        assert sums.sum(dtype=torch.int32) == stream_torch(words)
    with pytest.raises(EngineError, match="% 16"):
        stream(words.data_ptr() + 4, 4, sums)


@on_both
def test_partial_sums_begin_at_zero(device):
    """What lay in that memory before may be anything, and a sum that runs before all ranks are there would read it."""
    from nemolab.engine.gpu.twins import ExpertStep as Twin

    for make in (lambda: ExpertStep(*SMALL, device), lambda: Twin(*SMALL, torch.device("cpu"))):
        shape = make().partial.shape
        junk = [torch.full(shape, float("nan"), device=device) for _ in range(8)]
        del junk
        assert not make().partial.any()
