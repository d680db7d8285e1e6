"""The replay's own speed: every policy, the whole LRU curve, and libCacheSim's trace runner beside both in one run.

Times are wall seconds on one thread after a warm-up that compiles. Figures are lookups a second.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np

from nemolab.errors import NemolabError, UsageError
from nemolab.progress import say
from nemolab.simulate import DECODE, POLICY_NAMES, Lookups, from_trace, lru_curve, replay
from nemolab.trace import open_trace
from nemolab.trace.synthetic import sticky_trace

CACHED_SHARE = 0.24  # of all blocks: a cache of the size that is run on a machine of 32 GB
SIZES = 32
HASH_POWERS = (12, 13, 14, 16, 20, 24)  # of libCacheSim's table, 24 being its default; it gets the fastest


def bench_replay(
    trace: str | Path | None = None, tokens: int = 5000, repeats: int = 5, rival: bool = True
) -> dict[str, Any]:
    """Lookups a second of every policy, seconds of the whole curve, ratios to libCacheSim at SIZES sizes.

    trace    a file of routing; default: a synthetic one of Super's shape, `tokens` x 40 layers x top 22 of 512 experts
    rival    whether to run libCacheSim, where it is installed (`pip install libcachesim`)
    returns  policies: name -> lookups a second (median); slowest_policy; curve_s; compile_s; with the rival also
             of_libcachesim (its seconds for LRU at SIZES sizes, one run each, over ours) and curve_of_libcachesim (over
             one curve, which holds all sizes); rows
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
    count = len(lookups.keys)
    rows, speeds, compile_s = [], {}, {}
    for policy in POLICY_NAMES:
        say(f"{policy} ...")
        compile_s[policy] = _warm_up(lambda policy=policy: replay(lookups, policy, slots=slots))
        seconds = [_timed(lambda policy=policy: replay(lookups, policy, slots=slots)) for _ in range(repeats)]
        rates = [count / second / 1e6 for second in seconds]
        speeds[policy] = statistics.median(rates)
        hit_rate = replay(lookups, policy, slots=slots).row("decode")["hit_rate"]
        rows.append(
            _row(
                policy.replace("-", "_"),
                rates,
                "million lookups/s",
                settings | {"policy": policy, "hit_rate": hit_rate},
            )
        )
    say("the whole curve ...")
    compile_s["curve"] = _warm_up(lambda: lru_curve(lookups, in_slots=True))
    curve_s = [_timed(lambda: lru_curve(lookups, in_slots=True)) for _ in range(repeats)]
    rows.append(_row("curve", curve_s, "s", settings))
    found: dict[str, Any] = {
        "lookups": count,
        "policies": speeds,
        "lru_million_per_s": speeds["lru"],
        "slowest_policy": min(speeds, key=speeds.get),
        "slowest_million_per_s": min(speeds.values()),
        "curve_s": statistics.median(curve_s),
        "first_call_s": compile_s,
    }
    if rival and importlib.util.find_spec("libcachesim") is not None:
        beside = _run_rival(lookups, repeats, settings)
        rows += beside.pop("rows")
        found |= beside
    else:
        why = "libcachesim is not installed (pip install libcachesim)" if rival else "not asked for"
        found["libcachesim"] = f"not run: {why}"
    return found | {"rows": rows}


def one_by_one(lookups: Lookups) -> Lookups:
    """The same keys, each a batch, a step and a token of its own: what a cache of single requests sees."""
    count = len(lookups.keys)
    return changed(
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


def _run_rival(lookups: Lookups, repeats: int, settings: dict[str, Any]) -> dict[str, Any]:
    """LRU at SIZES sizes: libCacheSim's trace runner, our replay, our curve, in turns, on the same requests."""
    import libcachesim

    unit = one_by_one(lookups)
    sizes = sorted({max(1, round(share * unit.n_keys)) for share in np.linspace(1 / SIZES, 1, SIZES)})
    with tempfile.TemporaryDirectory(prefix="nemolab-bench-") as folder:
        path = Path(folder) / "requests.oracleGeneral"
        write_requests(path, unit.keys)
        reader = libcachesim.TraceReader(
            str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE, libcachesim.ReaderInitParam()
        )

        def theirs(slots: int, power: int) -> float:
            reader.reset()
            return libcachesim.LRU(cache_size=slots, hashpower=power).process_trace(reader)[0]

        middle = sizes[len(sizes) // 4]
        say("libCacheSim ...")
        power = min(HASH_POWERS, key=lambda power: _timed(lambda: theirs(middle, power)))
        curve = lru_curve(unit, in_slots=True)
        for slots in sizes:  # the same hits, or the comparison means nothing; and both are warm then
            rates = theirs(slots, power), 1 - curve.hits_at(slots) / curve.lookups
            if abs(rates[0] - rates[1]) > 1e-9 or replay(unit, slots=slots).missed.sum() != round(
                rates[0] * len(unit.keys)
            ):
                raise NemolabError(f"libCacheSim misses {rates[0]:.9f} at {slots} slots, we {rates[1]:.9f}")
        jobs: dict[str, Callable[[], object]] = {
            "libcachesim": lambda: [theirs(slots, power) for slots in sizes],
            "replay": lambda: [replay(unit, slots=slots) for slots in sizes],
            "curve": lambda: lru_curve(unit, in_slots=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for number in range(repeats):
            say(f"round {number + 1} of {repeats} at {len(sizes)} sizes ...")
            for name in list(jobs)[:: 1 if number % 2 == 0 else -1]:
                seconds[name].append(_timed(jobs[name]))
    settings = settings | {
        "libcachesim": importlib.metadata.version("libcachesim"),
        "hashpower": power,
        "sizes": len(sizes),
        "batches": "of one",
        "policy": "lru",
    }
    runs = len(unit.keys) * len(sizes) / 1e6
    rates = {name: [runs / second for second in seconds[name]] for name in ("libcachesim", "replay")}
    ratios = {
        name: [theirs / ours for theirs, ours in zip(seconds["libcachesim"], seconds[name], strict=True)]
        for name in ("replay", "curve")
    }
    return {
        "libcachesim_million_per_s": statistics.median(rates["libcachesim"]),
        "one_by_one_million_per_s": statistics.median(rates["replay"]),
        "of_libcachesim": statistics.median(ratios["replay"]),
        "curve_of_libcachesim": statistics.median(ratios["curve"]),
        "rows": [
            _row("libcachesim", rates["libcachesim"], "million lookups/s", settings),
            _row("one_by_one", rates["replay"], "million lookups/s", settings),
            _row("one_by_one_curve", seconds["curve"], "s", settings),
            _row("of_libcachesim", ratios["replay"], "ratio", settings),
            _row("curve_of_libcachesim", ratios["curve"], "ratio", settings),
        ],
    }


def _row(name: str, values: list[float], unit: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {"name": f"replay.{name}", "values": values, "unit": unit, "settings": settings}


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


_warm_up = _timed  # the first call of a policy compiles it, or reads it from the cache folder
