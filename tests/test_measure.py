"""Rows carry samples and excuses; a comparison inside the spread has no winner."""

import json

import pytest

from nemolab.errors import NemolabError
from nemolab.measure import latest, machine, make_row, read_rows, record, versus
from nemolab.measure.rows import FIELDS


def test_a_row_keeps_samples_settings_machine_and_commit(tmp_path):
    row = record("pread", [0.3, 0.1, 0.2], "s", {"threads": 32}, folder=tmp_path)
    (line,) = (tmp_path / "pread.jsonl").read_text().splitlines()
    assert json.loads(line) == row and tuple(row) == FIELDS
    assert row["values"] == [0.3, 0.1, 0.2] and row["settings"] == {"threads": 32}
    assert row["machine"] == machine() and row["machine"]["cores"] >= 1
    assert row["commit"] is None or len(row["commit"]) >= 7


def test_rows_are_appended_and_read_back_with_median_and_spread(tmp_path):
    record("pread", [0.3, 0.1, 0.2], "s", {"threads": 32}, folder=tmp_path)
    record("pread", [0.5], "s", {"threads": 1}, folder=tmp_path)
    record("kl", [1e-9], "nats", {}, folder=tmp_path)
    frame = read_rows("pread", tmp_path)
    assert (
        list(frame["median"]) == [0.2, 0.5] and list(frame["low"]) == [0.1, 0.5] and list(frame["high"]) == [0.3, 0.5]
    )
    assert len(read_rows(folder=tmp_path)) == 3
    assert latest("pread", tmp_path, threads=32)["median"] == 0.2
    assert latest("pread", tmp_path, threads=lambda count: count > 2)["median"] == 0.2
    assert latest("pread", tmp_path)["median"] == 0.5


def test_a_setting_that_rows_may_lack_is_asked_for_by_none(tmp_path):
    record("kl", [1.0], "nats", {"model": "tiny"}, folder=tmp_path)
    record("kl", [2.0], "nats", {"model": "tiny", "device": "cuda"}, folder=tmp_path)
    assert latest("kl", tmp_path, device=None)["median"] == 1 and latest("kl", tmp_path, device="cuda")["median"] == 2
    assert latest("kl", tmp_path, model="tiny")["median"] == 2
    with pytest.raises(NemolabError, match="no measurement kl with model=None"):
        latest("kl", tmp_path, model=None)


def test_names_of_two_parts_share_a_file(tmp_path):
    for name in ("compare.kl_mean", "compare.ppl_engine", "decode"):
        record(name, [1.0], "nats", {}, folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.jsonl", "decode.jsonl"]
    assert list(read_rows("compare.kl_mean", tmp_path)["name"]) == ["compare.kl_mean"]
    assert len(read_rows("compare.*", tmp_path)) == 2 and len(read_rows(folder=tmp_path)) == 3


def test_reading_nothing_gives_an_empty_frame_and_latest_says_what_is_missing(tmp_path):
    assert read_rows("pread", tmp_path).empty
    with pytest.raises(NemolabError, match="no measurement pread with threads=2"):
        latest("pread", tmp_path, threads=2)


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_a_row_without_real_samples_is_refused(tmp_path, values):
    with pytest.raises(NemolabError, match="measurement pread"):
        record("pread", values, "s", {}, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_no_file_name_is_refused(tmp_path):
    with pytest.raises(NemolabError, match="small letters"):
        record("../pread", [1.0], "s", {}, folder=tmp_path)


@pytest.mark.parametrize(
    ("told", "commit", "dirty"),
    [
        ("abc123def456", "abc123def456", False),
        ("abc123def456+changes", "abc123def456", True),
        ("0" * 40, "0" * 12, False),
    ],
)
def test_a_copy_that_git_does_not_know_is_told_its_commit(monkeypatch, told, commit, dirty):
    monkeypatch.setenv("NEMOLAB_COMMIT", told)
    row = make_row("pread", [1.0], "s", {})
    assert row["commit"] == commit and row["dirty"] is dirty


@pytest.mark.parametrize("told", ["", "main", "abc123", "ABC123DEF456", "abc123def456+change", "0" * 41])
def test_what_is_no_commit_is_refused_before_a_row_is_made(monkeypatch, tmp_path, told):
    monkeypatch.setenv("NEMOLAB_COMMIT", told)
    with pytest.raises(NemolabError, match="NEMOLAB_COMMIT is .*hexadecimal"):
        record("pread", [1.0], "s", {}, folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["{", "[]", '{"name": "pread"}', "3"])
def test_a_damaged_line_is_named(tmp_path, line):
    record("pread", [1.0], "s", {}, folder=tmp_path)
    with open(tmp_path / "pread.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(NemolabError, match="pread.jsonl, line 2"):
        read_rows("pread", tmp_path)


class FakeClock:
    """Advances only when a call spends time: no test waits, none depends on the machine."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spender(self, seconds):
        spent = iter(seconds)
        return lambda: setattr(self, "now", self.now + next(spent))


def test_equal_medians_have_no_winner():
    clock = FakeClock()
    result = versus(clock.spender([9, 1, 3, 2]), clock.spender([9, 2, 2, 2]), rounds=3, clock=clock)
    assert result.ratio == 1 and result.verdict == "no difference"


def test_a_clear_winner_is_named_in_both_directions():
    clock = FakeClock()
    assert versus(clock.spender([9, 4, 5, 6]), clock.spender([9, 1, 2, 3]), rounds=3, clock=clock).verdict == (
        "second is faster"
    )
    assert versus(clock.spender([9, 1, 2, 3]), clock.spender([9, 4, 5, 6]), rounds=3, clock=clock).verdict == (
        "first is faster"
    )


def test_the_two_ways_take_turns_and_warm_ups_do_not_count():
    order = []
    result = versus(lambda: order.append("a"), lambda: order.append("b"), rounds=3, warmups=1)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert len(result.first) == len(result.second) == 3


def test_two_rounds_are_refused():
    with pytest.raises(ValueError, match="at least 3"):
        versus(lambda: None, lambda: None, rounds=2)
