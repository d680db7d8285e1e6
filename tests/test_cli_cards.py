"""Verbs that run on a card: options that are spelled alike, mean the same and are refused alike, whichever verb."""

import click
import pytest
import torch
from faults import assert_one_line, run_cli

from nemolab.cli import root
from nemolab.commands import device
from nemolab.engine.transfers import DEFAULT
from nemolab.engine.transfers import TRANSFERS as WAYS


def list_verbs(command=root, words=()):
    """("bench", "decode"): its command, for every verb there is."""
    if not isinstance(command, click.Group):
        return {words: command}
    parts = [list_verbs(part, (*words, name)) for name, part in command.commands.items()]
    return {name: found for part in parts for name, found in part.items()}


VERBS = list_verbs()
NEED_A_CARD = [("bench", "linear"), ("bench", "moe-step")]  # always, and so have no --device
TAKE_DEVICE = [words for words, verb in VERBS.items() if any("--device" in option.opts for option in verb.params)]
# What a verb must be told besides.
BESIDES = {("chat",): ("--prompt", "x"), ("trace",): ("--texts", ".", "--to", "never.trace")}


def find_option(words, name):
    return next((option for option in VERBS[words].params if name in option.opts), None)


def run_on(device, words, *others):
    return run_cli(*words, *(("--device", device) if words in TAKE_DEVICE else ()), *BESIDES.get(words, ()), *others)


@pytest.mark.parametrize("words", TAKE_DEVICE + NEED_A_CARD, ids=" ".join)
def test_without_a_card_every_verb_says_so_and_exits_with_1(monkeypatch, tmp_path, words):
    """Nothing is wrong with the words: the same line runs on another machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a text")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run_on("cuda", words)
    assert not out
    assert_one_line(code, err, "device 'cuda:0': torch", "`nemolab doctor` says more")


def test_verbs_that_run_on_a_card_are_those_looked_at():
    assert set(TAKE_DEVICE) == {("chat",), ("trace",), ("compare",)} | {
        ("bench", name) for name in ("decode", "turns", "prefill", "card-memory", "bookkeeping")
    }
    assert set(NEED_A_CARD) < set(VERBS) and not set(NEED_A_CARD) & set(TAKE_DEVICE)


@pytest.mark.parametrize("words", TAKE_DEVICE, ids=" ".join)
def test_what_is_no_device_is_bad_usage_before_anything_is_opened(words):
    for name in ("gpu", "cuda:", "cuda:1x", "cuda:-1", "CUDA", ""):
        code, out, err = run_on(name, words)
        assert code == 2 and not out and f"'--device': {name!r} is no device" in err and err.count("\n") == 1


DEVICES = ["cpu", "cuda", "cuda:0", "cuda:12", "twin", "gpu", "cuda:", "cuda:1x", "cuda1", "cuda:\u0663", "cuda:1\n"]


@pytest.mark.parametrize("name", DEVICES, ids=ascii)
def test_devices_are_those_of_the_engine(name):
    """Which may not be imported where words are read: that takes seconds."""
    from nemolab.engine.gpu.device import TWIN, card_index

    if name in ("cpu", TWIN) or card_index(name) is not None:
        assert device.DeviceName().convert(name, None, None) == name
    else:
        with pytest.raises(click.BadParameter):
            device.DeviceName().convert(name, None, None)


def test_ways_to_a_card_are_those_of_the_engine():
    assert set(device.TRANSFERS) == set(WAYS) and device.TRANSFERS[0] == DEFAULT and device.EVERY not in WAYS


MADE = {
    "--device": device.device_option(), "--transfer": device.transfer_option(), "--vram": device.vram_option(),
    "--ram-cache": device.ram_cache_option,
}  # fmt: skip
HAVE = [(words, name) for words in VERBS for name in MADE if find_option(words, name)]
ON_THE_CPU = [
    (words, name, value)
    for words, name in HAVE
    for value in {"--transfer": ["pull"], "--vram": ["1GiB"]}.get(name, [])
    if find_option(words, "--device").default == "cpu"
]


@pytest.mark.parametrize(("words", "name", "value"), ON_THE_CPU, ids=str)
def test_what_is_for_cards_is_refused_where_none_is_named(words, name, value):
    code, out, err = run_cli(*words, *BESIDES.get(words, ()), name, value)
    assert code == 2 and not out and err == f"nemolab: {name}: for an engine on a card; add --device cuda\n"


@pytest.mark.parametrize(("words", "name"), HAVE, ids=str)
def test_options_of_the_same_name_are_the_same(words, name):
    found, (wanted,) = find_option(words, name), click.command("x")(MADE[name](lambda: None)).params
    assert type(found.type) is type(wanted.type) and found.help.split(".")[0] == wanted.help.split(".")[0]
    if name in ("--vram", "--ram-cache"):
        code, _, err = run_cli(*words, *BESIDES.get(words, ()), name, "16")
        assert code == 2 and err.startswith(f"nemolab: {name}: '16' is no size")
    if name == "--transfer":
        assert tuple(found.type.choices) in (device.TRANSFERS, (*device.TRANSFERS, device.EVERY))
        assert f"default: {DEFAULT}]" in run_cli(*words, "--help")[1] and found.default in (None, DEFAULT)


def test_options_looked_at_are_those_that_there_are():
    assert {(" ".join(words), name) for words, name in HAVE if name != "--device"} == {
        ("chat", "--transfer"), ("trace", "--transfer"), ("bench decode", "--transfer"),
        ("bench card-memory", "--transfer"), ("chat", "--vram"), ("trace", "--vram"), ("compare", "--vram"),
        ("bench decode", "--vram"), ("bench card-memory", "--vram"), ("bench prefill", "--vram"),
        ("bench turns", "--transfer"), ("bench turns", "--vram"),
        ("chat", "--ram-cache"), ("trace", "--ram-cache"), ("bench trace", "--ram-cache"),
    }  # fmt: skip
