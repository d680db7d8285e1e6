"""README numbers come from data; the commands and paths it names exist."""

import re
from pathlib import Path

import pytest

from nemolab.cli import root
from nemolab.errors import NemolabError
from nemolab.readme import TABLES, fill, markdown_table, render

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_are_those_that_the_data_give():
    assert render(README) == README, "run `python -P -m nemolab.readme`"


@pytest.mark.parametrize("name", TABLES)
def test_the_check_can_fail_on_every_table(name):
    block = re.search(rf"<!-- {name} -->.*?<!-- /{name} -->", README, re.DOTALL)[0]
    digit = re.search(r"\d", block)
    changed = README.replace(block, block[: digit.start()] + str((int(digit[0]) + 1) % 10) + block[digit.end() :])
    assert changed != README and render(changed) == README


def test_a_missing_or_doubled_marker_is_refused():
    for text in ("nothing", "<!-- a -->\nx\n<!-- /a -->\n<!-- a -->\ny\n<!-- /a -->"):
        with pytest.raises(NemolabError, match="needed one"):
            fill(text, "a", "z")


def test_fill_keeps_the_rest_and_takes_backslashes_as_they_are():
    assert fill("1\n<!-- a -->\nold\n<!-- /a -->\n2", "a", r"\1 new") == "1\n<!-- a -->\n\\1 new\n<!-- /a -->\n2"


def test_a_bar_in_a_cell_does_not_make_a_column():
    assert markdown_table(["a", "b:"], [["x|y", 1]]).splitlines() == ["| a | b |", "| --- | ---: |", r"| x\|y | 1 |"]


def test_verbs_named_in_the_readme_exist():
    named = set(
        re.findall(r"nemolab ([a-z]+)(?=[ `\n])", " ".join(re.findall(r"`[^`]+`|```.*?```", README, re.DOTALL)))
    )
    assert named and named <= set(root.commands), named - set(root.commands)


def test_every_verb_is_named_in_the_readme():
    for name in root.commands:
        assert f"nemolab {name}" in README, name


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_quick_start_is_what_make_offers():
    for target in re.findall(r"^make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


def test_environment_variables_are_all_listed():
    sources = [*(ROOT / "nemolab").rglob("*.py"), ROOT / "tests" / "conftest.py"]
    used = set(re.findall(r"\bNEMOLAB_[A-Z]+\b", " ".join(path.read_text() for path in sources)))
    assert {name for name in used if f"`{name}`" not in README} == set()
