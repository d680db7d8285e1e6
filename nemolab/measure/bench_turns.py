"""Turns of a prompt and an answer, with prompts that pass the cache by and with prompts whose experts enter it.

A prompt needs nearly all experts of a layer. Kept (`Trials.prompt_enters`), they may spare the answer some reads, but
they push out what the answer before had gathered. Which weighs more is measured here: two engines are fed the same ids,
each keeps its cache from turn to turn, and every logit must be equal to the bit. The first turn of an engine fills the
cache, compiles what has to be compiled and is not counted.

Both are fed, not asked: an answer's tokens are the next ids of the same stream. Tokens go where the model's routers
send them, so that answers share their experts with prompts as far as those of this model do.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from nemolab import paths
from nemolab.engine.transfers import DEFAULT
from nemolab.errors import NemolabError, UsageError
from nemolab.measure.bench_card_decode import fit_together
from nemolab.measure.bench_replay import CACHED_SHARE
from nemolab.measure.versus import Versus
from nemolab.progress import say

SIDES = {"passes": "pass the cache by", "enters": "enter the cache"}  # in words
PHASES = {"prompt": "prefill", "token": "decode"}  # as rows name them, and as an engine counts them
FLATTENED = 2.7  # of the ranks of words: how often they come falls as 1 / (rank + this), which fits most languages
_SAID = {"second is faster": "slower", "first is faster": "faster", "no difference": "no difference"}


def bench_turns(
    path: str | Path,
    *,
    device: str = "cuda",
    transfer: str | None = None,
    cached: float = CACHED_SHARE,
    prefetch: int = 0,
    prompt_tokens: int = 64,
    tokens: int = 8,
    turns: int = 3,
    repeats: int = 1,
    vram_gib: float | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Milliseconds of a prompt and of a token behind it, by whether prompts' experts enter the RAM cache.

    path      a checkpoint or a store; cached  the share of its experts that stay in RAM, of 0 to 1
    prefetch  guesses read ahead a layer, in answers
    prompt_tokens, tokens  of a turn: those of the prompt in one pass, those of the answer one by one
    turns     of a conversation; repeats  conversations: each turn of each is a sample, 3 are needed
    vram_gib  what each engine may take of a card; they then follow one another, since the limit is the process's
    returns   for each side (passes: the rule, enters: the trial) <side>_prompt_ms and <side>_token_ms (medians, with
              _least and _most), <side>_<phase>_hit_rate (a prompt looks up each expert once a layer), _bytes_read (of
              a prompt, and a token); prompt_of_passes and token_of_passes (median of enters over that of passes),
              with _low and _high (of single turns) and _verdict; same_bits; ids; rows
    Raises UsageError for settings that cannot be, EngineError for what an engine refuses, NemolabError where the sides
    give different logits.
    """
    from nemolab.engine.arguments import find_store
    from nemolab.engine.chat import Tokenizer
    from nemolab.engine.gpu.device import open_device

    if not 0 < cached <= 1:
        raise UsageError(f"{cached} of the experts cached; a share above 0 and up to 1 is needed")
    if min(prompt_tokens, tokens, turns, repeats) < 1 or turns * repeats < 3:
        asked = f"{turns} turns of {prompt_tokens} + {tokens} tokens, {repeats} times"
        raise UsageError(f"{asked}; 1 of each and 3 turns in all at least are needed")
    card = None if device == "cpu" else open_device(device)
    store = find_store(path, None, "neuron")
    config, each = store.config, prompt_tokens + tokens
    if turns * each > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise UsageError(f"{turns} turns of {each} tokens, but this model was made for {limit}: take fewer, or shorter")
    slots = max(config.top_k, round(cached * store.n_layers * store.n_experts))
    stream, source = open_ids(Tokenizer(store.small_file, str(path)), store, config.vocab_size)
    first, *parts = [list(islice(stream, each)) for _ in range(1 + repeats * turns)]
    talks = [parts[begin : begin + turns] for begin in range(0, len(parts), turns)]
    settings = {"store": store, "device": device, "transfer": transfer, "vram_gib": vram_gib, "threads": threads}
    settings |= {"ram_cache_slots": slots, "prefetch": prefetch}
    sides = [_Side(name, prompt_tokens, settings) for name in SIDES]
    together = vram_gib is None and fit_together(store, slots, len(sides), on_card=card is not None)
    if together:
        _measure(sides, talks, first)
    else:
        for number, talk in enumerate(talks):
            for side in _in_turn(sides, number):
                _measure([side], [talk], first)
    if sides[0].bits != sides[1].bits:
        raise NemolabError("a prompt that enters the cache gives other logits than one that passes it by")
    with closing(store.open_reader()) as reader:
        reads_are = reader.mode
    facts = {
        "model": Path(path).name,
        "device": card.name if card else device,
        "transfer": (transfer or DEFAULT) if card else None,
        "ids": source,
        "layers": config.num_hidden_layers,
        "moe_layers": store.n_layers,
        "experts": store.n_experts,
        "top_k": config.top_k,
        "cached": slots / (store.n_layers * store.n_experts),
        "slots": slots,
        "prefetch": prefetch,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "turns": turns,
        "repeats": repeats,
        "vram_gib": vram_gib,
        "threads": sides[0].threads,
        "in_turns": together,
        "reads_are": reads_are,
    }
    kind = "turns" if card is None else "card_turns" if card.total_bytes else "twin_turns"
    return _answer(kind, sides, facts)


def open_ids(tokenizer, store, vocab_size: int) -> tuple[Iterator[int], str]:
    """Ids without an end, and in words what they are: the shipped texts and prompts where the tokenizer knows words.

    One that spells them byte by byte, as a synthetic checkpoint's, would make prompts of fifty different ids.
    """
    from nemolab.engine.scripts import read_prompts, read_texts

    if store.small_file("tokenizer.json") is not None:
        prompts = read_prompts(paths.traces_folder() / "prompts.jsonl")
        texts = [text.text for text in read_texts(paths.texts_folder())]
        texts += [message["content"] for script in prompts for message in script.messages]
        text = "\n".join(texts)
        ids = tokenizer.encode(text)
        if 2 * len(ids) <= len(text.encode()):
            return cycle(ids), f"text: {len(ids)} tokens of data/texts and data/traces/prompts.jsonl, over again"
    return draw_ids(vocab_size), f"drawn of {vocab_size}: by rank r as often as 1 / (r + {FLATTENED}), seed 0"


def draw_ids(vocab_size: int, seed: int = 0) -> Iterator[int]:
    """Ids as frequent as words are, the ranks dealt at random."""
    random = np.random.default_rng(seed)
    ids, often = random.permutation(vocab_size), 1 / (np.arange(1, vocab_size + 1) + FLATTENED)
    while True:
        yield from random.choice(ids, size=4096, p=often / often.sum()).tolist()


class _Side:
    """One engine, its conversation, and what was found. .samples  by phase, ms; .counts  by phase, a turn each."""

    def __init__(self, name: str, prompt_tokens: int, settings: dict[str, Any]):
        self.name, self.enters = name, name == "enters"
        self._prompt_tokens, self._settings = prompt_tokens, settings
        self.samples: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.counts: dict[str, list[dict[str, int]]] = {phase: [] for phase in PHASES}
        self.bits: list[str] = []  # of the logits of each turn
        self.threads = 0

    def open(self, stack: ExitStack) -> None:
        from nemolab.engine import Engine, Trials

        trials = Trials(prompt_enters=self.enters)
        engine = self._engine = stack.enter_context(Engine(None, trials=trials, **self._settings))
        stack.callback(self._let_go)
        self.threads = engine.threads

    def _let_go(self) -> None:
        """Before the engine closes: another one's memory is not to be shared with this conversation."""
        self._state = self._engine = None

    def begin(self) -> None:
        self._state = self._engine.new_state()

    def take_turn(self, ids: list[int], counted: bool = True) -> None:
        engine, rest = self._engine, ids[self._prompt_tokens :]
        before = engine.stats()
        started = time.perf_counter()
        logits = [engine.last_logits(ids[: self._prompt_tokens], self._state)]
        answered = time.perf_counter()
        logits += [engine.step(token, self._state) for token in rest]
        ended = time.perf_counter()
        after, digest = engine.stats(), hashlib.sha256()
        for values in logits:
            digest.update(values.numpy().tobytes())
        self.bits.append(digest.hexdigest())
        if counted:
            took = {"prompt": answered - started, "token": (ended - answered) / len(rest)}
            for phase, kept in PHASES.items():
                old = before.get(kept, {})
                new = {
                    name: after[kept][name] - old.get(name, 0) for name in ("hits", "lookups", "reads", "bytes_read")
                }
                self.samples[phase].append(1e3 * took[phase])
                self.counts[phase].append(new)

    def found(self, phase: str, tokens: int) -> dict[str, Any]:
        """Of all turns: the share of lookups that hit; reads and bytes, of a prompt or a token."""
        total = {name: sum(turn[name] for turn in self.counts[phase]) for name in self.counts[phase][0]}
        parts = len(self.counts[phase]) * (1 if phase == "prompt" else tokens)
        rate = total["hits"] / total["lookups"]
        return {"hit_rate": rate} | {name: total[name] / parts for name in ("reads", "bytes_read")}


def _in_turn(sides: list[_Side], number: int) -> list[_Side]:
    return sides[:: 1 if number % 2 == 0 else -1]


def _measure(sides: list[_Side], talks: list[list[list[int]]], first: list[int]) -> None:
    """Open engines side by side, let each warm up on a turn, and hold conversations. Who comes first alternates."""
    with ExitStack() as stack:
        for side in sides:
            say(f"turns, prompts that {SIDES[side.name]}: opening and warming up")
            side.open(stack)
            side.begin()
            side.take_turn(first, counted=False)
        number = 0
        for talk in talks:
            for side in sides:
                side.begin()
            for ids in talk:
                for side in _in_turn(sides, number):
                    side.take_turn(ids)
                number += 1


def _answer(kind: str, sides: list[_Side], facts: dict[str, Any]) -> dict[str, Any]:
    """Medians, ratios, rows. kind: of the rows' names; twins' are no card's."""
    answer: dict[str, Any] = {}
    rows = []
    for side in sides:
        for phase, values in side.samples.items():
            found, name = side.found(phase, facts["tokens"]), f"{side.name}_{phase}"
            spread = {"ms": statistics.median(values), "least": min(values), "most": max(values)}
            answer |= {f"{name}_{what}": value for what, value in (spread | found).items()}
            settings = facts | found | {"prompt_enters": side.enters}
            unit = "ms" if phase == "prompt" else "ms/token"
            rows.append({"name": f"{kind}.{name}", "values": values, "unit": unit, "settings": settings})
    passes, enters = sides
    for phase in PHASES:
        both = Versus(tuple(enters.samples[phase]), tuple(passes.samples[phase]))
        answer |= {f"{phase}_of_passes": both.ratio, f"{phase}_verdict": _SAID[both.verdict]}
        answer |= {f"{phase}_of_passes_low": min(both.ratios), f"{phase}_of_passes_high": max(both.ratios)}
        row = {"name": f"{kind}.{phase}_of_passes", "values": both.ratios, "unit": "ratio", "settings": facts}
        rows.append(row)
    return answer | {"same_bits": True, "ids": facts["ids"], "rows": rows}
