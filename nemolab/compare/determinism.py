"""Is the engine the same, bit for bit, from run to run and from process to process?"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import get_num_threads, set_num_threads

from nemolab.errors import NemolabError

PROMPT_TOKENS = 128
STEPS = 16
PATIENCE_S = 3600


@dataclass(frozen=True)
class Determinism:
    """sha256 of the logits of a prompt pass and of the steps after it, by run."""

    prompt_tokens: int
    steps: int
    runs: dict[str, str]

    @property
    def deterministic(self) -> bool:
        return len(set(self.runs.values())) == 1

    def groups(self) -> list[str]:
        """Runs with equal bits, joined: ["first = another process", "again, smallest cache"]."""
        names: dict[str, list[str]] = {}
        for run, logits_sha256 in self.runs.items():
            names.setdefault(logits_sha256, []).append(run)
        return [" = ".join(group) for group in names.values()]

    def to_dict(self) -> dict:
        return {"prompt_tokens": self.prompt_tokens, "steps": self.steps, "logits_sha256": self.runs}


def hash_logits(engine, ids: list[int], steps: int = STEPS) -> str:
    """sha256 over the float32 bits of the logits after each of `ids`, and of `steps` greedy steps behind them."""
    state = engine.new_state()
    digest = hashlib.sha256()
    logits = engine.prefill(ids, state)
    digest.update(_bits(logits))
    last = logits[-1]
    for _ in range(steps):
        last = engine.step(int(last.argmax()), state)
        digest.update(_bits(last))
    return digest.hexdigest()


def repeat_runs(
    make_engine: Callable, ids: list[int], smallest_slots: int, others: Sequence[dict] = ()
) -> dict[str, str]:
    """Three runs in this process: cold, with what the first one cached, and in another engine with the smallest cache.

    make_engine  called with cache settings; its engines are closed here
    others       further settings, an engine each
    """
    with make_engine() as engine:
        runs = {"first": hash_logits(engine, ids), "again, experts cached": hash_logits(engine, ids)}
    with make_engine(ram_cache_slots=smallest_slots) as engine:
        runs["again, smallest cache"] = hash_logits(engine, ids)
    for settings in others:
        with make_engine(**settings) as engine:
            runs[", ".join(f"{name} {value}" for name, value in settings.items())] = hash_logits(engine, ids)
    return runs


class OtherProcess:
    """The same run in a process of its own, which works while this one does something else.

    where  of its engine, as `Engine` takes it: device, vram_gib
    Use it in a `with` block: leaving it ends the process, whatever happened.
    """

    def __init__(self, path: Path, store_path: Path, ids: list[int], slots: int, where: dict):
        request = {"path": str(path), "store": str(store_path), "ids": ids, "steps": STEPS, "slots": slots}
        request["where"] = where
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import answer_as_other_process; answer_as_other_process()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with contextlib.suppress(BrokenPipeError):  # it died at once; what it said is read where it is waited for
            self._process.stdin.write(json.dumps(request | {"threads": get_num_threads()}))
            self._process.stdin.close()
        self._process.stdin = None  # so that `communicate` does not flush it

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *_) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def wait(self) -> str:
        """The hash. Raises NemolabError with the last thing the process said, should it fail."""
        try:
            answer, complaint = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise NemolabError(f"the second process gave no logits within {PATIENCE_S} s") from None
        if self._process.returncode != 0:
            last = complaint.strip().splitlines()[-1:] or ["no word"]
            raise NemolabError(f"the second process failed with exit code {self._process.returncode}: {last[0]}")
        return json.loads(answer)["logits_sha256"]


def answer_as_other_process() -> None:
    """What the other process runs: a request as JSON on stdin, the hash as JSON on stdout."""
    from nemolab.engine import Engine

    request = json.load(sys.stdin)
    set_num_threads(request["threads"])  # the order of a sum may depend on how many take part
    settings = {"store": request["store"], "ram_cache_slots": request["slots"]}
    with Engine(request["path"], **settings, **request["where"]) as engine:
        print(json.dumps({"logits_sha256": hash_logits(engine, request["ids"], request["steps"])}))


def _bits(logits) -> bytes:
    return logits.detach().contiguous().numpy().tobytes()
