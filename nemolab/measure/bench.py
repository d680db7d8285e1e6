"""Benchmarks of the CPU engine, each against a rival measured in the same run, in turns.

Every function returns {"rows": [...], ...}: `rows` are the arguments of `nemolab.measure.record`, raw samples included;
the other keys are the medians and ratios a table shows.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from nemolab.errors import UsageError
from nemolab.measure.versus import versus
from nemolab.progress import say

SHAPES = {"super": (2688, 1024), "nano": (1856, 2688), "tiny": (256, 128)}  # I neurons, X inputs and outputs
PROMPT_TOKENS = 32


def bench_decode(path: str | Path, tokens: int = 64, repeats: int = 5, threads: int | None = None) -> dict[str, Any]:
    """One token at a time: this engine, everything cached, against transformers in float32 on the same weights.

    path     a checkpoint small enough for transformers to hold it in float32
    tokens   fed one by one behind a prompt of 32, the same ids to both; transformers gets the better of one and all
             torch threads
    returns  engine_ms and transformers_ms (medians a token), ratio (transformers / engine), verdict, misses, rows
    """
    import copy

    import torch

    from nemolab.compare.reference import cache_keyword, quiet_transformers
    from nemolab.engine import Engine

    model = _plain_transformers(path)
    with Engine(path, threads=threads) as engine, torch.no_grad(), quiet_transformers():
        say(engine.budget.line())
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(engine.config.vocab_size, (PROMPT_TOKENS + tokens,), generator=generator)
        prompt, rest = ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]
        state = engine.new_state()
        engine.prefill(prompt, state)
        keyword = cache_keyword(model)
        cache = getattr(model(prompt[None], use_cache=True), keyword)

        # Both go on from a copy of the state behind the prompt, so that every round does the same work.
        def run_engine():
            now = state.copy()
            for token in rest.tolist():
                engine.step(token, now)

        def run_transformers():
            now = {keyword: copy.deepcopy(cache), "use_cache": True}
            for token in rest:
                model(token.reshape(1, 1), **now)

        run_engine()
        theirs_threads = _best_threads(lambda: model(rest[:1][None], **{keyword: copy.deepcopy(cache)}, use_cache=True))
        before = engine.stats()["decode"]["misses"]
        timed = versus(_with_threads(theirs_threads, run_transformers), run_engine, rounds=repeats)
        misses = engine.stats()["decode"]["misses"] - before
        settings = {
            "model": Path(path).name,
            "tokens": tokens,
            "prompt_tokens": PROMPT_TOKENS,
            "threads": engine.threads,
            "transformers_threads": theirs_threads,
            "transformers_experts": model.config._experts_implementation,
            "experts": "all cached" if misses == 0 else f"{misses} misses",
            "layout": engine.store.layout,
        }
        memory = engine.memory()
    theirs, ours = ([1e3 * second / tokens for second in samples] for samples in (timed.first, timed.second))
    return {
        "engine_ms": statistics.median(ours),
        "transformers_ms": statistics.median(theirs),
        "ratio": timed.ratio,
        "ratios": timed.ratios,
        "verdict": timed.verdict.replace("second", "the engine").replace("first", "transformers"),
        "misses": misses,
        "memory": memory,
        "rows": [
            {"name": "decode.engine", "values": ours, "unit": "ms/token", "settings": settings},
            {"name": "decode.transformers", "values": theirs, "unit": "ms/token", "settings": settings},
            {"name": "decode.ratio", "values": timed.ratios, "unit": "ratio", "settings": settings},
        ],
    }


def bench_expert(
    shape: str = "super", experts: int = 44, active: float = 1.0, repeats: int = 9, threads: int | None = None
) -> dict[str, Any]:
    """Routed experts of one token from their NVFP4 blocks, against torch's float32 products on the decoded weights.

    shape    "super", "nano" or "tiny"
    active   share of neurons that ReLU^2 leaves: 1.0 is the worst case (every byte is read), 0.075 the large model's
    returns  engine_ms and torch_ms (medians for all experts), ratio (torch / engine), floor_ms (bytes over the read
             bandwidth of this run), of_floor (engine / floor), cached_ms (the same work on one block over and over,
             out of a cache: what the arithmetic alone takes), ns_per_weight (a thread's), rows
    """
    import numpy as np
    import torch
    import torch.nn.functional as F

    from nemolab.engine.memory import check_room
    from nemolab.kernels.decode_nvfp4 import decode_rows
    from nemolab.kernels.expert_step import ExpertStep, published_down_torch
    from nemolab.kernels.read_memory import measure_read_gb_s
    from nemolab.kernels.simd import array_address
    from nemolab.kernels.team import Team
    from nemolab.store.layout import BlockLayout

    if shape not in SHAPES:
        raise UsageError(f"shape {shape!r}; known are {', '.join(SHAPES)}")
    if experts < 1 or not 0 <= active <= 1:
        raise UsageError(f"{experts} experts, {active} of the neurons active: 1 or more, and 0 to 1, are needed")
    inter, width = SHAPES[shape]
    form = BlockLayout("neuron", inter, width)
    check_room(experts * (form.block_bytes + 2 * 4 * inter * width), f"{experts} experts, packed and in float32,")
    threads = threads or torch.get_num_threads()
    random = np.random.default_rng(0)
    blocks = np.empty((experts, form.block_bytes), np.uint8)
    decoded = []
    with Team(threads) as team, torch.no_grad():
        for block in blocks:
            fill_block(form.views(block), active, random)
            views = [torch.from_numpy(plane) for plane in form.views(block)]
            up = decode_rows(team, views[0], views[1], 1e-3)
            decoded.append((up, decode_rows(team, *published_down_torch(views[2], views[3]), 1e-3)))
        step = ExpertStep(inter, width, experts, "neuron")
        addresses = array_address(blocks) + np.arange(experts) * form.block_bytes
        scales_2, weights = np.full((experts, 2), 1e-3, np.float32), np.ones(experts, np.float32)
        x = torch.from_numpy(random.uniform(0.5, 1.5, width).astype(np.float32))
        out = np.empty(width, np.float32)

        def run_engine():
            step.run(team, addresses, form.block_bytes, scales_2, weights, x.numpy(), out)

        def run_torch():
            total = torch.zeros(width)
            for up, down in decoded:
                total += F.linear(F.linear(x, up).relu_().square_(), down)
            return total

        run_engine()
        wanted = run_torch()
        error = float((torch.from_numpy(out) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
        timed = versus(_with_threads(threads, run_torch), run_engine, rounds=repeats)
        addresses[:] = addresses[0]
        cached = versus(run_engine, run_engine, rounds=max(repeats, 3)).first
        addresses[:] = array_address(blocks) + np.arange(experts) * form.block_bytes
        run_engine()
        read_gb_s = measure_read_gb_s(team)
    bits = int(np.unpackbits(step.active.view(np.uint8)).sum())
    groups = int(np.count_nonzero(step.active))
    bytes_read = experts * (inter * width // 2 + inter * width // 16) + bits * width // 2 + groups * width
    weights_used = experts * inter * width + bits * width
    ours, theirs = ([1e3 * second for second in samples] for samples in (timed.second, timed.first))
    floor_ms = bytes_read / statistics.median(read_gb_s) / 1e6
    settings = {
        "shape": shape,
        "inter": inter,
        "width": width,
        "experts": experts,
        "active": bits / step.h.size,
        "threads": threads,
        "bytes_read": bytes_read,
        "relative_error": error,
    }
    return {
        "engine_ms": statistics.median(ours),
        "torch_ms": statistics.median(theirs),
        "ratio": timed.ratio,
        "ratios": timed.ratios,
        "verdict": timed.verdict.replace("second", "the engine").replace("first", "torch"),
        "bytes_read": bytes_read,
        "read_gb_s": statistics.median(read_gb_s),
        "floor_ms": floor_ms,
        "of_floor": statistics.median(ours) / floor_ms,
        "cached_ms": 1e3 * statistics.median(cached),
        "ns_per_weight": 1e6 * statistics.median(ours) * threads / weights_used,
        "relative_error": error,
        "rows": [
            {"name": "expert.engine", "values": ours, "unit": "ms", "settings": settings},
            {"name": "expert.cached", "values": [1e3 * s for s in cached], "unit": "ms", "settings": settings},
            {"name": "expert.torch_f32", "values": theirs, "unit": "ms", "settings": settings},
            {"name": "expert.ratio", "values": timed.ratios, "unit": "ratio", "settings": settings},
            {"name": "expert.read_bandwidth", "values": read_gb_s, "unit": "GB/s", "settings": {"threads": threads}},
        ],
    }


def _best_threads(run) -> int:
    """Torch threads with which `run` is fastest: one, or as many as torch has now. A rival gets its best setting."""
    import time

    import torch

    def seconds(threads: int) -> float:
        timed = _with_threads(threads, run)
        timed()
        samples = []
        for _ in range(5):
            started = time.perf_counter()
            timed()
            samples.append(time.perf_counter() - started)
        return min(samples)

    return min({1, torch.get_num_threads()}, key=seconds)


def _with_threads(threads: int, run):
    """`run` with this number of torch threads, put back afterwards."""
    import torch

    def call():
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return run()
        finally:
            torch.set_num_threads(before)

    return call


def fill_block(views, active: float, random) -> None:
    """Random codes and scales; for a positive x exactly round(active * I) neurons of up come out positive."""
    import numpy as np

    inter = views.up_values.shape[0]
    views.up_values[:] = random.integers(0, 256, views.up_values.shape, np.uint8) | 0x88
    awake = random.permutation(inter)[: round(active * inter)]
    views.up_values[awake] &= 0x77
    views.down_values[:] = random.integers(0, 256, views.down_values.shape, np.uint8)
    for scales in (views.up_scales, views.down_scales):
        scales[:] = random.integers(0x30, 0x48, scales.shape, np.uint8)


def _plain_transformers(path: str | Path):
    """transformers' NemotronH with all weights decoded to float32, as anyone would run it."""
    import torch
    from transformers import NemotronHForCausalLM

    from nemolab.checkpoint import Checkpoint
    from nemolab.compare.reference import quiet_transformers, transformers_config
    from nemolab.engine.memory import check_room

    checkpoint = Checkpoint.open(path)
    modules = {name: m for name, m in checkpoint.modules.items() if name.startswith(("backbone.", "lm_head"))}
    elements = sum(torch.Size(module.shape).numel() for module in modules.values())
    check_room(2 * 4 * elements, "transformers' float32 copy of the model, while it is built,")
    state: dict[str, Any] = {}
    stacks: dict[str, list] = {}
    for name, module in modules.items():
        new = name.replace("backbone.", "model.", 1)
        if module.part == "routed":
            prefix, _, rest = new.partition(".experts.")
            expert, kind = rest.split(".")
            stacks.setdefault(f"{prefix}.experts.{kind}", []).append((int(expert), checkpoint.decode(name)))
            continue
        suffix = ".weight" if "weight" in module.tensors and f"{name}.weight" in checkpoint.tensors else ""
        state[new + suffix] = checkpoint.decode(name)
        if "bias" in module.tensors:
            state[f"{new}.bias"] = checkpoint.tensor(module.tensors["bias"].name).float()
    for name, parts in stacks.items():
        state[name] = torch.stack([weight for _, weight in sorted(parts, key=lambda part: part[0])])
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embeddings.weight"]
    with quiet_transformers():
        with torch.device("meta"):
            model = NemotronHForCausalLM(transformers_config(checkpoint.config)).eval()
        model.load_state_dict(state, strict=True, assign=True)
        model.set_experts_implementation("grouped_mm")  # what transformers takes by itself; the reference's is eager
    return model
