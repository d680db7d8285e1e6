"""Read a checkpoint's shards in long aligned pieces, past the page cache where that works.

Tensors lie at any byte; direct reads begin and end at multiples of a page or so. Each read therefore takes the aligned
range around what is wanted, into aligned memory, and hands out views of it. Neighbours come in one read.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemolab.checkpoint import Checkpoint
from nemolab.errors import CheckpointError
from nemolab.store import direct_io
from nemolab.units import PAGE_BYTES, whole_pages

GAP_BYTES = 64 << 10  # neighbours this close come in one read: reading on is cheaper than asking again
_OPEN_FILES = 256  # more shards than that are opened anew for each read
_WIDEST_ALIGNMENT = 64 << 10


class Piece(NamedTuple):
    """Bytes wanted of a shard."""

    shard: str
    offset_bytes: int
    nbytes: int


class _File:
    """An open shard. `align_bytes` is 1 where it is read through the page cache."""

    def __init__(self, path: Path, descriptor: int, align_bytes: int):
        self.path, self.descriptor, self.align_bytes = path, descriptor, align_bytes


class SourceReader:
    """The shards of a checkpoint, opened when first read. Safe for several threads, each with a Scratch of its own.

    Raises CheckpointError, naming file and place, for what cannot be read, and for a shard that is no longer as large
    as when its header was read. Close it, or use it in a `with` block.
    """

    def __init__(self, checkpoint: Checkpoint, announce: Callable[[str], None], direct: bool = True):
        self._folder, self._announce, self._want_direct = checkpoint.path, announce, direct
        self._sizes = {name: header.file_bytes for name, header in checkpoint.headers.items()}
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()
        self._objection = ""

    @property
    def direct(self) -> bool:
        """Whether all reads so far bypassed the page cache, as far as open and read tell."""
        return self._want_direct and not self._objection

    def __enter__(self) -> "SourceReader":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def read(self, pieces: Sequence[Piece], scratch: "Scratch") -> list[np.ndarray]:
        """The bytes of each piece, uint8, as views of `scratch` that are valid until its next use."""
        spans = join(pieces)
        scratch.need(sum(span[-1] - span[1] for span in spans) + 2 * len(spans) * _WIDEST_ALIGNMENT)
        found: list[np.ndarray] = [None] * len(pieces)
        place = 0
        for shard, start, members, end in spans:
            place = whole_pages(place)
            data, place = self._read_span(shard, start, end, scratch.memory, place)
            for index in members:
                piece = pieces[index]
                found[index] = data[piece.offset_bytes - start : piece.offset_bytes - start + piece.nbytes]
        return found

    def close(self) -> None:
        """Close every shard. Closing twice is fine."""
        for file in self._files.values():
            direct_io.close_quietly(file.descriptor)
        self._files = {}

    def _read_span(self, shard: str, start: int, end: int, memory: np.ndarray, place: int) -> tuple[np.ndarray, int]:
        """Bytes start..end of a shard, and the first byte of `memory` behind them."""
        file = self._open(shard)
        try:
            try:
                return self._read_aligned(file, start, end, memory, place)
            except OSError as problem:
                if file.align_bytes == 1 or problem.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                file = self._fall_back(shard, f"an aligned read fails ({errno.errorcode[problem.errno]})")
                return self._read_aligned(file, start, end, memory, place)
        except OSError as problem:
            raise CheckpointError(
                f"{file.path}: reading {end - start:,} bytes at offset {start:,} failed: {problem.strerror or problem}"
            ) from problem
        finally:
            if shard not in self._files:
                direct_io.close_quietly(file.descriptor)

    def _read_aligned(self, file: _File, start: int, end: int, memory: np.ndarray, place: int):
        first = start // file.align_bytes * file.align_bytes
        last = -(-end // file.align_bytes) * file.align_bytes
        view = memoryview(memory)[place : place + last - first]
        got, needed = 0, end - first
        while got < needed:
            try:
                count = os.preadv(file.descriptor, [view[got:]], first + got)
            except InterruptedError:
                continue
            if count == 0 or (got + count < needed and (got + count) // file.align_bytes * file.align_bytes <= got):
                raise CheckpointError(
                    f"{file.path} ended early: wanted {end - start:,} bytes at offset {start:,}, got "
                    f"{max(0, got + count - (start - first)):,}; was it changed while it was read?"
                )
            got += count
            if got < needed:  # a direct read goes on at a multiple of its alignment
                got = got // file.align_bytes * file.align_bytes
        return memory[place + start - first : place + end - first], place + last - first

    def _open(self, shard: str) -> _File:
        with self._lock:
            file = self._files.get(shard)
            if file is None:
                file = self._open_file(shard, self._want_direct and not self._objection)
                if len(self._files) < _OPEN_FILES:
                    self._files[shard] = file
            return file

    def _open_file(self, shard: str, direct: bool) -> _File:
        path = self._folder / shard
        descriptor, align_bytes = None, 1
        try:
            if direct:
                descriptor, self._objection = direct_io.open_direct(path, os.O_RDONLY)
            if descriptor is not None:
                align_bytes, self._objection = _find_alignment(descriptor)
                if self._objection:
                    direct_io.close_quietly(descriptor)
                    descriptor, align_bytes = None, 1
            if descriptor is None:
                if direct:
                    self._announce(f"{self._folder}: reading through the page cache, because {self._objection}")
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(descriptor).st_size
        except OSError as problem:
            raise CheckpointError(f"{path} cannot be opened: {problem.strerror or problem}") from problem
        if found != self._sizes[shard]:
            direct_io.close_quietly(descriptor)
            raise CheckpointError(
                f"{path} has {found:,} bytes now and had {self._sizes[shard]:,}: it was changed while it was read"
            )
        return _File(path, descriptor, align_bytes)

    def _fall_back(self, shard: str, why: str) -> _File:
        """Read this shard, and those opened from now on, through the page cache; said once."""
        with self._lock:
            if not self._objection:
                self._objection = why
                self._announce(f"{self._folder}: reading through the page cache, because {why}")
            file = self._open_file(shard, direct=False)
            before = self._files.get(shard)
            if before is not None:
                if before.align_bytes == 1:  # another thread was here first
                    direct_io.close_quietly(file.descriptor)
                    return before
                # Others may be reading from it: the descriptor stays theirs, and leads to the buffered file.
                os.dup2(file.descriptor, before.descriptor, inheritable=False)
                direct_io.close_quietly(file.descriptor)
                file = self._files[shard] = _File(before.path, before.descriptor, 1)
            return file


class Scratch:
    """A thread's own page-aligned memory, grown when it must be."""

    def __init__(self):
        self.memory = direct_io.aligned_buffer(0)

    def need(self, nbytes: int) -> None:
        if self.memory.nbytes < nbytes:
            self.memory = direct_io.aligned_buffer(nbytes)


def join(pieces: Sequence[Piece], gap_bytes: int = GAP_BYTES) -> list[tuple[str, int, list[int], int]]:
    """Pieces joined where they are neighbours: (shard, start, indices of its pieces, end), in file order."""
    spans: list[tuple[str, int, list[int], int]] = []
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index][:2]):
        shard, start, nbytes = pieces[index]
        if spans and spans[-1][0] == shard and start <= spans[-1][3] + gap_bytes:
            before = spans[-1]
            spans[-1] = shard, before[1], [*before[2], index], max(before[3], start + nbytes)
        else:
            spans.append((shard, start, [index], start + nbytes))
    return spans


def piece_of(entry) -> Piece:
    """All of a tensor."""
    return Piece(entry.shard, entry.offset_bytes, entry.nbytes)


def runs(pieces: Sequence[Piece], limit_bytes: int) -> Iterable[list[int]]:
    """Indices of pieces in runs of neighbours, each no longer than `limit_bytes` from end to end."""
    run: list[int] = []
    for index in sorted(range(len(pieces)), key=lambda index: pieces[index][:2]):
        shard, start, nbytes = pieces[index]
        if run:
            first, last = pieces[run[0]], pieces[run[-1]]
            near = shard == last.shard and start <= last.offset_bytes + last.nbytes + GAP_BYTES
            if not near or start + nbytes - first.offset_bytes > limit_bytes:
                yield run
                run = []
        run.append(index)
    if run:
        yield run


def _find_alignment(descriptor: int) -> tuple[int, str]:
    """What reads must be multiples of, or why direct ones do not suit."""
    wants = direct_io.ask_alignment(descriptor)
    align_bytes = max(PAGE_BYTES, wants.for_reads_bytes) if wants else PAGE_BYTES
    return align_bytes, direct_io.object_to(_WIDEST_ALIGNMENT, wants)
