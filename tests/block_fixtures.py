"""Fixtures of the tests of the cache, as a plugin: random blocks, and a store of them."""

import pytest
from blocks import random_blocks, write_store


@pytest.fixture(scope="module")
def data():
    return random_blocks()


@pytest.fixture
def store(tmp_path, data):
    return write_store(tmp_path, data)
