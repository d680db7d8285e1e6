"""What an unfinished store holds already: one line a finished part, so that a killed repack goes on where it stopped.

A line is the crc32 of a JSON object, in eight hexadecimal digits, and the object: `{"block": 7, "crc32": 123}` or
`{"file": "dense.safetensors", "bytes": ..., "crc32": ..., "tensors": {name: crc32}}`. A line that does not check out,
such as the torn last one of a power cut, is passed over. A line is a claim and no proof: whoever goes on reads the part
again and compares, since the journal may be on disk when the part is not.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

from nemolab.errors import StoreError
from nemolab.store import files
from nemolab.store.tensor_file import Written

JOURNAL = "journal" + files.PARTIAL
_LIMIT_BYTES = 1 << 30  # full Super has 20,480 blocks, 1 MB of lines


class Journal:
    """The journal of a folder, read once and then appended to, from any thread.

    .blocks  block index -> crc32 of the padded block
    .files   file name -> what was written
    """

    def __init__(self, folder: Path):
        self.path = folder / JOURNAL
        self.blocks: dict[int, int] = {}
        self.files: dict[str, Written] = {}
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor: int | None = os.open(self.path, flags, 0o666)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def add_block(self, index: int, crc32: int) -> None:
        self._append({"block": index, "crc32": crc32})

    def add_file(self, name: str, written: Written) -> None:
        self._append({"file": name, "bytes": written.nbytes, "crc32": written.crc32, "tensors": written.tensors})

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, record: dict[str, Any]) -> None:
        text = json.dumps(record, separators=(",", ":")).encode()
        line = memoryview(b"%08x %s\n" % (files.crc32(text), text))
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError as problem:
                raise StoreError(f"{self.path}: cannot be written ({problem.strerror or problem})") from problem

    def _read(self) -> None:
        if os.fstat(self._descriptor).st_size > _LIMIT_BYTES:
            raise StoreError(f"{self.path} has more than {_LIMIT_BYTES:,} bytes, which no repack writes; remove it")
        with open(self._descriptor, "rb", closefd=False) as file:
            raw = file.read()
        for line in raw.split(b"\n"):
            self._take(line)
        if raw and not raw.endswith(b"\n"):
            os.write(self._descriptor, b"\n")  # the next line must not grow onto a torn one

    def _take(self, line: bytes) -> None:
        text = line[9:]
        try:
            if int(line[:8], 16) != files.crc32(text):
                return
            record = json.loads(text)
            if "block" in record:
                self.blocks[int(record["block"])] = int(record["crc32"])
            else:
                self.files[record["file"]] = Written(record["bytes"], record["crc32"], record["tensors"])
        except (ValueError, KeyError, TypeError, RecursionError):  # torn, or not ours: not finished
            return
