"""Where the planes of an expert lie in its block, and the exact way from the published bytes there and back.

A block holds four planes, one after another, then zeros up to a whole page. I is the expert's inner size (neurons),
X its input and output size (latent or hidden), both counted in values; two NVFP4 codes share a byte, 16 a scale.

| plane       | `source`, as published | `neuron`         |
|-------------|------------------------|------------------|
| up_values   | [I, X/2]               | [I, X/2]         |
| up_scales   | [I, X/16]              | [I, X/16]        |
| down_values | [X, I/2]               | [I, X/2]         |
| down_scales | [X, I/16]              | [I/16, X]        |

A published byte of down holds two neighbouring neurons of one output, so no order of bytes keeps one neuron apart.
`neuron` pairs the nibbles anew: byte b of a neuron's row holds output 2b in its low and 2b+1 in its high nibble.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from nemolab.checkpoint.formats import GROUP
from nemolab.errors import StoreError
from nemolab.store.nibbles import Transpose, transpose_nibbles
from nemolab.units import whole_pages

LAYOUTS = ("neuron", "source")


class ExpertViews(NamedTuple):
    """The planes of one expert as uint8 arrays over its block; shapes by layout, see the module."""

    up_values: np.ndarray
    up_scales: np.ndarray
    down_values: np.ndarray
    down_scales: np.ndarray


class Plane(NamedTuple):
    """One plane of a block: where it starts and its shape in bytes."""

    name: str
    offset_bytes: int
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BlockLayout:
    """How one expert lies in its block.

    name          `neuron` or `source`
    expert_inter  I, a multiple of 16
    expert_in     X, even; a last group of fewer than 16 values still has its own scale
    Raises StoreError for an unknown name or sizes that cannot be packed.
    """

    name: str
    expert_inter: int
    expert_in: int

    def __post_init__(self):
        if self.name not in LAYOUTS:
            raise StoreError(f"unknown layout {self.name!r}; known: {', '.join(LAYOUTS)}")
        if self.expert_inter <= 0 or self.expert_inter % GROUP:
            raise StoreError(
                f"an expert of {self.expert_inter} neurons does not split into groups of {GROUP}; "
                f"the layout needs a positive multiple of {GROUP}"
            )
        if self.expert_in <= 0 or self.expert_in % 2:
            raise StoreError(
                f"an expert of {self.expert_in} outputs does not pack two to a byte; an even size is needed"
            )

    @cached_property
    def source_shapes(self) -> dict[str, tuple[int, int]]:
        """Plane name to shape in bytes as the checkpoint stores it."""
        inter, width = self.expert_inter, self.expert_in
        return {
            "up_values": (inter, width // 2),
            "up_scales": (inter, -(-width // GROUP)),
            "down_values": (width, inter // 2),
            "down_scales": (width, inter // GROUP),
        }

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes in block order."""
        shapes = dict(self.source_shapes)
        if self.name == "neuron":
            shapes["down_values"] = (self.expert_inter, self.expert_in // 2)
            shapes["down_scales"] = (self.expert_inter // GROUP, self.expert_in)
        planes, offset = [], 0
        for name in ExpertViews._fields:
            planes.append(Plane(name, offset, shapes[name]))
            offset += planes[-1].nbytes
        return tuple(planes)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of an expert without padding."""
        return sum(plane.nbytes for plane in self.planes)

    @cached_property
    def up_bytes(self) -> int:
        """Of an expert's up, values and scales: a block begins with them."""
        return self.planes[0].nbytes + self.planes[1].nbytes

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block: the payload, padded with zeros to whole pages."""
        return whole_pages(self.payload_bytes)

    def views(self, block: np.ndarray) -> ExpertViews:
        """The planes of `block`, uint8 [payload_bytes or more], without copying."""
        return ExpertViews(*(block[p.offset_bytes : p.offset_bytes + p.nbytes].reshape(p.shape) for p in self.planes))

    def pack(self, source: ExpertViews, block: np.ndarray, transpose: Transpose = transpose_nibbles) -> None:
        """Write the published planes into `block`, uint8 [block_bytes], and zero its padding.

        source     planes in `source_shapes`, each contiguous
        transpose  how nibbles are transposed, for callers with many experts
        """
        for name, plane in zip(ExpertViews._fields, source, strict=True):
            if plane.shape != self.source_shapes[name]:
                raise StoreError(f"{name} has shape {plane.shape}; the layout needs {self.source_shapes[name]}")
        views = self.views(block)
        views.up_values[...] = source.up_values
        views.up_scales[...] = source.up_scales
        if self.name == "neuron":
            transpose(source.down_values, views.down_values)
            views.down_scales[...] = source.down_scales.T
        else:
            views.down_values[...] = source.down_values
            views.down_scales[...] = source.down_scales
        block[self.payload_bytes :] = 0

    def unpack(self, block: np.ndarray) -> ExpertViews:
        """The published planes of a block, in their own memory: the inverse of `pack`."""
        views = self.views(block)
        planes = {name: np.empty(shape, np.uint8) for name, shape in self.source_shapes.items()}
        planes["up_values"][...] = views.up_values
        planes["up_scales"][...] = views.up_scales
        if self.name == "neuron":
            transpose_nibbles(views.down_values, planes["down_values"])
            planes["down_scales"][...] = views.down_scales.T
        else:
            planes["down_values"][...] = views.down_values
            planes["down_scales"][...] = views.down_scales
        return ExpertViews(**planes)
