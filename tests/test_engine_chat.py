"""Templates, messages and whole answers."""

import json

import pytest
from synthetic import write_checkpoint, write_small_files

from nemolab.engine import Engine
from nemolab.engine.chat import Tokenizer, clean_messages, opens_thinking
from nemolab.errors import EngineError, NemolabError

ASK = [{"role": "user", "content": "What is TCP?"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("chat"), pattern="M*E", hidden=32, latent=32, inter=32, experts=4)


def tokenizer_of(folder):
    return Tokenizer(lambda name: folder / name if (folder / name).exists() else None, "the test model")


@pytest.fixture
def folder(tmp_path):
    write_small_files(tmp_path)
    return tmp_path


@pytest.fixture
def bare(folder):
    """Only tokenizer.json: the package's own template is used."""
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        (folder / name).unlink()
    return tokenizer_of(folder)


def test_the_package_s_template_writes_the_vendor_s_form(bare):
    assert bare.render(ASK) == (
        "<|im_start|>system\n<|im_end|>\n"
        "<|im_start|>user\nWhat is TCP?<|im_end|>\n"
        "<|im_start|>assistant\n<think></think>"
    )
    assert bare.render(ASK, think=True).endswith("<|im_start|>assistant\n<think>\n")
    assert "own" in bare.notes[0] and "chat template" in bare.notes[0]


def test_the_shipped_model_and_the_package_have_one_template(tiny_path):
    from importlib import resources

    own = resources.files("nemolab.engine").joinpath("default_template.jinja").read_text(encoding="utf-8")
    assert (tiny_path / "chat_template.jinja").read_text(encoding="utf-8") == own


def test_history_loses_its_reasoning_and_late_system_messages_stay_in_place(bare):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>why</think>\nb", "reasoning_content": None},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
        {"role": "assistant", "content": "e", "reasoning_content": "because"},
    ]
    assert bare.render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\n<think></think>b<|im_end|>\n<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\ncd<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nbecause\n</think>\ne<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )


def test_tools_and_their_results_are_rendered(bare):
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "enum": ["Пермь", "Oslo"]}},
                "required": ["town"],
            },
        },
    }
    call = {"function": {"name": "weather", "arguments": {"town": "Oslo", "days": 2}}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun"},
    ]
    text = bare.render(messages, tools=[tool])
    assert (
        "<tools>\n<function>\n<name>weather</name>\n<description>The weather of a town.</description>\n<parameters>\n"
        '<parameter>\n<name>town</name>\n<type>string</type>\n<enum>["Пермь", "Oslo"]</enum>\n</parameter>\n'
        '<required>["town"]</required>\n</parameters>\n</function>\n</tools>' in text
    )
    assert (
        "<think></think><tool_call>\n<function=weather>\n<parameter=town>\nOslo\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nsun\n</tool_response>\n<|im_end|>\n" in text
    )


@pytest.mark.parametrize("place", ["chat_template.jinja", "one text", "several by name"])
def test_a_checkpoint_s_own_template_wins(folder, place):
    template = "{% for m in messages %}\n  {{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    if place == "chat_template.jinja":
        (folder / place).write_text(template)
    else:
        (folder / "chat_template.jinja").unlink()
        found = template if place == "one text" else [{"name": "default", "template": template}]
        words = {"chat_template": found, "eos_token": {"content": "<|im_end|>"}}
        (folder / "tokenizer_config.json").write_text(json.dumps(words))
    tokenizer = tokenizer_of(folder)
    assert tokenizer.render(ASK) == "  user: What is TCP?<|im_end|>\n" and not tokenizer.notes


def test_templates_have_the_helpers_of_transformers(folder):
    template = "{{ {'ж': '<>'} | tojson }}{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    assert tokenizer_of(folder).render(ASK) == '{"ж": "<>"}1'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{% if %}", "no valid template"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_templates_that_fail_or_misbehave_are_refused(folder, template, message):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(EngineError, match=message):
        tokenizer_of(folder).render(ASK)


def test_a_missing_tokenizer_matters_only_for_text(folder):
    (folder / "tokenizer.json").unlink()
    tokenizer = tokenizer_of(folder)
    assert tokenizer.render(ASK)
    with pytest.raises(EngineError, match="tokenizer.json"):
        tokenizer.encode("a")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"ab\xff", "not UTF-8 at byte 2"), (b" " * (2**20 + 1), "1,048,577 bytes; a template has")],
)
def test_a_template_that_is_no_text_or_endless_is_refused(folder, content, message):
    (folder / "chat_template.jinja").write_bytes(content)
    with pytest.raises(EngineError, match=message):
        tokenizer_of(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_no_json_are_named(folder, name):
    (folder / name).write_text("{not json")
    with pytest.raises(NemolabError, match=name):
        tokenizer_of(folder).encode("a")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hello", "must be a list"),
        (["hello"], r"messages\[0\] is str"),
        ([{"role": "narrator", "content": "x"}], r"messages\[0\].role is 'narrator'; known are system"),
        ([{"content": "x"}], "role is None"),
        ([*ASK, {"role": "user", "content": None}], r"messages\[1\].content is NoneType"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], r"content\[0\] is of type 'input_audio'"),
        ([{"role": "user", "content": 5}], "content is int"),
    ],
)
def test_messages_that_are_none_are_refused_by_place(messages, message):
    with pytest.raises(EngineError, match=message):
        clean_messages(messages)


def test_an_assistant_without_content_is_an_empty_one():
    empty = [{"role": "assistant", "content": content} for content in (None, "", [])] + [{"role": "assistant"}]
    assert [message["content"] for message in clean_messages(empty)] == [""] * 4


def test_a_prompt_that_opens_thinking_is_recognised():
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("<|im_start|>assistant\n<think></think>")
    assert not opens_thinking("no tags")


class Script:
    """An engine whose model writes given ids, one a step."""

    def __init__(self, engine, ids):
        self.engine, self.ids = engine, iter(ids)

    def __enter__(self):
        import torch

        def logits(*_):
            row = torch.zeros(self.engine.config.vocab_size)
            row[next(self.ids)] = 1.0
            return row

        self.engine._model.step = logits
        self.engine.last_logits = logits
        return self.engine

    def __exit__(self, *_):
        del self.engine._model.step, self.engine.last_logits


@pytest.fixture(scope="module")
def engine(path):
    with Engine(path, threads=1) as engine:
        yield engine


def both_ways(engine, ids, **choice):
    """The answer, whole and streamed, which must agree."""
    with Script(engine, ids):
        whole = engine.chat(ASK, **choice)
    with Script(engine, ids):
        *pieces, last = engine.chat(ASK, stream=True, **choice)
    for field in ("text", "reasoning"):
        assert "".join(getattr(piece, field) for piece in pieces) == getattr(whole, field)
        assert getattr(last.result, field) == getattr(whole, field)
    assert (last.text, last.reasoning) == ("", "")
    assert (last.result.finish_reason, last.result.completion_tokens) == (whole.finish_reason, whole.completion_tokens)
    return whole


def test_an_answer_ends_at_any_stop_id_and_shows_none(engine):
    words = engine.tokenizer.encode("Да 👋")
    for stop in (2, 11):
        result = both_ways(engine, [*words, stop, 40], max_tokens=50)
        assert (result.text, result.reasoning, result.finish_reason) == ("Да 👋", "", "stop")
        assert result.completion_tokens == len(words)
        assert result.prompt_tokens == len(engine.tokenizer.encode(engine.tokenizer.render(ASK)))


def test_a_stop_id_exactly_at_the_limit_is_a_stop(engine):
    words = engine.tokenizer.encode("abcd")
    assert both_ways(engine, [*words, 2], max_tokens=5).finish_reason == "stop"
    cut = both_ways(engine, [*words, 2], max_tokens=4)
    assert (cut.text, cut.finish_reason, cut.completion_tokens) == ("abcd", "length", 4)
    assert both_ways(engine, words, max_tokens=1).completion_tokens == 1


def test_thinking_is_kept_apart(engine):
    encode = engine.tokenizer.encode
    ids = [*encode("because\n"), 13, *encode("\nTCP counts.")]
    result = both_ways(engine, [*ids, 11], think=True, max_tokens=100)
    assert (result.reasoning, result.text, result.finish_reason) == ("because", "TCP counts.", "stop")
    assert result.completion_tokens == len(ids)


def test_an_answer_cut_inside_thinking_has_no_text(engine):
    result = both_ways(engine, engine.tokenizer.encode("because of"), think=True, max_tokens=7)
    assert (result.text, result.reasoning, result.finish_reason) == ("", "because", "length")


def test_without_thinking_everything_is_the_answer(engine):
    result = both_ways(engine, [*engine.tokenizer.encode("plain words"), 11], max_tokens=50)
    assert (result.text, result.reasoning) == ("plain words", "")


def test_a_half_character_at_the_end_is_not_swallowed(engine):
    result = both_ways(engine, engine.tokenizer.encode("a日")[:3], max_tokens=3)
    assert result.text == engine.tokenizer.decode(engine.tokenizer.encode("a日")[:3])


def test_stats_of_an_answer_are_its_own(engine):
    first, second = (engine.chat(ASK, max_tokens=3, temperature=0.0) for _ in range(2))
    for result in (first, second):
        assert result.stats["prefill"]["tokens"] == result.prompt_tokens
        counts = result.stats["decode"]
        assert counts["lookups"] == counts["hits"] + counts["misses"] == counts["tokens"] * 2
    assert second.stats["decode"]["misses"] == 0, "everything was cached by then"
    assert first.text == second.text


def test_a_context_too_long_is_refused_before_the_stream_starts(engine):
    long = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(EngineError, match="4096"):
        engine.chat(long, stream=True)
    with pytest.raises(EngineError, match="max_tokens"):
        engine.chat(ASK, max_tokens=-1)


def test_the_shipped_model_answers(tiny_path):
    with Engine(tiny_path) as engine:
        result = engine.chat(ASK, max_tokens=24)
    assert len(result.text) > 10 and result.reasoning == "" and "<" not in result.text


def test_half_a_surrogate_pair_is_refused_by_name(folder):
    broken = "a\udcff"
    with pytest.raises(EngineError, match=r"messages\[0\]\.content is not Unicode text at character 1"):
        tokenizer_of(folder).render([{"role": "user", "content": broken}])
    with pytest.raises(EngineError, match="not Unicode text"):
        tokenizer_of(folder).encode(broken)
