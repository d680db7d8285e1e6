"""What an engine takes of a card's memory: by arithmetic, and as found on a card."""

from types import SimpleNamespace

import pytest
import torch
from synthetic import one_thread, write_checkpoint

from nemolab.checkpoint.formats import matrix_bytes
from nemolab.engine import Engine
from nemolab.engine.gpu import weights
from nemolab.engine.gpu.plan import (
    LATER_BYTES,
    SPARE_BYTES,
    WORKSPACE_BYTES,
    _plans,
    card_dense_bytes,
    context_bytes,
    least_bytes,
    plan_card,
)
from nemolab.engine.transfers import TRANSFERS
from nemolab.errors import EngineError
from nemolab.store.layout import BlockLayout
from nemolab.synthetic.shapes import make_form
from nemolab.synthetic.tensors import list_linears

GIB, MIB = 2**30, 2**20
SMALL = {"pattern": "ME*E-", "experts": 12, "inter": 80, "latent": 48, "hidden": 64, "shared_inter": 32, "top_k": 3}


def published(shape):
    """What a plan asks of a store, from a shape's config and list of tensors: nothing is written."""
    form = make_form(shape)
    dense = {
        name: SimpleNamespace(nbytes=matrix_bytes(*sizes, format), shape=sizes, format=format, tensors=())
        for name, sizes, format in list_linears(form)
        if ".experts." not in name and not name.startswith("mtp")
    }
    layout = BlockLayout("neuron", form.config.expert_inter, form.config.expert_in)
    return SimpleNamespace(
        config=form.config,
        dense=dense,
        block_bytes=layout.block_bytes,
        expert_shape=(layout.expert_inter, layout.expert_in),
    )


def test_the_large_model_fits_a_card_of_8_gib_with_a_prompt_of_8192_tokens():
    """6.55 GiB dense in 3.5-Super's form, a state of 8,192 tokens, their prompt whole through each layer."""
    plan = plan_card(published("super35"), 32, 8 * GIB)
    assert (plan.pass_tokens, plan.piece_tokens) == (8192, 512) and plan.total_bytes <= 8 * GIB
    assert plan.dense_bytes == pytest.approx(6.55 * GIB, rel=0.01)
    assert plan.state_bytes == 4 * (8 * 2 * 8192 * 256 + 40 * (8192 * 128 + 10240 * 3))


@pytest.mark.parametrize(
    ("transfer", "lengths"),
    [("pull", (8192, 512)), ("rows", (4096, 512)), ("grouped", (4096, 512)), ("whole", (4096, 256))],
)
def test_slots_of_a_token_shorten_the_passes_of_a_full_card(transfer, lengths):
    plan = plan_card(published("super35"), 32, 8 * GIB, transfer=transfer)
    assert (plan.pass_tokens, plan.piece_tokens) == lengths and plan.total_bytes <= 8 * GIB


@pytest.mark.parametrize(
    ("card_gib", "found_mib", "lengths"),
    [
        (8188 / 1024, None, (8192, 512)),
        (8151 / 1024, None, (8192, 256)),
        (7.85, None, (2048, 256)),
        (7.85, 300, (8192, 1024)),
        (7.79, 300, (8192, 1024)),
        (7.6, 300, (4096, 256)),
        (7.6, 200, (8192, 256)),
    ],
)
def test_the_large_model_fits_cards_called_8_gb(card_gib, found_mib, lengths):
    """They have 7.6 to 8 GiB. Where the driver's own part is known once they are open, less of it is assumed."""
    context = context_bytes(found_mib and found_mib * MIB)
    plan = plan_card(published("super35"), 32, int(card_gib * GIB), context)
    assert (plan.pass_tokens, plan.piece_tokens) == lengths and plan.total_bytes <= card_gib * GIB
    assert plan.to_dict()["pass_tokens"] == lengths[0]


def test_a_card_that_is_too_small_is_told_the_least_that_works():
    store = published("super35")
    least = least_bytes(store, 32)
    assert 7.79 * GIB < least < 7.8 * GIB
    with pytest.raises(
        EngineError, match=r"vram_gib allows 7\.79 GiB, but this model takes 7\.80 GiB .*; that much is"
    ):
        plan_card(store, 32, int(7.79 * GIB))
    assert plan_card(store, 32, least).total_bytes == least


def test_beside_torch_as_much_is_planned_as_was_found_and_is_still_to_come():
    found = [None, 0, 63, 64, 300, 512, 600, 752, 800]
    planned = [context_bytes(mib if mib is None else mib * MIB) for mib in found]
    assert planned == [mib * MIB for mib in (768, 768, 768, 256, 492, 704, 768, 768, 816)]
    assert LATER_BYTES == 192 * MIB and SPARE_BYTES == 16 * MIB


def test_matrices_that_are_multiplied_in_float32_take_more_of_a_prompt():
    """Inputs [512, 4096] in float32, and the products of 2,048 rows of a 32 MiB piece; of the head, of 64 tokens."""
    store = published("super35")
    taken = plan_card(store, 32, 8 * GIB).prompt_bytes
    for name, tokens in (("lm_head", 64), ("backbone.layers.0.mixer.in_proj", 512)):
        half = SimpleNamespace(**vars(store) | {"dense": {**store.dense, name: changed(store.dense[name])}})
        plan = next(plan for plan in _plans(half, 32, "pull") if (plan.pass_tokens, plan.piece_tokens) == (8192, 512))
        assert plan.prompt_bytes == taken + 4 * tokens * (4096 + 2048)


def changed(module):
    return SimpleNamespace(**vars(module) | {"format": "f16"})


def test_what_layers_keep_to_compute_a_token_is_planned():
    """40 Mamba layers' h, projection and y, 8 attention layers', the shared experts', scratch for 8,192 tokens."""
    plan = plan_card(published("super35"), 32, 8 * GIB)
    layers = 40 * (4096 + 18560 + 8192) + 8 * (4096 + 2 * 4096 + 2 * 256) + 40 * 5376
    scratch = 32 * 130 * 128 + 512 + 4 * 4096 + 131072
    assert plan.workspace_bytes == WORKSPACE_BYTES + 4 * (layers + scratch)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_token_takes_the_slots_that_its_step_makes(transfer):
    """An up of 3,264 bytes, and slots that begin at multiples of 512."""
    store = SimpleNamespace(**vars(published("tiny")) | {"expert_shape": (96, 64 - 4)})
    (inter, width), top_k = store.expert_shape, store.config.top_k
    layout = BlockLayout("neuron", inter, width)
    copied = {"pull": 0, "whole": layout.payload_bytes}.get(transfer, layout.up_bytes)
    assert copied % 512 or not copied
    taken = plan_card(store, 1, None, transfer=transfer).experts_bytes - 2 * store.block_bytes
    assert taken == 2 * top_k * whole(copied, 512) + 4 * top_k * width * whole(inter, 32) // 32


def whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def test_a_smaller_budget_shortens_pieces_then_passes_and_never_the_conversation():
    store, plans = published("nano"), [plan_card(published("nano"), 32, None)]
    for _ in range(5):
        plans.append(plan_card(store, 32, plans[-1].total_bytes - 1))
    lengths = [(plan.pass_tokens, plan.piece_tokens) for plan in plans]
    assert lengths == [(8192, 1024), (8192, 512), (8192, 256), (4096, 1024), (4096, 512), (4096, 256)]
    assert all(plan.state_bytes >= plans[0].state_bytes for plan in plans)


def test_the_plan_knows_the_dense_weights(tmp_path):
    with Engine(write_checkpoint(tmp_path / "model", **SMALL), device="twin") as engine:
        assert engine._model.nbytes == card_dense_bytes(engine.store)


def test_matrices_lie_in_one_allocation_that_holds_them_exactly(tmp_path, monkeypatch):
    """As soon as they are not small; one more has no room, and no second one is made for it."""
    monkeypatch.setattr(weights, "SMALL_BYTES", 4096)
    with Engine(write_checkpoint(tmp_path / "model", **SMALL), device="twin") as engine:
        dense = engine.store.dense
        large = [nbytes for nbytes in weights.list_tensors(dense) if nbytes >= 4096]
        assert len(large) > 8 and weights.room_bytes(dense) == sum(whole(nbytes, 512) for nbytes in large)
    room = weights._Room(8192, torch.device("cpu"))
    held = room.put(torch.ones(8192, dtype=torch.uint8))
    with pytest.raises(
        EngineError, match="more of the card's memory than the 8,192 bytes .* 8,192 are used, and 4,096"
    ):
        room.put(torch.ones(4096, dtype=torch.uint8))
    assert room.put(torch.ones(4095, dtype=torch.uint8)).sum() == 4095 and held.sum() == 8192


WIDE = {
    "pattern": "ME*E-", "experts": 64, "inter": 512, "latent": 256, "hidden": 1024, "shared_inter": 1024, "top_k": 6,
    "mamba_heads": 32, "mamba_head_dim": 64, "state": 128, "heads": 16, "kv_heads": 2, "head_dim": 128,
    "config_extra": {"max_position_embeddings": 8192},
}  # fmt: skip


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("wide") / "model", **WIDE)


@pytest.mark.gpu
@pytest.mark.parametrize("transfer", ["pull", "whole"])
@one_thread
def test_a_prompt_takes_no_more_of_a_card_than_planned(wide_path, transfer):
    """torch's peak, of a prompt of 8,191 tokens and a token behind it, and no less than half of what was planned."""
    with Engine(wide_path, device="cuda", transfer=transfer) as engine:
        state, plan = engine.new_state(), engine._card.plan
        torch.cuda.reset_peak_memory_stats()
        engine.last_logits([1 + place % 250 for place in range(8191)], state)
        engine.step(1, state)
        peak = torch.cuda.max_memory_allocated()
    planned = plan.total_bytes - plan.context_bytes
    assert planned / 2 < peak <= planned
