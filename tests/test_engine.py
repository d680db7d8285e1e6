"""The engine against transformers' own NemotronH in float32, and against itself."""

import subprocess
import sys

import pytest
import torch
from patching import edit_tensors
from synthetic import one_thread, write_checkpoint

from nemolab.checkpoint import Checkpoint
from nemolab.compare.reference import Reference
from nemolab.engine import Engine
from nemolab.errors import StoreError
from nemolab.store import Store, ensure_store

IDS = [int(i) for i in torch.randint(32, 280, (70,), generator=torch.Generator().manual_seed(0))]
SMALL = {"pattern": "M*E", "experts": 6, "inter": 48, "latent": 48, "hidden": 48, "shared_inter": 32}

VARIANTS = {
    "as the vendor's large model": {},
    "no latent, experts of odd size": {"latent": None, "hidden": 80, "inter": 48},
    "plain MLP layers": {"pattern": "M-*E-"},
    "several routing groups": {"config_extra": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}, "top_k": 3},
    "everything NVFP4": dict.fromkeys(["mamba", "attention", "shared", "head", "latent_format"], "nvfp4"),
    "everything FP8": {"attention": "fp8", "head": "fp8", "latent_format": "fp8", "gate": "bf16"},
    "everything F32": {"mamba": "f32", "attention": "f32", "shared": "f32", "head": "f32", "embeddings": "f32"},
    "tied head": {"tie": True},
    "one group, many heads": {"n_groups": 1, "mamba_heads": 6, "mamba_head_dim": 8, "state": 24, "kv_heads": 1},
    "time step limited": {"config_extra": {"time_step_limit": [0.01, 0.05]}},
    "short convolution": {"conv_kernel": 2},
    "another prefix": {"prefix": "language_model.backbone.", "layer_spelling": "layers_block_type"},
}  # fmt: skip


@pytest.fixture(scope="module")
def small_path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("small"), **SMALL)


def kl(reference, engine):
    """KL(reference || engine) at each position, in nats."""
    p, q = reference.double().log_softmax(-1), engine.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def step_through(engine, ids, state=None):
    state = state or engine.new_state()
    return torch.stack([engine.step(token, state) for token in ids])


@pytest.mark.parametrize("name", VARIANTS)
@one_thread
def test_engine_equals_transformers(tmp_path, name):
    path = write_checkpoint(tmp_path / "model", **VARIANTS[name])
    wanted = Reference(Checkpoint.open(path)).logits(IDS)
    with Engine(path) as engine:
        one_pass, stepped = engine.prefill(IDS, engine.new_state()), step_through(engine, IDS)
    assert kl(wanted, one_pass).mean() <= 1e-9 and kl(wanted, stepped).mean() <= 1e-9
    assert kl(one_pass, stepped).mean() <= 1e-9
    assert torch.allclose(one_pass, wanted, atol=1e-3) and torch.allclose(stepped, wanted, atol=1e-3)


def test_comparison_with_transformers_can_fail(tmp_path):
    """One expert's global scale off by a half: the small model's logits must tell."""
    path = write_checkpoint(tmp_path / "model", **SMALL)
    wanted = Reference(Checkpoint.open(path)).logits(IDS)
    store = Store.open(ensure_store(path))
    store.globals[:, 2] *= 1.5
    with Engine(path, store=store) as engine:
        assert kl(wanted, engine.prefill(IDS, engine.new_state())).mean() > 1e-6
        assert kl(wanted, step_through(engine, IDS)).mean() > 1e-6


def test_engine_equals_transformers_on_the_shipped_model(tiny_path):
    with Engine(tiny_path) as engine:
        ids = engine.tokenizer.encode("TCP keeps a connection and delivers every byte in order; UDP does not. " * 2)
        wanted = Reference(Checkpoint.open(tiny_path)).logits(ids)
        one_pass, stepped = engine.prefill(ids, engine.new_state()), step_through(engine, ids)
    assert kl(wanted, one_pass).mean() <= 1e-9 and kl(wanted, stepped).mean() <= 1e-9


@one_thread
def test_a_prompt_split_anywhere_gives_the_same_logits(small_path):
    with Engine(small_path) as engine:
        whole = engine.prefill(IDS, engine.new_state())
        for cut in range(1, len(IDS)):
            state = engine.new_state()
            parts = torch.cat([engine.prefill(IDS[:cut], state), engine.prefill(IDS[cut:], state)])
            assert state.tokens == len(IDS)
            torch.testing.assert_close(parts, whole, rtol=0, atol=1e-3)
            assert kl(whole, parts).mean() <= 1e-9


@one_thread
def test_steps_and_prompts_mix_in_any_order(small_path):
    with Engine(small_path) as engine:
        whole = engine.prefill(IDS, engine.new_state())
        state = engine.new_state()
        mixed = [step_through(engine, IDS[:3], state), engine.prefill(IDS[3:9], state)]
        mixed += [step_through(engine, IDS[9:10], state), engine.prefill(IDS[10:], state)]
    assert kl(whole, torch.cat(mixed)).mean() <= 1e-9


@one_thread
def test_later_tokens_change_nothing_before_them(small_path):
    """Longer than one chunk of the scan (64 tokens), so causality is tested across its border too."""
    ids = (IDS * 3)[:150]
    with Engine(small_path) as engine:
        first = engine.prefill(ids, engine.new_state())
        for place in (40, 64, 130):
            changed = [*ids[:place], ids[place] - 1, *ids[place + 1 :]]
            second = engine.prefill(changed, engine.new_state())
            assert torch.allclose(first[:place], second[:place], atol=1e-4)
            assert not torch.allclose(first[place:], second[place:], atol=1e-1)


@one_thread
def test_small_time_steps_are_not_floored(tmp_path):
    """softplus(-9) = 1.2e-4: a floor at time_step_min = 1e-3 would make one pass and single steps drift apart."""
    from safetensors.torch import load_file, save_file

    path = write_checkpoint(tmp_path / "model", single_file=True, **SMALL)
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("dt_bias"):
            tensor.fill_(-9.0)
        elif name.endswith("mixer.D"):
            tensor.zero_()
    save_file(tensors, file, metadata={"format": "pt"})
    with Engine(path) as engine:
        one_pass, stepped = engine.prefill(IDS, engine.new_state()), step_through(engine, IDS)
    wanted = Reference(Checkpoint.open(path)).logits(IDS)
    assert kl(one_pass, stepped).mean() <= 1e-9 and kl(wanted, one_pass).mean() <= 1e-9
    floored = Reference(Checkpoint.open(path), stock=True).logits(IDS)
    assert kl(floored, one_pass).mean() > 1e-9


def bits(engine):
    state = engine.new_state()
    return torch.cat([engine.prefill(IDS, state), step_through(engine, IDS[:20], state)])


@one_thread
def test_bits_depend_neither_on_the_run_nor_on_cache_layout_or_threads(tmp_path):
    path = write_checkpoint(tmp_path / "model")
    with Engine(path) as engine:
        first = bits(engine)
        assert torch.equal(bits(engine), first), "again, everything cached"
    for choice in ({"ram_cache_slots": 2}, {"layout": "source"}, {"reader_threads": 1}):
        with Engine(path, **choice) as engine:
            assert torch.equal(bits(engine), first), choice
    with Engine(path, threads=3) as engine:  # the prompt's products are torch's, whose order may follow the threads
        state = engine.new_state()
        stepped = step_through(engine, IDS[:20], state)
    with Engine(path, threads=1) as engine:
        assert torch.equal(step_through(engine, IDS[:20]), stepped)


def test_bits_are_the_same_in_another_process(small_path):
    program = (
        "import sys, hashlib, torch; torch.set_num_threads(1)\n"
        "from nemolab.engine import Engine\n"
        "with Engine(sys.argv[1]) as engine:\n"
        "    state = engine.new_state()\n"
        "    ids = [int(i) for i in sys.argv[2].split(',')]\n"
        "    rows = [engine.prefill(ids, state), engine.step(40, state)[None], engine.step(41, state)[None]]\n"
        "    print(hashlib.sha256(torch.cat(rows).numpy().tobytes()).hexdigest())\n"
    )
    command = [sys.executable, "-c", program, str(small_path), ",".join(map(str, IDS))]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1] and len(runs[0]) == 65


@one_thread
def test_a_prompt_reads_each_needed_expert_once_and_caches_none(small_path):
    with Engine(small_path, ram_cache_slots=2) as engine:
        engine.prefill(IDS, engine.new_state())
        first = engine.stats()["prefill"]
        assert first["lookups"] == first["misses"] <= engine.store.n_layers * engine.store.n_experts
        assert first["bytes_read"] == first["misses"] * engine.store.block_bytes
        engine.prefill(IDS, engine.new_state())
        assert engine.stats()["prefill"]["misses"] == 2 * first["misses"], "nothing of a prompt enters the cache"


@one_thread
def test_decode_counts_every_lookup(small_path):
    with Engine(small_path) as engine:
        step_through(engine, IDS[:11])
        counts = engine.stats()["decode"]
    assert counts["lookups"] == counts["hits"] + counts["misses"] == 11 * len(engine.config.moe_layers) * 2
    assert counts["tokens"] == 11 and counts["seconds"] > 0 and counts["tok_s"] > 0


@one_thread
def test_logits_in_pieces_are_those_of_a_whole_prompt(small_path, monkeypatch):
    import nemolab.engine.engine as module

    with Engine(small_path) as engine:
        whole = engine.prefill(IDS, engine.new_state())
        pieces = list(engine.logits_in_pieces(IDS, engine.new_state(), piece_tokens=16))
        assert [first for first, _ in pieces] == [0, 16, 32, 48, 64]
        assert kl(whole, torch.cat([logits for _, logits in pieces])).max() <= 1e-9
        assert kl(whole[-1:], engine.last_logits(IDS, engine.new_state())[None]).max() <= 1e-9
        monkeypatch.setattr(module, "PASS_TOKENS", 33)  # a prompt too long for one pass goes in several
        state = engine.new_state()
        assert kl(whole, engine.prefill(IDS, state)).max() <= 1e-9 and state.tokens == len(IDS)
        assert kl(whole[-1:], engine.last_logits(IDS, engine.new_state())[None]).max() <= 1e-9


@one_thread
def test_long_prompts_go_through_layers_in_pieces_with_the_same_result(small_path, monkeypatch):
    from nemolab.engine import attention, mamba, mlp, moe, weights

    with Engine(small_path) as engine:
        whole = engine.prefill(IDS, engine.new_state())
        for module in (mamba, mlp, moe):
            monkeypatch.setattr(module, "PIECE_TOKENS", 19)
        monkeypatch.setattr(attention, "SCORES_BYTES", 4000)
        monkeypatch.setattr(weights, "PIECE_BYTES", 4000)
        assert kl(whole, engine.prefill(IDS, engine.new_state())).max() <= 1e-9


@one_thread
def test_a_copied_state_goes_its_own_way(small_path):
    with Engine(small_path) as engine:
        state = engine.new_state()
        engine.prefill(IDS[:10], state)
        branch = state.copy()
        engine.step(IDS[10], state)
        after = engine.step(IDS[11], branch)
        assert (state.tokens, branch.tokens) == (11, 11)
        wanted = engine.prefill([*IDS[:10], IDS[11]], engine.new_state())[-1]
        assert kl(wanted[None], after[None]).max() <= 1e-9
        assert branch.nbytes == state.nbytes > 0


def test_a_store_of_another_checkpoint_than_the_one_named_is_refused(small_path, tmp_path):
    other = write_checkpoint(tmp_path / "other", **{**SMALL, "experts": 4})
    store = ensure_store(small_path)
    with pytest.raises(StoreError, match="made from another checkpoint"):
        Engine(other, store=store)
    with Engine(None, store=store) as alone, Engine(small_path, store=store) as both:
        assert alone.config == both.config


@one_thread
def test_a_model_without_shared_experts_equals_transformers(tmp_path):
    path = write_checkpoint(tmp_path / "model", config_extra={"n_shared_experts": 0}, **SMALL)
    edit_tensors(path, lambda name, tensor: {} if "shared_experts" in name else {name: tensor})
    wanted = Reference(Checkpoint.open(path)).logits(IDS)
    with Engine(path) as engine:
        assert kl(wanted, engine.prefill(IDS, engine.new_state())).mean() <= 1e-9
