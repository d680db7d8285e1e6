"""Rows carry samples and excuses; a comparison inside the spread has no winner."""

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from faults import run_cli

from nemolab import paths
from nemolab.errors import NemolabError
from nemolab.measure import latest, latest_run, machine, make_row, read_rows, record, record_run, runs_with, versus
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


def record_one_run(folder, second: int, **values: float) -> str:
    """Rows `card.<name>` of one run that began at that second; what ties them together."""
    rows = [{"name": f"card.{name}", "values": [value], "unit": "ms", "settings": {}} for name, value in values.items()]
    record_run(rows, datetime(2026, 11, 30, 9, 0, second, 250_000, timezone(timedelta(hours=1))), folder=folder)
    return f"2026-11-30T08:00:0{second}.250+00:00"


def test_rows_of_one_run_are_tied_together_by_when_it_began(tmp_path):
    run = record_one_run(tmp_path, 1, pull=1, rows=2)
    other = record_one_run(tmp_path, 2, pull=3)
    assert [json.loads(line)["settings"] for line in (tmp_path / "card.jsonl").read_text().splitlines()] == [
        {"run": run}
    ] * 2 + [{"run": other}]
    assert list(read_rows("card.*", tmp_path)["run"]) == [run, run, other]
    assert latest("card.pull", tmp_path)["median"] == 3 and latest("card.pull", tmp_path, run=run)["median"] == 1
    with pytest.raises(NemolabError, match=f"no measurement card.rows in the run of {other[:19]}"):
        latest("card.rows", tmp_path, run=other)


def test_rows_recorded_by_one_command_are_of_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "measurements_folder", lambda: tmp_path)
    for experts in (2, 3):
        code, _, err = run_cli("bench", "expert", "--shape", "tiny", "--experts", experts, "--repeats", 3, "--record")
        assert code == 0, err
    frame = read_rows("expert.*")
    assert frame.groupby("run").size().tolist() == [5, 5] and frame["run"].is_monotonic_increasing
    assert all(datetime.fromisoformat(run) <= datetime.now(UTC) for run in frame["run"])
    told = [
        run["expert.engine"]["settings"]["experts"] for run in runs_with(["expert.engine", "expert.read_bandwidth"])
    ]
    assert told == [2, 3]


def test_a_run_counts_when_it_has_all_rows(tmp_path):
    names = ["card.pull", "card.row?"]
    for second, values in enumerate(({"pull": 1, "rows": 2}, {"pull": 3, "rows": 4}, {"pull": 5}, {"rows": 6})):
        record_one_run(tmp_path, second, **values)
    assert [{name: row["median"] for name, row in rows.items()} for rows in runs_with(names, tmp_path)] == [
        {"card.pull": 1, "card.row?": 2},
        {"card.pull": 3, "card.row?": 4},
    ]
    assert latest_run(names, tmp_path)["card.pull"]["median"] == 3
    with pytest.raises(
        NemolabError, match="no run with all of card.pull, card.push with active=1, n that passes a test"
    ):
        latest_run(["card.pull", "card.push"], tmp_path, active=1, n=lambda n: n > 2)


def test_older_rows_of_one_second_are_of_one_run(tmp_path):
    row = make_row("card.pull", [1.0], "ms", {})
    old = [row | {"time": f"2026-11-30T00:00:0{second}+00:00"} for second in (1, 1, 2)]
    (tmp_path / "card.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    first, second, third = read_rows("card.pull", tmp_path)["run"]
    assert first == second != third


def test_only_files_that_can_hold_a_name_are_read(tmp_path):
    record("pread", [1.0], "s", {}, folder=tmp_path)
    (tmp_path / "kl.jsonl").write_text("{\n")
    assert latest("pread", tmp_path)["median"] == 1 and len(read_rows("pr*", tmp_path)) == 1
    with pytest.raises(NemolabError, match="kl.jsonl, line 1"):
        read_rows(folder=tmp_path)


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
