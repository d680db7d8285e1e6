"""What an engine takes of a card's memory: by arithmetic, and as found on a card."""

from types import SimpleNamespace

import pytest
import torch
from synthetic import one_thread, write_checkpoint

from nemolab.checkpoint.formats import matrix_bytes
from nemolab.engine import Engine
from nemolab.engine.gpu.plan import card_dense_bytes, plan_card
from nemolab.engine.transfers import TRANSFERS
from nemolab.store.layout import BlockLayout
from nemolab.synthetic.shapes import make_form
from nemolab.synthetic.tensors import list_linears

GIB = 2**30
SMALL = {"pattern": "ME*E-", "experts": 12, "inter": 80, "latent": 48, "hidden": 64, "shared_inter": 32, "top_k": 3}


def published(shape):
    """What a plan asks of a store, from a shape's config and list of tensors: nothing is written."""
    form = make_form(shape)
    dense = {
        name: SimpleNamespace(nbytes=matrix_bytes(*sizes, format), shape=sizes, format=format)
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


@pytest.mark.parametrize(("transfer", "pass_tokens"), [("pull", 8192), ("rows", 4096), ("grouped", 4096)])
def test_slots_of_a_token_shorten_the_passes_of_a_full_card(transfer, pass_tokens):
    plan = plan_card(published("super35"), 32, 8 * GIB, transfer=transfer)
    assert plan.pass_tokens == pass_tokens and plan.total_bytes <= 8 * GIB


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
    for _ in range(3):
        plans.append(plan_card(store, 32, plans[-1].total_bytes - 1))
    lengths = [(plan.pass_tokens, plan.piece_tokens) for plan in plans]
    assert lengths == [(8192, 1024), (8192, 512), (4096, 1024), (4096, 512)]
    assert all(plan.state_bytes >= plans[0].state_bytes for plan in plans)


def test_the_plan_knows_the_dense_weights(tmp_path):
    with Engine(write_checkpoint(tmp_path / "model", **SMALL), device="twin") as engine:
        assert engine._model.nbytes == pytest.approx(card_dense_bytes(engine.store), rel=0.05)


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
