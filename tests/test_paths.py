"""Things are found from wherever one starts, and the error says what to do when they are not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemolab import paths
from nemolab.errors import NemolabError


def test_home_is_found_from_any_folder(root_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paths.home() == root_path
    assert paths.tiny_folder() == root_path / "data" / "tiny"


def test_home_is_found_from_a_deleted_folder(root_path, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert paths.home() == root_path


def test_home_follows_the_variable(tmp_path, monkeypatch):
    home = tmp_path / "größe mit leer"
    (home / "data/tiny").mkdir(parents=True)
    (home / "data/tiny/config.json").write_text("{}")
    monkeypatch.setenv("NEMOLAB_HOME", str(home))
    assert paths.notebooks_folder() == home / "notebooks"


def test_home_refuses_a_variable_that_points_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMOLAB_HOME", str(tmp_path))
    with pytest.raises(NemolabError, match="NEMOLAB_HOME.*holds no data/tiny/config.json"):
        paths.home()


def test_a_package_away_from_its_data_says_where_it_searched(tmp_path):
    """The package copied out of the clone, as a wheel would install it."""
    shutil.copytree(Path(paths.__file__).parent, tmp_path / "nemolab", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from nemolab import paths\ntry: paths.home()\nexcept Exception as error: print(type(error).__name__, error)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert result.stdout.startswith("NemolabError no data/tiny/config.json at or above ")
    assert str(tmp_path) in result.stdout and "NEMOLAB_HOME" in result.stdout


def test_the_model_is_the_one_named_then_the_variable_then_the_shipped_one(root_path, tmp_path, monkeypatch):
    assert paths.model_folder() == paths.model_folder("") == root_path / "data" / "tiny"
    monkeypatch.setenv("NEMOLAB_MODEL", str(tmp_path / "a"))
    assert paths.model_folder() == tmp_path / "a"
    assert paths.model_folder(tmp_path / "b") == tmp_path / "b"


def test_the_cache_folder_follows_its_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMOLAB_CACHE", str(tmp_path / "mine"))
    assert paths.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("NEMOLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.cache_folder() == tmp_path / "nemolab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_folder() == tmp_path / ".cache" / "nemolab"


def test_tests_have_a_cache_of_their_own():
    assert "nemolab-tests-" in str(paths.cache_folder())


def test_paths_are_shown_short(root_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/reader")
    assert paths.shown(root_path / "data/tiny") == "data/tiny"
    assert paths.shown("/home/reader/models/super") == "~/models/super"
    assert paths.shown("/somewhere/else") == "/somewhere/else"
