"""Routing traces of other forms: what goes in comes out, whatever the file is called."""

import gc
import json

import numpy as np
import pytest
from foreign_traces import SIZES, draw_routing, layer_lines, route_csv, routed_npz, token_lines

from nemolab.errors import TraceError
from nemolab.simulate import check_live, from_trace, replay
from nemolab.trace import DECODE, PREFILL, Trace, TraceMeta, open_trace, write_trace
from nemolab.trace.trace import TAKEN

EXPERTS, WEIGHTS = draw_routing()


@pytest.fixture
def save(tmp_path):
    def write(content, name="trace.dat"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def check_all_decode(trace, experts, *, first=0):
    assert trace.experts.dtype == np.int16 and np.array_equal(trace.experts, experts)
    assert np.all(trace.phase == DECODE) and not trace.conversation.any()
    assert trace.step.tolist() == list(range(len(experts)))
    assert trace.position.tolist() == list(range(first, first + len(experts)))
    assert trace.meta.block_bytes is None and not trace.meta.prefill_warms
    assert trace.meta.taken["kind"] == "imported" and trace.live_misses is None and trace.guesses is None


def test_a_route_trace_comes_in_whole(save):
    trace = open_trace(save(route_csv(EXPERTS, WEIGHTS)))
    expected = EXPERTS.copy()
    expected[:3, -1] = -1  # of the prompt of 4 the last layer saw the last token
    assert np.array_equal(trace.experts, expected)
    assert np.array_equal(trace.weights, np.where(expected >= 0, WEIGHTS, 0)) and trace.weights.dtype == np.float32
    assert trace.phase.tolist() == [PREFILL] * 4 + [DECODE] * 3
    assert trace.step.tolist() == [0, 0, 0, 0, 1, 2, 3] and trace.position.tolist() == list(range(7))
    assert not trace.conversation.any()
    meta = trace.meta
    assert meta.model == "Tiny-MoE" and meta.n_experts == 8 and meta.block_bytes == SIZES and meta.ranked
    assert meta.prefill_warms and meta.source == "route_trace v1" and meta.fingerprint is None
    assert meta.taken == {"kind": "imported", "conversations": ["turn 0"], "notes": [], "arch": "tiny"}
    assert np.all(trace.live_misses[:3] == -1) and np.all(trace.live_misses[4:] == 1)
    assert trace.live_misses[3, 2] == 1 and np.all(trace.live_misses[3, :2] >= 1)


def test_turns_are_conversations(save):
    trace = open_trace(save(route_csv(EXPERTS, WEIGHTS, ((2, 1), (1, 1), (2, 0)))))
    assert trace.conversation.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert trace.phase.tolist() == [0, 0, 1, 0, 1, 0, 0]
    assert trace.step.tolist() == [0, 0, 1, 2, 3, 4, 4]
    assert trace.position.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert trace.meta.taken["conversations"] == ["turn 0", "turn 1", "turn 2"]
    assert np.flatnonzero((trace.experts[:, 2] < 0).any(axis=1)).tolist() == [0, 5]


def test_a_turn_may_go_on_where_its_context_ends(save):
    trace = open_trace(save(route_csv(EXPERTS, WEIGHTS, first_step=40)))
    assert trace.position.tolist() == list(range(40, 47))


def test_steps_of_an_answer_may_count_anew(save):
    plain = open_trace(save(route_csv(EXPERTS, WEIGHTS, ((4, 2), (0, 1)))))
    text = route_csv(EXPERTS, WEIGHTS, ((4, 2), (0, 1)))
    other = open_trace(save(text.replace("\n0,1,4,", "\n0,1,0,").replace("\n0,1,5,", "\n0,1,1,")))
    assert all(np.array_equal(other.arrays[name], array) for name, array in plain.arrays.items())
    assert other.position.tolist() == [0, 1, 2, 3, 4, 5, 0]


def test_a_last_layer_that_saw_the_whole_prompt_is_whole(save):
    assert np.array_equal(open_trace(save(route_csv(EXPERTS, WEIGHTS, short=False))).experts, EXPERTS)


def test_layers_without_experts_are_not_counted(save):
    """As models with dense layers write it: their line in the header says 0 bytes, they have no rows."""
    text = route_csv(EXPERTS, WEIGHTS)
    for layer in (2, 1, 0):  # layers 0, 1, 2 become 1, 2, 4 of five
        text = text.replace(f"# layer={layer} ", f"# layer={layer + 1 + (layer == 2)} ")
    lines = text.replace("n_layer=3", "n_layer=5").splitlines()
    rows = [line.split(",") for line in lines[6:]]
    moved = [",".join([*row[:3], str(int(row[3]) + 1 + (row[3] == "2")), *row[4:]]) for row in rows]
    dense = [f"# layer={layer} expert_bytes=0 dense_bytes=5" for layer in (0, 3)]
    trace = open_trace(save("\n".join([*lines[:2], *dense, *lines[2:6], *moved])))
    assert np.array_equal(trace.experts[3:], EXPERTS[3:]) and trace.meta.block_bytes == SIZES
    assert trace.meta.taken["notes"] == ["3 of 5 layers have experts; they are counted from 0 in order"]


def test_choices_that_the_engine_left_out_are_kept_and_noted(save):
    trace = open_trace(save(route_csv(EXPERTS, WEIGHTS, short=False, dropped=True)))
    assert np.array_equal(trace.experts, EXPERTS)
    assert trace.meta.taken["notes"] == ["the engine left out 21 of 42 choices; all are replayed"]


def test_columns_are_found_by_name(save):
    """Those after `expert` may be missing, others may follow, their order is free."""
    plain = open_trace(save(route_csv(EXPERTS, WEIGHTS)))
    head, rows = split_rows(route_csv(EXPERTS, WEIGHTS))
    table = [line.split(",") for line in rows]
    names = table[0]
    wider = [[*row, "lane" if number == 0 else f"x{number}"] for number, row in enumerate(table)]
    turned = [row[::-1] for row in wider]
    fewer = [row[:6] for row in table]
    for rows in (wider, turned):
        other = open_trace(save("\n".join([*head, *map(",".join, rows)]) + "\n"))
        assert all(np.array_equal(other.arrays[name], array) for name, array in plain.arrays.items())
    bare = open_trace(save("\n".join([*head, *map(",".join, fewer)]) + "\n"))
    assert np.array_equal(bare.experts, plain.experts) and bare.weights is None and bare.live_misses is None
    assert names[6] == "weight"


def split_rows(text):
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return lines[:begin], lines[begin:]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.rstrip("\n"),
        lambda text: text.replace("\n0,1,5,", "\n \n0,1,5,", 1) + "\n\n",
        lambda text: text.replace("# layer=0", "# a remark\n#\n# layer=0"),
        lambda text: text.replace("\n0,1,5,", "\n# in the middle\n0,1,5,", 1) + "# at the end\n",
        lambda text: text.replace("# model", "#   model"),
    ],
    ids=["crlf", "byte order mark", "no last line end", "blank lines", "remarks", "remarks between rows", "spaces"],
)
def test_what_means_nothing_changes_nothing(save, change):
    plain = open_trace(save(route_csv(EXPERTS, WEIGHTS)))
    other = open_trace(save(change(route_csv(EXPERTS, WEIGHTS))))
    assert other.meta == plain.meta
    assert all(np.array_equal(other.arrays[name], array) for name, array in plain.arrays.items())


def test_weights_that_are_not_known_are_left_out(save):
    text = route_csv(EXPERTS, WEIGHTS)
    weight = f"{WEIGHTS[0, 0, 0]:.6g}"
    trace = open_trace(save(text.replace(weight, "nan", 1)))
    assert trace.weights is None and trace.meta.taken["notes"] == ["weights are left out: some are not known"]


@pytest.mark.parametrize(
    "text",
    ["0.221297", "1", "0", "-0.5", "1e-07", "3.5E+2", ".25", "7.", "0.1234567890123456789", "123456789012345678901"],
)
def test_weights_are_read_as_python_reads_them(save, text):
    csv = route_csv(EXPERTS, WEIGHTS).replace(f"{WEIGHTS[0, 0, 0]:.6g}", text, 1)
    assert open_trace(save(csv)).weights[0, 0, 0] == np.float32(float(text))


def test_a_large_route_trace_is_read_in_parts(save, monkeypatch):
    from nemolab.trace.importers import route_table

    plain = open_trace(save(route_csv(EXPERTS, WEIGHTS)))
    monkeypatch.setattr(route_table, "CHUNK_BYTES", 64)
    other = open_trace(save(route_csv(EXPERTS, WEIGHTS)))
    assert all(np.array_equal(other.arrays[name], array) for name, array in plain.arrays.items())
    with pytest.raises(TraceError, match=r"line 20: expert is 99; 0 to 7"):
        lines = route_csv(EXPERTS, WEIGHTS).splitlines()
        lines[19] = ",".join([*lines[19].split(",")[:5], "99", *lines[19].split(",")[6:]])
        open_trace(save("\n".join(lines)))


def test_what_a_phone_read_can_be_checked_once_its_cache_is_told(save):
    """The form does not say which cache made the misses, so the check asks; told a cache, it compares."""
    import dataclasses

    trace = open_trace(save(route_csv(EXPERTS, WEIGHTS)))
    with pytest.raises(TraceError, match="does not say which cache"):
        check_live(trace)
    misses = replay(from_trace(trace), "lru", budget_bytes=9000).misses_by_batch().reshape(-1, 3)
    live = trace.live_misses.copy()
    live[3:] = misses
    cache = {"policy": "lru", "budget_bytes": 9000, "prefetch": 0}
    meta = dataclasses.replace(trace.meta, taken=trace.meta.taken | {"cache": cache})
    assert check_live(dataclasses.replace(trace, meta=meta, live_misses=live)).equal


def test_tokens_with_all_layers_come_in_whole(save):
    ids = np.sort(EXPERTS, axis=2)
    trace = open_trace(save(token_lines(ids)))
    check_all_decode(trace, ids)
    assert trace.weights is None and not trace.meta.ranked and trace.meta.source == "jsonl tok/layers"
    assert trace.meta.n_experts == EXPERTS.max() + 1 and trace.meta.model == "trace"
    assert "8 are taken, the largest number + 1" in trace.meta.taken["notes"][0]


def test_tokens_may_count_from_any_number(save):
    check_all_decode(open_trace(save(token_lines(EXPERTS, first=28))), EXPERTS, first=28)


def test_ids_that_are_not_sorted_are_ranked(save):
    assert open_trace(save(token_lines(EXPERTS))).meta.ranked
    assert open_trace(save(token_lines(EXPERTS[:, :, :1]))).meta.ranked, "one expert is its own order"


@pytest.mark.parametrize("by_layer", [False, True])
def test_lines_of_token_and_layer_come_in_whole(save, by_layer):
    trace = open_trace(save(layer_lines(EXPERTS, WEIGHTS, by_layer=by_layer, first=5)))
    check_all_decode(trace, EXPERTS, first=5)
    assert np.array_equal(trace.weights, WEIGHTS) and trace.weights.dtype == np.float32
    assert trace.meta.ranked and trace.meta.source == "jsonl layer_idx/token_idx"


def test_lines_without_weights_come_in_too(save):
    trace = open_trace(save(layer_lines(EXPERTS)))
    check_all_decode(trace, EXPERTS)
    assert trace.weights is None


def test_sorted_ids_whose_weights_fall_are_ranked(save):
    ids = np.sort(EXPERTS, axis=2)
    assert open_trace(save(layer_lines(ids, WEIGHTS))).meta.ranked
    assert not open_trace(save(layer_lines(ids, WEIGHTS[:, :, ::-1]))).meta.ranked


def test_layers_of_a_model_with_dense_ones_are_counted_in_order(save):
    trace = open_trace(save(layer_lines(EXPERTS, WEIGHTS, layers=[1, 3, 40])))
    check_all_decode(trace, EXPERTS)
    assert "layers [1, 3, 40] are counted from 0 in order" in trace.meta.taken["notes"]


def test_json_lines_may_end_and_begin_like_those_of_other_systems(save):
    text = token_lines(EXPERTS)
    for other in ("\ufeff" + text, text.replace("\n", "\r\n"), "\n" + text + "\n\n", text.rstrip("\n")):
        check_all_decode(open_trace(save(other)), EXPERTS)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "<i4", ">i4", "int64", "uint64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_archive_comes_in_whole(save, dtype, order):
    trace = open_trace(save(routed_npz(np.asarray(EXPERTS, dtype, order=order))))
    check_all_decode(trace, EXPERTS)
    assert trace.meta.ranked and trace.meta.source == "npz routed_experts"


def test_an_archive_may_hold_other_arrays_and_be_stored_plain(save):
    others = {"prompt_ids": np.arange(3), "names": np.array(["a"], object)}
    trace = open_trace(save(routed_npz(EXPERTS, compressed=False, **others)))
    check_all_decode(trace, EXPERTS)
    assert "other arrays of the archive were left alone: ['names.npy', 'prompt_ids.npy']" in trace.meta.taken["notes"]


def test_ids_beyond_int16_are_kept(save):
    ids = EXPERTS.astype(np.int32) * 10_000
    for content in (routed_npz(ids), token_lines(ids)):
        trace = open_trace(save(content))
        assert trace.experts.dtype == np.int32 and np.array_equal(trace.experts, ids)


def test_an_expert_named_twice_is_one_lookup_and_noted(save):
    ids = np.array([[[1, 1]], [[0, 1]]])
    trace = open_trace(save(routed_npz(ids)))
    assert "1 of 2 choices name an expert more than once" in trace.meta.taken["notes"][-1]
    assert len(from_trace(trace).keys) == 3


CONTENTS = {
    "csv": route_csv(EXPERTS, WEIGHTS),
    "tokens": token_lines(EXPERTS),
    "layers": layer_lines(EXPERTS, WEIGHTS),
    "npz": routed_npz(EXPERTS),
}


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace.npz", "trace.safetensors", "trace", "trace.gz"])
def test_a_file_is_known_by_what_it_holds_never_by_its_name(save, name, tmp_path):
    for content in CONTENTS.values():
        assert np.array_equal(open_trace(save(content, name)).experts[3:], EXPERTS[3:])
    write_trace(tmp_path / name, open_trace(save(CONTENTS["npz"], "other")))
    assert np.array_equal(open_trace(tmp_path / name).experts, EXPERTS)


@pytest.mark.parametrize("form", CONTENTS)
def test_what_comes_in_can_be_kept_as_our_own(save, form, tmp_path):
    trace = open_trace(save(CONTENTS[form]))
    write_trace(tmp_path / "ours", trace)
    back = open_trace(tmp_path / "ours")
    assert trace.meta.taken.keys() <= TAKEN.keys()
    assert back.meta == trace.meta and list(back.arrays) == list(trace.arrays)
    assert all(np.array_equal(back.arrays[name], array) for name, array in trace.arrays.items())


@pytest.mark.parametrize("form", CONTENTS)
def test_what_is_told_counts(save, form):
    path = save(CONTENTS[form])
    trace = open_trace(path, n_experts=8, block_bytes=500, prefill_warms=False)
    assert trace.meta.n_experts == 8 and trace.meta.block_bytes == (500,) * 3 and not trace.meta.prefill_warms
    trace = open_trace(path, block_bytes=[1, 2, 3], prefill_warms=True)
    assert trace.meta.block_bytes == (1, 2, 3) and trace.meta.prefill_warms
    assert replay(from_trace(trace), "lru", budget_bytes=6).row("all")["lookups"] > 0
    with pytest.raises(TraceError, match="3 MoE layers; block sizes"):
        open_trace(path, block_bytes=[1, 2])
    with pytest.raises(TraceError, match="one above 0 for all"):
        open_trace(path, block_bytes=0)
    with pytest.raises(TraceError, match="expert 7; a layer is said to have 5|model of 8 experts; 5 were asked for"):
        open_trace(path, n_experts=5)


def test_what_is_told_counts_for_our_own_too(tmp_path):
    arrays = {name: np.arange(7, dtype=np.int32) for name in ("position", "step")}
    zeros = np.zeros(7, np.int32)
    ours = Trace(TraceMeta("m", 8), EXPERTS, np.ones(7, np.uint8), zeros, **arrays)
    write_trace(tmp_path / "ours", ours)
    trace = open_trace(tmp_path / "ours", n_experts=8, block_bytes=9, prefill_warms=True)
    assert trace.meta.block_bytes == (9, 9, 9) and trace.meta.prefill_warms
    write_trace(tmp_path / "warm", trace)
    assert open_trace(tmp_path / "warm").meta.prefill_warms
    assert not open_trace(tmp_path / "warm", prefill_warms=False).meta.prefill_warms
    with pytest.raises(TraceError, match="model of 8 experts; 9 were asked for"):
        open_trace(tmp_path / "ours", n_experts=9)
    with pytest.raises(TraceError, match="3 MoE layers; block sizes"):
        open_trace(tmp_path / "ours", block_bytes=[1])


def test_nothing_of_the_file_stays_open(save, recwarn):
    for content in CONTENTS.values():
        open_trace(save(content))
    gc.collect()
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]


def test_the_forms_here_are_those_described():
    """The builders of this file against the layouts written out by hand."""
    record = json.loads(CONTENTS["layers"].splitlines()[0])
    assert set(record) == {"layer_idx", "token_idx", "selected_ids", "gate_weights"}
    assert set(json.loads(CONTENTS["tokens"].splitlines()[0])) == {"tok", "layers"}
    head = CONTENTS["csv"].splitlines()
    assert head[0] == "# route_trace v1" and head[5].startswith("turn,phase,step,layer,slot,expert,weight,residency,")
    assert len(head) - 6 == 7 * 3 * 2 - 2 * 3, "layers x k x tokens minus k x (prompt - 1)"
