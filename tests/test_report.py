"""The notebook runner: order, headlines, failures, interruption and a report that fetches nothing."""

import os
import re
import signal
import subprocess
import sys
import time

import nbformat
import pytest

from nemolab.errors import NemolabError, UsageError
from nemolab.notebooks import find_notebooks, run_notebooks
from nemolab.report import formatted, percent


def write_notebook(folder, name, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    path = folder / f"{name}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


HEADLINE = "from nemolab.report import headline\nheadline('3 < 4 things')"


@pytest.fixture
def odd_folder(tmp_path):
    """A path with spaces and letters beyond ASCII."""
    folder = tmp_path / "ноутбуки и größe"
    folder.mkdir()
    return folder


def test_notebooks_run_in_order_with_this_python_and_the_chosen_model(odd_folder, tmp_path):
    write_notebook(odd_folder, "01_second", HEADLINE)
    write_notebook(
        odd_folder,
        "00_first",
        "import os, sys; print(sys.executable, os.environ['NEMOLAB_MODEL'], os.environ['NEMOLAB_TRACE'], sep='\\n')\n"
        "print(os.getcwd())",
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]);",
    )
    seen = []
    run = run_notebooks(
        find_notebooks(odd_folder),
        model=tmp_path / "some model",
        trace=tmp_path / "some trace",
        folder=tmp_path / "run",
        announce=lambda path, outcome: seen.append((path.stem, outcome is not None)),
    )
    assert not run.failures and run.folder == tmp_path / "run" and run.report == tmp_path / "run" / "report.html"
    assert seen == [("00_first", False), ("00_first", True), ("01_second", False), ("01_second", True)]
    assert [outcome.headline for outcome in run.outcomes] == ["", "3 < 4 things"]
    assert sorted(path.name for path in run.folder.iterdir()) == ["00_first.ipynb", "01_second.ipynb", "report.html"]
    first, second = nbformat.read(run.folder / "00_first.ipynb", 4).cells
    assert first.outputs[0].text.splitlines() == [
        sys.executable,
        str(tmp_path / "some model"),
        str(tmp_path / "some trace"),
        str(odd_folder),
    ]
    assert [first.execution_count, second.execution_count] == [1, 2]
    assert any("image/png" in output.get("data", {}) for output in second.outputs), "figures land in the notebook"


def test_links_between_notebooks_stay_within_the_report(tmp_path):
    from nemolab.notebooks import Outcome
    from nemolab.report import write_report

    text = "[next](01_second.ipynb), [not here](02_third.ipynb)"
    notebooks = [nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)]), nbformat.v4.new_notebook()]
    outcomes = [Outcome("00_first", 1.0, ""), Outcome("01_second", 1.0, "")]
    write_report(tmp_path / "report.html", outcomes, notebooks)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<a href="#01_second">next</a>' in page and '<a href="02_third.ipynb">not here</a>' in page


def test_the_report_holds_all_notebooks_and_fetches_nothing(odd_folder, tmp_path):
    write_notebook(odd_folder, "00_first", "print('from the first')")
    write_notebook(odd_folder, "01_second", HEADLINE, "print('from the second')")
    page = run_notebooks(find_notebooks(odd_folder), folder=tmp_path / "run").report.read_text()
    assert "from the first" in page and "from the second" in page and 'href="#01_second"' in page
    assert "3 &lt; 4 things" in page
    fetching = r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["'](?:https?:)?//[^"']*|https?://cdn[^"']*"""
    assert not re.findall(fetching, page), "opening the report needs no network"


def test_a_failing_notebook_is_named_and_the_others_still_run(odd_folder, tmp_path):
    write_notebook(odd_folder, "00_first", "1 + 1", "raise ValueError('no such\\nexpert')", "print('never')")
    write_notebook(odd_folder, "01_second", HEADLINE)
    run = run_notebooks(find_notebooks(odd_folder), folder=tmp_path / "run")
    assert [(outcome.name, outcome.error) for outcome in run.failures] == [
        ("00_first", "cell 2: ValueError: no such expert")
    ]
    assert run.report is None and run.folder == tmp_path / "run.failed"
    assert sorted(path.name for path in run.folder.iterdir()) == ["00_first.failed.ipynb", "01_second.ipynb"]
    assert not (tmp_path / "run").exists() and not (tmp_path / "run.unfinished").exists()


def test_a_kernel_that_dies_is_a_failure_of_its_notebook(odd_folder, tmp_path):
    write_notebook(odd_folder, "00_first", "import os; os._exit(9)")
    run = run_notebooks(find_notebooks(odd_folder), folder=tmp_path / "run")
    assert run.failures[0].error.startswith("cell 1: ")


def test_outputs_are_saved_into_the_notebooks_only_when_all_ran_through(odd_folder, tmp_path):
    path = write_notebook(odd_folder, "00_first", "6 * 7")
    untouched = path.read_bytes()
    broken = write_notebook(odd_folder, "01_second", "1 / 0")
    run_notebooks(find_notebooks(odd_folder), folder=tmp_path / "a", save=True)
    assert path.read_bytes() == untouched
    broken.unlink()
    run_notebooks(find_notebooks(odd_folder), folder=tmp_path / "b", save=True)
    saved = nbformat.read(path, 4)
    assert saved.cells[0].outputs[0].data["text/plain"] == "42" and saved.cells[0].id == "cell-00"
    assert saved.metadata.kernelspec.name == "python3"
    once = path.read_bytes()
    run_notebooks(find_notebooks(odd_folder), folder=tmp_path / "c", save=True)
    assert path.read_bytes() == once, "a second run of the same code changes nothing"


def test_an_existing_folder_is_not_written_over(odd_folder, tmp_path):
    write_notebook(odd_folder, "00_first", "1")
    (tmp_path / "run").mkdir()
    with pytest.raises(NemolabError, match="exists already"):
        run_notebooks(find_notebooks(odd_folder), folder=tmp_path / "run")


def test_only_keeps_notebooks_by_number_or_name(odd_folder):
    for name in ("00_first", "01_second", "10_third", "Untitled"):
        write_notebook(odd_folder, name, "1")

    def names(only):
        return [path.stem for path in find_notebooks(odd_folder, only)]

    assert names(None) == ["00_first", "01_second", "10_third"]
    assert names("10,00") == ["00_first", "10_third"]
    assert names(" 1 , 01_second.ipynb,") == ["01_second"]
    with pytest.raises(UsageError, match="--only 07: no such notebook; there are 00_first, 01_second, 10_third"):
        names("01,07")
    with pytest.raises(UsageError, match="--only '' names no notebook"):
        names("")  # an unset shell variable, not all of them


def test_a_folder_without_notebooks_says_so(tmp_path):
    with pytest.raises(NemolabError, match="no notebooks named"):
        find_notebooks(tmp_path)


def test_an_interrupt_leaves_nothing_behind(odd_folder, tmp_path):
    """SIGINT while a cell runs: exit by KeyboardInterrupt, no folder, no kernel left."""
    tell = f"import os; from pathlib import Path; Path({str(tmp_path / 'started')!r}).write_text(str(os.getpid()))"
    write_notebook(odd_folder, "00_first", tell, "import time; time.sleep(600)")
    code = (
        "import sys; from pathlib import Path; from nemolab.notebooks import *\n"
        "try: run_notebooks(find_notebooks(Path(sys.argv[1])), folder=Path(sys.argv[2]))\n"
        "except KeyboardInterrupt: sys.exit(77)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, odd_folder, tmp_path / "run"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    started = tmp_path / "started"
    while not (started.exists() and started.read_text()):
        assert time.monotonic() < deadline and process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 77
    assert not list(tmp_path.glob("run*"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


SLIDER = "from nemolab.report import slider\nslider('size', {'1': 'one <b>', '2': 'two'}, '2')"


@pytest.mark.parametrize("widgets", [True, False])
def test_a_slider_leaves_its_line_with_or_without_ipywidgets(tmp_path, odd_folder, widgets):
    if widgets:
        pytest.importorskip("ipywidgets", reason="the slider itself needs ipywidgets")
    hide = "" if widgets else "import sys; sys.modules['ipywidgets'] = None\n"
    write_notebook(odd_folder, "00_first", hide + SLIDER)
    run = run_notebooks(find_notebooks(odd_folder), folder=tmp_path / "run")
    assert not run.failures
    notebook = nbformat.read(run.folder / "00_first.ipynb", 4)
    (output,) = notebook.cells[0].outputs
    assert output.data == {"text/plain": "size 2: two"} and "widgets" not in notebook.metadata


def test_a_slider_goes_through_all_lines(monkeypatch):
    ipywidgets = pytest.importorskip("ipywidgets", reason="the slider itself needs ipywidgets")
    from nemolab.report import slider

    made = []
    monkeypatch.setattr(ipywidgets, "VBox", lambda parts: made.extend(parts) or ipywidgets.HTML())
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    slider("size", {"1": "one <b>", "2": "two"}, "2")
    choice, text = made
    assert (choice.options, choice.value, text.value) == (("1", "2"), "2", "two")
    choice.value = "1"
    assert text.value == "one &lt;b&gt;"


def test_a_table_shows_the_undefined_as_a_dash_never_as_zero():
    import pandas as pd

    frame = pd.DataFrame({"name": ["a", "b"], "share": [0.5, None], "count": pd.Series([None, 3], dtype=object)})
    shown = formatted(frame, {"share": "{:.0%}", "count": "{:,}"}, index="name")
    assert shown.to_dict("index") == {"a": {"share": "50%", "count": "-"}, "b": {"share": "-", "count": "3"}}
    assert formatted(frame[1:], {"share": "{:.0%}"})["share"].tolist() == ["-"], "nothing defined at all"
    assert [percent(0.5), percent(0.123, 0), percent(None), percent(float("nan"))] == ["50.0%", "12%", "-", "-"]
