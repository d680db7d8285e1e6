"""Rewrite a checkpoint as a store: one padded block an expert, streaming, finished only when all of it is on disk."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nemolab.checkpoint import Checkpoint
from nemolab.errors import CheckpointError, StoreError
from nemolab.progress import Progress, say
from nemolab.store import contents, files
from nemolab.store.dense_file import DenseFile, is_intact
from nemolab.store.expert_file import ExpertFile, read_global_scales
from nemolab.store.layout import BlockLayout
from nemolab.store.manifest import EXPERT_FORMAT, Manifest
from nemolab.store.source_reader import SourceReader
from nemolab.store.target import Target
from nemolab.store.tensor_file import Outgoing, Written, write_tensor_file
from nemolab.store.verify import verify
from nemolab.store.workers import work_through

# Experts under way at once: enough to keep a disk busy while some wait for a core; more only wait for one another.
WORKERS = max(4, min(16, 4 * (os.cpu_count() or 1)))
BUFFER_BYTES = 256 << 20  # for all workers together: fewer of them where experts are huge


@dataclass(frozen=True)
class RepackResult:
    """What a repack did. `bytes_written` is 0 and `already_complete` true where the same store was there already.

    resumed_blocks  blocks kept from a run that was killed: written by it, read again and found whole
    direct_io       whether blocks were written past the page cache, as far as the kernel tells
    source_direct   the same of reading the checkpoint
    """

    blocks: int
    block_bytes: int
    bytes_written: int
    seconds: float
    direct_io: bool
    already_complete: bool = False
    resumed_blocks: int = 0
    source_direct: bool = False
    notes: list[str] = field(default_factory=list)


def repack(
    source: str | Path,
    target: str | Path,
    *,
    layout: str = "neuron",
    progress: Progress | None = None,
    announce: Callable[[str], None] = say,
) -> RepackResult:
    """Make a store of the checkpoint folder `source` in the folder `target`.

    progress  called from this thread with (bytes done, bytes in all), about ten times a second
    announce  told once about fallbacks, missing small files, a store that is there already and one that is gone on with
    Peak memory is a few hundred MB beside the checkpoint's headers, whatever the model's size. An interrupt or error
    removes what was written. After SIGKILL or a power cut what is left does not look finished; the next repack of the
    same source and layout keeps the blocks that still check out and ends with the same bytes.
    Raises CheckpointError for a bad source; StoreError for a target that holds something else, a full disk, experts
    that are not NVFP4 or hold NaN scales.
    """
    started_s = time.perf_counter()
    checkpoint = Checkpoint.open(Path(source).expanduser())
    blocks = contents.block_layout(checkpoint, layout)
    plan = contents.sort_contents(checkpoint)
    identity = {
        "layout": layout,
        "expert_inter": blocks.expert_inter,
        "expert_in": blocks.expert_in,
        "layers": len(checkpoint.config.moe_layers),
        "experts": checkpoint.config.n_experts,
        "source": contents.fingerprint(checkpoint),
    }
    touched = contents.touched(checkpoint)
    with Target(Path(target).expanduser(), identity, touched) as place:
        if place.finished is not None:
            return _accept_finished(place.finished, place.folder, checkpoint, identity, announce, started_s)
        job = _Job(checkpoint, plan, blocks, place, progress, _once(announce))
        manifest = job.run(identity)
        if _changed(checkpoint, identity, touched):
            raise StoreError(f"{checkpoint.path} was changed while it was repacked; nothing is kept, run it again")
        place.commit(manifest)
    return RepackResult(
        len(plan.experts),
        blocks.block_bytes,
        job.written_bytes,
        time.perf_counter() - started_s,
        manifest.direct_io,
        resumed_blocks=job.resumed_blocks,
        source_direct=job.source_direct,
        notes=checkpoint.notes,
    )


class _Job:
    """Every file of a store but its manifest."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: contents.Contents,
        blocks: BlockLayout,
        place: Target,
        progress: Progress | None,
        announce: Callable[[str], None],
    ):
        self._checkpoint, self._plan, self._blocks = checkpoint, plan, blocks
        self._place, self._announce = place, announce
        self._experts_bytes = len(plan.experts) * blocks.block_bytes
        self._dense_bytes = sum(entry.nbytes for entry in plan.dense)
        self._count = _Count(self._experts_bytes + self._dense_bytes, progress)
        self.workers = max(1, min(WORKERS, BUFFER_BYTES // (2 * blocks.block_bytes)))
        self.written_bytes = self.resumed_blocks = 0
        self.source_direct = False

    def run(self, identity: dict) -> Manifest:
        """Write it all; returns the manifest, unwritten."""
        checkpoint = self._checkpoint
        self._say_how_it_begins()
        self._place.reserve(self._experts_bytes + self._dense_bytes + self._rest_bytes())
        self._place.begin()
        with SourceReader(checkpoint, self._announce) as reader:
            globals_ = read_global_scales(self._plan.experts, reader, self.workers, self._count.show)
            dense, records, direct = self._write_large(reader, globals_)
            self.source_direct = reader.direct
        records |= self._copy_small_files()
        missing = contents.missing_small_files(checkpoint)
        if missing:  # said last: where the repack is refused, why is the one line to read
            self._announce(f"{checkpoint.path} has no {', '.join(missing)}; the store has not either")
        return Manifest(
            **identity,
            expert_format=EXPERT_FORMAT,
            files=records,
            dense_crc32=dense.tensors,
            direct_io=direct,
            left_out=self._plan.left_out,
            missing_small_files=missing,
        )

    def _copy_small_files(self) -> dict[str, dict[str, int]]:
        """Each waits for the disk at its end, so they wait together."""
        sources, records = self._checkpoint.small_files(), {}

        def copy(name: str) -> None:
            path = self._place.folder / name
            with files.finished_file(path) as file:
                file.write(_read_small(sources[name]))
            records[name] = _record(path)

        work_through(sources, lambda: copy, WORKERS, self._count.show)
        self.written_bytes += sum(record["bytes"] for record in records.values())
        return {name: records[name] for name in sources}

    def _rest_bytes(self) -> int:
        """What all but experts and dense data takes at most: small files, checksums, journal, headers, manifest."""
        small = [path.stat().st_size for path in self._checkpoint.small_files().values()]
        names = [name for names in self._plan.left_out.values() for name in names]
        listed = sum(len(name.encode()) + 8 for name in names) + 200 * len(self._plan.dense)
        return sum(small) + 4096 * len(small) + 64 * len(self._plan.experts) + listed + (256 << 10)

    def _write_large(self, reader: SourceReader, globals_: np.ndarray) -> tuple[Written, dict, bool]:
        """Everything that grows with the model: the dense file, the records of the manifest, and direct or not."""
        place, folder, count = self._place, self._place.folder, self._count
        with closing(
            ExpertFile(folder, self._plan.experts, self._blocks, self._announce, keep=place.resumes)
        ) as experts:
            dense = self._kept_dense()
            # Reserved before the first block is written: a disk that is too small is met now and not in an hour.
            dense_file = None if dense else DenseFile(folder / files.DENSE, self._plan.dense, self._announce)
            try:
                checksums = experts.write(reader, place.journal, self.workers, count.add, count.show)
                self.resumed_blocks = experts.kept
                self.written_bytes += self._experts_bytes - experts.kept * self._blocks.block_bytes
                experts.check_sample(self._checkpoint, self.workers)
                # A disk that empties its cache takes half of a plain copy's time: meanwhile the rest is copied.
                with ThreadPoolExecutor(1, thread_name_prefix="nemolab-flush") as flushing:
                    flushed = flushing.submit(experts.finish)
                    if dense_file is not None:
                        dense = dense_file.copy(reader, self.workers, count.add, count.show)
                        dense_file.finish()
                        place.journal.add_file(files.DENSE, dense)
                        self.written_bytes += dense.nbytes
                    flushed.result()
            finally:
                if dense_file is not None:
                    dense_file.close()
        records = {files.EXPERTS: {"bytes": self._experts_bytes}}
        with files.finished_file(folder / files.CHECKSUMS) as file:
            np.save(file, checksums)
        records[files.CHECKSUMS] = _record(folder / files.CHECKSUMS)
        shape = (len(self._checkpoint.config.moe_layers), self._checkpoint.config.n_experts, 2)
        scales = Outgoing("weight_scale_2", "F32", shape, globals_.nbytes, lambda: [globals_.view(np.uint8).ravel()])
        records[files.GLOBALS] = _as_record(write_tensor_file(folder / files.GLOBALS, [scales]))
        records[files.DENSE] = _as_record(dense)
        self.written_bytes += records[files.CHECKSUMS]["bytes"] + records[files.GLOBALS]["bytes"]
        return dense, records, experts.direct

    def _kept_dense(self) -> Written | None:
        """The dense file of an earlier run, if it is whole."""
        recorded = self._place.journal.files.get(files.DENSE)
        if not is_intact(self._place.folder / files.DENSE, recorded):
            (self._place.folder / files.DENSE).unlink(missing_ok=True)
            return None
        self._count.add(self._dense_bytes)
        return recorded

    def _say_how_it_begins(self) -> None:
        place = self._place
        if place.damage:
            self._announce(f"{place.damage[0]}: the store is made again")
        if place.resumes:
            self._announce(
                f"{place.folder}: going on with a repack that was cut off: {len(place.journal.blocks):,} of "
                f"{len(self._plan.experts):,} blocks were written; those that still check out are kept"
            )
        elif place.restarts:
            self._announce(
                f"{place.folder}: a repack was cut off there, and its source was touched since: it begins again"
            )


def _changed(checkpoint: Checkpoint, identity: dict, touched: dict) -> bool:
    try:
        return contents.fingerprint(checkpoint) != identity["source"] or contents.touched(checkpoint) != touched
    except (CheckpointError, OSError):
        return True


def _accept_finished(
    manifest: Manifest,
    folder: Path,
    checkpoint: Checkpoint,
    identity: dict,
    announce: Callable[[str], None],
    started_s: float,
) -> RepackResult:
    """The same store is there. Where the source's files were touched since, a look at the bytes decides."""
    note = f"{folder} is already this store, nothing was written"
    if manifest.source["files"] != identity["source"]["files"]:
        looked = verify(folder, source=checkpoint.path)
        if looked.mismatches:
            raise StoreError(
                f"{folder} holds a store of other weights in files of the same form: {looked.details[0]}; "
                "choose another folder or remove this one"
            )
        note += f" (its source's files have other times; {looked.checked} blocks were compared and agree)"
    announce(note)
    seconds = time.perf_counter() - started_s
    block_bytes = manifest.block_layout.block_bytes
    return RepackResult(manifest.blocks, block_bytes, 0, seconds, manifest.direct_io, True, notes=[note])


def _once(announce: Callable[[str], None]) -> Callable[[str], None]:
    """The same a second time (two files fall back, each in its own numbers) is not said."""
    said: set[str] = set()

    def tell(line: str) -> None:
        what = line.partition(", because")[0]
        if what not in said:
            said.add(what)
            announce(line)

    return tell


def _read_small(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from problem


def _record(path: Path) -> dict[str, int]:
    return {"bytes": path.stat().st_size, "crc32": files.file_crc32(path)}


def _as_record(written: Written) -> dict[str, int]:
    return {"bytes": written.nbytes, "crc32": written.crc32}


class _Count:
    """Bytes done so far, added from any thread, shown from one."""

    def __init__(self, total_bytes: int, progress: Progress | None):
        self._total_bytes, self._progress = total_bytes, progress
        self._done_bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done_bytes = min(self._done_bytes + count, self._total_bytes)

    def show(self) -> None:
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
