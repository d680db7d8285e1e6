"""The folder a store is made in: whether it may be written to, by whom, and how it is left."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from nemolab.checkpoint.checkpoint import SMALL_FILES
from nemolab.checkpoint.json_files import read_json
from nemolab.errors import CheckpointError, StoreError
from nemolab.store import files
from nemolab.store.manifest import Manifest
from nemolab.units import show_bytes

MARKER = "repack" + files.PARTIAL  # says what an unfinished store is becoming; its lock says that someone is at work
OUR_NAMES = {files.EXPERTS, files.GLOBALS, files.DENSE, files.CHECKSUMS, files.MANIFEST, *SMALL_FILES}
_ADVICE = "choose another folder or remove this one"


class Target:
    """A folder claimed for one repack. Use it in a `with` block: what is not committed is removed on the way out.

    identity   what the store would be: manifest fields that must agree with whatever is there already
    .finished  the manifest of a store that is there and is the same one, else None
    Raises StoreError for a folder that holds something else, and while another process is at work in it.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder, self._identity = folder, identity
        self.finished: Manifest | None = None
        self._lock: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> "Target":
        try:
            self._look()
            while self.finished is None and not self._claim():
                self._look()
        except OSError as problem:
            self._abandon()
            raise StoreError(f"{self.folder}: cannot be used ({problem.strerror or problem})") from problem
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._abandon()

    def reserve(self, needed_bytes: int) -> None:
        """Check that the disk has room. Raises StoreError with both numbers."""
        status = os.statvfs(self.folder)
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes < needed_bytes:
            raise StoreError(
                f"{self.folder}: the store needs {needed_bytes:,} bytes ({show_bytes(needed_bytes)}), "
                f"{free_bytes:,} ({show_bytes(free_bytes)}) are free: {needed_bytes - free_bytes:,} are missing"
            )

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest: from here on the folder is a store."""
        manifest.write(self.folder)
        self.finished = manifest
        (self.folder / MARKER).unlink(missing_ok=True)

    def _look(self) -> None:
        """Decide whether the folder is free, a finished store of the same identity, or not ours to touch."""
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise StoreError(f"{self.folder} is a file; a folder to make the store in was expected")
        if (self.folder / files.MANIFEST).exists():
            manifest = Manifest.read(self.folder)
            self._compare("another store", manifest.to_dict())
            self.finished = manifest
            return
        names = sorted(path.name for path in self.folder.iterdir())
        if names and MARKER not in names:
            raise StoreError(f"{self.folder} holds {names[0]!r} and is no store; {_ADVICE}")
        if names:
            try:
                begun = read_json(self.folder / MARKER)
            except CheckpointError:  # killed before the marker was written: nothing else was begun
                return
            self._compare("an unfinished repack of another kind", begun)

    def _compare(self, what_it_is: str, found: dict[str, Any]) -> None:
        for field, wanted in self._identity.items():
            difference = _difference(field, found.get(field), wanted)
            if difference:
                raise StoreError(f"{self.folder} holds {what_it_is}: {difference}; {_ADVICE}")

    def _claim(self) -> bool:
        """Lock the marker. False: another repack ended between our look and our lock, so look again."""
        for folder in (self.folder, *self.folder.parents):
            if folder.exists():
                break
            self._made.append(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        marker = self.folder / MARKER
        lock = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = marker.exists() and os.path.samestat(os.fstat(lock), marker.stat())
            if not ours or (self.folder / files.MANIFEST).exists():
                os.close(lock)
                return False
        except BlockingIOError:
            os.close(lock)
            raise StoreError(f"{self.folder}: another repack is at work there; wait or choose another folder") from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        self._sweep()
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(self._identity).encode(), 0)
        os.fsync(lock)
        return True

    def _sweep(self) -> None:
        """Remove what a repack writes, finished or not; the marker and strangers' files stay."""
        for path in self.folder.iterdir():
            if path.name in OUR_NAMES or (path.name.endswith(files.PARTIAL) and path.name != MARKER):
                path.unlink()

    def _abandon(self) -> None:
        if self._lock is None:
            return
        try:
            if self.finished is None:
                self._sweep()
                (self.folder / MARKER).unlink(missing_ok=True)
                for folder in self._made:
                    folder.rmdir()
        except OSError:  # the failure that brought us here matters more than what could not be tidied
            pass
        finally:
            os.close(self._lock)
            self._lock = None


def _difference(field: str, found: Any, wanted: Any) -> str:
    """How two values of an identity differ, in words; empty if they do not."""
    if field != "source":
        return "" if found == wanted else f"{field} is {found!r}, {wanted!r} was asked for"
    found, wanted = (value if isinstance(value, dict) else {} for value in (found, wanted))
    for part in ("files", "small_files"):
        there, here = (value.get(part) or {} for value in (found, wanted))
        for name in sorted({*there, *here}):
            pair = [_without_time(side.get(name)) for side in (there, here)]
            if pair[0] != pair[1]:
                return f"its source differs in {name}: {_shown(pair[0])} then, {_shown(pair[1])} now"
    return ""


def _without_time(facts: Any) -> Any:
    # A copied or touched file has another time and may be the same: repack looks closer then.
    return {key: value for key, value in facts.items() if key != "mtime_ns"} if isinstance(facts, dict) else facts


def _shown(facts: Any) -> str:
    if isinstance(facts, dict):
        return ", ".join(f"{key} {str(value)[:16]}" for key, value in facts.items())
    return "absent" if facts is None else str(facts)[:16]
