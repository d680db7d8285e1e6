"""Execute the numbered notebooks with this very Python and keep what they say.

A notebook that fails does not stop the others, and what is left
of a failed or an interrupted run does not look finished: its folder ends in `.failed`, or is gone.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat

from nemolab import paths
from nemolab.errors import NemolabError, UsageError
from nemolab.report import Outcome, find_headline, write_report

KERNEL = "python3"
WIDGET = "application/vnd.jupyter.widget-view+json"  # needs the kernel it came from
NUMBERED = re.compile(r"(\d\d)_[a-z0-9_]+")


@dataclass(frozen=True)
class Run:
    """What became of all. `report` is None unless every notebook ran through."""

    folder: Path
    report: Path | None
    seconds: float
    outcomes: tuple[Outcome, ...]

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error]


def find_notebooks(folder: Path | None = None, only: str | None = None) -> list[Path]:
    """The numbered notebooks in order; `only` keeps some by number or name: `01,03_is_it_right`.

    Raises UsageError for a number or a name that no notebook has.
    """
    folder = folder or paths.notebooks_folder()
    found = sorted(path for path in folder.glob("*.ipynb") if NUMBERED.fullmatch(path.stem))
    if not found:
        raise NemolabError(f"no notebooks named NN_question.ipynb in {folder}")
    if only is None:
        return found
    wanted = [word.strip().removesuffix(".ipynb") for word in only.split(",") if word.strip()]
    if not wanted:
        raise UsageError(f"--only {only!r} names no notebook; there are {', '.join(path.stem for path in found)}")
    chosen = []
    for word in wanted:
        matches = [path for path in found if word in (path.stem, path.stem[:2]) or word.zfill(2) == path.stem[:2]]
        if not matches:
            raise UsageError(f"--only {word}: no such notebook; there are {', '.join(path.stem for path in found)}")
        chosen += matches
    return sorted(set(chosen))


def run_notebooks(
    notebooks: list[Path],
    *,
    model: Path | None = None,
    trace: Path | None = None,
    folder: Path | None = None,
    save: bool = False,
    announce: Callable[[Path, Outcome | None], None] = lambda path, outcome: None,
) -> Run:
    """Execute notebooks in order; write them and `report.html` into `folder`.

    model     the checkpoint they look at; None: the shipped one
    trace     the trace they look at; None: one of the model
    folder    where to write (default `runs/<time>`); must not exist yet
    save      also write the outputs back into the notebooks themselves, if all of them ran through
    announce  called with (path, None) when a notebook starts and (path, outcome) when it ends
    """
    folder = folder or paths.runs_folder() / time.strftime("%Y-%m-%d_%H-%M-%S")
    failed = folder.with_name(folder.name + ".failed")
    for taken in (folder, failed):
        if taken.exists():
            raise NemolabError(f"{taken} exists already; name another folder")
    unfinished = folder.with_name(folder.name + ".unfinished")
    unfinished.mkdir(parents=True)
    started = time.perf_counter()
    outcomes, executed = [], []
    try:
        for path in notebooks:
            announce(path, None)
            outcome, notebook = execute(path, model, trace)
            outcomes.append(outcome)
            executed.append(notebook)
            name = f"{path.stem}.failed.ipynb" if outcome.error else path.name
            nbformat.write(notebook, unfinished / name)
            announce(path, outcome)
        complete = not any(outcome.error for outcome in outcomes)
        if complete:
            write_report(unfinished / "report.html", outcomes, executed)
            unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if not complete:
        unfinished.rename(failed)
    elif save:
        for path, notebook in zip(notebooks, executed, strict=True):
            _write_back(path, notebook)
    seconds = time.perf_counter() - started
    return Run(
        folder=folder if complete else failed,
        report=folder / "report.html" if complete else None,
        seconds=seconds,
        outcomes=tuple(outcomes),
    )


def execute(path: Path, model: Path | None = None, trace: Path | None = None) -> tuple[Outcome, nbformat.NotebookNode]:
    """Execute one notebook; a failing cell ends it and is named in the outcome. Ctrl-C is KeyboardInterrupt."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    position = [0]
    started = time.perf_counter()
    error = ""
    # The kernel's sockets and IPython's profile, out of the user's own and on a path short enough for a socket.
    with tempfile.TemporaryDirectory(prefix="nemolab-kernel-") as scratch:
        client = NotebookClient(
            notebook,
            kernel_manager_class=_this_python(Path(scratch)),
            timeout=None,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(path.parent)}},
            on_cell_start=lambda cell, cell_index: position.__setitem__(0, cell_index),
        )
        try:
            client.execute(env=_environment(Path(scratch), NEMOLAB_MODEL=model, NEMOLAB_TRACE=trace))
        except Exception as problem:
            # On SIGINT and SIGTERM nbclient stops the kernel, then trips over its death: the user, not a fault.
            if getattr(client, "_async_cleanup_kernel_future", None) is not None:
                raise KeyboardInterrupt from None
            if isinstance(problem, CellExecutionError):
                error = f"cell {position[0] + 1}: {problem.ename}: {_one_line(problem.evalue)}"
            elif isinstance(problem, DeadKernelError | RuntimeError):
                error = f"cell {position[0] + 1}: {_one_line(str(problem)) or 'the kernel died'} (out of memory?)"
            else:
                raise
    _leave_out_widgets(notebook)
    return Outcome(path.stem, time.perf_counter() - started, find_headline(notebook), error), notebook


def _leave_out_widgets(notebook: nbformat.NotebookNode) -> None:
    """A slider without its kernel is a box that says "model not found"; what stands beside it as text stays."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET, None)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _this_python(scratch: Path) -> type:
    """A kernel manager that starts this very Python, whatever `python3` kernels are registered on the machine.

    It talks to the kernel through sockets in `scratch`: over TCP every user of the machine could listen.
    """
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(AsyncKernelManager):
        kernel_spec = KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="Python 3",
            language="python",
        )

        def __init__(self, **settings):
            super().__init__(transport="ipc", connection_file=str(scratch / "kernel.json"), **settings)

    return ThisPython


def _environment(scratch: Path, **named: Path | None) -> dict[str, str]:
    environment = dict(os.environ)
    environment["NEMOLAB_HOME"] = str(paths.home())
    environment["IPYTHONDIR"] = str(scratch)
    environment["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # figures into the notebook, not a window
    environment |= {name: str(Path(path).absolute()) for name, path in named.items() if path is not None}
    return environment


def _write_back(path: Path, notebook: nbformat.NotebookNode) -> None:
    """Outputs into the notebook itself, without what only this machine's run knows (times, kernel version)."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": KERNEL},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata.pop("execution", None)
    partial = path.with_name(path.name + ".partial")
    nbformat.write(notebook, partial)
    os.replace(partial, path)
