"""The replay's own speed: every policy, the whole LRU curve, and libCacheSim's trace runner beside both in one run.

Times are wall seconds on one thread after a first call, which compiles or reads what was compiled before. Rates are
million lookups a second.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemolab.errors import NemolabError, UsageError
from nemolab.progress import say
from nemolab.simulate import POLICY_NAMES, Curve, Lookups, Replay, from_trace, lru_curve, replay
from nemolab.trace import DECODE, open_trace
from nemolab.trace.synthetic import sticky_trace

CACHED_SHARE = 0.24  # of all blocks: the cache of claim A6
SIZES = 32
HASH_POWERS = (12, 13, 14, 16, 20, 24)  # of libCacheSim's table, 24 being its default; it gets the fastest


def bench_replay(
    trace: str | Path | None = None, tokens: int = 5000, repeats: int = 5, rival: bool = True
) -> dict[str, Any]:
    """Rates of every policy, seconds of the whole curve, ratios to libCacheSim at SIZES sizes.

    trace    a file of routing; default: a synthetic one of Super's shape, `tokens` x 40 layers x top 22 of 512 experts
    rival    whether to run libCacheSim, where it is installed (`pip install libcachesim`)
    returns  million_per_s: policy -> million lookups a second (median), and of the slowest; curve_s; first_call_s by
             policy and for the curve; with the rival also of_libcachesim (its seconds for LRU at SIZES sizes, one run
             each, over ours) and curve_of_libcachesim (over one curve, which holds all sizes); rows
    The rival runs lookups one by one, so in that part ours do too: the same keys as batches of one, blocks of size 1.
    """
    if repeats < 3:
        raise UsageError(f"{repeats} rounds give no median and no spread; take at least 3")
    recorded = sticky_trace(tokens) if trace is None else open_trace(trace)
    lookups = from_trace(recorded)
    slots = max(1, round(CACHED_SHARE * lookups.n_keys))
    settings = {
        "trace": recorded.meta.taken.get("kind") if trace is None else Path(trace).name,
        "lookups": len(lookups.keys),
        "batches": lookups.n_batches,
        "blocks": lookups.n_keys,
        "slots": slots,
        "threads": 1,
    }
    found, rows = _time_ours(lookups, slots, repeats, settings)
    if rival and importlib.util.find_spec("libcachesim") is not None:
        beside, more_rows = _time_rival(lookups, repeats, settings)
        return found | beside | {"rows": rows + more_rows}
    why = "libcachesim is not installed (pip install libcachesim)" if rival else "not asked for"
    return found | {"libcachesim": f"not run: {why}", "rows": rows}


def _time_ours(lookups: Lookups, slots: int, repeats: int, settings: dict[str, Any]) -> tuple[dict[str, Any], list]:
    """Every policy at one size, and the whole curve: (the answer's part, rows)."""
    count = len(lookups.keys)
    rows, speeds, first_call_s = [], {}, {}
    for policy in POLICY_NAMES:
        say(f"{policy} ...")

        def run(policy: str = policy) -> Replay:
            return replay(lookups, policy, slots=slots)

        first_call_s[policy] = _time(run)
        rates = [count / _time(run) / 1e6 for _ in range(repeats)]
        speeds[policy] = statistics.median(rates)
        about = settings | {"policy": policy, "hit_rate": run().row("decode")["hit_rate"]}
        rows.append(_row(policy.replace("-", "_"), rates, "million lookups/s", about))
    say("the whole curve ...")

    def draw() -> Curve:
        return lru_curve(lookups, in_slots=True)

    first_call_s["curve"] = _time(draw)
    curve_s = [_time(draw) for _ in range(repeats)]
    rows.append(_row("curve", curve_s, "s", settings))
    slowest = min(speeds, key=speeds.get)
    return {
        "lookups": count,
        "million_per_s": speeds,
        "lru_million_per_s": speeds["lru"],
        "slowest_policy": slowest,
        "slowest_million_per_s": speeds[slowest],
        "curve_s": statistics.median(curve_s),
        "first_call_s": first_call_s,
    }, rows


def one_by_one(lookups: Lookups) -> Lookups:
    """The same keys, each a batch, a step and a token of its own: what a cache of single requests sees."""
    count = len(lookups.keys)
    return dataclasses.replace(
        lookups,
        starts=np.arange(count + 1),
        layer=(lookups.keys // lookups.n_experts).astype(np.int32),
        step=np.arange(count),
        phase=np.full(count, DECODE, np.uint8),
        conversation=np.zeros(count, np.int32),
        tokens=np.ones(count, np.int32),
        guesses=None,
    )


def write_requests(path: Path, keys: np.ndarray) -> None:
    """A trace in libCacheSim's oracleGeneral form: time, id, size and the place of the next request, 24 bytes each."""
    kinds = [("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")]
    requests = np.zeros(len(keys), np.dtype(kinds))
    requests["time"], requests["id"], requests["size"] = np.arange(len(keys)), keys + 1, 1
    order = np.argsort(keys, kind="stable")
    again = np.diff(keys[order]) == 0
    requests["next"] = np.iinfo(np.int64).max  # never
    requests["next"][order[:-1][again]] = order[1:][again]
    requests.tofile(path)


class _Rival(NamedTuple):
    """libCacheSim's trace runner on a file of requests. power: of its hash table."""

    library: Any
    reader: Any
    power: int

    def miss_rate(self, slots: int) -> float:
        self.reader.reset()
        return self.library.LRU(cache_size=slots, hashpower=self.power).process_trace(self.reader)[0]


def _time_rival(lookups: Lookups, repeats: int, settings: dict[str, Any]) -> tuple[dict[str, Any], list]:
    """LRU at SIZES sizes: libCacheSim's trace runner, our replay, our curve, in turns, on the same requests.

    Returns the answer's part, and rows.
    """
    unit = one_by_one(lookups)
    sizes = sorted({max(1, round(share * unit.n_keys)) for share in np.linspace(1 / SIZES, 1, SIZES)})
    with tempfile.TemporaryDirectory(prefix="nemolab-bench-") as folder:
        path = Path(folder) / "requests.oracleGeneral"
        write_requests(path, unit.keys)
        say("libCacheSim ...")
        rival = _open_rival(path, sizes[len(sizes) // 4])
        _check_alike(rival, unit, sizes)
        jobs: dict[str, Callable[[], object]] = {
            "libcachesim": lambda: [rival.miss_rate(slots) for slots in sizes],
            "replay": lambda: [replay(unit, slots=slots) for slots in sizes],
            "curve": lambda: lru_curve(unit, in_slots=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for number in range(repeats):
            say(f"round {number + 1} of {repeats} at {len(sizes)} sizes ...")
            for name in list(jobs)[:: 1 if number % 2 == 0 else -1]:
                seconds[name].append(_time(jobs[name]))
    settings = {name: value for name, value in settings.items() if name != "slots"} | {
        "libcachesim": importlib.metadata.version("libcachesim"),
        "hashpower": rival.power,
        "sizes": len(sizes),
        "least_slots": sizes[0],
        "most_slots": sizes[-1],
        "batches": unit.n_batches,
        "policy": "lru",
    }
    return _compare(seconds, len(unit.keys) * len(sizes), settings)


def _open_rival(path: Path, slots: int) -> _Rival:
    """With the hash table of HASH_POWERS with which it is fastest at this size."""
    import libcachesim

    reader = libcachesim.TraceReader(
        str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE, libcachesim.ReaderInitParam()
    )
    rivals = [_Rival(libcachesim, reader, power) for power in HASH_POWERS]
    return min(rivals, key=lambda rival: _time(lambda: rival.miss_rate(slots)))


def _check_alike(rival: _Rival, unit: Lookups, sizes: list[int]) -> None:
    """The same misses at every size, or the comparison means nothing; and all are warm then."""
    curve = lru_curve(unit, in_slots=True)
    for slots in sizes:
        theirs, ours = rival.miss_rate(slots), 1 - curve.hits_at(slots) / curve.lookups
        replayed = replay(unit, slots=slots).missed.mean()
        if max(abs(theirs - ours), abs(theirs - replayed)) > 1e-9:
            raise NemolabError(
                f"libCacheSim misses {theirs:.9f} at {slots} slots, our curve {ours:.9f}, our replay {replayed:.9f}"
            )


def _compare(seconds: dict[str, list[float]], count: int, settings: dict[str, Any]) -> tuple[dict[str, Any], list]:
    """Rates and ratios of rounds in which libcachesim and replay looked up `count` keys. Returns the part, and rows."""
    rates = {name: [count / second / 1e6 for second in seconds[name]] for name in ("libcachesim", "replay")}
    ratios = {
        name: [theirs / ours for theirs, ours in zip(seconds["libcachesim"], seconds[name], strict=True)]
        for name in ("replay", "curve")
    }
    return {
        "libcachesim_million_per_s": statistics.median(rates["libcachesim"]),
        "one_by_one_million_per_s": statistics.median(rates["replay"]),
        "of_libcachesim": statistics.median(ratios["replay"]),
        "curve_of_libcachesim": statistics.median(ratios["curve"]),
    }, [
        _row("libcachesim", rates["libcachesim"], "million lookups/s", settings),
        _row("one_by_one", rates["replay"], "million lookups/s", settings),
        _row("one_by_one_curve", seconds["curve"], "s", settings),
        _row("of_libcachesim", ratios["replay"], "ratio", settings),
        _row("curve_of_libcachesim", ratios["curve"], "ratio", settings),
    ]


def _row(name: str, values: list[float], unit: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {"name": f"replay.{name}", "values": values, "unit": unit, "settings": settings}


def _time(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
