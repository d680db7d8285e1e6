"""What the tests of stores share: looking at one, and damaging one."""

import hashlib
from pathlib import Path


def quiet(line):
    """For `announce` where a test is about something else."""


def digests(folder):
    """File name -> hash of its bytes."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}


def damage(path, offset, flip=0x01):
    """Flip bits of one byte."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ flip]))
