"""From token ids to text as it grows: no half characters, no special tokens, reasoning kept apart from the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

OPEN, CLOSE = "<think>", "</think>"
BROKEN = "\ufffd"  # what a decoder shows for bytes that are no character (yet)


@dataclass
class TextStream:
    """Turns ids into text piece by piece; the pieces together are the text of all ids.

    decode  ids -> text, special tokens left out
    A piece that ends inside a character is held back until the rest arrives.
    """

    decode: Callable[[list[int]], str]
    _ids: list[int] = field(default_factory=list)
    _shown: int = 0  # ids whose text has been handed out
    _context: int = 0  # decoding starts here: some decoders treat the first id of a text differently

    def push(self, token_id: int) -> str:
        """The text this id completes, "" while a character is still open."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """Whatever was still held back."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self.decode(self._ids[self._context : self._shown])
        now = self.decode(self._ids[self._context :])
        if (now.endswith(BROKEN) and not final) or len(now) <= len(before):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return now[len(before) :]


@dataclass
class ReasoningSplit:
    """Sends text to reasoning or answer as `<think>` and `</think>` come by.

    thinking  True when the prompt itself has opened `<think>`
    Tags may arrive in pieces; a tail that could still become a tag is held back. White space around the reasoning and
    before the answer that follows it belongs to neither.
    """

    thinking: bool = False
    _tail: str = ""
    _trim: bool = False  # nothing but white space has come since the last tag

    def __post_init__(self):
        self._trim = self.thinking

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that this text adds."""
        self._tail += text
        out = ["", ""]
        while True:
            places = [(at, tag) for tag in (OPEN, CLOSE) if (at := self._tail.find(tag)) >= 0]
            if not places:
                break
            at, tag = min(places)
            self._emit(out, self._tail[:at], ends=True)
            self._tail = self._tail[at + len(tag) :]
            self.thinking = tag == OPEN
            self._trim = True
        held = _could_become_tag(self._tail)
        if self.thinking:  # trailing white space may turn out to be the end of the reasoning
            held = len(self._tail) - len(self._tail[: len(self._tail) - held].rstrip())
        ready = len(self._tail) - held
        self._emit(out, self._tail[:ready], ends=False)
        self._tail = self._tail[ready:]
        return out[0], out[1]

    def finish(self) -> tuple[str, str]:
        """What was held back and is no tag after all."""
        out = ["", ""]
        self._emit(out, self._tail, ends=True)
        self._tail = ""
        return out[0], out[1]

    def _emit(self, out: list[str], text: str, ends: bool) -> None:
        if self._trim:
            text = text.lstrip()
        if self.thinking and ends:
            text = text.rstrip()
        if text:
            self._trim = False
            out[0 if self.thinking else 1] += text


def _could_become_tag(text: str) -> int:
    """Length of the longest end of `text` that is the beginning of a tag."""
    for length in range(min(len(text), len(CLOSE) - 1), 0, -1):
        end = text[-length:]
        if OPEN.startswith(end) or CLOSE.startswith(end):
            return length
    return 0
