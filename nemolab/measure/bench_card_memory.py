"""What an engine's process takes of a card's memory, as the driver tells, beside what was allowed and what was planned.

A thread asks the driver's management library all the while: what is in use by everybody, less what was in use before
this process touched the card. So nothing of ours is left out, whoever allocated it: weights, states, what torch keeps,
kernels, graphs, the driver's own. Nor is anything told apart: another program that comes meanwhile makes the peak too
large, one that ends makes it too small, so the card must be left to this process while it is measured.

A phase is run once, and its most is one sample. Nothing is timed: each phase is the first of its kind in the process,
with kernels to compile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemolab.engine.transfers import DEFAULT
from nemolab.errors import EngineError, UsageError

if TYPE_CHECKING:
    from nemolab.system.nvml import CardMeter

ASK_EVERY_S = 0.002


def bench_card_memory(
    path: str | Path,
    *,
    device: str = "cuda",
    vram_gib: float = 8.0,
    prompt_tokens: int = 8192,
    tokens: int = 16,
    transfer: str = DEFAULT,
    prefetch: int = 4,
    meter: Any = None,
) -> dict[str, Any]:
    """The most that is in use while a model is loaded, reads a long prompt and writes behind it.

    path      a checkpoint or a store; vram_gib  what the engine is allowed
    meter     something with .touched and used_bytes(), instead of the driver's library
    returns   load_gib, prompt_gib, decode_gib, peak_gib; budget_gib and within_budget; planned_gib and found_gib (the
              peak by the engine's own account, None without one); asked (how often); rows
    Raises EngineError without such a card, where the driver does not tell or ceases to; UsageError in a process that
    has used the card already (what it holds would be taken for others') and for settings that cannot be.
    """
    from nemolab.engine import Engine
    from nemolab.engine.arguments import find_store

    if prompt_tokens < 1 or tokens < 1:
        raise UsageError(f"a prompt of {prompt_tokens} tokens and {tokens} behind it; 1 of each is needed at least")
    watch, store = Watch(meter or open_meter(device)), find_store(path, None, "neuron")
    ids = np.random.default_rng(0).integers(store.config.vocab_size, size=prompt_tokens + tokens).tolist()
    settings = {"device": device, "vram_gib": vram_gib, "transfer": transfer, "prefetch": prefetch}
    with ExitStack() as stack:
        with watch.phase("load"):
            engine = stack.enter_context(Engine(None, store=store, **settings))
        state = engine.new_state()
        with watch.phase("prompt"):
            engine.last_logits(ids[:prompt_tokens], state)
        with watch.phase("decode"):
            for token in ids[prompt_tokens:]:
                engine.step(token, state)
        memory = engine.memory()["card"]
    gib = {phase: most / 2**30 for phase, most in watch.most_bytes.items()}
    peak_gib, planned, found_bytes = max(gib.values()), memory["planned"], memory["peak"].get("total_bytes")
    figures = {
        "budget_gib": vram_gib,
        "within_budget": peak_gib <= vram_gib,
        "planned_gib": planned["total_bytes"] / 2**30,
        "found_gib": None if found_bytes is None else found_bytes / 2**30,
        "pass_tokens": planned["pass_tokens"],
        "asked": watch.asked,
    }
    facts = {
        "model": Path(path).name,
        "device": memory["name"],
        "layers": store.config.num_hidden_layers,
        "moe_layers": store.n_layers,
        "experts": store.n_experts,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "transfer": transfer,
        "prefetch": prefetch,
    }
    said = facts | figures | {"planned": planned, "found": memory["found"], "peak": memory["peak"]}
    rows = [
        {"name": f"card_memory.{phase}", "values": [most], "unit": "GiB", "settings": said}
        for phase, most in gib.items()
    ]
    return {f"{phase}_gib": most for phase, most in gib.items()} | {"peak_gib": peak_gib} | figures | {"rows": rows}


class Watch:
    """Asks how much is in use beyond what is in use when it is made.

    .most_bytes  by phase; .asked  how often
    Raises UsageError where this process has used the card before, EngineError at the end of a phase in which asking
    failed.
    """

    def __init__(self, meter):
        if meter.touched:
            raise UsageError(
                "this process has used the card already, and what it holds there cannot be told from what other "
                "programs hold; measure in a process of its own (nemolab bench card-memory)"
            )
        self._meter, self._others_bytes = meter, meter.used_bytes()
        self.most_bytes: dict[str, int] = {}
        self.asked = 0
        self._problem: Exception | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.most_bytes[name], done = 0, threading.Event()
        thread = threading.Thread(target=self._ask_until, args=(name, done), name="nemolab-watch", daemon=True)
        try:
            thread.start()
            yield
        finally:
            done.set()
            if thread.ident is not None:  # it was started
                thread.join()
        if self._problem is not None:  # the most that was seen until then would be taken for the peak
            raise EngineError(
                f"{name}: the driver does not tell any more what is in use ({self._problem}), so that the peak is not "
                "known; measure again"
            ) from self._problem

    def _ask_until(self, name: str, done: threading.Event) -> None:
        last = False
        while not last:  # once more behind the end: what is held then counts, too
            last = done.wait(ASK_EVERY_S)
            try:
                used_bytes = self._meter.used_bytes() - self._others_bytes
            except Exception as problem:
                self._problem = problem
                return
            self.most_bytes[name] = max(self.most_bytes[name], used_bytes)
            self.asked += 1


def open_meter(device: str) -> CardMeter:
    """Asks the driver about a card that this process need not have used.

    Raises UsageError for what is no card's name, EngineError where there is no such card or its driver does not tell.
    """
    from nemolab.engine.gpu.device import card_index, check_device
    from nemolab.system.nvml import CardMeter

    index = card_index(device)
    if index is None:
        raise UsageError(f"device {device!r} has no memory of its own; 'cuda', 'cuda:1' and so on have")
    check_device(device)
    try:
        return CardMeter(index)
    except OSError as problem:
        raise EngineError(f"device {device!r}: the driver does not tell what is in use ({problem})") from None
