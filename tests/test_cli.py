"""The command line: exact JSON, one clear line when something is wrong, the right exit code, from any folder."""

import json
import os
import signal
import subprocess
import sys

import click
import pytest
from faults import run_cli

from nemolab.cli import root
from nemolab.commands.verb import Answer, table, to_json, verb
from nemolab.errors import NemolabError

VERBS = list(root.commands)
JSON_VERBS = [name for name, command in root.commands.items() if not isinstance(command, click.Group)]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run a command line from an unrelated folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return run_cli


def run_process(*words, code_before: str = "", **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", f"import sys; from nemolab.cli import main\n{code_before}\nsys.exit(main())"]
    return subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=120, **options)


def assert_one_line(err: str, *words: str) -> None:
    err = err.removeprefix("\n") if "interrupted" in err else err  # ends the terminal's own "^C"
    assert err.startswith("nemolab: ") and err.count("\n") == 1 and err.endswith("\n"), err
    for word in words:
        assert word in err, err


# --- what it teaches


def test_help_lists_every_verb(call):
    code, out, err = call("--help")
    assert code == 0 and not err
    for name in ("doctor", "plan", "inventory", "repack", "verify", "compare", "chat", "run", "lab", "bench"):
        assert name in VERBS and f"\n  {name} " in out


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_teaches_what_it_answers_with_an_example(call, name):
    code, out, err = call(name, "--help")
    assert code == 0 and not err
    assert "Examples:" in out and f"  nemolab {name}" in out
    command = root.commands[name]
    leaves = command.commands.values() if isinstance(command, click.Group) else [command]
    for leaf in leaves:
        assert {"--json", "--debug"} <= {option for parameter in leaf.params for option in parameter.opts}


def test_no_words_show_the_help(call):
    assert call()[1] == call("--help")[1]


def test_version(call):
    from nemolab import __version__

    assert __version__ in call("--version")[1]


# --- plan and inventory

PLAN_KEYS = (
    "model_type moe_layers experts top_k expert_params expert_bytes pages_per_expert bytes_per_token routed_bytes "
    "dense_bytes parts"
).split()


def test_plan_of_the_shipped_model_adds_up(call):
    code, out, err = call("plan", "--json")
    assert code == 0 and not err
    plan = json.loads(out)
    assert set(PLAN_KEYS) <= set(plan) and plan["model_type"] == "nemotron_h"
    assert plan["bytes_per_token"] == plan["moe_layers"] * plan["top_k"] * plan["expert_bytes"]
    assert (
        plan["routed_bytes"] == plan["moe_layers"] * plan["experts"] * plan["expert_bytes"] == plan["parts"]["routed"]
    )
    others = sum(size for part, size in plan["parts"].items() if part not in ("routed", "mtp", "vision"))
    assert plan["dense_bytes"] == others
    assert plan["pages_per_expert"] * 4096 == plan["expert_bytes"]


def test_plan_of_a_bare_config_gives_the_published_figures(call, root_path):
    plan = json.loads(call("plan", root_path / "data/configs/nemotron-3-super.json", "--json")[1])
    assert (plan["expert_bytes"], plan["pages_per_expert"], plan["bytes_per_token"]) == (3096576, 756, 2724986880)
    assert plan["routed_bytes"] == 59.0625 * 2**30
    plan = json.loads(call("plan", root_path / "data/configs/nemotron-3-nano.json", "--json")[1])
    assert (plan["expert_bytes"], plan["pages_per_expert"], plan["bytes_per_token"]) == (5612544, 1370.25, 774531072)


def test_plan_takes_the_expert_format_as_an_option(call, root_path):
    config = root_path / "data/configs/nemotron-3-super.json"
    sizes = {
        name: json.loads(call("plan", config, "--experts-as", name, "--json")[1])["expert_bytes"]
        for name in ("nvfp4", "mxfp4", "fp8", "bf16")
    }
    values = 2 * 1024 * 2688  # up and down; NVFP4 has a scale byte for 16 values, MXFP4 for 32
    assert sizes == {"nvfp4": values * 9 // 16, "mxfp4": values * 17 // 32, "fp8": values, "bf16": values * 2}


def test_choices_are_those_of_the_package():
    """They stand in the options once more, because importing the package takes a second and `--help` must not."""
    from nemolab.kernels import expert_step
    from nemolab.plan.weight_formats import EXPERTS_AS, OFFERED
    from nemolab.store.layout import LAYOUTS

    def choices(verb, option):
        return next(tuple(found.type.choices) for found in root.commands[verb].params if option in found.opts)

    assert choices("plan", "--experts-as") == EXPERTS_AS
    assert choices("plan", "--dense-as") == OFFERED
    assert choices("repack", "--layout") == LAYOUTS == tuple(expert_step.LAYOUTS)


def test_inventory_sums_up_to_the_files(call, tiny_path):
    code, out, _ = call("inventory", "--json")
    inventory = json.loads(out)
    assert code == 0
    assert sum(row["bytes"] for row in inventory["sums"]) == inventory["bytes"]
    on_disk = sum(path.stat().st_size for path in tiny_path.glob("*.safetensors"))
    assert inventory["bytes"] < on_disk < inventory["bytes"] * 1.1, "the rest is headers"
    listed = json.loads(call("inventory", "--tensors", "--json")[1])["list"]
    assert len(listed) == inventory["tensors"] and sum(row["bytes"] for row in listed) == inventory["bytes"]


@pytest.mark.parametrize("words", [["plan"], ["inventory"], ["inventory", "--tensors"]])
def test_words_for_people_come_without_json(call, words):
    code, out, err = call(*words)
    assert code == 0 and not err and "routed" in out
    with pytest.raises(ValueError):
        json.loads(out)


# --- errors


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["paln"], "paln"),
        (["plan", "--jsn"], "--jsn"),
        (["plan", "a", "b"], "b"),
        (["plan", "--experts-as", "int3"], "int3"),
        (["repack"], "--to"),
        (["repack", "--to", "x", "--layout", "rows"], "rows"),
        (["verify"], "STORE"),
        (["chat", "--json"], "--prompt"),
        (["chat", "--prompt", "x", "--max-tokens", "0"], "--max-tokens"),
        (["chat", "--prompt", "x", "--max-tokens", "many"], "many"),
        (["chat", "--prompt", "x", "--ram-cache", "16"], "16"),
        (["chat", "--prompt", "x", "--temperature", "nan"], "--temperature"),
        (["run", "--only", "77"], "77"),
        (["run", "--only", ""], "--only"),
        (["verify", ""], "empty path"),
        (["repack", "--to", ""], "empty path"),
        (["plan", ""], "empty path"),
        (["plan", "~nobody-of-this-name/x"], "~nobody-of-this-name/x"),
        (["bench", "nothing"], "nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_code_2_and_one_line(call, words, named):
    code, out, err = call(*words)
    assert code == 2 and not out
    assert_one_line(err, named)


@pytest.mark.parametrize("verb_name", ["plan", "inventory", "compare", "run"])
def test_a_missing_folder_is_code_1_and_one_line(call, verb_name):
    for flags in ([], ["--json"]):
        code, out, err = call(verb_name, "no/such/folder", *flags)
        assert code == 1 and not out
        assert_one_line(err, "no/such/folder")


def test_a_missing_folder_stops_the_verbs_that_write(call, tmp_path):
    code, out, err = call("repack", "no/such/folder", "--to", "store")
    assert code == 1 and not out and not (tmp_path / "store").exists()
    assert_one_line(err, "no/such/folder")
    code, out, err = call("verify", "no/such/store", "--json")
    assert code == 1 and not out
    assert_one_line(err, "no/such/store")
    code, out, err = call("chat", "no/such/folder", "--prompt", "x")
    assert code == 1 and not out
    assert_one_line(err, "no/such/folder")


def test_debug_shows_the_traceback_before_and_after_the_verb(call):
    for words in (["--debug", "plan", "no/such"], ["plan", "no/such", "--debug"]):
        code, _, err = call(*words)
        assert code == 1 and "Traceback" in err and err.splitlines()[-1].startswith("nemolab: ")
    assert "Traceback" not in call("plan", "no/such")[2], "one call's --debug does not stay for the next"


def test_json_works_before_the_verb_too(call):
    assert json.loads(call("--json", "plan")[1]) == json.loads(call("plan", "--json")[1])


@pytest.fixture
def trial(monkeypatch):
    """A verb that does what a test wants."""

    def register(function):
        monkeypatch.setitem(root.commands, "trial", verb("trial")(function))

    return register


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (NemolabError("two\nlines"), 1, ["two lines"]),
        (FileNotFoundError(2, "No such file", "/a/b"), 1, ["No such file", "/a/b"]),
        (OSError(28, "No space left on device"), 1, ["No space left"]),
        (MemoryError(), 1, ["memory"]),
        (KeyError("x"), 1, ["unexpected KeyError", "--debug"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_goes_wrong_is_one_line(call, trial, error, code, words):
    def fail():
        raise error

    trial(fail)
    result, out, err = call("trial", "--json")
    assert result == code and not out
    assert_one_line(err, *words)


def test_a_failed_check_still_shows_its_answer(call, trial):
    trial(lambda: Answer({"mismatches": 3}, "3 differ", "3 blocks differ"))
    code, out, err = call("trial", "--json")
    assert code == 1 and json.loads(out) == {"mismatches": 3}
    assert_one_line(err, "3 blocks differ")
    code, out, err = call("trial")
    assert code == 1 and out == "3 differ\n"


def test_what_libraries_print_does_not_reach_the_json(call, trial):
    def chatty():
        print("loading ...")
        return Answer({"ok": True})

    trial(chatty)
    code, out, err = call("trial", "--json")
    assert json.loads(out) == {"ok": True} and "loading ..." in err


def test_json_is_strict():
    import numpy as np

    numbers = [np.float32("inf"), np.int64(3), np.array([1.5, 2])]
    document = {"a": float("nan"), "b": numbers, 1: (True, None), "c": "\udcff"}
    assert json.loads(to_json(document), parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, 3, [1.5, 2.0]],
        "1": [True, None],
        "c": "?",
    }


def test_an_interrupt_is_code_130_and_one_line():
    before = "import nemolab.plan, os\nnemolab.plan.plan = lambda *words: os.kill(os.getpid(), 2)"
    result = run_process("plan", code_before=before)
    assert result.returncode == 128 + signal.SIGINT and not result.stdout
    assert_one_line(result.stderr, "interrupted")


def test_a_reader_that_leaves_causes_no_words():
    words = [sys.executable, "-m", "nemolab", "inventory", "--tensors"]
    # Unbuffered, Python itself drops the rest of a write that was cut short, and notices nothing.
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_terminal_without_unicode_gets_ascii():
    result = run_process("plan", "--json", env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert result.returncode == 0 and json.loads(result.stdout)


def test_tables_line_up():
    assert table(["part", "bytes"], [["routed", 12000], ["ok", None]]) == (
        "part     bytes\nrouted  12,000\nok           -"
    )


@pytest.mark.parametrize("closed, code", [(">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0)])
def test_closed_streams_lead_nowhere(tmp_path, closed, code):
    command = f'"{sys.executable}" -m nemolab {closed}'
    ended = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code and "Error" not in ended.stderr
