"""Traces for tests: random ones with every array, and files whose header is rewritten by hand."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from nemolab.trace import DECODE, GUESSES, PREFILL, Trace, TraceMeta

OPTIONAL = (
    "weights",
    "guesses",
    "guesses_2",
    "guesses_3",
    "active_neurons",
    "active_groups",
    "token_ids",
    "live_misses",
)


def make_full_trace(
    *,
    prompt: int = 3,
    decode: int = 4,
    conversations: int = 2,
    layers: int = 4,
    experts: int = 8,
    top_k: int = 2,
    seed=0,
) -> Trace:
    """A sound trace with every array: for each conversation a prompt pass, then tokens of decode."""
    rng = np.random.default_rng(seed)
    one = prompt + decode
    tokens = one * conversations
    ids = np.argsort(rng.random((tokens, layers, experts)), axis=-1)
    n = min(experts, max(8, top_k))
    arrays = {
        name: np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :n].astype(np.int16)
        for name in GUESSES.values()
    }
    for ahead, name in GUESSES.items():
        arrays[name][:, :ahead] = -1
    step_of_one = np.concatenate([np.zeros(prompt, int), np.arange(1, decode + 1)])
    step = np.concatenate([number * (decode + 1) + step_of_one for number in range(conversations)])
    live = rng.integers(0, top_k + 1, (tokens, layers))
    live[np.append(np.diff(step) == 0, False)] = -1
    phase_of_one = [PREFILL] * prompt + [DECODE] * decode
    return Trace(
        TraceMeta(
            model="toy",
            n_experts=experts,
            fingerprint="toy's",
            block_bytes=tuple(4096 * (layer + 1) for layer in range(layers)),
            taken={"kind": "chat", "conversations": [f"c{number}" for number in range(conversations)], "seed": seed},
        ),
        experts=ids[..., :top_k].astype(np.int16),
        phase=np.array(phase_of_one * conversations, np.uint8),
        conversation=np.repeat(np.arange(conversations), one).astype(np.int32),
        position=np.tile(np.arange(one), conversations).astype(np.int32),
        step=step.astype(np.int32),
        weights=rng.random((tokens, layers, top_k)).astype(np.float32),
        active_neurons=rng.integers(0, 33, (tokens, layers, top_k)).astype(np.int16),
        active_groups=rng.integers(0, 3, (tokens, layers, top_k)).astype(np.int16),
        token_ids=rng.integers(0, 300, tokens).astype(np.int32),
        live_misses=live.astype(np.int32),
        **arrays,
    )


def without(trace: Trace, *names: str) -> Trace:
    return replace(trace, **dict.fromkeys(names))


def with_meta(trace: Trace, **fields) -> Trace:
    return replace(trace, meta=replace(trace.meta, **fields))


def equal(a: Trace, b: Trace) -> bool:
    """Every fact and every array, types and shapes included."""
    return (
        a.meta == b.meta
        and a.arrays.keys() == b.arrays.keys()
        and all(
            x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
            for x, y in zip(a.arrays.values(), b.arrays.values(), strict=True)
        )
    )


def split_file(path: Path) -> tuple[dict, bytes]:
    """The parsed header of a safetensors file, and its data."""
    raw = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join_file(path: Path, header: dict, data: bytes) -> Path:
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return Path(path)


def edit_facts(path: Path, **changed) -> Path:
    """Change entries of our JSON in the header; None removes one."""
    header, data = split_file(path)
    facts = json.loads(header["__metadata__"]["nemolab.trace"]) | changed
    facts = {name: value for name, value in facts.items() if name not in changed or changed[name] is not None}
    header["__metadata__"]["nemolab.trace"] = json.dumps(facts)
    return join_file(path, header, data)
