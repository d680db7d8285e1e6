"""What an expert cache counts, by phase."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Counts:
    """What happened in one phase.

    lost    blocks issued here that never arrived and that nobody asked for
    reread  hits of a prompt that had to leave for its misses, and were read again
    """

    hits: int = 0
    misses: int = 0
    issued: int = 0
    useful: int = 0
    wasted: int = 0
    late: int = 0
    lost: int = 0
    reread: int = 0

    def to_dict(self, block_bytes: int, lost: int = 0) -> dict[str, int]:
        """lost: further reads that came to nothing and are still counted on."""
        reads = self.misses + self.issued + self.reread - self.lost - lost
        return {
            "lookups": self.hits + self.misses,
            "hits": self.hits,
            "misses": self.misses,
            "reads": reads,
            "bytes_read": reads * block_bytes,
            "prefetch_issued": self.issued,
            "prefetch_useful": self.useful,
            "prefetch_wasted": self.wasted,
            "prefetch_late": self.late,
        }


NOTHING = Counts().to_dict(0)  # the stats of a phase that saw no lookup
