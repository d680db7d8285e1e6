"""What the writer draws: the same bytes for the same seed, and everything it claims to plant."""

import numpy as np
import pytest
import torch
from synthetic import write_checkpoint
from transformers.models.nemotron_h import modeling_nemotron_h

from nemolab.checkpoint import Checkpoint
from nemolab.compare.reference import Reference
from nemolab.engine import Engine
from nemolab.errors import UsageError
from nemolab.store import repack
from nemolab.synthetic import list_tensors, make_form, write
from nemolab.synthetic.draws import popularity
from nemolab.synthetic.floats import BITS, to_bits, to_float
from nemolab.synthetic.writer import draw_tensor
from nemolab.trace import DECODE

SMALL = {
    "hidden_size": 128, "moe_latent_size": 64, "moe_intermediate_size": 160, "moe_shared_expert_intermediate_size": 96,
    "vocab_size": 512, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "num_attention_heads": 4,
    "head_dim": 16, "n_routed_experts": 32, "num_experts_per_tok": 4, "chunk_size": 16,
}  # fmt: skip


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def drawn(seed=0, settings=(), **arguments):
    form = make_form("super", settings=SMALL | dict(settings), **arguments)
    return {tensor.key: draw_tensor(tensor, seed).tobytes() for tensor in list_tensors(form)}


def test_the_same_seed_writes_the_same_bytes_and_another_does_not(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write(tmp_path / name, "super", moe_layers=1, settings=SMALL, seed=seed)
    first, again, other = (contents(tmp_path / name) for name in "abc")
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {n for n in first if n.endswith(".safetensors")}


def test_a_tensor_does_not_depend_on_the_layers_and_experts_around_it():
    few = drawn(moe_layers=1)
    for more in (drawn(moe_layers=3), drawn(moe_layers=1, settings={"n_routed_experts": 48})):
        same = [name for name in few if more.get(name) == few[name]]
        differ = {name for name in few if name in more and ".mixer.gate" not in name} - set(same)
        # Layer 2 is attention in the one and Mamba in the other: no tensor of one is named like one of the other.
        assert len(same) > 200 and not differ


def test_changing_the_format_of_one_part_leaves_the_others(tmp_path):
    one = Checkpoint.open(write_checkpoint(tmp_path / "a", shared="fp8", mamba="fp8"))
    two = Checkpoint.open(write_checkpoint(tmp_path / "b", shared="nvfp4", mamba="bf16"))
    changed = ("shared", "in_proj", "out_proj", ".norm.")  # norms of MoE layers balance what earlier layers write
    names = [name for name in one.tensors if not any(word in name for word in changed)]
    assert len(names) > 100
    assert all(np.array_equal(one.read_bytes(name), two.read_bytes(name)) for name in names)


@pytest.mark.parametrize("format", [*BITS])
def test_bits_and_floats_are_torch_s(format):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "fp8": torch.float8_e4m3fn}[format]
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 3
    stored = values.to(dtype)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[stored.element_size()]
    theirs = stored.view(whole).numpy().view(BITS[format].storage)
    assert np.array_equal(to_float(format, theirs), stored.double().numpy())
    ours = to_float(format, to_bits(format, values.numpy()))
    # E4M3 ties may go either way; everything else is rounded as torch rounds.
    assert (ours == stored.double().numpy()).mean() > 0.999
    assert np.abs(ours - values.numpy()).max() <= np.abs(stored.double().numpy() - values.numpy()).max() + 1e-9


def test_matrices_have_the_spread_of_their_fan_in(tmp_path):
    settings = {"moe_latent_size": 128, "hidden_size": 256, "moe_intermediate_size": 256}
    write(tmp_path / "m", "super", moe_layers=3, settings=SMALL | settings, sparsity=0.5)
    checkpoint = Checkpoint.open(tmp_path / "m")
    expert = "backbone.layers.1.mixer.experts.3"
    for name, columns in ((f"{expert}.up_proj", 128), ("backbone.layers.0.mixer.in_proj", 256),
                          ("backbone.layers.6.mixer.q_proj", 256), ("backbone.layers.1.mixer.gate", 256)):  # fmt: skip
        assert checkpoint.decode(name).std().item() == pytest.approx(columns**-0.5, rel=0.06), name
    assert checkpoint.decode("backbone.embeddings").std().item() == pytest.approx(1, rel=0.05)
    assert {checkpoint.modules[name].format for name in (f"{expert}.up_proj", "backbone.layers.0.mixer.in_proj")} == {
        "nvfp4", "fp8",
    }  # fmt: skip


def test_every_nvfp4_scale_is_one_an_exporter_writes():
    form = make_form("super", moe_layers=2, settings=SMALL)
    scales = [t for t in list_tensors(form) if t.key.endswith("weight_scale") and t.dtype == "F8_E4M3"]
    found = np.concatenate([draw_tensor(tensor, 0).ravel() for tensor in scales])
    assert found.min() == 0x01 and found.max() == 0x7E and len(np.unique(found)) > 40


@pytest.fixture
def watched(monkeypatch):
    """Share of zero neurons by MoE layer, and the experts each chose, while a reference runs."""
    zeros, chosen = [], []
    experts, router = modeling_nemotron_h.NemotronHExperts, modeling_nemotron_h.NemotronHTopkRouter
    run, route = experts.forward, router.forward

    def watch_route(self, hidden):
        result = route(self, hidden)
        chosen.append(result[2])
        zeros.append([])
        return result

    def watch_run(self, *arguments):
        self.act_fn.register_forward_hook(lambda act, inputs, output: zeros[-1].append((output == 0).float().mean()))
        return run(self, *arguments)

    monkeypatch.setattr(experts, "forward", watch_run)
    monkeypatch.setattr(router, "forward", watch_route)
    return zeros, chosen


def run_reference(folder, tokens=300):
    checkpoint = Checkpoint.open(folder)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, checkpoint.config.vocab_size, (tokens,), generator=generator)
    return Reference(checkpoint).logits(ids.tolist())


@pytest.mark.parametrize(("shape", "sparsity"), [("super", 0.9), ("nano", 0.9), ("super", 0.5), ("super", 0.7)])
def test_planted_zeros_are_found(tmp_path, watched, shape, sparsity):
    settings = {name: size for name, size in SMALL.items() if shape == "super" or name != "moe_latent_size"}
    done = write(tmp_path / "m", shape, moe_layers=4, mtp=False, settings=settings, sparsity=sparsity)
    assert done.planted["zero_neurons"] == sparsity
    run_reference(tmp_path / "m")
    shares = [float(torch.stack(layer).mean()) for layer in watched[0]]
    assert len(shares) == 4 and all(abs(share - sparsity) < 0.05 for share in shares), shares


def test_planted_zeros_are_found_at_full_width(tmp_path):
    """Hidden state, latent state and experts as wide as a Super's; the rest small, so that it is quick."""
    settings = {
        "pattern": "MEMEM*E", "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512, "mamba_num_heads": 8,
        "moe_shared_expert_intermediate_size": 256, "num_attention_heads": 2,
    }  # fmt: skip
    write(tmp_path / "m", "super", mtp=False, settings=settings, sparsity=0.925)
    repack(tmp_path / "m", tmp_path / "store", announce=lambda *words: None)
    with Engine(tmp_path / "store", ram_cache_slots=12) as engine, engine.record() as recorder:
        list(engine.generate([5, 77, 300], max_tokens=10, temperature=1.0, seed=1, stop_ids=[]))
    trace = recorder.trace()
    active = trace.active_neurons[trace.phase == DECODE] / 2688
    assert abs(active.mean() - 0.075) < 0.005, active.mean(axis=(0, 2))
    assert np.abs(active.mean(axis=(0, 2)) - 0.075).max() < 0.01, active.mean(axis=(0, 2))


def test_planted_popularity_is_found(tmp_path, watched):
    done = write(tmp_path / "m", "super", moe_layers=2, mtp=False, settings=SMALL, skew=1.0)
    run_reference(tmp_path / "m", 600)
    wanted = np.array(popularity(32, 4, 1.0))
    assert done.planted["most_popular_expert"] == wanted[0] and wanted.sum() == pytest.approx(4, rel=1e-3)
    orders = []
    for picks in watched[1]:
        counts = np.bincount(picks.flatten().numpy(), minlength=32) / 600
        orders.append(counts.argsort())
        shares = np.sort(counts)[::-1]
        assert abs(shares[0] - wanted[0]) < 0.15 and abs(shares[:8].sum() - wanted[:8].sum()) < 0.5
    assert (orders[0] != orders[1]).any(), "each layer has favourites of its own"


def test_without_skew_experts_are_alike(tmp_path, watched):
    write(tmp_path / "m", "super", moe_layers=1, mtp=False, settings=SMALL, skew=0.0, sparsity=0.5)
    run_reference(tmp_path / "m", 600)
    shares = np.bincount(watched[1][0].flatten().numpy(), minlength=32) / 600
    assert shares.max() < 0.4 and shares.min() > 0.01


def test_the_bias_decides_popularity_even_for_all_and_one():
    assert popularity(4, 4, 1.0) == [0.5] * 4
    assert sum(popularity(5, 1, 2.0)) == pytest.approx(1, rel=1e-3)
    assert max(popularity(6, 5, 3.0)) < 1


@pytest.mark.parametrize("seed", [-1, 2**63, True, "1"])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(UsageError, match="a whole number from 0 to"):
        make_form("tiny", seed=seed)
