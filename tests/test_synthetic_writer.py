"""Writing: streaming in bounded memory, several files, and nothing that looks like a checkpoint when it fails."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple

import pytest

from nemolab.checkpoint import Checkpoint
from nemolab.cli import main
from nemolab.commands import synth as verb
from nemolab.errors import NemolabError
from nemolab.synthetic import SHAPES, write, writer
from nemolab.synthetic.shapes import LAYERS_AS
from nemolab.synthetic.vision import LAYOUTS

SMALL = {
    "hidden_size": 64, "moe_latent_size": 32, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    "vocab_size": 300, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "num_attention_heads": 2,
    "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 7])
def test_files_are_as_many_as_asked_and_cut_experts(tmp_path, count):
    done = write(tmp_path / "m", "super", moe_layers=2, settings=SMALL, shards=count)
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    checkpoint = Checkpoint.open(tmp_path / "m")
    assert done.shards == len(files) == count and len(checkpoint.tensors) == done.tensors
    assert done.file_bytes == sum(path.stat().st_size for path in (tmp_path / "m").iterdir())
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() == (count > 1)
    homes = {}
    for tensor in checkpoint.tensors.values():
        homes.setdefault(tensor.name.rpartition("_proj.")[0].rpartition(".")[0], set()).add(tensor.shard)
    assert sum(len(shards) > 1 for name, shards in homes.items() if ".experts." in name) >= count - 1


def test_bytes_are_the_same_on_any_number_of_threads(tmp_path, monkeypatch):
    settings = SMALL | {"vocab_size": 100_000}  # several blocks and spans
    for threads in (1, 4):
        monkeypatch.setattr(writer, "MOST_THREADS", threads)
        monkeypatch.setattr(writer.os, "cpu_count", lambda: 8)
        write(tmp_path / str(threads), "super", moe_layers=1, settings=settings, seed=3)
    files = sorted((tmp_path / "1").iterdir())
    assert [path.name for path in files] == sorted(path.name for path in (tmp_path / "4").iterdir())
    assert all(path.read_bytes() == (tmp_path / "4" / path.name).read_bytes() for path in files)


def test_stop_ids_set_by_hand_are_said_everywhere(tmp_path):
    for name, ids, said in (("a", [2, 7], (2, 7)), ("b", 2, (2, 11))):
        write(tmp_path / name, "super", moe_layers=1, mtp=False, settings=SMALL | {"eos_token_id": ids})
        assert Checkpoint.open(tmp_path / name).config.eos_token_ids == said


def test_a_size_of_files_is_kept(tmp_path):
    done = write(tmp_path / "m", "super", moe_layers=2, settings=SMALL, shard_bytes=100_000)
    sizes = [path.stat().st_size for path in (tmp_path / "m").glob("*.safetensors")]
    assert len(sizes) == done.shards == -(-done.bytes // 100_000) and max(sizes) < 200_000


@pytest.mark.parametrize("inside", ["note.txt", "model-00001-of-00003.safetensors.partial"])
def test_a_folder_that_holds_something_is_left_alone(tmp_path, inside):
    (tmp_path / inside).write_text("mine")
    with pytest.raises(NemolabError, match="holds .*choose a new or empty folder"):
        write(tmp_path, "super", moe_layers=1, settings=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == [inside]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "m").write_text("")
    with pytest.raises(NemolabError, match="is a file"):
        write(tmp_path / "m", "super", moe_layers=1, settings=SMALL)


def test_too_little_space_is_said_before_anything_is_made(tmp_path, monkeypatch):
    status = namedtuple("status", "f_bavail f_frsize")(10, 4096)
    monkeypatch.setattr(writer.os, "statvfs", lambda path: status)
    with pytest.raises(NemolabError, match=r"needs [\d,]+ bytes \(.*\), 40,960 \(40.00 KiB\) are free"):
        write(tmp_path / "deep" / "m", "super", moe_layers=1, settings=SMALL)
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_fails_in_the_middle_leaves_nothing(tmp_path, monkeypatch, error):
    calls = []
    draw = writer._draw_block

    def fail_later(*arguments):
        calls.append(arguments)
        if len(calls) > 40:
            raise error
        return draw(*arguments)

    monkeypatch.setattr(writer, "_draw_block", fail_later)
    with pytest.raises((KeyboardInterrupt, NemolabError)):
        write(tmp_path / "deep" / "m", "super", moe_layers=2, settings=SMALL)
    assert not (tmp_path / "deep").exists()


def test_a_killed_writer_leaves_no_checkpoint(tmp_path):
    words = ["synth", "--shape", "super", "--moe-layers", "1", "--no-mtp", "--to", str(tmp_path / "m")]
    words += ["--set", "n_routed_experts=64"]
    process = subprocess.Popen([sys.executable, "-m", "nemolab", *words], stderr=subprocess.DEVNULL)
    while process.poll() is None and not any((tmp_path / "m").glob("*.partial")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = [path.name for path in (tmp_path / "m").iterdir()]
    assert "config.json.partial" in left and "config.json" not in left
    with pytest.raises(NemolabError, match="unfinished checkpoint.*run the same command again"):
        write(tmp_path / "m", "super", moe_layers=1, settings=SMALL)


def test_memory_stays_small_whatever_the_size(tmp_path):
    """A quarter of a GiB through a process that may hold less than that: numpy and spans of 8 MiB."""
    settings = {"vocab_size": 8192, "n_routed_experts": 32}
    code = (
        "from pathlib import Path\nfrom nemolab.synthetic import write\n"
        f"done = write({str(tmp_path / 'm')!r}, 'super', moe_layers=1, mtp=False, settings={settings!r})\n"
        # Not getrusage: its peak is inherited from the process that started this one.
        "peak = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"
        "print(done.bytes, int(peak) * 1024)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    written_bytes, peak_bytes = map(int, output.split())
    spans = (min(writer.MOST_THREADS, os.cpu_count()) + 1) * 2 * (writer.SPAN_BYTES + writer.BLOCK_BYTES)
    assert written_bytes > 2**28 and peak_bytes < 100 * 2**20 + spans


def test_the_verb_answers_with_what_it_wrote(tmp_path, capsys):
    words = ["synth", "--shape", "tiny", "--to", str(tmp_path / "m"), "--set", "pattern=ME*E", "--seed", "5", "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["facts"]["pattern"], answer["seed"], answer["shards"]) == ("ME*E", 5, 3)
    assert answer["facts"]["expert_bytes"] == 36_864 and answer["facts"]["pages"] == 9
    assert answer["planted"]["zero_neurons"] == 0.9 and answer["bytes"] < answer["file_bytes"]
    assert Checkpoint.open(tmp_path / "m").config.n_experts == answer["facts"]["experts"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "huge"], "known are super"),
        (["--set", "n_routed_experts"], "field=value"),
        (["--shard-size", "5"], "unit"),
        (["--shard-size", "48slots"], "bytes were expected"),
        (["--moe-layers", "0"], "moe-layers"),
        (["--sparsity", "nan"], "sparsity"),
    ],
)
def test_bad_words_are_code_2_and_make_nothing(tmp_path, capsys, words, said):
    assert main(["synth", "--to", str(tmp_path / "m"), *words]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "m").exists()


def test_the_verb_offers_what_the_package_knows():
    assert verb.SHAPES == tuple(SHAPES) and verb.LAYERS_AS == tuple(LAYERS_AS)
    vision = next(option for option in verb.synth.params if option.name == "vision")
    assert tuple(vision.type.choices) == LAYOUTS
