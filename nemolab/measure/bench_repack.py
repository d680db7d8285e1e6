"""Repack against a plain direct copy of the same bytes on the same disk, in turns; its peak memory at full shape."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemolab import paths
from nemolab.errors import NemolabError, UsageError
from nemolab.measure.versus import Versus

EXPERT_BYTES = 3_096_576  # Super's
VOCABULARY = 4096  # small, so that the dense part has about the share it has in the whole model (an eighth)
RIVALS = ((4, 16 << 20), (8, 8 << 20), (16, 4 << 20))  # (threads, bytes a read) that a plain copy may choose from
_STALLED_S = 3600


def bench_repack(
    layout: str = "neuron", gib: float = 2.0, folder: str | Path | None = None, repeats: int = 5, seed: int = 0
) -> dict[str, Any]:
    """Repack a synthetic checkpoint of Super's shapes, in turns with a plain copy of its shards.

    gib      about the size of the checkpoint; the folder needs a little more than twice that
    folder   where both happen (default: the cache folder); everything is removed afterwards
    The copy is what a disk does at its best for this work: direct reads and writes of whole chunks by several threads
    into a reserved file, then fsync, with the best of three settings (one run each). Both sides read past the page
    cache, whose pages of the source are dropped before each run. Each side runs once before the clock counts, and what
    repack compiles for a whole model is compiled by then. The last store is verified before any figure is returned.
    returns  copy_gb_s, repack_gb_s (medians), of_copy (repack / copy), of_copy_low, of_copy_high, verdict, rows
    """
    from nemolab.store import repack, verify
    from nemolab.store.nibbles import warm_up
    from nemolab.synthetic import write

    if repeats < 3:
        raise UsageError(f"{repeats} rounds give no median and no spread; take at least 3")
    layers, experts = _size(gib)
    with _workplace(folder, 2.2 * gib * 2**30) as place:
        source, copied, store = place / "source", place / "copied", place / "store"
        settings = {"n_routed_experts": experts, "vocab_size": VOCABULARY}
        write(source, "super", moe_layers=layers, settings=settings, mtp=False, seed=seed)
        shards = sorted(source.glob("*.safetensors"))
        source_bytes = sum(shard.stat().st_size for shard in shards)
        said: list[str] = []

        def run_copy(rival: tuple[int, int]) -> float:
            return _timed(shards, copied, lambda: copy_files(shards, copied, *rival))

        def run_repack() -> float:
            return _timed(
                shards, store, lambda: made.append(repack(source, store, layout=layout, announce=said.append))
            )

        made: list[Any] = []
        rival = min(RIVALS, key=run_copy)  # and that is the copy's warm-up
        warm_up()
        run_repack()
        copy_s, repack_s = [], []
        for number in range(repeats):
            for first in (number % 2 == 0, number % 2 == 1):
                if first:
                    copy_s.append(run_copy(rival))
                else:
                    repack_s.append(run_repack())
        found = verify(store, source=source)
        if found.mismatches:
            raise NemolabError(f"the store of this benchmark is not what it should be: {found.details[0]}")
        result = made[-1]
    copy_gb_s = [source_bytes / seconds / 1e9 for seconds in copy_s]
    repack_gb_s = [result.bytes_written / seconds / 1e9 for seconds in repack_s]
    # Seconds a byte: the two sides differ by the scales of activations, which a store leaves out.
    timed = Versus(tuple(1 / rate for rate in copy_gb_s), tuple(1 / rate for rate in repack_gb_s))
    settings = {
        "layout": layout,
        "shape": "super",
        "moe_layers": layers,
        "experts": experts,
        "source_bytes": source_bytes,
        "store_bytes": result.bytes_written,
        "copy_threads": rival[0],
        "copy_chunk_bytes": rival[1],
        "cache": "cold",
        "direct_writes": result.direct_io,
        "direct_reads": result.source_direct,
        "verified_blocks": found.checked,
    }
    return {
        "copy_gb_s": statistics.median(copy_gb_s),
        "repack_gb_s": statistics.median(repack_gb_s),
        "of_copy": timed.ratio,
        "of_copy_low": min(timed.ratios),
        "of_copy_high": max(timed.ratios),
        "verdict": timed.verdict.replace("second", "repack").replace("first", "the copy"),
        "notes": sorted(set(said)),
        "rows": [
            {"name": "repack.copy", "values": copy_gb_s, "unit": "GB/s", "settings": settings},
            {"name": f"repack.{layout}", "values": repack_gb_s, "unit": "GB/s", "settings": settings},
            {"name": "repack.of_copy", "values": timed.ratios, "unit": "ratio", "settings": settings},
        ],
    }


def copy_files(sources: list[Path], folder: Path, threads: int, chunk_bytes: int) -> None:
    """Copy files by direct reads and writes of whole chunks; where the file system has none, through the page cache."""
    from nemolab.store.direct_io import aligned_buffer
    from nemolab.store.workers import work_through

    folder.mkdir()
    with contextlib.ExitStack() as opened:
        jobs = []
        for source in sources:
            size = source.stat().st_size
            read_from = opened.enter_context(_descriptor(source, os.O_RDONLY))
            write_to = opened.enter_context(_descriptor(folder / source.name, os.O_RDWR | os.O_CREAT))
            os.posix_fallocate(write_to, 0, -(-size // chunk_bytes) * chunk_bytes)
            jobs += [(read_from, write_to, start, size) for start in range(0, size, chunk_bytes)]

        def prepare():
            buffer = memoryview(aligned_buffer(chunk_bytes))

            def copy_chunk(job: tuple[int, int, int, int]) -> None:
                read_from, write_to, start, size = job
                wanted = min(chunk_bytes, size - start)
                got = os.preadv(read_from, [buffer], start)
                put = os.pwritev(write_to, [buffer[: -(-wanted // 4096) * 4096]], start)
                if got < wanted or put < wanted:
                    raise NemolabError(f"a plain copy read {got} and wrote {put} of {wanted} bytes at {start}")

            return copy_chunk

        work_through(jobs, prepare, threads)
        for write_to, size in {(job[1], job[3]) for job in jobs}:
            os.ftruncate(write_to, size)
            os.fsync(write_to)


def bench_repack_memory(
    shape: str = "super", layout: str = "neuron", folder: str | Path | None = None
) -> dict[str, Any]:
    """Peak memory of repacking a whole model: real headers and metadata over sparse files, which take no disk.

    Every tensor is read (as zeros) and every block made; only the writes are dropped, so that nothing fills the disk.
    returns  peak_mib (the largest resident set of the process that repacks), tensors, blocks, store_bytes, rows
    """
    with _workplace(folder, 1 << 30) as place:
        tensors = write_sparse(place / "source", shape)
        words = [sys.executable, "-c", _WITHOUT_WRITING, str(place / "source"), str(place / "store"), layout]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_STALLED_S)
        except subprocess.TimeoutExpired:
            raise NemolabError(f"the repack took more than {_STALLED_S} s") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, nothing was said"]
            raise NemolabError(f"the repack failed: {said[-1]}")
        found = json.loads(done.stdout)
    settings = {"shape": shape, "layout": layout, "tensors": tensors, **found, "writes": "dropped", "source": "sparse"}
    peak_mib = settings.pop("peak_mib")
    row = {"name": "repack.peak_memory", "values": [peak_mib], "unit": "MiB", "settings": settings}
    return {"peak_mib": peak_mib, "tensors": tensors, **found, "rows": [row]}


# In a process of its own, so that the peak is that of repack alone.
_WITHOUT_WRITING = """
import errno, json, os, sys, time
from nemolab.store import files, repack

def refuse(*_):
    raise OSError(errno.EOPNOTSUPP, "a sparse file will do")

os.posix_fallocate = refuse
os.pwritev = lambda descriptor, buffers, offset: sum(memoryview(buffer).nbytes for buffer in buffers)
files.free_bytes = lambda folder: 1 << 60
started = time.perf_counter()
done = repack(sys.argv[1], sys.argv[2], layout=sys.argv[3], announce=lambda line: None)
# VmHWM is this program's own; ru_maxrss begins with what the process that started it had.
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps({
    "peak_mib": int(peak) / 1024,
    "blocks": done.blocks,
    "store_bytes": done.bytes_written,
    "seconds": time.perf_counter() - started,
}))
"""


def write_sparse(folder: Path, shape: str, **settings: Any) -> int:
    """A checkpoint of a published shape whose tensors are all zero: headers and metadata are real, data are holes.

    settings  fields of config.json changed, as in `nemolab synth --set`
    returns   the number of tensors
    """
    from nemolab.synthetic import list_tensors, make_form
    from nemolab.synthetic.metadata import config_json, hf_quant_json
    from nemolab.synthetic.shards import index_json, split
    from nemolab.synthetic.small_files import small_files

    form = make_form(shape, settings=settings)
    tensors = list_tensors(form)
    shards = split(tensors, None, None, None)
    folder.mkdir(parents=True)
    for shard in shards:
        with open(folder / shard.name, "wb") as file:
            file.write(shard.header)
            file.truncate(shard.file_bytes)
    texts = small_files(form.config.vocab_size) | {"config.json": json.dumps(config_json(form))}
    said, index = hf_quant_json(form), index_json(shards)
    if said is not None:
        texts["hf_quant_config.json"] = json.dumps(said)
    if index is not None:
        texts[index[0]] = index[1]
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return len(tensors)


def _size(gib: float) -> tuple[int, int]:
    """MoE layers and experts in each that make about so many GiB, dense part included."""
    if not 0.25 <= gib <= 64:
        raise UsageError(f"{gib:g} GiB; 0.25 to 64 are sensible here")
    blocks = 0.87 * gib * 2**30 / EXPERT_BYTES
    layers = math.ceil(blocks / 512)
    return layers, max(22, round(blocks / layers))


@contextlib.contextmanager
def _workplace(folder: str | Path | None, needed_bytes: float) -> Iterator[Path]:
    """A folder of our own in `folder`, removed afterwards. Raises NemolabError where it lacks room."""
    parent = Path(folder) if folder is not None else paths.cache_folder()
    parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise NemolabError(f"{parent}: {needed_bytes:,.0f} bytes are needed, {free_bytes:,} are free")
    place = Path(tempfile.mkdtemp(prefix="bench-repack-", dir=parent))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _timed(shards: list[Path], target: Path, run) -> float:
    """Seconds of `run`, with the source out of the page cache and nothing in the target's place."""
    shutil.rmtree(target, ignore_errors=True)
    for shard in shards:
        with open(shard, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@contextlib.contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    from nemolab.store.direct_io import open_direct

    descriptor, _ = open_direct(path, flags)
    if descriptor is None:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
