"""Conversations held for a trace: scripted ones, texts fed token by token, and a trace fed once more.

Each conversation has a state of its own; the expert cache is carried on from one to the next, as in daily use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemolab import __version__
from nemolab.engine.engine import Engine
from nemolab.engine.phases import subtract_stats
from nemolab.engine.scripts import Script, Text
from nemolab.errors import EngineError, TraceError
from nemolab.progress import Progress
from nemolab.trace import PHASES, PREFILL, Recorder, Trace


def record_chats(
    engine: Engine,
    scripts: Iterable[Script],
    *,
    max_tokens: int = 256,
    think: bool = False,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    token_ids: bool = True,
    progress: Progress | None = None,
) -> Trace:
    """Hold scripted conversations and record them.

    max_tokens  of each answer
    seed        of the first answer; the n-th one after it has seed + n
    token_ids   False: leave out what was said, keep how it was routed
    Raises EngineError naming the script that does not fit the model.
    """
    scripts = list(scripts)
    sampling = {"temperature": temperature, "top_p": top_p}
    for script in scripts:  # what cannot begin is said before anything runs
        _check_begin(engine, script, max_tokens, think)
    most = sum(len(script.turns) for script in scripts) * max_tokens
    with _recording(engine, token_ids) as (recorder, taken):
        asked = written = 0
        for script in scripts:
            talk = _Talk(engine, script, think, recorder)
            for turn in script.turns:
                for _ in talk.answer(turn, max_tokens=max_tokens, seed=seed + asked, **sampling):
                    written += 1
                    if progress:
                        progress(written, max(most, written + 1))
                asked += 1
        if progress:
            progress(written, written)
    settings = {"max_tokens": max_tokens, "think": think, "seed": seed, **sampling}
    return recorder.trace(kind="chat", answers=asked, **settings, **taken)


def record_texts(
    engine: Engine,
    texts: Iterable[Text],
    *,
    max_tokens: int | None = None,
    token_ids: bool = True,
    progress: Progress | None = None,
) -> Trace:
    """Feed texts token by token, as if the model had written them: the first token is the prompt.

    max_tokens  of each text; None: all
    Raises EngineError naming the text that is too long for the model.
    """
    all_ids = []
    for text in texts:
        ids = engine.tokenizer.encode(text.text)[:max_tokens]
        limit = engine.config.max_position_embeddings
        if len(ids) > limit:
            raise EngineError(f"{text.where}: {len(ids)} tokens; this model takes {limit}: set a maximum of tokens")
        all_ids.append((text.name, ids))
    total, done = sum(len(ids) for _, ids in all_ids), 0
    with _recording(engine, token_ids) as (recorder, taken):
        for name, ids in all_ids:
            recorder.begin(name)
            state = engine.new_state()
            engine.last_logits(ids[:1], state)
            for token in ids[1:]:
                engine.step(token, state)
                if progress:
                    progress(done + state.tokens, total)
            done += len(ids)
            if progress:
                progress(done, total)
    return recorder.trace(kind="text", max_tokens=max_tokens, **taken)


@dataclass(frozen=True)
class FedAgain:
    """A trace fed once more through an engine.

    trace           what was recorded this time
    differing_rows  tokens of which at least one layer chose other experts, or in another order; 0 on the machine that
                    recorded it. Another machine rounds otherwise, and near ties then fall differently
    """

    trace: Trace
    differing_rows: int

    @property
    def note(self) -> str:
        """For people: one line, empty where the routing is the same."""
        if not self.differing_rows:
            return ""
        return (
            f"{self.differing_rows:,} of {self.trace.n_tokens:,} tokens were routed otherwise than in the trace: this "
            "machine rounds differently; compare its misses with a replay of what was recorded here"
        )


def feed_again(engine: Engine, trace: Trace, *, progress: Progress | None = None) -> FedAgain:
    """Feed a trace's tokens through an engine once more, in the same passes and steps: for another cache size, say.

    The engine should be fresh (a cold cache) where its misses are to be compared with a replay.
    Raises TraceError for a trace of another model, one without token ids, and one whose conversations begin midway.
    """
    if trace.token_ids is None:
        raise TraceError(
            "this trace has no token ids (they were left out when it was taken, or it was imported): nothing to feed"
        )
    config, store = engine.config, engine.store
    trace.check_model(store.fingerprint, store.n_layers, config.n_experts, config.top_k)
    bounds = [0, *(np.flatnonzero(np.diff(trace.step)) + 1).tolist(), trace.n_tokens]
    names = trace.meta.taken.get("conversations", [])
    states: dict[int, Any] = {}
    with _recording(engine, token_ids=True) as (recorder, taken):
        for first, last in zip(bounds, bounds[1:], strict=False):
            number, ids = int(trace.conversation[first]), trace.token_ids[first:last].tolist()
            if number not in states:
                recorder.begin(names[number] if number < len(names) else str(number))
                states[number] = engine.new_state()
            state = states[number]
            if state.tokens != trace.position[first]:
                raise TraceError(
                    f"conversation {number} goes on at position {trace.position[first]}, {state.tokens} tokens of it "
                    "are in this trace: it cannot be fed again in part"
                )
            if trace.phase[first] == PREFILL:
                engine.last_logits(ids, state)
            else:
                for token in ids:
                    engine.step(token, state)
            if progress:
                progress(last, trace.n_tokens)
    fed = recorder.trace(kind=trace.meta.taken.get("kind", "imported"), fed_again=True, **taken)
    differing = (fed.experts != trace.experts).any(axis=(1, 2))
    return FedAgain(fed, int(differing.sum()))


def summarise(trace: Trace) -> dict[str, Any]:
    """What was recorded, and what the engine's own cache counted meanwhile.

    returns  model, tokens {prefill, decode}, conversations (how many), by_conversation, cache, and stats: for each
             phase and `all`, lookups, hits, misses, hit_rate (0 to 1, None without lookups), reads_per_token ...
    """
    counts = trace.meta.taken["stats"]
    counts = counts | {"all": {name: sum(found[name] for found in counts.values()) for name in counts[PHASES[0]]}}
    by_phase = np.stack([trace.phase == phase for phase in range(len(PHASES))])
    names = trace.meta.taken["conversations"]
    return {
        "model": trace.meta.model,
        "tokens": _count_tokens(by_phase),
        "conversations": len(names),
        "by_conversation": [
            {"name": name, **_count_tokens(by_phase & (trace.conversation == number))}
            for number, name in enumerate(names)
        ],
        "cache": trace.meta.taken["cache"],
        "stats": {phase: _rates(found) for phase, found in counts.items()},
    }


def _count_tokens(by_phase: np.ndarray) -> dict[str, int]:
    return dict(zip(PHASES, by_phase.sum(axis=1).tolist(), strict=True))


def _rates(counts: dict[str, int]) -> dict[str, Any]:
    tokens, lookups = counts["tokens"], counts["lookups"]
    return counts | {
        "hit_rate": counts["hits"] / lookups if lookups else None,
        "reads_per_token": counts["reads"] / tokens if tokens else None,
        "bytes_per_token": counts["bytes_read"] / tokens if tokens else None,
    }


@contextmanager
def _recording(engine: Engine, token_ids: bool) -> Iterator[tuple[Recorder, dict[str, Any]]]:
    """A recording, and what to write down beside it once it has ended: who took it and what the cache counted."""
    taken: dict[str, Any] = {"version": __version__}
    with engine.record(token_ids=token_ids) as recorder:
        before = engine.stats()
        yield recorder, taken
        done = subtract_stats(before, engine.stats())
    # Without times: a trace taken once more is the same file.
    taken["stats"] = {
        phase: {name: count for name, count in counts.items() if isinstance(count, int)}
        for phase, counts in done.items()
    }


class _Talk:
    """One scripted conversation under way: what was said, what of it the state holds."""

    def __init__(self, engine: Engine, script: Script, think: bool, recorder: Recorder):
        self._engine, self._script, self._think, self._recorder = engine, script, think, recorder
        self._answers: dict[int, str] = {}  # by the number of script messages before it
        self._said = ""  # prompt and answer so far, as text
        self._unfed: list[int] = []  # written, but not yet fed
        self._state = None
        self._begun = 0

    def answer(self, turn: int, **sampling):
        """Token ids of the answer behind the first `turn` messages of the script."""
        engine, tokenizer = self._engine, self._engine.tokenizer
        prompt = tokenizer.render(self._history(turn), think=self._think)
        rest = self._continue(prompt)
        if rest is None:
            # A template may take back what it showed before (an earlier answer's reasoning, say): then what follows
            # is another conversation to the model, and it begins anew with the whole history.
            self._begun += 1
            self._recorder.begin(self._script.name if self._begun == 1 else f"{self._script.name} ({self._begun})")
            self._state, self._unfed, rest = engine.new_state(), [], prompt
        before = self._state.tokens
        ids = [*self._unfed, *tokenizer.encode(rest)]
        written: list[int] = []
        try:
            for token in engine.generate(ids, state=self._state, **sampling):
                written.append(token)
                yield token
        except EngineError as problem:
            raise EngineError(f"{self._script.where}: {problem}") from None
        fed = self._state.tokens - before - len(ids)
        self._unfed = written[fed:]
        text = tokenizer.decode_with_tags(written)
        self._answers[turn] = text
        self._said = prompt + text

    def _history(self, turn: int) -> list[dict]:
        history = []
        for number, message in enumerate(self._script.messages[:turn]):
            if number in self._answers:
                history.append({"role": "assistant", "content": self._answers[number]})
            history.append(message)
        return history

    def _continue(self, prompt: str) -> str | None:
        """What of this prompt the model has not seen, or None where the prompt does not go on from what it has."""
        if self._state is None:
            return None
        for said in (self._said, self._said.rstrip()):  # templates trim answers
            if prompt.startswith(said):
                return prompt[len(said) :]
        return None


def _check_begin(engine: Engine, script: Script, max_tokens: int, think: bool) -> None:
    try:
        prompt = engine.tokenizer.render(script.messages[: script.turns[0]], think=think)
        ids = engine.tokenizer.encode(prompt)
    except EngineError as problem:
        raise EngineError(f"{script.where}: {problem}") from None
    limit = engine.config.max_position_embeddings
    if len(ids) + max_tokens > limit:
        raise EngineError(
            f"{script.where}: {len(ids)} prompt + {max_tokens} new tokens; this model was made for {limit} at most"
        )
