"""Memory for blocks: one page-aligned anonymous mapping, cut into rows, grown by touch."""

import numpy as np

from nemolab.errors import StoreError
from nemolab.store.direct_io import private_memory
from nemolab.units import PAGE_BYTES


class Arena:
    """`rows` blocks of `row_bytes` each.

    The whole range is reserved at once, so a row's address never changes; the kernel gives a page only when it is
    first written, so an arena takes as much memory as it was ever filled.
    .rows  uint8 [rows, row_bytes]
    Raises StoreError where the range cannot be reserved.
    """

    def __init__(self, rows: int, row_bytes: int):
        if rows < 0 or row_bytes <= 0 or row_bytes % PAGE_BYTES:
            raise StoreError(f"an arena of {rows} rows of {row_bytes} bytes; rows are whole pages of {PAGE_BYTES}")
        self.row_bytes = row_bytes
        self.reserved_bytes = rows * row_bytes
        try:
            self._memory = private_memory(self.reserved_bytes)
        except (OSError, OverflowError, ValueError) as problem:
            raise StoreError(
                f"cannot reserve {self.reserved_bytes:,} bytes of memory for {rows} blocks ({problem}); ask for less"
            ) from None
        self.rows = np.frombuffer(self._memory, np.uint8, self.reserved_bytes).reshape(rows, row_bytes)

    def close(self) -> None:
        """Give the memory back. Views that someone still holds keep it alive until they are dropped."""
        self.rows = None
        if self._memory is not None:
            try:
                self._memory.close()
            except BufferError:  # views are out there; the mapping goes with the last of them
                pass
            self._memory = None
