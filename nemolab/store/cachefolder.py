"""Stores made on the way: a command that needs one and was given none finds or makes it in the cache folder."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from nemolab import paths
from nemolab.checkpoint import Checkpoint
from nemolab.errors import StoreError
from nemolab.progress import progress_bar, say
from nemolab.store import contents, files
from nemolab.store.manifest import VERSION, Manifest
from nemolab.store.repack import repack
from nemolab.store.target import MARKER, tidy

_NAME_BYTES = 160  # of a checkpoint's name in the name of its store


def ensure_store(
    checkpoint_path: str | Path,
    layout: str = "neuron",
    announce: Callable[[str], None] = say,
) -> Path:
    """A finished store of a checkpoint in the cache folder, made if it is not there; says so when it makes one.

    Its name holds a digest of the source's files (sizes, headers, times of change, configs) and of the layout, so a
    changed checkpoint gets a new store. Processes that want the same one wait for each other.
    Raises what `repack` raises, and StoreError where the cache folder cannot be written.
    """
    checkpoint = Checkpoint.open(Path(checkpoint_path).expanduser())
    folder = store_folder(checkpoint, layout)
    if _is_sound(folder):
        tidy(folder)
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_name(folder.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as problem:
        raise StoreError(
            f"{folder.parent}: the cache folder cannot be written ({problem.strerror}); "
            "set NEMOLAB_CACHE to another, or make a store with `nemolab repack` and name it"
        ) from problem
    try:
        _wait_for(lock, folder, announce)
        if not _is_sound(folder):
            # Beside files of other sizes, or half removed: the folder is ours, make it again.
            if folder.exists() and ((folder / files.MANIFEST).exists() or not (folder / MARKER).exists()):
                shutil.rmtree(folder)
            announce(f"no store was named: making one of {paths.shown(checkpoint.path)} in {paths.shown(folder)}")
            repack(checkpoint.path, folder, layout=layout, announce=announce, progress=progress_bar("repack", "B"))
    finally:
        os.close(lock)  # the lock file stays: removing it would let two makers hold two different locks
    return folder


def store_folder(checkpoint: Checkpoint, layout: str) -> Path:
    """Where the store of a checkpoint lies, or would lie, in the cache folder."""
    source = contents.fingerprint(checkpoint)
    digest = hashlib.sha256(json.dumps([VERSION, layout, source], sort_keys=True).encode()).hexdigest()[:16]
    # A file system takes names of 255 bytes, and the lock's is longer than the folder's.
    name = source["name"].encode(errors="surrogateescape")[:_NAME_BYTES].decode(errors="ignore")
    return paths.cache_folder() / "stores" / f"{name}-{layout}-{digest}"


def _is_sound(folder: Path) -> bool:
    try:
        Manifest.read(folder)
    except StoreError:
        return False
    return True


def _wait_for(lock: int, folder: Path, announce: Callable[[str], None]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        announce(f"another process is making {paths.shown(folder)}; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
