"""The place of stores: its file system, its room, and direct I/O by a real write and a real read there."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nemolab import paths
from nemolab.doctor.check import Check
from nemolab.errors import NemolabError
from nemolab.store import direct_io, files
from nemolab.store.store import Store
from nemolab.system.mounts import find_mount, free_bytes, read_mounts
from nemolab.units import show_bytes

BLOCK_BYTES = 756 * 4096  # an expert of Nemotron-3-Super: what matters is reads of this size
BLOCKS = 2
LEAST_FREE_BYTES = 2**30  # below this a store of anything but a small model will not fit
_ONE_SUPER = "one of Nemotron-3-Super takes 60 GiB"
_WRITABLE = "a folder that can be written"
_ELSEWHERE = "set NEMOLAB_CACHE to a folder that can be written, or name one with --store"

# What "direct" means on file systems that do not simply read the disk.
_NETWORK = "reads go over the network, and the server's cache may answer them; put stores on a local NVMe drive"
_PASSED_ON = "another program or the host does the reading, with a cache of its own; put stores on a local Linux disk"
_COPIES = "a container's own layer; put stores on a volume mounted from the host"
_MEMORY = "memory, not a disk: a store here takes RAM from the cache and is gone after a restart"
_FIXED = "read-only by nature; put stores elsewhere"
EMULATED = {
    "btrfs": "compressed and checksummed files may be read through the page cache although O_DIRECT is accepted; use a "
    "folder without compression (chattr +m, or +C before the files are made) or ext4 or xfs",
    "zfs": "O_DIRECT may be accepted and answered from ZFS's own cache (ARC), as versions before 2.3 do; for "
    "measurements use ext4 or xfs, or OpenZFS 2.3 with direct=always",
    "bcachefs": "compressed or checksummed extents may be read through buffers; for measurements use ext4 or xfs",
    "overlay": _COPIES,
    "aufs": _COPIES,
    "tmpfs": _MEMORY,
    "ramfs": _MEMORY,
    "squashfs": _FIXED,
    "erofs": _FIXED,
    "iso9660": _FIXED,
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "afs"), _NETWORK),
    **dict.fromkeys(("9p", "drvfs", "virtiofs", "vboxsf", "fuse", "fuseblk", "prl_fs", "vmhgfs"), _PASSED_ON),
}
PLAIN = ("ext4", "xfs", "ext3", "ext2", "f2fs")


@dataclass
class Place:
    """Where a store lies or would lie, and what was found there.

    folder   as asked for
    existing the nearest folder of it that exists, where the trial file is made
    """

    folder: Path
    existing: Path
    file_system: str | None = None
    free_bytes: int | None = None
    mode: str | None = None
    reason: str = ""
    alignment: direct_io.Alignment | None = None
    trial: str = field(default="")

    def to_dict(self) -> dict:
        return {
            "folder": str(self.folder),
            "exists": self.folder == self.existing,
            "file_system": self.file_system,
            "free_bytes": self.free_bytes,
            "mode": self.mode,
            "reason": self.reason,
            "memory_alignment_bytes": self.alignment and self.alignment.memory_bytes,
            "offset_alignment_bytes": self.alignment and self.alignment.offset_bytes,
        }


def find_place(store: str | Path | None) -> Place | Check:
    """Where to look: at the store or folder named, else in the cache folder. A Check where that cannot be said."""
    try:
        folder = (paths.expand(store) if store is not None else paths.cache_folder() / "stores").absolute()
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        (folder / files.MANIFEST).exists()  # raises where the folder may not be looked into
    except OSError as problem:
        found = f"{store or 'the cache folder'} cannot be looked at ({problem.strerror or problem})"
        return Check("store folder", "fail", found, _WRITABLE, _ELSEWHERE)
    except NemolabError as problem:
        return Check("store folder", "fail", str(problem), _WRITABLE, _ELSEWHERE)
    return Place(folder, existing)


def check_folder(place: Place) -> Check:
    """Whether a store can be made there or, where one lies already, be read."""
    if not place.existing.is_dir():
        return Check("store folder", "fail", f"{place.existing} is a file", "a folder", "name another with --store")
    where = str(place.folder) if place.folder == place.existing else f"{place.folder}, to be made in {place.existing}"
    if (place.folder / files.MANIFEST).exists():
        return Check("store folder", "ok", f"{place.folder} holds a store", f"a store, or {_WRITABLE}")
    try:
        with tempfile.TemporaryFile(dir=place.existing):
            pass
    except OSError as problem:
        found = f"{where}: cannot be written ({problem.strerror or problem})"
        return Check("store folder", "fail", found, _WRITABLE, _ELSEWHERE)
    return Check("store folder", "ok", where, _WRITABLE)


def check_file_system(place: Place, root: Path) -> Check:
    """By its name, with a word where "direct" may not mean what it says."""
    mount = find_mount(Path(os.path.realpath(place.existing)), read_mounts(root))
    if mount is None:
        return Check("file system", "info", "the kernel does not tell (/proc/self/mountinfo)")
    place.file_system = mount.fs_type
    found = f"{mount.fs_type} on {mount.source}, mounted at {mount.point}"
    warning = EMULATED.get(mount.fs_type) or EMULATED.get(mount.fs_type.partition(".")[0])  # fuse.sshfs is fuse
    if warning:
        advice = f"direct reads may be emulated here, and speeds measured here are not a disk's: {warning}"
        return Check("file system", "warn", found, "ext4 or xfs", advice)
    return Check("file system", "ok" if mount.fs_type in PLAIN else "info", found, "ext4 or xfs")


def check_free(place: Place) -> Check:
    place.free_bytes = free_bytes(place.existing)
    found, expected = f"{show_bytes(place.free_bytes)} free", f"{show_bytes(LEAST_FREE_BYTES)} or more; {_ONE_SUPER}"
    if place.free_bytes < LEAST_FREE_BYTES and not (place.folder / files.MANIFEST).exists():
        return Check("free space", "warn", found, expected, "make room, or set NEMOLAB_CACHE to a larger disk")
    return Check("free space", "ok", found, expected)


def check_direct_io(place: Place) -> Iterator[Check]:
    """Whether reads there go past the page cache, by writing and reading; of a store that is there, by reading it."""
    if (place.folder / files.MANIFEST).exists():
        place.trial = "experts.bin"
        _try_store(place)
    else:
        place.trial = "a trial file"
        _try_new_file(place)
    expected = "direct: past the page cache"
    if place.mode == "direct":
        yield Check("direct I/O", "ok", f"direct, verified on {place.trial}: {place.reason}", expected)
    else:
        advice = "everything works, but reads go through the page cache, which takes memory and hides the disk's speed"
        yield Check("direct I/O", "warn", f"buffered, {place.trial}: {place.reason}", expected, advice)
    yield _check_alignment(place.alignment)


def _check_alignment(alignment: direct_io.Alignment | None) -> Check:
    if alignment is None:
        return Check("alignment", "info", "the kernel does not tell (statx of Linux 6.1 does); whole pages are used")
    if not alignment.offset_bytes:
        return Check("alignment", "info", "the kernel says that files here cannot do direct I/O")
    found = f"{alignment.memory_bytes} bytes in memory, {alignment.offset_bytes} in the file"
    if BLOCK_BYTES % alignment.offset_bytes:
        advice = "experts are then read through the page cache; a file system with blocks of 4 to 16 KiB would do"
        return Check("alignment", "warn", found, f"a divisor of {BLOCK_BYTES:,}", advice)
    return Check("alignment", "ok", found, f"a divisor of {BLOCK_BYTES:,}")


def _try_store(place: Place) -> None:
    try:
        store = Store.open(place.folder)
        with store.open_reader(threads=1, announce=lambda line: None) as reader:
            place.mode, place.reason = reader.mode, reader.reason
        descriptor = os.open(store.path / files.EXPERTS, os.O_RDONLY | os.O_CLOEXEC)
    except NemolabError as problem:
        place.reason = str(problem)
        return
    try:
        place.alignment = direct_io.ask_alignment(descriptor)
    finally:
        os.close(descriptor)


def _try_new_file(place: Place) -> None:
    """Blocks written and read back as a store's would be, in a file that is gone afterwards."""
    place.mode = "buffered"
    handle, name = tempfile.mkstemp(prefix=".nemolab-doctor-", dir=place.existing)
    os.close(handle)
    path = Path(name)
    descriptor = None
    try:
        descriptor, place.reason = direct_io.open_direct(path, os.O_RDWR)
        if descriptor is None:
            return
        place.alignment = direct_io.ask_alignment(descriptor)
        block = direct_io.aligned_buffer(BLOCK_BYTES)
        block[:] = 0x5A
        try:
            for number in range(BLOCKS):
                if os.pwritev(descriptor, [block], number * BLOCK_BYTES) != BLOCK_BYTES:
                    place.reason = f"a direct write of {BLOCK_BYTES:,} bytes was cut short"
                    return
            os.fsync(descriptor)
        except OSError as problem:
            place.reason = f"a direct write of {BLOCK_BYTES:,} bytes fails ({problem.strerror})"
            return
        proof = direct_io.prove_direct(descriptor, BLOCK_BYTES, BLOCKS)
        place.mode, place.reason = "direct" if proof.direct else "buffered", proof.reason
    finally:
        if descriptor is not None:
            os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
