"""The benchmark of repack measures equal work, verifies what was made, and leaves nothing; no timing is judged here."""

import os

import pytest

from nemolab.checkpoint import Checkpoint
from nemolab.errors import NemolabError, UsageError
from nemolab.measure import bench_repack, record
from nemolab.store import expert_file


@pytest.fixture
def small(monkeypatch):
    """A checkpoint of 30 MB in the place of one of 250."""
    import nemolab.synthetic

    real = nemolab.synthetic.write

    def write(folder, shape, **options):
        options["settings"] |= {"n_routed_experts": 22, "hidden_size": 256, "moe_latent_size": 128}
        options["settings"] |= {"moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256}
        return real(folder, shape, **options)

    monkeypatch.setattr(nemolab.synthetic, "write", write)
    monkeypatch.setattr(bench_repack, "RIVALS", ((4, 1 << 20), (2, 4 << 20)))


def test_both_sides_move_the_same_bytes(small, tmp_path):
    found = bench_repack.bench_repack("source", 0.25, tmp_path / "disk", repeats=3)
    settings = found["rows"][0]["settings"]
    assert 0.95 < settings["store_bytes"] / settings["source_bytes"] < 1.05
    assert settings["verified_blocks"] == 22 and found["verdict"]
    for row in found["rows"]:
        assert len(record(**row, folder=tmp_path / "rows")["values"]) == 3
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_wrong_store_gives_no_figure(small, tmp_path, monkeypatch):
    monkeypatch.setattr(expert_file, "check_expert_scales", lambda planes, *_: planes.up_values.__setitem__(0, 7))
    monkeypatch.setattr(expert_file.ExpertFile, "check_sample", lambda *_: None)
    with pytest.raises(NemolabError, match="not what it should be: layer"):
        bench_repack.bench_repack("neuron", 0.25, tmp_path, repeats=3)
    assert list(tmp_path.iterdir()) == []


def test_the_rival_copies_every_byte(tmp_path):
    (tmp_path / "source").mkdir()
    sizes = {"a": 1, "b": 4096, "c": (1 << 20) + 5, "d": 3 << 20}
    for name, size in sizes.items():
        (tmp_path / "source" / name).write_bytes(os.urandom(size))
    sources = sorted((tmp_path / "source").iterdir())
    bench_repack.copy_files(sources, tmp_path / "copy", threads=3, chunk_bytes=1 << 20)
    for path in sources:
        assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes()


def test_odd_sizes_and_too_little_room_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="0.25 to 64"):
        bench_repack.bench_repack(gib=1000)
    with pytest.raises(UsageError, match="at least 3"):
        bench_repack.bench_repack(repeats=1)
    monkeypatch.setattr(bench_repack.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 5}))
    with pytest.raises(NemolabError, match="are needed, 5 are free"):
        bench_repack.bench_repack(folder=tmp_path)


def test_a_sparse_checkpoint_is_a_checkpoint_and_takes_no_disk(tmp_path):
    tensors = bench_repack.write_sparse(tmp_path / "sparse", "nano", n_routed_experts=8)
    checkpoint = Checkpoint.open(tmp_path / "sparse")
    shards = [tmp_path / "sparse" / name for name in checkpoint.headers]
    assert len(checkpoint.tensors) == tensors
    assert sum(path.stat().st_size for path in shards) > 1 << 30
    assert sum(path.stat().st_blocks * 512 for path in shards) < 8 << 20


def test_peak_memory_stays_small_while_large_tensors_pass(tmp_path, monkeypatch):
    """Embeddings and head of 704 MB each, 32 experts of 5.6 MB: nothing near a tensor's size is ever held."""
    real = bench_repack.write_sparse
    monkeypatch.setattr(
        bench_repack,
        "write_sparse",
        lambda folder, shape: real(
            folder, shape, n_routed_experts=16, hybrid_override_pattern="ME*E", num_hidden_layers=4
        ),
    )
    found = bench_repack.bench_repack_memory("nano", folder=tmp_path)
    assert found["blocks"] == 32 and found["store_bytes"] > 1.4e9
    assert found["peak_mib"] < 600
