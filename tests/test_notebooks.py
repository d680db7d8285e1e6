"""The notebooks' house form, their committed outputs, and that every one of them runs, by command, from anywhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import nbformat  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from foreign_traces import draw_routing, route_csv, token_lines  # noqa: E402

from nemolab.cli import main  # noqa: E402
from nemolab.report import find_headline  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECTIONS = ["Question", "Method", "Result", "Takeaway"]
EXPECTED = [
    "00_start_here", "01_bytes_per_token", "02_repack", "03_is_it_right", "04_chat",
    "05_routing", "06_size_the_cache", "07_prefetch",
    "08_skip_zeros",
]  # fmt: skip

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def headings(cells) -> list[str]:
    return [
        line for cell in cells if cell.cell_type == "markdown" for line in cell.source.splitlines() if line[:1] == "#"
    ]


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_shape(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = notebook.cells
    code = code_cells(notebook)
    assert re.fullmatch(rf"# {path.stem[:2]} [A-Z].*\?", headings(cells)[0]), "the title has the number and a question"
    assert [line[3:] for line in headings(cells) if line.startswith("## ")] == SECTIONS
    assert not any("parameters" in cell.metadata.get("tags", []) for cell in code[:1] + code[2:])
    assert "parameters" in code[1].metadata.get("tags", []), "imports first, then the parameters cell"
    assert all(re.match(r"[A-Z_]+ = ", line) for line in code[1].source.splitlines()), "plain assignments only"
    assert 'MODEL = ""' in code[1].source
    assert not any(re.match(r"\s*(def|class) ", line) for cell in code for line in cell.source.splitlines())
    lines = [len(cell.source.splitlines()) for cell in code]
    assert max(lines) <= 18 and median(lines) <= 6 and 12 <= len(cells) <= 32, "about five lines a cell"
    assert "measure.versions()" in code[-1].source and cells[-1] is code[-1]
    assert notebook.metadata.kernelspec.name == "python3", "whatever environment it was written in"
    assert not any(cell.get("attachments") for cell in cells), "pictures lie beside the notebook"


def check_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = code_cells(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run by `make notebooks`"
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert find_headline(notebook), "a headline for the summary"
    text = json.dumps([output for output in outputs], ensure_ascii=False)
    assert not re.search(r"(?<![\w.])/(work|tmp|root|home|Users)/", text), "no paths of one machine"
    assert "it/s]" not in text, "no progress bars"
    assert path.stat().st_size < 500_000, "outputs too heavy to review"


def count_figures(path: Path) -> int:
    cells = nbformat.read(path, as_version=4).cells
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))


def test_the_folder_holds_the_numbered_notebooks_and_nothing_stray():
    names = [path.stem for path in NOTEBOOKS]
    assert names[: len(EXPECTED)] == EXPECTED
    assert [name[:2] for name in names] == [f"{number:02d}" for number in range(len(names))]


@by_name
def test_notebook_has_the_house_form(path):
    check_shape(path)


@by_name
def test_committed_outputs_are_executed_in_order_small_and_clean(path):
    check_outputs(path)
    assert count_figures(path) >= 1, "a figure"


@by_name
def test_links_lead_somewhere(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+\.(?:ipynb|md|py))\)", text):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize(
    "spoil",
    [
        lambda notebook: notebook.cells.pop(1),  # the Question or the introduction
        lambda notebook: notebook.cells.pop(-1),
        lambda notebook: notebook.metadata.kernelspec.update(name="my-env"),
        lambda notebook: notebook.cells[-1].update(source="def helper():\n    pass"),
        lambda notebook: [cell.update(source=cell.source + 4 * "\n1") for cell in code_cells(notebook)[2:-1]],
        lambda notebook: notebook.cells.insert(0, nbformat.v4.new_markdown_cell("# Untitled")),
    ],
)
def test_the_shape_check_can_fail(tmp_path, spoil):
    notebook = nbformat.read(ROOT / "notebooks" / "02_repack.ipynb", as_version=4)
    spoil(notebook)
    nbformat.write(notebook, tmp_path / "02_repack.ipynb")
    with pytest.raises(AssertionError):
        check_shape(tmp_path / "02_repack.ipynb")


@pytest.mark.parametrize("text", ["/work/x", "100%|###| 3/3 [00:00<00:00, 5.0it/s]"])
def test_the_output_check_can_fail(tmp_path, text):
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    next(cell for cell in notebook.cells if cell.cell_type == "code").outputs = [
        nbformat.v4.new_output("stream", name="stdout", text=text)
    ]
    nbformat.write(notebook, tmp_path / NOTEBOOKS[0].name)
    with pytest.raises(AssertionError):
        check_outputs(tmp_path / NOTEBOOKS[0].name)


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> tuple[Path, dict]:
    """`nemolab run` as a user starts it: from another folder, on a copy of the notebooks in an awkward path."""
    home = tmp_path_factory.mktemp("run") / "ein Ordner с пробелами"
    home.mkdir()
    shutil.copytree(ROOT / "notebooks", home / "notebooks")
    (home / "data").symlink_to(ROOT / "data")
    process = subprocess.run(
        [sys.executable, "-m", "nemolab", "run", "--json"],
        cwd=home.parent,
        env={**os.environ, "NEMOLAB_HOME": str(home), "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    return home, json.loads(process.stdout)


def test_all_notebooks_run_and_leave_one_report(executed):
    home, summary = executed
    assert [notebook["name"] for notebook in summary["notebooks"]] == [path.stem for path in NOTEBOOKS]
    assert all(notebook["error"] is None and notebook["headline"] for notebook in summary["notebooks"])
    assert Path(summary["folder"]).parent == home / "runs"
    page = Path(summary["report"]).read_text()
    assert all(f'href="#{path.stem}"' in page for path in NOTEBOOKS)


@by_name
def test_executed_notebook_shows_its_figures(executed, path):
    ran = Path(executed[1]["folder"]) / path.name
    assert count_figures(ran) == count_figures(path) >= 1
    check_outputs_but_paths(ran)


def check_outputs_but_paths(path: Path) -> None:
    cells = code_cells(nbformat.read(path, as_version=4))
    assert all(cell.execution_count for cell in cells), "no cell was skipped"
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)


def test_an_imports_cell_without_nemolab_says_what_to_do():
    """The first cell, under a Python that has no nemolab."""
    first = next(cell for cell in nbformat.read(NOTEBOOKS[0], 4).cells if cell.cell_type == "code")
    code = f"import sys; sys.modules['nemolab'] = None\n{first.source}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 1
    assert "has no nemolab: start with `make lab`" in process.stderr.splitlines()[-1]


@pytest.fixture
def run_cells(monkeypatch, capsys):
    """Run a notebook's code cells here, without a kernel, on a trace: figures, and all that it said."""

    def run(stem: str, trace: Path) -> tuple[list, str]:
        monkeypatch.setenv("NEMOLAB_TRACE", str(trace))
        said, figures = [], []
        monkeypatch.setattr(
            "IPython.display.display", lambda shown, **_: said.append(str(getattr(shown, "data", shown)))
        )
        capsys.readouterr()
        plt.close("all")
        namespace = {}
        with plt.rc_context():
            for cell in nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", 4).cells:
                if cell.cell_type == "code":
                    exec(compile(cell.source, stem, "exec"), namespace)
            figures = [plt.figure(number) for number in plt.get_fignums()]
            plt.close("all")
        return figures, capsys.readouterr().out + "\n".join(said)

    return run


def write_route_trace(path: Path) -> Path:
    """As another engine records it: a prompt, two block sizes, neither guesses nor token ids."""
    experts, weights = draw_routing(tokens=46, layers=3, n_experts=16, top_k=2)
    path.write_text(route_csv(experts, weights, ((6, 40),), n_experts=16))
    return path


def write_bare_trace(path: Path) -> Path:
    """Sorted ids and nothing else."""
    experts, _ = draw_routing(tokens=40, layers=3, n_experts=16, top_k=2)
    path.write_text(token_lines(np.sort(experts)))
    return path


ABSENT = {  # what each says that it cannot show, on a trace without anything optional
    "05_routing": ["holds no guesses", "one conversation", "does not say how many neurons"],
    "06_size_the_cache": ["does not say how large", "no live check", "were not compared"],
    "07_prefetch": ["holds no guesses"],
    "08_skip_zeros": ["does not say how many neurons"],
}


@pytest.mark.parametrize("write", [write_route_trace, write_bare_trace])
@pytest.mark.parametrize("stem", ABSENT)
def test_a_foreign_trace_runs_unchanged_and_what_it_lacks_is_said(stem, write, run_cells, tmp_path):
    figures, said = run_cells(stem, write(tmp_path / "trace.txt"))
    lacks = ABSENT[stem] if write is write_bare_trace else [line for line in ABSENT[stem] if "how large" not in line]
    assert [line for line in lacks if line not in said] == []
    assert len(figures) == 1 and all(ax.lines or ax.patches for ax in figures[0].axes), "a figure with no empty panel"
    assert not re.search(r"\bnan\b|\bNone\b", said), said


def test_a_trace_that_cannot_be_opened_is_refused_before_any_notebook_runs(tmp_path, capsys):
    (tmp_path / "trace.csv").write_text("not,a,trace\n")
    code = main(["run", "--only", "05", "--trace", str(tmp_path / "trace.csv"), "--to", str(tmp_path / "run")])
    assert code == 1 and "trace.csv" in capsys.readouterr().err
    assert not list(tmp_path.glob("run*"))
