"""The folder a store is made in: whether it may be written to, by whom, and how it is left.

Everything unfinished ends in `.partial`. The marker is the first file a repack makes and the last it removes: it says
what the folder is becoming, and its lock, which dies with its holder, says that someone is at work. An interrupt or an
error removes what was written; a kill leaves it, and the next repack of the same kind goes on from there.
"""

import contextlib
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

from nemolab.checkpoint.checkpoint import SMALL_FILES
from nemolab.checkpoint.json_files import parse_json_object
from nemolab.errors import CheckpointError, StoreError
from nemolab.store import files
from nemolab.store.journal import JOURNAL, Journal
from nemolab.store.manifest import VERSION, Manifest
from nemolab.units import show_bytes

MARKER = "repack" + files.PARTIAL
OUR_NAMES = {files.EXPERTS, files.GLOBALS, files.DENSE, files.CHECKSUMS, files.MANIFEST, *SMALL_FILES}
_KEPT = {MARKER, JOURNAL, files.DENSE, files.EXPERTS, files.EXPERTS + files.PARTIAL}  # what a repack can go on from
_ADVICE = "choose another folder or remove this one"
_MARKER_LIMIT_BYTES = 64 << 20


class Target:
    """A folder claimed for one repack. Use it in a `with` block: what is not committed is removed on the way out.

    identity   what the store would be: manifest fields that must agree with whatever is there already
    touched    facts that change whenever the source is touched: an unfinished store of other ones begins again
    .finished  the manifest of a store that is there and is the same one, else None
    .resumes   an unfinished store of the same kind is there; .journal tells what of it is written
    .restarts  one is there, but its source was touched since: all of it is made again
    .damage    what a finished store of the same kind lacks, in words: it is made again as well
    Raises StoreError for a folder that holds something else, and while another process is at work in it.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], touched: dict[str, Any] | None = None):
        self.folder = folder
        self._identity = identity
        self._mark = {"version": VERSION, **identity, "touched": touched or {}}
        self.finished: Manifest | None = None
        self.journal: Journal | None = None
        self.resumes = self.restarts = False
        self.damage: list[str] = []
        self._leave = False  # nothing was changed yet: an error leaves what an earlier run wrote
        self._lock: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> "Target":
        try:
            self._look()
            while self.finished is None and not self._claim():
                self._look()
            if self.finished is not None:
                tidy(self.folder)
        except OSError as problem:
            self._abandon()
            raise StoreError(f"{self.folder}: cannot be used ({_in_words(problem)})") from problem
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._abandon()

    def reserve(self, needed_bytes: int) -> None:
        """Check that the disk has room for what is not there yet. Raises StoreError with the numbers."""
        names = (files.EXPERTS, files.EXPERTS + files.PARTIAL, files.DENSE)
        there = sum(files.allocated_bytes(self.folder / name) for name in names) if self.resumes else 0
        free, missing = files.free_bytes(self.folder), max(0, needed_bytes - there)
        if free < missing:
            have = f", {there:,} of them are there already" if there else ""
            raise StoreError(
                f"{self.folder}: the store needs {needed_bytes:,} bytes ({show_bytes(needed_bytes)}){have}, {free:,} "
                f"({show_bytes(free)}) are free: {missing - free:,} ({show_bytes(missing - free)}) are missing"
            )

    def begin(self) -> None:
        """From here on the folder is changed, and an error removes what is in it."""
        self._leave = False

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest: from here on the folder is a store."""
        manifest.write(self.folder)
        self.finished = manifest
        (self.folder / JOURNAL).unlink(missing_ok=True)
        (self.folder / MARKER).unlink(missing_ok=True)

    def _look(self) -> None:
        """Decide whether the folder is free, a finished store of the same identity, or not ours to touch."""
        if not self.folder.exists():
            if self.folder.is_symlink():
                raise StoreError(f"{self.folder} is a link to {os.readlink(self.folder)!r}, which does not exist")
            return
        if not self.folder.is_dir():
            raise StoreError(f"{self.folder} is a file; a folder to make the store in was expected")
        if (self.folder / files.MANIFEST).exists():
            manifest = self._read_manifest()
            self._compare("another store", manifest.to_dict(), with_times=False)
            if not self.damage:
                self.finished = manifest
            return
        names = sorted({path.name for path in self.folder.iterdir()} - {"lost+found"})  # the root of a fresh disk
        if names and MARKER not in names:
            what = "is a checkpoint and no store" if "config.json" in names else f"holds {names[0]!r} and is no store"
            raise StoreError(f"{self.folder} {what}; {_ADVICE}")

    def _read_manifest(self) -> Manifest:
        """What the store that is there says it is; .damage is what of it is missing or of another size."""
        try:
            manifest = Manifest.read(self.folder, check_sizes=False)
        except StoreError as problem:
            raise StoreError(f"{problem}; {_ADVICE}") from problem
        self.damage = manifest.list_size_problems(self.folder)
        return manifest

    def _is_store(self) -> bool:
        if not (self.folder / files.MANIFEST).exists():
            return False
        self._read_manifest()
        return not self.damage

    def _compare(self, what_it_is: str, found: dict[str, Any], with_times: bool) -> None:
        for field, wanted in self._identity.items():
            difference = _difference(field, found.get(field), wanted, with_times)
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
        lock = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = marker.exists() and os.path.samestat(os.fstat(lock), marker.stat())
            if not ours or self._is_store():
                os.close(lock)
                return False
            begun = _read_marker(lock)
            if begun:
                self._compare("an unfinished repack of another kind", begun, with_times=True)
        except BlockingIOError:
            os.close(lock)
            raise StoreError(f"{self.folder}: another repack is at work there; wait or choose another folder") from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        self.resumes = self._leave = begun == json.loads(json.dumps(self._mark))
        self.restarts = bool(begun) and not self.resumes
        self._sweep(_KEPT if self.resumes else {MARKER})
        if not self.resumes:
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps(self._mark).encode(), 0)
            os.fsync(lock)
        elif (self.folder / files.EXPERTS).exists():  # it was whole; it is looked at like any other
            os.replace(self.folder / files.EXPERTS, self.folder / (files.EXPERTS + files.PARTIAL))
        self.journal = Journal(self.folder)
        return True

    def _sweep(self, kept: set[str]) -> None:
        """Remove what a repack writes, finished or not, but for the names `kept`; strangers' files stay.

        The manifest goes first: whoever is killed in here must not leave one beside missing files.
        """
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name != files.MANIFEST):
            ours = path.name in OUR_NAMES or path.name.endswith(files.PARTIAL)
            # Somebody's link in the place of our file would lead the next write astray.
            if ours and (path.name not in kept or not stat.S_ISREG(path.lstat().st_mode)):
                path.unlink()

    def _abandon(self) -> None:
        if self.journal is not None:
            self.journal.close()
        try:
            if self._lock is not None and self.finished is None and not self._leave:
                self._sweep({MARKER})
                (self.folder / MARKER).unlink(missing_ok=True)
            if self.finished is None and not self._leave:
                for folder in self._made:
                    folder.rmdir()
        except OSError:  # the failure that brought us here matters more than what could not be tidied
            pass
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None


def tidy(folder: Path) -> None:
    """Remove what a repack that was killed just after its manifest left in a finished store. Does what it may."""
    marker = folder / MARKER
    if not marker.exists():
        return
    with contextlib.suppress(OSError):
        lock = os.open(marker, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever holds it is about to remove it
            for path in folder.iterdir():
                if path.name.endswith(files.PARTIAL) and path.name != MARKER:
                    path.unlink()
            marker.unlink()
        finally:
            os.close(lock)


def _read_marker(descriptor: int) -> dict[str, Any]:
    """What an unfinished repack was to become; empty where it was killed before it said so, and began nothing."""
    try:
        raw = os.pread(descriptor, _MARKER_LIMIT_BYTES, 0)
        return parse_json_object(raw, MARKER)
    except CheckpointError:
        return {}


def _difference(field: str, found: Any, wanted: Any, with_times: bool) -> str:
    """How two values of an identity differ, in words; empty if they do not."""
    if field != "source":
        return "" if found == wanted else f"{field} is {found!r}, {wanted!r} was asked for"
    found, wanted = (value if isinstance(value, dict) else {} for value in (found, wanted))
    for part in ("files", "small_files"):
        there, here = (value.get(part) or {} for value in (found, wanted))
        for name in sorted({*there, *here}):
            then, now = (_facts(side.get(name), with_times) for side in (there, here))
            if then != now:
                return f"its source differs in {name}: {_shown(then, now)} then, {_shown(now, then)} now"
    return ""


def _facts(facts: Any, with_times: bool) -> Any:
    # A copied or touched file has another time and may be the same: beside a finished store repack looks closer.
    if not isinstance(facts, dict) or with_times:
        return facts
    return {key: value for key, value in facts.items() if key != "mtime_ns"}


def _shown(facts: Any, other: Any) -> str:
    """The facts about a file that differ from the other ones."""
    if not isinstance(facts, dict):
        return "absent" if facts is None else str(facts)[:16]
    other = other if isinstance(other, dict) else {}
    return ", ".join(f"{key} {str(value)[:20]}" for key, value in facts.items() if other.get(key) != value)


def _in_words(problem: OSError) -> str:
    words = problem.strerror or str(problem)
    return f"{words}: {problem.filename}" if problem.filename else words
