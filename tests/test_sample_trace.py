"""The trace that notebooks look at: named, by variable, shipped, or recorded once of another model."""

from nemolab import paths
from nemolab.sample_trace import find_trace
from nemolab.trace import open_trace


def link_model(folder):
    """The shipped model under another name: to find_trace another model."""
    folder.mkdir()
    for path in paths.tiny_folder().iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def test_the_trace_is_the_one_named_then_the_variable_then_the_shipped(tmp_path, monkeypatch):
    shipped = paths.traces_folder() / "conversations.safetensors"
    assert find_trace() == find_trace(model=paths.tiny_folder()) == shipped and shipped.is_file()
    monkeypatch.setenv("NEMOLAB_TRACE", str(tmp_path / "variable.csv"))
    assert find_trace() == tmp_path / "variable.csv"
    assert find_trace(tmp_path / "named.csv") == tmp_path / "named.csv"


def test_another_model_is_recorded_once(tmp_path, monkeypatch):
    monkeypatch.setattr("nemolab.sample_trace.ANSWER_TOKENS", 2)
    model = link_model(tmp_path / "model")
    path = find_trace(model=model)
    trace = open_trace(path)
    trace.check_model(open_trace(find_trace()).meta.fingerprint, 6, 64, 6)
    assert len(trace.meta.taken["conversations"]) == 5 and trace.meta.taken["answers"] == 5
    before = path.stat().st_mtime_ns
    assert find_trace(model=model) == path and path.stat().st_mtime_ns == before
    path.unlink()
