"""Files of no known form, and what no form may do: refused by name, never "0 misses". By form: the files beside."""

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from functools import partial

import numpy as np
import pytest
from foreign_traces import npy, routed_npz, zip_of
from spoiled_traces import (
    CSV,
    EXPERTS,
    HONEST,
    LAST,
    LAYERS,
    ROWS,
    TOKENS,
    change_row,
    line_of,
    packed,
    refuse_at,
    set_id,
    set_record,
)

from nemolab.errors import TraceError
from nemolab.trace import open_trace


@pytest.fixture
def refuse(tmp_path):
    return partial(refuse_at, tmp_path / "trace.dat")


def test_the_refusals_can_fail(tmp_path):
    """Nothing below is refused for another reason: unspoiled, each is read."""
    for content in (CSV, TOKENS, LAYERS, routed_npz(EXPERTS)):
        (tmp_path / "trace").write_bytes(content.encode() if isinstance(content, str) else content)
        assert open_trace(tmp_path / "trace").n_tokens == 7


UNKNOWN = {
    "nothing": (b"", "is empty"),
    "blanks": (b"  \n\n ", "no form that is known here"),
    "prose": (
        b"Once upon a time",
        r"no form that is known here; it begins b'Once upon a time'. Known: a trace of nemolab",
    ),
    "html": (b"<!doctype html><html>", "begins b'<!doctype"),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(40), "gzip archive: unpack it first"),
    "a bare array": (
        npy({"descr": "<i2", "fortran_order": False, "shape": (1, 1, 1)}, b"00"),
        r"np.savez\(path, routed",
    ),
    "utf-16": ("{}".encode("utf-16"), "UTF-16"),
    "pickle": (b"\x80\x04\x95", "pickle: it can run code"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    "rows alone": ("\n".join(ROWS[5:]).encode(), "without the comments above them"),
    "random": (bytes(range(130, 200)), "no form that is known"),
    "json of another form": (b'{"a": 1}\n', r"holds JSON with \['a'\], no known form"),
    "a json list": (b"[1, 2]\n", "no form that is known"),
    "half a record": (b'{"tok": 0, "layers": [[1, 2]', "line 1 is not valid JSON: the file is cut off"),
    "a pretty-printed object": (b'{\n  "tok": 0\n}\n', "line 1 is not valid JSON"),
    "no layers": (b'{"tok": 0}\n', r"line 1 has \['tok'\] but no layers"),
    "no selected_ids": (b'{"layer_idx": 0, "token_idx": 0}\n', "but no selected_ids"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_file_of_no_known_form_is_named_with_the_known_ones(refuse, name):
    message = refuse(*UNKNOWN[name])
    if name != "nothing":
        for known in ("safetensors", "route_trace v1", '"tok"', '"layer_idx"', "routed_experts[sequence, layer, k]"):
            assert known in message


def test_a_shard_of_a_checkpoint_gets_a_hint(refuse, tiny_path):
    shard = next(tiny_path.glob("*.safetensors"))
    with pytest.raises(TraceError, match="perhaps a shard of a checkpoint: `nemolab trace` makes a trace"):
        open_trace(shard)
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode()
    refuse(struct.pack("<Q", len(header)) + header, "perhaps a shard of a checkpoint")


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        open_trace(tmp_path / "missing")
    with pytest.raises(TraceError, match="is not a file"):
        open_trace(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="is not a file"):
        open_trace(tmp_path / "pipe")


def test_experts_beyond_what_is_told_are_refused(refuse):
    for content in (TOKENS, LAYERS, routed_npz(EXPERTS)):
        refuse(content, "holds expert 7; a layer is said to have 7, from 0 up", n_experts=7)
        refuse(content, "chooses 2 of 1 experts|holds expert 7", n_experts=1)


def test_more_ranks_than_experts_are_refused(refuse):
    refuse(routed_npz(np.zeros((3, 1, 2), int)), "chooses 2 of 1 experts; no more than there are")


def test_numbers_that_would_make_a_replay_count_without_end_are_refused(refuse):
    """A single huge number among the experts would be the number of blocks that every replay keeps arrays for."""
    for content in (
        CSV.replace("n_expert=8", "n_expert=2147483647"),
        line_of(TOKENS, 1, set_id(2**31 - 2)),
        routed_npz(np.array([[[0, 2**31 - 2]]])),
    ):
        refuse(content, r"layers? of 2,147,483,647 experts .*are more than 16,777,216 blocks")
    refuse(TOKENS, "more than 16,777,216 blocks", n_experts=2**30)


BOMBS = {
    "csv of huge steps": change_row(LAST - 6, 2, "2147483647"),
    "csv of huge k": CSV.replace("n_expert=8", "n_expert=2147483647").replace(
        "n_expert_used=2", "n_expert_used=2000000000"
    ),
    "npz of zeros": routed_npz(np.zeros((1000, 1000, 8), np.int64)),
    "npz that promises": packed(HONEST | {"shape": (10**6, 100, 100)}),
    "a line without end": '{"tok": 0, "x": "' + "a" * (1 << 22),
    "layers far apart": LAYERS.replace('"layer_idx": 2', '"layer_idx": 2147483647'),
    "tokens far away": set_record(20, "token_idx", 2**31 - 1),
    "a remark without end": CSV.replace("# layer=0", "#" + "a" * (1 << 22) + "\n# layer=0"),
    "a row without end": CSV + "1" * (1 << 23),
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_claim_of_a_file_costs_memory(tmp_path, name):
    content = BOMBS[name]
    path = tmp_path / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    (tmp_path / "plain").write_text(CSV)
    open_trace(tmp_path / "plain")  # compile before counting
    tracemalloc.start()
    try:
        if name == "layers far apart":
            open_trace(path)
        else:
            with pytest.raises(TraceError):
                open_trace(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 60 << 20, f"{peak >> 20} MiB"


def test_a_message_cannot_steer_a_terminal(refuse):
    evil = "\x1b[31m\x07\r\u202e"
    refuse(CSV.replace("0,1,4,1,0,", f"0,1,4,1,{evil},"), "slot is '")
    refuse(CSV.replace("# route_trace v1", f"# route_trace {evil}"), "line 1 is '")
    refuse(CSV.replace("turn,phase", f"{evil},phase"), "has no turn")
    refuse(json.dumps({evil: 1}) + "\n", "holds JSON with")
    refuse(json.dumps({"tok": evil, "layers": [[1]]}) + "\n", "'tok' is")
    refuse(zip_of(evil, b"x"), "not, but")
    refuse(zip_of("routed_experts.npy", npy("{'descr': '" + "\x1b[31m" + "'}")), "has the header")


def test_a_model_s_name_cannot_steer_a_terminal(tmp_path):
    path = tmp_path / "trace"
    path.write_text(CSV.replace("Tiny-MoE", "Ti\x1bny\x07" + "x" * 500))
    name = open_trace(path).meta.model
    assert name.isprintable() and name.startswith("Ti?ny?") and len(name) == 100


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path = tmp_path / "trace"
    path.write_text(CSV)
    path.chmod(0)
    with pytest.raises(TraceError, match="cannot be read: Permission denied"):
        open_trace(path)


def test_opening_needs_no_pandas_and_no_torch_kernels():
    """`open_trace` stays quick to import: nothing here needs a data frame."""
    code = "import sys, nemolab.trace; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
