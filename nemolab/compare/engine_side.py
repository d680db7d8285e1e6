"""What the engine says: logits of a prompt pass, of single steps, and the tokens it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nemolab.compare.measures import SelfCheck, check_self

if TYPE_CHECKING:
    from nemolab.engine import Engine

GREEDY_TOKENS = 64
# Positions of each text that are also fed token by token.
DECODE_TOKENS = 128


@dataclass
class EngineReading:
    """What the engine made of one text.

    prompt        [tokens, vocabulary] logits of the prompt pass
    decode        [n, vocabulary] logits of single steps; the first of them belongs to position `decode_start`
    written       greedy tokens after the whole text
    """

    prompt: torch.Tensor
    decode: torch.Tensor
    decode_start: int
    written: list[int]

    def prompt_rows(self, start: int, stop: int) -> torch.Tensor:
        return self.prompt[start:stop]

    def decode_rows(self, start: int, stop: int) -> torch.Tensor:
        return self.decode[start - self.decode_start : stop - self.decode_start]


def read_text(engine: Engine, ids: list[int]) -> EngineReading:
    """One prompt pass over the text, greedy tokens behind it; and the end of the text once more, token by token."""
    state = engine.new_state()
    prompt = engine.prefill(ids, state)
    written = write_greedily(engine, prompt[-1], state, GREEDY_TOKENS)
    last = len(ids) - 1
    start = max(last - DECODE_TOKENS, 0)
    return EngineReading(prompt, step_through(engine, ids[:last], start), start, written)


def read_again(engine: Engine, ids: list[int], decode_start: int) -> EngineReading:
    """What another engine makes of the same text: one prompt pass, and the same end of it token by token."""
    prompt = engine.prefill(ids, engine.new_state())
    return EngineReading(prompt, step_through(engine, ids[:-1], decode_start), decode_start, [])


def write_greedily(engine: Engine, logits: torch.Tensor, state, count: int) -> list[int]:
    """`count` tokens, each the first choice after what came before; stop ids do not stop it."""
    written = []
    for _ in range(count):
        written.append(int(logits.argmax()))
        if len(written) < count:
            logits = engine.step(written[-1], state)
    return written


def step_through(engine: Engine, ids: list[int], start: int) -> torch.Tensor:
    """Logits after each of ids[start:], fed one at a time behind a prompt pass over ids[:start]."""
    state = engine.new_state()
    if start:
        engine.prefill(ids[:start], state)
    rows = torch.empty(len(ids) - start, engine.config.vocab_size)
    for row, token in zip(rows, ids[start:], strict=True):
        row[:] = engine.step(token, state)
    return rows


def check_engine_itself(engine: Engine, ids: list[int]) -> SelfCheck:
    """The engine's one pass against its own token by token."""
    one_pass = engine.prefill(ids, engine.new_state())
    return check_self(one_pass=one_pass, token_by_token=step_through(engine, ids, 0))
