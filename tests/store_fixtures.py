"""Fixtures of the tests of stores, as a plugin: a synthetic source, a copy of it, a store of it."""

import shutil
from pathlib import Path

import pytest
from stores import quiet
from synthetic import write_checkpoint

from nemolab.store import repack


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
