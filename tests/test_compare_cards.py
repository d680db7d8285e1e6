"""A comparison of an engine on a card, by twins on the CPU: beside the CPU's, by every way, within its memory."""

import pytest
from synthetic import write_checkpoint

import nemolab.engine
from nemolab.compare import compare, comparison
from nemolab.compare.comparison import KL_BOUND_CARD
from nemolab.compare.determinism import OtherProcess
from nemolab.errors import EngineError, NemolabError
from nemolab.store import ensure_store

IDS = list(range(40, 60))
WHERE = {"device": "twin", "vram_gib": 4.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def compared(folder):
    """(the document, what progress was told, where each engine was opened, in this process and in the other)"""
    told, opened = [], []

    class Engine(nemolab.engine.Engine):
        def __init__(self, *parts, device, vram_gib, **settings):
            opened.append((device, vram_gib))
            super().__init__(*parts, device=device, vram_gib=vram_gib, **settings)

    class Other(OtherProcess):
        def __init__(self, *parts):
            opened.append(tuple(parts[-1].values()))
            super().__init__(*parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nemolab.engine, "Engine", Engine)
        patch.setattr(comparison, "OtherProcess", Other)
        document = compare(folder, texts={"ids": IDS}, progress=lambda *counts: told.append(counts), **WHERE)
    return document, told, opened


def test_it_is_held_against_that_on_the_cpu_too(compared):
    """Prompts round what goes into a matrix, so that is where the two differ; decode does not."""
    document, told, _ = compared
    assert document["passed"], document["problems"]
    (text,) = document["texts"]
    assert 0 < text["kl_mean_beside_cpu"] <= KL_BOUND_CARD and text["kl_mean_decode_beside_cpu"] <= KL_BOUND_CARD
    runs = document["determinism"]["logits_sha256"]
    assert {f"transfer {way}" for way in ("whole", "grouped", "rows", "pull")} <= set(runs) and len(runs) == 8
    assert told[-1][0] == told[-1][1]


def test_every_engine_on_the_card_keeps_to_its_memory(compared):
    """Of one reading, two repeats, four ways, the other process, three controls; and one on the CPU."""
    document, _, opened = compared
    assert sorted(opened, key=str) == sorted([("cpu", None)] + 11 * [("twin", 4.0)], key=str)
    assert (document["device"], document["vram_gib"]) == ("twin", 4.0)


def test_the_other_process_is_told_how_much_it_may_take(folder):
    where = {"device": "twin", "vram_gib": 0.5}
    with OtherProcess(folder, ensure_store(folder), IDS, 2, where) as other:
        with pytest.raises(NemolabError, match=r"vram_gib allows 512\.00 MiB, but this model takes"):
            other.wait()


@pytest.mark.parametrize(("where", "words"), [({"vram_gib": 4}, "the device is 'cpu'"), ({"device": "gpu"}, "'gpu'")])
def test_a_place_that_cannot_be_is_refused_before_anything_is_read(where, words):
    with pytest.raises(EngineError, match=words):
        compare("no/such/folder", **where)
