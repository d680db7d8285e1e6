"""What the tests of stores share: a synthetic source, a store of it, and ways to damage one."""

import hashlib
import shutil
from pathlib import Path

import pytest
from synthetic import write_checkpoint

from nemolab.store import repack


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


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A small checkpoint that no test may change."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "source")


@pytest.fixture
def store_path(source, tmp_path):
    """A fresh store of `source`."""
    repack(source, tmp_path / "store", announce=quiet)
    return tmp_path / "store"


@pytest.fixture
def copied(source, tmp_path):
    """A copy of the source that a test may change."""
    return Path(shutil.copytree(source, tmp_path / "copied"))
