"""Is the engine the same, bit for bit, from run to run and from process to process?

The second process runs `answer_as_other_process`: it reads a request as JSON on stdin and prints the hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import get_num_threads, set_num_threads

from nemolab.errors import NemolabError

PROMPT_TOKENS = 128
STEPS = 16
PATIENCE_S = 3600


@dataclass(frozen=True)
class Determinism:
    """sha256 of the logits of a prompt pass and of the steps after it, for each run."""

    prompt_tokens: int
    steps: int
    runs: dict[str, str] = field(default_factory=dict)

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


def check_determinism(
    make_engine: Callable[..., object], path: Path, store_path: Path, ids: list[int], top_k: int
) -> Determinism:
    """Three runs here (cold, with what the first one cached, and with the smallest cache) and one in another process.

    make_engine  Engine bound to the store; called with cache settings
    """
    prompt = ids[:PROMPT_TOKENS]
    runs = {}
    other = _start_other_process(path, store_path, prompt)
    try:
        with make_engine() as engine:
            runs["first"] = hash_logits(engine, prompt)
            runs["again, experts cached"] = hash_logits(engine, prompt)
        with make_engine(ram_cache_slots=top_k) as engine:
            runs["again, smallest cache"] = hash_logits(engine, prompt)
        runs["another process"] = _finish_other_process(other)
    finally:
        if other.poll() is None:
            other.kill()
        other.communicate()
    return Determinism(len(prompt), STEPS, runs)


def _start_other_process(path: Path, store_path: Path, ids: list[int]) -> subprocess.Popen:
    request = {"path": str(path), "store": str(store_path), "ids": ids, "steps": STEPS, "threads": get_num_threads()}
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import answer_as_other_process; answer_as_other_process()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with contextlib.suppress(BrokenPipeError):  # it died at once; what it said is read where it is waited for
        process.stdin.write(json.dumps(request))
        process.stdin.close()
    process.stdin = None  # so that `communicate` does not flush it
    return process


def _finish_other_process(process: subprocess.Popen) -> str:
    try:
        answer, complaint = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise NemolabError(f"the second process gave no logits within {PATIENCE_S} s") from None
    if process.returncode != 0:
        last = complaint.strip().splitlines()[-1:] or ["no word"]
        raise NemolabError(f"the second process failed with exit code {process.returncode}: {last[0]}")
    return json.loads(answer)["logits_sha256"]


def answer_as_other_process() -> None:
    """Read {"path", "store", "ids", "steps", "threads"} from stdin, run, print {"logits_sha256"}."""
    from nemolab.engine import Engine

    request = json.load(sys.stdin)
    set_num_threads(request["threads"])  # the order of a sum may depend on how many take part
    with Engine(request["path"], store=request["store"]) as engine:
        print(json.dumps({"logits_sha256": hash_logits(engine, request["ids"], request["steps"])}))


def _bits(logits) -> bytes:
    return logits.detach().contiguous().numpy().tobytes()
