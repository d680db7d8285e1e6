"""What the cache's bookkeeping costs the CPU for one token: decisions, tables and rows, with reads that cost nothing.

880 lookups a token, as Nemotron-3-Super makes them: 40 layers x 22 of 512 experts, drawn with the repetition and the
hit rate that were published (`trace.synthetic.sticky_trace`). Times are of CPU, of this thread alone, so that another
process makes them longer only through the caches it shares with us.

An engine on a card does more: it turns rows into addresses and keeps the table there true. That is
timed on a card alone (`card`, `card_ahead`), with the copies of what changed to the card.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np

from nemolab.errors import UsageError
from nemolab.measure.bench_replay import CACHED_SHARE
from nemolab.policy import Cache, Policy
from nemolab.store.cache import ExpertCache
from nemolab.trace.synthetic import sticky_trace
from nemolab.units import PAGE_BYTES

TARGET_MS = 1.0  # of CPU a token
LAYERS, EXPERTS, TOP_K = 40, 512, 22
GUESSES_RIGHT = 0.72  # of the guesses for the next layer, as was published


def bench_bookkeeping(
    tokens: int = 20,
    repeats: int = 15,
    prefetch: int = 4,
    policy: str = "lru",
    warm_up: int = 250,
    shape: tuple[int, int, int] = (LAYERS, EXPERTS, TOP_K),
    device: str = "cpu",
) -> dict[str, Any]:
    """CPU milliseconds a token of `ExpertCache.lookup_rows`, of `fetch` and its `wait` in its place, of lookups with
    reads ahead, and of the decisions alone; and of all that an engine on a card does in the place of `fetch`.

    tokens    in a sample; repeats  samples; warm_up  tokens before the first sample, which fill the cache
    prefetch  guesses read ahead a layer in the second case
    shape     (layers, experts, top_k)
    device    "cuda": also as on that card
    returns   lookup_ms, fetch_ms, lookup_ahead_ms (with the prefetch of each layer), decisions_ms (medians a token),
              on a card card_ms and card_ahead_ms; of_target and ahead_of_target (of lookups), hit_rate and
              hit_rate_ahead, rows
    Raises UsageError for too few samples, EngineError where there is no such card.
    """
    if repeats < 3:
        raise UsageError(f"{repeats} rounds give no median and no spread; take at least 3")
    if device != "cpu":
        from nemolab.engine.gpu.device import check_device

        check_device(device)
    layers, experts, top_k = shape
    slots = max(top_k, round(CACHED_SHARE * layers * experts))
    trace = sticky_trace(warm_up + tokens * repeats, layers, experts, top_k)
    guesses = draw_guesses(trace.experts, experts, prefetch)
    with ExitStack() as stack:
        plain, fetched, ahead = (stack.enter_context(_Bookkeeping(slots, shape, policy)) for _ in range(3))
        decisions = _Decisions(slots, shape, plain.policy)
        cases: dict[str, Callable[[int], float]] = {
            "decisions": lambda token: decisions.run(trace.experts[token]),
            "lookup": lambda token: plain.run(trace.experts[token], None),
            "fetch": lambda token: fetched.run(trace.experts[token], None),
            "lookup_ahead": lambda token: ahead.run(trace.experts[token], guesses[token]),
        }
        fetched.fetch_and_wait()
        if device != "cpu":
            card, card_ahead = (stack.enter_context(_Bookkeeping(slots, shape, policy)) for _ in range(2))
            for book in (card, card_ahead):
                book.keep_table(stack.enter_context(_Table(book.cache, shape, device)))
            cases["card"] = lambda token: card.run(trace.experts[token], None)
            cases["card_ahead"] = lambda token: card_ahead.run(trace.experts[token], guesses[token])
        for case in cases.values():
            for token in range(warm_up):
                case(token)
        before = [book.hits_and_lookups() for book in (plain, ahead)]
        samples: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(repeats):
            stretch = range(warm_up + number * tokens, warm_up + (number + 1) * tokens)
            for name in list(cases)[:: 1 if number % 2 == 0 else -1]:
                samples[name].append(1e3 * sum(map(cases[name], stretch)) / tokens)
        after = [book.hits_and_lookups() for book in (plain, ahead)]
    rates = [(new[0] - old[0]) / (new[1] - old[1]) for new, old in zip(after, before, strict=True)]
    settings = {
        "layers": layers,
        "experts": experts,
        "top_k": top_k,
        "lookups": layers * top_k,
        "slots": slots,
        "policy": policy,
        "tokens": tokens,
        "trace": "sticky",
        "time": "CPU, one thread",
        "target_ms": TARGET_MS,
    }
    chosen = {
        "decisions": {"prefetch": 0, "hit_rate": rates[0]},
        "lookup": {"prefetch": 0, "hit_rate": rates[0]},
        "fetch": {"prefetch": 0, "hit_rate": rates[0]},
        "lookup_ahead": {"prefetch": prefetch, "hit_rate": rates[1], "guesses_right": GUESSES_RIGHT},
    }
    chosen |= {"card": chosen["fetch"], "card_ahead": chosen["lookup_ahead"]}
    median = {name: statistics.median(values) for name, values in samples.items()}
    return {
        **{f"{name}_ms": value for name, value in median.items()},
        "of_target": median["lookup"] / TARGET_MS,
        "ahead_of_target": median["lookup_ahead"] / TARGET_MS,
        "hit_rate": rates[0],
        "hit_rate_ahead": rates[1],
        "rows": [
            {"name": f"bookkeeping.{name}", "values": values, "unit": "ms/token", "settings": settings | chosen[name]}
            for name, values in samples.items()
        ],
    }


class _Decisions:
    """Who stays and who leaves, and nothing else."""

    def __init__(self, slots: int, shape: tuple[int, int, int], policy: Policy):
        self._experts = shape[1]
        self._cache = Cache(shape[0] * shape[1], slots, 1, policy=policy)

    def run(self, chosen: np.ndarray) -> float:
        """CPU seconds of one token. chosen: (layers, top_k)"""
        batches = (chosen + self._experts * np.arange(len(chosen))[:, None]).tolist()
        started = time.thread_time()
        for keys in batches:
            self._cache.batch(keys)
        return time.thread_time() - started


class _Bookkeeping:
    """The cache of a running engine over blocks of one page each, none of which is read.

    .cache; .run asks it in one step until `fetch_and_wait` or `keep_table` says otherwise
    """

    def __init__(self, slots: int, shape: tuple[int, int, int], policy: str):
        layers, experts, top_k = shape
        store = SimpleNamespace(
            block_bytes=PAGE_BYTES, n_layers=layers, n_experts=experts, config=SimpleNamespace(top_k=top_k)
        )
        self._reader = _NothingIsRead()
        self.cache = ExpertCache(store, slots=slots, policy=policy, reader=self._reader)
        self.policy, self._look_up = self.cache.policy, self.cache.lookup_rows

    def __enter__(self) -> _Bookkeeping:
        return self

    def __exit__(self, *_) -> None:
        self.cache.close()

    def fetch_and_wait(self) -> None:
        self._look_up = lambda *batch: self.cache.fetch(*batch).wait()

    def keep_table(self, table: _Table) -> None:
        self._look_up = table.fetch_and_wait

    def run(self, chosen: np.ndarray, guesses: np.ndarray | None) -> float:
        """CPU seconds of one token. chosen: (layers, top_k); guesses: (layers, n), each made for that layer"""
        cache, land, look_up = self.cache, self._reader.land, self._look_up
        turns = list(enumerate(chosen.tolist()))
        ahead = [] if guesses is None else list(enumerate(guesses[1:].tolist(), start=1))
        started = time.thread_time()
        for (layer, experts), then in zip_longest(turns, ahead):
            look_up(layer, experts)
            if then is not None:
                cache.prefetch(*then)
                land()
        return time.thread_time() - started

    def hits_and_lookups(self) -> tuple[int, int]:
        counts = self.cache.stats()["decode"]
        return counts["hits"], counts["lookups"]


class _Table:
    """What an engine on a card has between its cache and its kernels: locked memory, addresses, a table on the card."""

    def __init__(self, cache: ExpertCache, shape: tuple[int, int, int], device: str):
        from nemolab.engine.gpu.cache_memory import CacheMemory
        from nemolab.engine.gpu.device import open_device
        from nemolab.engine.gpu.expert_fetch import ExpertFetcher
        from nemolab.engine.gpu.table import ExpertTable, TableKeeper

        self._cache, self._device = cache, open_device(device)
        self._table = ExpertTable(*shape[:2], self._device)
        self._memory = CacheMemory(cache, self._device)
        self._keeper = cache.watcher = TableKeeper(self._table, self._memory)
        self._fetcher = ExpertFetcher(cache, self._memory, self._keeper, self._device)

    def __enter__(self) -> _Table:
        return self

    def fetch_and_wait(self, layer: int, experts: list[int]) -> None:
        """As a token does in each layer: what changed is told to the card, then experts are found."""
        self._table.send(layer)
        fetch = self._fetcher.fetch(layer, experts)
        if fetch.missing:
            fetch.wait()

    def __exit__(self, *_) -> None:
        self._cache.watcher = None
        self._device.wait()
        for part in (self._fetcher, self._memory, self._table):
            part.close()


class _NothingIsRead:
    """In a reader's place: what is asked for is there at once; what is read ahead once `land` is called."""

    threads = 0  # that help with what is fetched

    def __init__(self):
        self._under_way: list[Callable[[], None]] = []

    def read_into(self, block: int, buffer: np.ndarray) -> None: ...

    def read_many(self, jobs: Iterable[tuple[int, np.ndarray]]) -> None: ...

    def submit(self, task: Callable[[], None]) -> None:
        self._under_way.append(task)

    def land(self) -> None:
        for task in self._under_way:
            task()
        self._under_way.clear()


def draw_guesses(experts: np.ndarray, n_experts: int, n: int) -> np.ndarray:
    """(tokens, layers, n): a layer's own first choices, some exchanged for any expert at random."""
    random = np.random.default_rng(0)
    guesses = experts[:, :, :n].copy()
    wrong = random.random(guesses.shape) >= GUESSES_RIGHT
    guesses[wrong] = random.integers(n_experts, size=int(wrong.sum()))
    return guesses
