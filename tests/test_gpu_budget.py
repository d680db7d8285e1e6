"""A budget of a card's memory: what may be asked for, what is said of it, and on a card that it is kept."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from fake_cards import GIB, MIB, FakeCard, TakenCard
from synthetic import one_thread

from nemolab.engine import Engine
from nemolab.engine.gpu.non_torch import DIFFERENCE, TOLD
from nemolab.engine.gpu.plan import context_bytes, least_bytes
from nemolab.errors import EngineError

pytest_plugins = ["card_fixtures"]


def test_memory_that_ends_for_a_conversation_or_its_copy_is_an_error_of_ours(small_path, monkeypatch):
    from nemolab.engine.gpu import state

    def run_out(device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with Engine(small_path, device="twin") as engine:
        held = engine.new_state()
        engine.step(40, held)
        monkeypatch.setattr(state, "give_back", run_out)
        with pytest.raises(EngineError, match=r"does not suffice for a conversation: .*2\.00 GiB"):
            engine.new_state()
        with pytest.raises(EngineError, match=r"does not suffice for a copy of a conversation: .*2\.00 GiB"):
            held.copy()
        monkeypatch.undo()
        assert torch.equal(engine.step(41, held.copy()), engine.step(41, held))
    with pytest.raises(EngineError, match="closed"):
        engine.new_state()


@pytest.mark.parametrize(
    "value", [True, 0, -1, math.nan, math.inf, -math.inf, "8", 2**40, pytest.param(10**5000, id="huge"), np.bool_(True)]
)
def test_a_budget_that_is_none_is_refused_with_the_least(small_path, value):
    words = r"vram_gib is .*; a positive number of GiB is needed, \d+\.\d\d [MG]iB or more .* less than 1048576$"
    with pytest.raises(EngineError, match=words):
        Engine(small_path, device="twin", vram_gib=value)


@pytest.mark.parametrize("value", [np.int64(2), np.float32(2), np.float64(2)])
def test_a_budget_may_be_a_number_of_numpy(small_path, value):
    with Engine(small_path, device="twin", vram_gib=value) as engine:
        assert engine.memory()["card"]["budget_bytes"] == 2 * GIB


def test_the_least_that_is_said_runs_and_less_does_not(small_path):
    with Engine(small_path, device="twin") as engine:
        least = least_bytes(engine.store, 6) / GIB
    with pytest.raises(EngineError, match=r"vram_gib allows .* but this model takes .*; that much is needed"):
        Engine(small_path, device="twin", vram_gib=least - 1e-6)
    with Engine(small_path, device="twin", vram_gib=least + 1e-6) as engine:
        assert engine.memory()["card"]["planned"]["total_bytes"] == int(least * GIB)


def open_on(card, path, monkeypatch, **settings):
    monkeypatch.setattr("nemolab.engine.gpu.side.open_device", lambda name: card)
    with Engine(path, device="twin", **settings) as engine:
        return engine.memory()["card"]["planned"]


def test_without_a_budget_what_is_free_decides_the_passes(small_path, monkeypatch):
    ample = open_on(TakenCard(7 * GIB), small_path, monkeypatch)
    tight = open_on(TakenCard(ample["total_bytes"] - 1), small_path, monkeypatch)
    assert tight["piece_tokens"] < ample["piece_tokens"] == 1024 and ample["pass_tokens"] == 8192
    with pytest.raises(EngineError, match=r"a card has room for 512\.00 MiB, but this model takes"):
        open_on(TakenCard(512 * MIB), small_path, monkeypatch)


def test_a_budget_that_others_leave_no_room_for_is_said(small_path, monkeypatch, capsys):
    open_on(TakenCard(7 * GIB), small_path, monkeypatch, vram_gib=2)
    assert "are free" not in capsys.readouterr().err
    open_on(TakenCard(512 * MIB), small_path, monkeypatch, vram_gib=2)
    assert "but only 512.00 MiB of the 8.00 GiB of a card are free: close other" in capsys.readouterr().err


def test_where_others_leave_less_than_planned_prompts_go_in_shorter_passes(small_path, monkeypatch, capsys):
    """Still within the same budget, should they let go."""
    ample = open_on(TakenCard(7 * GIB), small_path, monkeypatch, vram_gib=4)
    with Engine(small_path, device="twin", vram_gib=4) as engine:
        assert engine.memory()["card"]["budget_bytes"] == 4 * GIB
    tight = open_on(TakenCard(ample["total_bytes"] - 1), small_path, monkeypatch, vram_gib=4)
    said = capsys.readouterr().err
    assert (ample["piece_tokens"], tight["piece_tokens"]) == (1024, 512)
    assert (
        "prompts go in passes of 8192 tokens, in pieces of 512, since only" in said and "close other programs" in said
    )


def open_within(card_gib, path, monkeypatch, **settings):
    """The engine's account, on a card of so much that nobody else uses."""
    card = FakeCard(reserved=0, beside=600 * MIB, total=int(card_gib * GIB))
    card.name, card.total_bytes = "a card", card.usage.total_bytes
    monkeypatch.setattr("nemolab.engine.gpu.side.open_device", lambda name: card)
    with Engine(path, device="twin", **settings) as engine:
        return engine.memory()["card"]


@pytest.mark.parametrize("card_gib", [8188 / 1024, 8151 / 1024, 7.6, 7.5])
def test_a_card_of_8_gb_that_has_a_little_less_is_taken_whole(small_path, monkeypatch, capsys, card_gib):
    card = open_within(card_gib, small_path, monkeypatch, vram_gib=8)
    assert card["budget_bytes"] == int(card_gib * GIB) == card["limit_bytes"] + card["planned"]["context_bytes"]
    assert (
        f"vram_gib asks for 8.00 GiB, a card has {card_gib:.2f} GiB: that is the budget now" in capsys.readouterr().err
    )


def test_a_card_that_has_much_less_is_named_with_the_least(small_path, monkeypatch, capsys):
    words = r"asks for 8\.00 GiB; a card has 7\.40 GiB, and about \d+\.\d\d MiB or more of them is needed"
    with pytest.raises(EngineError, match=words):
        open_within(7.4, small_path, monkeypatch, vram_gib=8)
    assert open_within(8, small_path, monkeypatch, vram_gib=8)["budget_bytes"] == 8 * GIB
    assert "the budget now" not in capsys.readouterr().err


@pytest.mark.parametrize("found_mib", [300, 700, 900])
def test_what_is_beside_torch_is_planned_as_found_on_this_card(small_path, monkeypatch, found_mib):
    card = FakeCard(reserved=0, beside=found_mib * MIB)
    card.name, card.total_bytes = "a card", 8 * GIB
    assert open_on(card, small_path, monkeypatch, vram_gib=4)["context_bytes"] == context_bytes(found_mib * MIB)


@one_thread
def test_after_memory_ran_out_a_shorter_prompt_runs(small_path, monkeypatch):
    from nemolab.engine.gpu import twins

    ids, real = list(range(40, 60)), twins.linear_prompt

    def short_only(packed, x, *others):
        if x.shape[0] > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        real(packed, x, *others)

    with Engine(small_path, device="twin") as engine:
        wanted = engine.prefill(ids[:9], engine.new_state())
        monkeypatch.setattr(twins, "linear_prompt", short_only)
        state = engine.new_state()
        with pytest.raises(EngineError, match="does not suffice for a pass of 20 tokens behind 0"):
            engine.prefill(ids, state)
        with pytest.raises(EngineError, match="half-way"):
            engine.step(ids[0], state)
        assert torch.equal(engine.prefill(ids[:9], engine.new_state()), wanted)


def test_memory_tells_the_budget_the_plan_by_part_and_what_was_found(small_path):
    with Engine(small_path, device="twin", vram_gib=4) as engine:
        card = engine.memory()["card"]
    parts = ("dense", "experts", "state", "prompt", "workspace", "context")
    assert card["planned"]["total_bytes"] == sum(card["planned"][f"{part}_bytes"] for part in parts)
    assert card["limit_bytes"] == card["budget_bytes"] - card["planned"]["context_bytes"] == 4 * GIB - 768 * MIB
    assert card["found"] == {"dense_bytes": pytest.approx(card["planned"]["dense_bytes"], rel=0.05)}


# --- on a card


def sizes(card):
    return card["peak"]["total_bytes"], card["found"]["reserved_bytes"] + card["found"]["non_torch_bytes"]


@pytest.mark.gpu
def test_a_card_tells_what_is_held_beside_torch(tiny_path):
    with Engine(tiny_path, device="cuda", vram_gib=2) as engine:
        engine.chat([{"role": "user", "content": "What is TCP?"}], max_tokens=8)
        card = engine.memory()["card"]
    assert card["found"]["non_torch_is"] in (TOLD, DIFFERENCE), card["found"]
    assert 100 * MIB < card["found"]["non_torch_bytes"] < 2 * GIB
    assert max(sizes(card)) <= card["budget_bytes"] == 2 * GIB


FIRST_ENGINE = """
import json, sys
from nemolab.engine import Engine
with Engine(sys.argv[1], device="cuda", vram_gib=2) as engine:
    engine.step(40, engine.new_state())
    print(json.dumps(engine.memory()["card"]))
"""


@pytest.mark.gpu
def test_the_first_engine_of_a_process_does_not_take_others_memory_for_its_own(tiny_path):
    others = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")  # this process's, as another one sees it
    done = subprocess.run([sys.executable, "-c", FIRST_ENGINE, str(tiny_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout.splitlines()[-1])
    assert card["found"]["in_use_bytes"] > others.nbytes
    assert 100 * MIB < card["found"]["non_torch_bytes"] < GIB and max(sizes(card)) <= 2 * GIB
    del others
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # it is this process's, and no engine's


@pytest.mark.gpu
def test_a_card_ends_an_allocation_beyond_the_budget_and_goes_on(tiny_path):
    with Engine(tiny_path, device="cuda", vram_gib=1.5) as engine:
        ids, state = engine.tokenizer.encode("TCP keeps a connection."), engine.new_state()
        wanted = engine.last_logits(ids, state.copy())
        left = engine.memory()["card"]
        left_bytes = left["limit_bytes"] - left["found"]["reserved_bytes"]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(left_bytes + 4 * MIB, dtype=torch.uint8, device="cuda")
        filler = torch.empty(left_bytes - 4 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(EngineError, match=r"does not suffice for a pass of .* vram_gib allows; fewer tokens"):
            engine.last_logits(ids * 200, state)
        del filler
        assert torch.equal(engine.last_logits(ids, engine.new_state()), wanted)
        assert max(sizes(engine.memory()["card"])) <= 1.5 * GIB


@pytest.mark.gpu
def test_a_closed_engine_gives_the_card_back(tiny_path):
    held = []
    for transfer in ("rows", "pull", "rows", "pull"):
        with Engine(tiny_path, device="cuda", transfer=transfer, prefetch=2) as engine:
            state = engine.new_state()
            engine.last_logits(range(300), state)
            for token in range(4):
                engine.step(token, state)
            del state
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert held[2:] == held[:2], "what libraries keep for themselves is there after the first"
