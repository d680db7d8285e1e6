"""Copy the dense tensors of a checkpoint into one safetensors file: in parallel, nothing larger than a chunk."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from nemolab.checkpoint import TensorEntry
from nemolab.checkpoint.values import check_piece
from nemolab.store import files
from nemolab.store.source_reader import Piece, Scratch, SourceReader
from nemolab.store.tensor_file import Written, file_head, in_file_order
from nemolab.store.workers import work_through
from nemolab.store.writer import PlacedFile

_UNIT_BYTES = 64 << 10  # a multiple of every alignment that direct writes are known to want


class DenseFile:
    """`dense.safetensors` to be: reserved when made, filled by `copy`, under its name after `finish`."""

    def __init__(self, path: Path, entries: Sequence[TensorEntry], announce: Callable[[str], None]):
        self._path, self._partial = path, path.with_name(path.name + files.PARTIAL)
        self._entries = in_file_order(entries)
        self._head = file_head(self._entries)
        self._starts, place = [], len(self._head)
        for entry in self._entries:
            self._starts.append(place)
            place += entry.nbytes
        self.nbytes = place
        self._file = PlacedFile(self._partial, self.nbytes, _UNIT_BYTES, announce)

    def copy(
        self, reader: SourceReader, workers: int, count: Callable[[int], None], on_tick: Callable[[], None]
    ) -> Written:
        """Read every tensor once and write it. count is told the bytes of each chunk.

        Raises CheckpointError for values nobody can use (NaN, impossible factors), with tensor and place.
        """
        starts = range(0, self.nbytes, files.CHUNK_BYTES)
        sums: list[list[tuple[int, int, int]]] = [[] for _ in starts]  # by chunk: tensor (-1: head), crc32, bytes

        def prepare() -> Callable[[int], None]:
            scratch, buffer = Scratch(), Scratch()

            def copy_chunk(number: int) -> None:
                start = starts[number]
                end = min(start + files.CHUNK_BYTES, self.nbytes)
                rounded = -(-(end - start) // _UNIT_BYTES) * _UNIT_BYTES
                buffer.need(rounded)
                chunk = buffer.memory[:rounded]
                sums[number] = self._fill(chunk, start, end, reader, scratch)
                chunk[end - start :] = 0
                self._file.write(start, chunk)
                count(end - start)

            return copy_chunk

        work_through(range(len(starts)), prepare, min(workers, len(starts)), on_tick)
        return self._add_up(sums)

    def finish(self) -> None:
        """Wait until the bytes are on the disk, then give the file its name."""
        self._file.finish()
        files.rename(self._partial, self._path)

    def close(self) -> None:
        self._file.close()

    def _fill(
        self, chunk: np.ndarray, start: int, end: int, reader: SourceReader, scratch: Scratch
    ) -> list[tuple[int, int, int]]:
        """Bytes start..end of the file into `chunk`; the crc32 of each part."""
        parts = list(self._parts(start, end))
        pieces = [Piece(entry.shard, entry.offset_bytes + skip, size) for _, entry, skip, size in parts]
        place, sums = 0, []
        if start < len(self._head):
            head = np.frombuffer(self._head, np.uint8)[start:end]
            chunk[: head.nbytes] = head
            sums.append((-1, files.crc32(head), head.nbytes))
            place = head.nbytes
        for (tensor, entry, skip, _), data in zip(parts, reader.read(pieces, scratch), strict=True):
            there = chunk[place : place + data.nbytes]
            there[:] = data
            check_piece(entry, skip, there)
            sums.append((tensor, files.crc32(there), data.nbytes))
            place += data.nbytes
        return sums

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, TensorEntry, int, int]]:
        """(tensor, its entry, bytes skipped of it, bytes taken) for what of the tensors lies in start..end."""
        first = max(0, bisect_right(self._starts, start) - 1)
        for tensor in range(first, len(self._entries)):
            if self._starts[tensor] >= end:
                return
            skip = max(0, start - self._starts[tensor])
            size = min(self._entries[tensor].nbytes, end - self._starts[tensor]) - skip
            if size > 0:
                yield tensor, self._entries[tensor], skip, size

    def _add_up(self, sums: list[list[tuple[int, int, int]]]) -> Written:
        whole, tensors = 0, {entry.name: 0 for entry in self._entries}
        for tensor, crc, size in (part for chunk in sums for part in chunk):
            whole = files.combine_crc32(whole, crc, size)
            if tensor >= 0:
                name = self._entries[tensor].name
                tensors[name] = files.combine_crc32(tensors[name], crc, size)
        return Written(self.nbytes, whole, tensors)


def is_intact(path: Path, recorded: Written | None) -> bool:
    """Whether a finished file is what the journal says: looked at, byte for byte."""
    if recorded is None or not path.is_file() or path.is_symlink() or os.path.getsize(path) != recorded.nbytes:
        return False
    return files.file_crc32(path) == recorded.crc32
