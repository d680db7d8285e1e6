"""Fill `experts.bin`: read each expert's tensors, lay them out as a block, write it; keep blocks that are there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from nemolab.checkpoint import Checkpoint, Module
from nemolab.checkpoint.checkpoint import check_expert_scales
from nemolab.errors import CheckpointError, StoreError
from nemolab.store import direct_io, files
from nemolab.store.journal import Journal
from nemolab.store.layout import BlockLayout, ExpertViews
from nemolab.store.nibbles import choose_transpose
from nemolab.store.source_reader import Scratch, SourceReader, piece_of, runs
from nemolab.store.verify import find_difference, sample_blocks
from nemolab.store.workers import work_through
from nemolab.store.writer import PlacedFile

_SAMPLE = 16  # blocks at most that are read back and compared with the source before a store is called finished
_RUN_BYTES = 4 << 20


class ExpertFile:
    """`experts.bin` to be: reserved when made, filled by `write`, under its name after `finish`.

    experts    block index -> (up module, down module)
    .kept      blocks that an earlier run had written and that still check out
    .direct    whether writes were seen to bypass the page cache
    """

    def __init__(
        self,
        folder: Path,
        experts: list[tuple[Module, Module]],
        blocks: BlockLayout,
        announce: Callable[[str], None],
        keep: bool,
    ):
        self._experts, self._blocks = experts, blocks
        self._final = folder / files.EXPERTS
        self._partial = self._final.with_name(self._final.name + files.PARTIAL)
        self.nbytes = len(experts) * blocks.block_bytes
        self._file = PlacedFile(self._partial, self.nbytes, blocks.block_bytes, announce, keep=keep)
        self.direct = self._file.direct
        self.kept = 0

    def write(
        self,
        reader: SourceReader,
        journal: Journal,
        workers: int,
        count: Callable[[int], None],
        on_tick: Callable[[], None],
    ) -> np.ndarray:
        """Make every block that is not there yet; returns the crc32 of each, uint32 [blocks]."""
        checksums = np.zeros(len(self._experts), np.uint32)
        block_bytes = self._blocks.block_bytes
        transpose = choose_transpose(self.nbytes)
        kept: list[int] = []

        def prepare() -> Callable[[int], None]:
            block, scratch = direct_io.aligned_buffer(block_bytes), Scratch()

            def make(index: int) -> None:
                recorded = journal.blocks.get(index)
                there = recorded is not None and self._file.read(index * block_bytes, block)
                if there and files.crc32(block) == recorded:
                    kept.append(index)
                    checksums[index] = recorded
                else:
                    self._blocks.pack(self._read(index, reader, scratch), block, transpose)
                    checksums[index] = files.crc32(block)
                    self._file.write(index * block_bytes, block)
                    journal.add_block(index, int(checksums[index]))
                count(block_bytes)

            return make

        try:
            work_through(self._in_source_order(), prepare, min(workers, len(self._experts)), on_tick)
        finally:
            self.kept = len(kept)
        return checksums

    def finish(self) -> None:
        """Wait until the blocks are on the disk, then give the file its name."""
        self._file.finish()
        files.rename(self._partial, self._final)

    def check_sample(self, checkpoint: Checkpoint, workers: int) -> None:
        """Read some blocks back and compare them with the source, by the definition of the layout."""

        def check(index: int) -> None:
            block = direct_io.aligned_buffer(self._blocks.block_bytes)
            layer, expert = divmod(index, checkpoint.config.n_experts)
            if not self._file.read(index * block.nbytes, block):
                raise StoreError(f"{self._final}: block {index} cannot be read back; nothing is kept")
            difference = find_difference(self._blocks, block, checkpoint.expert(layer, expert))
            if difference:
                raise StoreError(
                    f"{self._final}: block {index} (layer {checkpoint.config.moe_layers[layer]}, expert {expert}) was "
                    f"read back and is not what the source holds: {difference[1]}; nothing is kept"
                )

        sample = sample_blocks(len(self._experts), min(_SAMPLE, 2 + len(self._experts) // 256))
        work_through(sample, lambda: check, min(workers, len(sample)))

    def close(self) -> None:
        self._file.close()

    def _read(self, index: int, reader: SourceReader, scratch: Scratch) -> ExpertViews:
        """The published planes of an expert, in `scratch`. Raises CheckpointError for unusable scales, with place."""
        up, down = self._experts[index]
        entries = [module.tensors[suffix] for module in (up, down) for suffix in ("weight", "weight_scale")]
        shapes = self._blocks.source_shapes.values()
        data = reader.read([piece_of(entry) for entry in entries], scratch)
        planes = ExpertViews(*(bytes_.reshape(shape) for bytes_, shape in zip(data, shapes, strict=True)))
        check_expert_scales(planes, up, down)
        return planes

    def _in_source_order(self) -> list[int]:
        """Block indices in the order in which their up matrices lie in the shards."""

        def place(index: int) -> tuple[str, int]:
            entry = self._experts[index][0].tensors["weight"]
            return entry.shard, entry.offset_bytes

        return sorted(range(len(self._experts)), key=place)


def read_global_scales(
    experts: list[tuple[Module, Module]], reader: SourceReader, workers: int, on_tick: Callable[[], None]
) -> np.ndarray:
    """`weight_scale_2` of every expert, float32 [blocks, 2]: up, down. Most lie side by side, far from the rest.

    Raises CheckpointError for one that is not a finite factor of 0 or more.
    """
    entries = [module.tensors["weight_scale_2"] for pair in experts for module in pair]
    pieces = [piece_of(entry) for entry in entries]
    scales = np.zeros(len(entries), np.float32)

    def prepare() -> Callable[[list[int]], None]:
        scratch = Scratch()

        def read_run(run: list[int]) -> None:
            for index, data in zip(run, reader.read([pieces[index] for index in run], scratch), strict=True):
                scales[index] = data.view("<f4")[0]

        return read_run

    work_through(runs(pieces, _RUN_BYTES), prepare, workers, on_tick)
    bad = np.flatnonzero(~(np.isfinite(scales) & (scales >= 0)))
    if len(bad):
        entry = entries[bad[0]]
        raise CheckpointError(
            f"{entry.source_name} in {entry.shard} is {scales[bad[0]]}; a finite factor >= 0 was expected"
        )
    return scales.reshape(-1, 2)
