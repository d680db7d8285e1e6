"""Sizes are read strictly: a forgotten unit would be wrong by a factor of a billion."""

import pytest

from nemolab.errors import UsageError
from nemolab.units import Budget, parse_budget, parse_size, show_bytes, whole_pages


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("4GiB", Budget(size_bytes=4 * 2**30)),
        ("500MiB", Budget(size_bytes=500 * 2**20)),
        ("2GB", Budget(size_bytes=2 * 10**9)),
        ("2gb", Budget(size_bytes=2 * 10**9)),
        (" 1.5 GiB ", Budget(size_bytes=3 * 2**29)),
        (".5kb", Budget(size_bytes=500)),
        ("4096B", Budget(size_bytes=4096)),
        ("48slots", Budget(slots=48)),
        ("1 slot", Budget(slots=1)),
    ],
)
def test_sizes_are_read(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text",
    ["", "16", "GiB", "4GiBs", "-1GiB", "0GiB", "0.1B", "0slots", "1.5slots", "4 G iB", "1e3MB", "nanGiB", "٤GiB"],
)
def test_other_words_are_refused_with_an_example(text):
    with pytest.raises(UsageError, match="GiB|slots"):
        parse_budget(text)


@pytest.mark.parametrize(
    "text", ["", "8", "0GiB", "junk", "8GiBs", "48slots", "0 Slots", pytest.param("9" * 5000 + "GiB", id="long")]
)
def test_a_size_in_bytes_is_asked_for_without_a_word_of_slots_as_a_way(text):
    with pytest.raises(UsageError, match="8GiB, 500MiB or 2GB") as refusal:
        parse_size(text)
    assert "slots" not in str(refusal.value).replace(repr(text), "").replace("counts slots", "")
    assert len(str(refusal.value)) < 200


def test_a_size_in_bytes_is_read():
    assert parse_size("1.5 GiB") == 3 * 2**29


def test_huge_sizes_keep_every_byte():
    assert parse_budget("9007199254740993B").size_bytes == 9007199254740993


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (63417876480, "59.06 GiB"), (-2048, "-2.00 KiB")],
)
def test_bytes_are_shown(count, text):
    assert show_bytes(count) == text


def test_pages_are_whole():
    assert [whole_pages(nbytes) for nbytes in (0, 1, 4096, 4097, 8192)] == [0, 4096, 4096, 8192, 8192]
