"""Routed experts of one token on the card, each read where it lies: up, ReLU^2, down, in one launch.

partial [K, P, X] = for each rank and each part of an expert's groups, its share of down(relu(up(x))^2), float32, before
down's scale_2 and the rank's weight: `Combine` makes the token's output of it. Output 8 w + p stands at p * X/8 + w.

    x         float32 [X]
    blocks    layout `neuron`, X and I multiples of 16, 16-byte aligned; up and down may lie in different places: a
              table has an address for each rank, of memory on the card or of page-locked memory on the host
    active    int32 [K, I/16]: which neurons of each group are active, the lowest neuron in the lowest bit

Up is read whole, of down one of two amounts:

    GROUPED  groups of 16 with an active neuron           groups * (8 * X + X)
    ROWS     of those the scales, and only active rows    groups * X + neurons * X/2

What is not read counts as zero, and so does an inactive neuron: its product is exactly zero. One program computes up
for sixteen neurons, sees which are active, and goes on with down for these: nothing waits for a launch between the two,
and the bus never idles. The order of all sums is fixed, and all strategies run *the same compiled code*: amount, tables
and ranks are data, never constants or specialisations, so they agree to the bit by construction.

Codes are decoded by bit placing (`decode`) on every card: the bus bounds the step, decoding hides behind the loads, and
the hardware's conversion of E2M1 (sm_100 and later, `codes`) would win no time here.

For `nemolab bench moe-step` alone there is a second form, NEURONS, compiled apart: of down one active neuron after the
other, its row and, for each of them again, its group's scales: neurons * (X/2 + X) bytes. It shows what ROWS gains by
reading scales once. Its sums run in the same order, over the same layout; a product may be rounded before it is added.

A rank whose address is 0 (an expert that is still to be read from disk) is left out; a second launch for the missing
ranks, once they are there, fills in its rows of `partial`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.checkpoint import formats
from nemolab.checkpoint.formats import GROUP
from nemolab.errors import EngineError
from nemolab.kernels.gpu.decode import E2M1_UNIT, E4M3_UNIT, decode_e2m1, decode_e4m3
from nemolab.kernels.gpu.launch import Prepared

GROUPED, ROWS = 0, 1  # how much of down is read

_GROUPS_A_PART = 2  # groups of 16 neurons that one program adds up
_WORDS_A_WARP = 64  # int32 words of a row: two warps share a group of Super
_UP_UNIT = E2M1_UNIT * E4M3_UNIT


def parts_of(inter: int) -> int:
    """Programs, and partial sums, an expert of so many neurons is split into."""
    return -(-inter // (GROUP * _GROUPS_A_PART))


def expert_step_torch(
    planes, scales_2: torch.Tensor, x: torch.Tensor, amount: int = ROWS
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain twin, for one expert: (partial [P, X], active [I/16]).

    planes  (up_values, up_scales, down_values, down_scales) uint8 in layout `neuron`; scales_2 float32 [2] up and down
    """
    up_values, up_scales, down_values, down_scales = planes
    groups = up_values.shape[0] // GROUP
    codes = formats.decode_e2m1(up_values).unflatten(1, (-1, GROUP))
    up = (codes * formats.decode_e4m3(up_scales)[..., None]).flatten(1)
    h = torch.relu(scales_2[0] * (up @ x)).square()
    grouped = (h != 0).unflatten(0, (groups, GROUP))
    read = grouped.any(1, keepdim=True).expand_as(grouped) if amount == GROUPED else grouped
    codes = formats.decode_e2m1(down_values) * read.flatten()[:, None]
    sums = (codes * h[:, None]).unflatten(0, (groups, GROUP)).sum(1)
    sums = torch.where(grouped.any(1, keepdim=True), sums * formats.decode_e4m3(down_scales), 0.0)
    partial = torch.stack([part.sum(0) for part in sums.split(_GROUPS_A_PART)])
    active = (grouped.int() << torch.arange(GROUP)).sum(1, dtype=torch.int32)
    return partial, active


# Nothing that differs between strategies may become part of the compiled code: an integer that happens to be 1, or a
# pointer that happens to be aligned, would.
@triton.jit(
    do_not_specialize=["first", "amount", "post"],
    do_not_specialize_on_alignment=["ranks", "up_table", "up_index", "down_table", "down_index", "ids", "scales_2"],
)
def _expert_kernel(
    ranks,
    first,
    up_table,
    up_index,
    down_table,
    down_index,
    ids,
    scales_2,
    x,
    partial,
    active,
    amount,
    post,
    INTER: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS_A_PART: tl.constexpr,
    WORDS: tl.constexpr,
    PACK: tl.constexpr,
    UP_UNIT: tl.constexpr,
    NEURONS: tl.constexpr,
):
    # grid: (ranks of this launch, parts)
    rank = tl.load(ranks + first + tl.program_id(0)).to(tl.int64)
    part = tl.program_id(1)
    expert = tl.load(ids + rank).to(tl.int64)
    if part == 0:
        # Told to the CPU at once, through page-locked memory it looks at: it may have to read what is missing.
        tl.store(post.to(tl.pointer_type(tl.int32)) + rank, expert.to(tl.int32), cache_modifier=".wt")
    up_at = tl.load(up_table + tl.load(up_index + rank).to(tl.int64))
    down_at = tl.load(down_table + tl.load(down_index + rank).to(tl.int64))
    if (up_at != 0) & (down_at != 0):
        ROW: tl.constexpr = WIDTH // 8  # words of a row
        GROUPS: tl.constexpr = INTER // 16
        UP_SCALES: tl.constexpr = INTER * WIDTH // 2
        DOWN: tl.constexpr = UP_SCALES + INTER * WIDTH // 16
        DOWN_SCALES: tl.constexpr = DOWN + INTER * WIDTH // 2
        up = tl.multiple_of(up_at.to(tl.pointer_type(tl.uint8)), 16)
        down = tl.multiple_of(down_at.to(tl.pointer_type(tl.uint8)), 16)
        up_words = up.to(tl.pointer_type(tl.uint32))
        down_words = (down + DOWN).to(tl.pointer_type(tl.uint32))
        down_scales = (down + DOWN_SCALES).to(tl.pointer_type(tl.int64))
        # A row has WIDTH / 16 bytes of scales: read in the widest words that fit, so that a request is not a few bytes.
        if PACK == 4:
            up_scales = (up + UP_SCALES).to(tl.pointer_type(tl.int32))
        elif PACK == 2:
            up_scales = (up + UP_SCALES).to(tl.pointer_type(tl.int16))
        else:
            up_scales = (up + UP_SCALES).to(tl.pointer_type(tl.int8))
        SCALE_ROW: tl.constexpr = ROW // 2 // PACK
        factor = tl.load(scales_2 + 2 * expert) * UP_UNIT
        word = tl.arange(0, WORDS)
        scale_word = tl.arange(0, WORDS // 2 // PACK)
        shift = 8 * tl.arange(0, PACK)
        place = tl.arange(0, 16)
        inside = word < ROW
        x0 = tl.load(x + 8 * word, mask=inside, other=0.0)
        x1 = tl.load(x + 8 * word + 1, mask=inside, other=0.0)
        x2 = tl.load(x + 8 * word + 2, mask=inside, other=0.0)
        x3 = tl.load(x + 8 * word + 3, mask=inside, other=0.0)
        x4 = tl.load(x + 8 * word + 4, mask=inside, other=0.0)
        x5 = tl.load(x + 8 * word + 5, mask=inside, other=0.0)
        x6 = tl.load(x + 8 * word + 6, mask=inside, other=0.0)
        x7 = tl.load(x + 8 * word + 7, mask=inside, other=0.0)
        y0 = tl.zeros([WORDS], tl.float32)
        y1 = tl.zeros([WORDS], tl.float32)
        y2 = tl.zeros([WORDS], tl.float32)
        y3 = tl.zeros([WORDS], tl.float32)
        y4 = tl.zeros([WORDS], tl.float32)
        y5 = tl.zeros([WORDS], tl.float32)
        y6 = tl.zeros([WORDS], tl.float32)
        y7 = tl.zeros([WORDS], tl.float32)
        for group in range(part * GROUPS_A_PART, tl.minimum((part + 1) * GROUPS_A_PART, GROUPS)):
            rows = group * 16 + place
            w = tl.load(up_words + rows[:, None] * ROW + word[None, :], mask=inside[None, :], other=0)
            s = tl.load(
                up_scales + rows[:, None] * SCALE_ROW + scale_word[None, :],
                mask=(scale_word < SCALE_ROW)[None, :],
                other=0,
            )
            scales = decode_e4m3(tl.reshape(s.to(tl.int32)[:, :, None] >> shift[None, None, :], [16, WORDS // 2]))
            low, high = decode_e2m1(w, 0)
            dots = low * x0[None, :]
            dots += high * x4[None, :]
            low, high = decode_e2m1(w, 1)
            dots += low * x1[None, :]
            dots += high * x5[None, :]
            low, high = decode_e2m1(w, 2)
            dots += low * x2[None, :]
            dots += high * x6[None, :]
            low, high = decode_e2m1(w, 3)
            dots += low * x3[None, :]
            dots += high * x7[None, :]
            pairs = tl.sum(tl.reshape(dots, [16, WORDS // 2, 2]), 2)
            u = tl.sum(pairs * scales, 1) * factor
            h = tl.where(u <= 0, 0.0, u * u)  # NaN is not <= 0, and must not be lost
            bits = tl.sum((h != 0).to(tl.int32) << place, 0)
            tl.store(active + rank * GROUPS + group, bits)
            # Where nothing is active, not even a scale that is NaN counts. No amount is negative, but unless that is
            # asked the assembler moves up's loads down between the arithmetic: three are under way in place of nine.
            if bits != 0 or amount < 0:
                if NEURONS:
                    v = tl.zeros([16, WORDS], tl.uint32)
                    t = tl.zeros([WORDS], tl.int64)
                    left = bits
                    while left != 0:
                        one = left & -left
                        mine = ((one >> place) & 1) != 0
                        v |= tl.load(
                            down_words + rows[:, None] * ROW + word[None, :],
                            mask=mine[:, None] & inside[None, :],
                            other=0,
                        )
                        # Volatile, or the compiler reads them once; used at once, so the next neuron waits for them.
                        t |= tl.load(down_scales + group * ROW + word, mask=inside, other=0, volatile=True)
                        left ^= one
                else:
                    wanted = (h != 0) | (amount == 0)
                    v = tl.load(
                        down_words + rows[:, None] * ROW + word[None, :],
                        mask=wanted[:, None] & inside[None, :],
                        other=0,
                    )
                    t = tl.load(down_scales + group * ROW + word, mask=inside, other=0)
                heights = h[:, None]
                low, high = decode_e2m1(v, 0)
                y0 += tl.sum(low * heights, 0) * decode_e4m3(t.to(tl.int32))
                y4 += tl.sum(high * heights, 0) * decode_e4m3((t >> 32).to(tl.int32))
                low, high = decode_e2m1(v, 1)
                y1 += tl.sum(low * heights, 0) * decode_e4m3((t >> 8).to(tl.int32))
                y5 += tl.sum(high * heights, 0) * decode_e4m3((t >> 40).to(tl.int32))
                low, high = decode_e2m1(v, 2)
                y2 += tl.sum(low * heights, 0) * decode_e4m3((t >> 16).to(tl.int32))
                y6 += tl.sum(high * heights, 0) * decode_e4m3((t >> 48).to(tl.int32))
                low, high = decode_e2m1(v, 3)
                y3 += tl.sum(low * heights, 0) * decode_e4m3((t >> 24).to(tl.int32))
                y7 += tl.sum(high * heights, 0) * decode_e4m3((t >> 56).to(tl.int32))
        # Output 8 * word + place stands at place * ROW + word, so that neighbouring lanes write neighbouring words.
        at = partial + (rank * tl.num_programs(1) + part) * WIDTH + word
        tl.store(at, y0, mask=inside)
        tl.store(at + ROW, y1, mask=inside)
        tl.store(at + 2 * ROW, y2, mask=inside)
        tl.store(at + 3 * ROW, y3, mask=inside)
        tl.store(at + 4 * ROW, y4, mask=inside)
        tl.store(at + 5 * ROW, y5, mask=inside)
        tl.store(at + 6 * ROW, y6, mask=inside)
        tl.store(at + 7 * ROW, y7, mask=inside)


class ExpertStep:
    """The step for one shape, with its scratch memory on one device.

    inter, width  I and X; top_k ranks; neurons  the form NEURONS, to be measured and for nothing else
    .partial      float32 [top_k, P, X], what `Combine` reads
    .active       int32 [top_k, I/16]
    .all_ranks    int32 [top_k], 0 1 2 ...: an index for tables that are in rank order already
    Raises EngineError for sizes the kernel has no form for.
    """

    def __init__(
        self, inter: int, width: int, top_k: int, device: str | torch.device = "cuda", *, neurons: bool = False
    ):
        if inter <= 0 or width <= 0 or inter % GROUP or width % GROUP:
            raise EngineError(f"experts of {inter} neurons and {width} outputs; multiples of {GROUP} are needed")
        self.inter, self.width, self.top_k, self.parts = inter, width, top_k, parts_of(inter)
        # Zeros, not whatever lay there: the sum over them may run before the ranks that come late have written theirs.
        self.partial = torch.zeros(top_k, self.parts, width, device=device)
        self.active = torch.empty(top_k, inter // GROUP, dtype=torch.int32, device=device)
        self.all_ranks = torch.arange(top_k, dtype=torch.int32, device=device)
        self._nowhere = torch.empty(top_k, dtype=torch.int32, device=device)
        words = max(2, triton.next_power_of_2(width // 8))
        constants = {
            "INTER": inter,
            "WIDTH": width,
            "GROUPS_A_PART": _GROUPS_A_PART,
            "WORDS": words,
            "PACK": 4 if width % 64 == 0 else 2 if width % 32 == 0 else 1,
            "UP_UNIT": _UP_UNIT,
            "NEURONS": neurons,
        }
        warps = max(1, words // _WORDS_A_WARP)
        self._kernel = Prepared(_expert_kernel, constants, num_warps=warps, num_stages=1)

    def bind(
        self,
        up: tuple[torch.Tensor, torch.Tensor],
        down: tuple[torch.Tensor, torch.Tensor],
        ids: torch.Tensor,
        scales_2: torch.Tensor,
        x: torch.Tensor,
        ranks: torch.Tensor | None = None,
    ) -> BoundStep:
        """The step on these buffers, checked once and launched often.

        up, down   (table int64 of block addresses, index int32 [top_k]): rank k's block is at table[index[k]], 0 if it
                   is not there yet
        ids        int32 [top_k], experts by rank; scales_2 float32 [E, 2]; x float32 [X], 16-byte aligned
        ranks      int32, by default all
        Raises EngineError where they do not fit.
        """
        ranks = self.all_ranks if ranks is None else ranks
        small = (up[1], down[1], ids, ranks)
        fits = ids.numel() == up[1].numel() == down[1].numel() == self.top_k and x.shape == (self.width,)
        types = all(t.dtype == torch.int32 for t in small) and up[0].dtype == down[0].dtype == torch.int64
        floats = x.dtype == scales_2.dtype == torch.float32 and scales_2.shape[1:] == (2,) and x.data_ptr() % 16 == 0
        here = all(t.device == self.partial.device and t.is_contiguous() for t in (*up, *down, *small, x, scales_2))
        if not (fits and types and floats and here):
            raise EngineError(
                f"expert step of {self.top_k} ranks and {self.width} inputs: ids {list(ids.shape)} {ids.dtype}, index "
                f"{list(up[1].shape)} and {list(down[1].shape)}, x {list(x.shape)} {x.dtype}; all contiguous on "
                f"{self.partial.device}, int32 but for tables (int64), x and scales_2 (float32), x 16-byte aligned"
            )
        tensors = [ranks, 0, *up, *down, ids, scales_2, x, self.partial, self.active, 0, self._nowhere.data_ptr()]
        return BoundStep(self._kernel, tensors, self.parts)


class BoundStep:
    """An expert step on its buffers: what `ExpertStep.bind` gives."""

    def __init__(self, kernel: Prepared, arguments: list, parts: int):
        self._kernel, self._arguments, self._parts = kernel, arguments, parts
        self._ranks, self._nowhere = arguments[0].numel(), arguments[-1]
        self._values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]

    def launch(self, *, amount: int = ROWS, first: int = 0, count: int | None = None, post: int | None = None) -> None:
        """Compute ranks[first : first + count] into `.partial` and `.active` of the step, on torch's current stream.

        post  address of int32 [top_k] in page-locked memory: ids are written there as soon as the kernel starts
        """
        count = self._ranks - first if count is None else count
        if first < 0 or count < 1 or first + count > self._ranks or amount not in (GROUPED, ROWS):
            raise EngineError(f"expert step: ranks {first} to {first + count} of {self._ranks}, amount {amount}")
        changing = {1: first, 11: amount, 12: self._nowhere if post is None else post}
        grid = (count, self._parts)
        for place, value in changing.items():
            self._arguments[place] = self._values[place] = value
        if not self._kernel.ready:
            self._kernel(grid, self._arguments)
        else:
            self._kernel.launch(grid, self._values, torch.cuda.current_stream().cuda_stream)
