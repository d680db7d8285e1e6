"""`nemolab trace`: what is asked is recorded, what is wrong is refused before anything runs, and counts agree."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from faults import run_cli
from traces import equal, without

import nemolab.engine.engine
from nemolab.engine import Engine
from nemolab.engine.conversations import feed_again, record_chats, summarise
from nemolab.engine.scripts import Script, read_prompts, read_texts
from nemolab.errors import EngineError, NemolabError, TraceError
from nemolab.simulate import check_live, from_trace, replay
from nemolab.store import ensure_store
from nemolab.trace import DECODE, PREFILL, read_trace, write_trace
from nemolab.trace.trace import TAKEN


def ask(*contents):
    return [{"role": "user", "content": content} for content in contents]


def write_prompts(path, *lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def store(tiny_path):
    """The store of data/tiny, opened without reading the checkpoint again."""
    return ensure_store(tiny_path)


def run_trace(*words):
    """`nemolab trace`, of data/tiny if not of a store: (exit code, stdout, stderr)."""
    return run_cli("trace", *words)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three conversations of data/tiny with six blocks in RAM: (trace, answer of the command, its file)."""
    folder = tmp_path_factory.mktemp("three")
    prompts = write_prompts(
        folder / "prompts.jsonl",
        {"name": "networks", "messages": ask("What is UDP?", "What is DNS?")},
        ask("Привет!"),
        {"messages": [{"role": "system", "content": "Answer in simple words."}, *ask("What is a port?")]},
    )
    words = ["--to", folder / "t", "--max-tokens", 12, "--ram-cache", "6slots", "--json"]
    code, out, err = run_trace("--prompts", prompts, *words)
    assert code == 0, err
    return read_trace(folder / "t"), json.loads(out), folder / "t"


def test_the_answer_counts_what_the_file_holds(three):
    trace, answer, path = three
    assert answer["model"] == "tiny" and answer["to"] == str(path) and answer["file_bytes"] == path.stat().st_size
    assert answer["cache"]["slots"] == 6 and answer["cache"]["policy"] == "lru" and answer["cache"]["prefetch"] == 0
    assert answer["conversations"] == 3
    assert [talk["name"] for talk in answer["by_conversation"]] == ["networks", "1", "2"]
    assert answer["tokens"] == {name: int((trace.phase == n).sum()) for n, name in enumerate(("prefill", "decode"))}
    for number, phase in enumerate(("prefill", "decode")):
        counts, live = answer["stats"][phase], trace.live_misses[trace.phase == number]
        assert counts["tokens"] == answer["tokens"][phase]
        assert counts["hits"] + counts["misses"] == counts["lookups"]
        assert counts["misses"] == counts["reads"] == live[live >= 0].sum()
        assert counts["bytes_read"] == 36_864 * counts["reads"]
        assert counts["hit_rate"] == counts["hits"] / counts["lookups"]
        assert counts["reads_per_token"] == counts["reads"] / counts["tokens"]
    assert answer["stats"]["decode"]["lookups"] == answer["tokens"]["decode"] * 6 * 6
    everything = answer["stats"]["all"]
    assert everything["misses"] == sum(answer["stats"][phase]["misses"] for phase in ("prefill", "decode"))
    assert everything["hit_rate"] == everything["hits"] / everything["lookups"]


def test_a_script_is_answered_in_turn_on_one_state(three, tiny_path):
    from nemolab.engine.chat import Tokenizer

    trace = three[0].select(conversation=0)
    assert trace.position.tolist() == list(range(trace.n_tokens)), "nothing is fed twice"
    passes = np.flatnonzero(np.diff(trace.phase.astype(int), prepend=DECODE) < 0)
    assert len(passes) == 2, "two questions, two prompt passes"
    tokenizer = Tokenizer(lambda name: tiny_path / name)
    text = tokenizer._library.decode(trace.token_ids.tolist(), skip_special_tokens=False)
    first, second = text.split("<|im_start|>user\n")[1:]
    assert first.startswith("What is UDP?<|im_end|>") and second.startswith("What is DNS?<|im_end|>")
    # As the template would have written the whole history.
    said = first.split("</think>")[1].split("<|im_end|>")[0]
    history = [*ask("What is UDP?"), {"role": "assistant", "content": said}, *ask("What is DNS?")]
    assert text.startswith(tokenizer.render(history))


def test_misses_are_those_of_a_replay_batch_by_batch(three):
    trace = three[0]
    check = check_live(trace)
    assert check.equal and check.compared == len(np.unique(trace.step)) * 6
    spoiled = replace(trace, live_misses=np.where(trace.live_misses > 0, trace.live_misses - 1, trace.live_misses))
    assert not check_live(spoiled).equal, "the twin"


def test_a_replay_emptied_between_conversations_begins_each_with_first_lookups(three):
    lookups = from_trace(three[0])
    carried, emptied = (replay(lookups, slots=384, cold=cold).misses_by_batch() for cold in (False, True))
    decode = lookups.phase == DECODE
    for number in range(3):
        mine = np.flatnonzero(decode & (lookups.conversation == number))
        assert emptied[mine[:6]].tolist() == [6] * 6, "its first token of decode finds nothing"
        keys = np.concatenate([lookups.keys[lookups.starts[b] : lookups.starts[b + 1]] for b in mine])
        assert emptied[mine].sum() == len(set(keys.tolist())), "with room for all, only first lookups miss"
    assert carried[decode].sum() < emptied[decode].sum()


def test_the_same_command_writes_the_same_file(store, tmp_path):
    prompts = write_prompts(tmp_path / "p", ask("What is UDP?"))
    files = []
    for seed in (5, 5, 6):
        words = ["--max-tokens", 12, "--temperature", 0.9, "--top-p", 0.95, "--seed", seed, "--ram-cache", "96slots"]
        assert run_trace("--store", store, "--prompts", prompts, "--to", tmp_path / "t", *words)[0] == 0
        files.append((tmp_path / "t").read_bytes())
    assert files[0] == files[1] != files[2]
    assert read_trace(tmp_path / "t").meta.taken["temperature"] == 0.9


def test_people_are_told_what_to_do_next(tmp_path):
    prompts = write_prompts(tmp_path / "p", ask("What is UDP?"))
    to = tmp_path / "with space"
    code, out, err = run_trace("--prompts", prompts, "--to", to, "--max-tokens", 3, "--ram-cache", "8slots")
    assert code == 0 and "cache: 8 blocks" in err
    lines = out.splitlines()
    assert lines[0].startswith(f"{to}: ") and "+ 2 tokens of tiny in 1 conversation," in lines[0]
    assert [line.split()[0] for line in lines[3:6]] == ["prefill", "decode", "all"]
    assert lines[-1] == f"next:  nemolab simulate '{to}' --budget 4slots,8slots,16slots --policy lru,belady"


def test_texts_are_fed_as_if_the_model_had_written_them(store, tmp_path, tiny_path):
    from nemolab.engine.chat import Tokenizer

    (tmp_path / "texts").mkdir()
    for name, text in {"b": "Вода кипит.", "a": "UDP sends single messages at once."}.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "texts" / "notes.md").write_text("no text")
    words = ["--texts", tmp_path / "texts", "--to", tmp_path / "t", "--ram-cache", "8slots", "--prefetch", "2"]
    code, out, _ = run_trace("--store", store, *words, "--max-tokens", "6", "--json")
    trace, answer = read_trace(tmp_path / "t"), json.loads(out)
    assert code == 0 and trace.meta.taken["kind"] == "text"
    assert [talk["name"] for talk in answer["by_conversation"]] == ["a", "b"]
    encode = Tokenizer(lambda name: tiny_path / name).encode
    for number, text in enumerate(("UDP sends single messages at once.", "Вода кипит.")):
        part = trace.select(conversation=number)
        assert part.token_ids.tolist() == encode(text)[:6]
        assert part.phase.tolist() == [PREFILL] + [DECODE] * (part.n_tokens - 1)
    assert answer["stats"]["decode"]["prefetch_issued"] > 0 and answer["cache"]["prefetch"] == 2
    assert check_live(trace).equal


def test_reasoning_that_a_template_takes_back_begins_another_conversation(store):
    with Engine(None, store=store, ram_cache_slots=96) as engine:
        script = Script("thought", ask("What is 7 plus 5?", "What is UDP?"), "here")
        trace = record_chats(engine, [script], think=True, max_tokens=24)
    assert trace.meta.taken["conversations"] == ["thought", "thought (2)"]
    assert trace.select(conversation=1).position[0] == 0
    assert summarise(trace)["conversations"] == 2 and trace.meta.taken["answers"] == 2


def test_ids_can_be_left_out(store, tmp_path):
    prompts = write_prompts(tmp_path / "p", ask("What is UDP?"))
    words = ["--max-tokens", 3, "--ram-cache", "8slots", "--no-token-ids"]
    assert run_trace("--store", store, "--prompts", prompts, "--to", tmp_path / "t", *words)[0] == 0
    assert read_trace(tmp_path / "t").token_ids is None


# Fed once more


@pytest.mark.parametrize("settings", [{"ram_cache_slots": 40}, {"ram_cache_slots": 24, "prefetch": 3}])
def test_a_trace_fed_again_at_another_size_misses_as_its_replay(three, store, settings):
    trace = three[0]
    with Engine(None, store=store, **settings) as engine:
        fed = feed_again(engine, trace)
    assert fed.differing_rows == 0 and fed.note == ""
    taken = fed.trace.meta.taken
    assert (
        taken["cache"]["slots"] == settings["ram_cache_slots"] and taken["fed_again"] and taken.keys() <= TAKEN.keys()
    )
    same = {"meta": trace.meta, "live_misses": trace.live_misses}
    assert equal(replace(fed.trace, **same), trace), "all but the cache is as it was"
    wanted = replay(
        from_trace(trace), slots=settings["ram_cache_slots"], prefetch=settings.get("prefetch", 0)
    ).misses_by_batch()
    assert fed.trace.live_misses[fed.trace.live_misses >= 0].tolist() == wanted.tolist()
    assert fed.trace.live_misses.tolist() != trace.live_misses.tolist()


def test_another_routing_is_said(three, store):
    trace = three[0].select(conversation=1)
    experts = trace.experts.copy()
    experts[[2, 5], 3] = experts[[2, 5], 3][:, ::-1]
    with Engine(None, store=store, ram_cache_slots=40) as engine:
        fed = feed_again(engine, replace(trace, experts=experts))
    assert fed.differing_rows == 2
    assert fed.note.startswith(f"2 of {trace.n_tokens} tokens were routed otherwise than in the trace")


def test_what_cannot_be_fed_again_is_refused(three, store):
    trace = three[0]
    other = replace(trace, meta=replace(trace.meta, fingerprint="another"))
    with Engine(None, store=store, ram_cache_slots=40) as engine:
        for wrong, message in (
            (without(trace, "token_ids"), "no token ids"),
            (other, "another model"),
            (trace.select(phase="decode"), "goes on at position .* cannot be fed again in part"),
        ):
            with pytest.raises(TraceError, match=message):
                feed_again(engine, wrong)
        feed_again(engine, trace.select(conversation=1))


# Refused before anything runs

HELLO = '[{"role": "user", "content": "Hello"}]\n'
BAD_PROMPTS = {
    "is empty; one conversation a line was expected": "\n \n",
    "line 2: not JSON": HELLO + "hello\n",
    "line 2: the line names 'role' twice; each": HELLO + '[{"role": "user", "role": "tool", "content": "x"}]',
    "line 2: the line holds NaN, which JSON does not know": HELLO + '[{"role": "user", "content": NaN}]',
    r"line 1: fields \['content', 'role'\]; messages": '{"role": "user", "content": "Hello"}\n',
    "line 2: str found; a list of messages": HELLO + '"Hello"\n',
    r"line 3: messages\[0\].role is 'narrator'; known": HELLO + HELLO + '[{"role": "narrator", "content": "x"}]',
    r"line 1: messages\[1\] is str": '[{"role": "user", "content": "x"}, "y"]',
    r"line 1: messages\[0\].content is NoneType": '[{"role": "user"}]',
    "line 1: messages must be a list with at least one": "[]",
    r"line 1: messages\[0\].content is not Unicode": '[{"role": "user", "content": "\\ud800"}]',
    "line 1: no user message is left to answer": HELLO.strip()[:-1] + ', {"role": "assistant", "content": "y"}]',
    "line 1: no user message is left": '[{"role": "system", "content": "x"}]',
    r"line 1: fields \['messages', 'tools'\]; messages, and name": '{"messages": [], "tools": []}',
    "line 1: name is 5": '{"messages": [{"role": "user", "content": "x"}], "name": 5}',
    "line 2: not UTF-8 at byte 39": HELLO.encode() + b"\xff\xfe\n",
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_PROMPTS)
def test_prompts_are_refused_by_file_and_line(tmp_path, message):
    content = BAD_PROMPTS[message]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(EngineError, match=message) as problem:
        read_prompts(path)
    assert str(path) in str(problem.value)


def test_prompts_of_every_good_form_are_read(tmp_path):
    path = tmp_path / "p"
    path.write_bytes(
        b"\xef\xbb\xbf" + HELLO.encode() + b"\n" + '{"messages": [{"role": "user", "content": "a\u2028b"}]}'.encode()
    )
    scripts = read_prompts(path)
    assert [script.where for script in scripts] == [f"{path}, line 1", f"{path}, line 3"]
    assert scripts[1].messages[0]["content"] == "a\u2028b" and scripts[0].name == "0"


def test_answers_stand_behind_user_messages_without_one():
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    for letters, turns in {
        "u": [1],
        "uu": [1, 2],
        "uau": [3],
        "suu": [2, 3],
        "usu": [1, 3],
        "uat": [3],
        "uatu": [3, 4],
    }.items():
        messages = [{"role": roles[letter], "content": letter} for letter in letters]
        assert Script("x", messages, "here").turns == turns, letters


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "holds no .txt file .it holds nothing"),
        ({"a.md": b"text"}, "holds no .txt file .it holds a.md"),
        ({"a.txt": b"fine", "b.txt": b" \n"}, "b.txt is empty"),
        ({"a.txt": b"one\n\xff"}, "a.txt, line 2: not UTF-8 at byte 4"),
    ],
)
def test_texts_are_refused_by_file(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EngineError, match=message):
        read_texts(tmp_path)
    with pytest.raises(EngineError, match="is no folder"):
        read_texts(tmp_path / "nowhere")


@pytest.fixture
def never_opened(monkeypatch):
    """An engine that must not be opened."""

    def fail(*_, **__):
        raise AssertionError("the engine was opened")

    monkeypatch.setattr(nemolab.engine, "Engine", fail)


def test_what_is_wrong_is_said_before_the_engine_is_opened(tmp_path, never_opened):
    good, bad = write_prompts(tmp_path / "good", ask("Hello")), write_prompts(tmp_path / "bad", {"a": 1})
    (tmp_path / "mine.txt").write_text("mine")
    to = tmp_path / "t"
    for words, code, message in (
        (["--prompts", bad, "--to", to], 1, f"{bad}, line 1"),
        (["--prompts", tmp_path / "nowhere", "--to", to], 1, "nowhere cannot be read"),
        (["--texts", tmp_path / "nowhere", "--to", to], 1, "is no folder"),
        (["--prompts", good, "--to", tmp_path / "no" / "t"], 1, "is no folder; make it first"),
        (["--prompts", good, "--to", tmp_path / "mine.txt"], 1, "exists and is no trace"),
        (["--prompts", good, "--to", tmp_path], 1, "is a folder"),
        (["--prompts", good, "--texts", tmp_path, "--to", to], 2, "either --prompts FILE or --texts DIR"),
        (["--to", to], 2, "either --prompts FILE or --texts DIR"),
        (["--prompts", good], 2, "--to"),
        (["--texts", tmp_path, "--to", to, "--think"], 2, "nothing is sampled"),
        (["--prompts", good, "--to", to, "--max-tokens", "0"], 2, "--max-tokens"),
        (["--prompts", good, "--to", to, "--ram-cache", "16"], 2, "16"),
    ):
        found, out, err = run_trace(*words)
        assert (found, out) == (code, "") and message in err and len(err.splitlines()) == 1, (words, err)
    assert (tmp_path / "mine.txt").read_text() == "mine" and not to.exists()
    with pytest.raises(AssertionError, match="opened"):  # the twin
        nemolab.engine.Engine()


def test_what_does_not_fit_the_model_is_said_before_a_token(store, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "last_logits", lambda *_: pytest.fail("a token was fed"))
    prompts = write_prompts(tmp_path / "p", ask("Hello"), ask("word " * 5000))
    code, _, err = run_trace("--store", store, "--prompts", prompts, "--to", tmp_path / "t", "--ram-cache", "8slots")
    assert code == 1 and f"{prompts}, line 2: " in err and "256 new tokens; this model was made for" in err
    (tmp_path / "long.txt").write_text("word " * 5000)
    code, _, err = run_trace("--store", store, "--texts", tmp_path, "--to", tmp_path / "t", "--ram-cache", "8slots")
    assert code == 1 and "long.txt: " in err and "set a maximum of tokens" in err
    assert run_trace("--store", store, "--prompts", prompts, "--to", tmp_path / "t", "--policy", "belady")[0] == 2
    assert not (tmp_path / "t").exists()


def test_an_interrupt_leaves_what_was_there(store, tmp_path, three, monkeypatch):
    step, calls = Engine.step, []

    def step_and_interrupt(engine, token, state):
        calls.append(token)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine, token, state)

    monkeypatch.setattr(Engine, "step", step_and_interrupt)
    prompts = write_prompts(tmp_path / "p", ask("What is UDP?"))
    code, out, err = run_trace(
        "--store", store, "--prompts", prompts, "--to", tmp_path / "t", "--ram-cache", "8slots", "--json"
    )
    assert code == 130 and out == "" and err.endswith("nemolab: interrupted\n")
    assert os.listdir(tmp_path) == ["p"]
    write_trace(tmp_path / "t", three[0])
    calls.clear()
    assert run_trace("--store", store, "--prompts", prompts, "--to", tmp_path / "t", "--ram-cache", "8slots")[0] == 130
    assert equal(read_trace(tmp_path / "t"), three[0])


def test_errors_on_the_way_name_the_script(store):
    with Engine(None, store=store, ram_cache_slots=96) as engine:
        limit = engine.config.max_position_embeddings
        script = Script("long", ask("Hello", "word " * (limit // 2)), "p, line 7")
        with pytest.raises(NemolabError, match="p, line 7: .* are more than the"):
            record_chats(engine, [script], max_tokens=limit // 2)
