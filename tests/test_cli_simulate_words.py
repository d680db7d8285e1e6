"""`nemolab simulate`: live misses, models, figures, and one clear line for words and files that are wrong."""

import json

import numpy as np
import pytest
from simulate_cli import ask, call, refuse, rows_of
from toy_traces import KNOWN, draw_trace, make_trace

from nemolab.simulate import check_live, from_trace, replay, sweep
from nemolab.trace import write_trace
from nemolab.units import Budget


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --- live against replay


def live_of(trace, **settings):
    """The trace, with the misses that a replay under these settings has as if an engine had recorded them."""
    lookups = from_trace(trace)
    live = np.full((trace.n_tokens, trace.n_layers), -1, np.int32)
    last = np.searchsorted(trace.step, lookups.step, side="right") - 1
    live[last, lookups.layer] = replay(lookups, **settings).misses_by_batch()
    return live


CACHE = {"policy": "lru", "slots": 9, "budget_bytes": 36864, "prefetch": 2}


def recorded_trace(change=0, **cache):
    """Live misses of CACHE, with `change` more in one batch; `cache`: what the file says of it instead."""
    live = live_of(draw_trace(), policy="lru", slots=9, prefetch=2)
    live[-1, 1] += change
    taken = {"kind": "chat", "cache": CACHE | cache}
    return draw_trace(meta={"taken": taken, "block_bytes": (4096,) * 3}, live_misses=live)


def test_check_holds_live_misses_against_a_replay_of_the_recorded_cache():
    live = ask(recorded_trace(), "--check")["live"]
    assert live["equal"] and live["live_misses"] == live["replay_misses"] > 0 and live["batches"] == (50 + 2) * 3
    assert live["settings"] == {"policy": "lru", "prefetch": 2, "slots": 9}
    assert "equal in every one" in call(recorded_trace(), "--check")[1]


def test_check_fails_where_one_batch_differs():
    code, out, err = call(recorded_trace(1), "--check")
    assert code == 1 and "1 differ; the first of them:" in out
    assert err == "nemolab: live and replayed misses differ in 1 of 156 batches\n"
    found = json.loads(call(recorded_trace(1), "--check", "--json")[1])["live"]
    (first,) = found["first_differences"]
    assert (first["conversation"], first["layer"], first["phase"]) == (1, 1, "decode")
    assert first["live"] == first["replay"] + 1 and not found["equal"]


def test_check_of_another_prefetch_is_seen_to_differ():
    assert check_live(recorded_trace()).equal
    assert not check_live(recorded_trace(prefetch=1)).equal


@pytest.mark.parametrize(
    "cache, words",
    [
        (None, ["does not say which cache"]),
        ({"slots": 3}, ["policy is None"]),
        ({"policy": "mru", "slots": 3}, ["cannot be replayed", "unknown policy 'mru'"]),
        ({"policy": "lru", "slots": "3"}, ["slots is '3'"]),
        ({"policy": "lru"}, ["budget_bytes is None"]),
        ({"policy": "lru", "slots": 3, "start": "as it was"}, ["start is 'as it was'", "fresh engine"]),
        ({"policy": "lru", "slots": 3, "prefetch": -1}, ["prefetch is -1"]),
    ],
)
def test_check_refuses_what_cannot_be_replayed(cache, words):
    live = live_of(draw_trace(), slots=9)
    trace = draw_trace(meta={"taken": {"kind": "chat", "cache": cache}}, live_misses=live)
    refuse(call(trace, "--check"), *words)


def test_check_without_live_misses_is_refused():
    assert refuse(call(draw_trace(), "--check"), "holds no live misses", "`nemolab trace` records them") == 1


# --- the model


def test_a_model_lends_its_block_sizes_and_refuses_others_traces(tiny_path):
    shape = dict(n_layers=6, n_experts=64, top_k=6)
    data = ask(draw_trace(meta={}, **shape), "--model", tiny_path, "--budget", "1MiB")
    assert data["trace"]["block_bytes"] == 36864 and rows_of(data)[0]["slots"] == 28
    assert any("by its shape alone" in note for note in data["notes"])
    refuse(call(draw_trace(), "--model", tiny_path), "trace of another model", "6 of 64, top-6")
    refuse(call(draw_trace(meta={"fingerprint": "0" * 64}, **shape), "--model", "nowhere"), "nowhere")


# --- figures


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_the_plot_is_of_the_form_that_its_suffix_says(tmp_path, suffix, start):
    code, out, _ = call(draw_trace(), "--plot", f"curve.{suffix}", "--prefetch", "0,2")
    assert code == 0 and f"drawn: curve.{suffix}" in out
    assert (tmp_path / f"curve.{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize(
    "name, word", [("curve.gif", ".png, .svg, .pdf"), ("curve", "suffix"), ("no/c.png", "no folder")]
)
def test_a_plot_that_cannot_be_is_refused_before_any_work(name, word):
    refuse(call("no such trace", "--plot", name), name, word)


def test_a_plot_in_the_place_of_a_folder_is_refused_before_any_work(tmp_path):
    (tmp_path / "kept.png").mkdir()
    refuse(call("no such trace", "--plot", "kept.png"), "kept.png", "that is a folder")


def test_an_interrupt_while_it_is_written_leaves_the_figure_of_before(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    seen = []

    def stop(figure, file, **_):
        file.write(b"half of it")
        file.flush()
        seen.extend(path.name for path in tmp_path.iterdir())
        raise KeyboardInterrupt

    (tmp_path / "curve.png").write_bytes(b"before")
    monkeypatch.setattr(Figure, "savefig", stop)
    assert call(draw_trace(), "--plot", "curve.png")[0] == 130
    assert len(seen) == 3, "it was being written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "toy.trace"]
    assert (tmp_path / "curve.png").read_bytes() == b"before"


def test_a_plot_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: (tmp_path / "curve.png").mkdir())
    assert refuse(call(draw_trace(), "--plot", "curve.png"), "curve.png", "cannot be put in its place") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "toy.trace"]


# --- words


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--budget", ""], ["empty budget"]),
        (["--budget", "1GiB,,2GiB"], ["empty budget in '1GiB,,2GiB'"]),
        (["--budget", "0MiB"], ["'0MiB' leaves room for nothing"]),
        (["--budget", "-1GiB"], ["'-1GiB' is no size"]),
        (["--budget", "nanGiB,4,2GiB,x"], ["'nanGiB' is no size", "'4' is no size", "'x' is no size"]),
        (["--budget", "2GiB,2048MiB"], ["budget 2048MiB is given twice"]),
        (["--budget", "2000000TiB"], ["beyond any machine"]),
        (["--budget", f"{10**30}slots"], ["beyond any machine"]),
        (["--budget", "1.5slots"], ["whole blocks"]),
        (["--policy", "lru,mru,x"], ["unknown policy 'mru'", "unknown policy 'x'", "belady-bypass"]),
        (["--policy", "lru,lru"], ["policy lru is given twice"]),
        (["--policy", ""], ["empty policy"]),
        (["--prefetch", "-1"], ["prefetch '-1'", "from 0 up"]),
        (["--prefetch", "1.5,two"], ["'1.5'", "'two'"]),
        (["--prefetch", "2,2"], ["prefetch 2 is given twice"]),
        (["--block-bytes", "0"], ["block-bytes"]),
        (["--reads-in-time", "-1"], ["reads-in-time"]),
    ],
)
def test_wrong_words_are_refused_before_the_trace_is_read(words, expected):
    assert refuse(call("no such trace", *words), *expected) == 2


def test_prefetch_needs_as_many_guesses_as_it_asks_for():
    refuse(call(draw_trace(), "--prefetch", "4,5,9"), "prefetch 5, 9", "holds 4 guesses for each layer")
    refuse(call(make_trace(KNOWN), "--prefetch", "1"), "prefetch 1: the trace holds no guesses")


def test_a_trace_that_is_none_is_refused(tmp_path):
    refuse(call("missing.trace"), "missing.trace")
    (tmp_path / "empty.trace").write_bytes(b"")
    refuse(call("empty.trace"), "empty.trace", "empty")
    write_trace(tmp_path / "whole.trace", draw_trace())
    (tmp_path / "cut.trace").write_bytes((tmp_path / "whole.trace").read_bytes()[:-10])
    refuse(call("cut.trace"), "cut.trace")


def test_lists_may_be_given_in_pieces():
    data = ask(make_trace(KNOWN), "--budget", "1slots", "--budget", "2slots, 3 slots", "--policy", "lru")
    assert [row["slots"] for row in rows_of(data)] == [1, 2, 3]


def test_progress_is_told_run_by_run():
    seen = []
    budgets = [Budget(slots=slots) for slots in (1, 2, 3)]
    sweep(from_trace(draw_trace()), budgets, ["lru"], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
