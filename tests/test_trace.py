"""What a trace must be, and how it is looked at."""

from dataclasses import replace

import numpy as np
import pytest
from traces import OPTIONAL, make_full_trace, with_meta, without

from nemolab.errors import TraceError
from nemolab.trace import DECODE, PREFILL

# What a trace must be


def spoil(name, edit):
    def spoiled(trace):
        array = getattr(trace, name).copy()
        return replace(trace, **{name: edit(array)})

    return spoiled


def put(at, value):
    def edit(array):
        array[at] = value
        return array

    return edit


UNSOUND = {
    "experts has shape": lambda t: replace(t, experts=t.experts[0]),
    "without a single record": lambda t: replace(t, **{n: a[:0] for n, a in t.arrays.items()}),
    "without a single lookup": spoil("experts", lambda a: np.full_like(a, -1)),
    "experts is int64; int16 or int32": spoil("experts", lambda a: a.astype(np.int64)),
    "experts holds -1 to 8; ids from 0 to 7, or -1 for none, were expected": spoil("experts", put((1, 1), (-1, 8))),
    "experts holds -2 to": spoil("experts", put((1, 1), -2)),
    "weights is float64": spoil("weights", lambda a: a.astype(float)),
    "weights holds nan at token 2, layer 1, rank 0": spoil("weights", put((2, 1, 0), np.nan)),
    r"weights has shape \(13, 4, 2\); \(14, 4, 2\)": spoil("weights", lambda a: a[1:]),
    r"position has shape \(14, 1\)": spoil("position", lambda a: a[:, None]),
    "phase is list; uint8": lambda t: replace(t, phase=t.phase.tolist()),
    "phase is NoneType": lambda t: replace(t, phase=None),
    "phase holds 0 to 2": spoil("phase", put(13, 2)),
    "conversation holds -1": spoil("conversation", put(slice(0, 7), -1)),
    "position goes from 2 to 2 at token 3 of conversation 0; it must rise: are these several": spoil(
        "position", put(3, 2)
    ),
    "position goes from 6 to 0 at token 7 of conversation 0": spoil("conversation", lambda a: a * 0),
    "step falls from 1 to 0 at token 4": spoil("step", put(4, 0)),
    "step 0 mixes phases or conversations": spoil("step", put(slice(0, 4), 0)),
    "step 4 mixes": spoil("step", put(slice(7, 10), 4)),
    "token_ids holds -5": spoil("token_ids", put(0, -5)),
    "guesses holds -1 to 8": spoil("guesses", put((0, 1, 0), 8)),
    "guesses holds guesses for layer 0; no layer is 1 before it": spoil("guesses", put((0, 0), 0)),
    "guesses_3 holds guesses for layer 2": spoil("guesses_3", put((5, 2, 0), 0)),
    r"guesses_2 has shape \(14, 3, 8\)": spoil("guesses_2", lambda a: a[:, 1:]),
    "active_groups holds -2": spoil("active_groups", put((0, 0, 0), -2)),
    "live_misses has counts at token 1, which is not the last of its step": spoil("live_misses", put((1, 2), 0)),
    "model is 5; a str": lambda t: with_meta(t, model=5),
    "n_experts is True; a int": lambda t: with_meta(t, n_experts=True),
    "n_experts is 0": lambda t: with_meta(t, n_experts=0),
    "fingerprint is 7": lambda t: with_meta(t, fingerprint=7),
    "block_bytes names 1 layers; experts has 4": lambda t: with_meta(t, block_bytes=(4096,)),
    r"block_bytes is \(0,": lambda t: with_meta(t, block_bytes=(0,) * 4),
    "taken cannot be written as JSON": lambda t: with_meta(t, taken={"rate": float("nan")}),
}


@pytest.mark.parametrize("message", UNSOUND)
def test_unsound_traces_are_refused_by_field(message):
    with pytest.raises(TraceError, match=message):
        UNSOUND[message](make_full_trace()).check()


def test_sound_traces_pass():
    make_full_trace().check()
    without(make_full_trace(), *OPTIONAL).check()
    one = make_full_trace(prompt=0, decode=1, conversations=1, layers=1)
    replace(one, experts=np.where(np.arange(2) == 0, one.experts, -1).astype(np.int16)).check()


def test_a_trace_of_another_model_is_refused():
    trace = make_full_trace()
    trace.check_model("toy's", 4, 8, 2)
    trace.check_model(None, 4, 8, 2)
    with_meta(trace, fingerprint=None).check_model("another's", 4, 8, 2)
    for layers, experts, top_k in ((5, 8, 2), (4, 16, 2), (4, 8, 3)):
        with pytest.raises(TraceError, match=f"another model: .* {layers} of {experts}, top-{top_k} were expected"):
            trace.check_model("toy's", layers, experts, top_k)
    with pytest.raises(TraceError, match='its fingerprint is "toy\'s", "another\'s" was expected'):
        trace.check_model("another's", 4, 8, 2)


# Looking at it


def test_the_frame_has_a_row_for_each_lookup():
    trace = make_full_trace()
    experts = trace.experts.copy()
    experts[0, 3] = -1
    trace = replace(trace, experts=experts)
    frame = trace.frame()
    assert len(frame) == (experts >= 0).sum() == trace.n_tokens * 4 * 2 - 2
    assert list(frame.columns) == [
        "token", "layer", "rank", "expert", "weight", "active_neurons", "active_groups", "phase", "conversation",
        "position", "step",
    ]  # fmt: skip
    row = frame[(frame.token == 9) & (frame.layer == 2) & (frame["rank"] == 1)].iloc[0]
    assert (row.expert, row.phase, row.conversation, row.position, row.step) == (experts[9, 2, 1], "prefill", 1, 2, 5)
    assert row.weight == trace.weights[9, 2, 1] and row.active_groups == trace.active_groups[9, 2, 1]
    assert set(without(trace, "weights").frame().columns) == set(frame.columns) - {"weight"}


def test_selecting_keeps_whole_tokens():
    trace = make_full_trace()
    part = trace.select(conversation=1, phase="decode")
    part.check()
    assert part.n_tokens == 4 and set(part.conversation) == {1} and set(part.phase) == {DECODE}
    assert trace.select(conversation=[0, 1]).n_tokens == trace.n_tokens
    assert trace.select(phase=PREFILL).n_tokens == 6
    cached = replace(trace, meta=replace(trace.meta, taken={"cache": {"slots": 3, "start": "empty"}}))
    starts = [cached.select(conversation=number).meta.taken["cache"]["start"] for number in (0, 1)]
    assert starts == ["empty", "as it was"], "the second conversation found what the first had left"
    for wrong in ({"conversation": 2}, {"phase": "both"}, {"phase": 2}):
        with pytest.raises(TraceError):
            trace.select(**wrong)


def test_a_trace_introduces_itself():
    assert repr(make_full_trace()) == (
        "Trace of toy: 14 tokens x 4 MoE layers x top-2 of 8, 2 conversation(s), with weights, guesses, guesses_2, "
        "guesses_3, active_neurons, active_groups, token_ids, live_misses"
    )
