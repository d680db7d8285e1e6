"""The trace that ships: five conversations of data/tiny, sound, and with live misses that a replay gives too."""

import re

import numpy as np
import pytest

from nemolab.checkpoint import Checkpoint
from nemolab.engine.chat import Tokenizer
from nemolab.engine.scripts import read_prompts
from nemolab.simulate import check_live
from nemolab.trace import DECODE, open_trace
from nemolab.trace.synthetic import iid_trace, sticky_trace
from nemolab.trace.trace import ARRAYS, META_FIELDS, TAKEN

NAMES = ["english", "technical", "russian", "story", "mixed"]


@pytest.fixture(scope="module")
def folder(root_path):
    return root_path / "data" / "traces"


@pytest.fixture(scope="module")
def trace(folder):
    return open_trace(folder / "conversations.safetensors")


@pytest.fixture(scope="module")
def texts(trace, tiny_path):
    """What was said, by conversation, without the marks of the template."""
    decode = Tokenizer(lambda name: tiny_path / name).decode
    by_number = [trace.select(conversation=number).token_ids.tolist() for number in range(len(NAMES))]
    return {name: decode(ids) for name, ids in zip(NAMES, by_number, strict=True)}


def test_it_holds_five_conversations_of_more_than_300_tokens(trace):
    assert trace.meta.taken["conversations"] == NAMES
    for number in range(len(NAMES)):
        assert np.count_nonzero((trace.conversation == number) & (trace.phase == DECODE)) > 300
    assert set(trace.arrays) == set(ARRAYS), "nothing is left out"


def test_it_is_of_the_model_that_ships(trace, tiny_path):
    config = Checkpoint.open(tiny_path).config
    trace.check_model(None, len(config.moe_layers), config.n_experts, config.top_k)
    assert trace.meta.model == "tiny" and trace.meta.fingerprint


def test_it_is_sampled_by_settings_that_it_tells(trace):
    taken = trace.meta.taken
    assert taken["kind"] == "chat" and taken["temperature"] > 0 and taken["seed"] == 7
    assert taken["cache"]["slots"] == 96 and taken["cache"]["prefetch"] == 0 and taken["cache"]["policy"] == "lru"


def test_how_traces_were_taken_is_said_in_known_words(trace):
    """Those fed again and imported: test_cli_trace, test_import_forms."""
    for each in (trace, iid_trace(2, 1, 4, 2), sticky_trace(2, 1, 4, 2)):
        assert each.meta.taken.keys() <= TAKEN.keys()


def count_cyrillic(text):
    return len(re.findall("[а-яё]", text.lower())) / len(re.findall(r"[^\W\d_]", text))


def test_its_conversations_are_in_their_languages(texts):
    for name in ("english", "technical", "story"):
        assert count_cyrillic(texts[name]) == 0, name
    assert count_cyrillic(texts["russian"]) > 0.8
    assert 0.2 < count_cyrillic(texts["mixed"]) < 0.8
    assert "TCP" in texts["technical"] and "story" in texts["story"]


def test_it_was_asked_what_the_prompts_say(folder, texts):
    scripts = read_prompts(folder / "prompts.jsonl")
    assert [script.name for script in scripts] == NAMES
    for script in scripts:
        places = [texts[script.name].find(message["content"]) for message in script.messages]
        assert -1 not in places and places == sorted(places), script.name


def test_its_live_misses_are_those_of_a_replay(trace):
    check = check_live(trace)
    assert check.equal and check.compared == len(np.unique(trace.step)) * trace.n_layers
    counted = trace.meta.taken["stats"]
    assert check.live.sum() == counted["prefill"]["misses"] + counted["decode"]["misses"]
    assert check.replayed[check.lookups.phase == DECODE].sum() == counted["decode"]["misses"]


def test_the_readme_names_every_array_field_and_file(root_path, folder, trace):
    section = (root_path / "data" / "README.md").read_text(encoding="utf-8").split("## `traces/`")[1].split("\n## ")[0]
    for name in [
        *ARRAYS,
        *META_FIELDS,
        *TAKEN,
        *trace.meta.taken["cache"],
        "format_version",
        "sha256",
        *(path.name for path in folder.iterdir()),
    ]:
        assert f"`{name}`" in section, name
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4e6
