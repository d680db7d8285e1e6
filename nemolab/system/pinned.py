"""What pinned memory for a cache really takes.

PyTorch's caching allocator of pinned memory (CachingHostAllocator) rounds every request up to a power of two, so that
one block of 3,096,576 bytes costs 4 MiB and one tensor of 20 GB costs 32 GiB. Memory that is mapped in whole pages and
then registered with the driver costs what it holds.
"""

from dataclasses import dataclass

from nemolab.units import whole_pages


@dataclass(frozen=True)
class Footprint:
    """planned_bytes  what the blocks hold; real_bytes  what the machine gives for them"""

    strategy: str
    planned_bytes: int
    real_bytes: int


def pinned_footprints(blocks: int, block_bytes: int) -> list[Footprint]:
    """Planned and real bytes of `blocks` pinned blocks: one pin a block, one tensor for all, registered pages."""
    planned = blocks * block_bytes
    registered = whole_pages(planned)
    return [
        Footprint("one pin a block", planned, blocks * _power_of_two(block_bytes)),
        Footprint("one pinned tensor", planned, _power_of_two(planned)),
        Footprint("registered pages", planned, registered),
    ]


def _power_of_two(count: int) -> int:
    """The least power of two that is no less; 0 stays 0."""
    return 1 << (count - 1).bit_length() if count > 0 else 0
