"""What the engine tells while it runs, kept cheaply and turned into a `Trace` at the end.

The engine feeds it and learns nothing back: a passive sink. On the way a step only copies into rows that are there
already; what can be derived later (counts of active neurons, guesses of the next layers' routers) is derived for many
tokens at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nemolab.checkpoint.formats import GROUP
from nemolab.errors import TraceError
from nemolab.trace.trace import ARRAYS, DECODE, GUESSES, PREFILL, Trace, TraceMeta, id_type

if TYPE_CHECKING:
    import torch

    from nemolab.kernels.matvec import Packed
    from nemolab.kernels.team import Team

# Tokens of decode whose derived values are computed together: as a rule a whole answer, so that it is not slowed by
# what can be done after it. So many at most, and no more than fit these bytes.
BULK_TOKENS, BULK_BYTES = 1024, 2**26
LEAST_GUESSES = 8
FIRST_ROWS = 256


class Routers(NamedTuple):
    """The routers of a model's MoE layers, as the engine itself applies them.

    team                the engine's threads
    gates, biases       by MoE layer: the gate as kernels take it; the correction bias, float32 [experts]
    expert_groups, top_groups   the limit of groups of experts: n_group and topk_group of the config
    """

    team: Team
    gates: Sequence[Packed]
    biases: Sequence[np.ndarray]
    expert_groups: int = 1
    top_groups: int = 1


def count_guesses(n_experts: int, top_k: int, expert_groups: int = 1, top_groups: int = 1) -> int:
    """How many guesses a layer gets: max(8, top_k), but not more than the limit of groups lets a token reach."""
    return min(max(LEAST_GUESSES, top_k), n_experts // expert_groups * top_groups)


class Recorder:
    """A trace that grows while an engine runs.

    meta          what holds for the trace; `trace` may complete meta.taken
    n_layers, top_k   of the model; hidden: width of a MoE layer's input; groups: groups of 16 neurons of an expert
    routers       None: no guesses are recorded
    guesses       at least so many: those that the engine prefetches
    token_ids     False: ids are left out, and with them the text they stand for
    .guesses      how many are recorded for each layer

    For every pass the engine calls `begin_step`, then once for each MoE layer `decode_layer` or `prompt_layer`, then
    `end_step`. A step that never ends (a failed read, an interrupt) leaves nothing behind.
    """

    def __init__(
        self,
        meta: TraceMeta,
        *,
        n_layers: int,
        top_k: int,
        hidden: int,
        groups: int,
        routers: Routers | None = None,
        guesses: int = 0,
        token_ids: bool = True,
    ):
        self.meta, self.n_layers = meta, n_layers
        self._routers = routers
        least = count_guesses(meta.n_experts, top_k, routers.expert_groups, routers.top_groups) if routers else 0
        self.guesses = max(least, guesses)
        left_out = set() if token_ids else {"token_ids"}
        if not routers:
            left_out |= set(GUESSES.values())
        ids, counts = id_type(meta.n_experts), id_type(GROUP * groups + 1)
        types = {name: counts if "active" in name else types[0] for name, (types, _) in ARRAYS.items()}
        types |= dict.fromkeys(("experts", *GUESSES.values()), ids)
        sizes = {"layers": n_layers, "top_k": top_k, "n": self.guesses}
        # By row from here on; rows that are not written hold -1, "none".
        self._rows = {
            name: np.empty((0, *(sizes[axis] for axis in axes[1:])), types[name])
            for name, (_, axes) in ARRAYS.items()
            if name not in left_out
        }
        self._capacity = self._tokens = self._steps = 0
        self._step_rows = slice(0, 0)
        # Of tokens of decode until their derived values are made: MoE inputs, and the bits of active neurons.
        token_bytes = n_layers * (4 * hidden + 2 * top_k * groups)
        self._bulk = max(1, min(BULK_TOKENS, BULK_BYTES // token_bytes))
        self._h = np.empty((self._bulk, n_layers, hidden), np.float32)
        self._active = np.empty((self._bulk, n_layers, top_k, groups), np.uint16)
        self._layers: list[tuple] = []  # of the token of decode under way: what `decode_layer` was given
        self._lent: list[tuple] = []  # by layer: where that token's h and active may be written at once
        self._fed: tuple = ()  # conversation, position and id of that token
        self._kept: list[tuple] = []  # `_fed` and `_layers` of the tokens that wait
        self._held = 0  # the last so many rows wait
        self._handed = False  # the engine makes the guesses for the next layer
        self._names: list[str] = []
        self._next_name: str | None = None
        self._owners: dict[int, tuple[weakref.ref, int]] = {}

    def begin(self, name: str) -> None:
        """Name the conversation that the next new state begins; else it is called by its number."""
        self._next_name = name

    def begin_step(self, phase: int, state: Any, token_ids: Sequence[int]) -> None:
        """A pass of these tokens begins: PREFILL with one or more, DECODE with one.

        state  what the pass goes on from: `state.tokens` is the position of the first id; another object is another
               conversation
        """
        if self._held == self._bulk or (self._held and phase == PREFILL):
            self.flush()
        first, last, conversation = self._tokens, self._tokens + len(token_ids), self._conversation_of(state)
        self._step_rows = slice(first, last)
        self._layers = []
        if phase == DECODE:
            self._fed = conversation, state.tokens, token_ids[0]
            self._lent = list(zip(self._h[self._held], self._active[self._held], strict=True))
        else:
            places = np.arange(state.tokens, state.tokens + last - first)
            self._write_tokens(self._step_rows, phase, conversation, places, self._steps, token_ids)

    def lend(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Memory for a MoE layer of a token of decode: h float32 [hidden], active uint16 [top_k, groups].

        What is written there and given back in `decode_layer` needs no copy. Good until `end_step`.
        """
        return self._lent[layer]

    def decode_layer(
        self,
        layer: int,
        h: np.ndarray,
        experts: np.ndarray,
        weights: np.ndarray,
        active: np.ndarray,
        misses: int,
        guesses: np.ndarray | None = None,
    ) -> None:
        """One MoE layer of a token of decode, layers in order.

        h and active are copied at `end_step`, unless they are those of `lend`, and may change after it. The others are
        kept as they are until many tokens are worked on together: they must be new arrays at every call.

        layer            MoE ordinal
        h                float32 [hidden]: its input behind the norm, what its router saw
        experts, weights [top_k] in rank order
        active           uint16 [top_k, groups]: `ExpertStep.active`
        misses           blocks read on demand
        guesses          [n] for the *next* MoE layer where the engine has made them to prefetch by; else they are made
                         here, from h
        """
        self._layers.append((h, experts, weights, active, misses, guesses))

    def prompt_layer(
        self, layer: int, h: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, active: np.ndarray, misses: int
    ) -> None:
        """One MoE layer of a prompt pass: as `decode_layer`, with a first axis over the tokens of the pass.

        misses  blocks read for the whole pass
        """
        at, rows = self._step_rows, self._rows
        rows["experts"][at, layer] = experts
        rows["weights"][at, layer] = weights
        rows["live_misses"][at.start : at.stop - 1, layer] = -1
        rows["live_misses"][at.stop - 1, layer] = misses
        self._count_active(at, layer, active)
        if self._routers:
            inputs = np.ascontiguousarray(h)
            for ahead, name in GUESSES.items():
                if layer + ahead < self.n_layers:
                    rows[name][at, layer + ahead] = self._ask(layer + ahead, inputs)

    def end_step(self) -> None:
        """The pass has come to its end: from here on it is part of the trace."""
        at = self._step_rows
        if self._layers:
            self._keep()
        self._tokens, self._steps = at.stop, self._steps + 1

    def _keep(self) -> None:
        """Copy what the engine will use again of a token of decode, and hold on to the rest."""
        for (own_h, own_active), (h, _, _, active, _, _) in zip(self._lent, self._layers, strict=True):
            if h is not own_h:
                own_h[:] = h
            if active is not own_active:
                own_active[:] = active
        self._kept.append((self._fed, self._layers))
        self._held += 1
        self._layers = []

    def flush(self) -> None:
        """Derive what can be derived, for all tokens of decode that wait for it."""
        held, at = self._held, slice(self._tokens - self._held, self._tokens)
        if not held:
            return
        self._write_kept(at)
        for layer in range(self.n_layers):
            self._count_active(at, layer, self._active[:held, layer])
        nearest, furthest = 1 + self._handed, max(GUESSES)
        for target in range(1, self.n_layers):
            # All inputs that one router is asked about go through it together.
            sources = range(max(0, target - furthest), target - nearest + 1)
            if sources and self._routers:
                inputs = np.ascontiguousarray(self._h[:held, sources.start : sources.stop])
                chosen = self._ask(target, inputs)
                for place, layer in enumerate(sources):
                    self._rows[GUESSES[target - layer]][at, target] = chosen[:, place]
        self._held = 0

    def _write_kept(self, at: slice) -> None:
        """What waits as it was given: into its rows, all at once."""
        fed, layers = zip(*self._kept, strict=True)
        conversations, places, token_ids = zip(*fed, strict=True)
        steps = np.arange(self._steps - len(fed), self._steps)
        self._write_tokens(at, DECODE, conversations, places, steps, token_ids)
        rows, given = self._rows, [layer for token in layers for layer in token]
        _, experts, weights, _, misses, guesses = zip(*given, strict=True)
        for name, values in (("experts", experts), ("weights", weights)):
            rows[name][at] = np.concatenate(values).reshape(rows[name][at].shape)
        rows["live_misses"][at] = np.reshape(misses, (-1, self.n_layers))
        self._handed = guesses[0] is not None
        if self._handed:
            for place, chosen in enumerate(guesses):
                row, layer = divmod(place, self.n_layers)
                if layer + 1 < self.n_layers:
                    rows["guesses"][at.start + row, layer + 1] = chosen[: self.guesses]
        self._kept = []

    def _write_tokens(self, at: slice, phase: int, conversation, position, step, token_ids) -> None:
        """What holds for tokens whatever the layer; one value for all or one for each."""
        if at.stop > self._capacity:
            self._grow(at.stop)
        rows = self._rows
        rows["phase"][at], rows["conversation"][at], rows["position"][at] = phase, conversation, position
        rows["step"][at] = step
        if "token_ids" in rows:
            rows["token_ids"][at] = token_ids

    def trace(self, **taken: Any) -> Trace:
        """The trace so far, checked.

        taken  completes or replaces entries of meta.taken
        Raises TraceError where nothing was recorded.
        """
        if not self._tokens:
            raise TraceError("nothing was recorded: no token went through the engine")
        self.flush()
        arrays = {name: rows[: self._tokens].copy() for name, rows in self._rows.items()}
        meta = replace(self.meta, taken={"conversations": list(self._names), **self.meta.taken, **taken})
        made = Trace(meta, **arrays)
        made.check()
        return made

    def _conversation_of(self, state: Any) -> int:
        # By identity: states compare by content, and a weak reference tells a new object at an old address.
        known = self._owners.get(id(state))
        if known is not None and known[0]() is state:
            return known[1]
        number = len(self._names)
        self._names.append(self._next_name if self._next_name is not None else str(number))
        self._next_name = None
        self._owners[id(state)] = (weakref.ref(state), number)
        return number

    def _grow(self, needed: int) -> None:
        self._capacity = max(needed, FIRST_ROWS, 2 * self._capacity)
        for name, old in self._rows.items():
            # -1 wraps to 255 in `phase`, which every step writes.
            new = np.full((self._capacity, *old.shape[1:]), -1).astype(old.dtype)
            written = self._tokens - self._held
            new[:written] = old[:written]
            self._rows[name] = new

    def _count_active(self, at: slice, layer: int, active: np.ndarray) -> None:
        """active uint16 [tokens, top_k, groups] -> neurons and groups of each expert."""
        self._rows["active_neurons"][at, layer] = np.bitwise_count(active).sum(axis=-1, dtype=np.int32)
        self._rows["active_groups"][at, layer] = np.count_nonzero(active, axis=-1)

    def _ask(self, layer: int, h: np.ndarray) -> np.ndarray:
        """What the router of a layer makes of inputs h [..., hidden], rescaled by nothing: ids [..., guesses]."""
        from nemolab.kernels.router_many import router_many

        team, gates, biases, *limits = self._routers
        flat = h.reshape(-1, h.shape[-1])
        return router_many(team, gates[layer], biases[layer], flat, self.guesses, *limits).reshape(*h.shape[:-1], -1)
