"""The engine of a card against the CPU's: by its operators' twins, in Triton's interpreter, on a card where one is."""

import re

import numpy as np
import pytest
import torch
from synthetic import one_thread, write_checkpoint
from triton_interpreter import INTERPRETED, on_both

from nemolab.engine import Engine
from nemolab.engine.transfers import TRANSFERS
from nemolab.errors import EngineError
from nemolab.simulate import check_live

IDS = [int(i) for i in torch.randint(32, 280, (40,), generator=torch.Generator().manual_seed(0))]
SMALL = {"pattern": "ME*E-", "experts": 12, "inter": 80, "latent": 48, "hidden": 64, "shared_inter": 32, "top_k": 3}
# A prompt's inputs of matrices are rounded to BF16; a token's are not.
STEP_NATS, PROMPT_NATS = 1e-9, 1e-3


@pytest.fixture(scope="module")
def small_path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("small") / "model", **SMALL)


def open_engine(path, device="twin", **settings):
    return Engine(path, device=device, **settings)


def kl(reference, engine):
    p, q = reference.double().log_softmax(-1), engine.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def step_through(engine, ids, state=None):
    state = state or engine.new_state()
    return torch.stack([engine.step(token, state) for token in ids])


def both_paths(engine, ids):
    """Logits of a prompt pass, of steps from nothing, and of steps behind a prompt."""
    state = engine.new_state()
    prompt = engine.prefill(ids[:-8], state)
    return prompt, step_through(engine, ids[:12]), step_through(engine, ids[-8:], state)


@one_thread
def check_against_the_cpu(path, device, ids, **settings):
    with Engine(path) as engine:
        wanted = both_paths(engine, ids)
    with open_engine(path, device, **settings) as engine:
        found = both_paths(engine, ids)
    prompt, steps, behind = (kl(w, f) for w, f in zip(wanted, found, strict=True))
    assert steps <= STEP_NATS and prompt <= PROMPT_NATS and behind <= PROMPT_NATS


def test_twins_equal_the_cpu_engine(small_path):
    check_against_the_cpu(small_path, "twin", IDS)


def test_every_operator_of_a_card_has_a_twin():
    from nemolab.engine.gpu import kernels, operators, twins

    assert {name: callable(getattr(twins, name, None)) for name in kernels.__all__} == dict.fromkeys(
        kernels.__all__, True
    )
    assert set(kernels.__all__) <= set(re.findall(r"\w+", operators.find_operators.__doc__))


def test_comparison_with_the_cpu_can_fail(small_path, monkeypatch):
    from nemolab.engine.gpu import twins

    monkeypatch.setattr(twins.Combine, "bind", lambda _, partial, weights, ids, scales_2, out: out.zero_)
    with pytest.raises(AssertionError):
        check_against_the_cpu(small_path, "twin", IDS)


VARIANTS = {
    "no latent": {"latent": None},
    "several routing groups": {"config_extra": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}},
    "everything NVFP4": dict.fromkeys(["mamba", "attention", "shared", "head", "latent_format", "mlp"], "nvfp4"),
    "tied head": {"tie": True},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_twins_equal_the_cpu_engine_on_other_forms(tmp_path, name):
    path = write_checkpoint(tmp_path / "model", **SMALL | VARIANTS[name])
    check_against_the_cpu(path, "twin", IDS)


@on_both
def test_kernels_in_their_places_equal_the_cpu_engine(device, tmp_path):
    """A token, then a prompt: the smallest sizes, since the interpreter takes its time."""
    from nemolab.engine.gpu import twins

    sizes = {"pattern": "M*E", "experts": 2, "inter": 16, "latent": 16, "hidden": 16, "shared_inter": 16, "top_k": 1}
    sizes |= {"mamba_heads": 2, "mamba_head_dim": 8, "state": 8, "heads": 2, "kv_heads": 1, "head_dim": 8}
    sizes |= {"mamba": "bf16", "shared": "bf16"}
    path = write_checkpoint(tmp_path / "model", **sizes)
    logits = []
    for where in ("cpu", "twin" if INTERPRETED else device):
        with Engine(path, device=where) as engine:
            if where == "twin":  # the head has the most rows, and its kernel is at work in all other matrices
                engine._model.head._operators = twins
            state = engine.new_state()
            logits.append((engine.step(IDS[0], state), engine.prefill(IDS[1:3], state)))
    (step, prompt), (found_step, found_prompt) = logits
    assert kl(step, found_step) <= STEP_NATS and kl(prompt, found_prompt) <= PROMPT_NATS


@pytest.mark.gpu
def test_the_shipped_model_on_a_card_equals_the_cpu_engine(tiny_path):
    with Engine(tiny_path) as engine:
        ids = engine.tokenizer.encode("TCP keeps a connection and delivers every byte in order; UDP does not. " * 2)
    check_against_the_cpu(tiny_path, "cuda", ids)


on_twins_and_cards = pytest.mark.parametrize("device", ["twin", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.mark.parametrize("transfer", TRANSFERS)
@one_thread
def test_what_a_card_reads_or_copies_is_page_locked(small_path, transfer):
    with open_engine(small_path, transfer=transfer) as engine:
        engine.step(IDS[0], engine.new_state())
        assert engine.memory()["card"]["page_locked_bytes"] > 0


@on_twins_and_cards
@one_thread
def test_no_bit_depends_on_transfer_budget_or_prefetch(device, small_path):
    settings = [{"transfer": way} for way in TRANSFERS]
    settings += [{"ram_cache_slots": 3}, {"ram_cache_slots": 9, "prefetch": 4}, {"transfer": "rows", "prefetch": 2}]
    found = []
    for asked in settings:
        with open_engine(small_path, device, **asked) as engine:
            found.append(torch.cat(both_paths(engine, IDS)))
    for asked, logits in zip(settings, found, strict=True):
        assert torch.equal(logits, found[0]), asked


@one_thread
def test_a_copied_state_goes_its_own_way(small_path):
    with open_engine(small_path) as engine:
        state = engine.new_state()
        engine.prefill(IDS[:20], state)
        copy = state.copy()
        first = step_through(engine, IDS[20:30], state)
        step_through(engine, IDS[30:40], copy.copy())
        assert torch.equal(step_through(engine, IDS[20:30], copy), first)
        assert copy.tokens == 30 and copy.nbytes == state.nbytes


@one_thread
def test_a_prompt_in_parts_gives_the_same_logits(small_path):
    with open_engine(small_path) as engine:
        whole, state = engine.prefill(IDS, engine.new_state()), engine.new_state()
        parts = torch.cat([engine.prefill(IDS[:13], state), engine.prefill(IDS[13:], state)])
        last = engine.last_logits(IDS, engine.new_state())
    assert kl(whole, parts) <= PROMPT_NATS and kl(whole[-1], last) <= PROMPT_NATS


@pytest.mark.parametrize("prefetch", [0, 2])
@one_thread
def test_a_recording_replays_to_the_last_miss(small_path, prefetch):
    with open_engine(small_path, ram_cache_slots=8, prefetch=prefetch) as engine:
        with engine.record() as recorder:
            both_paths(engine, IDS)
        trace, stats = recorder.trace(), engine.stats()
    live = check_live(trace)
    assert live.equal, live
    assert 0 < stats["decode"]["misses"] < stats["decode"]["lookups"]
    assert (trace.active_neurons[trace.experts >= 0] > 0).any()


@one_thread
def test_a_recording_tells_what_the_cpu_engine_would(small_path):
    traces = []
    for device in ("cpu", "twin"):
        with Engine(small_path, device=device, ram_cache_slots=8) as engine:
            with engine.record() as recorder:
                step_through(engine, IDS)
            traces.append(recorder.trace())
    assert np.array_equal(traces[0].experts, traces[1].experts)
    assert np.array_equal(traces[0].live_misses, traces[1].live_misses)
    assert np.array_equal(traces[0].guesses, traces[1].guesses)
    assert np.abs(traces[0].active_neurons - traces[1].active_neurons).max() <= 1
    np.testing.assert_allclose(traces[0].weights, traces[1].weights, rtol=1e-4)


@one_thread
def test_chat_runs_and_reports(small_path):
    with open_engine(small_path, vram_gib=8) as engine:
        answer = engine.chat([{"role": "user", "content": "hello"}], max_tokens=3)
        card = engine.memory()["card"]
    assert answer.stats["decode"]["tokens"] == answer.completion_tokens - 1
    assert card["budget_bytes"] == 8 * 2**30 >= card["planned"]["total_bytes"] > card["planned"]["dense_bytes"] > 0
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.memory()


def test_a_budget_too_small_is_refused_with_numbers(small_path):
    with pytest.raises(EngineError, match=r"vram_gib allows 512\.00 MiB, .* takes .*dense .* context 768\.00 MiB"):
        open_engine(small_path, vram_gib=0.5)


def test_a_limit_is_lifted_also_where_opening_fails(small_path, monkeypatch):
    from nemolab.engine.gpu.device import StandIn

    limits = []
    monkeypatch.setattr(StandIn, "set_limit", lambda _, nbytes: limits.append(nbytes))
    with pytest.raises(EngineError, match="layout"):
        open_engine(small_path, vram_gib=2, layout="source")
    assert len(limits) == 2 and limits[0] < 2 * 2**30 and limits[1] is None


@pytest.mark.gpu
def test_a_budget_holds_on_a_card(small_path):
    with open_engine(small_path, "cuda", vram_gib=2):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**31, dtype=torch.uint8, device="cuda")
    torch.empty(2**31, dtype=torch.uint8, device="cuda")  # it is lifted with the engine


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "'cpu', 'cuda'"),
        pytest.param({"device": "cuda:" + "9" * 5000}, "device 'cuda:9.*'cpu', 'cuda'", id="long"),
        ({"device": "cuda:"}, "device 'cuda:'"),
        ({"device": torch.device("meta")}, "device 'meta'"),
        ({"device": None}, "device is None; a word such as 'cpu', 'cuda' or 'cuda:1'"),
        ({"device": 0}, "device is 0; a word"),
        ({"device": True}, "device is True; a word"),
        ({"device": ["cuda"]}, r"device is \['cuda'\]; a word"),
        ({"device": "twin", "transfer": ["rows"]}, r"transfer is \['rows'\]; a word such as 'pull'"),
        ({"device": "cpu", "transfer": 5}, "transfer is 5; a word"),
        ({"device": "twin", "transfer": "push"}, "known are whole, grouped, rows, pull"),
        ({"device": "twin", "vram_gib": 0}, "vram_gib is 0"),
        ({"device": "cpu", "transfer": "pull"}, "it is for device='cuda'"),
        ({"device": "cpu", "vram_gib": 8}, "it is for device='cuda'"),
    ],
)
def test_settings_that_cannot_be_are_refused(small_path, settings, message):
    with pytest.raises(EngineError, match=message):
        Engine(small_path, **settings)


def test_a_device_of_torch_is_one_by_its_name(small_path):
    with Engine(small_path, device=torch.device("cpu")) as engine:
        assert "card" not in engine.memory()
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match="device 'cuda:1': torch"):
            Engine(small_path, device=torch.device("cuda", 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_missing_card_is_said(small_path):
    with pytest.raises(EngineError, match="device 'cuda:0': torch .*device='cpu' needs none"):
        open_engine(small_path, "cuda")


def test_a_store_in_published_order_is_refused(small_path):
    with pytest.raises(EngineError, match="needs 'neuron'"):
        open_engine(small_path, layout="source")
