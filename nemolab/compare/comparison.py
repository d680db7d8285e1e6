"""The whole comparison: engine against reference on texts, greedy writing, controls that must fail, determinism."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nemolab.checkpoint import Checkpoint
from nemolab.compare import memory
from nemolab.compare.controls import CONTROLS, MUST_REACH_NATS, Control, TamperedStore, judge_control, measure_control
from nemolab.compare.determinism import PROMPT_TOKENS, STEPS, Determinism, OtherProcess, repeat_runs
from nemolab.compare.engine_side import EngineReading, check_engine_itself, read_again, read_text
from nemolab.compare.measures import Divergence, check_self, diverge, score, score_greedy
from nemolab.compare.reference import Reading, Reference
from nemolab.compare.result import Bounds, Result, TextResult
from nemolab.compare.texts import Text, Texts, Tokens, load_texts
from nemolab.engine.arguments import check_place
from nemolab.engine.transfers import TRANSFERS
from nemolab.engine.trials import Trials
from nemolab.errors import NemolabError
from nemolab.progress import Progress
from nemolab.store import Store, check_source, ensure_store
from nemolab.system.memory import read_rss_bytes, reset_peak_rss

if TYPE_CHECKING:
    from nemolab.engine import Engine

# Mean KL, in nats, up to which two float32 implementations on a CPU are the same model.
KL_BOUND = 1e-6
SELF_CHECK_BOUND = 1e-6
# The same for an engine on a card, whose prompts round what goes into a matrix to BF16.
KL_BOUND_CARD = 3e-3
# A stretch this many Mamba chunks long crosses two borders between chunks and ends inside one.
SELF_CHECK_CHUNKS = 2.25

# Names of the reference's two readings of that stretch; no text can have them.
_ONE_PASS, _TOKEN_BY_TOKEN = "\0one pass", "\0token by token"


def compare(
    path: str | Path,
    *,
    store: Store | str | Path | None = None,
    texts: Texts = None,
    progress: Progress | None = None,
    device: str = "cpu",
    vram_gib: float | None = None,
) -> dict:
    """Hold the engine against transformers' float32 model of the same checkpoint.

    path      checkpoint folder; the reference reads its files, never the store
    store     store of that checkpoint (opened, or a folder); None: the one in the cache folder, made if need be
    texts     None: `data/texts`; or a folder, files, or a mapping of names to strings or token ids
    progress  called with (done, total) after each part of the work
    device    of the engine, as `Engine` takes it; the reference stays on the CPU
    vram_gib  of a card's memory, for each engine on it: one at a time is open

    Returns the document of `nemolab compare --json`: `texts`, `controls`, `deterministic`, `passed`, `problems`, and
    how each figure was taken. Raises NemolabError (of any kind) when something could not be measured at all.
    """
    where = {"device": device, "vram_gib": vram_gib}
    return Comparison(path, store=store, texts=texts, progress=progress, **where).run().to_dict()


class Comparison:
    """One comparison in stages. The engine is closed before the reference reads, and opened anew for the controls."""

    def __init__(self, path, *, store=None, texts=None, progress=None, device="cpu", vram_gib=None):
        self.device = check_place(device, None, vram_gib, Trials())
        self._where = {"device": self.device, "vram_gib": vram_gib}
        self.checkpoint = open_checkpoint(path)
        self.config = self.checkpoint.config
        self.tokens = Tokens(self.checkpoint)
        self.texts = load_texts(texts, self.tokens, self.config.vocab_size)
        self.stretch = join_stretch(self.texts, self.config.chunk_size)
        self.seconds: dict[str, float] = {}
        with self._timed("store"):
            self.store = open_store(self.checkpoint, store)
        # Each text and the stretch in the engine, the repeats, the reference's layers, each control on each text.
        self._total = len(self.texts) + 2 + self.config.num_hidden_layers + 1 + len(CONTROLS) * len(self.texts)
        self._total += 0 if device == "cpu" else len(self.texts)  # each in the engine on the CPU, too
        self._done, self._progress = 0, progress

    def run(self) -> Result:
        prompt, slots = self.texts[0].ids[:PROMPT_TOKENS], self.config.top_k
        with self._timed("engine"), self.make_engine() as engine:
            readings = {text.name: self._do(read_text, engine, text.ids) for text in self.texts}
            engine_check = self._do(check_engine_itself, engine, self.stretch)
        beside_cpu = self.read_cpu_engine(readings) if self.device != "cpu" else {}
        with self._timed("determinism"):
            ways = [] if self.device == "cpu" else [{"transfer": way} for way in TRANSFERS]
            runs = self._do(repeat_runs, self.make_engine, prompt, slots, ways)
        # The other process works beside the reference: by then this one holds no engine.
        with OtherProcess(self.checkpoint.path, self.store.path, prompt, slots, self._where) as other:
            with self._timed("reference"):
                references, about_reference = self.read_reference(readings)
            with self._timed("other_process"):
                runs["another process"] = other.wait()
        with self._timed("measures"):
            reference_check = check_self(
                one_pass=references[_ONE_PASS].logits(), token_by_token=references[_TOKEN_BY_TOKEN].logits()
            )
            texts = [
                self.measure(text, readings.pop(text.name), references[text.name], beside_cpu.get(text.name))
                for text in self.texts
            ]
        with self._timed("controls"):
            controls = [self.run_control(control, references) for control in CONTROLS]
        self.seconds["total"] = sum(self.seconds.values())
        return Result(
            texts=texts,
            controls=controls,
            determinism=Determinism(len(prompt), STEPS, runs),
            self_checks={"reference": reference_check, "engine": engine_check},
            bounds=self.bounds,
            reference=about_reference,
            about={
                "model": self.checkpoint.path.resolve().name,
                "tokenizer_sha256": self.tokens.sha256,
                "store_layout": self.store.layout,
                **self._where,
                "threads": torch.get_num_threads(),
            },
            seconds=self.seconds,
        )

    def make_engine(self, store: Store | None = None, **settings) -> Engine:
        from nemolab.engine import Engine

        return Engine(self.checkpoint.path, store=store or self.store, **self._where | settings)

    def read_cpu_engine(self, readings: dict[str, EngineReading]) -> dict[str, tuple[Divergence, Divergence]]:
        """By text: how far the card's engine lies from the CPU's, KL(CPU || card), in the prompt pass and in decode."""
        with self._timed("cpu_engine"), self.make_engine(device="cpu", vram_gib=None) as engine:
            return {text.name: self._do(self._diverge_from, engine, text, readings[text.name]) for text in self.texts}

    def _diverge_from(self, engine: Engine, text: Text, card: EngineReading) -> tuple[Divergence, Divergence]:
        cpu, last = read_again(engine, text.ids, card.decode_start), len(text.ids) - 1
        stretches = (
            (cpu.prompt_rows, card.prompt_rows, range(last)),
            (cpu.decode_rows, card.decode_rows, range(card.decode_start, last)),
        )
        return tuple(
            diverge(text.ids, reference=theirs, engine=ours, rows=rows, token_text=self.tokens.show)
            for theirs, ours, rows in stretches
        )

    @property
    def bounds(self) -> Bounds:
        if self.device == "cpu":
            return Bounds(KL_BOUND, SELF_CHECK_BOUND, MUST_REACH_NATS)
        # After a rounded prompt greedy tokens may part where the reference sees two choices close together.
        return Bounds(KL_BOUND_CARD, SELF_CHECK_BOUND, MUST_REACH_NATS, KL_BOUND_CARD, same_greedy=False)

    def read_reference(self, readings: dict[str, EngineReading]) -> tuple[dict[str, Reading], dict]:
        """Everything the reference has to say, in one pass over its weights; and how it was made."""
        sequences = {text.name: text.ids + readings[text.name].written for text in self.texts}
        sequences |= {_ONE_PASS: self.stretch, _TOKEN_BY_TOKEN: self.stretch}
        reference = Reference(self.checkpoint)
        alone = reset_peak_rss()
        before_bytes, _ = read_rss_bytes()
        predicted = memory.predict_reference_peak(self.config, [len(ids) for ids in sequences.values()])
        first = self._done
        references = reference.read(
            sequences, stepwise=(_TOKEN_BY_TOKEN,), progress=lambda done, total: self._reach(first + done)
        )
        _, peak_bytes = read_rss_bytes()
        about = reference.settings | {
            "peak_rss_bytes": peak_bytes,
            "rss_before_bytes": before_bytes,  # with torch, transformers and the engine's logits
            "peak_since": "the reference began" if alone else "the process began",
            "rise_predicted_bytes": predicted.rise_bytes,
            "peak_predicted_bytes": predicted.peak_bytes,  # of a process that does nothing else
            "peak_arithmetic": predicted.to_dict(),
            "tensors_left_aside": len(reference.weights.unused()),
        }
        return references, about

    def measure(
        self,
        text: Text,
        engine: EngineReading,
        reference: Reading,
        beside_cpu: tuple[Divergence, Divergence] | None = None,
    ) -> TextResult:
        """All figures of one text. The last position is left out: what follows it is not in the text."""
        last = len(text.ids) - 1

        def divergence(rows_of_engine, rows):
            return diverge(
                text.ids, reference=reference.logits, engine=rows_of_engine, rows=rows, token_text=self.tokens.show
            )

        return TextResult(
            text=text,
            perplexity=score(text.ids, reference=reference.logits, engine=engine.prompt_rows),
            prompt=divergence(engine.prompt_rows, range(last)),
            decode=divergence(engine.decode_rows, range(engine.decode_start, last)),
            greedy=score_greedy(engine.written, reference.logits(last, last + len(engine.written))),
            closest_routing_gap=float(reference.gap[: len(text.ids)].min()),
            beside_cpu=beside_cpu,
        )

    def run_control(self, control: Control, references: dict[str, Reading]) -> dict:
        """Every text under a broken engine."""
        with self.make_engine(TamperedStore(self.store, control)) as engine:
            return judge_control(
                control,
                [self._do(measure_control, engine, text, references[text.name].logits) for text in self.texts],
            )

    def _do(self, work: Callable, *arguments):
        """One part of the work; said to be done afterwards."""
        result = work(*arguments)
        self._reach(self._done + 1)
        return result

    def _reach(self, done: int) -> None:
        self._done = done
        if self._progress:
            self._progress(done, self._total)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - began


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint to compare; a store is refused with the way out."""
    if (Path(path) / "manifest.json").is_file():
        raise NemolabError(
            f"{path} is a store; the reference reads the vendor's own files, so name the checkpoint it was made from:"
            f" nemolab compare CHECKPOINT --store {path}"
        )
    return Checkpoint.open(path)


def open_store(checkpoint: Checkpoint, store: Store | str | Path | None) -> Store:
    """The store the engine will read, made if none was named. Raises NemolabError when it is another checkpoint's."""
    if store is None:
        store = ensure_store(checkpoint.path)
    if not isinstance(store, Store):
        store = Store.open(store)
    check_source(store, checkpoint, look=True)
    return store


def join_stretch(texts: list[Text], chunk_size: int) -> list[int]:
    """Tokens for the self-checks: the texts one after another, repeated until they cross two borders of chunks."""
    length = int(SELF_CHECK_CHUNKS * chunk_size) + 1
    everything = [token for text in texts for token in text.ids]
    return (everything * (length // len(everything) + 1))[:length]
