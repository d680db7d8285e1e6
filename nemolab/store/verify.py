"""Is a store what it should be? Byte for byte against its checkpoint, or against the checksums it was made with."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemolab.checkpoint import Checkpoint, ExpertBytes
from nemolab.errors import NemolabError, StoreError
from nemolab.progress import Progress
from nemolab.store import direct_io, files
from nemolab.store.contents import fingerprint, sort_contents
from nemolab.store.layout import BlockLayout
from nemolab.store.reader import BlockReader
from nemolab.store.store import Store

WORKERS = 8
_NPY_1_0 = b"\x93NUMPY\x01\x00"
_NPY_HEADER = re.compile(r"\{'descr': '([^']{1,8})', 'fortran_order': (True|False), 'shape': \(([\d, ]{0,99})\), \}\s*")
SAMPLE = 200  # experts compared with the source unless all are asked for


@dataclass(frozen=True)
class VerifyResult:
    """What was looked at and what differs.

    checked     blocks (experts)
    mismatches  blocks, dense tensors, global scales and small files that are not what they should be or cannot be read
    details     one line for each, naming layer, expert and offset in the file
    """

    checked: int
    mismatches: int
    details: list[str]


def verify(
    store: Store | str | Path,
    *,
    source: str | Path | None = None,
    all: bool = False,
    progress: Progress | None = None,
) -> VerifyResult:
    """Check a store.

    source    the checkpoint it was made from: 200 experts spread over the store, or `all`, are compared byte for byte
              (padding and global scales too), and so are every dense tensor and small file. Without it every block and
              file is re-read and compared with its checksum, `all` or not: that needs no choice, it runs at disk speed.
    progress  called with (blocks done, blocks in all)
    What cannot be read is reported and the rest is looked at.
    Raises StoreError for what is no store, or one of another model; CheckpointError for a bad source.
    """
    store = store if isinstance(store, Store) else Store.open(store, check_sizes=False)
    if source is None:
        return _check_sums(store, progress)
    return _compare(store, Checkpoint.open(Path(source).expanduser()), all, progress)


def check_source(store: Store, checkpoint: Checkpoint, look: bool = False) -> None:
    """Raise StoreError unless the store was made from this checkpoint.

    Sizes and headers of the shards and the small files decide. Headers do not tell retrained weights apart: with
    `look`, where a shard was touched since, blocks and dense tensors are compared as `verify` does.
    """
    source, here = store.manifest.source, fingerprint(checkpoint)
    recorded = source.get("files") or {}
    if _without_times(recorded) != _without_times(here["files"]):
        raise StoreError(
            f"{store.path} was made from another checkpoint ({source.get('name')}): sizes or headers of its shards are"
            f" not those of {checkpoint.path}; repack it"
        )
    for name, sha256 in (source.get("small_files") or {}).items():
        if here["small_files"].get(name) != sha256:
            raise StoreError(f"{store.path} was made when {checkpoint.path / name} was another; repack it")
    if look and recorded != here["files"]:
        found = _compare(store, checkpoint, all=False, progress=None)
        if found.mismatches:
            raise StoreError(
                f"{store.path} was made from other weights than {checkpoint.path} holds now: {found.details[0]};"
                " repack it"
            )


def _without_times(shards: dict) -> dict:
    return {name: {key: facts.get(key) for key in ("bytes", "header_sha256")} for name, facts in shards.items()}


def sample_blocks(blocks: int, wanted: int = SAMPLE) -> list[int]:
    """`wanted` block indices spread evenly, the first and the last among them; all of them where there are fewer."""
    return np.unique(np.linspace(0, blocks - 1, min(wanted, blocks)).round().astype(int)).tolist()


def _check_sums(store: Store, progress: Progress | None) -> VerifyResult:
    details = store.manifest.list_size_problems(store.path)
    sums = _load_checksums(store, details)

    def check(index: int, reader: BlockReader) -> str:
        found = files.crc32(_read_block(reader, index))
        if sums is None or found == sums[index]:
            return ""
        return f"{_place(store, index)}: {_sum_differs(found, int(sums[index]))}"

    checked = _check_blocks(store, range(store.manifest.blocks), check, details, progress)
    for name, record in store.manifest.files.items():
        recorded = record.get("crc32")
        if recorded is None or _has_other_size(store, name):
            continue
        with _reported(details):
            if files.file_crc32(store.path / name) != recorded:
                if name == files.DENSE:
                    details += _find_damaged_tensors(store)
                else:
                    details.append(f"{name}: its checksum is another one")
    with _reported(details):
        store.globals  # noqa: B018  its values are judged when it is loaded
    return VerifyResult(checked, len(details), details)


def _compare(store: Store, checkpoint: Checkpoint, all: bool, progress: Progress | None) -> VerifyResult:
    config = checkpoint.config
    shape = (len(config.moe_layers), config.n_experts, config.expert_inter, config.expert_in)
    if shape != (store.n_layers, store.n_experts, *store.expert_shape):
        raise StoreError(
            f"{store.path} holds {store.n_layers} MoE layers of {store.n_experts} experts {store.expert_shape}, "
            f"{checkpoint.path} has {shape[0]} of {shape[1]} experts {shape[2:]}: it is not its source"
        )
    details = store.manifest.list_size_problems(store.path)
    sums = _load_checksums(store, details)
    scales_2 = None
    with _reported(details):
        scales_2 = store.globals

    def check(index: int, reader: BlockReader) -> str:
        layer, expert = divmod(index, store.n_experts)
        block = _read_block(reader, index)
        published = checkpoint.expert(layer, expert)
        place = _place(store, index)
        difference = find_difference(store.block_layout, block, published)
        if difference:
            offset, words = difference
            return f"{place}, offset {index * store.block_bytes + offset} of {files.EXPERTS}: {words}"
        scales = np.float32([published.up_scale_2, published.down_scale_2])
        if scales_2 is not None and not np.array_equal(scales_2[layer, expert], scales):
            return f"{place}: {files.GLOBALS} holds {scales_2[layer, expert]}, the source {scales}"
        found = files.crc32(block)
        if sums is None or found == sums[index]:
            return ""
        return f"{place}: {_sum_differs(found, int(sums[index]))}, the bytes agree"

    blocks = range(store.manifest.blocks) if all else sample_blocks(store.manifest.blocks)
    checked = _check_blocks(store, blocks, check, details, progress)
    with _reported(details):
        details += _compare_dense(store, checkpoint)
    for name, path in checkpoint.small_files().items():
        copied = store.small_file(name)
        with _reported(details):
            if copied is None or copied.read_bytes() != path.read_bytes():
                details.append(f"{name}: {'missing' if copied is None else 'another one'}, the source has it")
    return VerifyResult(checked, len(details), details)


def find_difference(layout: BlockLayout, block: np.ndarray, published: ExpertBytes) -> tuple[int, str] | None:
    """The first byte of a block that is not what the source says: its offset in the block, and words."""
    for plane, stored in zip(layout.planes, layout.views(block), strict=True):
        wanted = getattr(published, plane.name)
        if layout.name == "neuron" and plane.name == "down_values":
            wrong = _wrong_pairs(stored, wanted)
        else:
            transposed = layout.name == "neuron" and plane.name == "down_scales"
            wrong = _places(stored != (wanted.T if transposed else wanted))
        if len(wrong):
            row, byte = (int(coordinate) for coordinate in wrong[0])
            what = f"{plane.name} row {row} byte {byte} is {int(stored[row, byte]):#04x}"
            more = f" (and {len(wrong) - 1:,} bytes more)" if len(wrong) > 1 else ""
            return plane.offset_bytes + row * plane.shape[1] + byte, f"{what}, not as published{more}"
    padding = np.flatnonzero(block[layout.payload_bytes :])
    if len(padding):
        return layout.payload_bytes + int(padding[0]), "the padding is not zero"
    return None


def _wrong_pairs(stored: np.ndarray, published: np.ndarray) -> np.ndarray:
    """Places (row, byte) where down in `neuron` layout [I, X/2] holds another code than the published [X, I/2].

    Compared code by code as the layout is defined, not by running repack's permutation backwards: a fault in that
    would hide itself.
    """
    found = []
    for neuron, output in itertools.product((0, 1), (0, 1)):  # even and odd ones
        here = stored[neuron::2] >> 4 if output else stored[neuron::2] & 0x0F
        there = published[output::2] >> 4 if neuron else published[output::2] & 0x0F
        found.append(_places(here != there.T) * (2, 1) + (neuron, 0))
    return np.unique(np.concatenate(found), axis=0)


def _places(wrong: np.ndarray) -> np.ndarray:
    """int [found, 2]; looking is much cheaper than listing, and there is hardly ever anything to list."""
    return np.argwhere(wrong) if wrong.any() else np.empty((0, 2), int)


def _compare_dense(store: Store, checkpoint: Checkpoint) -> list[str]:
    wanted = {entry.name: entry for entry in sort_contents(checkpoint).dense}
    details = [f"{files.DENSE}: {name} is missing" for name in wanted if name not in store.dense_tensors]
    for name, stored in store.dense_tensors.items():
        entry = wanted.get(name)
        if entry is None:
            details.append(f"{files.DENSE}: {name} is not in the source")
        elif (entry.dtype, entry.shape) != (stored.dtype, stored.shape):
            details.append(
                f"{files.DENSE}: {name} is {stored.dtype} {list(stored.shape)}, "
                f"the source has {entry.dtype} {list(entry.shape)}"
            )
        else:
            pairs = zip(
                store.dense_chunks(name, files.CHUNK_BYTES),
                checkpoint.read_chunks(name, files.CHUNK_BYTES),
                strict=True,
            )
            for number, (here, there) in enumerate(pairs):
                if not np.array_equal(here, there):
                    byte = number * files.CHUNK_BYTES + int(np.flatnonzero(here != there)[0])
                    details.append(f"{files.DENSE}: {name} differs at offset {stored.offset_bytes + byte}")
                    break
    return details


def _find_damaged_tensors(store: Store) -> list[str]:
    """The dense file is not what it was: which tensors are not."""
    details = []
    for name, entry in store.dense_tensors.items():
        found = 0
        with _reported(details):
            for chunk in store.dense_chunks(name, files.CHUNK_BYTES):
                found = files.crc32(chunk, found)
        if found != store.manifest.dense_crc32.get(name):
            details.append(f"{files.DENSE}: {name} is damaged ({entry.nbytes} bytes at offset {entry.offset_bytes})")
    return details or [f"{files.DENSE}: every tensor's checksum is right, the file's is not: its header is damaged"]


def _check_blocks(
    store: Store,
    blocks: Sequence[int],
    check: Callable[[int, BlockReader], str],
    details: list[str],
    progress: Progress | None,
) -> int:
    """Run `check` on each block, several at a time; adds what it found in the order of the blocks, or why it could not
    look. Returns how many were looked at: none where experts.bin cannot be opened.
    """

    def look(index: int, reader: BlockReader) -> str:
        try:
            return check(index, reader)
        except NemolabError as problem:
            return f"{_place(store, index)}: {problem}"

    try:
        reader = store.open_reader(threads=1, announce=lambda line: None)
    except StoreError as problem:
        details.append(str(problem))
        return 0
    pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="nemolab-verify")
    with reader:
        try:
            for number, detail in enumerate(pool.map(look, blocks, itertools.repeat(reader)), start=1):
                if detail:
                    details.append(detail)
                if progress is not None:
                    progress(number, len(blocks))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return len(blocks)


@contextlib.contextmanager
def _reported(details: list[str]) -> Iterator[None]:
    """What cannot be read becomes a line, and the rest is looked at."""
    try:
        yield
    except NemolabError as problem:
        details.append(str(problem))
    except OSError as problem:
        details.append(f"{problem.filename or 'a file'}: cannot be read ({problem.strerror or problem})")


def _has_other_size(store: Store, name: str) -> bool:
    """Whether a file is missing or of another size, which has been said."""
    path = store.path / name
    return not path.is_file() or path.stat().st_size != store.manifest.files[name]["bytes"]


def _read_block(reader: BlockReader, index: int) -> np.ndarray:
    block = direct_io.aligned_buffer(reader.block_bytes)
    reader.read_into(index, block)
    return block


def _load_checksums(store: Store, details: list[str]) -> np.ndarray | None:
    """checksums.npy, uint32 [blocks]; None, and a line in `details`, where it is something else."""
    path, blocks = store.path / files.CHECKSUMS, store.manifest.blocks
    if _has_other_size(store, files.CHECKSUMS):
        return None
    try:
        with open(path, "rb") as file:
            # The header is read as text and judged before anything is allocated on its word; nothing is unpickled.
            start = file.read(len(_NPY_1_0) + 2)
            header = file.read(int.from_bytes(start[-2:], "little")).decode("latin1")
            found = _NPY_HEADER.fullmatch(header) if start.startswith(_NPY_1_0) else None
            if found and found.groups() == ("<u4", "False", f"{blocks},"):
                return np.frombuffer(file.read(4 * blocks), np.uint32, blocks)
        what = f"holds {found[1]!r} ({found[3]})" if found else "is no array as repack writes it"
        details.append(f"{path} {what}; '<u4' ({blocks},) was expected")
    except (OSError, ValueError) as problem:
        details.append(f"{path}: cannot be read ({problem})")
    return None


def _place(store: Store, index: int) -> str:
    layer, expert = divmod(index, store.n_experts)
    return f"layer {store.config.moe_layers[layer]}, expert {expert} (block {index} at {index * store.block_bytes})"


def _sum_differs(found: int, recorded: int) -> str:
    return f"checksum {found:#010x}, recorded {recorded:#010x}"
