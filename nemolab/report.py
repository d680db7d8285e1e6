"""What a notebook says in one line, and all notebooks as one HTML page that needs no network."""

import html
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nbformat
    import pandas as pd

HEADLINE = "nemolab_headline"


@dataclass(frozen=True)
class Outcome:
    """What became of one notebook. `error` is one line, empty when it ran through."""

    name: str
    seconds: float
    headline: str
    error: str = ""


def headline(text: str) -> None:
    """Show a notebook's main figure in bold, marked so that `nemolab run` finds it for its summary."""
    from IPython.display import Markdown, display

    display(Markdown(f"**{text}**"), metadata={HEADLINE: text})


def takeaway(*points: str) -> None:
    """Show what a notebook found, as bullets: computed, so that they hold for whatever model it ran on."""
    from IPython.display import Markdown, display

    display(Markdown("\n".join(f"- {point}" for point in points)))


def slider(name: str, lines: Mapping[str, str], start: str) -> None:
    """Show the line of `start`; where the notebook is open and has ipywidgets, a slider goes through all of them.

    name   what is chosen; lines  choice -> what to say of it, in the order of the slider
    What is kept in a file is the line alone, with or without ipywidgets.
    """
    from IPython.display import display

    shown = {"text/plain": f"{name} {start}: {lines[start]}"}
    try:
        import ipywidgets
    except ImportError:
        display(shown, raw=True)
        return
    choice = ipywidgets.SelectionSlider(options=list(lines), value=start, description=name)
    text = ipywidgets.HTML(html.escape(lines[start]))
    choice.observe(lambda change: setattr(text, "value", html.escape(lines[change["new"]])), "value")
    display(ipywidgets.VBox([choice, text])._repr_mimebundle_() | shown, raw=True)


def formatted(frame: "pd.DataFrame", formats: dict[str, str], index: str | None = None) -> "pd.DataFrame":
    """The columns named in `formats`, in that order, with their values written so: `{"gb": "{:.2f}"}`.

    index  a column of names to put in front, in place of row numbers
    What is undefined (NaN, None) is shown as "-". Unlike a pandas Styler it looks the same in every viewer, and the
    same figures give the same output.
    """
    shown = frame if index is None else frame.set_index(index)
    missing = shown.isna()
    written = shown[list(formats)].apply(lambda column: column.map(formats[column.name].format, na_action="ignore"))
    return written.astype(object).mask(missing[list(formats)], "-")


def percent(share: float | None, digits: int = 1) -> str:
    """A share (0 to 1) in a sentence: `percent(0.5)` is "50.0%"; what is undefined (NaN, None) is "-"."""
    return "-" if share is None or share != share else f"{share:.{digits}%}"


def find_headline(notebook: "nbformat.NotebookNode") -> str:
    """The last headline in a notebook's outputs; empty without one."""
    found = ""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found = output.get("metadata", {}).get(HEADLINE, found)
    return found


def write_report(target: Path, outcomes: Sequence[Outcome], notebooks: Sequence["nbformat.NotebookNode"]) -> None:
    """Write executed notebooks as one HTML page: a summary that links to each, then all of them in order.

    Nothing is fetched when it is opened: figures are inside, and the exporter's links to script hosts are off.
    """
    import nbformat
    from nbconvert import HTMLExporter

    cells = [nbformat.v4.new_markdown_cell(_summary(outcomes))]
    for outcome, notebook in zip(outcomes, notebooks, strict=True):
        cells.append(nbformat.v4.new_markdown_cell(f'<a id="{html.escape(outcome.name)}"></a>\n\n---'))
        cells += [cell.copy() for cell in notebook.cells]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number:03d}"
    merged = nbformat.v4.new_notebook(cells=cells, metadata=notebooks[0].metadata)
    exporter = HTMLExporter(**{name: "" for name in HTMLExporter.class_trait_names() if name.endswith("_url")})
    body, _ = exporter.from_notebook_node(merged, resources={"metadata": {"name": "nemolab report"}})
    for outcome in outcomes:  # links between notebooks stay within the page
        body = body.replace(f'href="{outcome.name}.ipynb"', f'href="#{outcome.name}"')
    partial = target.with_name(target.name + ".partial")
    partial.write_text(body, encoding="utf-8")
    os.replace(partial, target)


def _summary(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "# nemolab report",
        f"Executed {time.strftime('%Y-%m-%d %H:%M')} by `nemolab run`.",
        "",
        "| notebook | seconds | headline |",
        "|---|---:|---|",
    ]
    for outcome in outcomes:
        link = f'<a href="#{outcome.name}">{outcome.name}</a>'
        lines.append(f"| {link} | {outcome.seconds:.1f} | {html.escape(outcome.headline)} |")
    return "\n".join(lines)
