"""From ids to text as it grows: whole characters only, no special tokens, reasoning apart from the answer."""

import pytest
from synthetic import write_small_files

from nemolab.engine.chat import Tokenizer
from nemolab.engine.text_stream import ReasoningSplit, TextStream

TEXTS = ["Привет 日本 👋", "plain", "  leading and trailing  ", "a\n\nb", "é́", "\ufffd is a character too", ""]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    write_small_files(folder)
    return Tokenizer(lambda name: folder / name if (folder / name).exists() else None)


def stream(tokenizer, ids):
    words = TextStream(tokenizer.decode_with_tags)
    return [words.push(token) for token in ids] + [words.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_together_are_the_text_and_hold_no_half_characters(tokenizer, text):
    """The tokenizer has one token a byte, so every character beyond ASCII comes in parts."""
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert all(piece.count("\ufffd") <= text.count("\ufffd") for piece in pieces)


def test_ascii_is_handed_out_at_once(tokenizer):
    assert stream(tokenizer, tokenizer.encode("abc")) == ["a", "b", "c", ""]


def test_decoding_single_ids_would_break_characters(tokenizer):
    assert "\ufffd" in "".join(tokenizer.decode([token]) for token in tokenizer.encode("日"))


def test_bytes_that_never_become_a_character_still_come_out(tokenizer):
    half = tokenizer.encode("日")[:2]
    assert "".join(stream(tokenizer, [*half, *tokenizer.encode("a")])) == tokenizer.decode(
        [*half, *tokenizer.encode("a")]
    )
    assert "".join(stream(tokenizer, half)) == tokenizer.decode(half)


def test_special_tokens_never_become_text(tokenizer):
    ids = [10, *tokenizer.encode("hi"), 11, 0, 2, 31]
    assert tokenizer.decode(ids) == "hi" and "".join(stream(tokenizer, ids)) == "hi"
    assert tokenizer.decode_with_tags([12, *tokenizer.encode("hi"), 13]) == "<think>hi</think>"
    assert tokenizer.decode([12, *tokenizer.encode("hi"), 13]) == "hi"


def split(pieces, thinking=False):
    """(reasoning, answer) of a text that arrives in these pieces."""
    splitter = ReasoningSplit(thinking)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


CASES = [
    (["<th", "ink>r</thi", "nk>a"], False, ("r", "a")),
    (["\nI think.\n</think>\n\nSo it is."], True, ("I think.", "So it is.")),
    (["only an answer"], False, ("", "only an answer")),
    (["cut inside thinking"], True, ("cut inside thinking", "")),
    (["cut inside a tag </thin"], True, ("cut inside a tag </thin", "")),
    (["1 < 2 and 2 <", "3"], False, ("", "1 < 2 and 2 <3")),
    (["a </thing> b"], False, ("", "a </thing> b")),
    (["  indented answer\n"], False, ("", "  indented answer\n")),
    (["<think></think>", "plain"], False, ("", "plain")),
    (["r1</think>a1<think>r2</think>a2"], True, ("r1r2", "a1a2")),
    (["  \n", "\n r  \n", "  </think>", " \n", " a b "], True, ("r", "a b ")),
    ([""], True, ("", "")),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "thinking", "wanted"), CASES)
def test_reasoning_is_split_however_the_text_arrives(pieces, thinking, wanted):
    whole = "".join(pieces)
    assert split(pieces, thinking) == wanted
    assert split([whole], thinking) == wanted
    assert split(list(whole), thinking) == wanted


def test_text_that_could_be_a_tag_is_held_back_only_as_long_as_needed():
    splitter = ReasoningSplit()
    assert splitter.push("a <thi") == ("", "a ")
    assert splitter.push("s") == ("", "<this")
