"""Verbs that run on a card: the same exit codes and words for what is asked of a card, whichever verb is asked."""

import click
import pytest
import torch
from faults import assert_one_line, run_cli

from nemolab.cli import root


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


def run_on(device, words):
    return run_cli(*words, *(("--device", device) if words in TAKE_DEVICE else ()), *BESIDES.get(words, ()))


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
        ("bench", name) for name in ("decode", "prefill", "card-memory")
    }
    assert set(NEED_A_CARD) < set(VERBS) and not set(NEED_A_CARD) & set(TAKE_DEVICE)
