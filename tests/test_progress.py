"""Progress is plain text on stderr: it needs no ipywidgets, and a log that is no terminal stays short."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WITHOUT_WIDGETS = """
import sys
sys.modules["ipywidgets"] = None  # as where it is not installed
from nemolab.progress import progress_bar
show = progress_bar("work", "B")
for done in range(0, 10_001, 2):
    show(done, 10_000)
print("done")
"""


def test_bars_need_no_ipywidgets_and_keep_a_log_short(tmp_path):
    ended = subprocess.run([sys.executable, "-c", WITHOUT_WIDGETS], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout == "done\n", ended.stderr
    assert ended.stderr.count("\n") + ended.stderr.count("\r") == 0, "nothing where stderr is no terminal"


def find_widget_bars(text: str) -> list[str]:
    """Imports of the tqdm that draws with ipywidgets, and of ipywidgets where nothing catches that they lack."""
    bars = r"^\s*\"?(?:from|import)\s+tqdm\.(?:auto|notebook|autonotebook)\b.*$"
    bare = r"^(?:\s*\")?(?:from|import)\s+ipywidgets\b.*$"  # at the left edge of a module or of a notebook's line
    return re.findall(f"{bars}|{bare}", text, re.M)


def test_nothing_imports_bars_that_need_ipywidgets():
    sources = [*(ROOT / "nemolab").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert len(sources) > 50
    assert [path.name for path in sources if find_widget_bars(path.read_text(encoding="utf-8"))] == []


def test_the_search_can_fail():
    assert find_widget_bars("x = 1\n    from tqdm.auto import tqdm\nimport ipywidgets\n")
    assert find_widget_bars('    "from tqdm.notebook import tqdm\\n",') and not find_widget_bars(
        "from tqdm import tqdm"
    )
    assert find_widget_bars('    "import ipywidgets\\n",') and not find_widget_bars(
        "    try:\n        import ipywidgets\n"
    )
