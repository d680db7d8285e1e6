"""One MoE layer of one token on a CUDA card, by each transfer strategy, beside the least time its bytes could take.

Everything is cached in page-locked memory. A strategy's floor: the bytes it copies over the bandwidth of a pinned copy,
plus those it reads in place over the bandwidth of a kernel that only adds up what it reads, both measured in the same
run, in turns with the strategies. A sample is the wall time of many steps in a row, a step's share of it: from the
choice lying on the card to the sum, with all that the CPU does in between (the choice's way to it, where a strategy
needs it, launches, events), while routing itself is not part of it. Steps choose different experts in turn, so that no
cache sees the same block soon again.

Beside the strategies stands `neurons`, which is none: `rows` with a kernel that reads one active neuron after another,
and its group's scales again for each. Its floor counts each of these reads as crossing the bus.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

from nemolab.errors import NemolabError, UsageError
from nemolab.measure.bench import SHAPES, fill_block
from nemolab.measure.gpu_floors import STREAM_BYTES, CardBus, need_card
from nemolab.measure.transfer import count_crossing, count_neurons

CHOICES = 16  # different sets of experts, in turn
MOST_ERROR = 1e-5  # of the largest value: fp32 sums of a few thousand terms stay well below, a wrong weight does not
_DISTINCT = 24  # blocks of different content; the others repeat it at other addresses


def bench_moe_step(
    shape: str = "super",
    top_k: int = 22,
    active: float = 0.075,
    cached: int = 512,
    steps: int = 20,
    repeats: int = 9,
) -> dict[str, Any]:
    """Each strategy against its floor, after their outputs were compared bit for bit and with float64 arithmetic.

    shape    "super", "nano" or "tiny"; top_k experts a token; cached  blocks in page-locked memory to choose from
    active   share of neurons that ReLU^2 leaves; steps  in a sample; repeats  samples
    returns  for each of whole, grouped, rows, pull, pull_graph and neurons: <name>_us (median), <name>_floor_us and
             <name>_of_floor; pull_is_faster_than_<name>; copy_gb_s, stream_gb_s; same_bits, relative_error; rows
    Raises UsageError for sizes that cannot be, EngineError without a card, NemolabError when two strategies do not
    agree to the bit, or are further than MOST_ERROR from the arithmetic: then nothing is timed.
    """
    if shape not in SHAPES:
        raise UsageError(f"shape {shape!r}; known are {', '.join(SHAPES)}")
    if not (1 <= top_k <= cached and 0 < active <= 1 and steps >= 1 and repeats >= 3):
        raise UsageError(
            f"{top_k} of {cached} experts, {active} of the neurons active, {steps} steps, {repeats} repeats: "
            "1 expert or more of those cached, a share above 0, 1 step and 3 repeats at least are needed"
        )
    need_card()
    bench = _Bench(shape, top_k, active, cached)
    try:
        return bench.run(steps, repeats)
    finally:
        bench.close()


class _Bench:
    def __init__(self, shape: str, top_k: int, active: float, cached: int):
        import numpy as np
        import torch

        from nemolab.engine.gpu.device import open_device
        from nemolab.engine.gpu.expert_fetch import Fetch
        from nemolab.engine.gpu.moe_step import MoeStep
        from nemolab.engine.gpu.operators import find_operators
        from nemolab.engine.gpu.table import ExpertTable
        from nemolab.engine.memory import check_room
        from nemolab.engine.transfers import TRANSFERS
        from nemolab.errors import EngineError
        from nemolab.store.arena import Arena
        from nemolab.store.direct_io import address
        from nemolab.store.layout import BlockLayout
        from nemolab.store.page_lock import PageLock

        self.inter, self.width = SHAPES[shape]
        self.form = BlockLayout("neuron", self.inter, self.width)
        self.top_k, self.cached, self.active = top_k, cached, active
        block_bytes = self.form.block_bytes
        cached_bytes = cached * block_bytes
        arena_bytes = max(cached_bytes, 2 * STREAM_BYTES)
        check_room(arena_bytes, f"{cached} experts in page-locked memory")
        torch.zeros(1, device="cuda")  # torch's context is the one everything else uses
        card = open_device("cuda")
        self.driver, operators = card.locker, find_operators(card.torch_device)
        rows = -(-arena_bytes // block_bytes)
        self.arena = Arena(rows, block_bytes)
        self.random = np.random.default_rng(0)
        for row in range(rows):
            if row < _DISTINCT:
                fill_block(self.form.views(self.arena.rows[row]), active, self.random)
            else:
                self.arena.rows[row] = self.arena.rows[row % _DISTINCT]
        self.lock = PageLock(address(self.arena.rows), self.arena.reserved_bytes, block_bytes, self.driver)
        problem = self.lock.grow(self.arena.reserved_bytes)
        if problem is not None:
            self.lock.close()
            raise EngineError(f"{cached} experts in page-locked memory: {problem}")
        self.first = address(self.arena.rows)
        self.addresses = self.first + block_bytes * np.arange(cached, dtype=np.int64)
        self.table = ExpertTable(1, cached, card)
        self.table.set(0, np.arange(cached), self.addresses)
        generator = torch.Generator().manual_seed(0)
        self.scales_2 = torch.full((1, cached, 2), 1e-3, device="cuda")
        self.x = (torch.rand(self.width, generator=generator) + 0.5).cuda()
        self.weights = (torch.rand(top_k, generator=generator) / top_k).cuda()
        self.sets = [torch.randperm(cached, generator=generator)[:top_k].int().cuda() for _ in range(CHOICES)]
        self.steps = {
            name: MoeStep(name, self.inter, self.width, top_k, self.table, self.scales_2, card, operators)
            for name in TRANSFERS
        }
        again = SimpleNamespace(ExpertStep=partial(operators.ExpertStep, neurons=True), Combine=operators.Combine)
        self.steps["neurons"] = MoeStep("rows", self.inter, self.width, top_k, self.table, self.scales_2, card, again)
        for step in self.steps.values():
            step.x.copy_(self.x)
            step.weights.copy_(self.weights)
        self.bus = CardBus(self.driver, self.first, self.arena.reserved_bytes, self.lock.chunk_bytes)
        self.turn = 0
        self._fetch = Fetch

    def run(self, steps: int, repeats: int) -> dict[str, Any]:
        import torch

        counted, outputs = self._check()
        error = check_error(self._relative_error(outputs[0]))
        calls = {name: lambda i, name=name: self._step(name, i) for name in self.steps}
        calls["pull_graph"] = self._graph()
        for i, out in enumerate(outputs):
            self.steps["pull"].out.fill_(float("nan"))
            calls["pull_graph"](i)
            torch.cuda.synchronize()
            if not torch.equal(self.steps["pull"].out, out):
                raise NemolabError(f"choice {i}: pull as a CUDA graph gives other bits than pull launched step by step")
        bandwidths = {"copy": self.bus.copy_gb_s, "stream": self.bus.in_place_gb_s}
        samples: dict[str, list[float]] = {name: [] for name in (*calls, *bandwidths)}
        for round_ in range(-1, repeats):  # the first is a warm-up
            names = list(samples) if round_ % 2 else list(reversed(samples))
            for name in names:
                value = bandwidths[name]() if name in bandwidths else self._time(calls[name], steps)
                if round_ >= 0:
                    samples[name].append(value)
        settings = {
            "inter": self.inter,
            "width": self.width,
            "experts": self.top_k,
            "cached": self.cached,
            "all_cached": True,
            "active": counted["neurons"] / (self.top_k * self.inter),
            "active_groups": counted["groups"] / (self.top_k * self.inter // 16),
            "steps": steps,
            "choices": CHOICES,
            "memory": "page-locked, huge pages asked for",
            "relative_error": error,
        }
        waves = {name: step.waves for name, step in self.steps.items() if name != "pull"}
        return make_answer(samples, counted, settings, waves, self.bus.copied)

    def close(self) -> None:
        for step in self.steps.values():
            step.close()
        self.table.close()
        self.lock.close()
        self.arena.close()

    def _step(self, name: str, i: int) -> None:
        step = self.steps[name]
        step.ids.copy_(self.sets[i % CHOICES])
        step.run(0, self._lookup)

    def _lookup(self, chosen: list[int]):
        return self._fetch(self.addresses[chosen])

    def _graph(self):
        """`pull` as a graph; the CPU still learns the choice of every step."""
        import torch

        step = self.steps["pull"]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            step.start(0)

        def replay(i: int) -> None:
            step.ids.copy_(self.sets[i % CHOICES])
            step.expect(0)
            graph.replay()
            step.choice(0)

        return replay

    def _check(self) -> tuple[dict[str, float], list[Any]]:
        """All strategies on all choices: equal bits. Returns the mean active neurons and groups a step, and outputs."""
        import numpy as np
        import torch

        outputs, groups, neurons = [], 0, 0
        for i in range(CHOICES):
            found = {}
            for name, step in self.steps.items():
                step.step.partial.fill_(float("nan"))
                step.out.fill_(float("nan"))
                self._step(name, i)
                found[name] = step.out.clone()
            for name, out in found.items():
                if name != "neurons" and (not torch.equal(out, found["pull"]) or not out.isfinite().all()):
                    raise NemolabError(f"choice {i}: {name} gives other bits than pull")
            # Compiled another way, a product may be rounded before it is added, or not.
            away, most = (found["neurons"] - found["pull"]).abs().max(), found["pull"].abs().max()
            check_error(float(away / most), "pull")
            outputs.append(found["pull"])
            bits = self.steps["pull"].step.active.cpu().numpy()
            groups += int(np.count_nonzero(bits))
            neurons += int(np.unpackbits(bits.view(np.uint8)).sum())
        return {"groups": groups / CHOICES, "neurons": neurons / CHOICES}, outputs

    def _time(self, call, steps: int) -> float:
        """Microseconds a step."""
        import torch

        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            call(self.turn)
            self.turn += 1
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - started) / steps

    def _relative_error(self, out) -> float:
        """Of the first choice, against float64 arithmetic on the decoded weights."""
        import torch

        from nemolab.kernels.decode_nvfp4 import decode_rows_torch
        from nemolab.kernels.expert_step import published_down_torch

        total = torch.zeros(self.width, dtype=torch.float64)
        x = self.x.cpu().double()
        for expert, weight in zip(self.sets[0].tolist(), self.weights.tolist(), strict=True):
            up_2, down_2 = self.scales_2[0, expert].tolist()
            planes = [torch.from_numpy(plane) for plane in self.form.views(self.arena.rows[expert])]
            h = torch.relu(decode_rows_torch(planes[0], planes[1], up_2).double() @ x).square()
            down = decode_rows_torch(*published_down_torch(planes[2], planes[3]), down_2)
            total += weight * (down.double() @ h)
        return float((out.cpu() - total).abs().max() / total.abs().max())


def check_error(error: float, other: str = "float64 arithmetic") -> float:
    """The same, of a distance from `other`. Raises NemolabError where it is more than MOST_ERROR, or no number."""
    if not error <= MOST_ERROR:
        raise NemolabError(
            f"the step is {error:.2g} of the largest value away from {other}, {MOST_ERROR:g} at most was "
            "expected; nothing was timed, since it computes something else"
        )
    return error


def make_answer(
    samples: dict[str, list[float]], counted: dict[str, float], settings: dict[str, Any], waves: dict, copied: dict
) -> dict[str, Any]:
    """Medians, floors and ratios, and the rows.

    samples   us a step of each strategy, of pull_graph and of neurons; GB/s of "copy" and "stream"
    counted   active "neurons" and "groups" of a step, over all its experts; settings  of all rows
    waves     of the strategies that copy; copied  what a sample of "copy" moved
    """
    top_k = settings["experts"]
    each = count_crossing(settings["inter"], settings["width"], counted["neurons"] / top_k, counted["groups"] / top_k)
    moved = {name: (top_k * crossing.copied, top_k * crossing.in_place) for name, crossing in each.items()}
    again = count_neurons(settings["inter"], settings["width"], counted["neurons"] / top_k)
    moved |= {"pull_graph": moved["pull"], "neurons": (top_k * again.copied, top_k * again.in_place)}
    copy_gb_s, stream_gb_s = (statistics.median(samples[name]) for name in ("copy", "stream"))
    found: dict[str, Any] = {}
    rows = []
    for name, (copied_bytes, in_place_bytes) in moved.items():
        floor_us = 1e-3 * (copied_bytes / copy_gb_s + in_place_bytes / stream_gb_s)
        median = statistics.median(samples[name])
        found |= {f"{name}_us": median, f"{name}_floor_us": floor_us, f"{name}_of_floor": median / floor_us}
        said = {"bytes_copied": copied_bytes, "bytes_in_place": in_place_bytes, "floor_us": floor_us}
        said |= {"waves": waves.get(name)}
        rows.append({"name": f"moe_step.{name}", "values": samples[name], "unit": "us", "settings": settings | said})
    for name in ("whole", "grouped", "rows"):
        found[f"pull_is_faster_than_{name}"] = found[f"{name}_us"] / found["pull_us"]
    for name, said in (("copy", copied), ("stream", {"pieces": 1, "bytes": STREAM_BYTES})):
        rows.append(
            {"name": f"moe_step.{name}_bandwidth", "values": samples[name], "unit": "GB/s", "settings": dict(said)}
        )
    found |= {"copy_gb_s": copy_gb_s, "stream_gb_s": stream_gb_s, "same_bits": True}
    return found | {"relative_error": settings["relative_error"], "rows": rows}
