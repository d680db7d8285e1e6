"""The engine: one model, ready to answer, with its experts read on demand.

    with Engine("data/tiny", ram_cache_gib=4) as engine:
        print(engine.chat([{"role": "user", "content": "What is TCP?"}]).text)

Everything it takes (threads, descriptors, memory) goes back when the block ends, also by an exception.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from nemolab.engine import memory
from nemolab.engine.arguments import check_place, check_prefetch, check_threads, find_store, open_card, torch_threads
from nemolab.engine.chat import Tokenizer, opens_thinking
from nemolab.engine.model import Model
from nemolab.engine.passes import check_id, check_ids, check_length, check_state
from nemolab.engine.phases import Clock, Clocks, join_stats, subtract_stats
from nemolab.engine.recording import make_recorder
from nemolab.engine.sampling import Sampler
from nemolab.engine.state import Mark, State
from nemolab.engine.text_stream import ReasoningSplit, TextStream
from nemolab.engine.trials import NO_TRIALS, Trials
from nemolab.engine.turns import Turns
from nemolab.errors import EngineError
from nemolab.kernels.team import Team
from nemolab.kernels.warm_up import warm_up
from nemolab.progress import say
from nemolab.store import ExpertCache, Store
from nemolab.store.cache import RING
from nemolab.store.counts import NOTHING
from nemolab.system.memory import read_rss_bytes
from nemolab.trace import Recorder

PASS_TOKENS = 8192  # longest stretch of a prompt that goes through the layers at once; bounds the activations
LOGIT_TOKENS = 256  # rows of logits made at once where not all are asked for together


@dataclass(frozen=True)
class ChatResult:
    """One answer.

    text               without special tokens and without the reasoning
    reasoning          what stood between the think tags; "" when there was none
    completion_tokens  ids written, reasoning included, the stop id not
    finish_reason      "stop" at a stop id, "length" when max_tokens cut it
    stats              by phase, for this answer alone, as of `Engine.stats`
    """

    text: str
    reasoning: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    stats: dict


@dataclass(frozen=True)
class ChatPiece:
    """What one step of a streamed answer adds. The last piece is empty and carries the whole `result`."""

    text: str = ""
    reasoning: str = ""
    result: ChatResult | None = None


class Engine:
    """NemotronH over a checkpoint folder or a store, on the CPU or on a CUDA card.

    path             a checkpoint folder (a store is made in the cache folder, once) or a store folder
    ram_cache_gib    RAM for experts; or ram_cache_slots, a number of them; default: all, or half of the free memory
    store            use this store (an opened one, or a path) instead of finding one for `path`
    device           "cpu"; "cuda", "cuda:1", ...; "twin": the card's engine by its kernels' plain twins, on the CPU
    transfer         on a card, how experts reach the arithmetic: "pull" (default), "rows", "grouped" or "whole"; no bit
                     of an answer depends on it
    vram_gib         on a card, what the engine may take of its memory; default: all that is there
    prefetch         of the experts guessed for the next MoE layer, how many are read while a layer computes (in decode)
    policy           what leaves the cache: a name of `nemolab.policy.POLICIES`, none that must know the future
    reader_threads   reads in flight
    threads          arithmetic threads; default: torch's number
    layout           of a store made on the way
    trials           what may be tried, as `nemolab.engine.trials` says; no bit of an answer depends on it
    .budget          a CacheBudget: what the cache may take, of what, and what stays free
    Raises EngineError where the memory does not suffice, StoreError and CheckpointError for unfit files.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        ram_cache_gib: float | None = None,
        ram_cache_slots: int | None = None,
        store: Store | str | Path | None = None,
        device: str = "cpu",
        transfer: str | None = None,
        vram_gib: float | None = None,
        prefetch: int = 0,
        policy: str = "lru",
        reader_threads: int = 32,
        threads: int | None = None,
        layout: str = "neuron",
        trials: Trials = NO_TRIALS,
    ):
        self._model = self._cache = self._team = self._card = None
        self._recorder = self._told = None  # who records, and who the model was told of
        self.threads = check_threads(threads, reader_threads)
        device = check_place(device, transfer, vram_gib, trials)
        self.store = find_store(path, store, layout)
        self.config = self.store.config
        self.tokenizer = Tokenizer(self.store.small_file, str(path or self.store.path))
        self.prefetch = check_prefetch(prefetch, self.config)
        self._clocks, self._turns = Clocks(), Turns()
        try:
            self._card = open_card(self.store, device, transfer, vram_gib, trials)
            self.budget = self._budget(ram_cache_gib, ram_cache_slots)
            self._cache = ExpertCache(
                self.store,
                slots=self.budget.blocks,
                policy=policy,
                threads=reader_threads,
                prompt_enters=trials.prompt_enters,
            )
            self._team = Team(self.threads)
            place = str(self._card.device.torch_device) if self._card else "the CPU"
            self._mark = Mark(place if device != "twin" else "twin", self.store.fingerprint)
            with torch.no_grad():
                if self._card:
                    self._model = self._card.make_model(self._cache, self._team, self.prefetch)
                else:
                    warm_up(say)
                    self._model = Model(self.store, self._cache, self._team, self.prefetch)
        except BaseException:
            self.close()
            raise

    def _budget(self, gib: float | None, slots: int | None) -> memory.CacheBudget:
        dense_bytes = self._card.host_bytes if self._card else sum(m.nbytes for m in self.store.dense.values())
        memory.check_room(dense_bytes, "the dense weights")
        return memory.plan_cache(
            self.store.block_bytes,
            self.store.n_layers * self.store.n_experts,
            self.config.top_k,
            ring=2 * min(RING, self.store.n_experts),  # two banks: one is read while the other is used
            dense_bytes=dense_bytes,
            gib=gib,
            slots=slots,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Give threads, descriptors and memory back, once a pass of another thread is over. Closing twice is fine."""
        with self._turns.close(), ExitStack() as stack:  # each whatever the others raise, the last named first
            for name in ("_cache", "_card", "_team"):
                stack.callback(self._close_part, name)
            self._model = None

    def _close_part(self, name: str) -> None:
        if getattr(self, name) is not None:
            getattr(self, name).close()
        setattr(self, name, None)  # not before: what an interrupt leaves unclosed is closed the next time

    @property
    def notes(self) -> list[str]:
        """What was missing or odd, and what was done about it."""
        return [*self.config.notes, *self.tokenizer.notes]

    def new_state(self) -> State:
        """The state before the first token of a conversation. Raises EngineError where a card's memory ends."""
        with self._turns.take():
            self._turns.check()
            state = self._model.new_state() if self._card else State.empty(self.config)
        state.mark = self._mark
        return state

    def prefill(self, ids: Iterable[int], state: State) -> torch.Tensor:
        """Feed ids to a state (new or continued) and return the logits after each, float32 [ids, vocab].

        For long prompts `last_logits` and `logits_in_pieces` need far less memory.
        """
        ids = check_ids(ids, self.config)
        with self._turns.take(), self._prompt(ids, state) as parts:
            return torch.cat([self._model.logits(self._model.prompt(part, state)) for part in parts])

    def last_logits(self, ids: Iterable[int], state: State) -> torch.Tensor:
        """Feed ids to a state and return the logits after the last one, float32 [vocab]."""
        ids = check_ids(ids, self.config)
        with self._turns.take(), self._prompt(ids, state) as parts:
            for part in parts:
                last = self._model.prompt(part, state)[-1:].clone()  # the rest's memory goes before the next part
            return self._model.logits(last)[0]

    def logits_in_pieces(
        self, ids: Iterable[int], state: State, piece_tokens: int = LOGIT_TOKENS
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """As `prefill`, but (first position, logits [up to piece_tokens, vocab]) one after the other."""
        ids = check_ids(ids, self.config)
        with self._turns.take(), self._prompt(ids, state) as parts:
            hidden = [self._model.prompt(part, state).cpu() for part in parts]
        start = 0
        for part in hidden:
            for first in range(0, part.shape[0], piece_tokens):
                with self._turns.take(), torch.no_grad(), torch_threads(self.threads):
                    self._turns.check()
                    piece = self._model.logits(part[first : first + piece_tokens])
                yield start + first, piece
            start += part.shape[0]

    def step(self, token_id: int, state: State) -> torch.Tensor:
        """Feed one token and return the logits after it, float32 [vocab]."""
        token_id = check_id(token_id, self.config)
        with self._turns.take(), self._pass(self._clocks.decode, 1, state):
            return self._model.step(token_id, state)

    def generate(
        self,
        prompt_ids: Iterable[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop_ids: Iterable[int] | None = None,
        state: State | None = None,
    ) -> Iterator[int]:
        """Token ids after a prompt, one at a time, until a stop id (which is not handed out) or max_tokens.

        stop_ids  default: the checkpoint's end-of-sequence ids; () never stops
        state     continue this one; it then holds the prompt and all ids but the last
        """
        ids = check_ids(prompt_ids, self.config)
        sampler = Sampler(temperature, top_p, top_k, seed)
        stops = frozenset(self.config.eos_token_ids if stop_ids is None else stop_ids)
        check_state(state, self._mark, new_too=True)
        check_length(len(ids), max_tokens, state, self.config)
        return self._generate(ids, max_tokens, sampler, stops, state or self.new_state())

    def _generate(self, ids, max_tokens, sampler, stops, state) -> Iterator[int]:
        logits = self.last_logits(ids, state)
        for written in range(1, max_tokens + 1):
            token = sampler.choose(logits.numpy())
            if token in stops:
                return
            yield token
            if written < max_tokens:
                logits = self.step(token, state)

    def chat(
        self,
        messages: list[dict],
        *,
        think: bool = False,
        max_tokens: int = 256,
        stream: bool = False,
        tools: list[dict] | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> ChatResult | Iterator[ChatPiece]:
        """Answer a conversation. With `stream`, an iterator of ChatPiece whose last one carries the ChatResult."""
        prompt = self.tokenizer.render(messages, think=think, tools=tools)
        ids = self.tokenizer.encode(prompt)
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        tokens = self.generate(ids, max_tokens=max_tokens, **sampling)
        pieces = self._pieces(len(ids), tokens, max_tokens, opens_thinking(prompt))
        if stream:
            return pieces
        for piece in pieces:
            if piece.result is not None:
                return piece.result
        raise EngineError("the answer ended without a result")

    def _pieces(self, prompt_tokens, tokens, max_tokens, thinking) -> Iterator[ChatPiece]:
        before = self.stats()
        words, split = TextStream(self.tokenizer.decode_with_tags), ReasoningSplit(thinking)
        reasoning, text, written = "", "", 0
        for token in tokens:
            written += 1
            more = split.push(words.push(token))
            reasoning, text = reasoning + more[0], text + more[1]
            if any(more):
                yield ChatPiece(more[1], more[0])
        tail = split.push(words.finish())
        end = split.finish()
        more = (tail[0] + end[0], tail[1] + end[1])
        reasoning, text = reasoning + more[0], text + more[1]
        if any(more):
            yield ChatPiece(more[1], more[0])
        finish = "length" if written == max_tokens else "stop"
        stats = subtract_stats(before, self.stats())
        yield ChatPiece(result=ChatResult(text, reasoning, prompt_tokens, written, finish, stats))

    def stats(self) -> dict:
        """By phase since the engine was opened: tokens, seconds, tok_s, and what `ExpertCache.stats` counts."""
        cache, _ = self._parts()
        return join_stats(self._clocks, cache.stats(), NOTHING)

    @contextmanager
    def record(self, *, cold: bool = True, token_ids: bool = True, **taken) -> Iterator[Recorder]:
        """Record what every pass in this block routes, guesses, activates and misses: `.trace()` of what is yielded.

        cold       empty the cache first: else a replay, which begins empty, does not meet the same misses
        token_ids  keep what was fed; without, the text cannot be told from the trace
        taken      more to be written down about how it was taken, as JSON: kind, temperature, seed ...
        Raises EngineError while another recording runs.
        """
        recorder = None
        try:
            with self._turns.take():
                self._turns.check()
                if self._recorder is not None:
                    raise EngineError("this engine is being recorded already; end that recording first")
                if cold:
                    self._cache.clear()
                recorder = make_recorder(self.store, self._cache, self._model, self.prefetch, cold, token_ids, taken)
                self._recorder = recorder
                self._tell_recorder()
            yield recorder
        finally:
            # First of all, so that whatever goes wrong from here on, the next pass makes up for it.
            if recorder is not None and self._recorder is recorder:
                self._recorder = None
            with self._turns.take_last():
                if self._model is not None:
                    self._tell_recorder()

    def _tell_recorder(self) -> None:
        """Let the model know who records, if it does not know."""
        recorder = self._recorder  # once: another thread's recording may end meanwhile
        if self._told is not recorder:
            self._told = False  # neither nobody nor somebody: should it end half-way, it is told again
            self._model.set_recorder(recorder)
            self._told = recorder

    def empty_cache(self) -> None:
        """Forget all cached experts: what comes next begins cold."""
        with self._turns.take():
            self._turns.check()
            self._cache.clear()

    def force_routing(self, chosen, guesses=None) -> None:
        """On a card, for benchmarks: tokens choose (and guess) these experts from now on; see `CardModel.force`."""
        with self._turns.take():
            self._turns.check()
            if not self._card:
                raise EngineError("experts are forced on an engine with device='cuda' (or 'twin'); this one has 'cpu'")
            self._model.force(chosen, guesses)

    def memory(self) -> dict:
        """Bytes: this process's memory now and at its peak; the cache's budget and what it was decided on.

        `blocks_now` is less than the `blocks` of the budget once the memory for them was found taken by others.
        On a card also `card`: what was allowed, planned, found and at the peak of its memory, part by part.
        """
        cache, card = self._parts()
        rss_bytes, peak_rss_bytes = read_rss_bytes()
        on_card = {"card": card.memory()} if card else {}
        blocks = {**self.budget.to_dict(), "blocks_now": cache.slots}
        return {"rss_bytes": rss_bytes, "peak_rss_bytes": peak_rss_bytes, "cache": blocks, **on_card}

    def _parts(self) -> tuple:
        """To be looked at also while another thread is at it, even one that closes."""
        cache, card = self._cache, self._card
        self._turns.check()
        return cache, card

    @contextmanager
    def _prompt(self, ids: torch.Tensor, state: State) -> Iterator[tuple[torch.Tensor, ...]]:
        """The ids of a prompt pass, in stretches of PASS_TOKENS."""
        with self._pass(self._clocks.prefill, ids.shape[0], state), torch_threads(self.threads):
            yield ids.split(self._card.pass_tokens if self._card else PASS_TOKENS)

    @contextmanager
    def _pass(self, clock: Clock, tokens: int, state: State) -> Iterator[None]:
        """In one's turn: keep the time, and leave the state marked as broken if the pass does not come to its end."""
        self._turns.check()
        check_state(state, self._mark)
        check_length(tokens, 0, state, self.config)
        if not state.whole:
            raise EngineError("this state was left half-way by a pass that failed; start again from a new one")
        with torch.no_grad():
            self._tell_recorder()
            started = time.perf_counter()
            state.whole = False
            yield
            state.whole = True
            clock.tokens += tokens
            clock.seconds += time.perf_counter() - started
