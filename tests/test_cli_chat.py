"""The chat verb: one question, a conversation from lines of input, an answer stopped half-way."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

import nemolab.engine
from nemolab.cli import main
from nemolab.engine import ChatPiece, ChatResult
from nemolab.errors import EngineError

STATS = {"prefill": {"lookups": 0}, "decode": {"lookups": 10, "hits": 9, "bytes_read": 4096, "tok_s": 2.0}}
MEMORY = {"peak_rss_bytes": 3 * 2**20, "cache": {"blocks": 48}}


class FakeBudget:
    def line(self):
        return "cache: 48 blocks"


class FakeEngine:
    """Answers with how many messages it was given; `opened` keeps the settings it was opened with."""

    opened: list = []
    asked: list = []
    notes = ["the template is a stand-in"]
    budget = FakeBudget()

    def __init__(self, path, **settings):
        FakeEngine.opened.append((str(path), settings))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        FakeEngine.opened.append("closed")

    def memory(self):
        return MEMORY

    def chat(self, messages, *, stream=False, think=False, **ask):
        FakeEngine.asked.append((messages, think, ask))
        if messages[-1]["content"] == "too long":
            raise EngineError("9 prompt + 1 new tokens are more than the 8 this model was made for")
        result = ChatResult(f"heard {len(messages)} so far", "hm" if think else "", 5, 2, "stop", STATS)
        if not stream:
            return result
        return self._pieces(result, messages[-1]["content"])

    def _pieces(self, result, content):
        for word in [result.reasoning] if result.reasoning else []:
            yield ChatPiece(reasoning=word)
        for place, word in enumerate(result.text.split(" ")):
            yield ChatPiece(text=word if place == 0 else " " + word)
            if content == "stop here":
                os.kill(os.getpid(), signal.SIGINT)
        yield ChatPiece(result=result)


@pytest.fixture
def chat(monkeypatch, capsys):
    """Run `nemolab chat` with lines on stdin: (exit code, stdout, stderr)."""
    monkeypatch.setattr(nemolab.engine, "Engine", FakeEngine)
    FakeEngine.opened, FakeEngine.asked = [], []

    def run(*words, lines=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return (main(["chat", *words]), *capsys.readouterr())

    return run


def test_one_question_as_json(chat, tiny_path):
    code, out, err = chat("--prompt", "hello", "--json", "--max-tokens", "7", "--ram-cache", "48slots")
    assert code == 0 and err == "note: the template is a stand-in\ncache: 48 blocks\n"
    assert json.loads(out) == {
        "text": "heard 1 so far",
        "reasoning": "",
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "finish_reason": "stop",
        "stats": STATS,
        "memory": MEMORY,
    }
    (path, settings), end = FakeEngine.opened
    assert (path, end) == (str(tiny_path), "closed")
    assert {name: value for name, value in settings.items() if value is not None} == {
        "ram_cache_slots": 48,
        "prefetch": 0,
        "device": "cpu",
    }, "nothing that was not asked for"
    ((messages, think, ask),) = FakeEngine.asked
    assert messages == [{"role": "user", "content": "hello"}] and think is False
    assert ask == {"max_tokens": 7, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}, "greedy unless asked"


def test_sizes_of_the_cache_reach_the_engine_in_gib(chat):
    chat("--prompt", "hello", "--ram-cache", "512MiB")
    settings = FakeEngine.opened[0][1]
    assert (settings["ram_cache_gib"], settings["ram_cache_slots"], settings["store"]) == (0.5, None, None)


def test_the_card_and_its_memory_reach_the_engine(chat):
    words = "--device cuda:1 --transfer rows --vram 8GiB --prefetch 4".split()
    chat("--prompt", "hello", *words)
    settings = FakeEngine.opened[0][1]
    chosen = {name: settings[name] for name in ("device", "transfer", "vram_gib", "prefetch")}
    assert chosen == {"device": "cuda:1", "transfer": "rows", "vram_gib": 8.0, "prefetch": 4}


def test_a_cards_memory_is_not_counted_in_slots(chat):
    code, _, err = chat("--prompt", "hello", "--device", "cuda", "--vram", "8slots")
    assert code == 2 and "8slots" in err and "8GiB" in err


def test_one_question_for_people_streams_reasoning_answer_and_counts(chat):
    code, out, err = chat("--prompt", "hello", "--think")
    assert code == 0
    assert out == (
        "[thinking] hm\n[answer] heard 1 so far\n\n"
        "[5 + 2 tokens; decode 2.0 tok/s, 90% of 10 experts from RAM, 4.00 KiB read; "
        "3.00 MiB of memory at most]\n"
    )


def test_an_empty_question_is_asked_too(chat):
    assert chat("--prompt", "", "--json")[0] == 0


def test_a_conversation_remembers_until_a_new_one(chat):
    code, out, err = chat(lines="one\n\ntwo\n/new\nthree\n/quit\nnever\n")
    assert code == 0
    assert [len(messages) for messages, _, _ in FakeEngine.asked] == [1, 3, 1]
    assert FakeEngine.asked[1][0] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "heard 1 so far"},
        {"role": "user", "content": "two"},
    ]
    assert out.count("heard") == 3 and FakeEngine.opened[-1] == "closed"


def test_a_conversation_ends_with_its_input(chat):
    code, out, err = chat(lines="one")
    assert code == 0 and out == "heard 1 so far\n\n\n"


def test_unknown_commands_and_errors_do_not_end_a_conversation(chat):
    code, out, err = chat(lines="/help\none\ntoo long\ntwo\n")
    assert code == 0
    assert "no such command: /help" in err and "9 prompt + 1 new tokens" in err and "/new starts afresh" in err
    assert [len(messages) for messages, _, _ in FakeEngine.asked] == [1, 3, 3]


def test_an_interrupt_stops_the_answer_and_not_the_conversation(chat):
    code, out, err = chat(lines="stop here\ntwo\n")
    assert code == 0 and "[stopped]" in err
    assert FakeEngine.asked[1][0][1] == {"role": "assistant", "content": "heard 1"}, "what was shown of it"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_json_without_a_question_is_bad_usage(chat):
    code, out, err = chat("--json")
    assert code == 2 and not out and "--prompt" in err and not FakeEngine.opened


def test_a_store_alone_says_which_model(tmp_path, monkeypatch):
    monkeypatch.setattr(nemolab.engine, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "opened", [])
    assert main(["chat", "--store", str(tmp_path), "--prompt", "hi"]) == 0
    assert main(["chat", str(tmp_path), "--store", str(tmp_path), "--prompt", "hi"]) == 0
    assert [path for path, _ in FakeEngine.opened[::2]] == ["None", str(tmp_path)]


def test_bytes_that_are_no_text_end_only_their_own_question(tmp_path):
    asked = subprocess.run(
        [sys.executable, "-c", FAKE_CHAT, str(tmp_path)], input=b"hi\xff\n/new\n", capture_output=True, timeout=60
    )
    assert asked.returncode == 0 and b"unexpected" not in asked.stderr and b"a new conversation" in asked.stderr


FAKE_CHAT = """
import sys, nemolab.engine
from nemolab.cli import main
from nemolab.engine.chat import clean_messages

class Budget:
    def line(self): return "cache"

class Fake:
    notes, budget = [], Budget()
    def __init__(self, *_, **__): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def chat(self, messages, **_): return clean_messages(messages)

nemolab.engine.Engine = Fake
sys.exit(main(["chat", sys.argv[1]]))
"""
