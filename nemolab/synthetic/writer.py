"""Writing a form to disk: spans of about 8 MiB are drawn and written by a few threads, each at its own place."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nemolab.errors import NemolabError
from nemolab.progress import Progress
from nemolab.synthetic.draws import random_bytes
from nemolab.synthetic.facts import Facts, planted, shape_facts
from nemolab.synthetic.form import Form
from nemolab.synthetic.metadata import config_json, hf_quant_json
from nemolab.synthetic.shapes import make_form
from nemolab.synthetic.shards import Shard, index_json, split
from nemolab.synthetic.small_files import STOP_IDS, small_files
from nemolab.synthetic.tensors import ITEM_BYTES, Tensor, list_tensors
from nemolab.system.mounts import free_bytes
from nemolab.units import show_bytes

SPAN_BYTES = 8 << 20
BLOCK_BYTES = 4 << 20  # rows drawn from one seed; part of what a seed means, so it stays
MOST_THREADS = 8
PARTIAL = ".partial"
_MOST_PIECES = 1024  # of one gathered write, the kernel's limit

_STORAGE = {
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
    "BF16": np.uint16,
    "F16": np.uint16,
    "F32": np.uint32,
    "I64": np.uint64,
}


@dataclass(frozen=True)
class Written:
    """What was written. `bytes`: data of all tensors; `facts`: what follows from the shape; `planted`: on purpose."""

    folder: str
    name: str
    seed: int
    tensors: int
    bytes: int
    file_bytes: int
    shards: int
    seconds: float
    facts: Facts
    planted: dict[str, Any]


def write(
    folder: str | Path,
    shape: str = "super",
    *,
    moe_layers: int | None = None,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    shards: int | None = None,
    shard_bytes: int | None = None,
    layers_as: str | None = None,
    vision_as: str | None = None,
    mtp: bool = True,
    sparsity: float = 0.9,
    skew: float = 0.8,
    progress: Progress | None = None,
) -> Written:
    """Write a synthetic checkpoint of a published form into a new or empty folder.

    shape        "super", "super35", "super35-vl", "nano", "lightning" or "tiny"
    moe_layers   keep the first N MoE layers and what lies between them (and one attention layer); None: all
    settings     config.json fields to change, such as {"n_routed_experts": 48, "hidden_size": 256}
    seed         the same seed writes the same bytes. A tensor's random bits depend on the seed, its name and its shape
    shards       how many files; or shard_bytes: the most of one (about); neither: 5 GB, and three files at least
    layers_as    how config.json lists the layers: "pattern", "block_types", "linear_block_types" or "layer_types"
    vision_as    "timm" or "hf": names of the vision tower, super35-vl only
    mtp          whether the multi-token-prediction block is there, in shapes that have one
    sparsity     share of routed neurons left at zero by ReLU^2;  skew: popularity of experts falls as rank^-skew
    progress     called with (bytes done, bytes in all)
    Memory stays below about 100 MiB and twice SPAN_BYTES a thread, whatever the size. config.json gets its name last:
    what is interrupted is no checkpoint, and is removed again if Python still runs.
    Raises UsageError for what cannot be asked for, NemolabError for a folder that is not empty or a full disk.
    """
    form = make_form(
        shape,
        moe_layers=moe_layers,
        settings=settings,
        layers_as=layers_as,
        vision_as=vision_as,
        mtp=mtp,
        seed=seed,
        sparsity=sparsity,
        skew=skew,
    )
    return write_form(form, folder, shards=shards, shard_bytes=shard_bytes, progress=progress)


def write_form(
    form: Form,
    folder: str | Path,
    *,
    shards: int | None = None,
    shard_bytes: int | None = None,
    index: bool | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write any form; see `write`. `index`: whether there is one; None: where there is more than one file."""
    folder, began = Path(folder), time.perf_counter()
    tensors = list_tensors(form)
    files = split(tensors, shards, shard_bytes, index)
    texts = _texts(form, files)
    file_bytes = sum(shard.file_bytes for shard in files) + sum(len(text.encode()) for text in texts.values())
    with _claimed(folder, file_bytes) as made:
        last = _write_text(folder, *texts.popitem(), made)
        _write_shards(form.seed, folder, files, made, progress)
        for name, text in texts.items():
            _put_in_place(_write_text(folder, name, text, made), made)
        _put_in_place(last, made)
        _sync_folder(folder)
    return Written(
        folder=str(folder),
        name=form.name,
        seed=form.seed,
        tensors=len(tensors),
        bytes=sum(shard.data_bytes for shard in files),
        file_bytes=file_bytes,
        shards=len(files),
        seconds=time.perf_counter() - began,
        facts=shape_facts(form, tensors),
        planted=planted(form),
    )


def _write_text(folder: Path, name: str, text: str, made: list[Path]) -> Path:
    path = folder / (name + PARTIAL)
    made.append(path)
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return path


def _put_in_place(path: Path, made: list[Path]) -> None:
    """Give a finished file its name."""
    made[made.index(path)] = path.rename(path.with_name(path.name.removesuffix(PARTIAL)))


def draw_tensor(tensor: Tensor, seed: int) -> np.ndarray:
    """All stored bits of a tensor, [rows, columns] in an unsigned integer type."""
    return np.concatenate([_draw_block(tensor, seed, first) for first in range(0, tensor.rows, _block_rows(tensor))])


def _texts(form: Form, files: list[Shard]) -> dict[str, str]:
    """Small files by name; config.json is the last."""
    config = form.config
    # Releases name their first stop id in config.json and both beside it.
    stops = STOP_IDS if config.eos_token_ids == STOP_IDS[:1] else config.eos_token_ids
    texts = small_files(config.vocab_size, config.max_position_embeddings, stops)
    said = hf_quant_json(form)
    if said is not None:
        texts["hf_quant_config.json"] = json.dumps(said, indent=1)
    index = index_json(files)
    if index:
        texts[index[0]] = index[1]
    return texts | {"config.json": json.dumps(config_json(form), indent=1)}


@contextlib.contextmanager
def _claimed(folder: Path, needed_bytes: int) -> Iterator[list[Path]]:
    """A new or empty folder with room; the list names files to remove if the block fails."""
    if folder.exists() and not folder.is_dir():
        raise NemolabError(f"{folder} is a file; a new or empty folder was expected")
    inside = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if any(name.endswith(PARTIAL) for name in inside):
        raise NemolabError(
            f"{folder} holds an unfinished checkpoint, as a killed call leaves it;"
            " remove the folder and run the same command again, or choose a new or empty folder"
        )
    if inside:
        raise NemolabError(f"{folder} holds {inside[0]!r}; remove it or choose a new or empty folder")
    missing = []
    existing = folder.absolute()
    while not existing.exists():
        missing.append(existing)
        existing = existing.parent
    free = free_bytes(existing)
    if free < needed_bytes:
        raise NemolabError(
            f"{folder}: the checkpoint needs {needed_bytes:,} bytes ({show_bytes(needed_bytes)}), {free:,}"
            f" ({show_bytes(free)}) are free; keep fewer layers (--moe-layers) or smaller sizes (--set)"
        )
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield made
    except BaseException as error:
        for path in made:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        if isinstance(error, OSError):
            raise NemolabError(f"{folder}: cannot be written ({error.strerror or error})") from error
        raise


def _write_shards(seed: int, folder: Path, files: list[Shard], made: list[Path], progress: Progress | None) -> None:
    threads = max(1, min(MOST_THREADS, os.cpu_count() or 1))
    total, done = sum(shard.data_bytes for shard in files), 0
    stop = threading.Event()
    with ThreadPoolExecutor(threads, thread_name_prefix="synth") as pool:
        try:
            for shard in files:
                path = folder / (shard.name + PARTIAL)
                made.append(path)
                with open(path, "xb", buffering=0) as file:
                    os.truncate(file.fileno(), shard.file_bytes)
                    _write_at(file.fileno(), [shard.header], 0)
                    pending: set[Future[int]] = set()
                    for span in _spans(shard):
                        if len(pending) > threads:
                            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                            done += sum(future.result() for future in finished)
                            if progress:
                                progress(done, total)
                        pending.add(pool.submit(_write_span, seed, file.fileno(), span, stop))
                    done += sum(future.result() for future in wait(pending).done)
                    os.fsync(file.fileno())
                _put_in_place(path, made)
                if progress:
                    progress(done, total)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


@dataclass(frozen=True)
class _Span:
    """Consecutive blocks of rows: where they begin in the file, how many bytes, (tensor, first row) of each."""

    offset_bytes: int
    nbytes: int
    blocks: tuple[tuple[Tensor, int], ...]


def _spans(shard: Shard) -> Iterator[_Span]:
    start = at = len(shard.header)
    blocks: list[tuple[Tensor, int]] = []
    for tensor in shard.tensors:
        step = _block_rows(tensor)
        for first in range(0, tensor.rows, step):
            blocks.append((tensor, first))
            at += min(step, tensor.rows - first) * tensor.columns * ITEM_BYTES[tensor.dtype]
            if at - start >= SPAN_BYTES:
                yield _Span(start, at - start, tuple(blocks))
                start, blocks = at, []
    if blocks:
        yield _Span(start, at - start, tuple(blocks))


def _write_span(seed: int, descriptor: int, span: _Span, stop: threading.Event) -> int:
    drawn = []
    for tensor, first in span.blocks:
        if stop.is_set():
            return 0
        drawn.append(_draw_block(tensor, seed, first).reshape(-1).view(np.uint8))
    _write_at(descriptor, drawn, span.offset_bytes)
    return span.nbytes


def _draw_block(tensor: Tensor, seed: int, first: int) -> np.ndarray:
    rows = min(_block_rows(tensor), tensor.rows - first)
    storage, draw = np.dtype(_STORAGE[tensor.dtype]), tensor.draw
    width = tensor.columns * (storage.itemsize if draw.in_place else draw.random_bytes)
    random = random_bytes(seed, tensor.key, first, (rows, width)) if width else None
    out = random.view(storage) if draw.in_place else np.empty((rows, tensor.columns), storage)
    draw.fill(out, random, first, tensor.rows)
    return out


def _block_rows(tensor: Tensor) -> int:
    return max(1, BLOCK_BYTES // (tensor.columns * ITEM_BYTES[tensor.dtype]))


def _write_at(descriptor: int, pieces: Iterable, offset_bytes: int) -> None:
    """All pieces one after another, gathered by the kernel; short writes are continued."""
    views = deque(memoryview(piece) for piece in pieces)
    while views:
        count = os.pwritev(descriptor, list(islice(views, _MOST_PIECES)), offset_bytes)
        offset_bytes += count
        while views and count >= len(views[0]):
            count -= len(views.popleft())
        if count:
            views[0] = views[0][count:]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
