"""Controls that must fail: stores whose experts arrive wrong, handed to the same engine.

A measure that cannot tell a broken model from a whole one says nothing about the whole one. Each control changes bytes
between the disk and the engine, so that the engine itself runs as always, and changes them as the checkpoint's own
layout means it: the same wrong weights in either layout of a store.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from nemolab.compare.measures import LogitRows, diverge, exp, negative_log_likelihoods
from nemolab.compare.texts import Text
from nemolab.store import BlockReader, Store
from nemolab.store.direct_io import aligned_buffer

# Mean KL that a control must reach on every text. Far above any rounding, far below what broken weights do.
MUST_REACH_NATS = 0.1

ReadInto = Callable[[int, np.ndarray], None]


@dataclass(frozen=True)
class Control:
    """A way to break the routed experts.

    alter    changes a block just read, in place: (store, the reader's own read_into, block index, buffer)
    globals  float32 [layers, experts, 2] -> what is used in its place
    """

    name: str
    what: str
    alter: Callable[[Store, ReadInto, int, np.ndarray], None] | None = None
    globals: Callable[[np.ndarray], np.ndarray] | None = None


class TamperedStore(Store):
    """A store read through a control. The files stay as they are."""

    def __init__(self, store: Store, control: Control):
        super().__init__(store.path, store.manifest)
        self.control = control

    @cached_property
    def globals(self) -> np.ndarray:
        whole = Store.open(self.path).globals
        return self.control.globals(whole) if self.control.globals else whole

    def open_reader(self, *args, **kwargs) -> BlockReader:
        reader = super().open_reader(*args, **kwargs)
        if self.control.alter:
            _read_through(reader, self)
        return reader


def _read_through(reader: BlockReader, store: TamperedStore) -> None:
    """Let every block pass the control on its way; `read_many` and `start` go through `read_into` themselves."""
    read_into = reader.read_into

    def read_and_alter(block: int, buffer: np.ndarray) -> None:
        read_into(block, buffer)
        store.control.alter(store, read_into, block, buffer)

    reader.read_into = read_and_alter


def swap_nibbles(store: Store, read_into: ReadInto, block: int, buffer: np.ndarray) -> None:
    """Exchange the two 4-bit halves of every byte of values, as the checkpoint packs them."""
    views = store.views(buffer)
    _swap_halves(views.up_values)
    if store.layout == "source":
        _swap_halves(views.down_values)
    else:
        # A published byte of down holds neurons 2j and 2j + 1; here these are two rows.
        pairs = views.down_values.reshape(-1, 2, views.down_values.shape[1])
        pairs[...] = pairs[:, ::-1].copy()


def _swap_halves(values: np.ndarray) -> None:
    values[...] = (values << 4) | (values >> 4)


def take_neighbours_scales(store: Store, read_into: ReadInto, block: int, buffer: np.ndarray) -> None:
    """Replace both planes of block scales by those of the next expert of the layer (the last one takes the first's)."""
    layer, expert = divmod(block, store.n_experts)
    other = _scratch(store.block_bytes)
    read_into(store.block_index(layer, (expert + 1) % store.n_experts), other)
    mine, theirs = store.views(buffer), store.views(other)
    mine.up_scales[...] = theirs.up_scales
    mine.down_scales[...] = theirs.down_scales


def measure_control(engine, text: Text, reference: LogitRows) -> dict:
    """Perplexity and mean KL of a text under a broken engine; only the prompt pass is run.

    Logits that are no numbers are as wrong as can be: infinite, not an error.
    """
    logits = engine.prefill(text.ids, engine.new_state())
    rows = range(len(text.ids) - 1)
    found = {"name": text.name, "tokens": len(rows), "kl_mean": math.inf, "nats": math.inf}
    if bool(torch.isfinite(logits).all()):
        broken = lambda start, stop: logits[start:stop]  # noqa: E731
        found["kl_mean"] = diverge(text.ids, reference=reference, engine=broken, rows=rows).mean
        found["nats"] = float(negative_log_likelihoods(text.ids, broken).sum())
    return found


def judge_control(control: Control, texts: list[dict]) -> dict:
    """The control's entry in the document: it failed as it must when every text moved far enough."""
    scored = sum(text["tokens"] for text in texts)
    return {
        "name": control.name,
        "what": control.what,
        "ppl": exp(sum(text["nats"] for text in texts) / scored),
        "kl_mean_least": min(text["kl_mean"] for text in texts),
        "failed_as_it_must": all(text["kl_mean"] >= MUST_REACH_NATS for text in texts),
        "texts": [
            {"name": text["name"], "ppl": exp(text["nats"] / text["tokens"]), "kl_mean": text["kl_mean"]}
            for text in texts
        ],
    }


_local = threading.local()


def _scratch(block_bytes: int) -> np.ndarray:
    """A page-aligned buffer of this thread's own."""
    if getattr(_local, "buffer", np.empty(0)).nbytes != block_bytes:
        _local.buffer = aligned_buffer(block_bytes)
    return _local.buffer


CONTROLS = (
    Control("swapped nibbles", "the two 4-bit halves of every byte of expert weights exchanged", swap_nibbles),
    Control(
        "neighbour's scales",
        "every expert with the weight_scale and weight_scale_2 of the next one, both matrices",
        take_neighbours_scales,
        lambda scales: np.roll(scales, -1, axis=1),
    ),
    # A global scale of zero makes every product of the expert an exact zero: it adds nothing.
    Control("no routed experts", "every routed expert adds zero", globals=np.zeros_like),
)
