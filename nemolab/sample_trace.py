"""The trace that notebooks and tables look at: one that is named, the shipped one, or one recorded once."""

import os
from dataclasses import replace
from pathlib import Path

from nemolab import paths
from nemolab.progress import say

SHIPPED_TRACE, SHIPPED_PROMPTS = "conversations.safetensors", "prompts.jsonl"  # in data/traces
ANSWER_TOKENS = 100


def find_trace(named: str | Path = "", model: str | Path = "") -> Path:
    """Where it is: the one named, else `NEMOLAB_TRACE`, else one of the model.

    That is the shipped one for the shipped model. Of another model the first answer of each shipped conversation is
    recorded, once, up to ANSWER_TOKENS of each, and the trace is kept in the cache folder.
    """
    chosen = str(named) or os.environ.get("NEMOLAB_TRACE", "")
    if chosen:
        return paths.expand(chosen)
    folder = paths.model_folder(model)
    if folder.resolve() == paths.tiny_folder().resolve():
        return paths.traces_folder() / SHIPPED_TRACE
    from nemolab.store import Store, ensure_store

    store = Store.open(ensure_store(folder))
    kept = paths.cache_folder() / "traces" / f"{store.fingerprint[:16]}.safetensors"
    if not kept.exists():
        _record(folder, kept)
    return kept


def _record(model: Path, target: Path) -> None:
    from nemolab.engine import Engine
    from nemolab.engine.conversations import record_chats
    from nemolab.engine.scripts import read_prompts
    from nemolab.trace import write_trace

    scripts = read_prompts(paths.traces_folder() / SHIPPED_PROMPTS)
    scripts = [replace(script, messages=script.messages[: script.turns[0]]) for script in scripts]
    say(f"no trace of {paths.shown(model)} yet: recording {len(scripts)} conversations (once)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with Engine(model) as engine:
        write_trace(target, record_chats(engine, scripts, max_tokens=ANSWER_TOKENS))
