"""Stores made on the way: made once, found again, never spoilt by a second maker."""

import os
import shutil
import subprocess
import sys

import pytest
from stores import damage, quiet

from nemolab.checkpoint import Checkpoint
from nemolab.errors import StoreError
from nemolab.store import Store, ensure_store, files, verify
from nemolab.store.target import MARKER

pytest_plugins = ["store_fixtures"]


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMOLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_store_is_made_once_and_found_again(source, cache_folder):
    said = []
    first = ensure_store(source, announce=said.append)
    assert cache_folder in first.parents and "making one" in said[0]
    said.clear()
    assert ensure_store(source, announce=said.append) == first and said == []
    other = ensure_store(source, layout="source", announce=quiet)
    assert other != first and Store.open(other).layout == "source"


def test_changed_weights_get_a_store_of_their_own(copied, cache_folder):
    first = ensure_store(copied, announce=quiet)
    entry = Checkpoint.open(copied).entry("backbone.layers.1.mixer.experts.3.up_proj.weight")
    damage(copied / entry.shard, entry.offset_bytes)
    second = ensure_store(copied, announce=quiet)
    assert second != first and verify(second, source=copied, all=True).mismatches == 0


def test_a_damaged_store_in_the_cache_folder_is_made_again(source, cache_folder):
    path = ensure_store(source, announce=quiet)
    os.truncate(path / files.EXPERTS, 4096)
    assert ensure_store(source, announce=quiet) == path
    assert verify(path, source=source, all=True).mismatches == 0


def test_a_killed_maker_does_not_spoil_the_cache_folder(source, cache_folder):
    path = ensure_store(source, announce=quiet)
    (path / files.MANIFEST).unlink()
    (path / MARKER).write_text("")
    assert ensure_store(source, announce=quiet) == path
    assert verify(path, source=source, all=True).mismatches == 0


def test_makers_at_the_same_time_get_one_good_store(source, cache_folder):
    script = "import sys; from nemolab.store import ensure_store; print(ensure_store(sys.argv[1]))"
    makers = [
        subprocess.Popen([sys.executable, "-c", script, source], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    answers = [maker.communicate() for maker in makers]
    assert [maker.returncode for maker in makers] == [0] * 4, [error.decode() for _, error in answers]
    assert len({out for out, _ in answers}) == 1
    assert sum(b"making one" in error for _, error in answers) == 1
    assert verify(answers[0][0].decode().strip(), source=source, all=True).mismatches == 0


def test_an_unwritable_cache_folder_is_said(source, cache_folder):
    cache_folder.write_text("a file in the way")
    with pytest.raises(StoreError, match="cache folder cannot be written .* NEMOLAB_CACHE"):
        ensure_store(source, announce=quiet)


def test_importing_the_store_does_not_import_torch():
    script = "import sys, nemolab.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_checkpoint_of_the_longest_name_gets_a_store(source, cache_folder, tmp_path):
    longest = tmp_path / ("\u00e9" * 127)
    longest.symlink_to(source)
    assert Store.open(ensure_store(longest, announce=quiet)).n_experts
    copied = shutil.copytree(source, longest.with_name("n" * 255))
    assert Store.open(ensure_store(copied, announce=quiet)).n_experts
