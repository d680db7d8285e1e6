"""Triton's interpreter for tests of kernels: a test body that runs on a CPU and, where there is one, on a card.

    @on_both
    def test_x(device): ...        # "cpu" in the interpreter, "cuda" on a card

TRITON_INTERPRET=1 must be set before triton is imported and would change every kernel of this process, so tests marked
`interpreted` run in a child: one pytest a file, started when its first such test comes up, for all that were selected.
`conftest.py` calls `run_in_child`; in the child, where the variable is set, tests run as any other.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

on_both = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpreted, id="interpreter"),
        pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
    ],
)

_outcomes: dict[Path, dict[str, str | None]] = {}  # file -> test -> what failed, None if nothing did


def run_in_child(item: pytest.Item) -> bool:
    """Run an `interpreted` test in the interpreter and report its failure here. False: not such a test, go on."""
    if INTERPRETED or item.get_closest_marker("interpreted") is None:
        return False
    if item.path not in _outcomes:
        chosen = [
            other.nodeid
            for other in item.session.items
            if other.path == item.path and other.get_closest_marker("interpreted")
        ]
        _outcomes[item.path] = _run(chosen, item.config)
    outcomes = _outcomes[item.path]
    problem = outcomes.get(item.name, f"the child's report lacks this test\n{outcomes.get('', '')}")
    if problem is not None:
        pytest.fail(f"in Triton's interpreter:\n{problem}", pytrace=False)
    return True


def _run(tests: list[str], config: pytest.Config) -> dict[str, str | None]:
    report = Path(config.nemolab_cache) / f"interpreted-{len(_outcomes)}.xml"
    # -P: without it the root would be on the path, and the folder kernels/ the package of that name.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    done = subprocess.run(
        [*command, *tests],
        cwd=config.rootpath,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    outcomes: dict[str, str | None] = {"": (done.stdout + done.stderr)[-4000:]}
    if report.exists():
        for case in xml.parse(report).iter("testcase"):
            problems = [child.text for child in case if child.tag in ("failure", "error", "skipped")]
            outcomes[case.get("name", "")] = "\n".join(text or "" for text in problems) if problems else None
    return outcomes
