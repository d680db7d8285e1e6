"""`nemolab run` and `nemolab lab`: all notebooks by command, or by hand in JupyterLab."""

import os
import sys
from pathlib import Path

import click

from nemolab.commands.verb import Answer, PathName, checkpoint_argument, settings, share_cores, table, verb
from nemolab.progress import say


@verb("run")
@checkpoint_argument
@click.option("--only", default=None, metavar="01,03", help="Only these, by number or name.")
@click.option(
    "--to", "target", type=PathName(), default=None, metavar="FOLDER", help="Where to write; default runs/<time>."
)
@click.option(
    "--trace",
    type=PathName(),
    default=None,
    metavar="FILE",
    help="The trace they look at, or routing that another engine recorded.",
)
@click.option("--save", is_flag=True, help="Also keep the outputs in the notebooks themselves (for commits).")
def run(path, only, target, trace, save):
    """Execute every notebook in order on one checkpoint and write one HTML report.

    A line for each notebook while it runs; then the executed notebooks and report.html lie in runs/<time>/. A
    notebook that fails is named with its cell and error, the others still run, the folder ends in .failed and has no
    report, and the exit code is 1. Times are wall seconds, imports included.

    \b
    Examples:
      nemolab run
      nemolab run --only 01,03
      nemolab run /models/nemotron-super --to /tmp/super-report
      nemolab run --only 05,06,07 --trace routes.csv
    """
    share_cores()
    from nemolab import paths
    from nemolab.checkpoint import Checkpoint
    from nemolab.notebooks import find_notebooks, run_notebooks
    from nemolab.system.memory import read_memory
    from nemolab.units import show_bytes

    notebooks = find_notebooks(only=only)
    Checkpoint.open(path)  # an unfit folder is said once and at once, not by every notebook
    if trace is not None:
        from nemolab.trace import open_trace

        open_trace(trace)
    memory = read_memory()
    say(f"{len(notebooks)} notebooks on {paths.shown(path)}")
    say(f"memory: {memory.line()}; a cache takes {show_bytes(memory.default_cache_bytes)} at most")
    result = run_notebooks(
        notebooks,
        model=path,
        trace=trace,
        folder=target.absolute() if target else None,
        save=save,
        announce=_announcer(len(notebooks)),
    )
    data = {
        "folder": str(result.folder),
        "report": str(result.report) if result.report else None,
        "seconds": result.seconds,
        "memory": memory.to_dict(),
        "notebooks": [
            {"name": o.name, "seconds": o.seconds, "headline": o.headline, "error": o.error or None}
            for o in result.outcomes
        ],
    }
    rows = [[o.name, f"{o.seconds:.1f} s", o.error and f"FAILED, {o.error}" or o.headline] for o in result.outcomes]
    where = f"report: {result.report}" if result.report else f"no report; what ran is in {result.folder}"
    text = table(["notebook", "time", "headline"], rows) + f"\n\n{result.seconds:.0f} s in all; {where}"
    problem = "; ".join(f"{o.name} failed in {o.error}" for o in result.failures)
    return Answer(data, text, problem)


def _announcer(total: int):
    started = []

    def announce(path, outcome):
        if outcome is None:
            started.append(path)
            click.echo(f"[{len(started)}/{total}] {path.stem} ... ", err=True, nl=False)
        else:
            say(f"FAILED in {outcome.error}" if outcome.error else f"{outcome.seconds:.1f} s  {outcome.headline}")

    return announce


@verb("lab")
@checkpoint_argument
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Where it listens; default: a free one.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def lab(path, port, no_browser):
    """Open JupyterLab on the notebooks, with this very Python as their kernel.

    The notebooks look at PATH, unless their parameters cell says otherwise. With --json the command is printed, not
    started.

    \b
    Examples:
      nemolab lab
      nemolab lab /models/nemotron-super --no-browser --port 9000
    """
    from nemolab import paths

    folder = paths.notebooks_folder()
    command = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={folder}"]
    command += [f"--port={port}"] if port else []
    command += ["--no-browser"] if no_browser else []
    if os.geteuid() == 0:
        command.append("--allow-root")  # containers: JupyterLab would refuse to start and still listens locally only
    data = {"command": command, "folder": str(folder), "model": str(path)}
    if settings().as_json:
        return Answer(data)
    share_cores()
    environment = {
        **os.environ,
        "NEMOLAB_HOME": str(paths.home()),
        "NEMOLAB_MODEL": str(Path(path).absolute()),
        "JUPYTER_PREFER_ENV_PATH": "1",  # this environment's kernel before one registered for the user
    }
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)  # JupyterLab takes over: Ctrl-C and the exit code are its own
