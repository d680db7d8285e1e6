"""All routed experts of one token, straight from their NVFP4 blocks: up, ReLU^2, down, weighted sum.

out [X] = sum over ranks k of weight_k * down_k(relu(up_k(x))^2)     x, out float32 [X]; I neurons an expert

Reads up (values and scales) of every chosen expert, and of down only groups of 16 neurons with an active one (relu^2 is
exactly zero for the rest, 92.5 % of them in the large model): of those the scales, and the active neurons' own values.
On a CPU decoding bounds it, not memory: some 20 vector instructions for 32 codes, whether they come from RAM or a cache
(`nemolab bench expert` gives both and the memory floor).

The order of all sums is fixed, the same for both block layouts and for any number of threads:
  up     a row's groups of 16 go to two running sums of eight lanes in turn; within a group code_even * x_even first
  down   for each output: groups ascending, scale * (sum over the group's active neurons, ascending, of code * h)
  ranks  ascending, each times (weight * scale_2)
In layout `neuron` an active neuron's row is read where it lies. In `source` a published byte holds two neurons of one
output, so the group's active rows are first gathered into the same form; from there on the same code runs.
"""

from __future__ import annotations

import numpy as np
import torch

from nemolab.checkpoint.formats import GROUP
from nemolab.errors import EngineError
from nemolab.jit import jit
from nemolab.kernels import simd
from nemolab.kernels.decode_nvfp4 import decode_rows_torch
from nemolab.kernels.matvec import dot_nvfp4, split_even_odd
from nemolab.kernels.team import Team

LAYOUTS = {"neuron": 0, "source": 1}  # what compiled code compares: numbers for the names of `nemolab.store.layout`
_SOURCE = LAYOUTS["source"]
_UP_UNIT, _DOWN_UNIT = np.float32(simd.E2M1_UNIT), np.float32(simd.E2M1_UNIT * simd.E4M3_UNIT)


def expert_step_torch(blocks, planes, layout: str, scales_2, weights, x: torch.Tensor) -> torch.Tensor:
    """The plain twin: decode both matrices of every expert, multiply, add in rank order.

    blocks  uint8 arrays in rank order; planes  block -> (up_values, up_scales, down_values, down_scales)
    """
    out = torch.zeros_like(x)
    for block, (up_2, down_2), weight in zip(blocks, scales_2.tolist(), weights.tolist(), strict=True):
        up_values, up_scales, down_values, down_scales = (torch.from_numpy(plane) for plane in planes(block))
        h = torch.relu(decode_rows_torch(up_values, up_scales, up_2) @ x).square()
        if layout == "neuron":
            down_values, down_scales = published_down_torch(down_values, down_scales)
        out += weight * (decode_rows_torch(down_values, down_scales, down_2) @ h)
    return out


def published_down_torch(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Down of layout `neuron` as published: [I, X/2] and [I/16, X] -> [X, I/2] and [X, I/16]."""
    codes = torch.stack([values & 15, values >> 4], dim=-1).flatten(1).T
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous(), scales.T.contiguous()


@jit
def _up_kernel(part, parts, addresses, scales_2, even, odd, h, active):
    """h [k, I] = relu(up x)^2; and which neurons of each group of 16 are active: the bits of `active` [k, I/16]."""
    experts, inter = h.shape
    width = 2 * even.shape[0]
    in_groups, out_groups = width // GROUP, inter // GROUP
    even_at, odd_at = simd.address_of(even), simd.address_of(odd)
    units = experts * out_groups
    for unit in range(units * part // parts, units * (part + 1) // parts):
        k, group = unit // out_groups, unit % out_groups
        values = addresses[k]
        scales = values + inter * width // 2
        factor = scales_2[k, 0] * _UP_UNIT
        bits = 0
        for place in range(GROUP):
            row = group * GROUP + place
            u = factor * dot_nvfp4(values + row * width // 2, scales + row * in_groups, even_at, odd_at, in_groups)
            if u <= 0:
                h[k, row] = 0
            else:  # NaN comes this way, and must not be lost
                h[k, row] = u * u
                bits |= 1 << place
        active[k, group] = bits


@jit
def gather_source(values, scales, inter, group, first, last, neurons, count, rows, row_scales):
    """The active rows of one group, outputs first..last, in the form of layout `neuron`: bytes of two outputs."""
    length = (last - first) // 2
    groups = inter // GROUP
    for b in range(length):
        output = first + 2 * b
        low = simd.load_word64(values + output * inter // 2 + 8 * group)
        high = simd.load_word64(values + (output + 1) * inter // 2 + 8 * group)
        for a in range(count):
            shift = np.uint64(4 * neurons[a])
            byte = ((low >> shift) & np.uint64(15)) | (((high >> shift) & np.uint64(15)) << np.uint64(4))
            rows[a, b] = np.uint8(byte)
        row_scales[2 * b] = simd.load_byte(scales + output * groups + group)
        row_scales[2 * b + 1] = simd.load_byte(scales + (output + 1) * groups + group)


@jit
def _add_scaled(scales, even, odd, y_even, y_odd):
    """y += scale * sum for sixteen outputs."""
    scale_even, scale_odd = simd.load_e4m3_pairs(scales)
    simd.store_f32(y_even, simd.fma(scale_even, even, simd.load_f32(y_even)))
    simd.store_f32(y_odd, simd.fma(scale_odd, odd, simd.load_f32(y_odd)))


@jit
def _add_group(rows_at, row_scales, blocks, heights, count, y_even, y_odd):
    """y += scale * (sum over rows, ascending, of code * height), sixteen outputs a block, two blocks at once."""
    block = 0
    while block + 2 <= blocks:
        even, odd, even_2, odd_2 = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
        for a in range(count):
            low, high, low_2, high_2 = simd.load_e2m1_twice(rows_at[a] + 8 * block)
            height = simd.splat(heights[a])
            even, odd = simd.fma(low, height, even), simd.fma(high, height, odd)
            even_2, odd_2 = simd.fma(low_2, height, even_2), simd.fma(high_2, height, odd_2)
        at = 32 * block
        _add_scaled(row_scales + 16 * block, even, odd, y_even + at, y_odd + at)
        _add_scaled(row_scales + 16 * block + 16, even_2, odd_2, y_even + at + 32, y_odd + at + 32)
        block += 2
    if block < blocks:
        even, odd = simd.zeros(), simd.zeros()
        for a in range(count):
            low, high = simd.load_e2m1(rows_at[a] + 8 * block)
            height = simd.splat(heights[a])
            even, odd = simd.fma(low, height, even), simd.fma(high, height, odd)
        _add_scaled(row_scales + 16 * block, even, odd, y_even + 32 * block, y_odd + 32 * block)


@jit
def _prefetch_rows(active, first, row_bytes, length):
    """Ask for the active rows of a group while another is worked on: which rows come next no hardware can guess."""
    bits = np.uint32(active)
    while bits != 0:
        row = first + np.int64(simd.count_trailing_zeros(bits)) * row_bytes
        bits &= bits - np.uint32(1)
        for line in range(0, length, 64):
            simd.prefetch(row + line)


@jit
def _down_kernel(part, parts, addresses, layout, scales_2, weights, h, active, out):
    experts, inter = h.shape
    width = out.shape[0]
    # Blocks of sixteen outputs share the bytes of packed values and scales.
    first, last = width // GROUP * part // parts * GROUP, width // GROUP * (part + 1) // parts * GROUP
    length = (last - first) // 2
    if length == 0:
        return
    y_even, y_odd = np.empty(length, np.float32), np.empty(length, np.float32)
    sum_even, sum_odd = np.zeros(length, np.float32), np.zeros(length, np.float32)
    neurons, heights, rows_at = np.empty(GROUP, np.int64), np.empty(GROUP, np.float32), np.empty(GROUP, np.int64)
    gathered, gathered_scales = np.empty((GROUP, length), np.uint8), np.empty(2 * length, np.uint8)
    for k in range(experts):
        down = addresses[k] + inter * width // 2 + inter * width // GROUP
        scales = down + inter * width // 2
        y_even[:] = 0
        y_odd[:] = 0
        for group in range(inter // GROUP):
            bits = np.uint32(active[k, group])
            if bits == 0:
                continue
            count = 0
            while bits != 0:
                place = np.int64(simd.count_trailing_zeros(bits))
                bits &= bits - np.uint32(1)
                neuron = group * GROUP + place
                neurons[count], heights[count] = place, h[k, neuron]
                rows_at[count] = down + (neuron * width + first) // 2
                count += 1
            if layout != _SOURCE and group + 1 < inter // GROUP:
                next_rows = down + ((group + 1) * GROUP * width + first) // 2
                _prefetch_rows(active[k, group + 1], next_rows, width // 2, length)
            scales_at = scales + group * width + first
            if layout == _SOURCE:
                gather_source(down, scales, inter, group, first, last, neurons, count, gathered, gathered_scales)
                for a in range(count):
                    rows_at[a] = simd.address_of(gathered) + a * length
                scales_at = simd.address_of(gathered_scales)
            _add_group(rows_at, scales_at, length // 8, heights, count, simd.address_of(y_even), simd.address_of(y_odd))
        factor = weights[k] * (scales_2[k, 1] * _DOWN_UNIT)
        for b in range(length):
            sum_even[b] += factor * y_even[b]
            sum_odd[b] += factor * y_odd[b]
    for b in range(length):
        out[first + 2 * b] = sum_even[b]
        out[first + 2 * b + 1] = sum_odd[b]


class ExpertStep:
    """The step for one shape and layout, with its scratch memory.

    inter, width  I and X, multiples of 16
    top_k         experts a token at most
    layout        "neuron" or "source"
    .h            float32 [top_k, I]: neurons of the last step, after ReLU^2
    .active       uint16 [top_k, I/16]: which neurons of each group were active, lowest neuron in the lowest bit
    """

    def __init__(self, inter: int, width: int, top_k: int, layout: str):
        if inter % GROUP or width % GROUP:
            raise EngineError(f"experts of {inter} neurons and {width} outputs; NVFP4 needs multiples of {GROUP}")
        self.inter, self.width, self.layout = inter, width, LAYOUTS[layout]
        self.payload_bytes = 2 * inter * width // 2 + 2 * inter * width // GROUP
        self.h = np.empty((top_k, inter), np.float32)
        self.active = np.empty((top_k, inter // GROUP), np.uint16)
        self._even, self._odd = np.empty(width // 2, np.float32), np.empty(width // 2, np.float32)

    def run(
        self,
        team: Team,
        addresses: np.ndarray,
        block_bytes: int,
        scales_2: np.ndarray,
        weights: np.ndarray,
        x: np.ndarray,
        out: np.ndarray,
        active: np.ndarray | None = None,
    ) -> None:
        """out = the weighted sum of the experts at these addresses.

        addresses    int64 [k] of blocks in rank order, k <= top_k; each block_bytes long
        scales_2     float32 [k, 2]: weight_scale_2 of up and down; weights float32 [k]
        x, out       float32 [X]
        active       where to write what `.active` holds else
        Raises EngineError where sizes do not fit.
        """
        k = addresses.shape[0]
        if block_bytes < self.payload_bytes or k > self.h.shape[0] or (scales_2.shape, weights.shape) != ((k, 2), (k,)):
            raise EngineError(
                f"{k} experts in blocks of {block_bytes} bytes, scales {scales_2.shape}, weights {weights.shape}; "
                f"at most {self.h.shape[0]} in blocks of {self.payload_bytes} bytes, ({k}, 2) and ({k},) are needed"
            )
        if x.shape != (self.width,) or out.shape != (self.width,):
            raise EngineError(f"vectors of {x.shape} and {out.shape}; ({self.width},) is needed")
        split_even_odd(x, self._even, self._odd)
        h, active = self.h[:k], (self.active if active is None else active)[:k]
        work = k * self.payload_bytes // 2
        team.run(_up_kernel, work, addresses, scales_2, self._even, self._odd, h, active)
        team.run(_down_kernel, work, addresses, self.layout, scales_2, weights, h, active, out)
