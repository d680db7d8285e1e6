"""Rewrite a checkpoint as a store: one padded block an expert, streaming, finished only when all of it is on disk."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nemolab.checkpoint import Checkpoint, ExpertBytes, Module
from nemolab.checkpoint.checkpoint import check_expert_scales
from nemolab.errors import StoreError
from nemolab.progress import Progress, say
from nemolab.store import contents, direct_io, files
from nemolab.store.layout import BlockLayout
from nemolab.store.manifest import EXPERT_FORMAT, Manifest
from nemolab.store.nibbles import Transpose, choose_transpose
from nemolab.store.target import Target
from nemolab.store.tensor_file import Outgoing, Written, write_tensor_file
from nemolab.store.verify import verify
from nemolab.store.writer import BlockWriter

WORKERS = 8  # experts under way at once: enough to keep a disk busy, 50 MB at full Super size
SLACK_BYTES = 4 << 20  # headers, checksums and small files, generously
_TICK_S = 0.1


@dataclass(frozen=True)
class RepackResult:
    """What a repack did. `bytes_written` is 0 and `already_complete` true where the same store was there already."""

    blocks: int
    block_bytes: int
    bytes_written: int
    seconds: float
    direct_io: bool
    already_complete: bool = False
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
    announce  told once about fallbacks, missing small files and a store that is there already
    Peak memory is a few dozen MB beyond the checkpoint's headers, whatever the model's size. An interrupt or error
    removes what was written; after SIGKILL what is left does not look finished, and the next repack begins again.
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
    with Target(Path(target).expanduser(), identity) as place:
        if place.finished is not None:
            return _accept_finished(place.finished, place.folder, checkpoint, identity, announce, started_s)
        missing = contents.missing_small_files(checkpoint)
        if missing:
            announce(f"{checkpoint.path} has no {', '.join(missing)}; the store will not have them either")
        manifest = _write_all(checkpoint, plan, blocks, identity, missing, place, progress, announce)
        if contents.fingerprint(checkpoint) != identity["source"]:
            raise StoreError(f"{checkpoint.path} was changed while it was repacked; nothing is kept, run it again")
        place.commit(manifest)
    written_bytes = sum(record["bytes"] for record in manifest.files.values())
    seconds = time.perf_counter() - started_s
    return RepackResult(
        len(plan.experts), blocks.block_bytes, written_bytes, seconds, manifest.direct_io, notes=checkpoint.notes
    )


def _write_all(
    checkpoint: Checkpoint,
    plan: contents.Contents,
    blocks: BlockLayout,
    identity: dict,
    missing: list[str],
    place: Target,
    progress: Progress | None,
    announce: Callable[[str], None],
) -> Manifest:
    """Every file but the manifest, which is returned."""
    experts_bytes = len(plan.experts) * blocks.block_bytes
    dense_bytes = sum(entry.nbytes for entry in plan.dense)
    small_bytes = sum(path.stat().st_size for path in checkpoint.small_files().values())
    place.reserve(experts_bytes + dense_bytes + small_bytes + SLACK_BYTES)
    count = _Count(experts_bytes + dense_bytes, progress)
    records: dict[str, dict[str, int]] = {}

    checksums, globals_, direct = _write_experts(checkpoint, plan, blocks, place.folder, count, announce)
    records[files.EXPERTS] = {"bytes": experts_bytes}
    with files.finished_file(place.folder / files.CHECKSUMS) as file:
        np.save(file, checksums)
    records[files.CHECKSUMS] = _record(place.folder / files.CHECKSUMS)

    shape = (identity["layers"], identity["experts"], 2)
    outgoing = Outgoing("weight_scale_2", "F32", shape, globals_.nbytes, lambda: [globals_.view(np.uint8).reshape(-1)])
    records[files.GLOBALS] = _as_record(write_tensor_file(place.folder / files.GLOBALS, [outgoing]))

    dense = write_tensor_file(
        place.folder / files.DENSE, [_outgoing(checkpoint, entry) for entry in plan.dense], count.add_and_show
    )
    records[files.DENSE] = _as_record(dense)
    for name, path in checkpoint.small_files().items():
        with files.finished_file(place.folder / name) as file:
            file.write(path.read_bytes())
        records[name] = _record(place.folder / name)
    count.show()
    return Manifest(
        **identity,
        expert_format=EXPERT_FORMAT,
        files=records,
        dense_crc32=dense.tensors,
        direct_io=direct,
        left_out=plan.left_out,
        missing_small_files=missing,
    )


def _write_experts(
    checkpoint: Checkpoint,
    plan: contents.Contents,
    blocks: BlockLayout,
    folder: Path,
    count: "_Count",
    announce: Callable[[str], None],
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Write experts.bin; returns its checksums uint32 [blocks], the global scales float32 [blocks, 2], and direct."""
    checksums = np.zeros(len(plan.experts), np.uint32)
    globals_ = np.zeros((len(plan.experts), 2), np.float32)
    jobs = iter(_in_file_order(plan.experts))
    stop = threading.Event()
    final = folder / files.EXPERTS
    partial = final.with_name(final.name + files.PARTIAL)
    transpose = choose_transpose(blocks.block_bytes * len(plan.experts))
    writer = BlockWriter(partial, blocks.block_bytes, len(plan.experts), announce)

    def work() -> None:
        block = direct_io.aligned_buffer(blocks.block_bytes)
        spare = direct_io.aligned_buffer(blocks.payload_bytes)
        for index in jobs:  # next() on it is atomic: each expert is taken once
            if stop.is_set():
                return
            globals_[index] = _read_expert(checkpoint, plan.experts[index], blocks, block, spare, transpose)
            checksums[index] = files.crc32(block)
            writer.write(index, block)
            count.add(blocks.block_bytes)

    pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="nemolab-repack")
    try:
        waiting = {pool.submit(work) for _ in range(min(WORKERS, len(plan.experts)))}
        while waiting:
            done, waiting = wait_for(waiting, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
            for finished in done:
                finished.result()
            count.show()
        writer.flush()
        files.rename_durably(partial, final)
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        writer.close()
    return checksums, globals_, writer.direct


def _read_expert(
    checkpoint: Checkpoint,
    pair: tuple[Module, Module],
    blocks: BlockLayout,
    block: np.ndarray,
    spare: np.ndarray,
    transpose: Transpose,
) -> tuple[float, float]:
    """Fill `block` with one expert; returns its two global scales."""
    up, down = pair
    landed = blocks.landing(block, spare)
    checkpoint.read_into(up.tensors["weight"].name, landed.up_values)
    checkpoint.read_into(up.tensors["weight_scale"].name, landed.up_scales)
    checkpoint.read_into(down.tensors["weight"].name, landed.down_values)
    checkpoint.read_into(down.tensors["weight_scale"].name, landed.down_scales)
    scale_2 = [checkpoint.scalar(module.tensors["weight_scale_2"].name) for module in pair]
    check_expert_scales(ExpertBytes(*landed, *scale_2), up.name.removesuffix(".up_proj"))
    blocks.settle(landed, block, transpose)
    return tuple(scale_2)


def _in_file_order(experts: list[tuple[Module, Module]]) -> list[int]:
    """Block indices in the order in which their up matrices lie in the shards: the disk reads ahead usefully."""

    def place(index: int) -> tuple[str, int]:
        entry = experts[index][0].tensors["weight"]
        return entry.shard, entry.offset_bytes

    return sorted(range(len(experts)), key=place)


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
    return RepackResult(manifest.blocks, block_bytes, 0, seconds, manifest.direct_io, True, [note])


def _outgoing(checkpoint: Checkpoint, entry) -> Outgoing:
    def chunks() -> Iterator[np.ndarray]:
        return checkpoint.read_chunks(entry.name, files.CHUNK_BYTES)

    return Outgoing(entry.name, entry.dtype, entry.shape, entry.nbytes, chunks)


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
            self._done_bytes += count

    def add_and_show(self, count: int) -> None:
        self.add(count)
        self.show()

    def show(self) -> None:
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
