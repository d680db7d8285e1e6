"""One token at a time on a card, experts coming from disk and from page-locked memory, beside the time of its bytes.

What a token has to move, counted, over the bandwidths of the same run: experts over the bus (copied at the rate of a
plain copy, read in place at that of a kernel that only adds up), blocks from disk (at the rate of direct reads of the
same store), dense weights out of the card's own memory. The longest of the three is the floor. What was read or copied
on a guess and never asked for raises no floor; it is told beside it. The three depend on one another in part (a layer's
dense weights are read once its experts' sum is there), so that no engine reaches the floor: what bus and dense weights
take one after the other is reported, too.

A synthetic checkpoint's routers route like nobody's, so tokens are sent where a trace says (`forced_routing`). Engines
stay open side by side and take turns where memory allows, else one follows the other; bandwidths are measured between
the samples of each. All must give the same logits, to the bit, for the first tokens of the warm-up: as many as make a
sample (`compared_tokens`), since engines that warm up for different times have no more in common.
"""

from __future__ import annotations

import hashlib
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from nemolab.engine.transfers import DEFAULT, TRANSFERS
from nemolab.errors import NemolabError, UsageError
from nemolab.measure.bench_replay import CACHED_SHARE
from nemolab.measure.disk_floor import DiskFloor
from nemolab.measure.forced_routing import Routing, every_expert_once, own_routing, recorded_routing, sticky_routing
from nemolab.measure.gpu_floors import open_bus, own_read_gb_s
from nemolab.measure.transfer import count_crossing
from nemolab.progress import say

PROMPT_TOKENS = 32
STEADY = 0.015  # of the hit rate: the last stretch of the warm-up and those before it differ by no more
LONGEST_WARM_UP = 400  # tokens
# Of a token: by the clock, by the CPU for all threads, and for the one that drives the card (it looks for choices).
_TIMES = {"ms": time.perf_counter, "cpu_ms": time.process_time, "driver_cpu_ms": time.thread_time}
COUNTED_TOKENS = 8  # whose active neurons are counted, after the samples


def bench_card_decode(
    path: str | Path,
    *,
    device: str = "cuda",
    transfers: Sequence[str] = (DEFAULT,),
    cached: float = CACHED_SHARE,
    prefetch: int = 4,
    tokens: int = 16,
    repeats: int = 9,
    vram_gib: float | None = None,
    trace: str | Path | None = None,
    own: bool = False,
    trials: Sequence[Mapping[str, Any]] = (),
    threads: int | None = None,
) -> dict[str, Any]:
    """Milliseconds a token by transfer strategy, and the least time of its bytes.

    path       a checkpoint or a store; cached  the share of its experts that stay in RAM, of 0 to 1
    tokens     in a sample; repeats  samples; prefetch  guesses read ahead a layer
    threads    of the CPU, for what an engine on a card computes there
    trials     fields of `nemolab.engine.Trials`, and another `prefetch`: each is measured beside none, with each
               strategy; where a trial keeps experts on the card, its floor is that of the bytes it had to copy
    trace      a routing trace to follow; own: follow the model's own routers; neither: synthetic draws
    returns    for each case (<strategy>, <strategy>_<trial>): <case>_ms (median), <case>_floor_ms, <case>_of_floor,
               <case>_hit_rate, <case>_reads (a token), <case>_needed_reads (of what was asked for) and more;
               copy_gb_s, in_place_gb_s, disk_gb_s, read_gb_s; same_bits (None with one case: nothing to compare),
               compared_tokens (whose logits were); rows
    Raises UsageError for settings that cannot be, EngineError without such a card, NemolabError when two strategies
    give different logits.
    """
    from nemolab.engine.arguments import find_store
    from nemolab.engine.gpu.device import open_device

    _check(transfers, cached, tokens, repeats, trace, own)
    card, store = open_device(device), find_store(path, None, "neuron")  # no store is made for a card that is not
    slots = max(store.config.top_k, round(cached * store.n_layers * store.n_experts))
    cases = [(transfer, _Case(trial, prefetch)) for trial in ({}, *trials) for transfer in transfers]
    guesses = _check_cases(cases, device, store.config)
    length = LONGEST_WARM_UP + tokens * (repeats + 1) + COUNTED_TOKENS
    if own:
        routing = own_routing()
    elif trace is not None:
        routing = recorded_routing(trace, store, guesses)
    else:
        routing = sticky_routing(length, store, guesses)
    settings = {
        "ram_cache_slots": slots,
        "vram_gib": vram_gib,
        "device": device,
        "threads": threads,
    }
    with open_bus(card) as bus, DiskFloor(store) as disk:
        shared = {"read": own_read_gb_s(card, repeats), "disk": []}
        card.release()  # what torch keeps of memory that a floor was measured on would stand in an engine's way
        runs = [_Run(store, routing, tokens, transfer, case, settings) for transfer, case in cases]
        together = len(runs) > 1 and vram_gib is None and fit_together(store, slots, len(runs))
        for group in [runs] if together else [[run] for run in runs]:
            shared["disk"] += _measure(group, repeats, bus, disk)
    bits = {run.bits for run in runs}
    if len(bits) > 1:
        raise NemolabError(f"{', '.join(run.name for run in runs)}: not all give the same logits")
    facts = {
        "model": Path(path).name,
        "device": card.name,
        "moe_layers": store.n_layers,
        "layers": store.config.num_hidden_layers,
        "experts": store.n_experts,
        "top_k": store.config.top_k,
        "cached": slots / (store.n_layers * store.n_experts),
        "slots": slots,
        "vram_gib": vram_gib,
        "routing": routing.name,
        "tokens": tokens,
        "compared_tokens": tokens if len(runs) > 1 else 0,
        "in_turns": together,
        "reads_are": disk.mode,
    }
    kind = "card_decode" if card.total_bytes else "twin_decode"
    return _answer(kind, runs, shared, facts)


def name_case(transfer: str, trial: Mapping[str, Any]) -> str:
    """A case as rows and figures name it.

    >>> name_case("rows", {"kept_gib": 0.5, "shared_first": True})
    'rows_kept_gib_0_5_shared_first'
    >>> name_case("pull", {"prefetch": 0})
    'pull_prefetch_0'
    """
    words = [name if value is True else f"{name}_{value}" for name, value in trial.items()]
    return re.sub(r"[^a-z0-9]", "_", "_".join([transfer, *words]))


class _Case:
    """What a trial asks of an engine.

    .asked  as it was given; .fields  those of `Trials`, .trials  made of them; .prefetch  its own, or that of all
    .guesses  that a layer makes for the next one
    """

    def __init__(self, asked: Mapping[str, Any], prefetch: int):
        from nemolab.engine import Trials

        self.asked = dict(asked)
        self.fields = {name: value for name, value in asked.items() if name != "prefetch"}
        self.trials, self.prefetch = Trials(**self.fields), asked.get("prefetch", prefetch)

    @property
    def guesses(self) -> int:
        return max(self.prefetch, self.trials.speculate)


class _Run:
    """One engine: its settings, its place in the trace, and what was found."""

    def __init__(self, store, routing: Routing, tokens: int, transfer: str, case: _Case, settings: dict):
        self.store, self.tokens, self.transfer, self.settings = store, tokens, transfer, settings
        self.case, self.routing = case, routing.with_guesses(case.guesses)
        self.name = name_case(transfer, case.asked)
        self.samples: dict[str, list[float]] = {name: [] for name in (*_TIMES, "copy", "in_place")}
        self.bits, self.found, self._at = "", {}, 0

    def open(self, stack: ExitStack) -> None:
        from nemolab.engine import Engine

        parts = {"store": self.store, "transfer": self.transfer}
        parts |= {"prefetch": self.case.prefetch, "trials": self.case.trials}
        self.engine = stack.enter_context(Engine(None, **parts, **self.settings))
        random = np.random.default_rng(0)
        vocab = self.engine.config.vocab_size
        self._ids = random.integers(vocab, size=4096).tolist()
        self._state = self.engine.new_state()
        self.engine.last_logits(self._ids[:PROMPT_TOKENS], self._state)

    def warm_up(self) -> None:
        """Until what the cache holds no longer changes what hits; the first stretch's logits are kept as a hash."""
        whole = self.settings["ram_cache_slots"] == self.store.n_layers * self.store.n_experts
        digest, rates, used, steady = hashlib.sha256(), [], 0, False
        if whole:
            fill = every_expert_once(self.store, self.case.guesses)
            for token in range(len(fill.experts)):
                fill.send(self.engine, token)
                self._step()
            self.engine.force_routing(None, None)
        while used < LONGEST_WARM_UP and not steady:
            before = self._counts()
            for _ in range(self.tokens):
                logits = self._step(send=True)
                if not rates:
                    digest.update(logits.numpy().tobytes())
            used += self.tokens
            rates.append(_hit_rate(before, self._counts()))
            steady = len(rates) >= 4 and abs(rates[-1] - statistics.mean(rates[-4:-1])) <= STEADY
        self.bits = digest.hexdigest()
        self.found |= {"warm_up_tokens": used, "steady": steady}
        self._before, self._kept_before = self._counts(), self._kept()

    def sample(self, bus) -> None:
        started = [clock() for clock in _TIMES.values()]
        for _ in range(self.tokens):
            self._step(send=True)
        for (name, clock), begin in zip(_TIMES.items(), started, strict=True):
            self.samples[name].append(1e3 * (clock() - begin) / self.tokens)
        self.samples["copy"].append(bus.copy_gb_s())
        self.samples["in_place"].append(bus.in_place_gb_s())

    def count(self) -> None:
        """What the samples' tokens hit, read and moved."""
        before, after = self._before, self._counts()
        tokens = self.tokens * len(self.samples["ms"])
        per_token = {name: (after[name] - before[name]) / tokens for name in after}
        kept, memory = self._kept(), self.engine.memory()["card"]
        with self.engine.record(cold=False, token_ids=False) as recorder:
            for _ in range(COUNTED_TOKENS):
                self._step(send=True)
        recorded = recorder.trace()
        inter, width = self.store.expert_shape
        neurons, groups = float(recorded.active_neurons.mean()), float(recorded.active_groups.mean())
        lookups = copied = needed = self.store.n_layers * self.store.config.top_k
        if kept:  # a trial copied what was not on the card yet, and on guesses some for nothing
            since = {name: (kept[name] - self._kept_before[name]) / tokens for name in kept}
            copied, needed = since["copied"] + since["early"], since["copied"] + since["early_used"]
        each = count_crossing(inter, width, neurons, groups)[self.transfer]
        self.found |= {
            "transfer": self.transfer,
            "trials": self.case.fields,
            "prefetch": self.case.prefetch,
            "hit_rate": _hit_rate(before, after),
            "misses": per_token["misses"],
            "reads": per_token["reads"],
            "bytes_read": per_token["bytes_read"],
            "needed_reads": per_token["misses"] + per_token["prefetch_useful"],
            "late": per_token["prefetch_late"],
            "wasted": per_token["prefetch_wasted"],
            "active": neurons / inter,
            "active_groups": groups / (inter // 16),
            "bytes_copied": copied * each.copied,
            "needed_copied": needed * each.copied,
            "bytes_in_place": lookups * each.in_place,
            "dense_bytes": memory["found"]["dense_bytes"],
            "page_locked_bytes": memory["page_locked_bytes"],
        }

    def _step(self, send: bool = False):
        if send:
            self.routing.send(self.engine, self._at)
        logits = self.engine.step(self._ids[(PROMPT_TOKENS + self._at) % len(self._ids)], self._state)
        self._at += send
        return logits

    def _kept(self) -> dict[str, int]:
        return self.engine.memory()["card"]["kept"]

    def _counts(self) -> dict[str, int]:
        return self.engine.stats()["decode"]


def _measure(runs: list[_Run], repeats: int, bus, disk: DiskFloor) -> list[float]:
    """Open engines side by side, and take samples in turns. GB/s of the disk between the rounds."""
    disk_gb_s = []
    with ExitStack() as stack:
        for run in runs:
            say(f"decode, {run.name}: opening and warming up")
            run.open(stack)
            run.warm_up()
        for number in range(repeats):
            for run in runs[:: 1 if number % 2 == 0 else -1]:
                run.sample(bus)
            disk_gb_s.append(disk.gb_s())
        for run in runs:
            run.count()
    return disk_gb_s


def _answer(kind: str, runs: list[_Run], shared: dict[str, list[float]], facts: dict[str, Any]) -> dict[str, Any]:
    """Medians and ratios by strategy, and the rows. kind: of the rows' names; twins' are no card's."""
    read_gb_s, disk = (statistics.median(shared[name]) for name in ("read", "disk"))
    answer: dict[str, Any] = {}
    rows = []
    for run in runs:
        found, samples = run.found, run.samples
        copy, in_place = (statistics.median(samples[name]) for name in ("copy", "in_place"))
        floors = {
            "bus_ms": 1e-6 * (found["needed_copied"] / copy + found["bytes_in_place"] / in_place),
            "disk_ms": 1e-6 * found["needed_reads"] * run.store.block_bytes / disk,
            "dense_ms": 1e-6 * found["dense_bytes"] / read_gb_s,
        }
        bound = max(floors, key=floors.get)
        floors |= {"floor_ms": floors[bound], "bus_and_dense_ms": floors["bus_ms"] + floors["dense_ms"]}
        middle = {name: statistics.median(samples[name]) for name in _TIMES}
        answer |= {f"{run.name}_{name}": value for name, value in (*middle.items(), *floors.items())}
        answer |= {f"{run.name}_{name}": found[name] for name in ("hit_rate", "misses", "reads", "needed_reads")}
        answer[f"{run.name}_of_floor"] = middle["ms"] / floors["floor_ms"]
        answer[f"{run.name}_of_bus_and_dense"] = middle["ms"] / floors["bus_and_dense_ms"]
        settings = facts | found | floors | {"floor_is": bound.removesuffix("_ms")}
        settings |= {name: middle[name] for name in ("cpu_ms", "driver_cpu_ms")}
        bandwidths = {"copy_gb_s": copy, "in_place_gb_s": in_place, "disk_gb_s": disk, "read_gb_s": read_gb_s}
        rows.append(
            {
                "name": f"{kind}.{run.name}",
                "values": samples["ms"],
                "unit": "ms/token",
                "settings": settings | bandwidths,
            }
        )
    answer |= {"read_gb_s": read_gb_s, "disk_gb_s": disk}
    for name in ("copy", "in_place"):
        shared = shared | {name: [value for run in runs for value in run.samples[name]]}
        answer[f"{name}_gb_s"] = statistics.median(shared[name])
    told = {name: facts[name] for name in ("model", "device", "reads_are")}
    rows += [
        {"name": f"{kind}.{name}_bandwidth", "values": values, "unit": "GB/s", "settings": told}
        for name, values in shared.items()
    ]
    for run in runs:
        # A trial against the same strategy without it; a strategy against the first.
        other = name_case(run.transfer, {}) if run.case.asked else runs[0].name
        if run.name != other:
            answer[f"{other}_is_faster_than_{run.name}"] = answer[f"{run.name}_ms"] / answer[f"{other}_ms"]
    compared = facts["compared_tokens"]
    answer |= {"same_bits": True if compared else None, "compared_tokens": compared}
    return answer | {"routing": facts["routing"], "rows": rows}


def _hit_rate(before: dict[str, int], after: dict[str, int]) -> float:
    return (after["hits"] - before["hits"]) / (after["lookups"] - before["lookups"])


def fit_together(store, slots: int, engines: int, on_card: bool = True) -> bool:
    """Is there RAM for so many engines at once? One that is not on a card holds all dense weights there."""
    from nemolab.engine.gpu.plan import host_dense_bytes
    from nemolab.store.cache import RING
    from nemolab.system.memory import read_memory

    dense_bytes = host_dense_bytes(store) if on_card else sum(module.nbytes for module in store.dense.values())
    of_each = (slots + 2 * RING) * store.block_bytes + dense_bytes
    return engines * of_each <= read_memory().room_bytes


def _check_cases(cases: list[tuple[str, _Case]], device: str, config) -> int:
    """The most guesses that a case makes. Raises EngineError for what an engine would refuse, before any is opened."""
    from nemolab.engine.arguments import check_prefetch

    for transfer, case in cases:
        check_prefetch(case.prefetch, config)
        case.trials.check(device, transfer, config.reachable_experts)
    return max(case.guesses for _, case in cases)


def _check(transfers, cached, tokens, repeats, trace, own) -> None:
    unknown = [name for name in transfers if name not in TRANSFERS]
    if unknown or not transfers or len(set(transfers)) < len(transfers):
        raise UsageError(
            f"transfer {', '.join(transfers) or 'nothing'}: one or more of {', '.join(TRANSFERS)} are needed"
        )
    if not 0 < cached <= 1:
        raise UsageError(f"{cached} of the experts cached; a share above 0 and up to 1 is needed")
    if tokens < 1 or repeats < 3:
        raise UsageError(f"{tokens} tokens a sample, {repeats} samples; 1 and 3 at least are needed")
    if own and trace is not None:
        raise UsageError("follow a trace or the model's own routers, not both")
